"""Plans: the structure that several batches have in common."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint64_t

from cseq._headers cimport LINE
from cseq._memory cimport Block, Memory

cdef extern from *:
    """
    /* Set an item of a list that no other thread uses, without the list's lock. */
    static inline void cseq_set_own(PyObject *list, Py_ssize_t k, PyObject *value) {
        PyObject *before = PyList_GET_ITEM(list, k);
        PyList_SET_ITEM(list, k, Py_NewRef(value));
        Py_DECREF(before);
    }
    """
    void cseq_set_own(list items, Py_ssize_t k, object value) noexcept

cdef enum:
    # `bytes` objects of this size or more are leaves.
    MOST_PICKLED = 4096
    # Number of plans that a reader caches, and number that a writer tries.
    MOST_PLANS = 64
    RECENT = 4
    # Maximum container depth that is searched for leaves.
    MOST_SEARCHED = 100
    # Number of memory blocks that a plan keeps for later copies.
    BLOCKS = 8

    # Kinds of nodes: leaves stored as arrays, pickled objects, and containers.
    ARRAY = 0
    TENSOR = 1
    BYTES = 2
    OBJECT = 3
    TUPLE = 4
    LIST = 5
    DICT = 6

    # What a value contains: leaves, other objects, or only numbers and strings.
    LEAVES = 0
    OBJECTS = 1
    PLAIN = 2

# `axes` are in memory order, outermost first, and `rows` is true for C order. `words` is the length
# of the layout (offset, bytes, shape). `dtype` is the type in the slot, and `source` the type of
# the array to write (NULL in a reader). If numpy lacks a tensor's type, `torch_dtype` is that type,
# and `bits` is an integer type of the same size.
cdef struct Leaf:
    int kind, nd
    bint rows
    const uint8_t* axes
    int words
    bint casts
    Py_ssize_t itemsize
    PyObject* dtype
    PyObject* source
    PyObject* torch_dtype
    PyObject* bits

# `count` is the number of children. A dict has `keys`, and `blank` maps these keys to None.
cdef struct Node:
    int kind, count
    PyObject* cls
    PyObject* keys
    PyObject* blank

# Positions of the next node, leaf, layout and object. The leaves in the slot end at `end`.
cdef struct Cursor:
    int node, leaf
    const char* word
    Py_ssize_t object, end
    int contents


cdef inline Py_ssize_t aligned(Py_ssize_t nbytes) noexcept:
    """Round up to whole cache lines."""
    return (nbytes + (LINE - 1)) & ~<Py_ssize_t>(LINE - 1)


cdef int check_record(Memory memory, const uint64_t* record) except -1
cdef int contents_of(object value, int depth) except -1


@cython.final
cdef class Plan:
    cdef readonly bytes structure
    cdef const char* text
    cdef Py_ssize_t text_bytes
    cdef readonly tuple nodes
    cdef readonly list sources
    cdef object torch, tensor, to_array, from_numpy
    cdef Leaf* leaf
    cdef Node* node
    cdef int leaf_count, objects
    # The length of the layout in words.
    cdef Py_ssize_t words
    # Owns the objects that nodes and leaves point to.
    cdef list kept
    # The latest blocks, and the index of the next one to replace.
    cdef PyObject* blocks[BLOCKS]
    cdef int turn
    cdef bint is_of(self, Memory memory, const uint64_t* record) noexcept
    cdef PyObject* keep(self, object value)
    cdef int add_leaf(self, int kind, str name, dtype, bytes axes) except -1
    cdef int add_tensor(self, Leaf* leaf, str name) except -1
    cdef int match(self, object batch, list arrays, list objects) except -1
    cdef bint match_array(self, int k, object value, list arrays) except -1
    cdef bint match_leaf(self, int kind, int k, object value, list arrays) except -1
    cdef bint match_node(self, Cursor* cursor, object value, list arrays, list objects) except -1
    cdef object read(self, Memory memory, const uint64_t* record, object lend, Py_ssize_t slot,
                     uint64_t capacity, list converters)
    cdef list read_leaves(self, Cursor* cursor, Memory memory, Memory home)
    cdef Py_ssize_t look(self, int k, const char* word, Py_ssize_t end, Py_ssize_t* offset) except -1
    cdef object read_leaf(self, int k, const char* word, Memory memory, Py_ssize_t offset,
                          Py_ssize_t nbytes)
    cdef Block spare(self, Py_ssize_t nbytes)
    cdef object build(self, Cursor* cursor, Memory memory, list arrays, list objects, list converters)
    cdef object build_leaf(self, Cursor* cursor, Memory memory, list arrays, list converters)


cdef Plan plan_of(Memory memory, const uint64_t* record)
