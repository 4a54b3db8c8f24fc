"""Batches on their way: into a cell or a slot, and out of it."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython

from cseq._headers cimport cseq_cell
from cseq._memory cimport Memory
from cseq._plan cimport Plan, Reader
from cseq._slots cimport Slots
from cseq._work cimport Runner, TicketWriter

cdef object UNREAD


cdef class SlotEncoder(TicketWriter):
    cdef public Memory memory  # the slot, up to `capacity`; another object when it has grown
    cdef public Py_ssize_t used  # bytes of the slot that are given out
    cdef public Py_ssize_t capacity  # bytes that are committed; the trainer has to learn it
    cdef public bint loaned  # arrays in this slot may have been given out: `find` can find something
    cdef public bint watched  # large arrays were made for this batch: `learn` can learn something
    cdef public object placement  # a SlotAllocator: numpy allocates the indexer's large arrays in the slot
    cdef public object target  # the Mapping where it may do so; None while the worker keeps many slots
    cdef public dict mapped  # by slot: its Mapping, kept for the slot's next ticket
    cdef public list older  # mappings of the slot that were replaced during this ticket
    cdef public Slots slots  # None: slots are named by the caller
    cdef public int64_t slot  # the present one, which this process has taken; -1: none
    cdef public list kept  # slots in which arrays of earlier batches are alive; see `writer.Kept`
    cdef public object cast  # the dtype that `try_publish` casts numbers to, or None
    # dump(objects, writer, cast) -> (bytes, list of numpy.ndarray): pickles what no plan opens; the arrays
    # are buffers beside the pickle.
    cdef public object dump
    cdef readonly list plans  # of the last batches of different structure, the latest first
    cdef list arrays      # leaves of the batch being written; else a list of Nones, to be used again
    cdef list objects
    cdef int64_t* words  # room for a layout
    cdef Py_ssize_t room
    cdef uint64_t fields[4]  # the record of what was laid down last
    cdef Plan find_plan(self, batch, cast)
    cdef void forget(self) noexcept
    cdef Py_ssize_t find_own(self, int k, Plan plan, list arrays, Py_ssize_t base) except -2
    cdef int reserve(self, Py_ssize_t count) except -1
    cdef int write_batch(self, Plan plan, list arrays, bytes pickled) except -1
    cdef int fit(self, Py_ssize_t nbytes) except -1
    cpdef int take(self) except -1
    cdef void hand_over(self, Runner runner, cseq_cell* c, uint32_t status) noexcept


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
    cdef inline PyObject* take(self, Py_ssize_t cell) noexcept:
        """Store None; return what was there, whose reference is the caller's."""
        return cseq_take(self.items + STRIDE * cell)
    cdef inline object get(self, Py_ssize_t cell):
        return <object>self.items[STRIDE * cell]


@cython.final
cdef class ObjectWriter(TicketWriter):
    cdef ObjectTable objects


@cython.final
cdef class Decoder:
    cdef ObjectTable objects
    cdef Slots slots
    cdef list mapped
    cdef Reader reader
    cdef object lend, convert, leaf_for
    cdef bint passes      # batches are objects that are handed over as they are
    cdef dict converters  # by plan
    cdef Plan found       # that of the latest batch
    cdef Plan latest
    cdef list leaves      # converters of `latest`
    cdef object decode(self, uint32_t cell, cseq_cell* c)
    cdef object decode_slot(self, cseq_cell* c, bint leaves)
    cdef list conversion(self, Plan plan)
    cdef inline object release(self, uint32_t cell, cseq_cell* c):
        """Release slot and object of a ticket that leaves its cell; return the object, to be dropped
        after all else is done: its destructor may run code."""
        left = None if self.objects is None else self.objects.put(cell, None)
        if self.slots is not None:
            self.slots.detach(c)
        return left
