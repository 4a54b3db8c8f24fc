# cython: language_level=3, freethreading_compatible=True
"""What the core reads of a run for every batch: its generation, and its lock."""

from libc.stdint cimport uint64_t

from cseq._headers cimport *
from cseq._lock cimport Lock


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
