# cython: language_level=3, freethreading_compatible=True
"""What the core reads of a run for every batch: its generation, and its lock."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t

cimport cython

from cseq._headers cimport *

import os

if os.environ.get("CSEQ_WAIT", "") == "nap":
    cseq_wait_nap = 1

cdef uint64_t PARK_NS = 100_000_000  # longest sleep before a sleeper runs signal handlers


@cython.final
@cython.no_gc
cdef class Lock:
    """A lock that its thread may take again, as `threading.RLock`; the core takes it without a call
    of Python.

    A signal handler runs before it is taken, or in the middle of what it protects, where it may take
    it again.
    """

    def acquire(self, double timeout=-1):
        """Take it; wait at most `timeout` seconds for it, -1: for any time. Return whether it was.

        Signal handlers run meanwhile; if one raises, it was not taken.
        """
        cdef uint64_t limit, waited, begun
        if cseq_lock_try(&self.lock, PyThread_get_thread_ident()):
            return True
        if timeout < 0:
            self.await_free()
            return True
        limit = <uint64_t>(min(timeout, 1e9) * 1e9)
        begun = cseq_now_ns()
        waited = 0
        while waited < limit:
            if self.sleep(limit - waited):
                return True
            waited = cseq_now_ns() - begun
        return False

    def release(self):
        """Give it back, as often as it was taken."""
        if not cseq_lock_is_mine(&self.lock, PyThread_get_thread_ident()):
            raise RuntimeError("this thread does not have the lock")
        cseq_lock_leave(&self.lock)

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *error):
        self.release()

    def is_mine(self):
        """Whether this thread has it."""
        return bool(cseq_lock_is_mine(&self.lock, PyThread_get_thread_ident()))

    def inherit(self):
        """In a forked process: free it, unless the thread that forked has it."""
        cseq_lock_inherit(&self.lock, PyThread_get_thread_ident())

    cdef bint sleep(self, uint64_t ns) except -1:
        """Sleep until it is free, but not for long; run signal handlers. Return whether it was taken."""
        cdef uint64_t me = PyThread_get_thread_ident()
        cdef int taken
        with nogil:
            taken = cseq_lock_await(&self.lock, me, min(ns, PARK_NS))
        if not taken:
            PyErr_CheckSignals()
        return taken

    cdef int await_free(self) except -1:
        """Take it once it is free."""
        while not self.sleep(PARK_NS):
            pass
        return 0


cdef class RunState:
    """The part of a run that iterators need for every batch.

    Attributes
    ----------
    generation : int
        An iterator of another one is void. Any thread may begin the next one.
    lock : Lock
        Around every use of the pool but `interrupt`.
    asked : bool
        The present iterator has taken `lock` for a batch.
    """

    def __cinit__(self, *args, **kwargs):
        self.lock = Lock()

    @property
    def generation(self):
        return cseq_load_acq_u64(&self.number)

    @generation.setter
    def generation(self, uint64_t number):
        cseq_store_rel_u64(&self.number, number)

    def supersede(self):
        """Begin the next generation: return its number. A signal handler may begin a later one."""
        return cseq_add_sc_u64(&self.number, 1) + 1

    def resume(self, uint64_t number):
        """Go back to the generation before `number`, which `supersede` has returned, unless a later one
        has begun. Return whether that was so."""
        return bool(cseq_cas_sc_u64(&self.number, number, number - 1))
