# cython: language_level=3, freethreading_compatible=True
"""Locks and latches that survive signal handlers."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport intptr_t, uint32_t, uint64_t

cimport cython

from cseq._core cimport PARK
from cseq._headers cimport *
from cseq._memory cimport forker_here, forks_here

from sys import _getframe
from threading import current_thread

cseq_wait_choose()

# Stack frames to reserve for a sampler or a key iterator.
cdef enum:
    ROOM = 100


cdef extern from "Python.h":
    int Py_GetRecursionLimit() noexcept


cpdef int check_depth() except -1:
    """Raise RecursionError if the stack is too deep for code that must not be interrupted."""
    cdef int limit = Py_GetRecursionLimit()
    if is_deep(max(limit - ROOM, limit // 2)):
        raise RecursionError("the stack is too deep to take a batch, and none was taken; call next() from "
                             "a less nested function, or raise the limit with sys.setrecursionlimit()")
    return 0


cpdef bint is_deep(int depth=0) except -1:
    """Return True if the stack has at least `depth` frames, by default half of the limit.

    If so, the calling program may have caused a RecursionError.
    """
    try:
        _getframe(depth or Py_GetRecursionLimit() // 2)
    except ValueError:
        return False
    return True


cdef uint64_t ns_of(double seconds) noexcept:
    """Convert seconds to nanoseconds. A negative value means no limit."""
    return <uint64_t>-1 if seconds < 0 else <uint64_t>(min(seconds, 1e9) * 1e9)


@cython.final
@cython.no_gc
cdef class Lock:
    """A reentrant lock like `threading.RLock`, but without Python calls.

    A signal handler that interrupts the protected section and only reads can reacquire the lock.
    Other handlers are rejected (`refuse_mine`) or deferred (`put_off`). Python code must use ``with
    lock.hold()``, because since Python 3.14, a handler can raise after the lock is acquired and
    before the ``with`` body starts. In a forked process, only the forking thread can hold the lock.
    """

    def __cinit__(self):
        self.calls = []
        self.forks = forks_here[0]

    cdef bint has(self) noexcept:
        """Return True if this thread is the owner. A thread sets and clears only its own id."""
        if cseq_load_acq_u32(&self.forks) != forks_here[0]:  # SYNC: free in a fork
            self.look_at_fork()
        return cseq_load_rlx_u64(&self.owner) == PyThread_get_thread_ident()

    @cython.critical_section
    cdef int look_at_fork(self) noexcept:
        """In a forked process, free the lock once, unless the forking thread holds it.

        Otherwise, a new thread could have the id of an owner that no longer exists.
        """
        if self.forks != forks_here[0]:
            if cseq_load_rlx_u64(&self.owner) != forker_here[0]:
                cseq_store_rlx_u64(&self.owner, 0)
            cseq_store_rel_u32(&self.forks, forks_here[0])  # SYNC: free in a fork
        return 0

    @property
    def is_mine(self):
        """Whether this thread holds the lock."""
        return bool(self.has())

    def hold(self, double timeout=-1):
        """Return a `Hold` for a ``with`` statement."""
        cdef Hold hold = Hold.__new__(Hold)
        hold.lock, hold.timeout = self, timeout
        return hold

    cpdef int refuse_mine(self) except -1:
        """Raise RuntimeError if this thread is in the middle of another call."""
        if self.has():
            raise RuntimeError(
                "this thread is in the middle of another call on the same object. A signal handler, or other "
                "code that the call runs, cannot take a batch, start or set an epoch, or call start() or "
                "load_state_dict(). It may raise an exception, or call state_dict(), stats() or finish(); "
                "finish() ends the run after the interrupted call. Set a flag in the handler, and check it "
                "after the call")
        return 0

    cdef bint acquire(self, double timeout) except -1:
        """Acquire the lock within `timeout` seconds (-1: no limit). Return whether it was acquired.

        Signal handlers run in the meantime. If one raises, the lock is not acquired.
        """
        if not self.has():
            return self.acquire_first(timeout)
        self.depth += 1
        return True

    cdef bint acquire_first(self, double timeout) except -1:
        """Acquire the lock. This thread must not hold it already."""
        if not cseq_cas_sc_u64(&self.owner, 0, PyThread_get_thread_ident()):
            if not timeout or not self.sleep(timeout):
                return False
        self.depth = 1
        return True

    cdef bint sleep(self, double timeout) except -1:
        """Sleep for up to `timeout` seconds, and run signal handlers."""
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
        """Release the lock and make the deferred calls."""
        self.depth -= 1
        if not self.depth:
            cseq_swap_sc_u64(&self.owner, 0)
            if cseq_load_sc_u32(&self.asleep) and cseq_swap_sc_u32(&self.asleep, 0):  # SYNC: sleeper seen
                cseq_wake(&self.asleep, 0)
        return self.make_calls() if cseq_load_sc_u32(&self.due) else 0  # SYNC: calls

    def put_off(self, call not None):
        """Make a call now if the lock is free. Otherwise, the holder makes it on release."""
        self.calls.append(call)
        cseq_swap_sc_u32(&self.due, 1)  # SYNC: calls
        if self.acquire(0):
            self.release()

    cdef int make_calls(self) except -1:
        """Make deferred calls unless this thread holds the lock. If one raises, keep the rest."""
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
    """Holds a lock inside a ``with`` statement.

    If a signal handler raises before the body, deallocation releases the lock. `has` is False on
    timeout.
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
    """A one-time event."""

    cdef uint32_t word

    def set(self):
        cseq_swap_sc_u32(&self.word, 1)  # SYNC: what is done before a latch is set
        cseq_wake(&self.word, 0)

    def wait(self, double timeout=-1):
        """Wait up to `timeout` seconds and run signal handlers. Return whether the latch is set."""
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
    """The state of a run that iterators check for every batch.

    Only iterators with the current `generation` receive batches. The `lock` protects the pool.
    """

    def __cinit__(self):
        self.lock = Lock()

    @property
    def generation(self):
        return cseq_load_acq_u64(&self.number)

    def interrupt(self):
        """Start the next generation and return its number. Thread-safe."""
        return cseq_add_sc_u64(&self.number, 1) + 1


cdef extern from *:
    """
    #ifndef _WIN32
    #include <unistd.h>
    #define cseq_exit _exit
    #else
    /* _exit runs the cleanup of each DLL, which may wait for a thread that no longer exists. */
    #define cseq_exit(code) TerminateProcess(GetCurrentProcess(), (UINT)(code))
    #endif
    """
    void cseq_exit(int code) noexcept nogil

def exit_on_hangup(intptr_t socket):
    """Wait until the peer of `socket` is gone, and exit without finalizing the interpreter."""
    with nogil:
        cseq_await_hangup(socket)
        cseq_exit(1)


cdef bint ends = False


def end_daemons():
    """From now on, make `rest` block daemon threads."""
    global ends
    ends = True


cpdef int rest() except -1:
    """Block a daemon thread forever if the interpreter is exiting. The thread must not hold a lock.

    At exit, Python up to 3.13 unwinds the stack of a daemon thread that reacquires the GIL. Inside
    the destructor of a tensor, this aborts the process.
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
