"""Locks and latches without Python calls."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._headers cimport cseq_load_acq_u64

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept
    unsigned long PyThread_get_thread_native_id() noexcept


cpdef int check_depth() except -1
cpdef bint is_deep(int depth=*) except -1


@cython.final
@cython.no_gc
cdef class Lock:
    # The thread `owner` (0 for none) has acquired the lock `depth` times. `asleep`: a thread may be
    # waiting. `forks`: the value of `forks_here` when last checked. `due`: `calls` were deferred.
    cdef uint64_t owner
    cdef uint32_t asleep, depth, forks, due
    cdef list calls
    cdef bint has(self) noexcept
    cdef int look_at_fork(self) noexcept
    cdef bint acquire(self, double timeout) except -1
    cdef bint acquire_first(self, double timeout) except -1
    cdef bint sleep(self, double timeout) except -1
    cdef int release(self) except -1
    cdef int make_calls(self) except -1
    cdef object next_call(self)
    cpdef int refuse_mine(self) except -1
    cdef inline int acquire_once(self) except -1:
        """Acquire the lock. Raise RuntimeError if this thread already holds it."""
        return self.refuse_mine() if self.has() else self.acquire_first(-1)


@cython.final
cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        return cseq_load_acq_u64(&self.number) == generation

cpdef int rest() except -1
