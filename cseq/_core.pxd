"""The ring, the shuffle, and the readers of orders."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._headers cimport *
from cseq._memory cimport Memory

# Maximum time to sleep between checks for signals, dead workers and deadlines, in ns.
cdef enum:
    PARK = 100_000_000

cdef const int64_t* int64s(cnp.ndarray array) except? NULL
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
cdef class Turns:
    cdef cseq_turns t

@cython.final
cdef class Ring:
    # `outstanding`: tickets (except calls) not yet committed or cancelled. `next_cell`: where to
    # look for a free cell. `unwoken`: tickets posted since the last wake-up; the next is due at
    # `wake_at`. `calling`: the cell of a queue's pending call, or -1. `meter`: part of the ring at
    # offset 0. `turns`: shared by all thread queues. `first_entry`: start of this queue's objects.
    cdef cseq_ring* r
    cdef Memory memory
    cdef readonly uint32_t limit
    cdef uint32_t outstanding
    cdef readonly list kept
    cdef int calling
    cdef uint32_t next_cell, unwoken
    cdef public uint32_t wake_at, first_entry
    cdef public Turns turns
    cdef cseq_meter* meter
    cdef cseq_cell* at(self, uint32_t cell) except NULL
    cdef int find_vacant(self) noexcept
    cdef void offer(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
                    uint32_t count, uint64_t start, uint64_t seed) noexcept
    cpdef void wake(self) noexcept
    cdef uint32_t unanswered(self) noexcept
    cdef inline void committed(self, cseq_cell* c) noexcept:
        """Count a committed ticket. Call this before posting another ticket in its cell."""
        cdef uint64_t* f = c.converted if c.stage else c.record
        if c.status == 0:
            cseq_count_u64(&self.meter.batches, 1)
            cseq_count_u64(&self.meter.samples, c.count)
            cseq_count_u64(&self.meter.nbytes, f[0] + f[1] + f[2] + f[3])
    cdef inline void free(self, uint32_t cell) noexcept:
        """Free a cell that belongs to the trainer."""
        if self.kept is None:
            self.next_cell = cell
        else:
            self.kept[cell] = None
        cseq_ring_free(self.r, cell)
    cdef inline uint64_t sleep(self) noexcept:
        """Record that the trainer is going to sleep, and return the time."""
        cdef uint64_t now = cseq_now_ns()
        cseq_store_rlx_u64(&self.meter.asleep_ns, now)
        return now
    cdef inline void slept(self, uint64_t before, uint64_t awake) noexcept:
        """Record how long the trainer slept and how long it then waited for the GIL."""
        cdef uint64_t now = cseq_now_ns()
        cseq_histogram_add(&self.meter.gil, now - awake)
        cseq_meter_slept(self.meter, before, now)
    cdef bint cancel_newest(self, uint32_t cell) noexcept
    cdef void wait(self, uint32_t seen, int cell) noexcept
    cdef bint expect(self, uint32_t cell, uint32_t seen) noexcept

# The layout of a stream ticket (see producer.py). It starts with two requests: one for the call or
# key, and one for the assignment. Each has six words: the slot, the committed bytes and the record.
# Then come the number of ints in the key (or a negative constant) and the ints themselves.
cdef enum:
    ASK_ITEM = 0
    ASK_CALL = 1
    REQUEST_WORDS = 6
    KEY_LENGTH = 12
    WITHOUT_KEY = -1
    KEY_IN_REQUEST = -2
    KEY_INTS = 13
