"""Requests: the data for calls and items of a stream."""

from libc.stdint cimport int64_t, uint32_t

cimport cython

from cseq._core cimport REQUEST_WORDS, Ring
from cseq.memory._slots cimport SlotTable


@cython.final
@cython.no_gc_clear
cdef class Request:
    cdef SlotTable slots
    cdef readonly Py_ssize_t slot
    cdef readonly object value
    cdef int64_t words[REQUEST_WORDS]


cdef int64_t* refer(Ring ring, uint32_t cell, Request key, Request assignment, str name) noexcept
