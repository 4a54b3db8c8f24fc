"""Plans: what batches of one structure have in common, and how they are read."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint64_t

from cseq._headers cimport LINE
from cseq._memory cimport Block, Memory

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
    MOST_PLANS = 64  # structures that a reader remembers
    RECENT = 4       # and a writer, which compares them one by one
    MOST_SEARCHED = 100  # containers inside one another, in the search for leaves that are not pickled
    BLOCKS = 8       # of copied leaves, that a plan keeps to use them again

    # Kinds of leaves, which lie in the slot as arrays; of what is pickled; of containers.
    ARRAY = 0
    TENSOR = 1
    BYTES = 2
    OBJECT = 3
    TUPLE = 4   # named ones too
    LIST = 5
    DICT = 6

    # What a value contains: leaves that lie in the slot; only what is pickled; only numbers and texts.
    LEAVES = 0
    OBJECTS = 1
    PLAIN = 2

cdef struct Leaf:
    int kind
    int nd
    bint rows             # its axes are in order
    const uint8_t* axes   # as it lies, the outermost first
    int words             # of its layout: where it begins, its bytes, its shape
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
    int contents          # of the objects


cdef inline Py_ssize_t aligned(Py_ssize_t nbytes) noexcept:
    """Round up to whole cache lines."""
    return (nbytes + (LINE - 1)) & ~<Py_ssize_t>(LINE - 1)


cdef int check_record(Memory memory, const uint64_t* record) except -1
cdef int contents_of(object value, int depth) except -1


@cython.final
cdef class Plan:
    cdef readonly bytes structure
    cdef const char* text       # its bytes
    cdef Py_ssize_t text_bytes
    cdef readonly tuple nodes
    cdef readonly list sources
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
    cdef int add_leaf(self, int kind, str name, dtype, bytes axes) except -1
    cdef int add_tensor(self, Leaf* leaf, str name) except -1
    cdef int match(self, object batch, list arrays, list objects) except -1
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


cdef Plan plan_of(Memory memory, const uint64_t* record)
