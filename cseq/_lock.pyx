# cython: language_level=3, freethreading_compatible=True
"""Locks and latches that outlive signal handlers; hangups; the interpreter's end."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport intptr_t, uint32_t, uint64_t

cimport cython

from cseq._core cimport PARK
from cseq._headers cimport *
from cseq._memory cimport forker_here, forks_here

from sys import _getframe
from threading import current_thread

cseq_wait_choose()

# Frames that are left for a sampler or an iterator of keys.
cdef enum:
    ROOM = 100


cdef extern from "Python.h":
    int Py_GetRecursionLimit() noexcept


cpdef int check_depth() except -1:
    """Raise RecursionError if the stack is too deep for code that must not be interrupted halfway."""
    cdef int limit = Py_GetRecursionLimit()
    if is_deep(max(limit - ROOM, limit // 2)):
        raise RecursionError("the stack is too deep to take a batch: take it with fewer calls around it, "
                             "or raise sys.setrecursionlimit(); nothing was taken")
    return 0


cpdef bint is_deep(int depth=0) except -1:
    """Whether the stack has `depth` frames, by default half of the limit. Then a RecursionError may be due
    to the caller's stack, not to what it called."""
    try:
        _getframe(depth or Py_GetRecursionLimit() // 2)
    except ValueError:
        return False
    return True


cdef uint64_t ns_of(double seconds) noexcept:
    """Convert seconds to nanoseconds; negative seconds mean no limit."""
    return <uint64_t>-1 if seconds < 0 else <uint64_t>(min(seconds, 1e9) * 1e9)


@cython.final
@cython.no_gc
cdef class Lock:
    """A lock that its thread may acquire again, as `threading.RLock`; the core acquires it without a call
    of Python.

    A signal handler runs before the lock is acquired, or in the middle of what it protects. There it may
    acquire the lock again to look, must not (`refuse_mine`), or puts off what it wants (`put_off`). In
    Python, use ``with lock.hold()``: since Python 3.14, a handler may otherwise raise between the
    acquisition and the body, and the lock would stay acquired.

    In a forked process the lock is free, unless the thread that forked has it: the others are gone.
    """

    def __cinit__(self):
        self.calls = []
        self.forks = forks_here[0]

    cdef bint has(self) noexcept:
        """Whether this thread has the lock. A thread alone writes its number there, and clears it."""
        if cseq_load_acq_u32(&self.forks) != forks_here[0]:  # SYNC: free in a fork
            self.look_at_fork()
        return cseq_load_rlx_u64(&self.owner) == PyThread_get_thread_ident()

    @cython.critical_section
    cdef int look_at_fork(self) noexcept:
        """Free the lock in a forked process, once, unless the thread that forked has it. Another thread
        may have got the number of one that is gone."""
        if self.forks != forks_here[0]:
            if cseq_load_rlx_u64(&self.owner) != forker_here[0]:
                cseq_store_rlx_u64(&self.owner, 0)
            cseq_store_rel_u32(&self.forks, forks_here[0])  # SYNC: free in a fork
        return 0

    @property
    def is_mine(self):
        """Whether this thread has the lock, and is in the middle of what it protects."""
        return bool(self.has())

    def hold(self, double timeout=-1):
        """Make a `Hold`, for a ``with``."""
        cdef Hold hold = Hold.__new__(Hold)
        hold.lock, hold.timeout = self, timeout
        return hold

    cpdef int refuse_mine(self) except -1:
        """Raise RuntimeError if this thread has the lock, and so is in the middle of another call."""
        if self.has():
            raise RuntimeError(
                "this thread is in the middle of another call of the same object: a signal handler, or "
                "whatever else that call runs, can neither take a batch there nor begin or set an epoch, "
                "start or load; it may raise an exception, call state_dict() or stats(), or finish(), which "
                "ends the run once that call is over. Let a handler set a flag, and look at it after the call")
        return 0

    cdef bint acquire(self, double timeout) except -1:
        """Acquire the lock within `timeout` seconds, or -1 for no limit; return whether it was acquired.

        Signal handlers run meanwhile; if one raises, the lock was not acquired.
        """
        if not self.has():
            return self.acquire_first(timeout)
        self.depth += 1
        return True

    cdef bint acquire_first(self, double timeout) except -1:
        """Acquire the lock where this thread does not have it."""
        if not cseq_cas_sc_u64(&self.owner, 0, PyThread_get_thread_ident()):
            if not timeout or not self.sleep(timeout):
                return False
        self.depth = 1
        return True

    cdef bint sleep(self, double timeout) except -1:
        """Sleep until the lock is acquired, for `timeout` seconds at most; run signal handlers."""
        cdef uint64_t limit = ns_of(timeout), begun = cseq_now_ns(), waited = 0
        while waited < limit:
            cseq_swap_sc_u32(&self.asleep, 1)  # SYNC: sleeper seen
            if cseq_cas_sc_u64(&self.owner, 0, PyThread_get_thread_ident()):
                return True
            with nogil:
                cseq_wait(&self.asleep, 1, min(limit - waited, <uint64_t>PARK), 0)
            PyErr_CheckSignals()
            waited = cseq_now_ns() - begun
        return False

    cdef int release(self) except -1:
        """Release the lock, which the caller has; then make the calls that were put off until now."""
        self.depth -= 1
        if not self.depth:
            cseq_swap_sc_u64(&self.owner, 0)
            if cseq_load_sc_u32(&self.asleep) and cseq_swap_sc_u32(&self.asleep, 0):  # SYNC: sleeper seen
                cseq_wake(&self.asleep, 0)
        return self.make_calls() if cseq_load_sc_u32(&self.due) else 0  # SYNC: calls

    def put_off(self, call not None):
        """Have the thread that has the lock make a call, ``call()``, once it has released it; this thread
        makes it at once if the lock is free."""
        self.calls.append(call)
        cseq_swap_sc_u32(&self.due, 1)  # SYNC: calls
        if self.acquire(0):
            self.release()

    cdef int make_calls(self) except -1:
        """Make the calls that were put off, unless this thread still has the lock. If one raises, the
        others stay due."""
        if self.has() or not cseq_swap_sc_u32(&self.due, 0):
            return 0
        try:
            while (call := self.next_call()) is not None:
                call()
        finally:
            if self.calls:
                cseq_swap_sc_u32(&self.due, 1)
        return 0

    @cython.critical_section
    cdef object next_call(self):
        return self.calls.pop(0) if self.calls else None


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Hold:
    """Has a lock from the beginning of a ``with`` to its end.

    An exception that comes before the body drops this object, and so releases the lock. With a `timeout`,
    the body may be entered without the lock; `has` says whether it was acquired.
    """

    cdef Lock lock
    cdef double timeout
    cdef readonly bint has

    def __enter__(self):
        self.has = self.lock.acquire(self.timeout)
        return self

    def __exit__(self, *error):
        if self.has:
            self.has = False
            self.lock.release()

    def __dealloc__(self):
        if self.has:
            self.lock.release()


@cython.final
@cython.no_gc
cdef class Latch:
    """An event that is set once, and that several threads can wait for."""

    cdef uint32_t word

    def set(self):
        cseq_swap_sc_u32(&self.word, 1)  # SYNC: what is done before a latch is set
        cseq_wake(&self.word, 0)

    def wait(self, double timeout=-1):
        """Wait until the latch is set, for `timeout` seconds at most (-1: no limit); return whether it is.

        Signal handlers run meanwhile.
        """
        cdef uint64_t limit, begun
        cdef uint64_t waited = 0
        if cseq_load_acq_u32(&self.word):  # SYNC: what is done before a latch is set
            return True
        limit = ns_of(timeout)
        begun = cseq_now_ns()
        while waited < limit and not cseq_load_acq_u32(&self.word):
            with nogil:
                cseq_wait(&self.word, 0, min(limit - waited, <uint64_t>PARK), 0)
            PyErr_CheckSignals()
            waited = cseq_now_ns() - begun
        return bool(cseq_load_acq_u32(&self.word))


@cython.final
cdef class RunState:
    """The part of a run that iterators need for every batch.

    An iterator of another `generation` is void: a call for it takes nothing. The `lock` guards every
    use of the pool but `interrupt`.
    """

    def __cinit__(self):
        self.lock = Lock()

    @property
    def generation(self):
        return cseq_load_acq_u64(&self.number)

    def interrupt(self):
        """Begin the next generation and return its number; on any thread, or in a signal handler."""
        return cseq_add_sc_u64(&self.number, 1) + 1


cdef extern from *:
    """
    #ifndef _WIN32
    #include <unistd.h>
    #define cseq_exit _exit
    #else
    /* _exit has each DLL clean up, which may wait for a thread that is gone. */
    #define cseq_exit(code) TerminateProcess(GetCurrentProcess(), (UINT)(code))
    #endif
    """
    void cseq_exit(int code) noexcept nogil

def exit_on_hangup(intptr_t socket):
    """Wait until the peer of `socket` is gone; then end this process without the interpreter. This never
    returns, so it needs a thread of its own."""
    with nogil:
        cseq_await_hangup(socket)
        cseq_exit(1)


cdef bint ends = False


def end_daemons():
    """Have `rest` keep daemon threads from now on: the interpreter ends."""
    global ends
    ends = True


cpdef int rest() except -1:
    """Keep a daemon thread of the user's here for good once the interpreter ends; it holds no lock.

    Python stops such a thread as soon as it wants the GIL back, until 3.13 by unwinding its stack. In the
    destructor of a tensor, which releases the GIL, this aborts the process. A thread that rests drops
    nothing, and prints no traceback.
    """
    cdef uint32_t word = 0
    if not ends:
        return 0
    thread = current_thread()
    if not thread.daemon or thread.name.startswith("cseq-"):
        return 0
    with nogil:
        while True:
            cseq_wait(&word, 0, PARK, 0)
