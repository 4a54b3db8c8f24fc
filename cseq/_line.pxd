"""The line of tickets that are outstanding."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._codec cimport Decoder
from cseq._core cimport Ring
from cseq._headers cimport cseq_cell, cseq_history, cseq_meter, cseq_ring, cseq_ring_cell, cseq_ring_ready
from cseq._source cimport Source


cdef struct Ticket:
    uint64_t number
    uint64_t units  # that it counts for; 0: a reply
    uint32_t ring
    uint32_t cell


@cython.final
cdef class History:
    cdef cseq_history h


cdef class Line:
    cdef readonly History history
    cdef readonly Source source
    cdef readonly uint64_t ticket
    cdef uint64_t taken_count  # tickets of this epoch, which any thread reads: see `cseq_count_u64`
    cdef uint64_t now          # ns, of the present step: when a ticket was taken, and the next one posted
    cdef list rings
    cdef cseq_ring** r         # of these
    cdef Decoder decoder
    cdef object discard
    cdef bint queues           # each worker has a ring of its own
    cdef uint64_t runners      # of all rings
    cdef Ticket* buffer        # circular
    cdef Py_ssize_t room, first, length
    cdef Ticket* abandoned     # given up, and still in their cells
    cdef readonly Py_ssize_t abandoned_count
    @cython.final
    cdef inline Ticket* at(self, Py_ssize_t k) noexcept:
        """The ticket at a position of the line."""
        cdef Py_ssize_t i = self.first + k
        return &self.buffer[i if i < self.room else i - self.room]
    @cython.final
    cdef inline cseq_cell* cell(self, Ticket* t) noexcept:
        return cseq_ring_cell(self.r[t.ring], t.cell)
    @cython.final
    cdef inline bint is_ready(self, Py_ssize_t k) noexcept:
        """Whether the ticket at a position is answered."""
        return cseq_ring_ready(self.r[self.at(k).ring], self.at(k).cell)
    @cython.final
    cdef inline void remove(self, Py_ssize_t k) noexcept:
        """Remove a ticket from the line."""
        while k > 0:
            self.at(k)[0] = self.at(k - 1)[0]
            k -= 1
        self.first = 0 if self.first + 1 == self.room else self.first + 1
        self.length -= 1
    @cython.final
    cdef inline void rotate(self) noexcept:
        """Move the first ticket of the line to its end."""
        self.at(self.length)[0] = self.at(0)[0]
        self.first = 0 if self.first + 1 == self.room else self.first + 1
    cdef Py_ssize_t locate(self, uint64_t number) noexcept
    cdef bint post(self) noexcept
    cpdef int refill(self) except -1
    cdef void abandon(self, Ticket* t) noexcept
    cdef void give_up(self, uint32_t number) noexcept
    cdef void give_up_call(self, uint32_t number) noexcept
    cpdef int sweep(self) except -1
    cdef object drop(self, Py_ssize_t k, Ring ring)
    cdef uint64_t note_first(self, cseq_meter* m) noexcept
    cdef void note_history(self) noexcept
