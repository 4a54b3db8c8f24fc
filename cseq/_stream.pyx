# cython: language_level=3, freethreading_compatible=True
"""The trainer's end of a stream: items of workers, each with a queue of its own."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.string cimport memcpy, memmove, memset
from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython

from cseq._core cimport Ring
from cseq._headers cimport *
from cseq._lock cimport RunState
from cseq._memory cimport MOST_KEPT, Block, Mapping
from cseq._plan cimport Plan, Reader
from cseq._slots cimport Slots

import os

if os.environ.get("CSEQ_WAIT", "") == "nap":
    cseq_wait_nap = 1


cdef enum:
    ASK_ITEM = 0       # kinds of tickets; see producer.py
    ASK_BEGIN = 1
    ASK_CALL = 2
    REQUEST_WORDS = 6   # where a request lies: slot, bytes committed, record
    # A cell's words: the call or key, and the assignment, both requests; and after these:
    STREAM_ENDED = 12   # of an answer: no item follows
    STREAM_KEY = 13     # how many ints the key has; or one of these:
    WITHOUT_KEY = -1
    KEY_IN_REQUEST = -2
    STREAM_KEYS = 14    # the ints


# For `producer`, and `stream`.
ITEM, BEGIN, CALL = ASK_ITEM, ASK_BEGIN, ASK_CALL
CALLED, ASSIGNED = slice(0, REQUEST_WORDS), slice(REQUEST_WORDS, 2 * REQUEST_WORDS)
ENDED = STREAM_ENDED
KEY, KEYS, NO_KEY, IN_REQUEST = STREAM_KEY, STREAM_KEYS, WITHOUT_KEY, KEY_IN_REQUEST
cdef uint64_t TICKETS = <uint64_t>1 << 40
cdef object NOTHING = object()


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
@cython.no_gc
cdef class Request:
    """Data for a worker, in a slot that is taken for as long as this object exists.

    Parameters
    ----------
    slots : Slots

    Attributes
    ----------
    slot : int
        The lowest free one.
    """

    cdef Slots slots
    cdef readonly Py_ssize_t slot
    cdef int64_t words[REQUEST_WORDS]

    def __cinit__(self, Slots slots not None):
        memset(self.words, 0, sizeof(self.words))
        self.slot = -1
        self.slots = slots
        self.slot = slots.take()

    def __dealloc__(self):
        if self.slot >= 0:
            self.slots.set_free(self.slot)

    def locate(self, uint64_t capacity, record):
        """Set where in the slot the data lie: the slot's committed bytes, and a `codec.Record`."""
        cdef int k
        self.slots.resize(self.slot, capacity)
        self.words[0], self.words[1] = self.slot, <int64_t>capacity
        for k in range(4):
            self.words[2 + k] = record[k]


@cython.final
cdef class StreamConsumer:
    """The trainer's end of one worker's ring: asks for items ahead, and takes them out.

    The ring is a queue: tickets of an epoch are in the `outstanding` cells before `next_cell`, and
    leave it oldest first, or (given up) all together. Each ticket is for one item. In an epoch of
    keys, `ItemReader` posts the tickets; an exception of the producer is an answer then, and ends
    nothing. An item leaves in the same steps as a batch::

        peek     the oldest ticket is READY; nothing changes
        decode   make its item from its slot; may call anything, may be interrupted
        commit   free cell and slot, count the item, post the next ticket: C alone

    Parameters
    ----------
    ring : Ring
    slots : Slots
    read : callable
        ``read(consumer)`` waits for the oldest ticket and decodes it: ``(item, failed, ended, nbytes)``. The
        item may be an `ItemFailure`; `ended`: no item follows, and if `failed` is empty, there is none
        here either; `failed`: the exception that has ended the stream, as text. It returns None if a call
        by a signal handler has ended the stream.
    number : int
        The worker's number.
    prefetch : int
        How many keys are drawn ahead; without keys, see `depth`.
    depth : int
        The most items that are asked for, being made, or ready.
    small : tuple, optional
        ``(mapped, reader, most)``: an item of at most `most` bytes with a structure that
        the `Reader` knows is decoded in C. `mapped` lists the `Mapping` of each slot,
        or None.

    Attributes
    ----------
    over : bool
        No more items will come out of the ring in this epoch.
    failed : str
        The exception that has ended the stream, as text; else empty.
    names : list of str
        By cell: what the call or beginning there is called in messages.
    items, nbytes : int
        Taken out of the ring so far, over all epochs.
    """

    cdef readonly Ring ring
    cdef readonly uint32_t number
    cdef Slots slots
    cdef object read
    cdef list mapped
    cdef Reader reader
    cdef uint64_t small
    cdef uint32_t depth
    cdef uint64_t prefetch
    # Tickets.
    cdef uint32_t round, next_cell, outstanding
    cdef uint64_t ticket            # number of the next one
    cdef int calling                # the cell of the call that is under way; -1: none
    cdef list assignments, calls    # by cell: the `Request`s that its ticket refers to
    cdef readonly list names
    # The epoch.
    cdef uint64_t epoch
    cdef readonly bint keyed        # its items are named by keys
    cdef Request assignment
    cdef readonly bint over
    cdef uint64_t start             # the next item to ask for
    cdef uint64_t asked             # items in tickets
    cdef uint64_t unwoken           # those of them that were asked for since the worker was woken
    cdef readonly str failed
    # The item of the oldest ticket, once it is decoded.
    cdef bint decoded
    cdef object item
    cdef str failing                # `failed`, once the item is taken
    cdef uint64_t item_bytes
    # Which any thread reads: see `cseq_count_u64`.
    cdef uint64_t item_count, byte_count

    def __cinit__(self, Ring ring not None, Slots slots not None, read, *, uint32_t number,
                  uint64_t prefetch, uint32_t depth, small=None):
        if small is not None:
            self.mapped, self.reader, self.small = small
        self.ring, self.slots, self.read = ring, slots, read
        self.number, self.prefetch, self.depth = number, prefetch, depth
        self.round = cseq_ring_round(ring.r)
        self.calling = -1
        self.assignments = [None] * ring.r.capacity
        self.calls = [None] * ring.r.capacity
        self.names = [""] * ring.r.capacity
        self.over = True
        self.failed = self.failing = ""

    @property
    def items(self):
        return cseq_load_rlx_u64(&self.item_count)

    @property
    def nbytes(self):
        return cseq_load_rlx_u64(&self.byte_count)

    @property
    def delivered(self):
        """Items of this epoch that were returned to the caller, or raised."""
        return self.start - self.asked

    def taken_slots(self):
        """The slots of its tickets, and of the requests that they refer to."""
        cdef uint32_t c
        cdef set found = set()
        requests = {self.assignment, *self.assignments, *self.calls} - {None}
        for c in range(self.ring.r.capacity):
            if cseq_ring_state(self.ring.r, c) == CSEQ_READY:
                found.add(cseq_ring_cell(self.ring.r, c).slot)
        return found | {request.slot for request in requests}

    # -- tickets

    cdef uint32_t cell_before(self, uint32_t k) noexcept:
        """The cell of the queue that is `k` cells before the next one to post in."""
        return (self.next_cell + self.round - k) % self.round

    cdef void post(self, uint32_t cell, uint64_t kind, uint64_t start, key):
        """Post a ticket in a free cell.

        `key`: the call or the key: a `Request`, or int64 in a `Block`. None: there is none.
        """
        cdef Ring ring = self.ring
        cdef int64_t* words = cseq_ring_indices(ring.r, cell)
        cdef Request request = None
        cdef Block ints
        words[STREAM_KEY] = WITHOUT_KEY
        if self.assignment is not None:
            memcpy(words + REQUEST_WORDS, self.assignment.words, sizeof(self.assignment.words))
        if type(key) is Block:
            ints = <Block>key
            words[STREAM_KEY] = ints.size // 8
            memcpy(words + STREAM_KEYS, ints.data, <size_t>ints.size)
        elif key is not None:
            request = <Request>key
            words[STREAM_KEY] = KEY_IN_REQUEST
            memcpy(words, request.words, sizeof(request.words))
        self.assignments[cell], self.calls[cell] = self.assignment, request
        ring.fill(cell, self.epoch, kind, kind == ASK_ITEM, start)
        cseq_ring_post(ring.r, cell, self.ticket)
        self.ticket = (self.ticket + 1) % TICKETS
        ring.unwoken += 1

    cdef void append(self, uint64_t kind, uint64_t start, key):
        """Post a ticket behind the others."""
        self.post(self.next_cell, kind, start, key)
        self.next_cell = (self.next_cell + 1) % self.round
        self.outstanding += 1
        if kind == ASK_ITEM:
            self.start += 1
            self.asked += 1
            self.unwoken += 1

    cdef int make_room(self) except -1:
        """Free the cells of given-up tickets: the next one must be free."""
        self.sweep()
        if cseq_ring_state(self.ring.r, self.next_cell) != CSEQ_FREE:
            raise RuntimeError("the ring of this stream is full, which it never should be")
        return 0

    cdef int leave(self, uint32_t cell) except -1:
        """Release the slot and the requests of a cell that is the trainer's, or free."""
        self.slots.leave(cseq_ring_cell(self.ring.r, cell))
        self.assignments[cell] = self.calls[cell] = None
        cseq_ring_retire(self.ring.r, cell)
        return 0

    cdef int leave_oldest(self) except -1:
        """Take the oldest ticket, which is READY, out."""
        self.leave(self.cell_before(self.outstanding))
        self.outstanding -= 1
        return 0

    cdef int give_up(self) except -1:
        """End the stream for this epoch: take back the tickets that the worker has not claimed."""
        cdef Ring ring = self.ring
        cdef uint32_t cell
        self.over = True
        self.decoded = False
        self.start -= self.asked
        self.asked = self.unwoken = 0
        while self.outstanding:
            cell = self.cell_before(1)
            if not cseq_ring_retract(ring.r, cell):
                break
            self.next_cell = cell
            self.outstanding -= 1
            self.leave(cell)
        while self.outstanding:
            ring.give_up(self.cell_before(self.outstanding))
            self.outstanding -= 1
        return 0

    cdef void give_up_call(self) noexcept:
        """Give up the call that is under way."""
        if self.calling >= 0:
            self.ring.give_up(<uint32_t>self.calling)
            self.calling = -1

    cdef int sweep(self) except -1:
        """Free the cells of given-up tickets: those that are answered, and calls not yet claimed."""
        cdef Ring ring = self.ring
        cdef uint32_t k = 0, cell
        while k < ring.abandoned_count:
            cell = ring.abandoned[k]
            if not (cseq_ring_ready(ring.r, cell) if cell < self.round
                    else cseq_ring_cancel(ring.r, cell)):
                k += 1
                continue
            ring.drop(k)
            self.leave(cell)
        return 0

    cpdef void wake(self) noexcept:
        """Wake the worker if tickets were posted since it was last woken."""
        self.unwoken = 0
        if self.ring.unwoken:
            self.ring.wake()

    cdef bint has_room(self) noexcept:
        """Whether to ask for another item; with keys, `ItemReader` asks."""
        return not self.over and not self.keyed and self.asked < self.depth

    cdef int request(self) except -1:
        """Ask for items ahead."""
        while self.has_room():
            self.make_room()
            self.append(ASK_ITEM, self.start, None)
        self.wake_in_time()
        return 0

    cdef void wake_in_time(self) noexcept:
        """Wake the worker if enough items were asked for.

        Waking a worker costs more than a small item does. It sleeps only when all items asked for are
        ready, so it is woken when half of them are asked for again.
        """
        if 2 * self.unwoken >= self.depth:
            self.wake()

    cdef bint is_answered(self) noexcept:
        """Whether `prepare` does not wait for the worker."""
        return (self.over or not self.outstanding
                or cseq_ring_ready(self.ring.r, self.cell_before(self.outstanding)))

    cdef uint32_t unanswered(self) noexcept:
        """Tickets that the worker has not answered."""
        cdef uint32_t count = 0
        while (count < self.outstanding
               and not cseq_ring_ready(self.ring.r, self.cell_before(count + 1))):
            count += 1
        return count

    cdef int post_key(self, key, uint64_t number) except -1:
        """Ask for the item of a key, item `number` of the epoch."""
        self.sweep()
        self.append(ASK_ITEM, number, key)
        self.wake_in_time()
        return 0

    # -- the epoch and calls

    def end(self):
        """Give up the epoch, and the call that is under way."""
        before = self.item  # its destructor may run code: after all else is done
        self.give_up_call()
        self.give_up()
        self.item = self.assignment = None
        self.epoch = 0
        self.sweep()

    def begin(self, uint64_t epoch, Request assignment not None, str name not None,
              bint keyed=False):
        """Begin an epoch, the last one given up: post a BEGIN ticket, and ask for items.

        If the epoch is `keyed`, no ticket is posted: the worker begins it with its first key.

        Returns
        -------
        tuple of int or None
            Cell and number of the ticket whose answer is the worker's, if there is one.
        """
        cdef uint32_t cell
        cdef uint64_t ticket
        if not keyed:
            self.make_room()
        cell, ticket = self.next_cell, self.ticket
        self.epoch, self.assignment, self.keyed = epoch, assignment, keyed
        self.start = 0
        self.failed = ""
        self.over = False
        if keyed:
            return None
        self.names[cell] = name
        self.append(ASK_BEGIN, 0, None)
        self.request()
        self.wake()
        return cell, ticket

    def call(self, Request call not None, str name not None):
        """Post a call, which comes before all items that the worker has not claimed; one at a time.

        Returns
        -------
        tuple of int
            Cell and number of its ticket.
        """
        cdef uint32_t cell = self.round
        cdef uint64_t ticket
        self.give_up_call()
        self.sweep()
        # One cell may be that of a call which was given up, and which the worker is busy with.
        while cseq_ring_state(self.ring.r, cell) != CSEQ_FREE:
            cell += 1
            if cell == self.ring.r.capacity:
                raise RuntimeError("a worker is busy with two calls, which it never should be")
        self.names[cell] = name
        ticket = self.ticket
        self.post(cell, ASK_CALL, 0, call)
        self.calling = <int>cell
        self.wake()
        return cell, ticket

    def oldest(self):
        """Cell and number of the oldest ticket in the queue; None: there is none."""
        return self.named(self.outstanding) if self.outstanding else None

    def newest(self):
        """Cell and number of the newest ticket in the queue; None: there is none."""
        return self.named(1) if self.outstanding else None

    cdef tuple named(self, uint32_t k):
        cdef uint32_t cell = self.cell_before(k)
        return cell, CSEQ_TICKET(cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word))

    def peek(self, uint32_t cell, uint64_t ticket):
        """A worker's answer to a ticket. Nothing changes.

        Returns
        -------
        tuple or None
            (token, cell, status, slot, capacity, record). None: the worker has not answered, or the
            ticket is not in the ring.
        """
        cdef cseq_cell* c = self.ring.at(cell)
        cdef uint64_t word = cseq_load_acq_u64(&c.word)
        cdef uint64_t* f = c.record
        if CSEQ_STATE(word) != CSEQ_READY or CSEQ_TICKET(word) != ticket:
            return None
        return word, cell, c.status, c.slot, c.capacity, (f[0], f[1], f[2], f[3])

    def holds(self, uint32_t cell, uint64_t ticket):
        """Whether a ticket is still in the ring."""
        cdef uint64_t word = cseq_load_acq_u64(&self.ring.at(cell).word)
        return CSEQ_STATE(word) != CSEQ_FREE and CSEQ_TICKET(word) == ticket

    def take_reply(self, uint32_t cell, uint64_t token, str failed not None):
        """Take the answer to a CALL or BEGIN ticket out of the ring; see `peek`.

        `failed`: the exception raised instead, as text; it ends the stream, but not that of keys.
        """
        if cseq_load_acq_u64(&self.ring.at(cell).word) != token:
            return
        if <int>cell == self.calling:
            self.calling = -1
            self.leave(cell)
        elif self.outstanding and cell == self.cell_before(self.outstanding):
            self.leave_oldest()
        if failed and not self.keyed:
            self.failed = failed
            self.give_up()
        self.sweep()

    # -- items

    cdef int receive(self) except -1:
        """Wait for the oldest ticket, and decode its item. Asks for items if there is no ticket."""
        if not self.outstanding:
            return self.request()
        found = self.decode_small() or self.read(self)
        if found is None or self.over:  # a call that a signal handler has made has ended the stream
            return 0
        self.item, self.failing, ended, self.item_bytes = found
        self.decoded = True
        if ended and not self.failing:
            self.leave_oldest()
            self.give_up()
        return 0

    cdef tuple decode_small(self):
        """As `read`, in C: for a ticket of a small item of a known structure; else None."""
        cdef uint32_t cell = self.cell_before(self.outstanding)
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        cdef uint64_t token = cseq_load_acq_u64(&c.word)
        cdef uint64_t* f = c.record
        cdef uint64_t used = f[0] + f[1] + f[2] + f[3]
        cdef Mapping slot
        cdef Plan plan
        if (self.mapped is None or CSEQ_STATE(token) != CSEQ_READY or c.batch != ASK_ITEM
                or c.status or not f[1] or used > self.small
                or (c.capacity > MOST_KEPT and self.slots.is_due())):  # for `Arena.tidy`
            return None
        if c.slot >= <uint64_t>len(self.mapped):
            return None
        slot = self.mapped[c.slot]
        if slot is None or <uint64_t>slot.size < c.capacity:
            return None
        plan = self.reader.find(slot, f)
        if plan is None:
            return None
        objects = None
        if f[3]:
            if not self.reader.is_in_band(slot, f):
                return None
            try:
                objects = self.reader.load(slot, used - f[3], f[3])
            except Exception:
                return None  # of the user's class: `read` finds it again
        return plan.read(slot, f, True, objects, None), "", False, used

    cdef bint prepare(self) except -1:
        """Wait until the next item is decoded, and ask for more items. False: there are no more.

        May run any code, but none between finding an item and the return.
        """
        while not self.over and (self.outstanding or not self.keyed):
            if not self.decoded:
                self.receive()
                continue
            if not self.keyed:
                self.request()
            PyErr_CheckSignals()
            if self.decoded:
                return True
        return False

    cdef object pop(self):
        """Take the oldest ticket, whose item is decoded, out; without keys, post the next one."""
        item, self.item = self.item, None
        self.decoded = False
        self.leave_oldest()
        self.asked -= 1
        cseq_count_u64(&self.item_count, 1)
        cseq_count_u64(&self.byte_count, self.item_bytes)
        if self.failing:
            self.failed = self.failing
            self.give_up()
        elif self.has_room() and cseq_ring_state(self.ring.r, self.next_cell) == CSEQ_FREE:
            self.append(ASK_ITEM, self.start, None)
            self.wake_in_time()
        return item


cdef Block ints_of(key, Py_ssize_t most):
    """The numbers of a list of at most `most` ints within int64 (no subclasses); else None."""
    cdef Py_ssize_t k
    cdef int64_t* words
    cdef int overflow = 0
    cdef Block block
    cdef tuple numbers  # another thread may change the list
    if type(key) is not list:
        return None
    numbers = tuple(key)
    if PyTuple_GET_SIZE(numbers) > most:
        return None
    block = Block(8 * PyTuple_GET_SIZE(numbers))
    words = <int64_t*>block.data
    for k in range(PyTuple_GET_SIZE(numbers)):
        if type(<object>PyTuple_GET_ITEM(numbers, k)) is not int:
            return None
        words[k] = PyLong_AsLongLongAndOverflow(<object>PyTuple_GET_ITEM(numbers, k), &overflow)
        if overflow:
            return None
    return block


@cython.final
cdef class ItemReader:
    """Returns items, of one worker or of all; in an epoch of keys, draws the keys and posts them.

    One step of C takes an item out, advances `line`, counts the item and posts the next key's
    ticket. No Python code runs between it and the return to the caller of `next`, `commit` or
    `ItemIterator`.

    `line` has the workers in the order in which items are taken from them: without keys, each
    worker that has more items, once; with keys, a worker for each of its tickets. If ordered, the
    item of the first one is waited for; else the first one that has an item is moved to the
    beginning.

    A key goes through three steps::

        draw     store the iterator's next key in `key`; the next step may be interrupted
        write    store its ints, or a `Request`, in `drawn`
        post     post its ticket, in the step that takes an item out: C alone

    Parameters
    ----------
    run : RunState
        When its generation changes, the epoch ends.
    consumers : list of StreamConsumer
    write : callable
        ``write(key, number)`` → `Request`.
    wait : callable
        ``wait(consumers)`` sleeps until the oldest ticket of one of them is answered.
    over : callable
        ``over()`` is called where the caller is told that there are no more items, of any worker.
    depth : int
        The most keys of a worker that are posted, being made, or ready.
    raises : bool
        Raise the exception of an `ItemFailure` in place of the item; else return the `ItemFailure`.

    Attributes
    ----------
    generation : int
        The run's `generation` when the epoch was begun; -1: no epoch is under way.
    taken : int
        Items that were returned or raised in this epoch.
    """

    cdef readonly RunState run
    cdef readonly int64_t generation
    cdef readonly uint64_t taken
    cdef bint raises
    cdef list consumers
    cdef object write, wait, over
    cdef uint32_t depth
    cdef bint ordered
    cdef uint32_t* line             # numbers of workers
    cdef Py_ssize_t length          # of `line`
    # The keys.
    cdef bint keyed, free
    cdef object keys                # the iterator; None: there is none, or it has ended
    cdef object key                 # drawn and not yet written; NOTHING: there is none
    cdef list drawn                 # `Block`s and `Request`s, to be posted
    cdef object error               # to be raised after the items of all keys
    cdef object incomplete          # the one of them that is raised until an epoch begins
    cdef uint64_t ahead             # keys that are drawn ahead of what was taken
    cdef uint64_t each              # the most of one worker that are posted and not taken
    cdef uint64_t posted
    cdef Py_ssize_t latest          # the worker of the key that was posted last

    def __cinit__(self, RunState run not None, list consumers not None, write, wait, over, *,
                  uint32_t depth, bint raises=True):
        cdef size_t room = 1
        cdef StreamConsumer consumer
        self.run, self.consumers = run, consumers
        self.write, self.wait, self.over = write, wait, over
        self.depth, self.raises = depth, raises
        for consumer in consumers:
            room += consumer.ring.r.capacity
        self.line = <uint32_t*>PyMem_RawCalloc(room, 4)
        if self.line == NULL:
            raise MemoryError(f"no memory for {len(consumers)} streams")
        self.generation = -1
        self.key = NOTHING
        self.drawn = []

    def __dealloc__(self):
        PyMem_RawFree(self.line)

    cdef inline StreamConsumer at(self, Py_ssize_t k):
        """The consumer at position `k` of the line."""
        return <StreamConsumer>PyList_GET_ITEM(self.consumers, self.line[k])

    # -- the epoch

    def end(self):
        """Give up the epoch."""
        before = self.keys, self.key, self.drawn, self.error  # their destructors may run code
        cdef list drawn = []
        self.generation = -1
        self.keys, self.key, self.drawn, self.error = None, NOTHING, drawn, None
        self.incomplete = None
        self.length = 0

    def begin(self, keys=None, *, bint ordered=True, bint free=False, uint32_t first=0):
        """Set up an epoch, once the workers are told to begin it; `open` lets it be read.

        Parameters
        ----------
        keys : iterator, optional
        ordered : bool
            Items come in the order of the keys, or of the workers in turn; else as they are ready.
        free : bool
            A key goes to the worker that has the fewest keys to work on; else to the workers in turn.
        first : int
            The worker whose turn is the first.

        Raises
        ------
        BaseException
            The iterator's exception, or that of writing a key.
        """
        cdef Py_ssize_t k
        cdef StreamConsumer consumer = self.consumers[0]
        cdef Py_ssize_t count = len(self.consumers)
        self.end()
        self.taken = self.posted = 0
        self.ordered, self.free, self.keyed = ordered, free, keys is not None
        self.keys = keys
        self.latest = <Py_ssize_t>first - 1
        self.ahead = min(consumer.prefetch, TICKETS) * <uint64_t>count
        self.each = min(consumer.prefetch, <uint64_t>self.depth)
        if keys is None:
            for k in range(count):
                self.line[k] = <uint32_t>((<Py_ssize_t>first + k) % count)
            self.length = count
            return
        while self.fetch(0):
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.post(True)
        for consumer in self.consumers:
            consumer.wake()

    def open(self, int64_t generation):
        """Let the epoch be read: the workers have begun it."""
        self.generation = generation

    cdef int check(self, int64_t generation) except -1:
        """Raise InterruptedError if the epoch is not under way, also for what fails since it has ended."""
        if not self.run.is_at(<uint64_t>generation):
            raise InterruptedError("no epoch is under way: none was begun, or it was interrupted; "
                                   "call begin()") from None
        return 0

    # -- keys

    cdef bint fetch(self, uint64_t leaving) except -1:
        """Do one step before a key can be posted: draw it, or write it.

        `leaving` items are about to be taken. True: a step was done, which may have run any code.
        False: there is none left to do, and a drawn key can be posted.
        """
        cdef Py_ssize_t known = (<Py_ssize_t>len(self.drawn)) + (self.key is not NOTHING)
        if self.key is not NOTHING:
            self.put()
        elif (self.keys is not None
                and self.posted + <uint64_t>known < self.ahead + self.taken + leaving):
            self.draw()
        else:
            return False
        return True

    cdef int draw(self) except -1:
        """Draw a key. An exception of the iterator is raised after the items of the keys before.

        One that is no `Exception`, such as KeyboardInterrupt of a signal handler, is raised at
        once. The iterator is asked again afterwards; if it has ended, as a generator has, that is
        an error, which is raised again and again until an epoch begins.
        """
        try:
            self.key = next(self.keys)
        except StopIteration:
            self.keys = None
        except Exception as error:
            self.keys, self.error = None, error
        except BaseException as cause:
            self.error = self.incomplete = RuntimeError(
                f"the iterator of keys was interrupted ({type(cause).__name__}) and has ended: "
                "the rest of the epoch may be missing")
            raise
        else:
            self.error = None
        return 0

    cdef int put(self) except -1:
        """Write the key that was drawn."""
        cdef StreamConsumer first = self.consumers[0]
        cdef Py_ssize_t most = <Py_ssize_t>first.ring.r.batch_size - STREAM_KEYS
        written = ints_of(self.key, most)
        if written is None:
            try:
                written = self.write(self.key, self.posted + <uint64_t>len(self.drawn))
            except TypeError as error:  # it cannot be pickled
                self.keys, self.error, self.key = None, error, NOTHING
                return 0
        self.drawn.append(written)
        self.key = NOTHING
        return 0

    cdef Py_ssize_t choose(self, bint in_turn) noexcept:
        """The worker that the next key goes to; -1: that has no room for it."""
        cdef Py_ssize_t count = len(self.consumers)
        cdef Py_ssize_t k, worker
        cdef Py_ssize_t chosen = -1
        cdef uint32_t fewest = 0
        cdef uint32_t working
        cdef StreamConsumer consumer
        if self.free and not in_turn:
            for k in range(count):
                consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, k)
                working = consumer.unanswered()
                if consumer.outstanding < self.depth and (chosen < 0 or working < fewest):
                    chosen, fewest = k, working
            return chosen
        for k in range(1 if self.ordered or in_turn else count):
            worker = (self.latest + 1 + k) % count
            consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, worker)
            if consumer.asked < self.each:
                return worker
        return -1

    cdef int post(self, bint in_turn) except -1:
        """Post the keys that were drawn, as far as their workers have room."""
        cdef Py_ssize_t worker
        cdef StreamConsumer consumer
        while self.drawn:
            worker = self.choose(in_turn)
            if worker < 0:
                break
            consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, worker)
            consumer.post_key(<object>PyList_GET_ITEM(self.drawn, 0), self.posted)
            del self.drawn[0]
            self.latest = worker
            self.posted += 1
            self.line[self.length] = <uint32_t>worker
            self.length += 1
        return 0

    # -- items

    def next(self, Py_ssize_t worker):
        """Return the next item of a worker's stream, in an epoch without keys.

        Raises
        ------
        StopIteration
            There is none.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        cdef StreamConsumer consumer
        cdef int64_t generation
        self.run.lock.enter_anew()
        generation = self.generation
        try:
            while True:
                self.check(generation)
                if not 0 <= worker < len(self.consumers):
                    raise IndexError(f"worker={worker} is not one of {len(self.consumers)}")
                if self.keyed:
                    raise RuntimeError("the items of keys do not come worker by worker: iterate, or "
                                       "use peek() and commit()")
                consumer = self.consumers[worker]
                if not consumer.prepare():
                    if self.are_over():
                        self.over()
                        self.check(generation)
                    raise StopIteration
                if self.run.is_at(<uint64_t>generation):
                    self.taken += 1
                    return self.given(consumer.pop())
        except Exception:
            self.check(generation)
            raise
        finally:
            self.run.lock.leave()

    cdef bint are_over(self) noexcept:
        """Whether no worker has more items."""
        cdef StreamConsumer consumer
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(self.consumers)):
            consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, k)
            if not consumer.over:
                return False
        return True

    cdef Py_ssize_t find_answered(self) noexcept:
        """Position in the line of the first worker with an item ready, or without more; -1:
        none."""
        cdef Py_ssize_t k
        for k in range(self.length):
            if self.at(k).is_answered():
                return k
        return -1

    cdef void leave(self, Py_ssize_t k) noexcept:
        """Remove a worker from the line."""
        self.length -= 1
        memmove(self.line + k, self.line + k + 1, 4 * <size_t>(self.length - k))

    cdef StreamConsumer find(self, int64_t generation, bint strict):
        """The consumer at the beginning of the line, with an item ready; None: there are no more.

        `strict`: raise RuntimeError for a stream that an exception has ended.
        """
        cdef StreamConsumer consumer
        cdef Py_ssize_t k
        cdef uint32_t worker
        cdef bint found
        while True:
            self.check(generation)
            if not self.length:
                if self.keyed and (self.fetch(0) or self.drawn):
                    self.post(False)
                    continue
                if self.error is not None:
                    error = self.error
                    if error is not self.incomplete:  # that is raised until an epoch begins
                        self.error = None
                    raise error
                self.over()
                self.check(generation)
                return None
            k = 0 if self.ordered else self.find_answered()
            if k < 0:
                self.wait([self.consumers[number] for number in self.waited_for()])
                continue
            worker = self.line[k]
            memmove(self.line + 1, self.line, 4 * <size_t>k)
            self.line[0] = worker
            consumer = self.at(0)
            found = consumer.prepare()
            self.check(generation)
            if not found:
                if strict and consumer.failed:
                    raise RuntimeError(f"{consumer.failed}; begin another epoch")
                self.leave(0)
            elif not self.keyed or not self.fetch(1):
                return consumer

    cdef set waited_for(self):
        """The workers in the line."""
        return {self.line[k] for k in range(self.length)}

    cdef object take(self, StreamConsumer consumer):
        """Take out the item of the consumer at the beginning of the line; post the next key."""
        cdef uint32_t worker = self.line[0]
        item = consumer.pop()
        self.taken += 1
        if self.keyed:
            self.leave(0)
            self.post(False)
        elif not consumer.failed:  # else it stays, for `find` to say so
            self.leave(0)
            self.line[self.length] = worker
            self.length += 1
        return item

    cdef bint is_raised(self, item) noexcept:
        """Whether there is an exception in place of an item, and it is to be raised."""
        return self.raises and type(item) is ItemFailure

    cdef object given(self, item):
        """Return an item that was taken out, or raise what is in its place."""
        if self.is_raised(item):
            raise (<ItemFailure>item).error
        return item

    def glance(self):
        """Return what the next call returns, in an ordered epoch of keys, if it is ready; else None.

        It is decoded, and stays next. Nothing is waited for, and no key is drawn. In place of an
        exception, also with `raises`, there is its `ItemFailure`.
        """
        cdef StreamConsumer consumer
        self.run.lock.enter()
        try:
            if (not self.keyed or not self.ordered or not self.length or self.generation < 0
                    or not self.run.is_at(<uint64_t>self.generation)):
                return None
            consumer = self.at(0)
            if (consumer.is_answered() and consumer.prepare() and self.length
                    and consumer is self.at(0)):
                return consumer.item
            return None
        except MemoryError:
            return None  # the call that takes the item decodes it again
        finally:
            self.run.lock.leave()

    def peek(self):
        """Return the number in the epoch of the next item, and the item. Nothing changes.

        An exception of the producer is taken out as it is raised.

        Returns
        -------
        tuple
            (number, item). `commit` takes the item out.

        Raises
        ------
        StopIteration
            There are no more.
        RuntimeError
            An exception of the producer, raised before, has ended a stream.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        cdef StreamConsumer consumer
        cdef int64_t generation
        self.run.lock.enter_anew()
        generation = self.generation
        try:
            consumer = self.find(generation, True)
            if consumer is None:
                raise StopIteration
            if self.is_raised(consumer.item):
                self.given(self.take(consumer))
            return self.taken, consumer.item
        except Exception:
            self.check(generation)
            raise
        finally:
            self.run.lock.leave()

    def commit(self, uint64_t number):
        """Take out the item that `peek` has returned with this number, unless that was done."""
        cdef StreamConsumer consumer
        cdef int64_t generation
        self.run.lock.enter_anew()
        generation = self.generation
        try:
            while True:
                self.check(generation)
                if number != self.taken:
                    return
                if not self.keyed or not self.fetch(1):
                    break
            consumer = self.at(0) if self.length else None
            if consumer is None or not consumer.decoded or self.is_raised(consumer.item):
                raise RuntimeError(f"item {number} was not peeked at")
            item = self.take(consumer)  # its destructor may run code: after all else is done
        except Exception:
            self.check(generation)
            raise
        finally:
            self.run.lock.leave()


@cython.final
cdef class ItemIterator:
    """An iterator over the items of an epoch: of all workers in turn, or of the keys.

    Parameters
    ----------
    reader : ItemReader
    *keep
        Objects that the iterator keeps alive.
    """

    cdef readonly ItemReader reader
    cdef readonly int64_t generation
    cdef object keep

    def __cinit__(self, ItemReader reader not None, *keep):
        reader.check(reader.generation)
        self.reader, self.generation, self.keep = reader, reader.generation, keep

    def __iter__(self):
        return self

    def __next__(self):
        cdef StreamConsumer consumer
        self.reader.run.lock.enter_anew()
        try:
            consumer = self.reader.find(self.generation, False)
            if consumer is None:
                raise StopIteration
            return self.reader.given(self.reader.take(consumer))
        except Exception:
            self.reader.check(self.generation)
            raise
        finally:
            self.reader.run.lock.leave()
