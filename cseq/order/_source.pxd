"""Ticket sources."""

from libc.stdint cimport uint32_t, uint64_t

from cseq._core cimport Ring


cdef class Source:
    cdef readonly uint64_t epoch
    # Number of units before the first ticket.
    cdef readonly uint64_t consumed
    # Whether items have keys.
    cdef readonly bint keyed
    cdef bint is_ready(self, uint64_t taken) noexcept
    cdef int prepare(self, uint64_t taken) except -1
    cdef Py_ssize_t target(self) noexcept
    cdef uint64_t write(self, Py_ssize_t ring_number, Ring ring, uint32_t cell, uint64_t ticket) noexcept
    cdef void end(self, Py_ssize_t ring_number) noexcept
    cdef bint is_over(self) noexcept
    cpdef int finish(self) except -1
