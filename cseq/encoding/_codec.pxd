"""Batches that were made: in a cell, or in a slot."""

from cpython.ref cimport PyObject, PyTypeObject
from libc.stdint cimport uint32_t

cimport cython

from cseq._headers cimport cseq_cell
from cseq.memory._slots cimport SlotTable


cdef object UNREAD, AS_IT_IS
cdef PyTypeObject* PARTIAL


cdef enum:
    STRIDE = 8  # items of the list for each cell: a cache line


cdef extern from *:
    """
    static inline PyObject *cseq_exchange(PyObject **place, PyObject *value) {
        PyObject *before = *place;
        *place = Py_NewRef(value);
        return before;
    }
    static inline PyObject *cseq_take(PyObject **place) {
        PyObject *taken = *place;
        *place = Py_NewRef(Py_None);
        return taken;
    }
    static inline PyObject **cseq_items(PyObject *list) {
        return ((PyListObject *)list)->ob_item;
    }
    """
    object cseq_exchange(PyObject** place, object value)
    PyObject* cseq_take(PyObject** place) noexcept
    PyObject** cseq_items(list one)


@cython.final
cdef class ObjectTable:
    cdef list held
    cdef PyObject** items
    cdef Py_ssize_t cells
    cdef int check(self, Py_ssize_t cell) except -1
    cdef inline object put(self, Py_ssize_t cell, object value):
        """Store an object; return what was there."""
        return cseq_exchange(self.items + STRIDE * cell, value)
    cdef inline PyObject* take_object(self, Py_ssize_t cell) noexcept:
        """Store None; return what was there, whose reference is the caller's."""
        return cseq_take(self.items + STRIDE * cell)
    cdef inline object get(self, Py_ssize_t cell):
        return <object>self.items[STRIDE * cell]


@cython.final
cdef class Decoder:
    cdef ObjectTable objects
    cdef SlotTable slots
    cdef list mapped
    cdef object lend, convert, leaf_for
    cdef bint passes      # batches are objects that are handed over as they are
    cdef dict converters  # by plan
    cdef object plan      # of the latest batch
    cdef list leaves      # and its converters
    cdef tuple left       # the samples that the latest batch lacks, and why; None: it is whole
    cdef inline bint hands_over(self, uint32_t cell, cseq_cell* c) noexcept:
        """Whether `take_peeked` hands the object in a cell over as it lies there; no reference is counted."""
        return (self.passes and not c.status
                and self.objects.items[STRIDE * cell].ob_type is not PARTIAL)
    cdef object peek(self, uint32_t cell, cseq_cell* c)
    cdef object divide(self, batch)
    cdef PyObject* take_peeked(self, uint32_t cell, object batch) noexcept
    cdef object decode(self, uint32_t cell, cseq_cell* c)
    cdef object decode_slot(self, cseq_cell* c)
    cdef list leaves_of(self, plan)
    cdef inline object free(self, uint32_t cell, cseq_cell* c):
        """Free slot and object of a ticket that leaves its cell; return the object, to be dropped
        after all else is done: its destructor may run code."""
        left = None if self.objects is None else self.objects.put(cell, None)
        if self.slots is not None:
            self.slots.free_from(c)
        return left
