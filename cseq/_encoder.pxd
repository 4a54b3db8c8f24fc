"""Writing batches into slots."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cseq._core cimport Runner
from cseq._headers cimport cseq_cell
from cseq._memory cimport Memory
from cseq._plan cimport Plan
from cseq._slots cimport Slots
from cseq._work cimport TicketWriter


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
    cdef Py_ssize_t find_own(self, int k, list arrays, Py_ssize_t base) except -2
    cdef int reserve(self, Py_ssize_t count) except -1
    cdef int write_batch(self, Plan plan, list arrays, bytes pickled) except -1
    cdef int write_raw(self, const char* data, Py_ssize_t nbytes) except -1
    cpdef int take(self) except -1
    cdef void hand_over(self, Runner runner, cseq_cell* c, uint32_t status) noexcept
