"""The ring; readers of orders."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._headers cimport (
    cseq_cell, cseq_count_u64, cseq_feistel, cseq_gil, cseq_histogram_add, cseq_meter,
    cseq_meter_slept, cseq_now_ns, cseq_order, cseq_ring, cseq_ring_retire, cseq_store_rlx_u64,
)
from cseq._memory cimport Memory


cdef enum:
    BRIEF = 4096     # steps of a shuffle that are too few to release the GIL for
    SLICE = 1 << 20  # steps between two checks for signals


cdef object shuffled(uint64_t size, uint64_t* state)


cdef class Reader:
    cdef readonly uint64_t units, seed
    cdef readonly uint32_t room
    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1
    cdef int64_t read_batch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                            uint64_t count, int64_t* out, int64_t* sizes) except -1


@cython.final
@cython.no_gc
cdef class RangeReader(Reader):
    pass


@cython.final
@cython.no_gc
cdef class FeistelReader(Reader):
    cdef cseq_feistel feistel
    cdef uint64_t epoch  # that `feistel` is of
    cdef void begin(self, uint64_t epoch) noexcept


@cython.final
@cython.no_gc
cdef class TableReader(Reader):
    cdef cseq_order order
    cdef void* table
    cdef uint32_t* tags
    cdef uint64_t epoch  # that `order` is in
    cdef uint32_t width
    cdef int make_table(self) except -1


@cython.final
cdef class Ring:
    cdef cseq_ring* r
    cdef readonly Memory memory
    cdef readonly uint32_t outstanding, limit
    cdef readonly list kept
    cdef int calling          # of a queue: the cell of the call that is to be answered; -1: none
    cdef uint32_t next_cell   # where a free cell is looked for; in a queue, the one to post in
    cdef uint32_t unwoken     # tickets posted since the runners were last woken
    cdef cseq_gil gil         # how threads spin before they sleep, see cseq_gil.h
    cdef public uint32_t wake_at  # as many tickets posted wake the runners
    cdef cseq_meter* meter      # the trainer's: that of the ring at 0
    cdef cseq_cell* at(self, uint32_t cell) except NULL
    cdef int find_vacant(self) noexcept
    cdef void offer(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
                    uint32_t count, uint64_t start, uint64_t seed) noexcept
    cpdef void wake(self) noexcept
    cdef uint32_t unanswered(self) noexcept
    cdef inline void retired(self, cseq_cell* c, uint64_t now) noexcept:
        """A ticket was taken out at this time: every reader of its stamps reads them here, before the
        next post in its cell."""
        cdef uint64_t* f = c.converted if c.stage else c.record
        if c.status == 0:
            cseq_count_u64(&self.meter.batches, 1)
            cseq_count_u64(&self.meter.samples, c.count)
            cseq_count_u64(&self.meter.nbytes, f[0] + f[1] + f[2] + f[3])
    cdef inline void free(self, uint32_t cell) noexcept:
        """Free a cell that is the trainer's; an outstanding ticket there is subtracted already."""
        if self.kept is None:
            self.next_cell = cell  # at hand for the next ticket
        else:
            self.kept[cell] = None
        cseq_ring_retire(self.r, cell)
    cdef inline uint64_t sleep(self) noexcept:
        """A sleep of the trainer begins now."""
        cdef uint64_t now = cseq_now_ns()
        cseq_store_rlx_u64(&self.meter.asleep_ns, now)
        return now
    cdef inline void slept(self, uint64_t before, uint64_t awake) noexcept:
        """It is over, and so is the wait for the GIL after it."""
        cdef uint64_t now = cseq_now_ns()
        cseq_histogram_add(&self.meter.gil, now - awake)
        cseq_meter_slept(self.meter, before, now)
    cdef bint retract(self, uint32_t cell) noexcept
    cpdef bint expect(self, uint32_t cell, uint32_t last, uint32_t seen) noexcept
