"""The slot that a batch is written to."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from cseq._memory cimport Mapping, Memory
from cseq.memory._slots cimport SlotTable


@cython.final
cdef class Room:
    # The slot up to `capacity`. A new object replaces this one when the slot grows.
    cdef readonly Memory memory
    cdef public Py_ssize_t used
    cdef readonly Py_ssize_t capacity
    # `loaned`: arrays in this slot may be in use. `watched`: large arrays were made for this batch.
    cdef readonly bint loaned, watched
    cdef readonly int64_t slot
    cdef readonly SlotTable slots
    cdef readonly dict mapped
    cdef public object slot_allocator
    # The mapping in which numpy allocates large arrays, or None while the worker keeps many slots.
    cdef Mapping target
    # `older`: mappings of the slot replaced during this ticket. `kept`: (slot, mappings, loans) of slots with
    # live arrays of earlier batches. `loans`: weak references to the slot's loans. `window`: the current one.
    cdef list older, kept, loans
    cdef object window
    cdef int fd
    cdef uint64_t width
    # The number of bytes committed since the last check of free memory.
    cdef Py_ssize_t unchecked
    cdef int open_slot(self) except -1
    cdef int take_slot(self) except -1
    cdef int begin_empty(self) except -1
    cdef int abandon(self) except -1
    cdef int open_at(self, int64_t slot, Py_ssize_t capacity) except -1
    cdef bint stop_lending(self) except -1
    cdef bint is_lent(self) except -1
    cdef int keep(self) except -1
    cdef bint may_lend(self) except -1
    cdef int recover(self) except -1
    cdef int grow(self, Py_ssize_t needed) except -1
    cdef int commit(self, Py_ssize_t start, Py_ssize_t end) except -1
    cdef Mapping map(self, int64_t slot, Py_ssize_t capacity)
    cpdef Py_ssize_t reserve(self, Py_ssize_t nbytes) except -1
    cpdef Py_ssize_t offset_of(self, array) except -2
