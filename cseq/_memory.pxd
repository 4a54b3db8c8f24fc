"""Memory that arrays are made on."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._headers cimport (
    cseq_cell, cseq_load_acq_u64, cseq_load_rlx_u64, cseq_store_rlx_u64,
)


cdef enum:
    MAX_DIMS = 64
    LARGE = 65536  # bytes; copies of this size or more release the GIL
    LEAST = 16384  # bytes of a slot that are committed before it is used
    MOST_COPIED = 65536  # bytes; leaves up to this are copied out of their slots, together as many as fit

cdef uint32_t* forks_here   # see `fork_depth`
cdef uint64_t* forker_here  # the thread that this process is a copy of

cdef extern from *:
    """
    /* An array on memory that `owner` has, which it keeps alive. `strides`: in bytes; NULL: no gaps. */
    static inline PyObject *cseq_array_on(PyObject *owner, char *data, PyObject *dtype, int nd, npy_intp *dims,
                                          npy_intp *strides, int flags) {
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef(dtype), nd, dims,
                                               strides, data, flags, NULL);
        if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0)
            Py_CLEAR(array);
        return array;
    }
    """
    object cseq_array_on(object owner, char* data, PyObject* dtype, int nd, cnp.npy_intp* dims,
                         cnp.npy_intp* strides, int flags)

cdef bint lies_in(cnp.ndarray array, const uint8_t* axes) noexcept
cdef bint is_permuted(cnp.ndarray array, uint8_t* axes) noexcept


cdef class Memory:
    cdef char* data
    cdef Py_ssize_t size  # bytes
    @cython.final
    cdef int inside(self, Py_ssize_t offset, Py_ssize_t nbytes) except -1
    @cython.final
    cdef int put(self, Py_ssize_t offset, const char* source, Py_ssize_t nbytes) except -1


@cython.final
@cython.no_gc
cdef class Block(Memory):
    cdef void* raw


@cython.final
@cython.no_gc
cdef class Mapping(Memory):
    pass


# Slots of shared memory: the owner of each, and how large it is.

cdef enum:
    CHUNK = 1024   # slots
    PAGE = 4096    # bytes

cdef struct slot_chunk:
    uint32_t owner[CHUNK]   # FREE, a worker's number, or TRAINER
    uint32_t uses[CHUNK]    # of the trainer: LEASED, PINNED
    uint64_t nbytes[CHUNK]  # committed; written by the owner

cdef struct slot_table:
    uint64_t made  # slots; written once they are there
    uint64_t hint  # no free slot is below it, as far as is known
    char pad[PAGE - 16]
    slot_chunk chunk[1]


@cython.final
@cython.no_gc
cdef class SlotTable:
    cdef Mapping mapping
    cdef slot_table* table
    cdef int fd
    cdef uint64_t width
    cdef Py_ssize_t most     # slots that there can be
    cdef readonly uint32_t owner
    cdef uint32_t depth      # forks that lie before this process; its copies change nothing
    cdef uint64_t held       # leases alive
    cdef uint64_t held_bytes  # their slots' bytes
    cdef uint64_t peak_bytes, peak_held  # since `peak` was called
    cdef bint pinned         # slots are
    cdef object __weakref__
    cdef dict leases         # by slot: leases of tickets that are still in the ring
    cdef inline slot_chunk* chunk(self, Py_ssize_t slot) noexcept nogil:
        return &self.table.chunk[slot // CHUNK]
    cdef inline uint32_t* word(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).owner[slot % CHUNK]
    cdef inline uint32_t* uses(self, Py_ssize_t slot) noexcept nogil:
        return &self.chunk(slot).uses[slot % CHUNK]
    cdef inline Py_ssize_t count(self) noexcept nogil:
        """Slots made so far."""
        return 0 if self.table == NULL else <Py_ssize_t>cseq_load_acq_u64(&self.table.made)  # SYNC: entries of slots are there
    cdef inline uint64_t committed(self, Py_ssize_t slot) noexcept nogil:
        """Bytes of a slot; exact for the owner, a hint for others."""
        return cseq_load_rlx_u64(&self.chunk(slot).nbytes[slot % CHUNK])
    cdef inline void set_committed(self, Py_ssize_t slot, uint64_t nbytes) noexcept nogil:
        """Set how many bytes of a slot are committed; the caller has it."""
        cseq_store_rlx_u64(&self.chunk(slot).nbytes[slot % CHUNK], nbytes)
    cdef int check(self, Py_ssize_t slot) except -1
    cdef Py_ssize_t search(self, Py_ssize_t first) noexcept nogil
    cdef void lower(self, Py_ssize_t slot) noexcept nogil
    cdef int extend(self) except -1
    cdef int commit(self, uint64_t offset, uint64_t nbytes) except -1
    cpdef Py_ssize_t take(self) except -1
    cdef void set_free(self, Py_ssize_t slot) noexcept nogil
    cdef int free_from(self, cseq_cell* c) except -1
    cdef bint end_use(self, Py_ssize_t slot, uint32_t use) noexcept nogil
