# cython: language_level=3, freethreading_compatible=True
"""Plans: the structure that several batches have in common."""

from cpython.dict cimport PyDict_Copy, PyDict_Next, PyDict_SetItem
from cpython.list cimport PyList_AsTuple, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport PyObject, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, strcmp

cimport cython
cimport numpy as cnp

from cseq._headers cimport *
from cseq._memory cimport (
    MAX_DIMS, MOST_COPIED, Block, Memory, cseq_array_on, is_permuted, lies_in,
)

import numpy
from importlib import import_module
from pickle import loads

from cseq._memory import copy_of

cnp.import_array()

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        const char* tp_name
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence) noexcept
    PyObject* PySequence_Fast_GET_ITEM(object sequence, Py_ssize_t k) noexcept

cdef extern from "numpy/arrayobject.h":
    bint PyArray_EquivTypes(cnp.dtype first, cnp.dtype second) noexcept
    PyObject* PyDataType_METADATA(cnp.dtype dtype) noexcept

ALIGNMENT, LONG, MAX_DEPTH = LINE, MOST_PICKLED, MOST_SEARCHED
cdef object MEMMAP = numpy.memmap, UINT8 = numpy.uint8, frombuffer = numpy.frombuffer
cdef dict KINDS = {"array": ARRAY, "tensor": TENSOR, "bytes": BYTES}
# Plans for reading, keyed by structure.
cdef dict reader_plans = {}


cdef int check_record(Memory memory, const uint64_t* record) except -1:
    """Raise IndexError if the parts of a batch are not within the memory."""
    cdef uint64_t end = 0
    cdef int k
    for k in range(4):
        if record[k] > <uint64_t>memory.size - end:
            raise IndexError(f"a batch lies outside its memory of {memory.size} bytes")
        end += record[k]
    return 0


@cython.final
cdef class Plan:
    """The structure that several batches have in common: containers of arrays.

    `nodes` is the tree, parents first, and `structure` its pickle. `sources` are the types of
    arrays before they are cast. Without them, the plan is only for reading.
    """

    def __cinit__(self, bytes structure not None, nodes not None, list sources=None):
        cdef Node* n
        cdef int left = 1
        self.structure, self.nodes = structure, tuple(nodes)
        self.text, self.text_bytes = <const char*>structure, len(structure)
        self.sources = None if sources is None else list(sources)
        self.kept = []
        self.node = n = <Node*>PyMem_RawCalloc(len(self.nodes) + 1, sizeof(Node))
        self.leaf = <Leaf*>PyMem_RawCalloc(len(self.nodes) + 1, sizeof(Leaf))
        if self.node == NULL or self.leaf == NULL:
            raise MemoryError(f"not enough memory for a plan of {len(self.nodes)} nodes")
        for node in self.nodes:
            if isinstance(node, str):
                n.kind = OBJECT
                self.objects += 1
            elif isinstance(node[0], str):
                name, dtype, axes = node
                dtype = <object>self.keep(loads(dtype)) if type(dtype) is bytes else dtype
                n.kind = KINDS.get(name, TENSOR)
                self.add_leaf(n.kind, name, dtype, axes)
            else:
                cls, keys, n.count = node
                n.kind = DICT if cls is dict else LIST if cls is list else TUPLE
                n.cls, n.keys = <PyObject*>cls, <PyObject*>keys
                if n.kind == DICT:
                    n.blank = self.keep(dict.fromkeys(keys))
            left += n.count - 1
            n += 1
        if left:
            raise ValueError(f"{nodes!r} is not a tree")

    def __dealloc__(self):
        cdef PyObject* block
        PyMem_RawFree(self.leaf)
        PyMem_RawFree(self.node)
        for block in self.blocks:
            Py_XDECREF(block)

    cdef bint is_of(self, Memory memory, const uint64_t* record) noexcept:
        """Return True if a batch with a checked record has this structure."""
        return (record[1] == <uint64_t>self.text_bytes
                and memcmp(self.text, memory.data + record[0], record[1]) == 0)

    cdef PyObject* keep(self, object value):
        self.kept.append(value)
        return <PyObject*>value

    cdef int add_leaf(self, int kind, str name, dtype, bytes axes) except -1:
        cdef Leaf* leaf = &self.leaf[self.leaf_count]
        cdef int nd = len(axes)
        rows = bytes(range(nd))
        if not isinstance(dtype, cnp.dtype) or dtype.hasobject or nd > MAX_DIMS or bytes(sorted(axes)) != rows:
            raise ValueError(f"a leaf of {dtype!r} with axes {[*axes]} cannot be stored in raw memory")
        leaf.kind, leaf.nd, leaf.rows = kind, nd, axes == rows
        leaf.axes = <const uint8_t*><const char*>axes
        leaf.dtype = <PyObject*>dtype
        leaf.itemsize = dtype.itemsize
        leaf.words = 2 + nd
        self.words += leaf.words
        if self.sources is not None:
            source = self.sources[self.leaf_count]
            leaf.source = <PyObject*>source
            leaf.casts = source != dtype
        self.leaf_count += 1
        if kind == TENSOR:
            self.add_tensor(leaf, name)
        return 0

    cdef int add_tensor(self, Leaf* leaf, str name) except -1:
        """Import torch, and set the torch type of a tensor if numpy lacks it."""
        if self.torch is None:
            self.torch = torch = import_module("torch")
            self.tensor, self.to_array = torch.Tensor, torch.Tensor.numpy
            self.from_numpy = torch.from_numpy
        if name != "tensor":
            leaf.torch_dtype = self.keep(getattr(self.torch, name))
            leaf.bits = self.keep(getattr(self.torch, f"int{8 * leaf.itemsize}"))
        return 0

    # -- writing

    cdef int match(self, object batch, list arrays, list objects) except -1:
        """Store a batch's leaves. Return what the objects contain, or 0 if the structure differs."""
        cdef Cursor cursor
        cursor.node = cursor.leaf = 0
        cursor.contents = PLAIN
        return cursor.contents if self.match_node(&cursor, batch, arrays, objects) else 0

    cdef bint match_array(self, int k, object value, list arrays) except -1:
        cdef Leaf* leaf = &self.leaf[k]
        cdef cnp.ndarray array
        cdef uint8_t axes[MAX_DIMS]
        if type(value) is not cnp.ndarray and type(value) is not MEMMAP:
            return False
        array = <cnp.ndarray>value
        if cnp.PyArray_NDIM(array) != leaf.nd:
            return False
        if not lies_in(array, leaf.axes) and (not leaf.rows or is_permuted(array, axes)):
            return False
        # numpy ignores metadata and considers some types equal, such as long and long long.
        if <PyObject*>cnp.PyArray_DESCR(array) is not leaf.source and (
                not cnp.PyArray_TYPE(array) == (<cnp.dtype>leaf.source).type_num != cnp.NPY_VOID
                or PyDataType_METADATA(array.descr) or PyDataType_METADATA(<cnp.dtype>leaf.source)
                or not PyArray_EquivTypes(array.descr, <cnp.dtype>leaf.source)):
            return False
        cseq_set_own(arrays, k, value)
        return True

    cdef bint match_leaf(self, int kind, int k, object value, list arrays) except -1:
        cdef Leaf* leaf = &self.leaf[k]
        if kind == BYTES:
            if type(value) is not bytes or len(<bytes>value) < MOST_PICKLED:
                return False
            return self.match_array(k, frombuffer(value, UINT8), arrays)
        if type(value) is not self.tensor:
            return False
        try:
            if leaf.bits != NULL:
                if value.dtype is not <object>leaf.torch_dtype:
                    return False
                value = value.view(<object>leaf.bits)
            value = self.to_array(value)
        except (RuntimeError, TypeError):
            return False
        return self.match_array(k, value, arrays)

    cdef bint match_node(self, Cursor* cursor, object value, list arrays, list objects) except -1:
        cdef Node* n = &self.node[cursor.node]
        cdef Py_ssize_t k = 0, position = 0
        cdef PyObject* key
        cdef PyObject* expected
        cdef PyObject* child
        cursor.node += 1
        if n.kind <= BYTES:
            k = cursor.leaf
            cursor.leaf += 1
            if n.kind == ARRAY:
                return self.match_array(<int>k, value, arrays)
            return self.match_leaf(n.kind, <int>k, value, arrays)
        if n.kind == OBJECT:
            cursor.contents = min(cursor.contents, contents_of(value, MOST_SEARCHED))
            if cursor.contents == LEAVES:
                return False
            objects.append(value)
            return True
        if type(value) is not <object>n.cls:
            return False
        if n.kind == TUPLE:
            if PyTuple_GET_SIZE(value) != n.count:
                return False
            # A named tuple may have attributes besides its fields.
            if <object>n.cls is not tuple and getattr(value, "__dict__", None):
                return False
            for k in range(n.count):
                if not self.match_node(cursor, <object>PyTuple_GET_ITEM(value, k), arrays, objects):
                    return False
            return True
        if n.kind == LIST:
            with cython.critical_section(value):
                if PyList_GET_SIZE(value) != n.count:
                    return False
                for k in range(n.count):
                    if k >= PyList_GET_SIZE(value) or not self.match_node(
                            cursor, <object>PyList_GET_ITEM(value, k), arrays, objects):
                        return False
            return True
        with cython.critical_section(value):
            if len(<dict>value) != n.count:
                return False
            while PyDict_Next(value, &position, &key, &child):
                if k >= n.count:
                    return False
                expected = PyTuple_GET_ITEM(<tuple>n.keys, k)
                if key is not expected and not (
                        type(<object>key) is str and <object>key == <object>expected):
                    return False
                if not self.match_node(cursor, <object>child, arrays, objects):
                    return False
                k += 1
        return k == n.count

    # -- reading

    cdef object read(self, Memory memory, const uint64_t* record, object lend, Py_ssize_t slot,
                     uint64_t capacity, list converters):
        """Make a batch from a checked record and the result of `converters`; see `decode`."""
        cdef Cursor cursor
        cdef list objects = None, arrays = None
        cdef Py_ssize_t total = <Py_ssize_t>(record[0] + record[1] + record[2] + record[3])
        # The memory for views of large leaves.
        cdef Memory home = memory
        cdef Block block
        if record[2] != <uint64_t>(8 * self.words):
            raise IndexError(f"a layout of {record[2]} bytes does not fit a structure that needs "
                             f"{8 * self.words}")
        if lend is not None and total <= MOST_COPIED:
            block = self.spare(total)
            memcpy(block.data, memory.data, total)
            memory = home = block
            lend = None
        cursor.node = cursor.leaf = 0
        cursor.object = 0
        cursor.end = <Py_ssize_t>record[0]
        cursor.word = memory.data + record[0] + record[1]
        if lend is not None:
            home = lend(slot, capacity)
            arrays = self.read_leaves(&cursor, memory, home)
        if record[3]:
            objects = load_objects(memory, total - <Py_ssize_t>record[3], <Py_ssize_t>record[3], home)
        return self.build(&cursor, memory, arrays, objects, converters)

    cdef list read_leaves(self, Cursor* cursor, Memory memory, Memory home):
        """Make all leaves: small ones as copies, large ones as views of `home` or copies.

        Call this before any code that may fork, because a child process may read the slot after it
        has been reused.
        """
        cdef list arrays = [None] * self.leaf_count
        cdef const char* word = cursor.word
        cdef Py_ssize_t nbytes, offset = 0, small = 0, used = 0
        cdef Memory base
        cdef Block block = None
        cdef bint apart
        cdef int k
        for k in range(self.leaf_count):
            nbytes = self.look(k, word, cursor.end, &offset)
            if nbytes <= MOST_COPIED and self.leaf[k].kind != BYTES:
                small = aligned(small) + nbytes
            word += 8 * self.leaf[k].words
        # Copying many leaves is slower than taking a lease, but a loop that keeps leaves would need
        # too many leases.
        apart = small <= MOST_COPIED or not getattr(home, "early", False)
        for k in range(self.leaf_count):
            nbytes = self.look(k, cursor.word, cursor.end, &offset)
            base = memory
            if self.leaf[k].kind == BYTES:
                pass
            elif nbytes <= MOST_COPIED and apart:
                if block is None or used + nbytes > block.size:
                    block, used = self.spare(min(small, MOST_COPIED)), 0
                memcpy(block.data + used, memory.data + offset, nbytes)
                base, offset = block, used
                used += aligned(nbytes)
                small -= aligned(nbytes)
            elif home is not None:
                base = home
            else:
                base, offset = copy_of(memory, nbytes, offset), 0
            arrays[k] = self.read_leaf(k, cursor.word, base, offset, nbytes)
            cursor.word += 8 * self.leaf[k].words
        return arrays

    cdef Py_ssize_t look(self, int k, const char* word, Py_ssize_t end, Py_ssize_t* offset) except -1:
        cdef int64_t start, nbytes
        memcpy(&start, word, 8)
        memcpy(&nbytes, word + 8, 8)
        if start < 0 or nbytes < 0 or start > end or nbytes > end - start:
            raise IndexError(f"array {k} of a batch is outside its {end} bytes")
        offset[0] = <Py_ssize_t>start
        return <Py_ssize_t>nbytes

    cdef object read_leaf(self, int k, const char* word, Memory memory, Py_ssize_t offset,
                          Py_ssize_t nbytes):
        """Make an array or `bytes` from its layout at `word`."""
        cdef Leaf* leaf = &self.leaf[k]
        cdef cnp.npy_intp dims[MAX_DIMS]
        cdef cnp.npy_intp strides[MAX_DIMS]
        cdef int64_t size
        cdef uint64_t taken = leaf.itemsize
        cdef int i, axis
        if leaf.kind == BYTES:
            return memory.data[offset:offset + nbytes]
        for i in range(leaf.nd - 1, -1, -1):
            axis = leaf.axes[i]
            memcpy(&size, word + 8 * (2 + axis), 8)
            dims[axis], strides[axis] = <cnp.npy_intp>size, <cnp.npy_intp>taken
            # Reject negative sizes and sizes beyond the address space, as numpy does.
            taken *= <uint64_t>size
        if taken > <uint64_t>nbytes:
            raise IndexError(f"array {k} of a batch is larger than its {nbytes} bytes")
        return cseq_array_on(memory, memory.data + offset, leaf.dtype, leaf.nd, dims,
                             NULL if leaf.rows else strides, cnp.NPY_ARRAY_CARRAY)

    cdef Block spare(self, Py_ssize_t nbytes):
        """Return a block for copies, preferably one that is no longer in use."""
        cdef Block block
        cdef PyObject* candidate
        with cython.critical_section(self):
            for candidate in self.blocks:
                if candidate == NULL:
                    break
                if cseq_is_unique(candidate) and (<Block>candidate).size >= nbytes:
                    return <Block>candidate
            block = Block(nbytes)
            Py_INCREF(block)
            Py_XDECREF(self.blocks[self.turn])
            self.blocks[self.turn] = <PyObject*>block
            self.turn = (self.turn + 1) % BLOCKS
        return block

    cdef object build(self, Cursor* cursor, Memory memory, list arrays, list objects, list converters):
        """Make the value of the next node, from `memory` if `arrays` is None."""
        cdef Node* n = &self.node[cursor.node]
        cdef int k
        cdef list children
        cdef dict mapping
        cursor.node += 1
        if n.kind <= BYTES:
            return self.build_leaf(cursor, memory, arrays, converters)
        if n.kind == OBJECT:
            value = objects[cursor.object]
            cursor.object += 1
            if converters is None or contents_of(value, MOST_SEARCHED) == PLAIN:
                return value
            return (<object>PyList_GET_ITEM(converters, self.leaf_count))(value)
        if n.kind == DICT:
            # Copying a dict is faster than adding the keys one by one.
            mapping = PyDict_Copy(<dict>n.blank)
            for k in range(n.count):
                child = self.build(cursor, memory, arrays, objects, converters)
                PyDict_SetItem(mapping, <object>PyTuple_GET_ITEM(<tuple>n.keys, k), child)
            return mapping
        children = [None] * n.count
        for k in range(n.count):
            children[k] = self.build(cursor, memory, arrays, objects, converters)
        if n.kind == LIST:
            return children
        if <object>n.cls is tuple:
            return PyList_AsTuple(children)
        return tuple.__new__(<object>n.cls, children)

    cdef object build_leaf(self, Cursor* cursor, Memory memory, list arrays, list converters):
        cdef int k = cursor.leaf
        cdef Leaf* leaf = &self.leaf[k]
        cdef Py_ssize_t nbytes, offset = 0
        cursor.leaf += 1
        if arrays is None:
            nbytes = self.look(k, cursor.word, cursor.end, &offset)
            value = self.read_leaf(k, cursor.word, memory, offset, nbytes)
            cursor.word += 8 * leaf.words
        else:
            value = arrays[k]
        if leaf.kind == TENSOR:
            value = self.from_numpy(value)
            if leaf.torch_dtype != NULL:
                value = value.view(<object>leaf.torch_dtype)
        if converters is None:
            return value
        convert = <object>PyList_GET_ITEM(converters, k)
        return value if convert is None else convert(value)

    def converters(self, leaf_for, convert):
        """Return a list of functions: one for each leaf, and one for pickled leaves.

        ``leaf_for(dtype)`` returns a function for new arrays of this type, or None.
        ``leaf_for(None)`` returns one for tensors. `convert` converts any batch.
        """
        cdef int k, kind
        cdef list result = [None] * self.leaf_count
        for k in range(self.leaf_count):
            kind = self.leaf[k].kind
            if kind != BYTES:
                result[k] = leaf_for(None if kind == TENSOR else <object>self.leaf[k].dtype)
        result.append(convert)
        return result


cdef inline bint is_plain(object value) noexcept:
    cls = type(value)
    return cls is str or cls is int or cls is float or value is None or cls is bool


cdef int contents_of(object value, int depth) except -1:
    """Return LEAVES, OBJECTS or PLAIN. Containers below `depth` count as LEAVES."""
    cdef Py_ssize_t k = 0
    cdef PyObject* key
    cdef PyObject* child
    cls = type(value)
    if is_plain(value):
        return PLAIN
    if cls is bytes:
        return PLAIN if len(<bytes>value) < MOST_PICKLED else LEAVES
    cdef bint named = cls is not tuple and isinstance(value, tuple) and hasattr(value, "_fields")
    if cls is not list and cls is not tuple and cls is not dict and not named:
        if cls is cnp.ndarray or cls is MEMMAP or strcmp((<PyTypeObject*>cls).tp_name, "Tensor") == 0:
            return LEAVES
        return OBJECTS
    cdef int contents = OBJECTS if named else PLAIN
    if not depth:
        return LEAVES
    with cython.critical_section(value):
        if cls is dict:
            while contents != LEAVES and PyDict_Next(value, &k, &key, &child):
                contents = min(contents, contents_of(<object>child, depth - 1))
            return contents
        while contents != LEAVES and k < PySequence_Fast_GET_SIZE(value):
            child = PySequence_Fast_GET_ITEM(value, k)
            # Skip the call for plain values, because most long lists contain only numbers.
            if not is_plain(<object>child):
                contents = min(contents, contents_of(<object>child, depth - 1))
            k += 1
    return contents


cdef list load_objects(Memory memory, Py_ssize_t offset, Py_ssize_t nbytes, Memory home):
    """Read the pickled leaves and their buffers.

    If `home` is `memory`, all buffers are views. Otherwise, only large buffers are views of `home`,
    and the rest is copied first. Unpickling may fork, and a child process may read the slot after
    it is reused.
    """
    cdef list buffers = []
    cdef int64_t count = 0, size = 0, start = 0
    cdef Py_ssize_t table = offset + nbytes - 8
    if nbytes >= 8:
        memcpy(&count, memory.data + table, 8)
    if not 0 <= count <= (nbytes - 8) // 16:
        raise IndexError(f"a pickle of {nbytes} bytes cannot have {count} buffers")
    for table in range(table - 16 * count, table, 16):
        memcpy(&start, memory.data + table, 8)
        memcpy(&size, memory.data + table + 8, 8)
        if home is None or (home is not memory and size <= MOST_COPIED):
            buffers.append(copy_of(memory, size, start))
        else:
            home.inside(start, size)
            buffers.append(memoryview(home)[start:start + size])
    data = memoryview(memory)[offset:offset + nbytes]
    return loads(data if home is memory else bytes(data), buffers=buffers)


cdef Plan plan_of(Memory memory, const uint64_t* record):
    cdef Plan plan
    cdef bytes structure = memory.data[record[0]:record[0] + record[1]]
    try:
        # Do not use `get`: another thread may clear the dict before the plan is referenced.
        plan = reader_plans[structure]
    except KeyError:
        plan = Plan(structure, loads(structure))
        if len(reader_plans) >= MOST_PLANS:
            reader_plans.clear()
        reader_plans[structure] = plan
    return plan
