"""Where threads leave their batches."""

from cpython.ref cimport PyObject

cimport cython


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
        """Leave an object; return what was there."""
        return cseq_exchange(self.items + STRIDE * cell, value)
    cdef inline PyObject* take(self, Py_ssize_t cell) noexcept:
        """Leave None; return what was there, whose reference is the caller's."""
        return cseq_take(self.items + STRIDE * cell)
    cdef inline object get(self, Py_ssize_t cell):
        return <object>self.items[STRIDE * cell]
    cdef inline bint has(self, Py_ssize_t cell) noexcept:
        """Whether there is an object."""
        return <object>self.items[STRIDE * cell] is not None
