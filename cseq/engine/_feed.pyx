# cython: language_level=3, freethreading_compatible=True
"""The trainer's side of the rings: posts tickets and fetches batches and items."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._core cimport ASK_CALL, PARK, Ring
from cseq._headers cimport *
from cseq._lock cimport Lock, RunState, is_deep, rest
from cseq.encoding._codec cimport AS_IT_IS, UNREAD, Decoder
from cseq.engine._streams cimport Request, refer
from cseq.measure._trace cimport cseq_log_add, log, thread_number
from cseq.order._source cimport Source

from collections import deque

from cseq.encoding.failure import ends_program, of_handler, shorten

# `entry` is the index of the ticket's cell among the cells of all rings.
cdef struct Ticket:
    uint64_t number
    uint64_t units
    uint32_t ring_number
    uint32_t cell
    uint32_t entry

cdef uint64_t NONE = <uint64_t>-1

# The maximum length of `skipped`. Older entries are dropped.
MOST_SKIPPED = 1000

cdef enum:
    ENDED = 2
    MOST_LOOKS = 64


@cython.final
cdef class ItemFailure:
    """Returned instead of an item that could not be made or sent.

    Parameters
    ----------
    error : BaseException
    worker : int
        The number of the worker, or -1 if it is unknown.
    """

    cdef readonly object error
    cdef readonly Py_ssize_t worker

    def __cinit__(self, error not None, Py_ssize_t worker=-1):
        self.error, self.worker = error, worker


@cython.final
cdef class Feed:
    """Posts the tickets of a `Source` and fetches the batches or items that workers make for them.

    A ticket leaves the line of outstanding tickets in three steps::

        peek     find the next ticket, which must be READY, without changing anything
        decode   build the batch; may run any code or be interrupted
        commit   free the cell, count the batch and post the next ticket; runs only C code

    If an exception is raised before the commit, the ticket stays in the line, and the next call
    uses the decoded batch. After the commit, only destructors run Python code before the return.

    The caller must hold the lock of `run`. Signal handlers, conversions and destructors must not
    start an epoch or fetch a batch. They may raise, end the generation, or call `Streams.ask`.

    Parameters
    ----------
    run : RunState
    rings : list of Ring
        One shared ring, or one queue per worker, all in the same memory.
    decoder : Decoder
    pool : Pool
        - ``await_next()`` calls `advance` and `wait`, and returns when the next ticket is ready. It
          raises errors from workers, and StopIteration if there are no more tickets.
        - ``decode(ring_number, cell, status, slot, capacity, record)`` returns (batch, None), or
          (None, error) if a worker published an exception. It may also raise.
        - ``describe(ring_number, cell, error)`` returns the exception to raise in the loop, and the
          entry for `skipped`.
        - ``list_left(ring_number, cell, left)`` returns entries for a batch's missing samples.
        - ``look()`` is called about ten times a second, with the restrictions for signal handlers.
        - ``make_next()``, if not None, makes the next batch on this thread.
        - ``on_cancel(cell)``, if not None, is called before a cancelled ticket's cell is freed.
    errors : 'raise', 'skip' or 'return'
        What to do if a worker published an exception instead of a batch: raise it, record it and
        skip the batch, or return an `ItemFailure`.
    interrupted : str
        The message of the InterruptedError that is raised when the generation has ended.

    Attributes
    ----------
    source, place : Source, Place or None
        The source of tickets, and the place where the epoch started.
    ticket : int
        The number of the next ticket.
    generation : int
        The generation of `run` in which the epoch started.
    taken, done : int
        The number of tickets fetched in this epoch, and the number of their units.
    skipped : deque
        Entries for skipped batches and samples.
    ended : bool
        Whether the end of the epoch has been reported to the caller.
    pool_number : int
        The number of the pool in traces.
    """

    cdef object __weakref__
    cdef readonly Source source
    cdef readonly uint64_t ticket
    # The value of `taken`; see `cseq_count_u64`.
    cdef uint64_t taken_count
    # Time (ns) at which the current step fetched a ticket and posted the next one.
    cdef uint64_t now
    cdef list rings
    # `r` contains all rings. `asked` and `cells` are the rings and cells being waited for.
    cdef cseq_ring** r
    cdef cseq_ring** asked
    cdef uint32_t* cells
    cdef Decoder decoder
    cdef object pool, make_next, on_cancel
    cdef bint queues
    cdef uint64_t runners
    # A circular buffer of outstanding tickets. `cancelled` holds tickets that still occupy cells.
    cdef Ticket* buffer
    cdef Py_ssize_t room, first, length
    cdef Ticket* cancelled
    cdef readonly Py_ssize_t cancelled_count
    cdef readonly RunState run
    cdef public uint64_t generation
    cdef public object place
    # Other threads read this.
    cdef uint32_t is_over
    # The ring of the latest ticket. For a stream, this is the worker.
    cdef readonly Py_ssize_t latest
    cdef readonly object skipped
    cdef readonly uint64_t skips
    # `done_count`: see `done`. `units`: units fetched. `before`: units before the first ticket.
    cdef uint64_t done_count, units, before
    cdef object interrupted
    cdef bint due
    cdef bint skip, give, ordered
    cdef public unsigned short pool_number
    # How long the loop waited for the latest ticket (ns).
    cdef uint64_t waited
    cdef bint spun
    # A ticket that is decoded but not yet committed. `batch` is passed to `Decoder.take_peeked`.
    cdef uint64_t decoded
    cdef object batch, error, note
    # The latest ticket to fail with a MemoryError.
    cdef uint64_t short

    def __cinit__(self, RunState run not None, list rings not None, Decoder decoder not None,
                  pool not None, *, str errors="raise", str interrupted=""):
        cdef Ring ring
        cdef Py_ssize_t k = 0
        for ring in rings:
            self.room += ring.r.capacity
        self.buffer = <Ticket*>PyMem_RawCalloc(2 * self.room, sizeof(Ticket))
        self.r = <cseq_ring**>PyMem_RawCalloc(3 * len(rings), sizeof(cseq_ring*))
        if self.buffer == NULL or self.r == NULL:
            raise MemoryError(f"not enough memory for {self.room} cells")
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

    # -- the line of outstanding tickets in delivery order, and the cancelled tickets

    cdef inline Ticket* at(self, Py_ssize_t k) noexcept:
        cdef Py_ssize_t i = self.first + k
        return &self.buffer[i if i < self.room else i - self.room]
    cdef inline cseq_cell* cell(self, Ticket* t) noexcept:
        return cseq_ring_cell(self.r[t.ring_number], t.cell)
    cdef inline bint is_ready(self, Py_ssize_t k) noexcept:
        return cseq_ring_ready(self.r[self.at(k).ring_number], self.at(k).cell)
    cdef inline void remove(self, Py_ssize_t k) noexcept:
        while k > 0:
            self.at(k)[0] = self.at(k - 1)[0]
            k -= 1
        self.first = 0 if self.first + 1 == self.room else self.first + 1
        self.length -= 1
    cdef inline void rotate(self) noexcept:
        self.at(self.length)[0] = self.at(0)[0]
        self.first = 0 if self.first + 1 == self.room else self.first + 1

    def __dealloc__(self):
        PyMem_RawFree(self.buffer)
        PyMem_RawFree(self.r)

    cdef Py_ssize_t locate(self, uint64_t number) noexcept:
        cdef Py_ssize_t k
        for k in range(self.length):
            if self.at(k).number == number:
                return k
        return -1

    cdef bint post(self) noexcept:
        """Post the next ticket if it is prepared and a cell is free."""
        cdef Py_ssize_t ring_number = self.source.target()
        cdef Ring ring
        cdef Ticket* t
        cdef int cell
        if ring_number < 0:
            return False
        ring = <Ring>PyList_GET_ITEM(self.rings, ring_number)
        cell = ring.find_vacant()
        if cell < 0:
            return False
        t = self.at(self.length)
        t.number, t.ring_number, t.cell = self.ticket, <uint32_t>ring_number, <uint32_t>cell
        t.entry = ring.first_entry + t.cell
        t.units = self.source.write(ring_number, ring, t.cell, self.ticket)
        self.length += 1
        self.ticket += 1
        return True

    cpdef int refill(self) except -1:
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

    cdef void cancel_all(self, uint32_t ring_number) noexcept:
        """Cancel all tickets in a ring, newest first, because a queue must not have gaps."""
        cdef bint back = self.queues
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, ring_number)
        cdef Py_ssize_t k, kept = 0
        cdef Ticket* t
        if self.source is not None:
            self.source.end(ring_number)
        for k in range(self.length - 1, -1, -1):
            t = self.at(k)
            if t.ring_number == ring_number:
                back = back and ring.cancel_newest(t.cell)
                if not back:
                    self.cancel(t)
        for k in range(self.length):
            t = self.at(k)
            if t.ring_number != ring_number:
                self.at(kept)[0] = t[0]
                kept += 1
        self.length = kept
        ring.outstanding = ring.unwoken = 0

    cdef void cancel_call(self, uint32_t worker) noexcept:
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, worker)
        cdef Ticket t
        if ring.calling >= 0:
            t.number, t.units, t.ring_number, t.cell = NONE, 0, worker, <uint32_t>ring.calling
            t.entry = ring.first_entry + t.cell
            self.cancel(&t)
            ring.calling = -1

    cpdef int free_cancelled(self) except -1:
        """Free the cells of cancelled tickets that no runner is working on."""
        cdef Py_ssize_t k = 0
        cdef Ticket t
        cdef Ring ring
        while k < self.cancelled_count:
            t = self.cancelled[k]
            ring = self.rings[t.ring_number]
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
        """Free the cell of a finished ticket and return its object."""
        cdef Ticket t = self.at(k)[0]
        left = self.decoder.free(t.entry, self.cell(&t))
        self.remove(k)
        ring.outstanding -= 1
        ring.free(t.cell)
        return left

    def tickets(self, uint32_t ring_number):
        """Return (cell, number) for each outstanding ticket in a ring, oldest first."""
        return [(self.at(k).cell, self.at(k).number) for k in range(self.length)
                if self.at(k).ring_number == ring_number]

    def post_call(self, uint32_t worker, Request request, str name not None,
                  Request assignment=None, uint64_t epoch=0):
        """Post a call to a worker, ahead of the items that it has not claimed yet.

        A new call cancels a pending one. The worker first starts `epoch`, unless it is 0. Without a
        request, the producer's ``begin`` makes the reply. Return the cell and number of the ticket.
        """
        cdef Ring ring = self.rings[worker]
        cdef uint32_t cell = cseq_ring_round(ring.r)
        self.cancel_call(worker)
        self.free_cancelled()
        # The worker may still be executing a cancelled call.
        while cseq_ring_state(ring.r, cell) != CSEQ_FREE:
            cell += 1
            if cell == ring.r.capacity:
                raise RuntimeError("a worker is busy with two calls; this is a bug in cseq")
        refer(ring, cell, request, assignment, name)
        ring.offer(cell, self.ticket, epoch, ASK_CALL, 0, 0, 0)
        ring.calling = <int>cell
        ring.wake()
        self.ticket += 1
        return cell, self.ticket - 1

    cdef uint64_t note_first(self, cseq_meter* m) noexcept:
        """Record the first batch and return the startup time."""
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
        """Start an epoch and cancel the previous one in a single step of C code.

        `place` is set to this epoch in the same step. Tickets are delivered in posting order if
        `ordered`, and otherwise in completion order.
        """
        if place is not None:
            place.first, place.consumed, place.progress = source.epoch, source.consumed, self
        self.reset(source, ordered, place)

    def run_clock(self):
        """Start the clock, without counting the pause between epochs."""
        cdef cseq_meter* m = cseq_ring_meter(self.r[0], 0)
        cdef bint goes_on = m.since_ns != 0
        cdef uint64_t now = cseq_now_ns()
        cseq_meter_start_epoch(m, now)
        if m.first_ns:
            cseq_count_u64(&m.epochs, 1)
            cseq_meter_read_system(m, now, False, goes_on)

    def end(self):
        self.generation = NONE
        self.reset(None, True, None)
        self.free_cancelled()

    cdef int reset(self, Source source, bint ordered, place) except -1:
        cdef uint32_t k
        # Destructors may run code, so drop these last.
        before = self.source, self.batch, self.error
        self.source = None
        for k in range(PyList_GET_SIZE(self.rings)):
            self.cancel_call(k)
            self.cancel_all(k)
        self.source, self.ordered, self.place = source, ordered, place
        self.clear()
        self.units = 0
        cseq_store_rlx_u32(&self.is_over, False)
        self.before = 0 if source is None else source.consumed
        cseq_store_rlx_u64(&self.taken_count, 0)
        cseq_store_rlx_u64(&self.done_count, 0)
        return 0

    @property
    def ended(self):
        return cseq_load_rlx_u32(&self.is_over) == 1

    @property
    def taken(self):
        return cseq_load_rlx_u64(&self.taken_count)

    @property
    def done(self):
        return cseq_load_rlx_u64(&self.done_count)

    @property
    def position(self):
        """The number of units in the epoch before the next ticket."""
        return self.before + self.done

    # -- finding the next ticket

    cdef Py_ssize_t find(self) noexcept:
        """Return the position of the next ticket if it is ready, or -1."""
        cdef Py_ssize_t k
        if self.ordered:
            return 0 if self.length and self.is_ready(0) else -1
        if self.decoded != NONE:
            k = self.locate(self.decoded)
            if k >= 0:
                return k
        # Move unordered tickets that are not ready to the end of the line.
        for k in range(self.length):
            if self.is_ready(k if self.queues else 0):
                return self.first_of(k) if self.queues else 0
            if not self.queues:
                self.rotate()
        return -1

    cdef inline Py_ssize_t first_of(self, Py_ssize_t k) noexcept:
        """Return the position of the first ticket in the same queue as the ready ticket `k`.

        It is also ready, because a worker completes tickets in order.
        """
        cdef Py_ssize_t j
        for j in range(k):
            if self.at(j).ring_number == self.at(k).ring_number:
                return j
        return k

    cdef inline bint is_decoded(self, Py_ssize_t k) noexcept:
        return k < self.length and self.at(k).number == self.decoded

    cdef inline void clear(self) noexcept:
        self.decoded, self.batch = NONE, None
        self.error = self.note = None

    # -- waiting, for `wait`

    def advance(self):
        """Post as many tickets as possible. Return True if the next ticket is ready.

        At the end, raise the source's exception or return None.
        """
        cdef cseq_meter* m = cseq_ring_meter(self.r[0], 0)
        cdef uint64_t now
        self.refill()
        if self.find() >= 0:
            return True
        if self.length or self.source is None or not self.source.is_over():
            return False
        self.source.finish()
        cseq_store_rlx_u32(&self.is_over, True)
        if m.first_ns:
            now = cseq_now_ns()
            cseq_meter_step(m, now, False)
            cseq_meter_read_system(m, now, False, True)
        cseq_store_rlx_u64(&m.since_ns, 0)
        return None

    def notices(self):
        return cseq_ring_notices(self.r[0])

    def awaited(self):
        """Return (ring number, cell) for the next ticket, or for all tickets if they are unordered."""
        cdef Py_ssize_t k, count = min(self.length, 1) if self.ordered else self.length
        return [(self.at(k).ring_number, self.at(k).cell) for k in range(count)]

    def wait(self, uint32_t seen, list awaited=None):
        """Sleep until one of the awaited tickets may be ready, and run signal handlers."""
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
        """Sleep until one of the given tickets may be ready."""
        cdef Ring ring
        cdef uint32_t ring_number, cell, count = 0
        cdef uint64_t before, awake
        for ring in self.rings:
            if ring.unwoken:
                ring.wake()
        first = {}
        # All rings share the first ring's gate.
        self.asked[0] = self.r[0]
        for ring_number, cell in reversed(awaited):
            first[ring_number] = cell
        for ring_number, cell in first.items():
            self.asked[count], self.cells[count] = self.r[ring_number], cell
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
        """Spin until the next ticket is ready, for a limited time."""
        cdef Ticket* t = self.at(0)
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, t.ring_number)
        self.spun = not ring.expect(t.cell, seen)
        return not self.spun

    # -- peek, decode, commit

    cdef Py_ssize_t reach(self, uint64_t generation) except -1:
        """Decode the next ticket, waiting for it if necessary, and return its position.

        Arbitrary code may run before the last check, but none after it.
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
        """Make the next batch on this thread, or spin until it is ready."""
        if self.make_next is not None:
            self.make_next()
        elif not self.ordered or not self.length or not self.expect(self.notices()):
            return -1
        return self.find()

    cdef bint is_settled(self, Py_ssize_t k, uint64_t generation) except -1:
        """Prepare to commit a decoded ticket. Return False if it is no longer decoded."""
        while not self.source.is_ready(self.taken_count + 1):
            self.source.prepare(self.taken_count + 1)
            if not self.run.is_at(generation):
                return False
        if self.cancelled_count:
            self.free_cancelled()
        PyErr_CheckSignals()
        return self.is_decoded(k) and self.run.is_at(generation)

    cdef int decode(self, Py_ssize_t k) except -1:
        """Decode the ready ticket at position `k`, or remove it if it ends a worker's items."""
        cdef Ticket t = self.at(k)[0]
        cdef cseq_cell* c = self.cell(&t)
        cdef uint64_t* f = c.converted if c.stage else c.record
        before = batch = error = note = left = None
        # Destructors may run code, so keep a previously decoded ticket alive until the return.
        if self.decoded != NONE:
            before = self.batch, self.error
        if c.status == ENDED:
            self.free(k, self.rings[t.ring_number])
            self.cancel_all(t.ring_number)
            return 0
        if self.decoder.hands_over(t.entry, c):
            self.decoded, self.batch, self.error, self.note = t.number, AS_IT_IS, None, None
            return 0
        try:
            batch = self.decoder.peek(t.entry, c)
            if batch is UNREAD:
                batch, error = self.pool.decode(t.ring_number, t.cell, c.status, c.slot, c.capacity,
                                                (f[0], f[1], f[2], f[3]))
                batch = self.decoder.divide(batch)
            left = self.decoder.left
        except BaseException as raised:
            # Memory may be free next time, but a second MemoryError is probably due to the batch.
            if (of_handler(raised) or ends_program(raised) or isinstance(raised, RecursionError) and is_deep()
                    or isinstance(raised, MemoryError) and self.short != t.number):
                if isinstance(raised, MemoryError):
                    self.short = t.number
                raise
            batch, error, left = None, raised, None
        if error is not None:
            error, note = self.pool.describe(t.ring_number, t.cell, error)
            if self.give:
                batch, error = ItemFailure(error, t.ring_number), None
        elif left is not None:
            note = self.pool.list_left(t.ring_number, t.cell, left)
        self.decoded, self.batch, self.error, self.note = t.number, batch, error, note
        return 0

    cdef int commit(self, Py_ssize_t k, bint done) except -1:
        """Remove the decoded ticket at position `k` and post the next one.

        `done` is False if an exception is raised afterwards.
        """
        cdef Ticket t = self.at(k)[0]
        cdef uint32_t status = self.cell(&t).status
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, t.ring_number)
        # Dropping the ticket's object may run code, so do it last.
        left = self.free(k, ring)
        self.note_step()
        ring.committed(self.cell(&t))
        if log.on:
            cseq_log_add(log, self.cell(&t), self.now, self.waited, thread_number(), self.pool_number,
                         <int>t.ring_number if self.queues else -1)
        self.units += t.units
        self.latest = t.ring_number
        cseq_count_u64(&self.taken_count, 1)
        if done:
            cseq_store_rlx_u64(&self.done_count, self.units)
        if status & ENDED:
            self.cancel_all(t.ring_number)
        self.clear()
        # Several keys may be waiting for a free cell.
        while self.post() and self.source.keyed:
            pass
        return 0

    cdef void note_step(self) noexcept:
        """Measure the wait and the training step before it."""
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
        """Return the next batch as an owned reference. The caller must hold the lock.

        Raises StopIteration at the end of the epoch, and InterruptedError if the generation has
        ended. An unchanged object keeps its reference count; see `_headers`.
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
        cdef Lock lock = self.run.lock
        lock.acquire_once()
        try:
            return cseq_given(self.take_batch(generation))
        except Exception as error:
            self.check(generation)
            shorten(error)
            raise error
        finally:
            lock.release()
            rest()

    cpdef int check(self, uint64_t generation) except -1:
        """Raise InterruptedError if a generation has ended. It replaces any other error."""
        if not self.run.is_at(generation):
            raise InterruptedError(self.interrupted) from None
        return 0

    def glance(self):
        """Return the next item without consuming it, or None if it is not ready.

        An exception is returned as an `ItemFailure`. No key is drawn.
        """
        self.run.lock.acquire(-1)
        try:
            if (not self.run.is_at(self.generation) or not self.source.keyed or not self.ordered
                    or self.find() < 0):
                return None
            if not self.is_decoded(0):
                self.decode(0)
            if not self.is_decoded(0):
                return None
            if self.error is not None:
                return ItemFailure(self.error, self.at(0).ring_number)
            return None if self.batch is AS_IT_IS else self.batch
        # The call that consumes the item will decode it again.
        except MemoryError:
            self.short = NONE
            return None
        finally:
            self.run.lock.release()

    # -- calls to workers

    def commit_reply(self, uint32_t worker, uint32_t cell, uint64_t ticket, bint ends=False):
        """Commit the reply to a call and free its cell, unless already done.

        If `ends` is set, no more items come from this worker, unless the items have keys.
        """
        cdef Ring ring = self.rings[worker]
        if not ring.peek(cell, ticket):
            return
        if ring.calling == <int>cell:
            ring.calling = -1
            self.decoder.free(ring.first_entry + cell, cseq_ring_cell(ring.r, cell))
            ring.free(cell)
        if ends and self.source is not None and not self.source.keyed:
            # Destructors may run code, so drop these last.
            before = self.batch, self.error
            self.cancel_all(worker)
            self.clear()
        # Nested calls may also have cancelled tickets.
        self.free_cancelled()


@cython.final
cdef class FeedIterator:
    """An iterator over the batches or items of one generation.

    Threads may share it. It keeps `keeper` alive. A subclass in Python would slow down every step
    of the loop.
    """

    cdef readonly uint64_t generation
    cdef object keeper
    cdef Feed feed

    def __cinit__(self, Feed feed not None, uint64_t generation, keeper=None):
        self.feed, self.generation, self.keeper = feed, generation, keeper

    def __iter__(self):
        return self

    def __next__(self):
        return self.feed.call(self.generation)
