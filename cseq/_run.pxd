"""What the core reads of a run for every batch: its generation, and its lock."""

from libc.stdint cimport uint64_t

cimport cython

from cseq._headers cimport *


cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept


@cython.final
@cython.no_gc
cdef class Lock:
    cdef cseq_lock lock
    cdef bint sleep(self, uint64_t ns) except -1
    cdef int await_free(self) except -1
    cdef inline int enter(self) except -1:
        """Take it, as `acquire` without a time limit does."""
        if cseq_lock_try(&self.lock, PyThread_get_thread_ident()):
            return 0
        return self.await_free()
    cdef inline void leave(self) noexcept:
        """Give it back; the caller has it."""
        cseq_lock_leave(&self.lock)


cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef public bint asked
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        """Whether this is the present generation."""
        return cseq_load_acq_u64(&self.number) == generation
