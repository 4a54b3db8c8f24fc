"""What the core reads of a run for every batch: its generation, and its lock."""

from libc.stdint cimport uint64_t

from cseq._headers cimport *
from cseq._lock cimport Lock


cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef public bint asked
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        """Whether this is the present generation."""
        return cseq_load_acq_u64(&self.number) == generation
