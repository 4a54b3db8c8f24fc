"""The slot that a batch is written to."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from cseq._memory cimport Mapping, Memory
from cseq.memory._slots cimport SlotTable


@cython.final
cdef class Room:
    # The committed part of the slot. If the slot outgrows it, a new mapping replaces it.
    cdef readonly Memory memory
    cdef public Py_ssize_t used
    cdef readonly Py_ssize_t capacity
    # `loaned`: arrays in this slot may be alive. `watched`: large arrays were made for this batch.
    cdef readonly bint loaned, watched
    cdef readonly int64_t slot
    cdef readonly SlotTable slots
    cdef readonly dict mapped
    cdef public object slot_allocator
    # The mapping in which numpy allocates large arrays, or None if the worker keeps too many slots.
    cdef Mapping target
    # `older` contains earlier mappings of the growing slot. `kept` contains (slot, mappings, loans)
    # for slots with live arrays. `loans` contains weak references to loans, and `window` is the
    # current loan.
    cdef list older, kept, loans
    cdef object window
    cdef int fd
    cdef uint64_t width
    # Bytes committed since the last check of free memory.
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
