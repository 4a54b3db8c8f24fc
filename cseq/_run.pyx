# cython: language_level=3, freethreading_compatible=True
"""What the core reads of a run for every batch: its generation, and its lock."""

from libc.stdint cimport uint64_t

cimport cython

from cseq._headers cimport *
from cseq._lock cimport Lock


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
