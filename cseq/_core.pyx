# cython: language_level=3, freethreading_compatible=True
"""The core that runs without the GIL: ring, shuffle, slices, slots.

The algorithms are in ``include/cseq_*.h``, as C that knows no Python; the classes here are the
door: they check arguments, let the GIL go where something can take long, and turn status codes
into exceptions.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.dict cimport PyDict_Next, PyDict_SetItem
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_AsTuple, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.errno cimport errno
from libc.string cimport memcmp, memcpy, memmove, memset
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t, uint64_t, uintptr_t

cimport cython
cimport numpy as cnp

import os
import sys

import numpy

cnp.import_array()

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        pass

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(
        PyTypeObject* subtype, cnp.dtype descr, int nd, cnp.npy_intp* dims,
        cnp.npy_intp* strides, void* data, int flags, void* obj)
    object PyArray_Empty(int nd, cnp.npy_intp* dims, cnp.dtype descr, int fortran)
    int PyArray_CopyInto(cnp.ndarray target, cnp.ndarray source) except -1
    int PyArray_SetBaseObject(cnp.ndarray array, object base) except -1
    bint PyArray_EquivTypes(cnp.dtype one, cnp.dtype other) noexcept

    ctypedef struct PyDataMemAllocator:
        void* ctx
        void* (*malloc)(void* ctx, size_t size) noexcept
        void* (*calloc)(void* ctx, size_t count, size_t size) noexcept
        void* (*realloc)(void* ctx, void* p, size_t size) noexcept
        void (*free)(void* ctx, void* p, size_t size) noexcept

    ctypedef struct PyDataMem_Handler:
        char name[127]
        uint8_t version
        PyDataMemAllocator allocator

    object PyDataMem_SetHandler(object handler)
    object PyDataMem_GetHandler()

cdef extern from *:
    """
    #ifndef _WIN32
    #include <unistd.h>
    #define cseq_exit _exit
    #else
    #include <stdlib.h>
    #define cseq_exit _Exit
    #endif
    #ifdef CSEQ_DEBUG
    #define CSEQ_POISON 1
    #else
    #define CSEQ_POISON 0
    #endif
    #include <stdlib.h> /* defines __GLIBC__ */
    #ifdef __GLIBC__
    #include <malloc.h>
    static int cseq_keep_freed(void) {
        return mallopt(M_MMAP_MAX, 0) && mallopt(M_TRIM_THRESHOLD, -1);
    }
    #else
    static int cseq_keep_freed(void) { return 0; }
    #endif
    """
    int cseq_keep_freed() noexcept nogil
    void cseq_exit(int code) noexcept nogil
    int CSEQ_POISON

cdef extern from *:
    """
    static cseq_spans cseq_in_use; /* leases and windows */
    static cseq_place cseq_placed; /* one for the process: arrays that outlive everything point to it */

    #ifdef _WIN32
    static int cseq_fork_install(void) { return 0; }
    #else
    #include <pthread.h>
    static void cseq_at_prepare(void) {
        cseq_spans_prepare(&cseq_in_use);
        cseq_place_prepare(&cseq_placed);
    }
    static void cseq_at_parent(void) {
        cseq_place_parent(&cseq_placed);
        cseq_spans_parent(&cseq_in_use);
    }
    static void cseq_at_child(void) {
        cseq_place_child(&cseq_placed);
        cseq_spans_child(&cseq_in_use);
    }
    static int cseq_fork_install(void) {
        return pthread_atfork(cseq_at_prepare, cseq_at_parent, cseq_at_child);
    }
    #endif
    """
    cseq_spans cseq_in_use
    cseq_place place_here "cseq_placed"
    int cseq_fork_install() noexcept

if cseq_fork_install():
    raise MemoryError("no memory for a handler of forks")

cdef Py_ssize_t PY_SSIZE_T_MAX = <Py_ssize_t>(<size_t>-1 >> 1)
cdef uint32_t NO_SLOT = 0xFFFFFFFF  # of a ticket whose batch lies in no slot

cdef enum:
    MAX_DIMS = 64
    LARGE = 65536  # bytes; copies from here on let the GIL go
    MOST_KEPT = 4194304  # bytes; slots above this may have to shrink (arena.SLACK), which C leaves to the arena
    MOST_COPIED = 16384  # bytes; batches up to this are copied out of their slots: cheaper than a lease
    LINE = 64            # bytes; a cache line, and the widest vector register
    MOST_PICKLED = 4096  # bytes; longer `bytes` are not pickled

FIELDS = CSEQ_FIELDS
SMALL = MOST_COPIED
BULKY = MOST_KEPT
ALIGNMENT = LINE
LONG = MOST_PICKLED
REMEMBERED = MOST_KNOWN
DEBUG = bool(CSEQ_POISON)

# Whether one thread at a time runs Python.
cdef bint GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
HAS_GIL = bool(GIL)

if os.environ.get("CSEQ_WAIT", "") == "nap":
    cseq_wait_nap = 1


# ── memory ─────────────────────────────────────────────────────────────────────────────────


cdef class Memory:
    """Bytes that arrays are made on. They live until the last of those arrays is gone.

    Exports the buffer protocol (writable, format 'B').
    """

    def __cinit__(self, *args, **kwargs):
        self.data = NULL
        self.size = 0

    @property
    def address(self):
        return <uintptr_t>self.data

    @property
    def nbytes(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 0, flags)

    cdef int inside(self, Py_ssize_t offset, Py_ssize_t nbytes) except -1:
        if offset < 0 or nbytes < 0 or offset > self.size or nbytes > self.size - offset:
            raise IndexError(
                f"bytes [{offset}, {offset + nbytes}) are outside a memory of {self.size} bytes")
        return 0

    def view(self, Py_ssize_t offset, cnp.dtype dtype, tuple shape, bint fortran=False):
        """An array on these bytes, not a copy; it keeps them alive.

        Parameters
        ----------
        offset : int
            Where the array begins, in bytes.
        dtype : numpy.dtype
            Type of the elements, without Python objects in it.
        shape : tuple of int
        fortran : bool
            Column-major order.
        """
        cdef cnp.npy_intp dims[MAX_DIMS]
        cdef int nd = <int>len(shape)
        cdef int i
        cdef Py_ssize_t nbytes = dtype.itemsize
        if nd > MAX_DIMS:
            raise ValueError(f"shape has {nd} dimensions, at most {MAX_DIMS} are possible")
        if dtype.hasobject:
            raise ValueError(f"dtype {dtype} holds Python objects; these cannot lie in raw memory")
        for i in range(nd):
            dims[i] = shape[i]
            if dims[i] < 0:
                raise ValueError(f"shape {shape} is negative")
            if dims[i] and nbytes > PY_SSIZE_T_MAX // dims[i]:
                raise ValueError(f"shape {shape} of {dtype} is too large")
            nbytes *= dims[i]
        self.inside(offset, nbytes)
        Py_INCREF(dtype)  # PyArray_NewFromDescr takes it over
        array = PyArray_NewFromDescr(
            <PyTypeObject*>cnp.ndarray, dtype, nd, dims, NULL, self.data + offset,
            cnp.NPY_ARRAY_FARRAY if fortran else cnp.NPY_ARRAY_CARRAY, NULL)
        Py_INCREF(self)  # PyArray_SetBaseObject takes it over
        PyArray_SetBaseObject(array, self)
        return array

    cdef int put(self, Py_ssize_t offset, const char* source, Py_ssize_t nbytes) except -1:
        """Copy to `offset`; without the GIL if it is much."""
        self.inside(offset, nbytes)
        CSEQ_POINT("encode")
        if nbytes < LARGE:
            memcpy(self.data + offset, source, nbytes)
        else:
            with nogil:
                memcpy(self.data + offset, source, nbytes)
        return 0

    def store(self, Py_ssize_t offset, cnp.ndarray array not None):
        """Copy the bytes of a C- or Fortran-contiguous array, in their order in memory, to `offset`."""
        if not (cnp.PyArray_IS_C_CONTIGUOUS(array) or cnp.PyArray_IS_F_CONTIGUOUS(array)):
            raise ValueError("array is not contiguous; copy it with numpy.copyto on a view instead")
        self.put(offset, <const char*>cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))

    def store_bytes(self, Py_ssize_t offset, source not None):
        """Copy bytes to `offset`."""
        cdef const unsigned char[::1] view
        if type(source) is bytes:  # no memoryview: one of these goes with every batch
            self.put(offset, <const char*><bytes>source, len(<bytes>source))
            return
        view = source
        if view.shape[0]:
            self.put(offset, <const char*>&view[0], view.shape[0])
        else:
            self.inside(offset, 0)

    def store_from(self, Py_ssize_t offset, Memory source not None, Py_ssize_t nbytes):
        """Copy the first `nbytes` of another memory to `offset`."""
        source.inside(0, nbytes)
        self.put(offset, source.data, nbytes)

    def load_bytes(self, Py_ssize_t offset, Py_ssize_t nbytes):
        """A copy of the bytes [offset, offset + nbytes)."""
        self.inside(offset, nbytes)
        return self.data[offset:offset + nbytes]

    def equals(self, Py_ssize_t offset, bytes expected not None):
        """Whether `expected` stands at `offset`."""
        cdef Py_ssize_t nbytes = len(expected)
        self.inside(offset, nbytes)
        return memcmp(self.data + offset, <const char*>expected, nbytes) == 0


@cython.final
@cython.no_gc
cdef class Block(Memory):
    """Private memory, 128-byte aligned; zeroed if asked for."""

    cdef void* raw

    def __cinit__(self, Py_ssize_t nbytes, *, bint zero=False):
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} is negative")
        self.raw = PyMem_RawCalloc(nbytes + 128, 1) if zero else PyMem_RawMalloc(nbytes + 128)
        if self.raw == NULL:
            raise MemoryError(f"no memory for {nbytes} bytes")
        self.data = <char*>((<uintptr_t>self.raw + 127) & ~<uintptr_t>127)
        self.size = nbytes

    def __dealloc__(self):
        PyMem_RawFree(self.raw)

    cpdef copy_from(self, Memory source, Py_ssize_t offset=0):
        """Copy as many bytes as this block holds from `source`, beginning at `offset`."""
        cdef char* bytes_from = source.data + offset
        source.inside(offset, self.size)
        if self.size < LARGE:
            memcpy(self.data, bytes_from, self.size)
        else:
            with nogil:
                memcpy(self.data, bytes_from, self.size)


def copy_of(Memory source not None, Py_ssize_t nbytes, Py_ssize_t offset=0):
    """The bytes [offset, offset + nbytes) of a memory as a `Block` of their own."""
    cdef Block block = Block(nbytes)
    block.copy_from(source, offset)
    return block


@cython.final
@cython.no_gc
cdef class Window(Memory):
    """Another memory's first bytes under a name of its own, known to weak references and to forks.

    Parameters
    ----------
    whole : Memory
    nbytes : int
        -1: all of it.
    """

    cdef Memory whole
    cdef cseq_span span
    cdef object __weakref__

    def __cinit__(self, Memory whole not None, Py_ssize_t nbytes=-1):
        whole.inside(0, max(nbytes, 0))
        self.whole = whole
        self.data = whole.data
        self.size = whole.size if nbytes < 0 else nbytes
        if isinstance(whole, Mapping) and self.size:
            cseq_span_add(&cseq_in_use, &self.span, self.data, self.size)

    def __dealloc__(self):
        cseq_span_remove(&cseq_in_use, &self.span)


@cython.final
@cython.no_gc
cdef class Mapping(Memory):
    """A shared mapping of a part of a file; unmapped when the last array on it is gone.

    Parameters
    ----------
    fd : int
        The file. May be closed afterwards.
    offset, nbytes : int
        The part, in bytes; `offset` a multiple of the page size.
    populate : bool
        Make the page tables now. The pages should be committed (`commit`).
    """

    def __cinit__(self, int fd, uint64_t offset, uint64_t nbytes, *, bint populate=False):
        cdef void* p
        if nbytes == 0 or nbytes > <uint64_t>PY_SSIZE_T_MAX:
            raise ValueError(f"nbytes={nbytes} cannot be mapped")
        with nogil:
            p = cseq_map(fd, offset, nbytes, populate)
        if p == NULL:
            raise MemoryError(f"cannot map {nbytes} bytes: {os.strerror(errno)}")
        self.data = <char*>p
        self.size = <Py_ssize_t>nbytes

    def __dealloc__(self):
        if self.data != NULL:
            cseq_unmap(self.data, self.size)


@cython.final
@cython.no_gc
cdef class Descriptor:
    """A file descriptor that is closed with the last reference to this.

    Parameters
    ----------
    opener : callable
        A function of `os` that returns one: no signal handler runs between that and this.
    *args
        Its arguments.
    """

    cdef readonly int fd

    def __cinit__(self, opener, *args):
        self.fd = -1
        self.fd = opener(*args)

    def close(self):
        """Close it. Twice is fine."""
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0:
            cseq_close(fd)

    def __dealloc__(self):
        if self.fd >= 0:
            cseq_close(self.fd)


def commit(int fd, uint64_t offset, uint64_t nbytes):
    """Allocate the pages of a part of a file, so that writing to them cannot fail.

    Raises
    ------
    MemoryError
        There is no room for them.
    """
    cdef int error
    with nogil:
        error = cseq_commit(fd, offset, nbytes)
    if error:
        raise MemoryError(f"no room for {nbytes} bytes of shared memory: {os.strerror(error)}")


def punch(int fd, uint64_t offset, uint64_t nbytes):
    """Give the pages of a part of a file back; False: this system cannot do that.

    They read as zeros, and must be committed before they are written again.
    """
    cdef int error
    with nogil:
        error = cseq_punch(fd, offset, nbytes)
    return error == 0


def address_of(cnp.ndarray array not None):
    """Where an array's data begins."""
    return <uintptr_t>cnp.PyArray_DATA(array)


# ── plans ──────────────────────────────────────────────────────────────────────────────────

cdef enum:
    MOST_KNOWN = 64  # structures that a reader remembers
    RECENT = 4       # of them, and of a writer's: those that are compared one by one
    MOST_SEARCHED = 4  # containers inside one another, in the search for leaves that are not pickled

    # Kinds of nodes.
    ARRAY = 0
    RAW = 1
    OBJECT = 2
    TUPLE = 3
    LIST = 4
    DICT = 5
    OTHER = 6

cdef struct Leaf:
    int nd
    bint fortran
    bint casts            # its type differs from its source's
    Py_ssize_t itemsize
    PyObject* dtype       # in the slot
    PyObject* source      # of what is written; NULL in a reader

cdef struct Node:
    int kind
    int count             # children
    int leaf              # of ARRAY and RAW; of a container that has arrays only: the first; else -1
    bint loose            # the first of its objects is no child
    bint tensor
    PyObject* cls
    PyObject* fixed
    PyObject* open
    PyObject* close

cdef struct Cursor:
    int node
    Py_ssize_t object

cdef object MEMMAP = numpy.memmap
cdef object UNREAD = object()
cdef dict CONTAINERS = {"tuple": TUPLE, "list": LIST, "dict": DICT}


cdef inline Py_ssize_t aligned(Py_ssize_t nbytes) noexcept:
    """Round up to whole cache lines."""
    return (nbytes + (LINE - 1)) & ~<Py_ssize_t>(LINE - 1)


cdef inline bint is_fortran(cnp.ndarray array) noexcept:
    """Whether an array is column-major and not row-major as well."""
    return not cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_IS_F_CONTIGUOUS(array)


cdef object array_at(Memory memory, Py_ssize_t offset, cnp.dtype dtype, int nd, cnp.npy_intp* dims,
                     bint fortran):
    """An array on a memory, which it keeps alive."""
    Py_INCREF(dtype)  # PyArray_NewFromDescr takes it over
    array = PyArray_NewFromDescr(
        <PyTypeObject*>cnp.ndarray, dtype, nd, dims, NULL, memory.data + offset,
        cnp.NPY_ARRAY_FARRAY if fortran else cnp.NPY_ARRAY_CARRAY, NULL)
    Py_INCREF(memory)  # PyArray_SetBaseObject takes it over
    PyArray_SetBaseObject(array, memory)
    return array


@cython.final
cdef class Plan:
    """The structure that batches have in common: k arrays in containers. Surveyed once for all of them.

    Parameters
    ----------
    structure : bytes
        The tree, `split` and `leaves`, pickled: what stands for this plan in a slot.
    token : str or tuple
        The tree of containers and leaves: see `codec`.
    split : int
        How many leaves are arrays of the batch. Those that other leaves consist of (raws) follow.
    leaves : list of tuple
        (dtype, dimensions, Fortran order) of each.
    containers : dict
        By tag: how a container is opened and closed.
    tag : callable
        ``tag(type)`` is ``"object"`` for types that always go by pickle.
    raw : callable
        ``raw(token, dtype)`` → (type, function from it to an array or None, function from an array
        to it, whether it is a tensor).
    cast : numpy.dtype, optional
        What numbers are cast to.
    sources : list of numpy.dtype, optional
        The arrays' types before the cast. Without them, the plan is a reader's.

    Attributes
    ----------
    structure, token, leaves, cast, sources
        As given.
    casts : list of bool
        Which leaves are cast.
    fits : bool
        Whether `match` can tell that a batch is like this.
    """

    cdef readonly bytes structure
    cdef readonly object token
    cdef readonly object cast
    cdef readonly list leaves
    cdef readonly list sources
    cdef readonly list casts
    cdef readonly bint fits
    cdef bint is_array  # the batch is one array
    cdef object tag
    cdef Leaf* leaf
    cdef Node* nodes
    cdef int leaf_count, node_count, room, split, objects
    cdef int made_arrays, made_raws
    cdef Py_ssize_t words  # of a layout
    cdef list kept         # what nodes and leaves point to

    def __cinit__(self, bytes structure not None, token, int split, list leaves not None,
                  dict containers not None, tag, raw, cast=None, list sources=None):
        cdef int k
        cdef Leaf* leaf
        self.structure, self.token, self.split, self.cast = structure, token, split, cast
        self.leaves, self.tag = list(leaves), tag
        self.sources = None if sources is None else list(sources)
        self.kept = []
        self.leaf_count = <int>len(leaves)
        self.leaf = <Leaf*>PyMem_RawCalloc(self.leaf_count + 1, sizeof(Leaf))
        if self.leaf == NULL:
            raise MemoryError(f"no memory for {len(leaves)} leaves")
        for k in range(self.leaf_count):
            leaf = &self.leaf[k]
            dtype, leaf.nd, leaf.fortran = leaves[k]
            if not isinstance(dtype, cnp.dtype) or dtype.hasobject or not 0 <= leaf.nd <= MAX_DIMS:
                raise ValueError(f"leaf {leaves[k]!r} cannot lie in raw memory")
            leaf.dtype = <PyObject*>dtype
            leaf.itemsize = dtype.itemsize
            self.words += 1 + leaf.nd
            if sources is not None:
                leaf.source = <PyObject*>sources[k]
                leaf.casts = sources[k] is not dtype
        self.casts = [self.leaf[k].casts for k in range(self.leaf_count)]
        self.fits = sources is not None
        self.add(token, containers, raw)
        self.is_array = self.node_count == 1 and self.nodes[0].kind == ARRAY
        if self.made_arrays != split or self.made_arrays + self.made_raws != self.leaf_count:
            raise ValueError(f"a tree of {self.made_arrays} arrays and {self.made_raws} raws "
                             f"does not fit {split} of {self.leaf_count} leaves")

    def __dealloc__(self):
        PyMem_RawFree(self.leaf)
        PyMem_RawFree(self.nodes)

    cdef PyObject* keep(self, object value):
        self.kept.append(value)
        return <PyObject*>value

    cdef int add(self, token, dict containers, raw) except -1:
        """Append the nodes of a tree."""
        cdef Node* n
        cdef Node node
        cdef int first
        memset(&node, 0, sizeof(node))
        node.leaf = -1
        tag = token if isinstance(token, str) else token[0]
        children = ()
        if tag == "array":
            node.kind = ARRAY
            node.leaf = self.made_arrays
            self.made_arrays += 1
        elif tag == "object":
            node.kind = OBJECT
            self.objects += 1
        elif tag in containers:
            _, cls, fixed, node.loose, children = token
            opener, closer = containers[tag]
            node.kind = CONTAINERS.get(tag, OTHER)
            if node.kind == DICT and fixed is None:
                node.kind = OTHER  # keys that are not texts
            node.cls, node.fixed = self.keep(cls), self.keep(fixed)
            node.open, node.close = self.keep(opener), self.keep(closer)
            if node.loose:
                self.objects += 1
                self.fits = False
            if isinstance(children, int):
                node.count, node.leaf = children, self.made_arrays
                self.made_arrays += node.count
                children = ()
            else:
                node.count = <int>len(children)
        else:
            node.kind = RAW
            node.leaf = self.split + self.made_raws
            if node.leaf >= self.leaf_count:
                raise ValueError("a tree has more arrays than its layout")
            cls, opener, closer, node.tensor = raw(token, <object>self.leaf[node.leaf].dtype)
            self.made_raws += 1
            node.cls, node.open, node.close = self.keep(cls), self.keep(opener), self.keep(closer)
            if opener is None:
                self.fits = False
        if node.leaf >= 0 and node.leaf + max(node.count, <int>(node.kind == ARRAY)) > self.leaf_count:
            raise ValueError("a tree has more arrays than its layout")
        if self.node_count == self.room:
            self.room = 2 * self.room + 4
            n = <Node*>PyMem_RawRealloc(self.nodes, self.room * sizeof(Node))
            if n == NULL:
                raise MemoryError(f"no memory for {self.room} nodes")
            self.nodes = n
        self.nodes[self.node_count] = node
        self.node_count += 1
        for child in children:
            self.add(child, containers, raw)
        return 0

    # -- writing

    cdef bint match(self, object batch, list arrays, list objects) except -1:
        """Whether a batch is like this; then its leaves are in `arrays` and `objects`."""
        cdef int node = 0
        return self.match_node(&node, batch, arrays, objects)

    cdef bint is_object(self, object value, int depth, bint plain) except -1:
        """Whether a value is always pickled, for any contents.

        At most `depth` containers inside one another are searched. If `plain`, only numbers and
        texts are told for sure.
        """
        cdef Py_ssize_t k = 0
        cdef PyObject* key
        cdef PyObject* child
        cls = type(value)
        if cls is str or cls is int or cls is float or value is None or cls is bool:
            return True
        if cls is bytes:
            return len(<bytes>value) < MOST_PICKLED
        if cls is not list and cls is not tuple and cls is not dict:
            return not plain and self.tag(cls) == "object"
        if not depth:
            return False
        if cls is tuple:
            for k in range(PyTuple_GET_SIZE(value)):
                if not self.is_object(<object>PyTuple_GET_ITEM(value, k), depth - 1, plain):
                    return False
            return True
        with cython.critical_section(value):
            if cls is list:
                while k < PyList_GET_SIZE(value):
                    if not self.is_object(<object>PyList_GET_ITEM(value, k), depth - 1, plain):
                        return False
                    k += 1
            else:
                while PyDict_Next(value, &k, &key, &child):
                    if not self.is_object(<object>child, depth - 1, plain):
                        return False
        return True

    cdef bint match_array(self, int k, object value, list arrays):
        cdef Leaf* leaf = &self.leaf[k]
        cdef cnp.ndarray array
        if type(value) is not cnp.ndarray and type(value) is not MEMMAP:
            return False
        array = <cnp.ndarray>value
        if cnp.PyArray_NDIM(array) != leaf.nd or is_fortran(array) != leaf.fortran:
            return False
        if array.descr is not <object>leaf.source and (
                cnp.PyArray_TYPE(array) == cnp.NPY_VOID  # np.record, which is equal to np.void
                or not PyArray_EquivTypes(array.descr, <cnp.dtype>leaf.source)):
            return False
        arrays[k] = value
        return True

    cdef bint match_node(self, int* at, object value, list arrays, list objects) except -1:
        cdef Node* n = &self.nodes[at[0]]
        cdef Py_ssize_t k = 0, place = 0
        cdef PyObject* key
        cdef PyObject* child
        at[0] += 1
        if n.kind == ARRAY:
            return self.match_array(n.leaf, value, arrays)
        if n.kind == OBJECT:
            if not self.is_object(value, MOST_SEARCHED, False):
                return False
            objects.append(value)
            return True
        if type(value) is not <object>n.cls:
            return False
        if n.kind == RAW:
            try:
                array = (<object>n.open)(value)
            except (RuntimeError, TypeError):
                return False  # `codec.encode` surveys it
            return self.match_array(n.leaf, array, arrays)
        if n.kind == TUPLE:
            if PyTuple_GET_SIZE(value) != n.count:
                return False
            for k in range(n.count):
                if not self.match_child(n, at, k, <object>PyTuple_GET_ITEM(value, k), arrays, objects):
                    return False
            return True
        if n.kind == LIST:
            with cython.critical_section(value):
                if PyList_GET_SIZE(value) != n.count:
                    return False
                for k in range(n.count):
                    if k >= PyList_GET_SIZE(value) or not self.match_child(
                            n, at, k, <object>PyList_GET_ITEM(value, k), arrays, objects):
                        return False
            return True
        if n.kind == DICT:
            with cython.critical_section(value):
                if len(<dict>value) != n.count:
                    return False
                while PyDict_Next(value, &place, &key, &child):
                    if k >= n.count or not is_text(<object>key, (<tuple>n.fixed)[k]):
                        return False
                    if not self.match_child(n, at, k, <object>child, arrays, objects):
                        return False
                    k += 1
            return k == n.count
        opened = (<object>n.open)(value)
        if opened is None:
            return False
        fixed, loose, children = opened
        children = tuple(children)
        if loose is not None or fixed != <object>n.fixed or len(<tuple>children) != n.count:
            return False
        for k in range(n.count):
            if not self.match_child(n, at, k, (<tuple>children)[k], arrays, objects):
                return False
        return True

    cdef bint match_child(self, Node* n, int* at, Py_ssize_t k, object value, list arrays,
                          list objects) except -1:
        if n.leaf >= 0:
            return self.match_array(n.leaf + <int>k, value, arrays)
        return self.match_node(at, value, arrays, objects)

    # -- reading

    cdef object read(self, Memory memory, uint64_t* record, bint copied, list objects,
                     list converters):
        """Make a batch: its arrays are copies, or views that keep the memory alive.

        Parameters
        ----------
        record : uint64_t[4]
        objects : list or None
            What was pickled.
        converters : list or None
            What `converters` has returned.
        """
        cdef Cursor at
        cdef list arrays
        cdef int k
        cdef char* word
        if record[0] > <uint64_t>memory.size or record[1] > <uint64_t>memory.size:
            memory.inside(record[0], record[1])
        memory.inside(<Py_ssize_t>(record[0] + record[1]), <Py_ssize_t>record[2])
        if record[2] != <uint64_t>(8 * self.words):
            raise IndexError(f"a layout of {record[2]} bytes does not fit a structure that needs "
                             f"{8 * self.words}")
        word = memory.data + record[0] + record[1]
        if self.is_array:
            array = self.read_array(0, memory, &word, record[0], copied)
            return array if converters is None or converters[0] is None else converters[0](array)
        # All of them first: no Python code runs while the memory is read.
        arrays = [None] * self.leaf_count
        for k in range(self.leaf_count):
            arrays[k] = self.read_array(k, memory, &word, record[0], copied)
        at.node = 0
        at.object = 0
        return self.build_node(&at, arrays, objects, converters)

    cdef object read_array(self, int k, Memory memory, char** word, uint64_t end, bint copied):
        """Make the array that the layout describes from `word` on; `word` is then behind that."""
        cdef Leaf* leaf = &self.leaf[k]
        cdef int i
        cdef int64_t offset, size
        cdef uint64_t nbytes = <uint64_t>leaf.itemsize
        cdef cnp.npy_intp dims[MAX_DIMS]
        memcpy(&offset, word[0], 8)
        word[0] += 8
        for i in range(leaf.nd):
            memcpy(&size, word[0], 8)
            word[0] += 8
            if size < 0 or (size and nbytes > <uint64_t>PY_SSIZE_T_MAX // <uint64_t>size):
                raise IndexError(f"array {k} of a batch is larger than its {end} bytes")
            nbytes *= <uint64_t>size
            dims[i] = <cnp.npy_intp>size
        if offset < 0 or <uint64_t>offset > end or nbytes > end - <uint64_t>offset:
            raise IndexError(f"array {k} of a batch is outside its {end} bytes")
        if not copied:
            return array_at(memory, offset, <cnp.dtype>leaf.dtype, leaf.nd, dims, leaf.fortran)
        Py_INCREF(<object>leaf.dtype)  # PyArray_Empty takes it over
        array = PyArray_Empty(leaf.nd, dims, <cnp.dtype>leaf.dtype, leaf.fortran)
        memcpy(cnp.PyArray_DATA(<cnp.ndarray>array), memory.data + offset, nbytes)
        return array

    cdef object build_leaf(self, Node* n, int k, list arrays, list converters):
        cdef object value = <object>PyList_GET_ITEM(arrays, k)
        if n.kind == RAW:
            value = (<object>n.close)(value)
        if converters is None:
            return value
        convert = <object>PyList_GET_ITEM(converters, k)
        return value if convert is None else convert(value)

    cdef object build_child(self, Node* n, Cursor* at, int k, list arrays, list objects,
                            list converters):
        if n.leaf >= 0:
            return self.build_leaf(n, n.leaf + k, arrays, converters)
        return self.build_node(at, arrays, objects, converters)

    cdef object build_node(self, Cursor* at, list arrays, list objects, list converters):
        cdef Node* n = &self.nodes[at.node]
        cdef int k
        cdef list children
        cdef dict mapping
        at.node += 1
        if n.kind <= RAW:
            return self.build_leaf(n, n.leaf, arrays, converters)
        if n.kind == OBJECT:
            at.object += 1
            loose = objects[at.object - 1]
            if converters is None or self.is_object(loose, MOST_SEARCHED, True):
                return loose
            return (<object>PyList_GET_ITEM(converters, self.leaf_count))(loose)
        loose = None
        if n.loose:
            at.object += 1
            loose = objects[at.object - 1]
        if n.kind == DICT:
            mapping = {}
            for k in range(n.count):
                child = self.build_child(n, at, k, arrays, objects, converters)
                PyDict_SetItem(mapping, <object>PyTuple_GET_ITEM(<tuple>n.fixed, k), child)
            return mapping
        children = [None] * n.count
        for k in range(n.count):
            children[k] = self.build_child(n, at, k, arrays, objects, converters)
        if n.kind == LIST:
            return children
        if n.kind == TUPLE:
            return PyList_AsTuple(children)
        return (<object>n.close)(<object>n.cls, <object>n.fixed, loose, children)

    def converters(self, leaf_for, convert):
        """List the functions to be applied to each leaf, and after these to the pickled leaves.

        Parameters
        ----------
        leaf_for : callable
            ``leaf_for(dtype)`` is a function of a fresh array of that type, ``leaf_for(None)`` one
            of a tensor; or None, where they stay as they are.
        convert : callable
            Converts any batch.
        """
        cdef Node* n
        cdef int k, i
        cdef list result = [None] * self.leaf_count
        for k in range(self.node_count):
            n = &self.nodes[k]
            if n.kind == RAW:
                if n.tensor:
                    result[n.leaf] = leaf_for(None)
            elif n.leaf >= 0:
                for i in range(n.leaf, n.leaf + max(n.count, <int>(n.kind == ARRAY))):
                    result[i] = leaf_for(<object>self.leaf[i].dtype)
        result.append(convert)
        return result


cdef bint is_text(object key, object expected):
    """Whether a key is a text that is known."""
    return key is expected or (type(key) is str and key == expected)


@cython.final
cdef class Reader:
    """Reads batches of any structure, and remembers the structures.

    Parameters
    ----------
    parse : callable
        ``parse(structure)`` → Plan.
    load : callable
        ``load(memory, offset, nbytes)`` → list: the objects that went by pickle.
    """

    cdef object parse, load
    cdef readonly dict plans  # by structure
    cdef list recent

    def __cinit__(self, parse, load):
        self.parse, self.load = parse, load
        self.plans = {}
        self.recent = []

    cdef Plan find(self, Memory memory, uint64_t* record):
        """The plan of the batch in a memory, if its structure is known."""
        cdef Py_ssize_t k
        cdef Plan plan
        cdef bytes structure
        cdef char* at = memory.data + record[0]
        if record[0] > <uint64_t>memory.size or record[1] > <uint64_t>memory.size - record[0]:
            memory.inside(<Py_ssize_t>min(record[0], <uint64_t>PY_SSIZE_T_MAX),
                          <Py_ssize_t>min(record[1], <uint64_t>PY_SSIZE_T_MAX))
        if GIL:
            for k in range(PyList_GET_SIZE(self.recent)):
                plan = <Plan>PyList_GET_ITEM(self.recent, k)
                if (<uint64_t>len(plan.structure) == record[1]
                        and memcmp(<const char*>plan.structure, at, record[1]) == 0):
                    if k:
                        self.recent.insert(0, self.recent.pop(k))
                    return plan
        structure = at[:record[1]]
        plan = self.plans.get(structure)
        if GIL and plan is not None:
            self.recent = [plan, *self.recent[:RECENT - 1]]
        return plan

    cdef bint is_in_band(self, Memory memory, uint64_t* record) except -1:
        """Whether the objects of a batch are a pickle and nothing else."""
        cdef uint64_t count
        cdef uint64_t end = record[0] + record[1] + record[2] + record[3]
        memory.inside(<Py_ssize_t>end - 8, 8)
        memcpy(&count, memory.data + end - 8, 8)
        return count == 0

    cdef Plan learn(self, bytes structure):
        """Make the plan of a structure, and remember it."""
        cdef Plan plan = self.parse(structure)
        if len(self.plans) >= MOST_KNOWN:
            self.plans.clear()
        self.plans[structure] = plan
        return plan

    def decode(self, Memory memory not None, record, bint copied=False):
        """Read a batch.

        Parameters
        ----------
        memory : Memory
        record : sequence of int
            See `codec.Record`.
        copied : bool
            Arrays are copies, not views of `memory`.

        Raises
        ------
        IndexError
            If the record does not fit the memory.
        """
        cdef uint64_t f[4]
        cdef int k
        cdef Plan plan
        for k in range(4):
            word = record[k]
            if word < 0 or word > memory.size:
                raise IndexError(f"record {record!r} is outside a memory of {memory.size} bytes")
            f[k] = word
        memory.inside(0, f[0] + f[1] + f[2] + f[3])
        if not f[1]:
            return bytearray(memory.data[f[0]:f[0] + f[3]])
        if copied and f[3]:
            return self.decode(copy_of(memory, f[0] + f[1] + f[2] + f[3]), record)
        plan = self.find(memory, f)
        if plan is None:
            plan = self.learn(memory.data[f[0]:f[0] + f[1]])
        objects = self.load(memory, f[0] + f[1] + f[2], f[3]) if f[3] else None
        return plan.read(memory, f, copied, objects, None)


# ── slots ──────────────────────────────────────────────────────────────────────────────────

cdef enum:
    FREE = 0
    TAKEN = 1
    LEASED = 2
    CHUNK = 1024    # slots
    CHUNKS = 4096


cdef struct slot_entry:
    uint64_t nbytes   # committed, as far as the trainer knows
    int64_t owned     # the number of the worker that owns it, as far as is entered; 0: the trainer's
    uint8_t state


@cython.no_gc
cdef class Slots:
    """Which slots are free, taken or leased, which a worker owns, and how large they are.

    In private memory of the trainer. FREE → TAKEN and TAKEN → LEASED or FREE are the trainer's;
    LEASED → FREE is the lease's, which may be dropped by any thread, also inside garbage
    collection: a store, no lock. The entries lie in chunks that never move.

    A slot that a worker owns is TAKEN. If a worker has published a ticket in a slot that it owned,
    `settle` changes the owners: it adds the worker's number to `owned` of the ticket's slot at the post,
    and subtracts it from that of the other slot. So tickets may be settled in any order; until all are,
    `owned` is a partial sum, which names no worker and can be negative. `owned`, and the `home` of a
    published ticket, are written under `lock`: a spin lock, under which nothing is allocated and no
    Python code runs.
    """

    cdef slot_entry* chunk[CHUNKS]
    cdef Py_ssize_t made
    cdef uint32_t lock
    cdef uint64_t held        # leases alive
    cdef uint64_t held_bytes  # their slots' bytes
    cdef dict lent            # by slot: leases of tickets that are still in the ring
    # What the arena asks of a free slot before it is used again: bytes committed, at least and at most.
    cdef public uint64_t least
    cdef public uint64_t most
    cdef public Py_ssize_t top  # the highest slot taken since the arena has set it

    def __cinit__(self, Py_ssize_t capacity=0):
        memset(self.chunk, 0, sizeof(self.chunk))
        self.made = 0
        self.held = self.held_bytes = 0
        self.lent = {}
        self.least, self.most, self.top = 0, <uint64_t>-1, -1
        self.extend(capacity)

    def __dealloc__(self):
        for i in range(CHUNKS):
            PyMem_RawFree(self.chunk[i])

    cdef inline slot_entry* at(self, Py_ssize_t slot) noexcept nogil:
        return self.chunk[slot // CHUNK] + slot % CHUNK

    cdef int check(self, Py_ssize_t slot) except -1:
        if slot < 0 or slot >= self.made:
            raise IndexError(f"slot {slot} is not one of {self.made}")
        return 0

    @property
    def capacity(self):
        """Slots made so far."""
        return self.made

    @property
    def leased(self):
        """Leases alive."""
        return cseq_load_acq_u64(&self.held)

    @property
    def leased_bytes(self):
        """Bytes of the slots under lease."""
        return cseq_load_acq_u64(&self.held_bytes)

    def nbytes(self, Py_ssize_t slot):
        """Bytes of a slot that are committed."""
        self.check(slot)
        return self.at(slot).nbytes

    def resize(self, Py_ssize_t slot, uint64_t nbytes):
        """Note how many bytes of a slot are committed."""
        self.check(slot)
        self.at(slot).nbytes = nbytes

    def extend(self, Py_ssize_t count):
        """Make `count` more slots, free."""
        cdef Py_ssize_t upto = self.made + count
        cdef Py_ssize_t i
        if count < 0 or upto > CHUNK * CHUNKS:
            raise ValueError(f"cannot make {count} slots more than {self.made}: "
                             f"at most {CHUNK * CHUNKS} are possible")
        for i in range((upto + CHUNK - 1) // CHUNK):
            if self.chunk[i] == NULL:
                self.chunk[i] = <slot_entry*>PyMem_RawCalloc(CHUNK, sizeof(slot_entry))
                if self.chunk[i] == NULL:
                    raise MemoryError("no memory for the table of slots")
        self.made = upto

    # -- free and taken

    cdef Py_ssize_t find_free(self) noexcept:
        """The lowest free slot, or -1 when none is free."""
        cdef Py_ssize_t slot
        for slot in range(self.made):
            if cseq_load_acq_u8(&self.at(slot).state) == FREE:  # SYNC: last view of slot is gone
                return slot
        return -1

    cdef bint is_fit(self, Py_ssize_t slot) noexcept:
        """Whether a slot can be used as it is; else the arena has to make it fit (`acquire`)."""
        return self.least <= self.at(slot).nbytes <= self.most

    cdef Py_ssize_t find_fit(self) noexcept:
        """The lowest free slot, or -1 when none is free or it cannot be used as it is."""
        cdef Py_ssize_t slot = self.find_free()
        return slot if slot >= 0 and self.is_fit(slot) else -1

    cdef bint occupy(self, Py_ssize_t slot) noexcept:
        """Take a slot if it is still free: where there is no GIL, another thread may have taken it."""
        if not cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN):
            return False
        self.top = max(self.top, slot)
        return True

    def acquire(self):
        """Take the lowest free slot: its number, or -1 when none is free."""
        cdef Py_ssize_t slot = self.find_free()
        while slot >= 0 and not self.occupy(slot):
            slot = self.find_free()
        return slot

    def take(self, Py_ssize_t slot):
        """Take a given slot if it is free; return whether it was."""
        self.check(slot)
        return bool(cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN))

    def lowest(self):
        """The lowest free slot, or -1 when none is free; it stays free."""
        return self.find_free()

    def shrink(self, Py_ssize_t slot, uint64_t nbytes, int fd, uint64_t width):
        """Give the pages of a free slot back but for the first `nbytes`.

        They read as zeros, and must be committed before they are written again.

        Parameters
        ----------
        slot : int
        nbytes : int
        fd : int
            The file that the slots lie in.
        width : int
            Bytes from one slot to the next.

        Returns
        -------
        bool
            False: it is not free, or no larger, or the system cannot do that.
        """
        cdef int error
        self.check(slot)
        if self.at(slot).nbytes <= nbytes:
            return False
        if not cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN):
            return False
        with nogil:
            error = cseq_punch(fd, slot * width + nbytes, width - nbytes)
        if not error:
            self.at(slot).nbytes = nbytes
        cseq_store_rel_u8(&self.at(slot).state, FREE)
        return not error

    def free(self):
        """The free slots, in their order."""
        return [slot for slot in range(self.made) if cseq_load_acq_u8(&self.at(slot).state) == FREE]

    def is_taken(self, Py_ssize_t slot):
        """Whether a slot is neither free nor leased nor a worker's."""
        self.check(slot)
        return cseq_load_acq_u8(&self.at(slot).state) == TAKEN and self.at(slot).owned <= 0

    cpdef int release(self, Py_ssize_t slot) except -1:
        """Free a taken slot."""
        self.check(slot)
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        cseq_store_rel_u8(&self.at(slot).state, FREE)
        return 0

    # -- leased

    def lend(self, Py_ssize_t slot, Mapping mapping not None, Py_ssize_t used=-1):
        """The memory of a taken slot, for a batch that is being decoded.

        Always the same `Lease` until `vacate`: views of an interrupted decode and those of the next
        one share it. `used` bytes of it are given to a forked process as
        a copy; -1: all of it.
        """
        cdef uint64_t nbytes
        cdef Lease lease
        self.check(slot)
        lease = self.lent.get(slot)
        if lease is not None:
            return lease
        if used > mapping.size:
            raise ValueError(f"used={used} exceeds a mapping of {mapping.size} bytes")
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        nbytes = min(<uint64_t>mapping.size, self.at(slot).nbytes or <uint64_t>mapping.size)
        lease = Lease.__new__(Lease)
        lease.data = mapping.data
        lease.size = <Py_ssize_t>nbytes
        lease.mapping = mapping
        lease.slot = slot
        if used:
            cseq_span_add(&cseq_in_use, &lease.span, lease.data, used if used > 0 else lease.size)
        self.lent[slot] = lease
        return lease

    cpdef bint vacate(self, Py_ssize_t slot) except -1:
        """Detach a taken slot from its ticket, which leaves the ring. True: the slot is still taken, for
        the next ticket; False: a `Lease` has it, and frees it when its last view is gone."""
        cdef Lease lease
        if not self.lent:
            return True
        lease = self.lent.pop(slot, None)
        if lease is None:
            return True
        self.check(slot)
        if not cseq_cas_sc_u8(&self.at(slot).state, TAKEN, LEASED):
            raise RuntimeError(f"slot {slot} is not taken")
        cseq_add_sc_u64(&self.held, 1)
        cseq_add_sc_u64(&self.held_bytes, <uint64_t>lease.size)
        lease.slots = self
        return False

    def lease(self, Py_ssize_t slot, Mapping mapping not None, Py_ssize_t used=-1):
        """Lease a taken slot: a `Lease` that frees it when the last view is gone."""
        lease = self.lend(slot, mapping, used)
        self.vacate(slot)
        return lease

    # -- what workers own

    def grant(self, Py_ssize_t slot, uint32_t owner):
        """Give a taken slot to a worker."""
        self.check(slot)
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        self.seize()
        self.at(slot).owned += owner  # it may be waiting for a ticket to be settled
        cseq_store_rel_u32(&self.lock, 0)

    cdef void seize(self) noexcept nogil:
        while not cseq_cas_sc_u32(&self.lock, 0, 1):
            pass

    cdef void settle(self, cseq_cell* c) noexcept nogil:
        """Enter in which slot a published ticket lies; before its cell is used again."""
        if c.slot >= self.made:  # in none
            return
        if c.slot != c.home:
            self.seize()
            if c.slot != c.home:  # `bury` has not done it meanwhile
                self.book(c)
            cseq_store_rel_u32(&self.lock, 0)
        self.at(c.slot).nbytes = c.capacity

    cdef void book(self, cseq_cell* c) noexcept nogil:
        """Change the owners of a ticket's two slots, under `lock`."""
        self.at(c.home).owned += c.by
        self.at(c.slot).owned -= c.by
        c.home = c.slot

    cdef Py_ssize_t bury(self, cseq_ring** rings, Py_ssize_t ring_count, uint32_t owner,
                         Py_ssize_t* taken) noexcept nogil:
        """Take what a worker owned: slots into `taken`; how many.

        First the slots of all published tickets are entered, also those of other workers: only then is
        each `owned` the number of a worker. If a ticket's slot is not its home, its cell is not used again
        before `settle` has had `lock`; so if the word is unchanged after slot and home were read, both
        are that ticket's.
        """
        cdef Py_ssize_t slot, at
        cdef Py_ssize_t count = 0
        cdef uint32_t k
        cdef cseq_cell* c
        cdef uint64_t word
        cdef int state
        self.seize()
        for at in range(ring_count):
            for k in range(rings[at].capacity):
                c = cseq_ring_cell(rings[at], k)
                word = cseq_load_acq_u64(&c.word)
                state = CSEQ_STATE(word)
                if state != CSEQ_INDEXED and state != CSEQ_CONVERTING and state != CSEQ_READY:
                    continue
                if c.slot != c.home and c.slot < self.made and cseq_cas_sc_u64(&c.word, word, word):
                    self.book(c)
        for slot in range(self.made):
            if self.at(slot).owned == owner:
                self.at(slot).owned = 0
                taken[count] = slot
                count += 1
        cseq_store_rel_u32(&self.lock, 0)
        return count


@cython.final
@cython.no_gc
cdef class Lease(Memory):
    """A leased slot. Deallocating this object, on any thread, frees the slot."""

    cdef Mapping mapping
    cdef Slots slots  # None: the slot still belongs to its ticket
    cdef Py_ssize_t slot
    cdef cseq_span span

    def __dealloc__(self):
        cseq_span_remove(&cseq_in_use, &self.span)
        if self.slots is None:
            return
        if CSEQ_POISON:
            memset(self.data, 0xDB, self.size)
        cseq_add_sc_u64(&self.slots.held, <uint64_t>-1)
        cseq_add_sc_u64(&self.slots.held_bytes, -<uint64_t>self.size)
        cseq_store_rel_u8(&self.slots.at(self.slot).state, FREE)  # SYNC: last view of slot is gone


# ── arrays made in place ───────────────────────────────────────────────────────────────────


cdef PyDataMem_Handler place_handler
cdef bint place_installed = False


cdef void place_release(void* owner) noexcept:
    """Called when no array is left in the region of this `Mapping`."""
    Py_DECREF(<object>owner)


@cython.final
@cython.no_gc
cdef class Placement:
    """Makes numpy allocate the arrays of a batch in the batch's slot: see cseq_place.h.

    For the thread and context that make it, until the process ends: a worker process has one.
    """

    def __cinit__(self):
        global place_installed
        cdef PyDataMem_Handler* present
        if not place_installed:
            present = <PyDataMem_Handler*>PyCapsule_GetPointer(PyDataMem_GetHandler(), "mem_handler")
            place_here.ctx = present.allocator.ctx
            place_here.malloc = present.allocator.malloc
            place_here.calloc = present.allocator.calloc
            place_here.realloc = present.allocator.realloc
            place_here.free = present.allocator.free
            place_here.release = place_release
            memcpy(place_handler.name, b"cseq", 5)
            place_handler.version = 1
            place_handler.allocator.ctx = &place_here
            place_handler.allocator.malloc = cseq_place_malloc
            place_handler.allocator.calloc = cseq_place_calloc
            place_handler.allocator.realloc = cseq_place_realloc
            place_handler.allocator.free = cseq_place_free
            place_installed = True
        PyDataMem_SetHandler(PyCapsule_New(&place_handler, "mem_handler", NULL))

    @property
    def count(self):
        """Large allocations since `aim`."""
        return place_here.count

    @property
    def used(self):
        """Bytes of the slot that are given out."""
        return place_here.used

    @used.setter
    def used(self, uint64_t nbytes):
        place_here.used = nbytes

    @property
    def live(self):
        """Arrays that lie in the slot."""
        return place_here.at.live

    @property
    def retired(self):
        """Earlier slots in which arrays are alive."""
        return place_here.retired_count

    def aim(self, Mapping slot not None, uint64_t nbytes):
        """Look at allocations from now on, and serve the wanted ones from this slot, of `nbytes`."""
        if place_here.at.live:
            raise RuntimeError(f"{place_here.at.live} arrays lie in the slot before")
        if nbytes > <uint64_t>slot.size:
            raise ValueError(f"nbytes={nbytes} exceeds a mapping of {slot.size} bytes")
        if cseq_place_aim(&place_here, slot.data, nbytes, <void*>slot):
            raise MemoryError("no memory for the table of slots in use")
        Py_INCREF(slot)  # place_release gives it back

    def rest(self):
        """Look no more."""
        place_here.aimed = 0

    def learn(self, list arrays not None):
        """Want again what these arrays of the batch lie in."""
        cdef uint64_t wanted = 0
        cdef cnp.ndarray array
        for array in arrays:
            cseq_place_learn(&place_here, cnp.PyArray_DATA(array), &wanted)
        place_here.wanted = wanted

    def leave(self):
        """Stop looking, and leave the slot; return how many arrays are alive in it."""
        return cseq_place_leave(&place_here)

    def holds(self, Mapping slot not None):
        """Whether arrays are alive in a slot that was left."""
        return bool(cseq_place_holds(&place_here, slot.data))


# ── the order of an epoch ──────────────────────────────────────────────────────────────────

cdef enum:
    BRIEF = 4096       # steps of the shuffle that are not worth letting the GIL go for
    SLICE = 1 << 20    # steps between two looks at signals

ALGORITHM = "fisher-yates-v1"


cdef uint64_t natural(object value, str name, uint64_t most) except? 0:
    """An argument as an integer in [0, most]."""
    if isinstance(value, (bool, numpy.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is not an integer; give one in [0, {most}]")
    number = int(value.__index__())
    if not 0 <= number <= most:
        raise ValueError(f"{name}={value!r} is out of range; give an integer in [0, {most}]")
    return number


def derive(seed, epoch, uint64_t purpose, Py_ssize_t count):
    """The first `count` 64-bit words of the stream of (seed, epoch, purpose)."""
    cdef uint64_t words[8]
    cdef Py_ssize_t k
    if not 0 <= count <= 8:
        raise ValueError(f"count={count} is not in [0, 8]")
    cseq_derive(natural(seed, "seed", <uint64_t>-1), natural(epoch, "epoch", <uint64_t>-1),
                purpose, words, count)
    return tuple([words[k] for k in range(count)])


def permutation(n, seed, epoch=0):
    """The order in which a sequence of `n` samples with this seed goes through an epoch.

    Parameters
    ----------
    n : int
        Samples, at least 0.
    seed : int
        In [0, 2**64).
    epoch : int
        Mixed with the seed by a hash, not added: no two pairs share an order by construction.

    Returns
    -------
    numpy.ndarray
        A fresh array of shape (n,): each of 0 … n-1 once. ``uint32`` up to 2**32 samples, else
        ``int64``. The algorithm is ``fisher-yates-v1`` of docs/shuffle.md, and never changes.

    Raises
    ------
    TypeError, ValueError
        An argument is not an integer, or out of range.
    """
    cdef uint64_t size = natural(n, "n", <uint64_t>1 << 48)
    cdef uint64_t state[4]
    cdef uint32_t width = cseq_table_width(size)
    cdef uint64_t start = 0, end
    cseq_derive(natural(seed, "seed", <uint64_t>-1), natural(epoch, "epoch", <uint64_t>-1),
                CSEQ_PURPOSE_SHUFFLE, state, 4)
    cdef cnp.ndarray result = numpy.empty(size, numpy.uint32 if width == 4 else numpy.int64)
    cdef void* data = cnp.PyArray_DATA(result)
    if size <= BRIEF:
        cseq_permute(data, width, size, 0, size, state)
    while start < size and size > BRIEF:
        end = min(start + SLICE, size)
        with nogil:
            cseq_permute(data, width, size, start, end, state)
        PyErr_CheckSignals()
        start = end
    return result


@cython.final
@cython.no_gc
cdef class Order:
    """The samples of an epoch in their order, shuffled just ahead of their use.

    Parameters
    ----------
    n : int
        Samples.
    shuffle : bool
        False: in their natural order.
    seed : int
        In [0, 2**64).
    indices : numpy.ndarray, optional
        One-dimensional integers, `n` of them: the samples themselves. Read, never written.
    wide : bool
        A 64-bit table also for few samples; the order is the same.

    Notes
    -----
    The table (4 bytes a sample up to 2**32 samples) is made at the first `begin` and touched only
    as far as it is used: neither this nor `begin` costs more for more samples.
    """

    cdef cseq_order order
    cdef void* table
    cdef uint32_t* tags
    cdef uint64_t n
    cdef uint64_t seed
    cdef uint32_t width
    cdef readonly bint shuffle
    cdef readonly object indices

    def __cinit__(self, n, *, bint shuffle, seed, indices=None, bint wide=False):
        self.n = natural(n, "n", <uint64_t>1 << 48)
        self.seed = natural(seed, "seed", <uint64_t>-1)
        self.shuffle = shuffle
        self.width = 8 if wide else cseq_table_width(self.n)
        if indices is not None and indices.shape != (self.n,):
            raise ValueError(f"indices has shape {indices.shape}, not ({self.n},)")
        self.indices = indices

    def __dealloc__(self):
        PyMem_RawFree(self.table)
        PyMem_RawFree(self.tags)

    cdef int make_table(self) except -1:
        cdef uint64_t pages = cseq_table_pages(self.n, self.width)
        self.table = PyMem_RawCalloc(<size_t>pages, 4096)
        self.tags = <uint32_t*>PyMem_RawCalloc(<size_t>pages, 4)
        if self.table == NULL or self.tags == NULL:
            raise MemoryError(f"no memory for the index table of {self.n} samples "
                              f"({pages * 4096} bytes)")
        cseq_order_init(&self.order, self.n, self.width, self.table, self.tags)
        return 0

    def begin(self, epoch):
        """Begin an epoch, whatever the last one came to."""
        cdef uint64_t number = natural(epoch, "epoch", <uint64_t>-1)
        if self.shuffle:
            if self.table == NULL:
                self.make_table()
            cseq_order_begin(&self.order, self.seed, number)

    cdef int advance(self, uint64_t upto) except -1:
        cdef uint64_t left
        if upto <= self.order.position + BRIEF:
            cseq_order_advance(&self.order, upto, BRIEF)
            return 0
        while True:
            with nogil:
                left = cseq_order_advance(&self.order, upto, SLICE)
            PyErr_CheckSignals()
            if not left:
                return 0

    cdef int inside(self, uint64_t start, uint64_t count) except -1:
        if start > self.n or count > self.n - start:
            raise IndexError(f"positions [{start}, {start + count}) exceed {self.n} samples")
        return 0

    cdef int write(self, uint64_t start, uint64_t count, int64_t* out) except -1:
        """The samples at positions [start, start + count), as they stand in the order."""
        cdef uint64_t k
        if not self.shuffle:
            for k in range(count):
                out[k] = <int64_t>(start + k)
        elif self.table == NULL:
            raise RuntimeError("begin an epoch first")
        elif count:
            self.advance(start + count)
            cseq_order_read(&self.order, start, count, out)
        return 0

    def read_into(self, uint64_t start, uint64_t count, cnp.ndarray out not None):
        """Write the samples at positions [start, start + count) into `out`, from its beginning."""
        self.inside(start, count)
        if (cnp.PyArray_NDIM(out) != 1 or cnp.PyArray_TYPE(out) != cnp.NPY_INT64
                or not cnp.PyArray_ISCARRAY(out)):
            raise ValueError(f"out is {out.ndim}-dimensional {out.dtype}; give writable, "
                             "contiguous int64")
        if count > <uint64_t>cnp.PyArray_DIM(out, 0):
            raise ValueError(f"{count} samples do not fit into {out.shape[0]}")
        self.write(start, count, <int64_t*>cnp.PyArray_DATA(out))
        if self.indices is not None:
            chosen = out[:count]
            chosen[...] = self.indices[chosen]

    def read(self, uint64_t start, uint64_t count):
        """The samples at positions [start, start + count): a fresh int64 array."""
        cdef cnp.npy_intp size = <cnp.npy_intp>count
        self.inside(start, count)
        out = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
        self.write(start, count, <int64_t*>cnp.PyArray_DATA(out))
        if self.indices is not None:
            out[...] = self.indices[out]
        return out


# ── the ring ───────────────────────────────────────────────────────────────────────────────

PARK_NS = 100_000_000  # longest sleep before a sleeper looks at signals, peers and deadlines

INPUT, MIDDLE, OUTPUT = 0, 1, 2


def wait_any(list rings not None, list cells not None, uint32_t seen):
    """Sleep until one of some tickets is ready, or an alarm is raised; see `Ring.wait`.

    Parameters
    ----------
    rings : list of Ring
        Of one memory, in each of which one ticket is waited for.
    cells : list of int
        Where that is.
    seen : int
        What `alarms` of any of them said before the caller looked.
    """
    cdef uint32_t count = <uint32_t>len(rings)
    cdef uint32_t k
    cdef Ring ring
    cdef uint64_t before
    cdef uint64_t park = PARK_NS
    cdef cseq_ring** r = <cseq_ring**>PyMem_RawMalloc((sizeof(cseq_ring*) + 4) * <size_t>(count + 1))
    cdef uint32_t* at = <uint32_t*>(r + count)
    if r == NULL:
        raise MemoryError(f"no memory for {count} rings")
    try:
        for k in range(count):
            ring = rings[k]
            ring.at(cells[k])
            r[k], at[k] = ring.r, cells[k]
        before = cseq_now_ns()
        with nogil:
            cseq_ring_doze_any(r, at, count, seen, park)
        ring.waited_ns += cseq_now_ns() - before
    finally:
        PyMem_RawFree(r)
    PyErr_CheckSignals()


def ring_bytes(uint32_t capacity, uint32_t batch_size, uint32_t runners):
    """Bytes of memory that a ring of these sizes takes."""
    return cseq_ring_bytes(capacity, batch_size, runners)


cdef class Ring:
    """The ring, as the trainer sees it: post, take, cancel, repost, close.

    One thread at a time posts and takes; `repost`, `alarm`, `close`, `depths` and `holder` may be
    called from any thread.

    Parameters
    ----------
    memory : Memory
        Where the ring lies: a `Mapping` for processes, a zeroed `Block` for threads.
    capacity : int
        Cells: the most tickets in flight or waiting. 0: attach to the ring that is there.
    batch_size : int
        The most indices a ticket can have.
    runners : int
        Owners are numbered from 1 to this.
    calls : int
        0: runners share the ring, and each claims any ticket. Else it is a queue of one runner,
        which claims in the order of the posts, and looks at the last `calls` cells first.
    at : int
        Where in the memory it lies. The trainer sleeps at the gate of the ring at 0, so it can wait for
        several rings in one memory (`wait_any`).
    """

    cdef cseq_ring* r
    cdef readonly Memory memory
    cdef uint32_t* order      # cells of outstanding tickets, oldest first; a circle
    cdef uint32_t first       # where in `order` the oldest is
    cdef uint32_t outstanding
    cdef uint32_t* abandoned  # cells of tickets that were given up
    cdef readonly uint32_t abandoned_count
    cdef uint32_t next_cell
    cdef uint32_t unwoken     # tickets posted since the runners were last woken
    cdef cseq_turn turns      # of threads at the GIL
    cdef public uint32_t wake_at  # how many of them wake the runners
    cdef public Slots arena   # the slots of its tickets; None: they have none
    cdef readonly uint64_t waited_ns  # the trainer slept
    # taken since the beginning, errors not counted
    cdef readonly uint64_t taken_batches
    cdef readonly uint64_t taken_samples
    cdef readonly uint64_t taken_bytes  # of slots

    def __cinit__(self, Memory memory not None, uint32_t capacity=0, uint32_t batch_size=1,
                  uint32_t runners=1, uint32_t calls=0, Py_ssize_t at=0):
        cdef uint64_t nbytes
        memory.inside(at, 0)
        nbytes = <uint64_t>(memory.size - at)
        self.memory = memory
        self.r = <cseq_ring*>(memory.data + at)
        if capacity:
            if nbytes < cseq_ring_bytes(capacity, batch_size, runners):
                raise ValueError(f"a ring of {capacity} cells of {batch_size} indices and "
                                 f"{runners} runners does not fit into {nbytes} bytes")
            if runners > 0xFFFF:
                raise ValueError(f"runners={runners} exceeds 65535")
            if calls and (calls >= capacity or runners > 1):
                raise ValueError(f"a queue has one runner and more than calls={calls} cells, not "
                                 f"{runners} and {capacity}")
            cseq_ring_init(self.r, capacity, batch_size, runners, calls)
            self.r.output -= at
        elif not cseq_ring_fits(self.r, nbytes):
            raise ValueError("there is no ring of this version of cseq in this memory")
        self.order = <uint32_t*>PyMem_RawCalloc(self.r.capacity, 4)
        self.abandoned = <uint32_t*>PyMem_RawCalloc(self.r.capacity, 4)
        if self.order == NULL or self.abandoned == NULL:
            raise MemoryError(f"no memory for {self.r.capacity} cells")
        self.wake_at = 1

    def __dealloc__(self):
        PyMem_RawFree(self.order)
        PyMem_RawFree(self.abandoned)

    cdef cseq_cell* at(self, uint32_t cell) except NULL:
        if cell >= self.r.capacity:
            raise IndexError(f"cell {cell} is not one of {self.r.capacity}")
        return cseq_ring_cell(self.r, cell)

    # -- what it is

    @property
    def capacity(self):
        """Cells."""
        return self.r.capacity

    @property
    def outstanding_count(self):
        """Tickets posted and not yet taken or given up."""
        return self.outstanding

    @property
    def closed(self):
        return bool(cseq_ring_closed(self.r))

    @property
    def spin(self):
        """Nanoseconds that an idle runner polls the ring before it sleeps."""
        return self.r.spin

    @spin.setter
    def spin(self, uint32_t ns):
        cseq_ring_set_spin(self.r, ns)

    @property
    def turn(self):
        """Nanoseconds that a thread with nothing to do polls ring and GIL before it sleeps; for a ring
        between threads."""
        return self.turns.ns

    @turn.setter
    def turn(self, uint32_t ns):
        self.turns.ns = ns

    def indices(self, uint32_t cell):
        """The cell's room for indices: an int64 array on the ring's memory."""
        self.at(cell)
        cdef Py_ssize_t offset = <char*>cseq_ring_indices(self.r, cell) - self.memory.data
        return self.memory.view(offset, numpy.dtype(numpy.int64), (self.r.batch_size,))

    def depths(self):
        """Tickets in the input, middle and output queue (waiting, not in work)."""
        cdef Py_ssize_t[3] depth
        cdef uint32_t c
        cdef int state
        depth[0] = depth[1] = depth[2] = 0
        for c in range(self.r.capacity):
            state = cseq_ring_state(self.r, c)
            if state == CSEQ_POSTED:
                depth[0] += 1
            elif state == CSEQ_INDEXED:
                depth[1] += 1
            elif state == CSEQ_READY:
                depth[2] += 1
        return depth[0], depth[1], depth[2]

    def idle_ns(self):
        """Nanoseconds that each runner has slept without a ticket to claim, by owner from 1."""
        return [cseq_load_rlx_u64(&cseq_ring_runner(self.r, o + 1).idle_ns) for o in range(self.r.runners)]

    def batches(self):
        """Tickets that each runner has published, by owner from 1."""
        return [cseq_load_rlx_u64(&cseq_ring_runner(self.r, o + 1).batches) for o in range(self.r.runners)]

    def holder(self, uint32_t cell):
        """(owner, when claimed in ns of `now_ns`) of a cell in work, else (0, 0)."""
        cdef cseq_cell* c = self.at(cell)
        cdef uint64_t word = cseq_load_acq_u64(&c.word)
        cdef int state = CSEQ_STATE(word)
        if state != CSEQ_INDEXING and state != CSEQ_CONVERTING:
            return 0, 0
        return CSEQ_OWNER(word), cseq_load_rlx_u64(&c.started_ns)

    # -- post

    def vacant(self):
        """A free cell, or -1."""
        return self.find_vacant()

    cdef int find_vacant(self) noexcept:
        """A free cell, or -1."""
        cdef uint32_t k
        cdef uint32_t c = self.next_cell
        for k in range(self.r.capacity):
            if cseq_ring_state(self.r, c) == CSEQ_FREE:
                return <int>c
            c = 0 if c + 1 == self.r.capacity else c + 1
        return -1

    def post(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
             uint32_t count, uint64_t start=0, uint32_t slot=0, uint64_t capacity=0):
        """Offer a ticket, its indices written, in a free cell.

        `start` is the position of the first sample in the order of the epoch. The
        runners are woken when `wake_at` tickets have gathered and whenever the trainer waits, but
        not while one of them polls (see `turn`).
        """
        self.at(cell)
        if count > self.r.batch_size:
            raise ValueError(f"a ticket of {count} indices exceeds {self.r.batch_size}")
        if cseq_ring_state(self.r, cell) != CSEQ_FREE:
            raise RuntimeError(f"cell {cell} is not free")
        self.offer(cell, ticket, epoch, batch, count, start, slot, capacity)

    cdef void offer(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
                    uint32_t count, uint64_t start, uint32_t slot, uint64_t capacity) noexcept:
        """`post`, in a cell that is free."""
        self.fill(cell, epoch, batch, count, start, slot, capacity)
        if not self.outstanding:
            cseq_ring_begin(self.r, cell)
        self.order[(self.first + self.outstanding) % self.r.capacity] = cell
        self.outstanding += 1
        self.next_cell = (cell + 1) % self.r.capacity
        cseq_ring_post(self.r, cell, ticket)
        self.unwoken += 1
        if self.unwoken >= self.wake_at and not cseq_turn_seen(&self.turns):
            self.wake()

    cdef void fill(self, uint32_t cell, uint64_t epoch, uint64_t batch, uint32_t count,
                   uint64_t start, uint32_t slot, uint64_t capacity) noexcept:
        """Write what a ticket says into a free cell."""
        cdef cseq_cell* c = cseq_ring_cell(self.r, cell)
        c.epoch = epoch
        c.batch = batch
        c.start = start
        c.count = count
        c.slot = slot
        c.capacity = capacity
        cseq_store_rlx_u64(&c.started_ns, 0)
        c.stage = c.status = 0

    cpdef void wake(self) noexcept:
        """Wake the runners that sleep until there are tickets."""
        self.unwoken = 0
        cseq_gate_knock(&self.r.gate[0])

    # -- take

    cdef int place(self, uint32_t cell) noexcept:
        """Position in `order` of the ticket in a cell, or -1."""
        cdef uint32_t k
        for k in range(self.outstanding):
            if self.order[(self.first + k) % self.r.capacity] == cell:
                return <int>k
        return -1

    cdef void leave(self, uint32_t k) noexcept:
        """Take the ticket at a position out of `order`."""
        cdef uint32_t n = self.r.capacity
        while k > 0:
            self.order[(self.first + k) % n] = self.order[(self.first + k - 1) % n]
            k -= 1
        self.first = 0 if self.first + 1 == n else self.first + 1
        self.outstanding -= 1

    cdef uint32_t outstanding_cell(self, uint32_t k) noexcept:
        """The cell of the ticket at a position of `order`."""
        return self.order[(self.first + k) % self.r.capacity]

    cdef int find(self, bint ordered) noexcept:
        """Position in `order` of a ticket that can be taken, or -1."""
        cdef uint32_t k
        cdef uint32_t upto = min(self.outstanding, <uint32_t>1) if ordered else self.outstanding
        for k in range(upto):
            if cseq_ring_ready(self.r, self.order[(self.first + k) % self.r.capacity]):
                return <int>k
        return -1

    def take(self, bint ordered=True, int cell=-1):
        """Take a finished ticket out of the ring: the oldest, (unordered) any one, or that in a cell.

        Returns
        -------
        tuple or None
            (cell, status, slot, capacity, record): what the runners wrote. The cell is free; its
            ticket and indices can be read until the next `post` there. None: not yet finished.
        """
        cdef int k
        cdef cseq_cell* c
        cdef uint64_t* f
        if cell < 0:
            k = self.find(ordered)
        else:
            self.at(<uint32_t>cell)
            k = self.place(<uint32_t>cell) if cseq_ring_ready(self.r, <uint32_t>cell) else -1
        if k < 0:
            return None
        cell = <int>self.outstanding_cell(<uint32_t>k)
        c = cseq_ring_cell(self.r, cell)
        self.settle(c)
        f = self.free(c, <uint32_t>k)
        return cell, c.status, c.slot, c.capacity, (f[0], f[1], f[2], f[3], f[4], f[5])

    cdef uint64_t* free(self, cseq_cell* c, uint32_t k) noexcept:
        """Take a finished ticket, at position `k` of `order`, out of its cell; return its record."""
        cdef uint64_t* f = c.converted if c.stage else c.record
        cdef uint32_t cell = self.order[(self.first + k) % self.r.capacity]
        self.leave(k)
        cseq_ring_retire(self.r, cell)
        if c.status == 0:
            self.taken_batches += 1
            self.taken_samples += c.count
            self.taken_bytes += f[0] + f[1] + f[2] + f[3] + f[4] + f[5]
        return f

    cdef inline void settle(self, cseq_cell* c) noexcept:
        """Enter in which slot a published ticket lies."""
        if self.arena is not None:
            self.arena.settle(c)

    def alarms(self):
        """How often the trainer was woken: for `wait`, taken before looking for failures."""
        return cseq_ring_alarms(self.r)

    def wait(self, uint32_t seen, bint ordered=True, uint64_t ns=PARK_NS, int cell=-1):
        """Sleep until a ticket can be taken or an alarm is raised, at most `ns`; then run signal
        handlers.

        Parameters
        ----------
        seen : int
            What `alarms` said before the caller looked for whatever an alarm announces.
        ordered : bool
            Wait for the oldest ticket, not for any.
        ns : int
            Nanoseconds.
        cell : int
            Wait for the ticket in this cell.
        """
        cdef uint64_t before
        if cell >= 0:
            self.at(<uint32_t>cell)
        elif ordered and self.outstanding:
            cell = <int>self.order[self.first]
        before = cseq_now_ns()
        with nogil:
            cseq_turn_doze(&self.turns, self.r, cell, seen, ns, &self.unwoken)
        self.waited_ns += cseq_now_ns() - before
        PyErr_CheckSignals()

    def awaited(self, bint ordered=True):
        """Cells of the tickets that the trainer waits for: the oldest's, or (unordered) all."""
        cdef uint32_t k
        cdef uint32_t upto = min(self.outstanding, <uint32_t>1) if ordered else self.outstanding
        return [self.order[(self.first + k) % self.r.capacity] for k in range(upto)]

    def ticket(self, uint32_t cell):
        """(epoch, batch, count) of a cell."""
        cdef cseq_cell* c = self.at(cell)
        return c.epoch, c.batch, c.count

    def start(self, uint32_t cell):
        """The first of what a cell's ticket asks for: a position in the order, or an item."""
        return self.at(cell).start

    def token(self, uint32_t cell):
        """The cell's word: it differs for each ticket, and for each state of a ticket."""
        return cseq_load_acq_u64(&self.at(cell).word)

    def left_in(self, uint32_t cell):
        """What the runners have left in a cell that is the trainer's, until the next `post` there:
        (stage that wrote last, status, slot, capacity, the indexer's record, the converter's)."""
        cdef cseq_cell* c = self.at(cell)
        cdef uint64_t* i = c.record
        cdef uint64_t* f = c.converted
        return (c.stage, c.status, c.slot, c.capacity, (i[0], i[1], i[2], i[3], i[4], i[5]),
                (f[0], f[1], f[2], f[3], f[4], f[5]))

    # -- give up

    def abandon(self):
        """Give up the outstanding tickets; `sweep` frees their cells."""
        cdef uint32_t k
        for k in range(self.outstanding):
            self.abandoned[self.abandoned_count] = self.order[(self.first + k) % self.r.capacity]
            self.abandoned_count += 1
        self.outstanding = 0
        self.unwoken = 0

    def sweep(self):
        """Free the abandoned cells that no runner works on now: a list of (cell, slot)."""
        cdef uint32_t k, cell, kept = 0
        swept = []
        for k in range(self.abandoned_count):
            cell = self.abandoned[k]
            if cseq_ring_cancel(self.r, cell):
                self.settle(cseq_ring_cell(self.r, cell))
                swept.append((cell, cseq_ring_cell(self.r, cell).slot))
                cseq_ring_retire(self.r, cell)
            else:
                self.abandoned[kept] = cell
                kept += 1
        self.abandoned_count = kept
        return swept

    # -- from any thread

    def held(self, uint32_t owner):
        """Cells that `owner` works on."""
        cdef uint32_t c
        return [c for c in range(self.r.capacity) if self.holder(c)[0] == owner]

    def repost(self, uint32_t owner):
        """Post again what `owner` held, which must be gone for certain: its cells."""
        cdef uint32_t count, k
        cdef uint32_t* held = <uint32_t*>PyMem_RawMalloc(4 * <size_t>self.r.capacity)
        if held == NULL:
            raise MemoryError(f"no memory for {self.r.capacity} cells")
        try:
            count = cseq_ring_repost(self.r, owner, held)
            return [held[k] for k in range(count)]
        finally:
            PyMem_RawFree(held)

    def bury(self, uint32_t owner, list others=None):
        """Take the slots that `owner` owned, whose tickets were posted again: a list of slots.

        `others`: more rings whose tickets have slots of this arena.
        """
        cdef list every = [self, *(others or ())]
        cdef Py_ssize_t count, k
        cdef Py_ssize_t* taken = NULL
        cdef cseq_ring** rings = NULL
        if self.arena is None:
            return []
        try:
            taken = <Py_ssize_t*>PyMem_RawMalloc(sizeof(Py_ssize_t) * <size_t>(self.arena.made + 1))
            rings = <cseq_ring**>PyMem_RawMalloc(sizeof(cseq_ring*) * <size_t>len(every))
            if taken == NULL or rings == NULL:
                raise MemoryError(f"no memory for {self.arena.made} slots")
            for k in range(len(every)):
                rings[k] = (<Ring?>every[k]).r
            count = self.arena.bury(rings, len(every), owner, taken)
            return [taken[k] for k in range(count)]
        finally:
            PyMem_RawFree(taken)
            PyMem_RawFree(rings)

    def alarm(self):
        """Wake the trainer, for any cell that it waits for."""
        cseq_gate_alarm(cseq_ring_output(self.r))

    def close(self):
        """Close the ring: runners end when they find nothing to claim."""
        cseq_ring_close(self.r)


cdef class Seat:
    """A runner's place at the ring: claim a ticket of its stage, publish it.

    Parameters
    ----------
    ring : Ring
    stage : int
        0: indexer, 1: converter.
    owner : int
        The runner's number, from 1.
    last : bool
        No stage follows: publish to the output.
    worker : int
        The number that slots are owned by; 0: the same as `owner`.
    """

    cdef cseq_ring* r
    cdef readonly Ring ring
    cdef readonly uint32_t stage
    cdef readonly uint32_t owner
    cdef uint32_t worker
    cdef cseq_cell* c
    cdef readonly int cell  # of the present ticket; -1: none
    cdef public uint64_t park  # ns that `claim` waits at most
    cdef bint last

    def __cinit__(self, Ring ring not None, uint32_t stage, uint32_t owner, *, bint last,
                  uint32_t worker=0):
        if stage > 1:
            raise ValueError(f"stage={stage} is neither 0 nor 1")
        if not 1 <= owner <= ring.r.runners:
            raise ValueError(f"owner={owner} is not in [1, {ring.r.runners}]")
        self.ring = ring
        self.r = ring.r
        self.stage = stage
        self.owner = owner
        self.worker = worker or owner
        self.last = last
        self.cell = -1
        self.park = PARK_NS

    def claim(self):
        """Claim a ticket. True: claimed; False: none came for a while; None: the ring is closed."""
        cdef int cell = CSEQ_CLOSED
        if self.cell >= 0:
            raise RuntimeError(f"cell {self.cell} is still in hand: publish it first")
        if not cseq_ring_closed(self.r):
            cell = cseq_ring_claim(self.r, self.stage, self.owner)
            if cell < 0:
                with nogil:
                    cell = cseq_turn_await(&self.ring.turns, self.r, self.stage, self.owner, self.park)
        if cell == CSEQ_CLOSED:
            return None
        if cell < 0:
            return False
        self.cell = cell
        self.c = cseq_ring_cell(self.r, cell)
        cseq_store_rlx_u64(&self.c.started_ns, cseq_now_ns())
        return True

    cdef cseq_cell* held(self) except NULL:
        if self.cell < 0:
            raise RuntimeError("no ticket in hand: claim one first")
        return self.c

    @property
    def epoch(self):
        return self.held().epoch

    @property
    def batch(self):
        """Running number within the epoch."""
        return self.held().batch

    @property
    def start(self):
        """Position of the first sample in the order of the epoch."""
        return self.held().start

    @property
    def slot(self):
        return self.held().slot

    @property
    def capacity(self):
        """Bytes of the slot that are committed."""
        return self.held().capacity

    @property
    def record(self):
        """What the stage before wrote."""
        cdef uint64_t* f = self.held().record
        return f[0], f[1], f[2], f[3], f[4], f[5]

    def attach(self):
        """Enter the ticket's slot, which the batch is about to leave; it is the trainer's."""
        self.ring.settle(self.held())

    def detach(self):
        """The batch has left its slot: the trainer must not free it."""
        self.held().slot = NO_SLOT

    def indices(self):
        """The batch's indices: a fresh int64 array."""
        cdef cnp.npy_intp n = self.held().count
        array = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0)
        CSEQ_POINT("slice")
        memcpy(cnp.PyArray_DATA(array), cseq_ring_indices(self.r, <uint32_t>self.cell),
               <size_t>n * 8)
        return array

    def publish(self, uint32_t status=0, record=(), uint64_t capacity=0, int64_t slot=-1):
        """Publish the ticket.

        Parameters
        ----------
        status : int
            0: a batch; anything else goes straight to the output.
        record : tuple of int
            Where in the slot it lies: at most `FIELDS` numbers of bytes, which add up to what it
            takes.
        capacity : int
            Bytes of the slot that are committed now.
        slot : int
            Where it lies, if not in the slot that the ticket was posted with: in one that this
            runner owned. It owns the other one from now on.
        """
        cdef cseq_cell* c = self.held()
        cdef uint64_t* fields = c.converted if self.stage else c.record
        cdef Py_ssize_t i
        if not isinstance(record, tuple) or len(<tuple>record) > CSEQ_FIELDS:
            raise ValueError(f"record={record!r} is not a tuple of at most {CSEQ_FIELDS} numbers")
        for i in range(len(<tuple>record)):
            fields[i] = (<tuple>record)[i]
        if slot >= 0 and slot != c.slot:
            CSEQ_POINT("move")
            c.by = self.worker
            c.slot = <uint32_t>slot
            c.capacity = capacity
            CSEQ_POINT("moved")
        self.deliver(c, status, capacity)

    cdef void deliver(self, cseq_cell* c, uint32_t status, uint64_t capacity) noexcept:
        """`publish`, with the record written."""
        c.status = status
        c.stage = self.stage
        if capacity > c.capacity:
            c.capacity = capacity
        cdef uint32_t cell = <uint32_t>self.cell
        self.cell = -1
        cseq_ring_publish(self.r, cell, CSEQ_READY if self.last or status else CSEQ_INDEXED)


# ── the trainer's end of the ring ──────────────────────────────────────────────────────────


@cython.final
cdef class Consumer:
    """The trainer's end of a ring: posts the tickets of an epoch, and takes its batches out.

    A ticket leaves the ring in three steps::

        peek     find a ticket that is READY; nothing changes
        decode   make the batch from what the ticket says; may call anything, may be interrupted
        commit   free the cell, count the batch, post the next ticket in its place: C alone

    An exception before the commit leaves the ticket where it is: the next call finds it again.
    No Python code runs between the commit and the return to the caller of `BatchIterator`.

    One thread at a time, but for `step`.

    Parameters
    ----------
    ring : Ring
    order : Order
    fill : callable
        ``fill(k, out)`` writes the indices of batch k of the epoch, where `order` alone does not
        say them, and returns how many there are and the position of the first one.
    read : callable
        Waits for the next batch and decodes it: ``(token, cell, batch, error)``, where `token` is
        that of `peek`, and `error` is None or what was raised instead of the batch.
    describe : callable
        ``describe(cell, error)``: the exception to be raised in the loop, and the entry of
        `skipped` for it.
    ordered : bool
        Batches come out in the order of their tickets, not in that of completion.
    skip_errors : bool
        Leave out a batch whose indexer raised, instead of raising.
    objects : list, optional
        What threads have made, by cell.
    slots : Slots, optional
        Where processes lay their batches; without them, tickets have no slot.
    extend : callable, optional
        Makes the lowest free slot fit, or more slots.
    discard : callable, optional
        ``discard(cell)`` is called before the cell of a ticket that was given up is freed.
    small : tuple, optional
        ``(mapped, reader, most, lend)``: batches of a structure that the `Reader` knows are decoded
        in C; arrays of at most `most` bytes together are copied, and others are views of what
        `lend` (see `Arena`) returns. `mapped` has the `Mapping` of each slot.
    convert : callable, optional
        Applied to the batch as the last part of decoding it; `read` does so itself.
    leaf_for : callable, optional
        Does the same to the leaves of a batch that is decoded in C: see `Plan.converters`.

    Attributes
    ----------
    posted, taken : int
        Batches of this epoch.
    done : int
        The same as `taken`, but a batch that raised counts only when the loop went on.
    skipped : list
        What `describe` said of the batches left out.
    """

    cdef readonly Ring ring
    cdef Order order
    cdef object fill, read, describe, extend, discard, convert
    cdef bint ordered, skip_errors
    cdef list objects
    cdef Slots slots
    cdef dict mapped
    cdef Reader reader
    cdef Py_ssize_t most
    cdef object lend
    cdef object leaf_for
    cdef dict converters  # by plan
    cdef Plan latest
    cdef list leaves      # converters of `latest`
    cdef readonly bint alone  # `step` needs no lock: there is a GIL, and nothing converts batches as a whole
    cdef readonly list skipped
    cdef tuple decoded  # what `read` has returned for a ticket that is still in the ring
    cdef readonly uint64_t ticket  # number of the next one
    cdef readonly uint64_t posted
    cdef readonly uint64_t taken
    cdef readonly uint64_t done
    # The epoch: batch k has the number `first` + k; for k < `full` it is `size` samples from
    # position `start` + k * `stride` on.
    cdef readonly uint64_t batches
    cdef uint64_t epoch, first, full, start, stride
    cdef uint32_t size
    # The indices of the ticket to be posted next, if `next_for` is `posted` + 1.
    cdef Block next_memory
    cdef object next_indices
    cdef uint64_t next_for, next_start
    cdef uint32_t next_count

    def __cinit__(self, Ring ring not None, Order order not None, fill, read, describe, *,
                  bint ordered=True, bint skip_errors=False, list objects=None, Slots slots=None,
                  extend=None, discard=None, small=None, convert=None, leaf_for=None):
        self.ring, self.order = ring, order
        self.fill, self.read, self.describe = fill, read, describe
        self.ordered, self.skip_errors = ordered, skip_errors
        self.objects, self.slots, self.extend, self.discard = objects, slots, extend, discard
        if small is not None:
            self.mapped, self.reader, self.most, self.lend = small
        self.convert, self.leaf_for = convert, leaf_for
        self.converters = {}
        self.alone = GIL and (convert is None or leaf_for is not None)
        self.skipped = []
        self.next_memory = Block(8 * <Py_ssize_t>ring.r.batch_size)
        self.next_indices = self.next_memory.view(
            0, numpy.dtype(numpy.int64), (ring.r.batch_size,))

    # -- the epoch

    def begin(self, uint64_t epoch, uint64_t first, uint64_t batches, uint64_t full, uint64_t start,
              uint64_t stride, uint32_t size):
        """Begin an epoch; tickets of an earlier one are given up.

        Parameters
        ----------
        epoch : int
        first : int
            Number of its first batch.
        batches : int
            How many there are.
        full : int
            How many of them, from the first on, have all samples.
        start, stride : int
            Position of the first batch's first sample, and from one to the next.
        size : int
            Samples of each.
        """
        self.ring.abandon()
        self.decoded = None
        self.epoch, self.first, self.batches = epoch, first, batches
        self.full = full if self.order.indices is None else 0
        self.start, self.stride, self.size = start, stride, size
        self.posted = self.taken = self.done = self.next_for = 0

    def end(self):
        """Give up the epoch."""
        self.ring.abandon()
        self.decoded = None
        self.batches = self.posted = self.taken = self.done = self.next_for = 0

    @property
    def over(self):
        """Whether no more batches come in this epoch."""
        return not self.ring.outstanding and self.posted >= self.batches

    # -- posting

    cdef bint is_brief(self) noexcept:
        """Whether `prepare` runs no Python code and takes little time."""
        cdef uint64_t end = self.start + self.posted * self.stride + self.size
        if self.posted >= self.batches or self.next_for == self.posted + 1:
            return True
        return self.posted < self.full and (
            not self.order.shuffle or end <= self.order.order.position + BRIEF)

    cdef int prepare(self) except -1:
        """Write the indices of the next ticket into a buffer, so that `commit` only copies them."""
        cdef uint64_t k = self.posted
        cdef uint64_t start, number
        cdef uint32_t count
        if k >= self.batches or self.next_for == k + 1:
            return 0
        number = self.ticket
        if k < self.full:
            start, count = self.start + k * self.stride, self.size
            self.order.write(start, count, <int64_t*>self.next_memory.data)
        else:
            count, start = self.fill(k, self.next_indices)
        if number == self.ticket and k == self.posted:  # no handler has posted, or begun an epoch
            self.next_start, self.next_count, self.next_for = start, count, k + 1
        return 0

    cdef void offer(self, uint32_t cell, uint32_t slot, uint64_t capacity) noexcept:
        """Post the prepared ticket in a free cell."""
        memcpy(cseq_ring_indices(self.ring.r, cell), self.next_memory.data,
               8 * <size_t>self.next_count)
        self.ring.offer(cell, self.ticket, self.epoch, self.first + self.posted, self.next_count,
                        self.next_start, slot, capacity)
        self.ticket += 1
        self.posted += 1

    def refill(self):
        """Post tickets while there are free cells and batches left."""
        cdef int cell
        cdef Py_ssize_t slot
        self.sweep()
        while self.posted < self.batches:
            cell = self.ring.find_vacant()
            if cell < 0:
                return
            self.prepare()
            if self.next_for != self.posted + 1 or self.ring.find_vacant() != cell:
                continue  # a signal handler has done it, or begun another epoch
            if self.slots is None:
                self.offer(cell, NO_SLOT, 0)
                continue
            slot = self.slots.find_fit()
            if slot < 0:
                self.extend()
            elif self.slots.occupy(slot):
                self.offer(cell, <uint32_t>slot, self.slots.at(slot).nbytes)

    cdef int sweep(self) except -1:
        """Free the cells of given-up tickets that no runner works on any more."""
        cdef Ring ring = self.ring
        cdef uint32_t k = 0, cell
        while k < ring.abandoned_count:
            cell = ring.abandoned[k]
            if not cseq_ring_cancel(ring.r, cell):
                k += 1
                continue
            if self.discard is not None:
                self.discard(cell)
                if k >= ring.abandoned_count or ring.abandoned[k] != cell:
                    k = 0  # a signal handler has called `refill`
                    continue
            self.leave(cseq_ring_cell(ring.r, cell), cell, True)
            cseq_ring_retire(ring.r, cell)
            ring.abandoned_count -= 1
            ring.abandoned[k] = ring.abandoned[ring.abandoned_count]
        return 0

    cdef Py_ssize_t leave(self, cseq_cell* c, uint32_t cell, bint release) except -2:
        """Empty a cell: the slot that its next ticket can have, or -1."""
        cdef Py_ssize_t slot = -1
        if self.objects is not None:
            self.objects[cell] = None
        if self.slots is not None and c.slot != NO_SLOT:
            self.slots.settle(c)
            if self.slots.vacate(c.slot):
                slot = c.slot
                if release or not self.slots.is_fit(slot):
                    self.slots.release(slot)
                    slot = -1
        return slot

    # -- peek, decode, commit

    def peek(self):
        """The next finished ticket: the oldest, or (unordered) any. Nothing changes.

        Returns
        -------
        tuple or None
            (token, cell, status, slot, capacity, record). None: it is not finished.
        """
        cdef int k = self.ring.find(self.ordered)
        cdef uint32_t cell
        cdef cseq_cell* c
        cdef uint64_t* f
        if k < 0:
            return None
        cell = self.ring.outstanding_cell(k)
        c = cseq_ring_cell(self.ring.r, cell)
        f = c.converted if c.stage else c.record
        return (cseq_load_acq_u64(&c.word), cell, c.status, c.slot, c.capacity,
                (f[0], f[1], f[2], f[3], f[4], f[5]))

    cdef object decode(self, uint32_t cell, bint whole):
        """The batch in a cell, converted, if it can be made without `read`; else UNREAD.

        If not `whole`, then only if no Python code is needed but for converting single leaves.
        """
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        cdef bint leaves = self.leaf_for is not None
        if c.status or not (whole or self.convert is None or (leaves and self.objects is None)):
            return UNREAD
        if self.objects is not None:
            batch = self.objects[cell]
            if batch is None:
                return UNREAD
        else:
            batch = self.decode_slot(c, whole, leaves)
            if leaves or batch is UNREAD:
                return batch
        return batch if self.convert is None else self.convert(batch)

    cdef object decode_slot(self, cseq_cell* c, bint whole, bint leaves):
        """The batch in a cell's slot, if its structure is known; else UNREAD."""
        cdef Mapping slot
        cdef Plan plan
        cdef Memory memory
        cdef uint64_t* f = c.record
        cdef uint64_t end = f[0] + f[1] + f[2] + f[3]
        cdef bint small = f[0] <= <uint64_t>self.most
        if c.stage or self.mapped is None or not f[1] or not (whole or (small and not f[3])):
            return UNREAD
        slot = self.mapped.get(c.slot)
        if slot is None or <uint64_t>slot.size < c.capacity:
            return UNREAD
        # Some small batches go through the arena, which counts them, so that their slots can shrink.
        if (small and c.capacity > MOST_KEPT
                and self.taken % (4 * self.ring.r.capacity) < self.ring.r.capacity):
            return UNREAD
        plan = self.reader.find(slot, f)
        if plan is None:
            return UNREAD
        memory, objects = slot, None
        if not small:
            memory = self.lend(c.slot, end, c.capacity)
        if f[3]:
            if small and not self.reader.is_in_band(slot, f):
                return UNREAD
            objects = self.reader.load(memory, end - f[3], f[3])
        return plan.read(memory, f, small, objects, self.conversion(plan) if leaves else None)

    cdef list conversion(self, Plan plan):
        """What converts the leaves of batches of a plan."""
        cdef list leaves
        if plan is self.latest:
            return self.leaves
        leaves = self.converters.get(plan)
        if leaves is None:
            if len(self.converters) >= MOST_KNOWN:
                self.converters.clear()
            leaves = self.converters[plan] = plan.converters(self.leaf_for, self.convert)
        self.latest, self.leaves = plan, leaves
        return leaves

    cdef int commit(self, uint32_t k) except -1:
        """Take the ticket at position `k` of the outstanding ones out; post the next in its cell."""
        cdef Ring ring = self.ring
        cdef uint32_t cell = ring.outstanding_cell(k)
        cdef cseq_cell* c = cseq_ring_cell(ring.r, cell)
        cdef bint more = self.posted < self.batches and self.next_for == self.posted + 1
        cdef Py_ssize_t slot = self.leave(c, cell, not more)
        self.decoded = None
        ring.free(c, k)
        self.taken += 1
        if not more:
            return 0
        if self.slots is None:
            self.offer(cell, NO_SLOT, 0)
            return 0
        if slot < 0:
            slot = self.slots.find_fit()
            if slot < 0 or not self.slots.occupy(slot):
                return 0  # `refill` posts it
        self.offer(cell, <uint32_t>slot, self.slots.at(slot).nbytes)
        return 0

    cpdef object step(self):
        """Take the next batch, if it is ready, and C alone can decode it and post the next ticket.

        Returns
        -------
        object or None
            The batch. None: nothing has changed.
        """
        cdef int k
        cdef uint32_t cell
        cdef uint64_t token
        if not self.is_brief():
            return None
        k = self.ring.find(self.ordered)
        if k < 0:
            return None
        cell = self.ring.outstanding_cell(k)
        token = cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word)
        try:
            batch = self.decode(cell, False)
        except MemoryError:
            raise
        except Exception as error:
            self.decoded = token, cell, None, error  # `next` names the batch
            return None
        if batch is None:
            self.decoded = token, cell, None, None
        if batch is None or batch is UNREAD:
            return None
        self.prepare()
        PyErr_CheckSignals()
        # Conversion or a handler may have run arbitrary code, `step` too: validate the cell again.
        k = self.ring.place(cell)
        if (k < 0 or cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word) != token
                or self.next_is_missing()):
            return None
        self.commit(<uint32_t>k)
        self.done = self.taken
        return batch

    cdef bint next_is_missing(self) noexcept:
        """Whether there is a ticket to be posted next, and it is not prepared."""
        return self.posted < self.batches and self.next_for != self.posted + 1

    def next(self):
        """Take the next batch.

        Raises
        ------
        StopIteration
            The epoch is over.
        """
        cdef int k
        cdef uint32_t cell
        while True:
            if self.decoded is None:
                self.decoded = self.decode_next()
            token, cell, batch, error = self.decoded
            if error is not None:
                error, entry = self.describe(cell, error)
            self.prepare()
            if self.slots is not None and self.slots.find_fit() < 0:
                self.extend()
            PyErr_CheckSignals()
            # Conversion or a handler may have run arbitrary code: validate the cell again.
            k = self.ring.place(cell)
            if k < 0 or cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word) != token:
                self.decoded = None
                continue
            if self.next_is_missing():
                continue
            self.commit(<uint32_t>k)
            if error is None:
                self.done = self.taken
                return batch
            if not self.skip_errors or not isinstance(error, Exception):
                raise error
            self.done = self.taken
            self.skipped.append(entry)

    cdef tuple decode_next(self):
        """Decode the next ticket, in C if that can, else by `read`."""
        cdef uint32_t cell
        cdef int k = self.ring.find(self.ordered)
        if k < 0:
            return self.read()
        cell = self.ring.outstanding_cell(k)
        token = cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word)
        try:
            batch = self.decode(cell, True)
        except MemoryError:
            raise
        except Exception as error:
            return token, cell, None, error
        return self.read() if batch is UNREAD else (token, cell, batch, None)


cdef class BatchIterator:
    """An iterator over the batches of an epoch.

    Parameters
    ----------
    run : object
        `present` is a number: when it changes, this iterator ends. `turn` is a lock, held while Python
        code may run. `asked` is set when this iterator first takes the lock.
    consumer : Consumer or None
        None: there is no ring.
    following : callable
        Returns the next batch.
    """

    cdef readonly object run
    cdef readonly object present
    cdef object following
    cdef Consumer consumer
    cdef bint asked

    def __cinit__(self, run, Consumer consumer, following, *args):
        self.run, self.present, self.following = run, run.present, following
        self.consumer = consumer

    def __iter__(self):
        return self

    def __next__(self):
        if self.consumer is not None and self.consumer.alone and self.run.present == self.present:
            batch = self.consumer.step()
            if batch is not None:
                return batch
        turn = self.run.turn
        turn.acquire()
        try:
            if self.run.present != self.present:
                raise InterruptedError(
                    "this iterator was interrupted: the manager was started or finished, or a "
                    "newer iterator began; call iter() on the manager again")
            if not self.asked:
                self.asked = self.run.asked = True
            return self.following()
        finally:
            turn.release()


# ── the trainer's end of a stream's ring ───────────────────────────────────────────────────

cdef enum:
    ITEMS = 0           # what a ticket asks for; see producer.py
    BEGIN = 1
    CALL = 2
    REQUEST_WORDS = 6   # where a request lies: slot, bytes committed, record
    # A cell's words, besides two requests; see producer.py.
    STREAM_SINCE = 12   # when the worker began the present item
    STREAM_NS = 13      # how long those of an answer took
    STREAM_MADE = 14    # how many there are, and flags
    STREAM_KEY = 15     # how many ints the key has; or one of these:
    NO_KEY = -1
    KEY_IN_REQUEST = -2
    STREAM_KEYS = 16    # the ints

cdef uint64_t TICKET_BYTES = 1 << 16    # what a ticket of several items should take at most
cdef uint64_t TICKET_NS = 5_000_000     # and how long it should
cdef uint64_t UNKNOWN_PACE = 0xFFFFFFFF
cdef uint64_t TICKETS = <uint64_t>1 << 40

@cython.final
@cython.no_gc
cdef class Request:
    """Data for a worker, in a slot that is taken for as long as this object exists.

    Parameters
    ----------
    slots : Slots

    Attributes
    ----------
    slot : int
        The lowest one that was free; -1: there was none.
    """

    cdef Slots slots
    cdef readonly Py_ssize_t slot
    cdef int64_t words[REQUEST_WORDS]

    def __cinit__(self, Slots slots not None):
        memset(self.words, 0, sizeof(self.words))
        self.slots = slots
        self.slot = slots.find_fit()
        if self.slot >= 0:
            slots.occupy(self.slot)

    def __dealloc__(self):
        if self.slot >= 0:
            cseq_store_rel_u8(&self.slots.at(self.slot).state, FREE)

    def locate(self, uint64_t capacity, record):
        """Say where in the slot it lies: of how many committed bytes, and its `codec.Record`."""
        cdef int k
        self.slots.resize(self.slot, capacity)
        self.words[0], self.words[1] = self.slot, <int64_t>capacity
        for k in range(4):
            self.words[2 + k] = record[k]


@cython.final
cdef class StreamConsumer:
    """The trainer's end of one worker's ring: asks for items ahead, and takes them out.

    The ring is a queue: tickets of an epoch are in the `outstanding` cells before `next_cell`, and
    leave it oldest first, or (given up) all together. In an epoch of keys, `ItemReader` posts the
    tickets, each for one item; an exception of the producer is an answer then, and ends nothing. A
    ticket leaves as one of a batch does::

        peek     the oldest ticket is READY; nothing changes
        decode   make its items from what lies in its slot; may call anything, may be interrupted
        commit   free cell and slot, move the items to the ready queue, count them: C alone

    And so does an item: once it is the first of the ready queue, and more have been asked for, it is
    handed out with all that counts it in one step (`ItemReader`).

    Parameters
    ----------
    ring : Ring
    slots : Slots
    read : callable
        ``read(consumer)`` waits for the oldest ticket and decodes it: ``(token, items, error, failed,
        ended, nbytes, ns)``. `token` is that of `peek`; `error` is what was raised behind the items,
        or None, and `failed` says so; `ended`: nothing follows; they took so many bytes, and so long.
        None: a signal handler has taken that ticket out.
    extend : callable
        Makes the lowest free slot fit, or more slots.
    number : int
        The worker's.
    prefetch : int
        The most items that are asked for, being made, or ready.
    depth : int
        The most tickets that ask for them.
    most : int
        The most items of a ticket.
    small : tuple, optional
        ``(mapped, reader, most)``: an item of at most `most` bytes that has a ticket to itself, and a
        structure that the `Reader` knows, is decoded in C. `mapped` has the `Mapping` of each slot.

    Attributes
    ----------
    over : bool
        Nothing more comes out of the ring.
    failed : str
        What has ended the stream, if an exception has.
    names : list of str
        What the calls in the ring's cells are.
    tickets, items, nbytes : int
        Taken out of the ring so far.
    """

    cdef readonly Ring ring
    cdef readonly uint32_t number
    cdef Slots slots
    cdef object read, extend
    cdef dict mapped
    cdef Reader reader
    cdef uint64_t small
    cdef uint32_t depth
    cdef uint64_t prefetch, most
    # Tickets.
    cdef uint32_t round, next_cell, outstanding
    cdef uint64_t ticket            # number of the next one
    cdef int calling                # the cell of the call that is under way; -1: none
    cdef list assignments, calls    # by cell: the `Request`s that its ticket refers to
    cdef readonly list names
    # The epoch.
    cdef uint64_t epoch
    cdef readonly bint keyed        # its items are named by keys
    cdef Request assignment
    cdef readonly bint over
    cdef uint64_t start             # the next item to ask for
    cdef uint64_t asked             # items in tickets
    cdef uint64_t unwoken           # those of them that were asked for since the worker was woken
    cdef list ready
    cdef Py_ssize_t at              # of the ready items, the next one
    cdef object error               # to be raised behind them
    cdef readonly str failed
    # How many items the next ticket asks for.
    cdef uint64_t count
    cdef uint64_t pace              # ns that an item of the last ticket took
    cdef bint quick                 # so little that waking a worker takes long beside it
    cdef readonly uint64_t tickets, items, nbytes

    def __cinit__(self, Ring ring not None, Slots slots not None, read, extend, *, uint32_t number,
                  uint64_t prefetch, uint32_t depth, uint64_t most, small=None):
        if small is not None:
            self.mapped, self.reader, self.small = small
        self.ring, self.slots, self.read, self.extend = ring, slots, read, extend
        self.number, self.prefetch, self.depth, self.most = number, prefetch, depth, most
        self.round = cseq_ring_round(ring.r)
        self.calling = -1
        self.assignments = [None] * ring.r.capacity
        self.calls = [None] * ring.r.capacity
        self.names = [""] * ring.r.capacity
        self.over = True
        self.ready = []
        self.failed = ""
        self.count = 1
        self.pace = UNKNOWN_PACE

    @property
    def received(self):
        """Items of this epoch that have come out of the ring."""
        return self.start - self.asked

    @property
    def delivered(self):
        """Items of this epoch that were returned to the caller, or raised."""
        return self.start - self.asked - self.waiting()

    def taken_slots(self):
        """The slots of its tickets, and of the requests that they refer to."""
        cdef uint32_t c
        cdef set found = set()
        requests = {self.assignment, *self.assignments, *self.calls} - {None}
        for c in range(self.ring.r.capacity):
            if cseq_ring_state(self.ring.r, c) != CSEQ_FREE:
                found.add(cseq_ring_cell(self.ring.r, c).slot)
        return found | {request.slot for request in requests}

    # -- tickets

    cdef uint32_t cell_before(self, uint32_t k) noexcept:
        """The cell of the queue that is so many before the next one to post in."""
        return (self.next_cell + self.round - k) % self.round

    cdef void post(self, uint32_t cell, uint64_t kind, uint64_t count, uint64_t start,
                   Py_ssize_t slot, key):
        """Post a ticket in a free cell, with a free slot for the answer.

        `key`: what is called, or names the item: a `Request`, or int64 in a `Block`. None: nothing is.
        """
        cdef Ring ring = self.ring
        cdef int64_t* words = cseq_ring_indices(ring.r, cell)
        cdef Request request = None
        cdef Block ints
        self.slots.occupy(slot)
        words[STREAM_KEY] = NO_KEY
        if self.assignment is not None:
            memcpy(words + REQUEST_WORDS, self.assignment.words, sizeof(self.assignment.words))
        if type(key) is Block:
            ints = <Block>key
            words[STREAM_KEY] = ints.size // 8
            memcpy(words + STREAM_KEYS, ints.data, <size_t>ints.size)
        elif key is not None:
            request = <Request>key
            words[STREAM_KEY] = KEY_IN_REQUEST
            memcpy(words, request.words, sizeof(request.words))
        self.assignments[cell], self.calls[cell] = self.assignment, request
        ring.fill(cell, self.epoch, kind, <uint32_t>count, start, <uint32_t>slot,
                  self.slots.at(slot).nbytes)
        cseq_ring_post(ring.r, cell, self.ticket)
        self.ticket = (self.ticket + 1) % TICKETS
        ring.unwoken += 1

    cdef void append(self, uint64_t kind, uint64_t count, uint64_t start, Py_ssize_t slot, key):
        """Post a ticket behind the others."""
        self.post(self.next_cell, kind, count, start, slot, key)
        self.next_cell = (self.next_cell + 1) % self.round
        self.outstanding += 1
        self.start += count
        self.asked += count
        self.unwoken += count

    cdef Py_ssize_t find_slot(self) except -2:
        """A free slot for the answer to the next ticket; -1: the state has changed, try again."""
        cdef Py_ssize_t slot
        self.sweep()
        if cseq_ring_state(self.ring.r, self.next_cell) != CSEQ_FREE:
            raise RuntimeError("the ring of this stream is full, which it never should be")
        slot = self.slots.find_fit()
        if slot < 0:
            self.extend()
        return slot

    cdef int leave(self, uint32_t cell) except -1:
        """Release the slot and the requests of a cell that is the trainer's, or free."""
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        self.slots.settle(c)
        if self.slots.vacate(c.slot):
            self.slots.release(c.slot)
        self.assignments[cell] = self.calls[cell] = None
        cseq_ring_retire(self.ring.r, cell)
        return 0

    cdef int leave_oldest(self) except -1:
        """Take the oldest ticket, which is READY, out."""
        self.leave(self.cell_before(self.outstanding))
        self.outstanding -= 1
        return 0

    cdef int give_up(self) except -1:
        """End the stream for this epoch: take back the tickets that the worker has not claimed."""
        cdef Ring ring = self.ring
        cdef uint32_t cell
        self.over = True
        self.start -= self.asked
        self.asked = self.unwoken = 0
        while self.outstanding:
            cell = self.cell_before(1)
            if not cseq_ring_retract(ring.r, cell):
                break
            self.next_cell = cell
            self.outstanding -= 1
            self.leave(cell)
        while self.outstanding:
            ring.abandoned[ring.abandoned_count] = self.cell_before(self.outstanding)
            ring.abandoned_count += 1
            self.outstanding -= 1
        return 0

    cdef void give_up_call(self) noexcept:
        """Give up the call that is under way."""
        if self.calling >= 0:
            self.ring.abandoned[self.ring.abandoned_count] = <uint32_t>self.calling
            self.ring.abandoned_count += 1
            self.calling = -1

    cdef int sweep(self) except -1:
        """Free the cells of given-up tickets: those that are answered, and calls not yet claimed."""
        cdef Ring ring = self.ring
        cdef uint32_t k = 0, cell
        while k < ring.abandoned_count:
            cell = ring.abandoned[k]
            if not (cseq_ring_ready(ring.r, cell) if cell < self.round
                    else cseq_ring_cancel(ring.r, cell)):
                k += 1
                continue
            ring.abandoned_count -= 1
            ring.abandoned[k] = ring.abandoned[ring.abandoned_count]
            self.leave(cell)
        return 0

    cpdef void wake(self) noexcept:
        """Wake the worker if tickets were posted since it was last woken."""
        self.unwoken = 0
        if self.ring.unwoken:
            self.ring.wake()

    cdef bint has_room(self, Py_ssize_t leaving) noexcept:
        """Whether to ask for more items, if `leaving` of the ready ones are about to be taken."""
        cdef uint64_t ready = <uint64_t>(len(self.ready) - self.at - leaving)
        return (not self.over and not self.keyed and self.outstanding <= self.depth
                and ready + self.asked + self.count <= self.prefetch)

    cdef int request(self, Py_ssize_t leaving) except -1:
        """Ask for items ahead."""
        cdef Py_ssize_t slot
        while self.has_room(leaving):
            slot = self.find_slot()
            if slot >= 0:
                self.append(ITEMS, self.count, self.start, slot, None)
        self.wake_in_time()
        return 0

    cdef void wake_in_time(self) noexcept:
        """Wake the worker if enough items were asked for.

        Waking a worker costs more than a small item does. It sleeps only when all items asked for are
        ready, so it is woken when half of `prefetch` is asked for again.
        """
        if self.unwoken and (not self.quick or 2 * self.unwoken >= self.prefetch):
            self.wake()

    # -- of keys

    cdef uint64_t waiting(self) noexcept:
        """Items, and exceptions of an epoch of keys, that have come out of the ring and wait."""
        return <uint64_t>(len(self.ready) - self.at) + (self.keyed and self.error is not None)

    cdef bint is_answered(self) noexcept:
        """Whether `prepare` does not wait for the worker."""
        return (self.waiting() or self.error is not None or self.over or not self.outstanding
                or cseq_ring_ready(self.ring.r, self.cell_before(self.outstanding)))

    cdef uint32_t unanswered(self) noexcept:
        """Tickets that the worker has not answered."""
        cdef uint32_t count = 0
        while (count < self.outstanding
               and not cseq_ring_ready(self.ring.r, self.cell_before(count + 1))):
            count += 1
        return count

    cdef int post_key(self, key, uint64_t number, Py_ssize_t slot) except -1:
        """Ask for the item of a key, with a free slot for it."""
        self.sweep()
        self.append(ITEMS, 1, number, slot, key)
        self.wake_in_time()
        return 0

    # -- the epoch and calls

    def end(self):
        """Give up the epoch, and the call that is under way."""
        before = self.ready, self.error  # their destructors may run code: after all else is done
        cdef list ready = []
        self.give_up_call()
        self.give_up()
        self.ready, self.at, self.error, self.assignment = ready, 0, None, None
        self.epoch = 0
        self.sweep()

    def begin(self, uint64_t epoch, Request assignment not None, str name not None,
              bint keyed=False):
        """Begin an epoch, the last one given up: post a ticket to say so, and ask for items.

        If the epoch is `keyed`, nothing is posted: a worker begins it when it sees a ticket of it.

        Returns
        -------
        tuple of int or None
            Cell and number of the ticket whose answer is the worker's, if there is one.
        """
        cdef Py_ssize_t slot = -1
        while not keyed and slot < 0:
            slot = self.find_slot()
        cell, ticket = self.next_cell, self.ticket
        self.epoch, self.assignment, self.keyed = epoch, assignment, keyed
        self.start = 0
        self.failed = ""
        self.over = False
        if keyed:
            return None
        self.names[cell] = name
        self.append(BEGIN, 0, 0, slot, None)
        self.request(0)
        self.wake()
        return cell, ticket

    def call(self, Request call not None, str name not None):
        """Post a call, which comes before all items that the worker has not claimed; one at a time.

        Returns
        -------
        tuple of int
            Cell and number of its ticket.
        """
        cdef Py_ssize_t slot
        cdef uint32_t cell
        while True:
            self.give_up_call()
            self.sweep()
            slot = self.slots.find_fit()
            if slot >= 0:
                break
            self.extend()
        # One cell may be that of a call which was given up, and which the worker is busy with.
        cell = self.round
        while cseq_ring_state(self.ring.r, cell) != CSEQ_FREE:
            cell += 1
            if cell == self.ring.r.capacity:
                raise RuntimeError("a worker is busy with two calls, which it never should be")
        self.names[cell] = name
        ticket = self.ticket
        self.post(cell, CALL, 0, 0, slot, call)
        self.calling = <int>cell
        self.wake()
        return cell, ticket

    def oldest(self):
        """Cell and number of the oldest ticket in the queue; None: there is none."""
        return self.named(self.outstanding) if self.outstanding else None

    def newest(self):
        """Cell and number of the newest ticket in the queue; None: there is none."""
        return self.named(1) if self.outstanding else None

    cdef tuple named(self, uint32_t k):
        cdef uint32_t cell = self.cell_before(k)
        return cell, CSEQ_TICKET(cseq_load_acq_u64(&cseq_ring_cell(self.ring.r, cell).word))

    def peek(self, uint32_t cell, uint64_t ticket):
        """What a worker has answered to a ticket. Nothing changes.

        Returns
        -------
        tuple or None
            (token, cell, status, slot, capacity, record), the record with two more numbers: the ns
            that it took, and how many items there are, and flags. None: it has not answered, or the
            ticket is not in the ring.
        """
        cdef cseq_cell* c = self.ring.at(cell)
        cdef uint64_t word = cseq_load_acq_u64(&c.word)
        cdef uint64_t* f = c.record
        cdef int64_t* words = cseq_ring_indices(self.ring.r, cell)
        if CSEQ_STATE(word) != CSEQ_READY or CSEQ_TICKET(word) != ticket:
            return None
        return (word, cell, c.status, c.slot, c.capacity,
                (f[0], f[1], f[2], f[3], words[STREAM_NS], words[STREAM_MADE]))

    def holds(self, uint32_t cell, uint64_t ticket):
        """Whether a ticket is still in the ring."""
        cdef uint64_t word = cseq_load_acq_u64(&self.ring.at(cell).word)
        return CSEQ_STATE(word) != CSEQ_FREE and CSEQ_TICKET(word) == ticket

    def take_reply(self, uint32_t cell, uint64_t token, str failed not None):
        """Take the answer to a call or a beginning out of the ring; see `peek`.

        `failed`: what was raised instead, which ends the stream, unless it is of keys.
        """
        if cseq_load_acq_u64(&self.ring.at(cell).word) != token:
            return
        if <int>cell == self.calling:
            self.calling = -1
            self.leave(cell)
        elif self.outstanding and cell == self.cell_before(self.outstanding):
            self.leave_oldest()
        if failed and not self.keyed:
            self.failed = failed
            self.give_up()
        self.sweep()

    # -- items

    cdef int receive(self) except -1:
        """Move the items of the oldest ticket to the ready queue, which is empty."""
        cdef uint64_t token
        if not self.outstanding:
            self.request(0)
            return 0
        found = self.decode_one() or self.read(self)
        if found is None:
            return 0
        token, items, error, failed, ended, nbytes, ns = found
        # What was called may have called anything: is it the oldest ticket still?
        if (self.outstanding and token == cseq_load_acq_u64(
                &cseq_ring_cell(self.ring.r, self.cell_before(self.outstanding)).word)):
            self.commit(items, error, failed, ended, nbytes, ns)
        return 0

    cdef tuple decode_one(self):
        """What `read` returns for the oldest ticket, if it has one small item of a known structure."""
        cdef uint32_t cell = self.cell_before(self.outstanding)
        cdef cseq_cell* c = cseq_ring_cell(self.ring.r, cell)
        cdef uint64_t token = cseq_load_acq_u64(&c.word)
        cdef uint64_t* f = c.record
        cdef int64_t* words = cseq_ring_indices(self.ring.r, cell)
        cdef uint64_t used = f[0] + f[1] + f[2] + f[3]
        cdef Mapping slot
        cdef Plan plan
        if (self.mapped is None or CSEQ_STATE(token) != CSEQ_READY or c.batch != ITEMS or c.count != 1
                or c.status or words[STREAM_MADE] != 1 << 2 or not f[1] or f[3] or used > self.small
                or c.capacity > MOST_KEPT):  # the arena counts what is in large slots, to shrink them
            return None
        slot = self.mapped.get(c.slot)
        if slot is None or <uint64_t>slot.size < c.capacity:
            return None
        plan = self.reader.find(slot, f)
        if plan is None:
            return None
        item = plan.read(slot, f, True, None, None)
        return token, [item], None, "", False, used, words[STREAM_NS]

    cdef int commit(self, list items, error, str failed, bint ended, uint64_t nbytes,
                    uint64_t ns) except -1:
        """Take the oldest ticket out of the ring; its items are ready."""
        cdef uint64_t count = cseq_ring_cell(self.ring.r, self.cell_before(self.outstanding)).count
        cdef uint64_t made = count if self.keyed else <uint64_t>len(items)
        self.leave_oldest()
        self.ready, self.at, self.error = items, 0, error
        self.asked -= count
        self.start -= count - made
        self.tickets += 1
        self.items += <uint64_t>len(items)
        self.nbytes += nbytes
        if ended:
            self.failed = failed
            self.give_up()
        else:
            self.adapt(made, nbytes, ns)
        return 0

    cdef void adapt(self, uint64_t made, uint64_t nbytes, uint64_t ns) noexcept:
        """Choose how many items the next ticket asks for, from how the last two went.

        The quicker of them counts, since the worker may have been preempted during the other.
        """
        cdef uint64_t before = self.pace
        cdef uint64_t fit
        self.pace = max(ns // made, <uint64_t>1) if made else UNKNOWN_PACE
        fit = TICKET_NS // min(before, self.pace)
        self.quick = fit > 0
        fit = min(fit, TICKET_BYTES * made // max(nbytes, <uint64_t>1))
        self.count = max(<uint64_t>1, min(min(2 * self.count, fit), self.most))

    cdef bint prepare(self) except -1:
        """Wait until an item is ready, and ask for more of them. False: there are no more.

        May run any code, but none between finding an item and the return.

        Raises
        ------
        BaseException
            What the producer has raised, once.
        """
        while True:
            if self.at < len(self.ready):
                if self.has_room(1):
                    self.request(1)
                PyErr_CheckSignals()
                if self.at < len(self.ready):
                    return True
            elif self.error is not None:
                if self.keyed:  # taken out as an item is
                    PyErr_CheckSignals()
                    if self.error is not None:
                        return True
                    continue
                error, self.error = self.error, None
                raise error
            elif self.over or (self.keyed and not self.outstanding):
                return False
            else:
                self.receive()

    cdef object pop(self):
        """Take the first ready item out."""
        item = self.ready[self.at]
        self.ready[self.at] = None
        self.at += 1
        return item


cdef Block ints_of(key, Py_ssize_t most):
    """The numbers of an exact list of exact ints within int64, `most` of them at most; else None."""
    cdef Py_ssize_t k
    cdef int64_t* words
    cdef int overflow = 0
    cdef Block block
    cdef tuple numbers  # another thread may change the list
    if type(key) is not list:
        return None
    numbers = tuple(key)
    if PyTuple_GET_SIZE(numbers) > most:
        return None
    block = Block(8 * PyTuple_GET_SIZE(numbers))
    words = <int64_t*>block.data
    for k in range(PyTuple_GET_SIZE(numbers)):
        if type(<object>PyTuple_GET_ITEM(numbers, k)) is not int:
            return None
        words[k] = PyLong_AsLongLongAndOverflow(<object>PyTuple_GET_ITEM(numbers, k), &overflow)
        if overflow:
            return None
    return block


@cython.final
cdef class ItemReader:
    """Returns items, of one worker or of all; draws the keys of an epoch that has keys, and posts them.

    No Python code runs between the step that takes an item out, with the turn, the number of items and
    the next key's ticket, and the return to the caller of `next`, `commit` or an `ItemIterator`.

    `line` has the workers in the order in which items are taken from them: without keys each worker
    that has more items once, with keys a worker for every ticket of its. Ordered, the first of them is
    waited for; else the first that has an item is taken, and set at the beginning.

    A key goes through three steps::

        draw     the iterator's next key, kept in `key`: what follows may be interrupted
        write    into `drawn`: its ints, or a `Request`
        post     to a worker, with the step that takes an item out: C alone

    Parameters
    ----------
    run : object
        `present` is a number: when it changes, the epoch ends. `turn` is a lock.
    consumers : list of StreamConsumer
    write : callable
        ``write(key, number)`` → `Request`.
    wait : callable
        ``wait(consumers)`` sleeps until the oldest ticket of one of them is answered.
    depth : int
        The most keys of a worker that are posted, being made, or ready.

    Attributes
    ----------
    present : int
        The run's `present` when the epoch was begun; -1: none is under way.
    taken : int
        Items that were returned in this epoch, or (those of keys) raised.
    """

    cdef readonly object run
    cdef readonly object present
    cdef readonly uint64_t taken
    cdef list consumers
    cdef object write, wait
    cdef uint32_t depth
    cdef bint ordered
    cdef uint32_t* line             # numbers of workers
    cdef Py_ssize_t length          # of `line`
    # The keys.
    cdef bint keyed, free
    cdef object keys                # the iterator; None: there is none, or it has ended
    cdef object drawing             # the iterator whose code runs
    cdef object key                 # drawn and not yet written; UNREAD: there is none
    cdef list drawn                 # `Block`s and `Request`s, to be posted
    cdef object error               # to be raised behind the items of all keys
    cdef uint64_t ahead             # keys that are drawn ahead of what was taken
    cdef uint64_t each              # the most of one worker that are posted and not taken
    cdef uint64_t posted
    cdef Py_ssize_t latest          # the worker of the key that was posted last

    def __cinit__(self, run, list consumers not None, write, wait, *, uint32_t depth):
        cdef size_t room = 1
        cdef StreamConsumer consumer
        self.run, self.consumers, self.write, self.wait = run, consumers, write, wait
        self.depth = depth
        for consumer in consumers:
            room += consumer.ring.r.capacity
        self.line = <uint32_t*>PyMem_RawCalloc(room, 4)
        if self.line == NULL:
            raise MemoryError(f"no memory for {len(consumers)} streams")
        self.present = -1
        self.key = UNREAD
        self.drawn = []

    def __dealloc__(self):
        PyMem_RawFree(self.line)

    cdef inline StreamConsumer at(self, Py_ssize_t k):
        """The consumer at a place of the line."""
        return <StreamConsumer>PyList_GET_ITEM(self.consumers, self.line[k])

    # -- the epoch

    def end(self):
        """No epoch is under way."""
        before = self.keys, self.key, self.drawn, self.error  # their destructors may run code
        cdef list drawn = []
        self.present = -1
        self.keys, self.key, self.drawn, self.error = None, UNREAD, drawn, None
        self.length = 0

    def begin(self, keys=None, *, bint ordered=True, bint free=False):
        """Set up an epoch, once the workers are told to begin it; `open` lets it be read.

        Parameters
        ----------
        keys : iterator, optional
        ordered : bool
            Items come in the order of the keys, or of the workers in turn; else as they are ready.
        free : bool
            A key goes to the worker that has the fewest keys to work on; else to the workers in turn.

        Raises
        ------
        BaseException
            What the iterator has raised, or the writing of a key.
        """
        cdef Py_ssize_t k
        cdef StreamConsumer first = self.consumers[0]
        cdef uint64_t count = <uint64_t>len(self.consumers)
        self.end()
        self.taken = self.posted = 0
        self.ordered, self.free, self.keyed = ordered, free, keys is not None
        self.keys = keys
        self.latest = -1
        self.ahead = min(first.prefetch, TICKETS) * count
        self.each = min(first.prefetch, <uint64_t>self.depth)
        if keys is None:
            for k in range(len(self.consumers)):
                self.line[k] = <uint32_t>k
            self.length = len(self.consumers)
            return
        while self.fetch(0):
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.post(True)
        for consumer in self.consumers:
            (<StreamConsumer>consumer).wake()

    def open(self, present):
        """The workers have begun the epoch."""
        self.present = present

    cdef int check(self, present) except -1:
        """Raise InterruptedError if the epoch is not under way."""
        if self.run.present != present:
            raise InterruptedError("no epoch is under way: none was begun, or it was interrupted; "
                                   "call begin()")
        return 0

    # -- keys

    cdef bint fetch(self, uint64_t leaving) except -1:
        """Draw or write a key, or make a slot fit, if `leaving` items are about to be taken.

        True: something was done, so any code may have run. False: nothing is to be done, and a drawn
        key can be posted.
        """
        cdef Py_ssize_t known = (<Py_ssize_t>len(self.drawn)) + (self.key is not UNREAD)
        if self.key is not UNREAD:
            self.put()
        elif (self.keys is not None and self.drawing is not self.keys
                and self.posted + <uint64_t>known < self.ahead + self.taken + leaving):
            self.draw()
        elif self.drawn and (<StreamConsumer>self.consumers[0]).slots.find_fit() < 0:
            (<StreamConsumer>self.consumers[0]).extend()
        else:
            return False
        return True

    cdef int draw(self) except -1:
        """Draw a key. What the iterator raises is raised behind the items of the keys before.

        What is no `Exception`, as of a signal handler, comes at once. The iterator is asked again
        afterwards; if it has ended by that, as a generator has, this is an error.
        """
        keys, before = self.keys, self.drawing
        self.drawing = keys
        try:
            key = next(keys)
        except StopIteration:
            if keys is self.keys:
                self.keys = None
        except Exception as error:
            if keys is self.keys:
                self.keys, self.error = None, error
        except BaseException as cause:
            if keys is self.keys:
                self.error = RuntimeError(
                    f"the iterator of keys was interrupted ({type(cause).__name__}) and has ended: "
                    "the rest of the epoch may be missing")
            raise
        else:
            if keys is self.keys:  # no handler has begun another epoch
                self.key, self.error = key, None
        finally:
            self.drawing = before
        return 0

    cdef int put(self) except -1:
        """Write the key that was drawn."""
        cdef StreamConsumer first = self.consumers[0]
        cdef Py_ssize_t most = <Py_ssize_t>first.ring.r.batch_size - STREAM_KEYS
        cdef list drawn = self.drawn
        cdef uint64_t number = self.posted + <uint64_t>len(drawn)
        unwritten = None
        written = ints_of(self.key, most)
        if written is None:
            try:
                written = self.write(self.key, number)
            except TypeError as error:  # it cannot be pickled
                unwritten = error
        # A signal handler may have written it, or begun another epoch.
        if drawn is not self.drawn or number != self.posted + <uint64_t>len(drawn):
            return 0
        if unwritten is None:
            drawn.append(written)
        else:
            self.keys, self.error = None, unwritten
        self.key = UNREAD
        return 0

    cdef Py_ssize_t choose(self, bint in_turn) noexcept:
        """The worker that the next key goes to; -1: it has no room for it."""
        cdef Py_ssize_t count = len(self.consumers)
        cdef Py_ssize_t k, worker
        cdef Py_ssize_t chosen = -1
        cdef uint32_t fewest = 0
        cdef uint32_t working
        cdef StreamConsumer consumer
        if self.free and not in_turn:
            for k in range(count):
                consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, k)
                working = consumer.unanswered()
                if consumer.outstanding < self.depth and (chosen < 0 or working < fewest):
                    chosen, fewest = k, working
            return chosen
        for k in range(1 if self.ordered or in_turn else count):
            worker = (self.latest + 1 + k) % count
            consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, worker)
            if consumer.asked + consumer.waiting() < self.each:
                return worker
        return -1

    cdef int post(self, bint in_turn) except -1:
        """Post the keys that were drawn, as far as their workers have room and there are slots."""
        cdef Py_ssize_t worker, slot
        cdef StreamConsumer consumer
        while self.drawn:
            worker = self.choose(in_turn)
            if worker < 0:
                break
            consumer = <StreamConsumer>PyList_GET_ITEM(self.consumers, worker)
            slot = consumer.slots.find_fit()
            if slot < 0:
                break
            consumer.post_key(<object>PyList_GET_ITEM(self.drawn, 0), self.posted, slot)
            del self.drawn[0]
            self.latest = worker
            self.posted += 1
            self.line[self.length] = <uint32_t>worker
            self.length += 1
        return 0

    # -- items

    def next(self, Py_ssize_t worker):
        """Return the next item of a worker's stream, in an epoch without keys.

        Raises
        ------
        StopIteration
            There is none.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        cdef StreamConsumer consumer
        turn = self.run.turn
        turn.acquire()
        try:
            while True:
                self.check(self.present)
                if not 0 <= worker < len(self.consumers):
                    raise IndexError(f"worker={worker} is not one of {len(self.consumers)}")
                if self.keyed:
                    raise RuntimeError("the items of keys do not come worker by worker: iterate, or "
                                       "use peek() and commit()")
                consumer = self.consumers[worker]
                if not consumer.prepare():
                    raise StopIteration
                if self.run.present == self.present:
                    self.taken += 1
                    return consumer.pop()
        finally:
            turn.release()

    cdef Py_ssize_t find_answered(self) noexcept:
        """Where in the line the first worker is that has an item, or has none any more; -1: nowhere."""
        cdef Py_ssize_t k
        for k in range(self.length):
            if self.at(k).is_answered():
                return k
        return -1

    cdef void leave(self, Py_ssize_t k) noexcept:
        """Remove a worker from the line."""
        self.length -= 1
        memmove(self.line + k, self.line + k + 1, 4 * <size_t>(self.length - k))

    cdef StreamConsumer find(self, present, bint strict):
        """The consumer at the beginning of the line, with an item ready; None: there are no more.

        `strict`: raise RuntimeError for a stream that an exception has ended.
        """
        cdef StreamConsumer consumer
        cdef Py_ssize_t k
        cdef uint32_t worker
        cdef bint found
        while True:
            self.check(present)
            if not self.length:
                if self.keyed and (self.fetch(0) or self.drawn):
                    self.post(False)
                    continue
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
                return None
            k = 0 if self.ordered else self.find_answered()
            if k < 0:
                self.wait([self.consumers[number] for number in self.waited_for()])
                continue
            worker = self.line[k]
            memmove(self.line + 1, self.line, 4 * <size_t>k)
            self.line[0] = worker
            consumer = self.at(0)
            found = consumer.prepare()
            if self.run.present != present or not self.length or consumer is not self.at(0):
                continue  # a signal handler has taken some, or begun an epoch
            if not found:
                if self.keyed:
                    continue  # the same
                if strict and consumer.failed:
                    raise RuntimeError(f"{consumer.failed}; begin another epoch")
                self.leave(0)
            elif not self.keyed or not self.fetch(1):
                return consumer

    cdef set waited_for(self):
        """The workers in the line."""
        return {self.line[k] for k in range(self.length)}

    cdef object take(self, StreamConsumer consumer):
        """Take out the item of the consumer at the beginning of the line; post the next key."""
        cdef uint32_t worker = self.line[0]
        item = error = None
        if consumer.at < len(consumer.ready):
            item = consumer.pop()
        else:
            error, consumer.error = consumer.error, None
        self.taken += 1
        self.leave(0)
        if self.keyed:
            self.post(False)
        else:
            self.line[self.length] = worker
            self.length += 1
        if error is not None:
            raise error
        return item

    def peek(self):
        """Return the item whose turn it is, and its number in the epoch. Nothing changes.

        An exception of the producer is taken out as it is raised.

        Returns
        -------
        tuple
            (number, item). `commit` takes the item out.

        Raises
        ------
        StopIteration
            There are no more.
        RuntimeError
            An exception of the producer, raised before, has ended a stream.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        cdef StreamConsumer consumer
        turn = self.run.turn
        turn.acquire()
        try:
            consumer = self.find(self.present, True)
            if consumer is None:
                raise StopIteration
            if consumer.at == len(consumer.ready):
                self.take(consumer)
            return self.taken, consumer.ready[consumer.at]
        finally:
            turn.release()

    def commit(self, uint64_t number):
        """Take the item out that `peek` has returned with this number; nothing if that was done."""
        cdef StreamConsumer consumer
        turn = self.run.turn
        turn.acquire()
        try:
            while True:
                self.check(self.present)
                if number != self.taken:
                    return
                if not self.keyed or not self.fetch(1):
                    break
            consumer = self.at(0) if self.length else None
            if consumer is None or consumer.at == len(consumer.ready):
                raise RuntimeError(f"item {number} was not peeked at")
            item = self.take(consumer)  # its destructor may run code: after all else is done
        finally:
            turn.release()


@cython.final
cdef class ItemIterator:
    """An iterator over the items of all workers in turn, leaving out those that have no more.

    Parameters
    ----------
    reader : ItemReader
    *keep
        Objects that live for as long as the iterator.
    """

    cdef readonly ItemReader reader
    cdef readonly object present
    cdef object keep

    def __cinit__(self, ItemReader reader not None, *keep):
        reader.check(reader.present)
        self.reader, self.present, self.keep = reader, reader.present, keep

    def __iter__(self):
        return self

    def __next__(self):
        cdef StreamConsumer consumer
        turn = self.reader.run.turn
        turn.acquire()
        try:
            consumer = self.reader.find(self.present, False)
            if consumer is None:
                raise StopIteration
            return self.reader.take(consumer)
        finally:
            turn.release()


@cython.final
cdef class Solo:
    """A runner without a ring: makes one batch after the other, in its caller's thread.

    Parameters
    ----------
    sampler : Sampler
    desk : Desk
        Entered in `here` while a batch is made.
    here : Here
        Its attribute `desk` is the desk of the batch that is made in this thread.
    ticket : Ticket
        The present ticket, for the desk.
    convert : callable or None
        Applied to every batch.
    refuse : callable
        Called with an exception of the indexer; raises it, or leaves out the present batch.

    Attributes
    ----------
    indexer : object
    seeds : Seeds or None
        Seeds the global generators for each batch, and restores them after it.
    loaded : list
        Generators to be seeded: `seeds.loaded`.
    making : bool
        The indexer is at a batch.
    at : int
        The present batch, from 0.
    done : int
        Batches of this epoch up to the last one that was made.
    batches : int
        Batches of this epoch.
    made : int
        Batches, over all epochs.
    ended : bool
        The caller was told that the epoch is over.
    """

    cdef object sampler, desk, here, ticket, convert, refuse
    cdef Order order
    cdef uint64_t full, start, stride, size
    cdef public object indexer
    cdef public object seeds
    cdef public list loaded
    cdef readonly bint making
    cdef public uint64_t at
    cdef public uint64_t done
    cdef public uint64_t batches
    cdef readonly uint64_t made
    cdef readonly bint ended

    def __cinit__(self, sampler, desk, here, ticket, convert, refuse):
        self.sampler, self.order, self.convert = sampler, sampler.order, convert
        self.desk, self.here, self.ticket, self.refuse = desk, here, ticket, refuse

    def begin(self):
        """Go to the beginning of the sampler's epoch."""
        self.full, self.start, self.stride, self.size = self.sampler.cut
        self.at = self.done = 0
        self.ended = False
        self.batches = len(self.sampler)

    cdef object make(self):
        """Make the present batch; the next one is then the present one."""
        if self.at < self.full:
            indices = self.order.read(self.start + self.at * self.stride, self.size)
        else:
            indices = self.sampler.indices(self.at)
        if self.desk.drawn is not None or self.desk.ticket is not self.ticket:
            self.desk.sit(self.ticket)
        left = self.here.desk
        self.here.desk = self.desk
        try:
            batch = self.indexer[indices] if self.seeds is None else self.seeded(indices)
            if self.convert is not None:
                batch = self.convert(batch)
        finally:
            self.here.desk = left
        self.at += 1
        self.done = self.at
        self.made += 1
        return batch

    cdef object seeded(self, indices):
        """Call the indexer with the global generators seeded; restore them."""
        self.making = True
        try:
            if self.loaded:
                self.seeds.begin()
            return self.indexer[indices]
        finally:
            self.making = False
            if self.loaded:  # now: an import may have added one
                self.seeds.restore()

    def next(self):
        """Make the next batch. No signal handler runs between its counting and the caller.

        Raises
        ------
        StopIteration
            The epoch is over.
        """
        while self.at < self.batches:
            try:
                return self.make()
            except Exception as error:
                self.refuse(error)
        self.ended = True
        raise StopIteration


# ── a worker's slot ────────────────────────────────────────────────────────────────────────


cdef class Hand:
    """The part of a writer that is in C: its state for the present ticket, and writing by plans.

    `give` writes and publishes a batch that has the structure of one of the last four, in one call.
    `arena.Writer` has the rest.

    Attributes
    ----------
    memory : Memory
        The slot, from its beginning to `capacity`; another object when it has grown.
    used : int
        Bytes of the slot that are given out.
    capacity : int
        Bytes of the slot that are committed; the trainer has to learn it.
    loaned : bool
        Whether arrays in this slot may have been given out: whether `find` can find anything.
    watched : bool
        Whether large arrays were made for this batch: whether `learn` can learn anything.
    placement : Placement or None
        Makes numpy allocate large arrays of the indexer in the slot.
    aimed : Mapping or None
        Where numpy may place arrays of this ticket. Only while the worker has a spare, in case some
        are kept.
    mapped : dict of int to Mapping
        Slots' mappings. Every one made is kept for the slot's next ticket.
    older : list of Memory
        Mappings of the slot that were replaced during this ticket.
    slot : int
    cast : numpy.dtype or None
        What `give` casts numbers to.
    plans : list of Plan
        Those of the last batches, the latest first.
    """

    cdef public Memory memory
    cdef public Py_ssize_t used
    cdef public Py_ssize_t capacity
    cdef public bint loaned
    cdef public bint watched
    cdef public object placement
    cdef public object aimed
    cdef public dict mapped
    cdef public list older
    cdef public int64_t slot
    cdef public object cast
    cdef readonly list plans  # of the last batches of different structure, the latest first
    cdef int64_t* words  # room for a layout
    cdef Py_ssize_t room
    cdef uint64_t fields[4]  # the record of what was laid down last

    def __cinit__(self, *args):
        self.memory = Block(0)
        self.mapped = {}
        self.older = []
        self.slot = -1
        self.plans = []

    def __dealloc__(self):
        PyMem_RawFree(self.words)

    def remember(self, Plan plan not None):
        """Add a plan to those that `match` tries."""
        self.plans = [plan, *self.plans[:RECENT - 1]]

    cpdef tuple match(self, batch, cast):
        """Find the plan of a batch.

        Returns
        -------
        tuple or None
            (plan, arrays, objects): the leaves of the batch, `objects` None if there are none. Or None
            if no plan fits.
        """
        cdef Plan plan
        cdef list arrays, objects
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(self.plans)):
            plan = <Plan>PyList_GET_ITEM(self.plans, k)
            if plan.cast is not cast or not plan.fits:
                continue
            arrays = [None] * plan.leaf_count
            objects = [] if plan.objects else None
            if plan.match(batch, arrays, objects):
                if k:
                    self.plans.insert(0, self.plans.pop(k))
                return plan, arrays, objects
        return None

    cdef Py_ssize_t stay(self, int k, list arrays, Py_ssize_t base) except -2:
        """Where in the slot an array lies already, unless an earlier array does; else -1."""
        cdef Py_ssize_t at = self.find(arrays[k])
        cdef Py_ssize_t nbytes = cnp.PyArray_NBYTES(<cnp.ndarray>arrays[k])
        cdef Py_ssize_t other
        cdef int j
        cdef int64_t* word = self.words
        for j in range(k if at >= 0 else 0):
            other = word[0]
            word += 1 + cnp.PyArray_NDIM(<cnp.ndarray>arrays[j])
            if (other < base and at < other + cnp.PyArray_NBYTES(<cnp.ndarray>arrays[j])
                    and at + nbytes > other):
                return -1
        return at

    cdef int reserve(self, Py_ssize_t count) except -1:
        cdef int64_t* words
        if count > self.room:
            words = <int64_t*>PyMem_RawRealloc(self.words, 8 * count)
            if words == NULL:
                raise MemoryError(f"no memory for a layout of {count} numbers")
            self.words, self.room = words, count
        return 0

    def lay(self, Plan plan not None, list arrays not None, bytes pickled=None, list buffers=None):
        """Write a batch into the slot: what `match` has returned.

        Parameters
        ----------
        plan : Plan
        arrays : list of numpy.ndarray
            Its arrays, and what other leaves consist of. Those in this slot are not copied.
        pickled : bytes, optional
            Its other leaves.
        buffers : list of memoryview, optional
            Those of their bytes that are not in the pickle.

        Returns
        -------
        tuple of int
            See `codec.Record`.

        Raises
        ------
        MemoryError
            There is no room for it.
        """
        cdef uint64_t* f = self.fields
        self.lay_down(plan, arrays, pickled, buffers)
        return f[0], f[1], f[2], f[3]

    cdef int lay_down(self, Plan plan, list arrays, bytes pickled, list buffers) except -1:
        """`lay`; the record is in `fields`."""
        cdef Py_ssize_t base = self.place(0) if self.aimed is not None else aligned(self.used)
        cdef Py_ssize_t end = base
        cdef Py_ssize_t structure = len(plan.structure)
        cdef Py_ssize_t count = 0 if buffers is None else len(buffers)
        cdef Py_ssize_t layout = 8 * plan.words
        cdef Py_ssize_t objects = 0 if pickled is None else len(pickled) + 8 * (2 * count + 1)
        cdef Py_ssize_t at, nbytes
        cdef int64_t* word
        cdef int64_t* table
        cdef int k, i
        cdef Leaf* leaf
        cdef cnp.ndarray array
        cdef Memory memory
        self.reserve(plan.words + 2 * count + 1)
        word = self.words
        for k in range(plan.leaf_count):
            leaf = &plan.leaf[k]
            array = <cnp.ndarray>PyList_GET_ITEM(arrays, k)
            at = -1
            if self.loaned and not leaf.casts and (
                    cnp.PyArray_IS_C_CONTIGUOUS(array) or cnp.PyArray_IS_F_CONTIGUOUS(array)):
                at = self.stay(k, arrays, base)
            if at < 0:
                at = end
                end += aligned(leaf.itemsize * cnp.PyArray_SIZE(array))
            word[0] = at
            for i in range(leaf.nd):
                word[1 + i] = cnp.PyArray_DIM(array, i)
            word += 1 + leaf.nd
        table = word
        for k in range(<int>count):
            nbytes = buffers[k].nbytes
            word[0], word[1] = end, nbytes
            word += 2
            end += aligned(nbytes)
        word[0] = count
        nbytes = end + structure + layout + objects
        if self.aimed is None and nbytes <= self.capacity and nbytes <= self.memory.size:
            self.used = nbytes
        else:
            self.place(nbytes - base)
        memory = self.memory
        word = self.words
        for k in range(plan.leaf_count):
            leaf = &plan.leaf[k]
            if word[0] >= base:
                write_array(memory, word, leaf, <cnp.ndarray>PyList_GET_ITEM(arrays, k))
            word += 1 + leaf.nd
        for k in range(<int>count):
            memory.store_bytes(table[2 * k], buffers[k])
        memory.put(end, <const char*>plan.structure, structure)
        memcpy(memory.data + end + structure, self.words, layout)  # `nbytes` are inside
        if pickled is not None:
            memory.put(end + structure + layout, <const char*>pickled, len(pickled))
            memory.put(nbytes - 8 * (2 * count + 1), <const char*>table, 8 * (2 * count + 1))
        self.fields[0], self.fields[1], self.fields[2], self.fields[3] = (
            end, structure, layout, objects)
        return 0

    def turn(self, Seat seat not None):
        """Make the slot of the present ticket the present one."""
        cdef cseq_cell* c = seat.held()
        cdef Mapping mapping = self.mapped.get(c.slot)
        if (mapping is None or <uint64_t>mapping.size < c.capacity or self.aimed is not None
                or self.loaned or self.older or (self.placement is not None and mapping.size > MOST_COPIED)):
            self.begin(c.slot, c.capacity)
            return
        self.slot = c.slot
        self.memory = mapping
        self.capacity = <Py_ssize_t>c.capacity
        self.used = 0
        self.watched = False

    def give(self, Seat seat not None, batch):
        """Write a batch and publish it, if a plan fits and no array can lie in the slot; else False."""
        cdef cseq_cell* c
        cdef int k
        cdef Plan plan
        cdef list arrays
        CSEQ_POINT("index")
        if self.aimed is not None or self.loaned:
            return False
        for k in range(<int>PyList_GET_SIZE(self.plans)):
            plan = <Plan>PyList_GET_ITEM(self.plans, k)
            if plan.cast is not self.cast or not plan.fits or plan.objects:
                continue
            arrays = [None] * plan.leaf_count
            if plan.match(batch, arrays, None):
                break
        else:
            return False
        self.lay_down(plan, arrays, None, None)
        c = seat.held()
        for k in range(4):
            c.record[k] = self.fields[k]
        seat.deliver(c, 0, self.capacity)
        return True


cdef int write_array(Memory memory, int64_t* word, Leaf* leaf, cnp.ndarray array) except -1:
    """Copy an array to where its layout says, and cast it."""
    cdef cnp.npy_intp dims[MAX_DIMS]
    cdef int i
    if not leaf.casts and (leaf.fortran or cnp.PyArray_IS_C_CONTIGUOUS(array)):
        return memory.put(word[0], <const char*>cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
    for i in range(leaf.nd):
        dims[i] = word[1 + i]
    memory.inside(word[0], leaf.itemsize * cnp.PyArray_SIZE(array))
    PyArray_CopyInto(
        array_at(memory, word[0], <cnp.dtype>leaf.dtype, leaf.nd, dims, leaf.fortran), array)
    return 0


def arm_fault():
    """Make this process die where ``CSEQ_FAULT=point:n`` says, if this is a debug build."""
    cseq_fault_arm()


def now_ns():
    """Nanoseconds on the clock of `Ring.holder`."""
    return cseq_now_ns()


def keep_freed():
    """Make this process's malloc keep freed blocks, of any size, instead of unmapping them: the
    system clears the pages of new ones. Return whether it can (glibc)."""
    return bool(cseq_keep_freed())


def exit_on_hangup(intptr_t socket, uint64_t grace_ns=0):
    """Never returns: ends the process, without the interpreter, when the peer of `socket` is gone,
    at once or `grace_ns` later. For a thread of its own."""
    cdef uint32_t unchanged = 0
    cdef uint64_t end, now
    with nogil:
        cseq_await_hangup(socket)
        end = cseq_now_ns() + grace_ns
        now = end - grace_ns
        while now < end:
            cseq_wait(&unchanged, 0, end - now)
            now = cseq_now_ns()
        cseq_exit(1)
