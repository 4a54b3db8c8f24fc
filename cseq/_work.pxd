"""The work of a runner: making batches, and publishing them."""

cimport cython

from cseq._core cimport Runner
from cseq._objects cimport ObjectTable


cdef class BatchState:
    cdef public object ticket
    cdef public object drawn


cdef class TicketWriter:
    cdef int open_ticket(self, Runner runner) except -1
    cdef bint publish_batch(self, Runner runner, object batch) except -1


@cython.final
cdef class ObjectWriter(TicketWriter):
    cdef ObjectTable objects


cdef class BatchMaker:
    cdef public object indexer
    cdef readonly object batch_writer
    cdef BatchState batch_state
    cdef TicketWriter writer
    cdef object convert, seeds
    cdef list loaded
    cdef long depth  # of forks; another one: this process is a copy, made by the user's code
    cdef int make(self, Runner runner) except -1
