# cython: language_level=3, freethreading_compatible=True
"""Locks, taken where a signal handler may raise at any moment."""

cimport cython


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Hold:
    """Takes a lock, and gives it back at the end of its ``with``: ``with Hold(lock):``.

    As ``with lock:``, which is not enough from Python 3.14 on: there a signal handler may run when
    the lock is taken and the block not yet entered. If it raises, nobody gives the lock back. An
    exception there drops the `Hold`, and that gives it back.

    Parameters
    ----------
    lock : object
        Its ``acquire()``, ``acquire(timeout=…)`` and ``release()`` are functions in C.
    timeout : float
        Wait at most so many seconds for it; -1: for any time.

    Attributes
    ----------
    mine : bool
        It was taken, and not given back yet.
    """

    cdef object lock
    cdef readonly bint mine

    def __cinit__(self, lock, double timeout=-1):
        self.lock = lock
        self.mine = lock.acquire() if timeout < 0 else lock.acquire(timeout=timeout)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.give_back()

    def __dealloc__(self):
        self.give_back()

    cdef int give_back(self) except -1:
        """Release the lock, once."""
        if self.mine:
            self.mine = False
            self.lock.release()
        return 0
