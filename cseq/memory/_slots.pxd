"""Slots of shared memory, with their owners and sizes."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._headers cimport cseq_cell, cseq_load_acq_u64, cseq_load_rlx_u64, cseq_store_rlx_u64
from cseq._memory cimport Mapping

cdef enum:
    CHUNK = 1024
    PAGE = 4096

# A slot's owner is FREE, a worker's number or TRAINER. The owner writes `nbytes`, the committed
# bytes. The trainer writes `uses` (LEASED and PINNED).
cdef struct slot_chunk:
    uint32_t owner[CHUNK]
    uint32_t uses[CHUNK]
    uint64_t nbytes[CHUNK]

# `made` is the number of slots. No slot below `hint` is known to be free.
cdef struct slot_table:
    uint64_t made
    uint64_t hint
    char pad[PAGE - 16]
    slot_chunk chunk[1]


@cython.final
@cython.no_gc
cdef class SlotTable:
    # If `depth` differs from the fork depth, this is a forked process's copy and must not change
    # anything. `held` is the number of live leases, and `held_bytes` is their total size. `leases`
    # maps slots to leases of tickets in the ring.
    cdef Mapping mapping
    cdef slot_table* table
    cdef int fd
    cdef uint64_t width
    cdef Py_ssize_t most
    cdef readonly uint32_t owner
    cdef uint32_t depth
    cdef uint64_t held, held_bytes
    cdef uint64_t peak_bytes, peak_held
    cdef bint pinned
    cdef object __weakref__
    cdef dict leases
    cdef inline slot_chunk* chunk(self, Py_ssize_t slot) noexcept nogil:
        return &self.table.chunk[slot // CHUNK]
    cdef inline uint32_t* word(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).owner[slot % CHUNK]
    cdef inline uint32_t* uses(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).uses[slot % CHUNK]
    cdef inline Py_ssize_t count(self) noexcept nogil:
        # SYNC: entries of slots are there
        return 0 if self.table == NULL else <Py_ssize_t>cseq_load_acq_u64(&self.table.made)
    cdef inline uint64_t committed(self, Py_ssize_t slot) noexcept nogil:
        """Return the committed bytes of a slot. This is exact only for the owner."""
        return cseq_load_rlx_u64(&self.chunk(slot).nbytes[slot % CHUNK])
    cdef inline void set_committed(self, Py_ssize_t slot, uint64_t nbytes) noexcept nogil:
        cseq_store_rlx_u64(&self.chunk(slot).nbytes[slot % CHUNK], nbytes)
    cdef int check(self, Py_ssize_t slot) except -1
    cdef Py_ssize_t search(self, Py_ssize_t first) noexcept nogil
    cdef void lower(self, Py_ssize_t slot) noexcept nogil
    cdef int extend(self) except -1
    cdef int commit(self, uint64_t offset, uint64_t nbytes) except -1
    cpdef Py_ssize_t take(self) except -1
    cdef void set_free(self, Py_ssize_t slot) noexcept nogil
    cdef int free_from(self, cseq_cell* c) except -1
    cdef bint end_use(self, Py_ssize_t slot, uint32_t use) noexcept nogil
