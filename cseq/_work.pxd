"""Runners, and their work: batches made, and published."""

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._core cimport Ring
from cseq._headers cimport *
from cseq._memory cimport Memory, Plan, SlotTable


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
    cdef inline void repost(self) noexcept:
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
    cdef int open_ticket(self) except -1
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
    cdef readonly TicketWriter batch_writer
    cdef uint32_t depth  # of forks; another one: this process is a copy, made by the user's code
    cdef object make_batch(self, Runner runner)
    cpdef int work(self, Runner runner) except -1


cdef class BatchMaker(Work):
    cdef public object indexer
    cdef BatchState batch_state
    cdef object convert
    cdef BatchSeeds seeds
    cdef bint is_to_repeat(self) except -1
    cdef object index(self, Runner runner)


# Batches on their way: into a cell or a slot, and out of it.

cdef object UNREAD


cdef class Encoder(TicketWriter):
    cdef public Memory memory  # the slot, up to `capacity`; another object when it has grown
    cdef public Py_ssize_t used  # bytes of the slot that are given out
    cdef public Py_ssize_t capacity  # bytes that are committed; the trainer has to learn it
    cdef public bint loaned  # arrays in this slot may have been given out: `find` can find something
    cdef public bint watched  # large arrays were made for this batch: `learn` can learn something
    cdef public object placement  # a SlotAllocator: numpy allocates the indexer's large arrays in the slot
    cdef public object target  # the Mapping where it may do so; None while the worker keeps many slots
    cdef public dict mapped  # by slot: its Mapping, kept for the slot's next ticket
    cdef public list older  # mappings of the slot that were replaced during this ticket
    cdef public SlotTable slots  # None: slots are named by the caller
    cdef public int64_t slot  # the present one, which this process has taken; -1: none
    cdef public list kept  # slots in which arrays of earlier batches are alive; see `writer.Kept`
    cdef public object cast  # the dtype that numbers are cast to, or None
    cdef readonly list plans  # of the last batches of different structure, the latest first
    cdef list arrays      # leaves of the batch being written; else a list of Nones, to be used again
    cdef list objects
    cdef int64_t* words  # room for a layout
    cdef Py_ssize_t room
    cdef Plan find_plan(self, batch, cast)
    cdef void forget(self) noexcept
    cdef Py_ssize_t find_own(self, int k, Plan plan, object array, Py_ssize_t nbytes,
                             Py_ssize_t base) except -2
    cdef int reserve(self, Py_ssize_t count) except -1
    cdef int write_batch(self, object batch, object cast, uint64_t* record) except -1
    cdef int write_parts(self, Plan plan, list arrays, bytes pickled, uint64_t* record) except -1
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


cdef class ObjectWriter(TicketWriter):
    cdef readonly ObjectTable objects


@cython.final
cdef class Decoder:
    cdef ObjectTable objects
    cdef SlotTable slots
    cdef list mapped
    cdef object lend, convert, leaf_for
    cdef bint passes      # batches are objects that are handed over as they are
    cdef dict converters  # by plan
    cdef Plan found       # that of the latest batch
    cdef list leaves      # and its converters
    cdef object decode(self, uint32_t cell, cseq_cell* c)
    cdef object decode_slot(self, cseq_cell* c)
    cdef list leaves_of(self, Plan plan)
    cdef inline object free(self, uint32_t cell, cseq_cell* c):
        """Free slot and object of a ticket that leaves its cell; return the object, to be dropped
        after all else is done: its destructor may run code."""
        left = None if self.objects is None else self.objects.put(cell, None)
        if self.slots is not None:
            self.slots.free_from(c)
        return left
