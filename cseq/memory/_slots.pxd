"""Slots of shared memory: the owner of each, and how large it is."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._headers cimport cseq_cell, cseq_load_acq_u64, cseq_load_rlx_u64, cseq_store_rlx_u64
from cseq._memory cimport Mapping

cdef enum:
    CHUNK = 1024   # slots
    PAGE = 4096    # bytes

cdef struct slot_chunk:
    uint32_t owner[CHUNK]   # FREE, a worker's number, or TRAINER
    uint32_t uses[CHUNK]    # of the trainer: LEASED, PINNED
    uint64_t nbytes[CHUNK]  # committed; written by the owner

cdef struct slot_table:
    uint64_t made  # slots; written once they are there
    uint64_t hint  # no free slot is below it, as far as is known
    char pad[PAGE - 16]
    slot_chunk chunk[1]


@cython.final
@cython.no_gc
cdef class SlotTable:
    cdef Mapping mapping
    cdef slot_table* table
    cdef int fd
    cdef uint64_t width
    cdef Py_ssize_t most     # slots that there can be
    cdef readonly uint32_t owner
    cdef uint32_t depth      # forks that lie before this process; its copies change nothing
    cdef uint64_t held       # leases alive
    cdef uint64_t held_bytes  # their slots' bytes
    cdef uint64_t peak_bytes, peak_held  # since `peak` was called
    cdef bint pinned         # slots are
    cdef object __weakref__
    cdef dict leases         # by slot: leases of tickets that are still in the ring
    cdef inline slot_chunk* chunk(self, Py_ssize_t slot) noexcept nogil:
        return &self.table.chunk[slot // CHUNK]
    cdef inline uint32_t* word(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).owner[slot % CHUNK]
    cdef inline uint32_t* uses(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).uses[slot % CHUNK]
    cdef inline Py_ssize_t count(self) noexcept nogil:
        """Slots made so far."""
        return 0 if self.table == NULL else <Py_ssize_t>cseq_load_acq_u64(&self.table.made)  # SYNC: entries of slots are there
    cdef inline uint64_t committed(self, Py_ssize_t slot) noexcept nogil:
        """Bytes of a slot; exact for the owner, a hint for others."""
        return cseq_load_rlx_u64(&self.chunk(slot).nbytes[slot % CHUNK])
    cdef inline void set_committed(self, Py_ssize_t slot, uint64_t nbytes) noexcept nogil:
        """Set how many bytes of a slot are committed; the caller has it."""
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
