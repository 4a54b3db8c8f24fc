# cython: language_level=3, freethreading_compatible=True
"""The ring, the shuffle, and readers of orders.

The algorithms are plain C (``include/cseq_*.h``). The classes check arguments and release the GIL.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._headers cimport *
from cseq._memory cimport Block, Mapping, Memory

import numpy

cnp.import_array()

FIELDS = CSEQ_FIELDS

ITEM, CALL = ASK_ITEM, ASK_CALL
CALLED, ASSIGNED = slice(0, REQUEST_WORDS), slice(REQUEST_WORDS, 2 * REQUEST_WORDS)
KEY, KEYS, NO_KEY, IN_REQUEST = KEY_LENGTH, KEY_INTS, WITHOUT_KEY, KEY_IN_REQUEST

cseq_wait_choose()

ALGORITHMS = "fisher-yates-v1", "feistel-v1"
FEISTEL_LEAST = CSEQ_FEISTEL_LEAST
cdef uint64_t MOST_SAMPLES = <uint64_t>1 << 48

# Shuffles of up to BRIEF steps hold the GIL. Longer ones check for signals every SLICE steps.
cdef enum:
    BRIEF = 4096
    SLICE = 1 << 20


cdef uint64_t natural(object value, str name, uint64_t most) except? 0:
    if isinstance(value, (bool, numpy.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is not an integer; pass an integer in [0, {most}]")
    number = int(value.__index__())
    if not 0 <= number <= most:
        raise ValueError(f"{name}={value!r} is out of range; pass an integer in [0, {most}]")
    return number


cdef const int64_t* int64s(cnp.ndarray array) except? NULL:
    if cnp.PyArray_TYPE(array) != cnp.NPY_INT64 or not cnp.PyArray_IS_C_CONTIGUOUS(array):
        raise TypeError(f"{array!r} is not a contiguous array of int64")
    return <const int64_t*>cnp.PyArray_DATA(array)


def derive(seed, epoch, uint64_t purpose, Py_ssize_t count):
    """Return the first `count` random words for (seed, epoch, purpose)."""
    cdef uint64_t words[8]
    cdef Py_ssize_t k
    if not 0 <= count <= 8:
        raise ValueError(f"count={count} is not in [0, 8]")
    cseq_derive(natural(seed, "seed", <uint64_t>-1), natural(epoch, "epoch", <uint64_t>-1),
                purpose, words, count)
    return tuple([words[k] for k in range(count)])


cdef int check_tabled(uint64_t samples) except -1:
    if samples > CSEQ_MOST_TABLED:
        raise ValueError(f"{ALGORITHMS[0]} shuffles at most {CSEQ_MOST_TABLED} samples, not {samples}; "
                         "pass shuffle='feistel' for feistel-v1, which needs no table")
    return 0


cdef object shuffled(uint64_t size, uint64_t* state):
    cdef uint64_t start = 0, end
    check_tabled(size)
    cdef cnp.ndarray result = numpy.empty(size, numpy.uint32)
    cdef uint32_t* data = <uint32_t*>cnp.PyArray_DATA(result)
    if size <= BRIEF:
        cseq_permute(data, size, 0, size, state)
        return result
    while start < size:
        end = min(start + SLICE, size)
        with nogil:
            cseq_permute(data, size, start, end, state)
        PyErr_CheckSignals()
        start = end
    return result


def permutation(n, seed, epoch=0, algorithm=ALGORITHMS[0]):
    """Return the order of the samples in an epoch, for a manager with `n` samples and this seed.

    Parameters
    ----------
    n : int
        The number of samples, which can be 0.
    seed : int
        An integer in [0, 2**64).
    epoch : int
        An integer in [0, 2**64). The epoch and the seed are hashed together, not added.
    algorithm : 'fisher-yates-v1' or 'feistel-v1'
        The algorithm of ``shuffle=True`` or ``shuffle='feistel'``. See docs/inside/shuffle.md. The
        results of an algorithm are the same in all versions of cseq.

    Returns
    -------
    numpy.ndarray
        A new array of shape (n,) that contains each of 0 … n-1 once. The type is ``uint32`` for up
        to 2**32 samples, and ``int64`` for more, which only feistel-v1 supports.

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer or is out of range, or if `n` exceeds 2**32 with
        fisher-yates-v1.
    MemoryError
        If there is not enough memory for the array.

    Examples
    --------
    >>> order = cseq.permutation(5, seed=1)
    >>> sorted(order.tolist()), bool((order == cseq.permutation(5, seed=1)).all())
    ([0, 1, 2, 3, 4], True)
    """
    cdef uint64_t size = natural(n, "n", MOST_SAMPLES)
    cdef uint64_t state[4]
    cdef uint64_t start = 0, end
    cseq_derive(natural(seed, "seed", <uint64_t>-1), natural(epoch, "epoch", <uint64_t>-1),
                CSEQ_PURPOSE_SHUFFLE, state, 4)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not one of {ALGORITHMS}")
    if algorithm == ALGORITHMS[0] or size < CSEQ_FEISTEL_LEAST:
        return shuffled(size, state)
    result = numpy.empty(size, numpy.uint32 if size <= CSEQ_MOST_TABLED else numpy.int64)
    reader = FeistelReader(size, seed)
    while start < size:
        end = min(start + SLICE, size)
        result[start:end] = reader.samples(epoch, start, end - start)[0]
        PyErr_CheckSignals()
        start = end
    return result


cdef class Reader:
    """The base class for readers of an `order.base.Order` with a given seed.

    The samples depend only on the seed, the epoch and the position. An epoch has `units` units of
    up to `room` samples each. Only one thread at a time can use a reader.
    """

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        """Write the samples of units [start, start + count), and return how many were written.

        `out` has space for `count` * `room` samples. Unless NULL, `sizes` receives the unit sizes.
        Long reads release the GIL and run signal handlers. If a handler raises, call this again.
        """
        raise NotImplementedError

    cdef int64_t read_batch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                            uint64_t count, int64_t* out, int64_t* sizes) except -1:
        """Read one rank's part of the global batch [first, first + together). See `read`.

        A subclass may read other units of the global batch, but must read the same number of units.
        """
        return self.read(epoch, start, count, out, sizes)

    def samples(self, epoch, uint64_t start, uint64_t count):
        """Return the samples and the sizes of units [start, start + count)."""
        if start > self.units or count > self.units - start:
            raise IndexError(f"units [{start}, {start + count}) exceed the epoch's {self.units} units")
        sizes = numpy.ones(count, numpy.int64)
        out = numpy.empty(count * self.room, numpy.int64)
        written = self.read(natural(epoch, "epoch", <uint64_t>-1), start, count,
                            <int64_t*>cnp.PyArray_DATA(out), <int64_t*>cnp.PyArray_DATA(sizes))
        return out[:written], sizes


@cython.final
@cython.no_gc
cdef class RangeReader(Reader):
    """Reads the samples 0 … n-1 in order."""

    def __cinit__(self, n, seed=0):
        self.units, self.room, self.seed = natural(n, "n", MOST_SAMPLES), 1, seed

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        cdef uint64_t k
        for k in range(count):
            out[k] = <int64_t>(start + k)
        return count


@cython.final
@cython.no_gc
cdef class FeistelReader(Reader):
    """Reads a feistel-v1 shuffle of at least `FEISTEL_LEAST` samples."""

    cdef cseq_feistel feistel
    cdef uint64_t epoch

    def __cinit__(self, n, seed):
        self.units, self.room = natural(n, "n", MOST_SAMPLES), 1
        self.seed = natural(seed, "seed", <uint64_t>-1)
        if self.units < CSEQ_FEISTEL_LEAST:
            raise ValueError(f"n={n} is less than {CSEQ_FEISTEL_LEAST}")
        self.set_epoch(0)

    cdef void set_epoch(self, uint64_t epoch) noexcept:
        cdef uint64_t words[2 * CSEQ_ROUNDS]
        cseq_derive(self.seed, epoch, CSEQ_PURPOSE_FEISTEL, words, 2 * CSEQ_ROUNDS)
        cseq_feistel_init(&self.feistel, self.units, words)
        self.epoch = epoch

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        if epoch != self.epoch:
            self.set_epoch(epoch)
        cseq_feistel_range(&self.feistel, start, count, out)
        return count


@cython.final
@cython.no_gc
cdef class TableReader(Reader):
    """Reads a fisher-yates-v1 shuffle, computed only as far as it has been read."""

    cdef cseq_order order
    cdef uint32_t* table
    cdef uint32_t* tags
    cdef uint64_t epoch

    def __cinit__(self, n, seed):
        self.units, self.room = natural(n, "n", MOST_SAMPLES), 1
        self.seed = natural(seed, "seed", <uint64_t>-1)
        check_tabled(self.units)

    def __dealloc__(self):
        PyMem_RawFree(self.table)
        PyMem_RawFree(self.tags)

    cdef int make_table(self) except -1:
        cdef uint64_t pages = cseq_table_pages(self.units)
        cdef uint32_t* table = <uint32_t*>PyMem_RawCalloc(<size_t>pages, 4096)
        cdef uint32_t* tags = <uint32_t*>PyMem_RawCalloc(<size_t>pages, 4)
        if table == NULL or tags == NULL:
            PyMem_RawFree(table)
            PyMem_RawFree(tags)
            raise MemoryError(f"cannot allocate the index table of {self.units} samples "
                              f"({pages * 4096} bytes)")
        self.table, self.tags = table, tags
        cseq_order_init(&self.order, self.units, self.table, self.tags)
        cseq_order_start(&self.order, self.seed, self.epoch)
        return 0

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        if self.table == NULL:
            self.make_table()
        # A signal handler may have used this reader for another epoch.
        while True:
            if epoch != self.epoch:
                cseq_order_start(&self.order, self.seed, epoch)
                self.epoch = epoch
            if start + count <= self.order.position + BRIEF:
                break
            with nogil:
                cseq_order_advance(&self.order, start + count, SLICE)
            PyErr_CheckSignals()
        cseq_order_advance(&self.order, start + count, BRIEF)
        cseq_order_copy(&self.order, start, count, out)
        return count


def ring_bytes(uint32_t capacity, uint32_t batch_size, uint32_t runners):
    """Return the size of a ring in bytes."""
    return cseq_ring_bytes(capacity, batch_size, runners)


@cython.final
@cython.no_gc
cdef class Turns:
    """The state of threads that take turns. See cseq_turns.h."""

    def __cinit__(self, uint32_t runners):
        self.t.runners, self.t.between = runners, 1

    @property
    def on(self):
        return bool(self.t.on)

    @property
    def holder(self):
        """The runner that has the turn, as `Ring.first_entry` plus its number, or 0 if none."""
        return self.t.holder

    def learn(self, uint64_t before, uint64_t awake, uint64_t taken):
        """Record that the trainer slept from `before` to `awake` (ns), after `taken` batches."""
        cseq_turns_learn(&self.t, before, awake, taken)


@cython.final
cdef class Ring:
    """The trainer's side of a ring. See docs/inside/ring.md.

    Only one thread at a time can post, commit and cancel. The methods `repost`, `notify_all`, `close`,
    `depths` and `holder` are thread-safe. `Feed` defines the order in which tickets are delivered.

    Parameters
    ----------
    memory : Memory
        The memory of the ring: a `Mapping`, or a zeroed `Block` for threads.
    capacity : int
        The number of cells, or 0 to attach to an existing ring.
    batch_size : int
        The maximum number of indices in a ticket.
    runners : int
        The number of runners. Owners are numbered from 1 to `runners`.
    calls : int
        0 for a shared ring, where any runner can claim any ticket. Otherwise, the ring is a queue
        for one runner, which claims tickets in order but checks the last `calls` cells first.
    at : int
        The byte offset of the ring in the memory. The trainer sleeps at the gate of the ring with
        offset 0.
    limit : int
        The initial limit on outstanding tickets, or 0 for the number of cells.
    threads : bool
        Whether all runners are threads of this process.

    Attributes
    ----------
    limit : int
        The maximum number of outstanding tickets.
    kept : list or None
        For a queue, the Python objects of each cell's ticket.
    """

    def __cinit__(self, Memory memory not None, uint32_t capacity=0, uint32_t batch_size=1,
                  uint32_t runners=1, uint32_t calls=0, Py_ssize_t at=0,
                  uint32_t limit=0, *, bint threads=False):
        cdef uint64_t nbytes
        memory.inside(at, 0)
        nbytes = <uint64_t>(memory.size - at)
        self.memory = memory
        self.r = <cseq_ring*>(memory.data + at)
        if capacity:
            if nbytes < cseq_ring_bytes(capacity, batch_size, runners):
                raise ValueError(f"a ring of {capacity} cells of {batch_size} indices and "
                                 f"{runners} runners does not fit into {nbytes} bytes")
            if runners > 0xFFFF:
                raise ValueError(f"runners={runners} exceeds 65535")
            if calls and (calls >= capacity or runners > 1):
                raise ValueError(f"a queue needs one runner and more than calls={calls} cells, but has "
                                 f"{runners} runners and {capacity} cells")
            cseq_ring_init(self.r, capacity, batch_size, runners, calls,
                           not threads and isinstance(memory, Mapping))
            self.r.output -= at
            if limit:
                self.r.round = min(limit, self.r.round)
        elif not cseq_ring_fits(self.r, nbytes):
            raise ValueError("this memory does not contain a ring of this version of cseq")
        self.meter = cseq_ring_meter(<cseq_ring*>memory.data, 0)
        self.kept = [None] * self.r.capacity if self.r.calls else None
        self.calling = -1
        self.wake_at = 1
        self.limit = limit or self.r.round + self.r.calls

    cdef cseq_cell* at(self, uint32_t cell) except NULL:
        if cell >= self.r.capacity:
            raise IndexError(f"cell {cell} is not in [0, {self.r.capacity})")
        return cseq_ring_cell(self.r, cell)

    @property
    def capacity(self):
        return self.r.capacity

    def published(self, uint32_t owner):
        """Return how many tickets a runner has published, excluding calls."""
        if not 1 <= owner <= self.r.runners:
            raise IndexError(f"owner {owner} is not in [1, {self.r.runners}]")
        return cseq_load_rlx_u64(&cseq_ring_meter(self.r, owner).batches)

    def meters(self):
        """Return all meters as bytes (dtype `meters.METER`), the trainer's first. Thread-safe."""
        cdef Py_ssize_t k, count = (self.r.runners + 1) * <Py_ssize_t>sizeof(cseq_meter) // 8
        cdef uint64_t* words = <uint64_t*>cseq_ring_meter(self.r, 0)
        copied = PyBytes_FromStringAndSize(NULL, 8 * count)
        cdef uint64_t* out = <uint64_t*><char*>copied
        for k in range(count):
            out[k] = cseq_load_rlx_u64(words + k)
        return copied

    @property
    def closed(self):
        """0 if the ring is open, 1 if it is closed, or n > 1 if indexers from number n on must exit."""
        return cseq_load_sc_u32(&self.r.closed)

    def set_spin(self, uint32_t ns, uint32_t crew=0):
        """Set how long runners and the trainer spin before they sleep, in ns.

        `crew` runners alternate with the trainer. See cseq_spin.h.
        """
        cseq_ring_set_spin(self.r, ns, crew)

    def fit(self, uint32_t limit, uint32_t indexers):
        """Limit outstanding tickets and indexers. Excess indexers exit when they hold no ticket."""
        if not 1 <= limit <= self.r.capacity or not 1 <= indexers <= self.r.runners:
            raise ValueError(f"limit={limit} is not in [1, {self.r.capacity}], or indexers={indexers} "
                             f"is not in [1, {self.r.runners}]")
        cseq_ring_extend(self.r, limit)
        self.limit = limit
        cseq_ring_admit(self.r, indexers)

    def indices(self, uint32_t cell):
        """Return a cell's indices as an array that shares the ring's memory."""
        self.at(cell)
        cdef Py_ssize_t offset = <char*>cseq_ring_indices(self.r, cell) - self.memory.data
        return self.memory.view(offset, numpy.dtype(numpy.int64), (self.r.batch_size,))

    def depths(self):
        """Return how many tickets are waiting for an indexer, a converter, and the trainer."""
        cdef Py_ssize_t[3] depth
        cdef uint32_t c
        cdef int state
        depth[0] = depth[1] = depth[2] = 0
        for c in range(self.r.capacity):
            state = cseq_ring_state(self.r, c)
            if state == CSEQ_POSTED:
                depth[0] += 1
            elif state == CSEQ_INDEXED:
                depth[1] += 1
            elif state == CSEQ_READY:
                depth[2] += 1
        return depth[0], depth[1], depth[2]

    def holder(self, uint32_t cell):
        """Return the owner and claim time (from `now_ns`) of a cell, or (0, 0) if unclaimed."""
        cdef cseq_cell* c = self.at(cell)
        cdef uint64_t word = cseq_load_acq_u64(&c.word)  # SYNC: start visible with owner
        cdef int state = CSEQ_STATE(word)
        if state != CSEQ_INDEXING and state != CSEQ_CONVERTING:
            return 0, 0
        return CSEQ_OWNER(word), cseq_load_rlx_u64(&cseq_cell_stint(c, state == CSEQ_CONVERTING).started_ns)

    cdef int find_vacant(self) noexcept:
        """Return a free cell, or -1. In a queue, check only the next cell."""
        cdef uint32_t k
        cdef uint32_t c = self.next_cell
        if self.outstanding >= self.limit:
            return -1
        for k in range(1 if self.r.calls else self.r.round):
            if cseq_ring_state(self.r, c) == CSEQ_FREE:
                return <int>c
            c = 0 if c + 1 == self.r.round else c + 1
        return -1

    cdef void offer(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
                     uint32_t count, uint64_t start, uint64_t seed) noexcept:
        """Post a ticket in a free cell that already contains its indices.

        `start` is the position of the ticket's first sample in the epoch. Runners are woken up
        every `wake_at` tickets and before the trainer waits. Calls do not count as outstanding.
        """
        cdef cseq_cell* c = cseq_ring_cell(self.r, cell)
        c.epoch = epoch
        c.batch = batch
        c.start = start
        c.seed = seed
        c.count = count
        c.capacity = 0
        c.stage = c.status = 0
        if cell < self.r.round:
            if not self.outstanding and not self.r.calls:
                cseq_ring_set_hints(self.r, cell)
            self.outstanding += 1
            self.next_cell = 0 if cell + 1 == self.r.round else cell + 1
        cseq_ring_post(self.r, cell, ticket)
        self.unwoken += 1
        if self.unwoken >= self.wake_at:
            self.wake()

    cpdef void wake(self) noexcept:
        """Wake up runners that wait for tickets."""
        self.unwoken = 0
        cseq_gate_notify(&self.r.gate[0])

    cdef uint32_t unanswered(self) noexcept:
        """Return how many tickets of a queue are not published yet."""
        cdef uint32_t count = 0, n = cseq_ring_round(self.r)
        while (count < self.outstanding
               and not cseq_ring_ready(self.r, (self.next_cell + n - count - 1) % n)):
            count += 1
        return count

    def peek(self, uint32_t cell, uint64_t ticket):
        """Return the published result of a ticket: (status, slot, capacity, record).

        Return None if the ticket is not ready, or () if it is no longer in the cell.
        """
        cdef cseq_cell* c = self.at(cell)
        cdef uint64_t word = cseq_load_acq_u64(&c.word)
        cdef uint64_t* f
        if CSEQ_STATE(word) == CSEQ_FREE or CSEQ_TICKET(word) != CSEQ_TICKET(ticket << 24):
            return ()
        if CSEQ_STATE(word) != CSEQ_READY:
            return None
        f = c.converted if c.stage else c.record
        return c.status, c.slot, c.capacity, (f[0], f[1], f[2], f[3])

    cdef bint cancel_newest(self, uint32_t cell) noexcept:
        """Cancel the newest ticket of a queue if it is unclaimed. Return whether it was cancelled."""
        if not cseq_ring_cancel_newest(self.r, cell):
            return False
        self.next_cell = cell
        self.kept[cell] = None
        return True

    cdef void wait(self, uint32_t seen, int cell) noexcept:
        """Sleep for up to `PARK` ns, until a cell (-1 for any) is ready or `notify_all` is called.

        Get `seen` from `cseq_ring_notices` before checking for failures and interruptions. The caller must
        hold the run's lock, which protects `unwoken`.
        """
        cdef uint64_t before = self.sleep()
        cdef uint64_t awake
        if self.unwoken:
            self.wake()
        with nogil:
            cseq_ring_wait_ready(self.r, cell, seen, PARK)
            awake = cseq_now_ns()
        self.slept(before, awake)

    cdef bint expect(self, uint32_t cell, uint32_t seen) noexcept:
        """Spin for a limited time. Return whether a ticket is ready."""
        cdef uint64_t before = cseq_now_ns()
        cdef uint64_t awake
        cdef int ready
        if self.unwoken:
            self.wake()
        with nogil:
            ready = cseq_ring_expect(&self.r, &cell, 1, seen)
            awake = cseq_now_ns()
        self.slept(before, awake)
        return ready

    def ticket(self, uint32_t cell):
        cdef cseq_cell* c = self.at(cell)
        return c.epoch, c.batch, c.count

    def start(self, uint32_t cell):
        """Return the ticket's position in the order, or the number of its item."""
        return self.at(cell).start

    def token(self, uint32_t cell):
        """Return the word of a cell: 0 if it is free, and larger for later tickets."""
        return cseq_load_acq_u64(&self.at(cell).word)

    def left_in(self, uint32_t cell):
        """Return (last stage to write, status, slot, capacity, indexer's record, converter's record).

        The values are valid until the next `offer` for the cell.
        """
        cdef cseq_cell* c = self.at(cell)
        cdef uint64_t* i = c.record
        cdef uint64_t* f = c.converted
        return (c.stage, c.status, c.slot, c.capacity, (i[0], i[1], i[2], i[3]),
                (f[0], f[1], f[2], f[3]))

    def held(self, uint32_t owner):
        """Return the cells that `owner` has claimed."""
        cdef uint32_t c
        return [c for c in range(self.r.capacity) if self.holder(c)[0] == owner]

    def repost(self, uint32_t owner, uint32_t status=0):
        """Post the tickets of an exited `owner` again, or publish them with `status`. Return their cells."""
        cdef uint32_t count, k
        cdef uint32_t* held = <uint32_t*>PyMem_RawMalloc(4 * <size_t>self.r.capacity)
        if held == NULL:
            raise MemoryError(f"cannot allocate a list of {self.r.capacity} cells")
        try:
            count = cseq_ring_repost(self.r, owner, held, status)
            return [held[k] for k in range(count)]
        finally:
            PyMem_RawFree(held)

    def slots(self):
        """Return the slots in use by published tickets.

        A slot that leaves the ring during this call already belongs to the trainer.
        """
        cdef uint32_t k, slot
        cdef int state
        cdef set published = set()
        for k in range(self.r.capacity):
            state = cseq_ring_state(self.r, k)
            if state == CSEQ_INDEXED or state == CSEQ_CONVERTING or state == CSEQ_READY:
                slot = cseq_load_acq_u32(&cseq_ring_cell(self.r, k).slot)  # SYNC: slot is the trainer's
                if slot != CSEQ_NO_SLOT:
                    published.add(slot)
        return published

    def notify_all(self):
        """Wake up the trainer."""
        cseq_gate_notify_all(cseq_ring_output(self.r))

    def close(self):
        """Close the ring. Runners exit when there are no more tickets."""
        cseq_ring_close(self.r)


def now_ns():
    """Return the time of the monotonic clock in nanoseconds."""
    return cseq_now_ns()
