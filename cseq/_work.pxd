"""Runners, and their work: batches made, and published."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._core cimport Ring
from cseq._headers cimport *


cdef enum:
    PROBE_NS = 50000  # that a thread sleeps before it asks for the GIL: else it would have it again at once


cdef class BatchState:
    cdef public object ticket
    cdef public object drawn


@cython.final
cdef class Runner:
    cdef cseq_ring* r
    cdef readonly Ring ring
    cdef readonly uint32_t stage
    cdef readonly uint32_t owner
    cdef cseq_cell* c
    cdef cseq_meter* meter
    cdef readonly int cell  # of the present ticket; -1: none
    cdef public uint64_t park  # ns that `claim` waits at most
    cdef bint last
    cdef uint64_t since        # when a ticket was claimed or published last; when none came
    cdef cnp.ndarray room      # for the indices of a ticket
    cdef void hold(self, int cell, uint64_t now) noexcept
    cdef bint claim_at_once(self, uint64_t now) noexcept
    cdef inline void give_back(self) noexcept:
        """Post the ticket in hand again: its batch was interrupted, and is to be made from the beginning."""
        cdef uint32_t cell
        self.cell = -1
        cseq_ring_repost(self.r, self.owner, &cell, 0)
    cdef inline void poll(self) noexcept:
        """Count what the system knows; between threads, how long this one waits if it asks for the GIL."""
        cdef uint32_t word = 0
        cdef uint64_t awake
        cdef bint shared = self.r.gate[0].shared
        if not shared and self.meter.polled_ns:
            with nogil:
                cseq_wait(&word, 0, PROBE_NS, 0)
                awake = cseq_now_ns()
            cseq_histogram_add(&self.meter.gil, cseq_now_ns() - awake)
        cseq_meter_poll(self.meter, cseq_now_ns(), shared)
    cdef cseq_cell* held(self) except NULL
    cpdef object indices(self)
    cdef void deliver(self, cseq_cell* c, uint32_t status) noexcept


cdef class TicketWriter:
    cdef int open_ticket(self, Runner runner) except -1
    cdef bint publish_batch(self, Runner runner, object batch) except -1


cdef class Generator:
    cdef int seed(self, const uint64_t* words) except -1
    cpdef object save(self)
    cpdef int restore(self, state) except -1


cdef class Twister(Generator):
    cdef object owner
    cdef uint32_t* key
    cdef int32_t* position
    cdef void fill(self, const uint64_t* words) noexcept
    cdef bytes copy(self)
    cdef int paste(self, bytes copied) except -1


@cython.final
cdef class PythonGenerator(Twister):
    pass


@cython.final
cdef class NumpyGenerator(Twister):
    cdef object current, bit_generator, acquire, release
    cdef int* has_gauss
    cdef double* gauss
    cdef bint is_here(self) except -1


@cython.final
cdef class TorchGenerator(Generator):
    cdef object generator, manual_seed


cdef class BatchSeeds:
    cdef readonly list present
    cdef readonly dict missing
    cdef tuple names  # of `missing`, when `is_due` was asked last
    cdef BatchState batch_state
    cdef uint64_t making, seed_word, epoch, key
    cdef bint has_key, lent
    cdef bint looked  # since the batch before: no module is there that was missing
    cdef list saved
    cdef int write(self, uint64_t seed, uint64_t epoch, uint64_t purpose) except -1
    cdef int set(self, uint64_t seed, uint64_t epoch, uint64_t purpose) except -1
    cdef int keep(self) except -1
    cdef bint is_due(self) except -1
    cpdef void lend(self) noexcept
    cpdef restore(self)
    cdef int paste(self) except -1
    cdef int seed_batch(self, uint64_t seed, uint64_t epoch, uint64_t start) except -1


cdef class Work:
    cdef readonly object batch_writer
    cdef TicketWriter writer
    cdef long depth  # of forks; another one: this process is a copy, made by the user's code
    cdef object make_batch(self, Runner runner)
    cdef int work(self, Runner runner) except -1


cdef class BatchMaker(Work):
    cdef public object indexer
    cdef BatchState batch_state
    cdef object convert
    cdef BatchSeeds seeds
    cdef bint is_to_repeat(self) except -1
    cdef object index(self, Runner runner)
