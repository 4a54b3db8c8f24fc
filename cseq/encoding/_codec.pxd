"""Writers and readers of batches in cells and slots."""

from cpython.ref cimport PyObject, PyTypeObject
from libc.stdint cimport uint32_t

cimport cython

from cseq._headers cimport cseq_cell
from cseq.memory._slots cimport SlotTable


cdef object UNREAD, AS_IT_IS
cdef PyTypeObject* PARTIAL


cdef enum:
    # Entries are one cache line apart (in list items).
    STRIDE = 8


cdef extern from *:
    """
    static inline PyObject *cseq_exchange(PyObject **item, PyObject *value) {
        PyObject *before = *item;
        *item = Py_NewRef(value);
        return before;
    }
    static inline PyObject *cseq_take(PyObject **item) {
        PyObject *taken = *item;
        *item = Py_NewRef(Py_None);
        return taken;
    }
    static inline PyObject **cseq_items(PyObject *list) {
        return ((PyListObject *)list)->ob_item;
    }
    """
    object cseq_exchange(PyObject** item, object value)
    PyObject* cseq_take(PyObject** item) noexcept
    PyObject** cseq_items(list items)


@cython.final
cdef class ObjectTable:
    cdef list held
    cdef PyObject** items
    cdef Py_ssize_t cells
    cdef int check(self, Py_ssize_t entry) except -1
    cdef inline object put(self, Py_ssize_t entry, object value):
        """Store an object and return the previous one."""
        return cseq_exchange(self.items + STRIDE * entry, value)
    cdef inline PyObject* take_object(self, Py_ssize_t entry) noexcept:
        """Store None and return the previous object as an owned reference."""
        return cseq_take(self.items + STRIDE * entry)
    cdef inline object get(self, Py_ssize_t entry):
        return <object>self.items[STRIDE * entry]


@cython.final
cdef class Decoder:
    cdef ObjectTable objects
    cdef SlotTable slots
    cdef list mapped
    cdef object lend, convert, leaf_for
    # Whether objects are passed on unchanged.
    cdef bint passes
    # `converters` is keyed by plan. `plan` is the latest plan, and `leaves` lists its converters.
    cdef dict converters
    cdef object plan
    cdef list leaves
    # The samples missing from the latest batch, with reasons, or None.
    cdef tuple left
    cdef inline bint hands_over(self, uint32_t entry, cseq_cell* c) noexcept:
        """Return True if `take_peeked` passes the object on with its reference."""
        return (self.passes and not c.status
                and self.objects.items[STRIDE * entry].ob_type is not PARTIAL)
    cdef object peek(self, uint32_t entry, cseq_cell* c)
    cdef object divide(self, batch)
    cdef PyObject* take_peeked(self, uint32_t entry, object batch) noexcept
    cdef object decode(self, uint32_t entry, cseq_cell* c)
    cdef object decode_slot(self, cseq_cell* c)
    cdef list leaves_of(self, plan)
    cdef inline object free(self, uint32_t entry, cseq_cell* c):
        """Free a ticket's slot. The caller must drop the returned object last."""
        left = None if self.objects is None else self.objects.put(entry, None)
        if self.slots is not None:
            self.slots.free_from(c)
        return left
