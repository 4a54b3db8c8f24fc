"""Memory that arrays are made on."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._headers cimport (
    LINE, cseq_cell, cseq_load_acq_u64, cseq_load_rlx_u64, cseq_store_rlx_u64,
)


cdef enum:
    MAX_DIMS = 64
    LARGE = 65536  # bytes; copies of this size or more release the GIL
    LEAST = 16384  # bytes of a slot that are committed before it is used
    MOST_COPIED = 65536  # bytes; leaves up to this are copied out of their slots, together as many as fit

    # How the elements of an array lie in memory.
    ROWS = 0
    COLUMNS = 1
    STRIDED = 2  # in another order, or some in several places, and no more bytes than all elements have
    LOOSE = 3    # the rest: with gaps, backwards

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
    cdef int punch(self, Py_ssize_t slot, uint64_t nbytes) noexcept
    cdef void set_free(self, Py_ssize_t slot) noexcept nogil
    cdef int free_from(self, cseq_cell* c) except -1
    cdef bint end_use(self, Py_ssize_t slot, uint32_t use) noexcept nogil


# Plans: what batches of one structure have in common.

cdef extern from *:
    """
    /* Set an item of a list that no other thread uses: without the list's lock. */
    static inline void cseq_set_own(PyObject *list, Py_ssize_t k, PyObject *value) {
        PyObject *before = PyList_GET_ITEM(list, k);
        PyList_SET_ITEM(list, k, Py_NewRef(value));
        Py_DECREF(before);
    }
    """
    void cseq_set_own(list one, Py_ssize_t k, object value) noexcept


cdef enum:
    MOST_PICKLED = 4096  # bytes; longer `bytes` are leaves
    MOST_KNOWN = 64  # structures that a reader remembers
    RECENT = 4       # and a writer, which compares them one by one
    MOST_SEARCHED = 4  # containers inside one another, in the search for leaves that are not pickled
    BLOCKS = 8       # of copied leaves, that a plan keeps to use them again

    # Kinds of leaves, which lie in the slot as arrays; of what is pickled; of containers.
    ARRAY = 0
    TENSOR = 1
    BYTES = 2
    OBJECT = 3
    TUPLE = 4   # named ones too
    LIST = 5
    DICT = 6

cdef struct Leaf:
    int kind
    int nd
    int order             # ROWS, COLUMNS or STRIDED
    int words             # of its layout: where it begins, its bytes, its shape, and strides if it is STRIDED
    bint casts            # its type differs from its source's
    Py_ssize_t itemsize
    PyObject* dtype       # in the slot
    PyObject* source      # of what is written; NULL in a reader
    PyObject* torch_dtype  # of a tensor, if numpy lacks it; else NULL
    PyObject* bits         # and one of torch's that numpy has

cdef struct Node:
    int kind
    int count             # children
    PyObject* cls
    PyObject* keys        # of a dict
    PyObject* blank       # the dict of these keys, each with None

cdef struct Cursor:       # what comes next: a node, and leaf, layout, object
    int node
    int leaf
    const char* word
    Py_ssize_t object
    Py_ssize_t end        # of the leaves in the slot


cdef inline Py_ssize_t aligned(Py_ssize_t nbytes) noexcept:
    """Round up to whole cache lines."""
    return (nbytes + (LINE - 1)) & ~<Py_ssize_t>(LINE - 1)


@cython.final
cdef class Plan:
    cdef readonly bytes structure
    cdef const char* text       # its bytes
    cdef Py_ssize_t text_bytes
    cdef readonly tuple nodes
    cdef readonly object cast
    cdef readonly list sources
    cdef readonly list casts
    cdef object torch  # the module, if there are tensors
    cdef object tensor, to_array, from_numpy
    cdef Leaf* leaf
    cdef Node* node
    cdef int leaf_count, objects
    cdef Py_ssize_t words  # of a layout
    cdef list kept         # what nodes and leaves point to, and `nodes` has not
    cdef PyObject* blocks[BLOCKS]  # the latest
    cdef int turn             # which of them is replaced next
    cdef bint is_of(self, Memory memory, const uint64_t* record) noexcept
    cdef PyObject* keep(self, object value)
    cdef int add_leaf(self, int kind, str name, dtype, int nd, int order) except -1
    cdef int add_tensor(self, Leaf* leaf, str name) except -1
    cdef bint match(self, object batch, list arrays, list objects) except -1
    cdef bint match_array(self, int k, object value, list arrays) except -1
    cdef bint match_leaf(self, int kind, int k, object value, list arrays) except -1
    cdef bint match_node(self, Cursor* at, object value, list arrays, list objects) except -1
    cdef object read(self, Memory memory, const uint64_t* record, object lend, Py_ssize_t slot,
                     uint64_t capacity, list converters)
    cdef list read_leaves(self, Cursor* at, Memory memory, Memory home)
    cdef Py_ssize_t look(self, int k, const char* word, Py_ssize_t end, Py_ssize_t* offset) except -1
    cdef object read_leaf(self, int k, const char* word, Memory memory, Py_ssize_t offset,
                          Py_ssize_t nbytes)
    cdef Block spare(self, Py_ssize_t nbytes)
    cdef object build(self, Cursor* at, Memory memory, list arrays, list objects, list converters)
    cdef object build_leaf(self, Cursor* at, Memory memory, list arrays, list converters)


cdef int check_record(Memory memory, const uint64_t* record) except -1
cdef Plan plan_of(Memory memory, const uint64_t* record)
