"""Locks and latches for threads, which the core takes without a call of Python."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._headers cimport *


cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept


cpdef int check_depth() except -1
cpdef bint is_deep(int depth=*) except -1


@cython.final
@cython.no_gc
cdef class Lock:
    cdef cseq_lock lock
    cdef uint32_t due   # there are
    cdef list calls     # that were put off
    cdef int make_calls(self) except -1
    cdef object next_call(self)
    cdef bint sleep(self, uint64_t ns) except -1
    cpdef int refuse_mine(self) except -1
    cdef int await_free(self) except -1
    cdef inline int enter(self) except -1:
        """Take it, as `acquire` without a time limit does."""
        if cseq_lock_try(&self.lock, PyThread_get_thread_ident()):
            return 0
        return self.await_free()
    cdef inline int enter_anew(self) except -1:
        """Take it; RuntimeError if this thread has it."""
        if cseq_lock_is_mine(&self.lock, PyThread_get_thread_ident()):
            return self.refuse_mine()
        return self.enter()
    cdef inline int leave(self) except -1:
        """Give it back; the caller has it. Then make the calls that were put off until now."""
        cseq_lock_release(&self.lock)
        return self.make_calls() if cseq_load_sc_u32(&self.due) else 0  # SYNC: calls


@cython.final
@cython.no_gc
cdef class Hold:
    cdef Lock lock
    cdef double timeout
    cdef readonly bint has


@cython.final
@cython.no_gc
cdef class Latch:
    cdef uint32_t word


@cython.final
cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        """Whether this is the present generation."""
        return cseq_load_acq_u64(&self.number) == generation
