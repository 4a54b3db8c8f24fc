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

cdef enum:
    ROOM = 100  # frames, for a sampler or an iterator of keys


cdef extern from "Python.h":
    int Py_GetRecursionLimit() noexcept


cpdef int check_depth() except -1:
    """Raise RecursionError if the stack has no room for code that must not be left in its middle."""
    cdef int limit = Py_GetRecursionLimit()
    if is_deep(max(limit - ROOM, limit // 2)):
        raise RecursionError("the stack is too deep to take a batch: take it with fewer calls around it, "
                             "or raise sys.setrecursionlimit(); nothing was taken")
    return 0


cpdef bint is_deep(int depth=0) except -1:
    """Whether the stack has so many frames; 0: half of what there may be. Then a RecursionError may be
    due to the caller's stack, not to what it called."""
    try:
        _getframe(depth or Py_GetRecursionLimit() // 2)
    except ValueError:
        return False
    return True


cdef uint64_t ns_of(double seconds) noexcept:
    """Seconds as nanoseconds; below 0: as good as for ever."""
    return <uint64_t>-1 if seconds < 0 else <uint64_t>(min(seconds, 1e9) * 1e9)


@cython.final
@cython.no_gc
cdef class Lock:
    """A lock that its thread may take again, as `threading.RLock`; the core takes it without a call of
    Python.

    A signal handler runs before it is taken, or in the middle of what it protects, where it may take
    it again to look, must not (`refuse_mine`), or puts off what it wants (`put_off`). In Python, take it
    by ``with lock.hold()``: an exception of a handler may otherwise come between the taking and the body,
    and the lock stay taken. Since Python 3.14, handlers run there.

    In a forked process it is free, unless the thread that forked has it: the others are not there.
    """

    def __cinit__(self):
        self.calls = []
        self.forks = forks_here[0]

    cdef bint has(self) noexcept:
        """Whether this thread has it: it alone writes its number there, and takes it out again."""
        if cseq_load_acq_u32(&self.forks) != forks_here[0]:  # SYNC: free in a fork
            self.look_at_fork()
        return cseq_load_rlx_u64(&self.owner) == PyThread_get_thread_ident()

    @cython.critical_section
    cdef int look_at_fork(self) noexcept:
        """Free it in a forked process, once, unless the thread that forked has it. Another thread may
        have the number of one that is not there."""
        if self.forks != forks_here[0]:
            if cseq_load_rlx_u64(&self.owner) != forker_here[0]:
                cseq_store_rlx_u64(&self.owner, 0)
            cseq_store_rel_u32(&self.forks, forks_here[0])  # SYNC: free in a fork
        return 0

    @property
    def is_mine(self):
        """Whether this thread has it: it is in the middle of what the lock protects."""
        return bool(self.has())

    def hold(self, double timeout=-1):
        """A `Hold`, for a ``with``: see there."""
        cdef Hold hold = Hold.__new__(Hold)
        hold.lock, hold.timeout = self, timeout
        return hold

    cpdef int refuse_mine(self) except -1:
        """Raise RuntimeError if this thread has it: it is in the middle of another call."""
        if self.has():
            raise RuntimeError(
                "this thread is in the middle of another call of the same object: a signal handler, or "
                "whatever else that call runs, can neither take a batch there nor begin or set an epoch, "
                "start or load; it may raise an exception, call state_dict() or stats(), or finish(), which "
                "ends the run once that call is over. Let a handler set a flag, and look at it after the call")
        return 0

    cdef bint acquire(self, double timeout) except -1:
        """Take it; wait at most `timeout` seconds for it, -1: for any time. Return whether it was.

        Signal handlers run meanwhile; if one raises, it was not taken.
        """
        if not self.has():
            return self.acquire_first(timeout)
        self.depth += 1
        return True

    cdef bint acquire_first(self, double timeout) except -1:
        """Do so where this thread does not have it."""
        if not cseq_cas_sc_u64(&self.owner, 0, PyThread_get_thread_ident()):
            if not timeout or not self.sleep(timeout):
                return False
        self.depth = 1
        return True

    cdef bint sleep(self, double timeout) except -1:
        """Sleep until it is taken, at most so many seconds; run signal handlers."""
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
        """Give it back; the caller has it. Then make the calls that were put off until now."""
        self.depth -= 1
        if not self.depth:
            cseq_swap_sc_u64(&self.owner, 0)
            if cseq_load_sc_u32(&self.asleep) and cseq_swap_sc_u32(&self.asleep, 0):  # SYNC: sleeper seen
                cseq_wake(&self.asleep, 0)
        return self.make_calls() if cseq_load_sc_u32(&self.due) else 0  # SYNC: calls

    def put_off(self, call not None):
        """Have the thread that has it make a call, ``call()``, once it has given it back; this one does so
        at once if none has it."""
        self.calls.append(call)
        cseq_swap_sc_u32(&self.due, 1)  # SYNC: calls
        if self.acquire(0):
            self.release()

    cdef int make_calls(self) except -1:
        """Make the calls that were put off, unless this thread has it still."""
        if self.has() or not cseq_swap_sc_u32(&self.due, 0):
            return 0
        try:
            while (call := self.next_call()) is not None:
                call()
        finally:
            if self.calls:  # one has raised
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

    Or until nothing refers to this object: an exception that comes before the body drops it.
    With `timeout`, the body may be entered without the lock: `has` tells.
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
    """An event that is set once, and can be waited for, by several threads."""

    cdef uint32_t word

    def set(self):
        """Set it."""
        cseq_swap_sc_u32(&self.word, 1)  # SYNC: what is done before a latch is set
        cseq_wake(&self.word, 0)

    def wait(self, double timeout=-1):
        """Wait until it is set, at most `timeout` seconds (-1: no limit); return whether it is.

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

    Attributes
    ----------
    generation : int
        An iterator of another one is void, and a call for it takes nothing.
    lock : Lock
        Around every use of the pool but `interrupt`.
    """

    def __cinit__(self):
        self.lock = Lock()

    @property
    def generation(self):
        return cseq_load_acq_u64(&self.number)

    def interrupt(self):
        """Begin the next generation, on any thread or in a signal handler: return its number."""
        return cseq_add_sc_u64(&self.number, 1) + 1


cdef extern from *:
    """
    #ifndef _WIN32
    #include <unistd.h>
    #define cseq_exit _exit
    #else /* _exit has each DLL clean up, which may wait for a thread that is gone */
    #define cseq_exit(code) TerminateProcess(GetCurrentProcess(), (UINT)(code))
    #endif
    """
    void cseq_exit(int code) noexcept nogil

def exit_on_hangup(intptr_t socket):
    """Wait until the peer of `socket` is gone; then end this process without the interpreter.
    Never returns; for a thread of its own."""
    with nogil:
        cseq_await_hangup(socket)
        cseq_exit(1)


cdef bint ends = False  # the interpreter does


def end_daemons():
    """The interpreter ends: `rest` keeps daemon threads from now on."""
    global ends
    ends = True


cpdef int rest() except -1:
    """Keep a daemon thread of the user's here for good, once the interpreter ends; it holds no lock.

    Python stops such a thread as soon as it wants the GIL back, until 3.13 by unwinding its stack. In
    the destructor of a tensor, which gives the GIL away, that aborts the process. A thread that rests
    drops nothing, and prints no traceback.
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
