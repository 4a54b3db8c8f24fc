"""Slots of shared memory: their states, owners and sizes."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport cython

from cseq._headers cimport (
    cseq_cell, cseq_kept, cseq_load_acq_u64, cseq_load_rlx_u64, cseq_ring, cseq_span, cseq_store_rlx_u64)
from cseq._memory cimport Mapping, Memory


cdef enum:
    FREE = 0
    TAKEN = 1
    LEASED = 2
    CHUNK = 1024    # slots
    CHUNKS = 4096

cdef enum:
    NO_SLOT = 0xFFFFFFFF  # of a ticket whose batch lies in no slot

cdef struct slot_entry:
    uint64_t nbytes   # committed, as far as the trainer knows
    int64_t owned     # the worker that owns it, once all tickets are settled; 0: the trainer
    uint32_t uses     # while it is leased: its lease, and the forked workers that may read it
    uint8_t state


@cython.final
@cython.no_gc
cdef class Slots:
    cdef slot_entry* chunk[CHUNKS]
    cdef uint64_t made        # slots; written once the entries are there
    cdef uint32_t lock
    cdef uint64_t held        # leases alive
    cdef uint64_t held_bytes  # their slots' bytes
    cdef dict lent            # by slot: leases of tickets that are still in the ring
    # What the arena asks of a free slot before it is used again: bytes committed, at least and at most.
    cdef uint64_t least_bytes
    cdef uint64_t most_bytes
    cdef uint64_t hint        # no free slot is below it, see above
    cdef uint64_t reached     # behind the highest slot taken since the arena has set it; a hint
    cdef inline slot_entry* at(self, Py_ssize_t slot) noexcept nogil:
        return self.chunk[slot // CHUNK] + slot % CHUNK
    cdef inline Py_ssize_t count(self) noexcept nogil:
        """Slots made so far."""
        return <Py_ssize_t>cseq_load_acq_u64(&self.made)  # SYNC: entries of slots are there
    cdef inline uint64_t committed(self, Py_ssize_t slot) noexcept nogil:
        """Bytes of a slot; exact for the thread that has taken it, a hint for others."""
        return cseq_load_rlx_u64(&self.at(slot).nbytes)
    cdef inline void set_committed(self, Py_ssize_t slot, uint64_t nbytes) noexcept nogil:
        """Set how many bytes of a slot are committed; the caller has taken it, or the arena's lock."""
        cseq_store_rlx_u64(&self.at(slot).nbytes, nbytes)
    cdef int check(self, Py_ssize_t slot) except -1
    cdef Py_ssize_t find_free(self) noexcept
    cdef bint is_fit(self, Py_ssize_t slot) noexcept
    cdef Py_ssize_t find_fit(self) noexcept
    cdef Py_ssize_t occupy_fit(self) noexcept
    cdef bint occupy(self, Py_ssize_t slot) noexcept
    cdef void set_free(self, Py_ssize_t slot) noexcept nogil
    cdef bint is_last_use(self, Py_ssize_t slot) noexcept nogil
    cpdef int release(self, Py_ssize_t slot) except -1
    cpdef bint vacate(self, Py_ssize_t slot) except -1
    cdef Py_ssize_t leave(self, cseq_cell* c) except -2
    cdef void settle(self, cseq_cell* c) noexcept nogil
    cdef void enter_owners(self, cseq_cell* c) noexcept nogil
    cdef Py_ssize_t reclaim(self, cseq_ring** rings, Py_ssize_t ring_count, uint32_t owner,
                         Py_ssize_t* taken) noexcept nogil


@cython.final
@cython.no_gc
cdef class Lease(Memory):
    cdef Mapping mapping
    cdef Slots slots  # None: the slot still belongs to its ticket
    cdef Py_ssize_t slot
    cdef cseq_span span
