"""What the core reads of a run for every batch: its generation, and its lock."""

from libc.stdint cimport uint64_t

cimport cython

from cseq._headers cimport *
from cseq._lock cimport Lock


@cython.final
cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        """Whether this is the present generation."""
        return cseq_load_acq_u64(&self.number) == generation
