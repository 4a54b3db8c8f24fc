# cython: language_level=3, freethreading_compatible=True
"""Runners and their work."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._core cimport PARK, Ring
from cseq._headers cimport *
from cseq._memory cimport LEAST, forks_here

import sys

import numpy

cnp.import_array()

cseq_wait_choose()

# How long to sleep before a GIL probe, in ns. An awake thread would get the GIL immediately.
cdef enum:
    PROBE_NS = 50000
NO_MORE = object()


cdef class BatchState:
    """The current ticket of a `context.BatchContext`, and the ticket's generator or None."""

    cdef public object ticket
    cdef public object drawn


cdef extern from *:
    """
    /* Return 1 if an array is unchanged since PyArray_EMPTY created it. User code could have changed the
     * type, shape or flags, or created a weak reference. */
    static int cseq_is_fresh(PyArrayObject *one, npy_intp n) {
        const PyArrayObject_fields *f = (PyArrayObject_fields *)one;
        return f->nd == 1 && f->dimensions[0] == n && PyArray_ISCARRAY(one)
            && PyArray_CHKFLAGS(one, NPY_ARRAY_OWNDATA) && PyArray_TYPE(one) == NPY_INT64
            && !PyDataType_METADATA(f->descr) && !f->weakreflist;
    }
    """
    bint cseq_is_fresh(cnp.ndarray one, cnp.npy_intp n) noexcept


cdef cnp.ndarray NOTHING = numpy.empty(0, numpy.bool_)


@cython.final
cdef class Runner:
    """A runner's side of a ring. It claims and publishes the tickets of one stage.

    `stage` is 0 for indexers and 1 for converters. Owners are numbered from 1. The `last` stage
    publishes to the output.
    """

    def __cinit__(self, Ring ring not None, uint32_t stage, uint32_t owner, *, bint last):
        if stage > 1:
            raise ValueError(f"stage={stage} is neither 0 nor 1")
        if not 1 <= owner <= ring.r.runners:
            raise ValueError(f"owner={owner} is not in [1, {ring.r.runners}]")
        self.ring = ring
        self.r = ring.r
        if ring.turns is not None:
            self.turns, self.turn = &ring.turns.t, ring.first_entry + owner
        self.stage = stage
        self.owner = owner
        self.last = last
        self.cell = -1
        self.park = PARK
        self.room = NOTHING
        self.meter = cseq_ring_meter(ring.r, owner)
        cseq_meter_renew(self.meter)

    def claim(self):
        """Return True for a claimed ticket, False after `park` ns, or None if the ring is closed."""
        cdef int cell = CSEQ_CLOSED
        if self.cell >= 0:
            raise RuntimeError(f"cell {self.cell} has not been published; publish it first")
        if self.since - self.meter.polled_ns >= CSEQ_POLL:
            self.poll()
        if not cseq_ring_leaves(self.r, self.stage, self.owner):
            cell = cseq_ring_claim(self.r, self.stage, self.owner)
            if cell < 0:
                with nogil:
                    self.pause()
                    cell = cseq_ring_await(self.r, self.stage, self.owner, self.park)
                    if self.turns and cell >= 0: cseq_turns_enter(self.turns, self.turn)
                self.since = cseq_now_ns()
        else:
            self.pause()
        if cell < 0:
            return None if cell == CSEQ_CLOSED else False
        self.hold(cell, cseq_now_ns())
        return True

    cdef void pause(self) noexcept nogil:
        """Send the trainer any deferred notification, and leave the turn."""
        if self.owes:
            self.owes = False
            cseq_gate_notify(cseq_ring_output(self.r))
        if self.turns: cseq_turns_leave(self.turns, self.turn)

    def __iter__(self):
        return self

    def __next__(self):
        """Claim a ticket. Stop when the ring is closed."""
        if (self.since and self.since - self.meter.polled_ns < CSEQ_POLL
                and self.claim_at_once(self.since)):
            return True
        claimed = self.claim()
        if claimed is None:
            raise StopIteration
        return claimed

    cdef void hold(self, int cell, uint64_t now) noexcept:
        self.cell = cell
        self.c = cseq_ring_cell(self.r, cell)
        self.since = now
        cseq_store_rlx_u64(&cseq_cell_stint(self.c, self.stage).started_ns, now)
        cseq_store_rlx_u64(&self.meter.since_ns, now)

    cdef bint claim_at_once(self, uint64_t now) noexcept:
        """Claim a ticket if one is posted. The runner must not hold one."""
        cdef int cell = CSEQ_NONE
        if not cseq_ring_leaves(self.r, self.stage, self.owner):
            cell = cseq_ring_claim(self.r, self.stage, self.owner)
        if cell < 0:
            return False
        self.hold(cell, now)
        return True

    cdef void repost(self) noexcept:
        """Post the current ticket again, because its batch was interrupted."""
        cdef uint32_t cell
        self.cell = -1
        cseq_ring_repost(self.r, self.owner, &cell, 0)

    cdef void poll(self) noexcept:
        """Read the system counters and measure the wait for the GIL."""
        cdef uint32_t word = 0
        cdef uint64_t awake
        cdef bint shared = self.r.gate[0].shared
        if not shared and self.meter.polled_ns:
            with nogil:
                cseq_wait(&word, 0, PROBE_NS, 0)
                awake = cseq_now_ns()
            cseq_histogram_add(&self.meter.gil, cseq_now_ns() - awake)
        cseq_meter_poll(self.meter, cseq_now_ns(), shared, True)

    @property
    def seed(self):
        """The seed for the order and the generators."""
        return self.held().seed

    @property
    def epoch(self):
        return self.held().epoch

    @property
    def batch(self):
        return self.held().batch

    @property
    def start(self):
        """The position of the first sample in the epoch."""
        return self.held().start

    @property
    def slot(self):
        return self.held().slot

    @property
    def capacity(self):
        return self.held().capacity

    @property
    def record(self):
        cdef uint64_t* f = self.held().record
        return f[0], f[1], f[2], f[3]

    cpdef object indices(self):
        """Return the indices in an array that nothing else references.

        A small array may be reused for later tickets. A large array may be in the batch's slot.
        """
        cdef cnp.npy_intp n = self.held().count
        if not (cseq_is_unique(<PyObject*>self.room) and cseq_is_fresh(self.room, n)):
            self.room = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0)
        array = self.room
        if n > LEAST // 8:
            self.room = NOTHING
        CSEQ_POINT("slice")
        memcpy(cnp.PyArray_DATA(array), cseq_ring_indices(self.r, <uint32_t>self.cell),
               <size_t>n * 8)
        return array

    def parts(self):
        """Return the number of indices in each unit."""
        cdef cseq_cell* c = self.held()
        cdef int64_t* sizes = cseq_ring_indices(self.r, <uint32_t>self.cell) + c.count
        return numpy.array([sizes[k] for k in range(c.parts)] if c.parts else [1] * c.count, numpy.int64)

    def publish(self, uint32_t status=0, record=(), uint64_t capacity=0, int64_t slot=-1):
        """Publish the ticket.

        Parameters
        ----------
        status : int
            0 for a batch. Tickets with any other status go directly to the output.
        record : tuple of int
            Up to `FIELDS` sizes in bytes. Their sum is the size of the batch.
        capacity : int
            The number of committed bytes in the slot.
        slot : int
            The slot of the batch, or -1. From now on, the slot belongs to the ticket.
        """
        cdef cseq_cell* c = self.held()
        cdef uint64_t* fields = c.converted if self.stage else c.record
        cdef Py_ssize_t i
        if not isinstance(record, tuple) or len(<tuple>record) > CSEQ_FIELDS:
            raise ValueError(f"record={record!r} is not a tuple of at most {CSEQ_FIELDS} numbers")
        for i in range(len(<tuple>record)):
            fields[i] = (<tuple>record)[i]
        if slot >= 0:
            cseq_store_rel_u32(&c.slot, <uint32_t>slot)
        c.capacity = max(c.capacity, capacity)
        self.deliver(c, status)

    cdef void deliver(self, cseq_cell* c, uint32_t status) noexcept:
        """Publish the ticket, whose slot and record must be complete."""
        cdef uint32_t cell = <uint32_t>self.cell
        cdef bint later = self.turns and cseq_turns_has(self.turns, self.turn)
        c.status = status
        c.stage = self.stage
        c.owner[self.stage] = <unsigned short>self.owner
        self.since = cseq_cell_stint(c, self.stage).published_ns = cseq_now_ns()
        self.cell = -1
        if cseq_ring_publish(self.r, cell, CSEQ_READY if self.last or status else CSEQ_INDEXED, later):
            self.owes = later


cdef class BatchWriter:
    """Publishes the batches of a runner. Arrays can be created in `room`."""

    room = None

    cdef int open_ticket(self) except -1:
        return 0

    cdef bint publish_batch(self, Runner runner, object batch) except -1:
        """Write and publish a batch in C. Return False if the batch needs Python code."""
        return False

    def begin_ticket(self):
        self.open_ticket()

    def cast_to(self, dtype):
        """Convert numeric arrays to `dtype`, unless it is None."""

    def write(self, Runner runner not None, batch):
        """Write a batch and return the record for `publish`."""
        raise NotImplementedError

    def publish(self, Runner runner not None, record):
        """Publish the ticket. The caller must not hold a reference to the batch."""
        raise NotImplementedError

    def fail(self, Runner runner not None, error, uint32_t status=1):
        """Publish an exception."""
        raise NotImplementedError

    def end_items(self, Runner runner not None):
        """Publish the end of the items."""
        raise NotImplementedError


cdef class Work:
    """The base class for the work of a runner: make and publish results.

    Subclasses implement three methods. ``answer(runner)`` returns the result or `NO_MORE`.
    ``fail(runner, error)`` publishes an exception. ``end_copy(error)`` exits a process that was
    forked by user code (its fork count differs from `depth`), because it must not use the ring.
    """

    cdef readonly BatchWriter batch_writer
    cdef uint32_t depth

    def __cinit__(self, BatchWriter batch_writer not None, *_, **__):
        self.batch_writer = batch_writer
        self.depth = forks_here[0]

    cdef object make_batch(self, Runner runner):
        return self.answer(runner)

    cpdef int work(self, Runner runner) except -1:
        """Make and publish the result for the current ticket, or an exception.

        The reference to the batch is dropped before `publish`, which checks whether user code has
        kept arrays in the slot.
        """
        try:
            batch = self.make_batch(runner)
            if forks_here[0] != self.depth:
                self.end_copy(None)
            if batch is NO_MORE:
                self.batch_writer.end_items(runner)
                return 0
            if not self.batch_writer.publish_batch(runner, batch):
                record = self.batch_writer.write(runner, batch)
                del batch
                self.batch_writer.publish(runner, record)
        except BaseException as error:
            if forks_here[0] != self.depth:
                self.end_copy(error)
            self.fail(runner, error)
        return 0


cpdef bint has_imported(dict missing) except -1:
    """Return True if any of these modules has been imported or is being imported."""
    modules = sys.modules
    for name in missing:
        if name in modules:
            return True
    return False


cdef class BatchMaker(Work):
    """The C part of `indexer.Indexing`.

    `batch_state` is this thread's context. `convert` is applied to each batch. `seeds` may be None.
    """

    cdef public object indexer
    cdef BatchState batch_state
    cdef object convert
    cdef object seeds

    def __cinit__(self, batch_writer, indexer, BatchState batch_state not None, convert=None,
                  seeds=None):
        self.indexer, self.batch_state = indexer, batch_state
        self.convert, self.seeds = convert, seeds

    cdef bint is_to_repeat(self) except -1:
        """Return True if making the batch has imported a module with a random generator."""
        return (forks_here[0] == self.depth and has_imported(self.seeds.missing)
                and self.seeds.has_new())

    cdef object make_batch(self, Runner runner):
        if self.batch_state.drawn is not None or self.batch_state.ticket is not runner:
            self.batch_state.drawn, self.batch_state.ticket = None, runner
        self.batch_writer.open_ticket()
        batch = self.index(runner)
        if batch is None: raise self.forgotten(self.indexer)
        return batch if self.convert is None else self.convert(batch)

    cdef object index(self, Runner runner):
        """Call the indexer. If the call imports a new generator, seed it and repeat the call."""
        indexer = self.indexer
        if self.seeds is None: return indexer[runner.indices()]
        if self.seeds.present or has_imported(self.seeds.missing):
            self.seeds.seed_present()
        try:
            batch = indexer[runner.indices()]
            if not self.is_to_repeat():
                return batch
        except Exception:
            if not self.is_to_repeat():
                raise
        batch = None
        self.batch_state.drawn = None
        self.seeds.seed_present()
        return self.indexer[runner.indices()]

    def make_here(self, Runner runner not None, here):
        """In test mode, process a posted ticket in the trainer's thread.

        If `fail` raises, the ticket is posted again. A signal handler can raise at any point, even before the
        claim and at the start of `restore`. `here` holds the context of this thread.
        """
        if runner.cell >= 0:
            raise RuntimeError("this manager's indexer is making a batch; neither the indexer nor a signal "
                               "handler that interrupts it can take batches from the same manager")
        outer = here.batch_context
        if not runner.claim_at_once(cseq_now_ns()):
            return
        try:
            here.batch_context = self.batch_state
            if self.seeds is not None:
                self.seeds.lend()
            self.work(runner)
        finally:
            if runner.cell >= 0:
                runner.repost()
            here.batch_context = outer
            if self.seeds is not None:
                try:
                    self.seeds.restore()
                except BaseException:
                    self.seeds.restore()
                    raise
