"""Runners, and the writers of their batches."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from cseq._core cimport Ring
from cseq._headers cimport cseq_cell, cseq_meter, cseq_ring, cseq_turns


@cython.final
cdef class Runner:
    cdef cseq_ring* r
    cdef readonly Ring ring
    cdef readonly uint32_t stage
    cdef readonly uint32_t owner
    # `cell`: the current cell, or -1. `park`: how long `claim` waits, in ns. `turn`: the runner's
    # number if runners take turns. `owes`: the trainer must be notified before the turn ends.
    # `since`: time of the last claim, publication or failed wait. `room`: reusable index array.
    cdef cseq_cell* c
    cdef cseq_meter* meter
    cdef readonly int cell
    cdef public uint64_t park
    cdef bint last
    cdef cseq_turns* turns
    cdef uint32_t turn
    cdef bint owes
    cdef uint64_t since
    cdef cnp.ndarray room
    cdef void pause(self) noexcept nogil
    cdef void hold(self, int cell, uint64_t now) noexcept
    cdef bint claim_at_once(self, uint64_t now) noexcept
    cdef void repost(self) noexcept
    cdef void poll(self) noexcept
    cdef inline cseq_cell* held(self) except NULL:
        if self.cell < 0:
            raise RuntimeError("no ticket in hand: claim one first")
        return self.c
    cpdef object indices(self)
    cdef void deliver(self, cseq_cell* c, uint32_t status) noexcept


cdef class BatchWriter:
    cdef int open_ticket(self) except -1
    cdef bint publish_batch(self, Runner runner, object batch) except -1
