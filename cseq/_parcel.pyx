# cython: language_level=3, freethreading_compatible=True
"""Parcels: tickets on their way to another machine, their batches on the way back.

Both begin with an array of 64-bit words, little-endian. What `Carrier` writes, in the trainer, `ParcelFeed` reads, on
the machine that makes the batches; and the other way round::

    request   count | count times: seed, epoch, batch, start, indices, sizes | indices and sizes, by ticket
    answer    count | nanoseconds | count times: status, offset, record | the bytes of small batches

Batches are in the answer as they lay in their slots. Nothing is decoded on the way. Small ones are at these offsets
(bytes), multiples of 64. The answer is a list: a batch of `LARGE` bytes or more is an array of its own after the first
one, the k-th for the offset -k. It is the slot itself, under a lease: a transport that copies what it sends is to have
nothing copied before; at the other end it is received into a slot (`Carrier.land`). The nanoseconds are those that the
workers had this parcel to work on, and none before it.
"""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.string cimport memcpy, memset
from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._codec cimport SlotEncoder
from cseq._core cimport Ring
from cseq._headers cimport *
from cseq._lock cimport Lock
from cseq._memory cimport LARGE, MOST_KEPT, Block, Mapping, Memory
from cseq._plan cimport aligned
from cseq._slots cimport Slots
from cseq._source cimport KeySource
from cseq._work cimport Runner

from collections import deque

import numpy

cnp.import_array()

cdef enum:
    ASKED = 6      # words of a ticket in a request, before all indices
    HEAD = 2       # words of an answer, before those of its tickets
    ANSWERED = 6   # words of a ticket in an answer
    RAISED = 1     # a status: see stage.py

cdef object BYTES = numpy.dtype(numpy.uint8)


cdef int64_t* words_of(cnp.ndarray array, Py_ssize_t least) except NULL:
    """The words of an array of bytes or words, of which there are so many at least."""
    if not cnp.PyArray_IS_C_CONTIGUOUS(array) or cnp.PyArray_NBYTES(array) < 8 * least:
        raise ValueError(f"a parcel of {array.nbytes} bytes ends before its tickets do")
    return <int64_t*>cnp.PyArray_DATA(array)


cdef inline Py_ssize_t asked_of(cseq_cell* c) noexcept:
    """How many words a ticket has in its cell: indices, and sizes of units."""
    return <Py_ssize_t>c.count + c.parts


def outline(list tickets not None, list answer not None):
    """What an answer says beside its batches.

    Returns
    -------
    tuple of (int, float, list)
        Its bytes; how many seconds the workers had it; the tickets in whose place there are exceptions.
    """
    cdef Py_ssize_t count = len(tickets)
    cdef Py_ssize_t k
    cdef int64_t* head = head_of(answer, count)
    return (sum([part.nbytes for part in answer]), <double>head[1] / 1e9,
            [tickets[k] for k in range(count) if head[HEAD + ANSWERED * k] & RAISED])


cdef int64_t* head_of(list answer, Py_ssize_t count) except NULL:
    """The words of an answer for so many tickets."""
    cdef int64_t* head = words_of(answer[0], HEAD + ANSWERED * count)
    if head[0] != count:
        raise ValueError(f"an answer for {head[0]} tickets, not {count}")
    return head


@cython.final
cdef class ParcelSource(KeySource):
    """Batches that keys name, for a ring whose tickets travel: they have all that an agent has to know.

    A list of ints is a ticket's indices. Any other key is what `pickle` returns for it: an array of indices,
    and one size.

    Parameters
    ----------
    seed, number : int
        The seed of all tickets, and the number of the first one. Their epoch is 0, their place their number.
    prefetch : int
        How many keys are drawn before the first batch is taken; for each one taken then two, up to `depth`.
    others
        See `KeySource`.
    """

    cdef uint64_t seed, number, prefetch

    def __cinit__(self, *_, uint64_t seed, uint64_t number, uint64_t prefetch, **__):
        self.seed, self.number, self.prefetch, self.each = seed, number, prefetch, self.depth

    cdef bint is_ready(self, uint64_t taken) noexcept:
        self.ahead = min(<uint64_t>self.depth, self.prefetch + taken)
        return KeySource.is_ready(self, taken)

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words = cseq_ring_indices(ring.r, cell)
        cdef uint32_t count, parts = 0
        key = self.drawn.pop(0)
        if type(key) is Block:
            count = <uint32_t>((<Block>key).size // 8)
            memcpy(words, (<Block>key).data, 8 * <size_t>count)
        else:
            count, parts = <uint32_t>(cnp.PyArray_SIZE(key) - 1), 1
            memcpy(words, cnp.PyArray_DATA(key), 8 * (<size_t>count + 1))
        cseq_ring_cell(ring.r, cell).parts = parts
        ring.offer(cell, ticket, 0, self.number, count, self.number, self.seed)
        self.number += 1
        self.posted += 1
        return 1


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Landing(Memory):
    """A slot that a batch comes to from another machine; free again when this is dropped, unless it was published."""

    cdef Slots slots
    cdef Memory memory  # its mapping
    cdef int64_t slot, capacity  # -1: it was published; bytes that are committed

    def __dealloc__(self):
        if self.slots is None:
            return
        if self.slot >= 0:
            self.slots.set_free(<Py_ssize_t>self.slot)
        cseq_add_sc_u64(&self.slots.held, <uint64_t>-1)  # the table may be unmapped from now on


@cython.final
cdef class Carrier:
    """A runner's end of the ring, and of the slots, for a runner that works on many tickets at a time.

    The tickets are made elsewhere. Any thread may call `land`, `give_up` and `notify`; one calls all else.

    Parameters
    ----------
    runner : Runner
        The only one of the ring. It holds no ticket between two calls.
    writer : SlotEncoder
        Its `Writer`.
    """

    cdef Runner runner
    cdef SlotEncoder writer
    cdef Lock lock          # around all that claims or publishes. SYNC: what the last owner did
    cdef uint64_t* words    # by cell: the word of the ticket that is held there; 0: none
    cdef readonly uint32_t held
    cdef uint64_t floor     # tickets from before this number were given up
    cdef bint has_floor

    def __cinit__(self, Runner runner not None, SlotEncoder writer not None):
        self.runner, self.writer, self.lock = runner, writer, Lock()
        self.words = <uint64_t*>PyMem_RawCalloc(runner.r.capacity, sizeof(uint64_t))
        if self.words == NULL:
            raise MemoryError(f"no memory for {runner.r.capacity} cells")

    def __dealloc__(self):
        PyMem_RawFree(self.words)

    # -- claim

    @property
    def waiting(self):
        """Tickets that can be claimed."""
        return self.runner.ring.depths()[0]

    def claim(self, uint32_t most):
        """Claim up to so many tickets, the oldest first, and do not wait.

        Returns
        -------
        list of int
            A number for each ticket, that `request` and `publish` know it by.
        """
        cdef list tickets = []
        cdef uint32_t cell
        cdef uint64_t word
        cdef uint64_t now = cseq_now_ns()
        self.lock.enter()
        try:
            while most and self.runner.claim_at_once(now):
                cell = <uint32_t>self.runner.cell
                word = cseq_load_acq_u64(&self.runner.c.word)
                if self.is_given_up(word):
                    self.runner.deliver(self.runner.c, RAISED)
                    continue
                self.runner.cell = -1  # it is set aside
                self.words[cell] = word
                self.held += 1
                most -= 1
                tickets.append(word >> 24 << 24 | cell)
        finally:
            self.lock.leave()
        tickets.sort()
        return tickets

    cdef inline bint is_given_up(self, uint64_t word) noexcept:
        """Whether a ticket was posted before the floor; numbers are compared modulo 2**40."""
        return self.has_floor and cseq_before(CSEQ_TICKET(word), CSEQ_TICKET(self.floor << 24))

    cdef inline int find(self, uint64_t ticket) noexcept:
        """The cell of a ticket that is held; -1: it is not, any more."""
        cdef uint32_t cell = ticket & 0xFFFFFF
        if cell >= self.runner.r.capacity or not self.words[cell]:
            return -1
        return <int>cell if self.words[cell] >> 24 == ticket >> 24 else -1

    def request(self, list tickets not None):
        """What the tickets ask for: the words of a request. One that is not held any more asks for nothing."""
        cdef Py_ssize_t count = len(tickets)
        cdef Py_ssize_t size = 1 + ASKED * count
        cdef cnp.npy_intp length
        cdef cnp.ndarray made
        cdef int64_t* head
        cdef int64_t* indices
        cdef cseq_cell* c
        cdef int cell
        self.lock.enter()
        try:
            for ticket in tickets:
                cell = self.find(ticket)
                size += 0 if cell < 0 else asked_of(cseq_ring_cell(self.runner.r, <uint32_t>cell))
            length = size
            made = cnp.PyArray_ZEROS(1, &length, cnp.NPY_INT64, 0)
            head = <int64_t*>cnp.PyArray_DATA(made)
            head[0] = count
            head += 1
            indices = head + ASKED * count
            for ticket in tickets:
                cell = self.find(ticket)
                if cell >= 0:
                    c = cseq_ring_cell(self.runner.r, <uint32_t>cell)
                    head[0], head[1], head[2] = <int64_t>c.seed, <int64_t>c.epoch, <int64_t>c.batch
                    head[3], head[4], head[5] = <int64_t>c.start, c.count, c.parts
                    memcpy(indices, cseq_ring_indices(self.runner.r, <uint32_t>cell), 8 * asked_of(c))
                    indices += asked_of(c)
                head += ASKED
        finally:
            self.lock.leave()
        return made

    # -- publish

    def land(self, Py_ssize_t nbytes):
        """Room for a large batch that is about to come: in a slot, so that `publish` copies nothing.

        Returns
        -------
        numpy.ndarray
            Bytes; the slot is free again when they are dropped unpublished. Without a slot if there is no room, or
            the ring is closed.
        """
        cdef SlotEncoder writer = self.writer
        cdef Landing landing = None
        self.lock.enter()
        try:
            if not cseq_ring_closed(self.runner.r):
                writer.open_ticket(self.runner)
                writer.fit(nbytes)
                landing = Landing.__new__(Landing)
                landing.slots, landing.slot, landing.capacity = writer.slots, writer.slot, writer.capacity
                landing.memory, landing.data, landing.size = writer.memory, writer.memory.data, nbytes
                cseq_add_sc_u64(&writer.slots.held, 1)
                writer.slot = -1
        except MemoryError:  # the slot that was taken is the next one's
            pass
        finally:
            self.lock.leave()
        return numpy.empty(nbytes, BYTES) if landing is None else landing.view(0, BYTES, (nbytes,))

    def publish(self, list tickets not None, list answer not None):
        """Publish the batches of an answer; those of tickets that are not held any more are dropped.

        Parameters
        ----------
        tickets : list of int
            Those of the request.
        answer : list of numpy.ndarray
            Bytes.

        Returns
        -------
        int
            How many were published.
        """
        cdef Py_ssize_t count = len(tickets)
        cdef int64_t* head = head_of(answer, count)
        cdef Py_ssize_t k, published = 0
        for k in range(count):
            self.lock.enter()
            try:
                published += self.publish_one(tickets[k], head + HEAD + ANSWERED * k, answer)
            finally:
                self.lock.leave()
        return published

    cdef int publish_one(self, uint64_t ticket, const int64_t* head, list answer) except -1:
        cdef int cell = self.find(ticket)
        cdef uint32_t status = <uint32_t>head[0]
        cdef uint64_t nbytes = 0
        cdef int64_t at = max(head[1], 0)
        cdef cnp.ndarray part
        cdef cseq_cell* c
        cdef int k
        if cell < 0 or cseq_ring_closed(self.runner.r):  # closed: the slots may be gone
            return 0
        for k in range(4):
            nbytes += <uint64_t>head[2 + k]
        part = answer[max(-head[1], 0)]
        if not cnp.PyArray_IS_C_CONTIGUOUS(part) or <uint64_t>at + nbytes > <uint64_t>cnp.PyArray_NBYTES(part):
            raise ValueError(f"an answer of {part.nbytes} bytes ends before its batches do")
        c = self.enter(<uint32_t>cell)
        try:
            if not nbytes:  # an exception that there was no room for
                self.runner.deliver(c, status)
                return 1
            if not self.adopt(part):
                try:
                    self.writer.open_ticket(self.runner)
                    self.writer.fit(<Py_ssize_t>nbytes)
                    self.writer.memory.put(0, <const char*>cnp.PyArray_DATA(part) + at, <Py_ssize_t>nbytes)
                except MemoryError:
                    self.runner.deliver(c, RAISED)  # without a slot: that there is no room for it
                    return 1
            for k in range(4):
                c.record[k] = <uint64_t>head[2 + k]
            self.writer.hand_over(self.runner, c, status)
        finally:
            self.leave(<uint32_t>cell)
        return 1

    cdef bint adopt(self, cnp.ndarray part) except -1:
        """Make the slot that a part of an answer has landed in the writer's present one, if there is such a slot."""
        cdef SlotEncoder writer = self.writer
        cdef Landing landing
        base = cnp.get_array_base(part)
        if type(base) is not Landing:
            return False
        landing = base
        if landing.slot < 0 or landing.slots is not writer.slots:
            return False
        if writer.slot >= 0:  # taken for a ticket that was published without
            writer.slots.release(writer.slot)
        writer.slot, writer.capacity, landing.slot = landing.slot, <Py_ssize_t>landing.capacity, -1
        return True

    cdef cseq_cell* enter(self, uint32_t cell) noexcept:
        """Make a ticket that is held the runner's present one."""
        self.runner.cell = <int>cell
        self.runner.c = cseq_ring_cell(self.runner.r, cell)
        return self.runner.c

    cdef void leave(self, uint32_t cell) noexcept:
        """The ticket is not held any more, if it was published."""
        if self.runner.cell < 0:
            self.words[cell] = 0
            self.held -= 1
        self.runner.cell = -1

    def give_up(self, uint64_t number):
        """Publish all tickets that were posted before the one of this number, with nothing: they were given up.

        Returns
        -------
        int
            How many there were.
        """
        cdef uint32_t cell
        cdef Py_ssize_t count = 0
        self.lock.enter()
        try:
            self.floor, self.has_floor = number, True
            for cell in range(self.runner.r.capacity):
                if self.words[cell] and self.is_given_up(self.words[cell]):
                    self.runner.deliver(self.enter(cell), RAISED)
                    self.leave(cell)
                    count += 1
        finally:
            self.lock.leave()
        return count

    def close(self):
        """Close the writer; what has landed and was not published is dropped. The ring has to be closed."""
        self.lock.enter()
        try:
            self.writer.close()
        finally:
            self.lock.leave()

    # -- wait

    def notices(self):
        """How often this runner was woken: read it before looking for news, and pass it to `wait`."""
        return cseq_load_acq_u32(&self.runner.r.gate[0].event)

    def notify(self):
        """Wake the thread that waits here."""
        cseq_gate_notify_all(&self.runner.r.gate[0])

    def wait(self, uint32_t seen, uint64_t ns, bint claims=True):
        """Sleep until there are tickets to claim (`claims`), `notify` is called or the ring is closed; `ns` at most.

        Returns
        -------
        bool
            False: the ring is closed.
        """
        cdef cseq_ring* r = self.runner.r
        cdef cseq_gate* gate = &r.gate[0]
        cdef uint64_t word
        cdef uint64_t before = cseq_now_ns()
        cseq_gate_enter(gate)
        if cseq_ring_closed(r):
            return False
        if not claims or cseq_ring_find_open(r, 0, &word) < 0:
            with nogil:
                cseq_gate_sleep(gate, seen, ns)
            cseq_histogram_add(&self.runner.meter.wait, cseq_now_ns() - before)
        return not cseq_ring_closed(r)


@cython.final
cdef class Parcel(Memory):
    """A request that is being answered: its answer, as far as it is there.

    Parameters
    ----------
    request : numpy.ndarray
        Words or bytes.
    most : int
        The most indices that a ticket may have.
    """

    cdef cnp.ndarray request
    cdef const int64_t* head      # of the ticket that is posted next
    cdef const int64_t* indices   # its indices, and after them the sizes of its units
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t posted
    cdef Py_ssize_t left          # tickets that are not answered
    cdef Py_ssize_t room          # bytes at `data`
    cdef list large               # batches that are not there
    cdef uint64_t begun           # ns: when its first ticket was posted, and the parcel before was answered

    def __cinit__(self, cnp.ndarray request not None, uint32_t most):
        cdef Py_ssize_t k, size
        cdef int64_t* words = words_of(request, 1)
        cdef int64_t* head
        if not 0 <= words[0] <= (request.nbytes // 8 - 1) // ASKED:
            raise ValueError(f"a parcel of {request.nbytes} bytes ends before its {words[0]} tickets do")
        self.request, self.count, self.large = request, words[0], []
        size = 1 + ASKED * self.count
        for k in range(self.count):
            head = words + 1 + ASKED * k
            if not 0 <= head[5] <= head[4] <= most:
                raise ValueError(f"a batch of {head[4]} samples exceeds batch_size={most} of "
                                 "the fleet that is to make it: make the fleet with a larger batch_size")
            size += head[4] + head[5]
        words_of(request, size)
        self.head, self.indices, self.left = words + 1, words + 1 + ASKED * self.count, self.count
        self.reserve(aligned(8 * (HEAD + ANSWERED * self.count)))
        memset(self.data, 0, <size_t>self.size)
        (<int64_t*>self.data)[0] = self.count

    def __dealloc__(self):
        PyMem_RawFree(self.data)

    cdef int reserve(self, Py_ssize_t nbytes) except -1:
        """Make the answer so many bytes longer."""
        cdef Py_ssize_t room
        cdef void* data
        if self.size + nbytes > self.room:
            room = max(2 * self.room, self.size + nbytes)
            data = PyMem_RawRealloc(self.data, <size_t>room)
            if data == NULL:
                raise MemoryError(f"no memory for an answer of {room} bytes")
            self.data, self.room = <char*>data, room
        self.size += nbytes
        return 0

    cdef void skip(self) noexcept:
        """Answer the next ticket, which asks for nothing, with nothing."""
        (<int64_t*>self.data + HEAD + ANSWERED * self.posted)[0] = RAISED
        self.posted += 1
        self.left -= 1
        self.head += ASKED

    @property
    def is_answered(self):
        """Whether all tickets are answered."""
        return not self.left

    def answer(self):
        """The answer, when it is complete: arrays of bytes, on this object and on slots that are leased to them."""
        if self.left:
            raise RuntimeError(f"{self.left} of {self.count} tickets are not answered")
        return [self.view(0, BYTES, (self.size,)), *self.large]


@cython.final
cdef class ParcelFeed:
    """Posts the tickets of parcels, and takes what the workers answer.

    One thread at a time; it is the ring's trainer.

    Parameters
    ----------
    ring : Ring
        With one stage.
    arena : Arena
        The slots of its workers.
    """

    cdef Ring ring
    cdef object arena
    cdef Slots slots
    cdef list mapped           # of each slot its `Mapping`, or None
    cdef object parcels        # those with tickets that are not posted
    cdef list by_cell          # the parcel of the ticket in each cell, or None
    cdef uint32_t* number      # of the ticket in its parcel, by cell
    cdef uint32_t* line        # the cells of the tickets in the ring, in the order of their posts
    cdef uint32_t length
    cdef uint64_t ticket
    cdef uint64_t latest       # ns: when a parcel was answered last

    def __cinit__(self, Ring ring not None, arena not None):
        self.ring, self.arena, self.slots, self.mapped = ring, arena, arena.slots, arena.mapped
        self.parcels, self.by_cell = deque(), [None] * ring.r.capacity
        self.number = <uint32_t*>PyMem_RawCalloc(2 * ring.r.capacity, sizeof(uint32_t))
        if self.number == NULL:
            raise MemoryError(f"no memory for {ring.r.capacity} cells")
        self.line = self.number + ring.r.capacity

    def __dealloc__(self):
        PyMem_RawFree(self.number)

    def cells(self):
        """Those of the tickets in the ring, in the order of their posts."""
        cdef uint32_t k
        return [self.line[k] for k in range(self.length)]

    def add(self, Parcel parcel not None):
        """Add a parcel; its tickets are posted after those of the parcels before."""
        if parcel.posted < parcel.count:
            self.parcels.append(parcel)

    def advance(self):
        """Take what is ready, and post what there is room for.

        Returns
        -------
        list of Parcel
            Those that are answered now.
        """
        cdef list answered = []
        cdef uint32_t k, cell, kept = 0
        cdef Parcel parcel
        cdef int vacant
        for k in range(self.length):
            cell = self.line[k]
            if not cseq_ring_ready(self.ring.r, cell):
                self.line[kept] = cell
                kept += 1
                continue
            try:
                parcel = self.take(cell)
            except BaseException:  # what is not taken stays in the line
                for k in range(k, self.length):
                    self.line[kept] = self.line[k]
                    kept += 1
                self.length = kept
                raise
            if not parcel.left:
                answered.append(self.finish(parcel))
        self.length = kept
        while self.parcels:
            vacant = self.ring.find_vacant()
            if vacant < 0:
                break
            parcel = self.parcels[0]
            if parcel.head[4]:
                self.post(<uint32_t>vacant, parcel)
            else:
                parcel.skip()
            if parcel.posted == parcel.count:
                self.parcels.popleft()
                if not parcel.left:
                    answered.append(self.finish(parcel))
        if self.ring.unwoken:
            self.ring.wake()
        return answered

    cdef Parcel finish(self, Parcel parcel):
        """Note how long a parcel has taken, which is answered now."""
        cdef uint64_t now = cseq_now_ns()
        (<int64_t*>parcel.data)[1] = <int64_t>(now - max(parcel.begun, self.latest))
        self.latest = now
        return parcel

    cdef int post(self, uint32_t cell, Parcel parcel) except -1:
        """Post the next ticket of a parcel in a free cell."""
        cdef const int64_t* head = parcel.head
        cdef uint32_t count = <uint32_t>head[4]
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        c.parts = <uint32_t>head[5]
        memcpy(cseq_ring_indices(self.ring.r, cell), parcel.indices, 8 * (<size_t>count + c.parts))
        self.number[cell] = <uint32_t>parcel.posted
        self.by_cell[cell] = parcel
        c.posted_ns = cseq_now_ns()
        self.ring.offer(cell, self.ticket, <uint64_t>head[1], <uint64_t>head[2], count, <uint64_t>head[3],
                        <uint64_t>head[0])
        self.ticket += 1
        self.line[self.length] = cell
        self.length += 1
        if not parcel.begun:
            parcel.begun = c.posted_ns
        parcel.posted += 1
        parcel.indices += count + c.parts
        parcel.head += ASKED
        return 0

    cdef Parcel take(self, uint32_t cell):
        """Take an answered ticket into the answer: its bytes, or its slot; free its cell."""
        cdef Parcel parcel = self.by_cell[cell]
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        cdef uint64_t* f = c.record
        cdef Py_ssize_t nbytes = <Py_ssize_t>(f[0] + f[1] + f[2] + f[3])
        cdef Py_ssize_t at = parcel.size
        cdef int64_t* head
        cdef Mapping slot
        cdef uint32_t number = cseq_load_acq_u32(&c.slot)
        cdef int k
        if number == CSEQ_NO_SLOT:
            nbytes = 0
        elif nbytes < LARGE:
            slot = self.find(number, c.capacity)
            slot.inside(0, nbytes)
            parcel.reserve(aligned(nbytes))
            memcpy(parcel.data + at, slot.data, <size_t>nbytes)
        else:
            parcel.large.append((<Memory?>self.arena.lend(number, nbytes, c.capacity)).view(0, BYTES, (nbytes,)))
            at = -len(parcel.large)
        head = <int64_t*>parcel.data + HEAD + ANSWERED * self.number[cell]
        head[0], head[1] = c.status, at
        for k in range(4):
            head[2 + k] = <int64_t>f[k] if nbytes else 0
        parcel.left -= 1
        self.by_cell[cell] = None
        self.slots.detach(c)
        self.ring.outstanding -= 1
        self.ring.free(cell)
        return parcel

    cdef Mapping find(self, uint32_t slot, uint64_t capacity):
        """The memory of a ticket's slot."""
        cdef Mapping mapping = None
        if slot < len(self.mapped):
            mapping = self.mapped[slot]
        if mapping is None or <uint64_t>mapping.size < capacity or (
                capacity > MOST_KEPT and self.slots.is_due()):  # for `Arena.tidy`
            mapping = self.arena.mapping_of(slot, capacity)
        return mapping

    def wait(self, uint32_t seen, uint64_t ns):
        """Sleep until about half of the tickets are answered, or the oldest parcel is; `ns` at most.

        `seen`: `Ring.notices` from before the caller looked for news.
        """
        cdef Parcel oldest
        cdef uint32_t k
        cdef uint32_t at
        if not self.length:
            self.ring.wait(seen, -1, ns)
            return
        at = (self.length - 1) // 2
        oldest = self.by_cell[self.line[0]]
        if oldest.posted == oldest.count:  # its last ticket may come before the middle
            for k in range(at):
                if self.by_cell[self.line[k + 1]] is not oldest:
                    at = k
                    break
        if not self.ring.expect(self.line[at], self.line[at], seen):
            self.ring.wait(seen, <int>self.line[at], ns)
