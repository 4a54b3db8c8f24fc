# cython: language_level=3, freethreading_compatible=True
"""The trainer's end of the rings: takes what a source has asked for."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._core cimport ASK_CALL, PARK, Ring
from cseq._headers cimport *
from cseq._lock cimport Lock, PyThread_get_thread_native_id, RunState, is_deep, rest
from cseq.encoding._codec cimport AS_IT_IS, UNREAD, Decoder
from cseq.engine._streams cimport Request, refer
from cseq.measure._trace cimport cseq_log_add, log
from cseq.order._source cimport Source

from collections import deque

from cseq.encoding.failure import ends_program, of_handler, shorten

cdef struct Ticket:
    uint64_t number
    uint64_t units  # that it counts for
    uint32_t ring
    uint32_t cell
    uint32_t entry  # of its object, among the cells of all rings

cdef uint64_t NONE = <uint64_t>-1

MOST_SKIPPED = 1000  # batches that were left out are listed, the latest

cdef enum:
    ENDED = 2        # a bit of a ticket's status: see stage.py
    MOST_LOOKS = 64  # at tickets, when the loop has waited


@cython.final
cdef class ItemFailure:
    """What there is in place of an item: the exception that was raised while it was made or sent.

    Parameters
    ----------
    error : BaseException
    worker : int
        The number of the one that was to make it; -1: not known.
    """

    cdef readonly object error
    cdef readonly Py_ssize_t worker

    def __cinit__(self, error not None, Py_ssize_t worker=-1):
        self.error, self.worker = error, worker


@cython.final
cdef class Feed:
    """Posts the tickets of a `Source`, and takes out what they ask for.

    A ticket leaves the line in three steps::

        peek     find the ticket whose turn it is, READY; nothing changes
        decode   make the batch from what the cell says; may call anything, may be interrupted
        commit   free the cell, count the batch, post the next ticket: C alone

    An exception before the commit leaves the ticket where it is: the next call finds it again, and
    what was decoded completely is kept for it. No Python code runs between the commit and the return
    to the caller, but destructors of what the commit drops (an unconverted batch), as its last step.

    One thread at a time: that which has the lock of `run`. What runs in the middle of a call (a signal
    handler, a conversion, a destructor) can begin no epoch and take nothing: it may raise, end the
    generation, or call a worker (`Streams.ask`), whose exception may end that worker's items.

    Parameters
    ----------
    run : RunState
    rings : list of Ring
        One shared ring; or queues, one for each worker, in one memory.
    decoder : Decoder
    pool : Pool
        ``await_next()`` returns when the next ticket is ready; it raises StopIteration if no more come,
        and errors of workers. It calls `advance` and `wait`. ``decode(ring, cell, status, slot, capacity,
        record)`` returns the batch, and None; or as the second what is raised in its place, if that is no
        exception of the decoding itself. ``describe(ring, cell, error)`` returns the exception to be
        raised in the loop, and a note: the entry of `skipped`; or of a worker's own items, why these have
        ended. ``list_left(ring, cell, left)`` returns the entries of samples that a batch lacks.
        ``look()`` is called some ten times a second, when a batch is asked for; it may call anything that
        a signal handler may. ``make_next()``, unless None, makes the next batch on this thread instead of
        waiting for it. ``on_cancel(cell)``, unless None, is called before the cell of a ticket that was
        cancelled is freed.
    errors : 'raise', 'skip' or 'return'
        Raise what takes the place of a batch; note it and leave the batch out; or return an
        `ItemFailure`.
    interrupted : str
        What InterruptedError says once the generation is over.

    Attributes
    ----------
    source : Source or None
        What the tickets ask for; None: nothing is under way.
    ticket : int
        Number of the next one.
    generation : int
        The run's, when what is under way was begun.
    taken : int
        Tickets of this epoch that were taken.
    done : int
        Units of these; if a ticket has raised, its units count only once the loop has gone on.
    skipped : deque
        The notes of the batches left out, and of samples.
    place : Place or None
        Epoch, and units before its first ticket, of what was begun; None: nothing is under way.
    ended : bool
        The caller was told that the epoch is over.
    pool_number : int
        What a trace calls it.
    """

    cdef object __weakref__
    cdef readonly Source source
    cdef readonly uint64_t ticket
    cdef uint64_t taken_count  # tickets of this epoch, which any thread reads: see `cseq_count_u64`
    cdef uint64_t now          # ns, of the present step: when a ticket was taken, and the next one posted
    cdef list rings
    cdef cseq_ring** r         # of these
    cdef cseq_ring** asked     # some of them, and `cells`: what is waited for
    cdef uint32_t* cells
    cdef Decoder decoder
    cdef object pool, make_next, on_cancel
    cdef bint queues           # each worker has a ring of its own
    cdef uint64_t runners      # of all rings
    cdef Ticket* buffer        # circular
    cdef Py_ssize_t room, first, length
    cdef Ticket* cancelled     # and still in their cells
    cdef readonly Py_ssize_t cancelled_count
    cdef readonly RunState run
    cdef public uint64_t generation
    cdef public object place
    cdef readonly bint ended
    cdef readonly Py_ssize_t latest  # the ring of what was taken last: of a stream, its worker
    cdef readonly object skipped
    cdef readonly uint64_t skips
    cdef uint64_t done_count     # which any thread reads: see `cseq_count_u64`
    cdef uint64_t units, before  # of what was taken; before the epoch's first ticket
    cdef object interrupted
    cdef bint due              # `pool.look` is to be called
    cdef bint skip, give
    cdef bint ordered
    cdef public unsigned short pool_number  # in a trace
    cdef uint64_t waited       # ns, for the last ticket that was taken
    cdef bint spun             # the head was waited for in vain, without sleeping
    # The ticket that is decoded, and still in the line.
    cdef uint64_t decoded
    cdef object batch, error, note  # `batch`: what `Decoder.take_peeked` is to be given
    cdef uint64_t short        # the ticket whose decoding was short of memory last

    def __cinit__(self, RunState run not None, list rings not None, Decoder decoder not None,
                  pool not None, *, str errors="raise", str interrupted=""):
        cdef Ring ring
        cdef Py_ssize_t k = 0
        for ring in rings:
            self.room += ring.r.capacity
        self.buffer = <Ticket*>PyMem_RawCalloc(2 * self.room, sizeof(Ticket))
        self.r = <cseq_ring**>PyMem_RawCalloc(3 * len(rings), sizeof(cseq_ring*))
        if self.buffer == NULL or self.r == NULL:
            raise MemoryError(f"no memory for {self.room} cells")
        self.asked, self.cells = self.r + len(rings), <uint32_t*>(self.r + 2 * len(rings))
        for ring in rings:
            self.r[k] = ring.r
            self.runners += ring.r.runners
            k += 1
        self.cancelled = self.buffer + self.room
        self.rings, self.decoder = rings, decoder
        self.pool, self.make_next, self.on_cancel = pool, pool.make_next, pool.on_cancel
        self.queues = self.r[0].calls != 0
        self.run = run
        self.interrupted = interrupted
        self.skip, self.give = errors == "skip", errors == "return"
        self.skipped = deque(maxlen=MOST_SKIPPED)
        self.generation = self.decoded = self.short = NONE

    # -- the line of outstanding tickets, in the order of delivery; beside it, those cancelled

    cdef inline Ticket* at(self, Py_ssize_t k) noexcept:
        """The ticket at a position of the line."""
        cdef Py_ssize_t i = self.first + k
        return &self.buffer[i if i < self.room else i - self.room]
    cdef inline cseq_cell* cell(self, Ticket* t) noexcept:
        return cseq_ring_cell(self.r[t.ring], t.cell)
    cdef inline bint is_ready(self, Py_ssize_t k) noexcept:
        """Whether the ticket at a position is answered."""
        return cseq_ring_ready(self.r[self.at(k).ring], self.at(k).cell)
    cdef inline void remove(self, Py_ssize_t k) noexcept:
        """Remove a ticket from the line."""
        while k > 0:
            self.at(k)[0] = self.at(k - 1)[0]
            k -= 1
        self.first = 0 if self.first + 1 == self.room else self.first + 1
        self.length -= 1
    cdef inline void rotate(self) noexcept:
        """Move the first ticket of the line to its end."""
        self.at(self.length)[0] = self.at(0)[0]
        self.first = 0 if self.first + 1 == self.room else self.first + 1

    def __dealloc__(self):
        PyMem_RawFree(self.buffer)
        PyMem_RawFree(self.r)

    cdef Py_ssize_t locate(self, uint64_t number) noexcept:
        """Position of a ticket; -1: it is not in the line."""
        cdef Py_ssize_t k
        for k in range(self.length):
            if self.at(k).number == number:
                return k
        return -1

    cdef bint post(self) noexcept:
        """Post the next ticket, if it is prepared and there is room; return whether it was."""
        cdef Py_ssize_t number = self.source.target()
        cdef Ring ring
        cdef Ticket* t
        cdef int cell
        if number < 0:
            return False
        ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cell = ring.find_vacant()
        if cell < 0:
            return False
        t = self.at(self.length)
        t.number, t.ring, t.cell = self.ticket, <uint32_t>number, <uint32_t>cell
        t.entry = ring.first + t.cell
        t.units = self.source.write(number, ring, t.cell, self.ticket)
        self.length += 1
        self.ticket += 1
        return True

    cpdef int refill(self) except -1:
        """Post tickets while there are free cells, and the source has any."""
        cdef bint ready
        self.free_cancelled()
        while self.source is not None:
            ready = self.source.is_ready(self.taken_count)
            if not ready:
                self.source.prepare(self.taken_count)
            self.now = cseq_now_ns()
            if not self.post() and ready:
                break
        return 0

    cdef void cancel(self, Ticket* t) noexcept:
        self.cancelled[self.cancelled_count] = t[0]
        self.cancelled_count += 1

    cdef void cancel_all(self, uint32_t number) noexcept:
        """Cancel the tickets of a ring: of a queue, the newest first that are not claimed, so that no gap
        is left."""
        cdef bint back = self.queues
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cdef Py_ssize_t k, kept = 0
        cdef Ticket* t
        if self.source is not None:
            self.source.end(number)
        for k in range(self.length - 1, -1, -1):
            t = self.at(k)
            if t.ring == number:
                back = back and ring.cancel_newest(t.cell)
                if not back:
                    self.cancel(t)
        for k in range(self.length):
            t = self.at(k)
            if t.ring != number:
                self.at(kept)[0] = t[0]
                kept += 1
        self.length = kept
        ring.outstanding = ring.unwoken = 0

    cdef void cancel_call(self, uint32_t number) noexcept:
        """Cancel the call that a worker has to answer, if there is one."""
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cdef Ticket t
        if ring.calling >= 0:
            t.number, t.units, t.ring, t.cell = NONE, 0, number, <uint32_t>ring.calling
            t.entry = ring.first + t.cell
            self.cancel(&t)
            ring.calling = -1

    cpdef int free_cancelled(self) except -1:
        """Free the cells of cancelled tickets that no runner works on any more."""
        cdef Py_ssize_t k = 0
        cdef Ticket t
        cdef Ring ring
        while k < self.cancelled_count:
            t = self.cancelled[k]
            ring = self.rings[t.ring]
            if not (cseq_ring_ready(ring.r, t.cell) if self.queues and t.cell < cseq_ring_round(ring.r)
                    else cseq_ring_cancel(ring.r, t.cell)):
                k += 1
                continue
            if self.on_cancel is not None:
                self.on_cancel(t.cell)
            before = self.decoder.free(t.entry, self.cell(&t))
            ring.free(t.cell)
            self.cancelled_count -= 1
            self.cancelled[k] = self.cancelled[self.cancelled_count]
            before = None
        return 0

    cdef object free(self, Py_ssize_t k, Ring ring):
        """Free the cell of an answered ticket; return the object that was left there."""
        cdef Ticket t = self.at(k)[0]
        left = self.decoder.free(t.entry, self.cell(&t))
        self.remove(k)
        ring.outstanding -= 1
        ring.free(t.cell)
        return left

    def tickets(self, uint32_t number):
        """Cell and number of each outstanding ticket of a ring, the oldest first."""
        return [(self.at(k).cell, self.at(k).number) for k in range(self.length)
                if self.at(k).ring == number]

    def post_call(self, uint32_t number, Request request, str name not None,
                  Request assignment=None, uint64_t epoch=0):
        """Post a call beside a worker's queue, which comes before all items that it has not claimed.

        One at a time: the one before is cancelled, if it is not answered.

        Parameters
        ----------
        number : int
            The worker.
        request : Request or None
            None: the reply is what the producer's ``begin`` has returned.
        name : str
            What messages call it.
        assignment : Request, optional
        epoch : int
            Which the worker is to begin first, with that assignment; 0: none.

        Returns
        -------
        tuple of int
            Cell and number of the ticket.
        """
        cdef Ring ring = self.rings[number]
        cdef uint32_t cell = cseq_ring_round(ring.r)
        self.cancel_call(number)
        self.free_cancelled()
        # One cell may be that of a call which was cancelled, and which the worker is busy with.
        while cseq_ring_state(ring.r, cell) != CSEQ_FREE:
            cell += 1
            if cell == ring.r.capacity:
                raise RuntimeError("a worker is busy with two calls, which it never should be")
        refer(ring, cell, request, assignment, name)
        ring.offer(cell, self.ticket, epoch, ASK_CALL, 0, 0, 0)
        ring.calling = <int>cell
        ring.wake()
        self.ticket += 1
        return cell, self.ticket - 1

    cdef uint64_t note_first(self, cseq_meter* m) noexcept:
        """The first batch of all: what was waited until now, which is returned, is the start."""
        cdef uint64_t waited = m.waited_ns
        cdef Py_ssize_t k
        cdef uint32_t owner
        cdef cseq_meter* runner
        cseq_store_rlx_u64(&m.start_ns, waited)
        cseq_store_rlx_u64(&m.waited_ns, 0)
        cseq_store_rlx_u64(&m.since_ns, self.now)
        for k in range(PyList_GET_SIZE(self.rings)):
            for owner in range(1, self.r[k].runners + 1):
                runner = cseq_ring_meter(self.r[k], owner)
                cseq_store_rlx_u64(&runner.first_ns, cseq_load_rlx_u64(&runner.work.sum))
        cseq_meter_poll(m, self.now, False, False)
        cseq_store_rlx_u64(&m.first_ns, self.now)
        return waited

    # -- the epoch

    def begin_epoch(self, Source source not None, *, bint ordered=True, place=None):
        """Begin an epoch; tickets of an earlier one are cancelled. One step of C.

        Parameters
        ----------
        source : Source
        ordered : bool
            Tickets are taken in their order, not in that of completion.
        place : Place, optional
            In the same step, it is made that of this epoch, with this feed as its progress.
        """
        if place is not None:
            place.first, place.consumed, place.progress = source.epoch, source.consumed, self
        self.reset(source, ordered, place)

    def run_clock(self):
        """Count time for the epoch; a pause after the last batch is of none."""
        cdef cseq_meter* m = cseq_ring_meter(self.r[0], 0)
        cdef bint goes_on = m.since_ns != 0  # else there was a pause: what it computes is not the loop's
        cdef uint64_t now = cseq_now_ns()
        cseq_meter_begin(m, now)
        if m.first_ns:
            cseq_count_u64(&m.epochs, 1)
            cseq_meter_read(m, now, False, goes_on)

    def end(self):
        """Cancel the epoch; nothing is under way then."""
        self.generation = NONE
        self.reset(None, True, None)
        self.free_cancelled()

    cdef int reset(self, Source source, bint ordered, place) except -1:
        """Cancel what was posted, clear what was taken."""
        cdef uint32_t k
        before = self.source, self.batch, self.error  # destructors may run code: after all else is done
        self.source = None
        for k in range(PyList_GET_SIZE(self.rings)):
            self.cancel_call(k)
            self.cancel_all(k)
        self.source, self.ordered, self.place = source, ordered, place
        self.clear()
        self.ended, self.units = False, 0
        self.before = 0 if source is None else source.consumed
        cseq_store_rlx_u64(&self.taken_count, 0)
        cseq_store_rlx_u64(&self.done_count, 0)
        return 0

    @property
    def taken(self):
        return cseq_load_rlx_u64(&self.taken_count)

    @property
    def done(self):
        return cseq_load_rlx_u64(&self.done_count)

    @property
    def position(self):
        """Units before the next ticket, in all of the epoch."""
        return self.before + self.done

    # -- whose turn it is

    cdef Py_ssize_t find(self) noexcept:
        """Position of the ticket that is next, if it is ready; -1."""
        cdef Py_ssize_t k
        if self.ordered:
            return 0 if self.length and self.is_ready(0) else -1
        if self.decoded != NONE:
            k = self.locate(self.decoded)
            if k >= 0:
                return k
        for k in range(self.length):  # in no order: those that are not ready go to the line's end
            if self.is_ready(k if self.queues else 0):
                return self.first_of(k) if self.queues else 0
            if not self.queues:
                self.rotate()
        return -1

    cdef inline Py_ssize_t first_of(self, Py_ssize_t k) noexcept:
        """Position of the first ticket of the queue that a ready ticket is in: it is ready, too, since a
        worker answers in order, though it may not have been when it was looked at."""
        cdef Py_ssize_t j
        for j in range(k):
            if self.at(j).ring == self.at(k).ring:
                return j
        return k

    cdef inline bint is_decoded(self, Py_ssize_t k) noexcept:
        """Whether the ticket at a position is there and is decoded."""
        return k < self.length and self.at(k).number == self.decoded

    cdef inline void clear(self) noexcept:
        """Nothing is decoded any more."""
        self.decoded, self.batch = NONE, None
        self.error = self.note = None

    # -- waiting, for `wait`

    def advance(self):
        """Post what can be posted, and look.

        Returns
        -------
        bool or None
            Whether the next ticket is ready. None: no more come.

        Raises
        ------
        BaseException
            What the source raises after the last ticket.
        """
        cdef cseq_meter* m = cseq_ring_meter(self.r[0], 0)
        cdef uint64_t now
        self.refill()
        if self.find() >= 0:
            return True
        if self.length or self.source is None or not self.source.is_over():
            return False
        self.source.finish()
        self.ended = True
        if m.first_ns:
            now = cseq_now_ns()
            cseq_meter_step(m, now, False)
            cseq_meter_read(m, now, False, True)
        cseq_store_rlx_u64(&m.since_ns, 0)
        return None

    def notices(self):
        """See `Ring.notices`."""
        return cseq_ring_notices(self.r[0])

    def awaited(self):
        """Ring and cell of each ticket that is waited for: the next one, or in no order, any."""
        cdef Py_ssize_t k, count = min(self.length, 1) if self.ordered else self.length
        return [(self.at(k).ring, self.at(k).cell) for k in range(count)]

    def wait(self, uint32_t seen, list awaited=None):
        """Sleep until a ticket that is waited for may be ready, and run signal handlers; see `Ring.wait`.

        `awaited`: other tickets, as `awaited` lists them.
        """
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, 0)
        cdef bint spun = self.spun and awaited is None
        self.spun = False
        if self.make_next is not None:
            self.make_next()
            return
        if self.queues:
            self.wait_any(seen, self.awaited() if awaited is None else awaited, spun)
        elif not self.ordered or not self.length:
            ring.wait(seen, -1)
        elif spun or not self.expect(seen):
            ring.wait(seen, <int>self.at(0).cell)
        self.spun = False
        PyErr_CheckSignals()

    cdef int wait_any(self, uint32_t seen, list awaited, bint spun) except -1:
        """Sleep until one of some tickets may be ready: of each queue, its first one."""
        cdef Ring ring
        cdef uint32_t number, cell, count = 0
        cdef uint64_t before, awake
        for ring in self.rings:
            if ring.unwoken:
                ring.wake()
        first = {}
        self.asked[0] = self.r[0]  # whose gate is that of all
        for number, cell in reversed(awaited):
            first[number] = cell
        for number, cell in first.items():
            self.asked[count], self.cells[count] = self.r[number], cell
            count += 1
        before = ring.sleep()
        with nogil:
            if spun or not cseq_ring_expect(self.asked, self.cells, count, seen):
                cseq_ring_wait_any(self.asked, self.cells, count, seen, PARK)
            awake = cseq_now_ns()
        ring.slept(before, awake)
        if ring.turns is not None:
            cseq_turns_learn(&ring.turns.t, before, awake, cseq_load_rlx_u64(&ring.meter.batches))
        return 0

    cdef bint expect(self, uint32_t seen) noexcept:
        """Wait for the next ticket, but do not sleep: whether it is ready."""
        cdef Ticket* t = self.at(0)
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, t.ring)
        self.spun = not ring.expect(t.cell, seen)
        return not self.spun

    # -- peek, decode, commit

    cdef Py_ssize_t reach(self, uint64_t generation) except -1:
        """Wait until the next ticket is decoded and can be committed: its position in the line.

        May run any code, but none between the last look and the return.
        """
        cdef Py_ssize_t k
        while True:
            if self.due:
                self.due = False
                self.pool.look()
            if not self.run.is_at(generation):
                raise InterruptedError
            k = self.find()
            if k < 0:
                k = self.find_soon()
            if k < 0:
                self.pool.await_next()
                continue
            if not self.is_decoded(k):
                self.decode(k)
            if self.is_decoded(k) and self.is_settled(k, generation):
                return k

    cdef Py_ssize_t find_soon(self) except -2:
        """`find`, after making the next batch, or after waiting for it without sleeping."""
        if self.make_next is not None:
            self.make_next()
        elif not self.ordered or not self.length or not self.expect(self.notices()):
            return -1
        return self.find()

    cdef bint is_settled(self, Py_ssize_t k, uint64_t generation) except -1:
        """Prepare what the commit of a decoded ticket needs; return whether it is still there."""
        while not self.source.is_ready(self.taken_count + 1):
            self.source.prepare(self.taken_count + 1)
            if not self.run.is_at(generation):
                return False
        if self.cancelled_count:
            self.free_cancelled()
        PyErr_CheckSignals()
        return self.is_decoded(k) and self.run.is_at(generation)

    cdef int decode(self, Py_ssize_t k) except -1:
        """Decode the ticket at a position, which is ready. The end of a worker's items is taken out."""
        cdef Ticket t = self.at(k)[0]
        cdef cseq_cell* c = self.cell(&t)
        cdef uint64_t* f = c.converted if c.stage else c.record
        before = batch = error = note = left = None
        if self.decoded != NONE:
            before = self.batch, self.error  # of another ticket; their destructors may run code
        if c.status == ENDED:
            self.free(k, self.rings[t.ring])
            self.cancel_all(t.ring)
            return 0
        if self.decoder.hands_over(t.entry, c):
            self.decoded, self.batch, self.error, self.note = t.number, AS_IT_IS, None, None
            return 0
        try:
            batch = self.decoder.peek(t.entry, c)
            if batch is UNREAD:
                batch, error = self.pool.decode(t.ring, t.cell, c.status, c.slot, c.capacity,
                                                (f[0], f[1], f[2], f[3]))
                batch = self.decoder.divide(batch)
            left = self.decoder.left
        except BaseException as raised:
            # The next attempt may find more. Not forever: the batch itself may raise a MemoryError.
            if (of_handler(raised) or ends_program(raised) or isinstance(raised, RecursionError) and is_deep()
                    or isinstance(raised, MemoryError) and self.short != t.number):
                if isinstance(raised, MemoryError):
                    self.short = t.number
                raise
            batch, error, left = None, raised, None
        if error is not None:
            error, note = self.pool.describe(t.ring, t.cell, error)
            if self.give:
                batch, error = ItemFailure(error, t.ring), None
        elif left is not None:
            note = self.pool.list_left(t.ring, t.cell, left)
        self.decoded, self.batch, self.error, self.note = t.number, batch, error, note
        return 0

    cdef int commit(self, Py_ssize_t k, bint done) except -1:
        """Take out the decoded ticket at a position, and post the next one, which is prepared.

        `done`: the loop goes on after it. The caller refers to what was decoded.
        """
        cdef Ticket t = self.at(k)[0]
        cdef uint32_t status = self.cell(&t).status
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, t.ring)
        left = self.free(k, ring)  # its destructor may run code: after all else is done
        self.note_step()
        ring.committed(self.cell(&t))
        if log.on:
            cseq_log_add(log, self.cell(&t), self.now, self.waited, <uint32_t>PyThread_get_thread_native_id(),
                         self.pool_number, <int>t.ring if self.queues else -1)
        self.units += t.units
        self.latest = t.ring
        cseq_count_u64(&self.taken_count, 1)
        if done:
            cseq_store_rlx_u64(&self.done_count, self.units)
        if status & ENDED:
            self.cancel_all(t.ring)
        self.clear()
        while self.post() and self.source.keyed:  # keys may have waited for room
            pass
        return 0

    cdef void note_step(self) noexcept:
        """The loop has waited, or not, for the ticket that is taken out, and before gone on after the last."""
        cdef cseq_meter* m = cseq_ring_meter(self.r[0], 0)
        cdef Py_ssize_t k, ready = 0, most = min(self.length, MOST_LOOKS)
        cdef uint64_t waited, now = cseq_now_ns()
        self.now = now
        if not m.first_ns:
            self.waited = self.note_first(m)
            self.due = True
            return
        self.waited = waited = cseq_meter_step(m, now, not self.taken_count)
        cseq_store_rlx_u64(&m.since_ns, now)
        if now - m.polled_ns > CSEQ_POLL:
            cseq_meter_poll(m, now, False, True)
            self.due = True
        if waited:
            for k in range(most):
                ready += self.is_ready(k)
            if 2 * ready >= most:
                cseq_count_u64(&m.behind_ns, waited)
            if self.taken_count < self.runners:
                cseq_count_u64(&m.early_ns, waited)

    cdef PyObject* take_batch(self, uint64_t generation) except NULL:
        """Take the next batch: the caller, who has the lock, has the reference.

        Of an object that is handed over as it is, no reference is counted: see `_headers`.

        Raises
        ------
        StopIteration
            No more come.
        InterruptedError
            The generation is over.
        """
        cdef PyObject* taken
        cdef Py_ssize_t k
        while True:
            k = self.reach(generation)
            batch, error = self.batch, self.error
            if error is not None:
                if not self.skip or not isinstance(error, Exception):
                    self.commit(k, False)
                    raise error
                self.skipped.append(self.note)
                self.skips += 1
                self.commit(k, True)
                continue
            if isinstance(self.note, list): self.skipped.extend(self.note)
            taken = self.decoder.take_peeked(self.at(k).entry, batch)
            self.commit(k, True)
            return taken

    # -- for callers

    cdef object call(self, uint64_t generation):
        """Take the next batch, or item."""
        cdef Lock lock = self.run.lock
        lock.enter_anew()
        try:
            return cseq_given(self.take_batch(generation))
        except Exception as error:
            self.check(generation)
            shorten(error)
            raise error
        finally:
            lock.leave()
            rest()

    cpdef int check(self, uint64_t generation) except -1:
        """Raise InterruptedError if a generation is over, also for what fails since then."""
        if not self.run.is_at(generation):
            raise InterruptedError(self.interrupted) from None
        return 0

    def glance(self):
        """Return what the next call returns, in an ordered epoch of keys, if it is ready; else None.

        It is decoded, and stays next. Nothing is waited for, and no key is drawn. In place of an
        exception there is its `ItemFailure`.
        """
        self.run.lock.take(-1)
        try:
            if (not self.run.is_at(self.generation) or not self.source.keyed or not self.ordered
                    or self.find() < 0):
                return None
            if not self.is_decoded(0):
                self.decode(0)
            if not self.is_decoded(0):
                return None
            if self.error is not None:
                return ItemFailure(self.error, self.at(0).ring)
            return None if self.batch is AS_IT_IS else self.batch
        except MemoryError:
            self.short = NONE
            return None  # the call that takes the item decodes it again
        finally:
            self.run.lock.leave()

    # -- calls of workers

    def commit_reply(self, uint32_t number, uint32_t cell, uint64_t ticket, bint ends=False):
        """Commit the answer to a call: free its cell, unless that was done.

        `ends`: an exception is raised instead. It ends the worker's items, but not items of keys.
        """
        cdef Ring ring = self.rings[number]
        if not ring.peek(cell, ticket):
            return
        if ring.calling == <int>cell:
            ring.calling = -1
            self.decoder.free(ring.first + cell, cseq_ring_cell(ring.r, cell))
            ring.free(cell)
        if ends and self.source is not None and not self.source.keyed:
            before = self.batch, self.error  # destructors may run code: after all else is done
            self.cancel_all(number)
            self.clear()
        self.free_cancelled()  # also what a call in the middle of this one has cancelled


@cython.final
cdef class FeedIterator:
    """An iterator over an epoch; what ends its generation interrupts it.

    Threads may share it: each batch goes to one of them. It has no subclass in Python: there, each
    step of a ``for`` would look `__next__` up, and call it as a method.

    Parameters
    ----------
    feed : Feed
    generation : int
        When that of the feed's run changes, this iterator is void.
    owner : object, optional
        Kept alive, and with it the pool.
    """

    cdef readonly uint64_t generation
    cdef object owner
    cdef Feed feed

    def __cinit__(self, Feed feed not None, uint64_t generation, owner=None):
        self.feed, self.generation, self.owner = feed, generation, owner

    def __iter__(self):
        return self

    def __next__(self):
        return self.feed.call(self.generation)
