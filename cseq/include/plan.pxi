# Plans: what batches of one structure have in common, and how they are read.

cdef extern from "numpy/arrayobject.h":
    bint PyArray_EquivTypes(cnp.dtype one, cnp.dtype other) noexcept

MOST_BYTES = <Py_ssize_t>(<size_t>-1 >> 1)

ALIGNMENT = LINE
LONG = MOST_PICKLED
cdef object MEMMAP = numpy.memmap
cdef object UINT8 = numpy.uint8
cdef object frombuffer = numpy.frombuffer
cdef dict KINDS = {"array": ARRAY, "tensor": TENSOR, "bytes": BYTES, "object": OBJECT}


cdef bint has_large_buffer(Memory memory, uint64_t* record) except -1:
    """Whether a buffer of what was pickled is too large to be copied; all of them are in the memory."""
    cdef Py_ssize_t begin = <Py_ssize_t>(record[0] + record[1] + record[2])
    cdef const char* last = memory.data + begin + record[3] - 8
    cdef int64_t offset, size
    cdef uint64_t count
    cdef bint large = False
    cdef int k
    memory.inside(begin, <Py_ssize_t>record[3])
    memcpy(&count, last, 8)
    if record[3] < 8 or count > (record[3] - 8) // 16:
        raise IndexError(f"{count} buffers of a batch are outside its {record[3]} bytes")
    for k in range(<int>count):
        memcpy(&offset, last - 16 * (k + 1), 8)
        memcpy(&size, last - 16 * (k + 1) + 8, 8)
        memory.inside(offset, size)
        large = large or size > MOST_COPIED
    return large


@cython.final
cdef class Plan:
    """The structure that batches have in common: k arrays in containers. Surveyed once for all of them.

    Parameters
    ----------
    structure : bytes
        The tree and `leaves`, pickled: what stands for this plan in a slot.
    token : str or tuple
        The tree of containers and leaves: see `codec`.
    leaves : list of tuple
        (dtype, dimensions, order as `order_of` has it) of each leaf that lies in the slot as an array.
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
    """

    def __cinit__(self, bytes structure not None, token, list leaves not None, cast=None,
                  list sources=None):
        cdef int k
        cdef Leaf* leaf
        self.structure, self.token, self.cast = structure, token, cast
        self.text, self.text_bytes = <const char*>structure, len(structure)
        self.leaves = list(leaves)
        self.sources = None if sources is None else list(sources)
        self.kept = []
        self.leaf_count = <int>len(leaves)
        self.leaf = <Leaf*>PyMem_RawCalloc(self.leaf_count + 1, sizeof(Leaf))
        if self.leaf == NULL:
            raise MemoryError(f"no memory for {len(leaves)} leaves")
        for k in range(self.leaf_count):
            leaf = &self.leaf[k]
            dtype, leaf.nd, leaf.order = leaves[k]
            if (not isinstance(dtype, cnp.dtype) or dtype.hasobject or not 0 <= leaf.nd <= MAX_DIMS
                    or not ROWS <= leaf.order <= STRIDED):
                raise ValueError(f"leaf {leaves[k]!r} cannot lie in raw memory")
            leaf.dtype = <PyObject*>dtype
            leaf.itemsize = dtype.itemsize
            leaf.words = 1 + (2 * leaf.nd if leaf.order == STRIDED else leaf.nd)
            self.words += leaf.words
            if sources is not None:
                leaf.source = <PyObject*>sources[k]
                leaf.casts = sources[k] is not dtype
        self.casts = [self.leaf[k].casts for k in range(self.leaf_count)]
        self.add(token)
        self.is_array = self.node_count == 1 and self.nodes[0].kind == ARRAY
        if self.made != self.leaf_count:
            raise ValueError(f"a tree of {self.made} arrays does not fit {self.leaf_count} leaves")

    def __dealloc__(self):
        cdef PyObject* one
        PyMem_RawFree(self.leaf)
        PyMem_RawFree(self.nodes)
        for one in self.blocks:
            Py_XDECREF(one)

    cdef bint is_of(self, Memory memory, uint64_t* record) noexcept:
        """Whether the batch in a memory has this structure."""
        cdef uint64_t size = <uint64_t>memory.size
        return (record[1] == <uint64_t>self.text_bytes and record[0] <= size
                and record[1] <= size - record[0]
                and memcmp(self.text, memory.data + record[0], record[1]) == 0)

    cdef PyObject* keep(self, object value):
        self.kept.append(value)
        return <PyObject*>value

    cdef int add_leaves(self, int kind, int count) except -1:
        """Say what the next leaves are."""
        cdef int k
        if count > self.leaf_count - self.made:
            raise ValueError("a tree has more arrays than its layout")
        for k in range(self.made, self.made + count):
            self.leaf[k].kind = kind
        self.made += count
        return 0

    cdef int add(self, token) except -1:
        """Append the nodes of a tree."""
        cdef Node* n
        cdef Node node
        memset(&node, 0, sizeof(node))
        node.leaf = -1
        children = ()
        if isinstance(token, str):
            node.kind = KINDS.get(token, TENSOR)
            if node.kind == OBJECT:
                self.objects += 1
            else:
                node.leaf = self.made
                self.add_leaves(node.kind, 1)
            if node.kind == TENSOR:
                self.add_tensor(&self.leaf[node.leaf], token)
        else:
            cls, keys, children = token
            node.kind = DICT if cls is dict else LIST if cls is list else TUPLE
            node.cls = self.keep(cls)
            if node.kind == DICT:
                node.keys, node.blank = self.keep(keys), self.keep(dict.fromkeys(keys))
            if isinstance(children, int):
                node.count, node.leaf = children, self.made
                self.add_leaves(ARRAY, node.count)
                children = ()
            else:
                node.count = <int>len(children)
        if self.node_count == self.room:
            self.room = 2 * self.room + 4
            n = <Node*>PyMem_RawRealloc(self.nodes, self.room * sizeof(Node))
            if n == NULL:
                raise MemoryError(f"no memory for {self.room} nodes")
            self.nodes = n
        self.nodes[self.node_count] = node
        self.node_count += 1
        for child in children:
            self.add(child)
        return 0

    cdef int add_tensor(self, Leaf* leaf, str name) except -1:
        """Say what the tensor of a leaf is: `name` is that of its type, if numpy lacks it."""
        if self.torch is None:
            self.torch = torch = import_module("torch")
            self.tensor, self.to_array = torch.Tensor, torch.Tensor.numpy
            self.from_numpy = torch.from_numpy
        if name != "tensor":
            leaf.torch_dtype = self.keep(getattr(self.torch, name))
            leaf.bits = self.keep(getattr(self.torch, f"int{8 * leaf.itemsize}"))
        return 0

    # -- writing

    cdef bint match(self, object batch, list arrays, list objects) except -1:
        """Whether a batch is like this; then its leaves are in `arrays` and `objects`."""
        cdef int node = 0
        if self.is_array:
            return self.match_array(0, batch, arrays)
        return self.match_node(&node, batch, arrays, objects)

    cdef bint match_array(self, int k, object value, list arrays) except -1:
        cdef Leaf* leaf = &self.leaf[k]
        cdef cnp.ndarray array
        cdef Py_ssize_t span
        cdef int order
        if type(value) is not cnp.ndarray and type(value) is not MEMMAP:
            return False
        array = <cnp.ndarray>value
        if cnp.PyArray_NDIM(array) != leaf.nd:
            return False
        order = layout_of(array, &span)
        if order != leaf.order and (order != LOOSE or leaf.order != ROWS):
            return False
        if <PyObject*>cnp.PyArray_DESCR(array) is not leaf.source and (
                cnp.PyArray_TYPE(array) == cnp.NPY_VOID  # np.record, which is equal to np.void
                or not PyArray_EquivTypes(array.descr, <cnp.dtype>leaf.source)):
            return False
        cseq_set_own(arrays, k, value)
        return True

    cdef bint match_leaf(self, Node* n, object value, list arrays, list objects) except -1:
        cdef Leaf* leaf
        if n.kind == OBJECT:
            if not is_object(value, MOST_SEARCHED, False):
                return False
            objects.append(value)
            return True
        if n.kind == BYTES:
            if type(value) is not bytes or len(<bytes>value) < MOST_PICKLED:
                return False
            value = frombuffer(value, UINT8)
        elif n.kind == TENSOR:
            if type(value) is not self.tensor:
                return False
            leaf = &self.leaf[n.leaf]
            try:
                if leaf.bits != NULL:
                    if value.dtype is not <object>leaf.torch_dtype:
                        return False
                    value = value.view(<object>leaf.bits)
                value = self.to_array(value)
            except (RuntimeError, TypeError):
                return False  # `codec.encode` surveys it
        return self.match_array(n.leaf, value, arrays)

    cdef bint match_node(self, int* at, object value, list arrays, list objects) except -1:
        cdef Node* n = &self.nodes[at[0]]
        cdef Py_ssize_t k = 0, place = 0
        cdef PyObject* key
        cdef PyObject* child
        at[0] += 1
        if n.kind <= OBJECT:
            return self.match_leaf(n, value, arrays, objects)
        if type(value) is not <object>n.cls:
            return False
        if n.kind == TUPLE:
            if PyTuple_GET_SIZE(value) != n.count:
                return False
            if <object>n.cls is not tuple and getattr(value, "__dict__", None):
                return False  # attributes besides the fields of a named one
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
        with cython.critical_section(value):
            if len(<dict>value) != n.count:
                return False
            while PyDict_Next(value, &place, &key, &child):
                if k >= n.count or not is_text(<object>key, (<tuple>n.keys)[k]):
                    return False
                if not self.match_child(n, at, k, <object>child, arrays, objects):
                    return False
                k += 1
        return k == n.count

    cdef bint match_child(self, Node* n, int* at, Py_ssize_t k, object value, list arrays,
                          list objects) except -1:
        if n.leaf >= 0:
            return self.match_array(n.leaf + <int>k, value, arrays)
        return self.match_node(at, value, arrays, objects)

    # -- reading

    cdef object read(self, Memory memory, uint64_t* record, object lend, Py_ssize_t slot,
                     uint64_t capacity, object load, list converters):
        """Make a batch: its arrays are views that keep the memory alive, or what `lend` says.

        Parameters
        ----------
        record : uint64_t[4]
        lend, slot, capacity
            See `PlanReader.decode`.
        load : callable
            See `PlanReader`.
        converters : list or None
            What `converters` has returned.
        """
        cdef Cursor at
        cdef list objects = None
        cdef list arrays = None if self.is_array else [None] * self.leaf_count
        cdef uint64_t total = record[0] + record[1] + record[2] + record[3]
        cdef Memory home, base     # `home`: of large leaves
        cdef Memory block = None   # of small ones, from `begin` to `end`
        cdef Py_ssize_t begin = 0, end = 0, small, nbytes
        cdef int64_t offset
        cdef bint large, apart = False  # `apart`: small leaves are copied
        cdef Leaf* leaf
        cdef const char* word
        cdef int k
        if record[0] > <uint64_t>memory.size or record[1] > <uint64_t>memory.size:
            memory.inside(record[0], record[1])
        memory.inside(<Py_ssize_t>(record[0] + record[1]), <Py_ssize_t>record[2])
        if record[2] != <uint64_t>(8 * self.words):
            raise IndexError(f"a layout of {record[2]} bytes does not fit a structure that needs "
                             f"{8 * self.words}")
        large = record[3] != 0 and has_large_buffer(memory, record)
        if lend is not None and total <= MOST_COPIED:  # from here on a memory of its own
            memory, lend = self.block_of(memory, 0, <Py_ssize_t>total), None
        home = memory
        word = memory.data + record[0] + record[1]
        if lend is not None:
            small = self.measure(word, &large)
            home = None
            if large or small > MOST_COPIED:
                home = lend(slot, capacity)
            # To copy many takes longer than a lease. A loop that keeps leaves has other batches' soon.
            apart = small <= MOST_COPIED or type(home) is not Lease or not (<Lease>home).early
        # All leaves first: the slot may be another batch's in a process that Python code forks.
        for k in range(self.leaf_count):
            leaf = &self.leaf[k]
            memcpy(&offset, word, 8)
            nbytes = size_of(leaf, word)
            if nbytes < 0:
                raise IndexError(f"array {k} of a batch is larger than its {record[0]} bytes")
            if offset < 0 or <uint64_t>offset > record[0] or <uint64_t>nbytes > record[0] - <uint64_t>offset:
                raise IndexError(f"array {k} of a batch is outside its {record[0]} bytes")
            if leaf.kind == BYTES:
                arrays[k] = memory.data[offset:offset + nbytes]
                word += 8 * leaf.words
                continue
            if apart and nbytes <= MOST_COPIED:
                if block is None or offset < begin or offset + nbytes > end:
                    begin, end = offset, self.run_of(k, word)
                    memory.inside(begin, end - begin)
                    block = self.block_of(memory, begin, end - begin)
                base = block
                offset -= begin
            elif home is not None:
                base = home
            else:
                base = copy_of(memory, nbytes, offset)
                offset = 0
            array = self.read_leaf(k, base, offset, word)
            if self.is_array:
                return array if converters is None or converters[0] is None else converters[0](array)
            cseq_set_own(arrays, k, array)
            word += 8 * leaf.words
        if record[3]:
            objects = load(memory, record[0] + record[1] + record[2], record[3], home)
        at.node = 0
        at.object = 0
        return self.build_node(&at, arrays, objects, converters)

    cdef Py_ssize_t measure(self, const char* word, bint* large) noexcept:
        """Return how many bytes small leaves have; `large`: set if a leaf is too large to be copied."""
        cdef Py_ssize_t size, small = 0
        cdef int k
        for k in range(self.leaf_count):
            size = size_of(&self.leaf[k], word)
            word += 8 * self.leaf[k].words
            if self.leaf[k].kind != BYTES:
                if size > MOST_COPIED:
                    large[0] = True
                else:
                    small += size
        return small

    cdef Py_ssize_t run_of(self, int k, const char* word) noexcept:
        """Where the leaves end that are copied together with this one: the next small ones that follow on it."""
        cdef int64_t begin, offset
        cdef Py_ssize_t end, nbytes
        memcpy(&begin, word, 8)
        end = begin + size_of(&self.leaf[k], word)
        for k in range(k + 1, self.leaf_count):
            word += 8 * self.leaf[k - 1].words
            memcpy(&offset, word, 8)
            nbytes = size_of(&self.leaf[k], word)
            if nbytes > MOST_COPIED or self.leaf[k].kind == BYTES:
                continue
            if offset < end or offset > aligned(end) or offset + nbytes > begin + MOST_COPIED:
                break
            end = offset + nbytes
        return end

    cdef Block block_of(self, Memory memory, Py_ssize_t offset, Py_ssize_t nbytes):
        """A copy of bytes of a memory.

        It is in the block of an earlier batch, if nothing refers to that any more: a loop that drops
        its batches has two of them in turn, and nothing is allocated for the data of its arrays.
        """
        cdef Block block
        cdef PyObject* one
        with cython.critical_section(self):
            for one in self.blocks:
                if one == NULL:
                    break
                if cseq_is_unique(one) and (<Block>one).size >= nbytes:
                    block = <Block>one
                    memcpy(block.data, memory.data + offset, nbytes)
                    return block
        block = copy_of(memory, nbytes, offset)
        with cython.critical_section(self):
            Py_INCREF(block)
            Py_XDECREF(self.blocks[self.turn])
            self.blocks[self.turn] = <PyObject*>block
            self.turn = (self.turn + 1) % BLOCKS
        return block

    cdef object read_leaf(self, int k, Memory memory, Py_ssize_t offset, const char* word):
        """Make the array, at an offset of a memory, whose layout begins at `word`."""
        cdef Leaf* leaf = &self.leaf[k]
        cdef cnp.npy_intp dims[MAX_DIMS]
        cdef cnp.npy_intp strides[MAX_DIMS]
        cdef int64_t size
        cdef int i
        for i in range(leaf.nd):
            memcpy(&size, word + 8 * (1 + i), 8)
            dims[i] = <cnp.npy_intp>size
            if leaf.order == STRIDED:
                memcpy(&size, word + 8 * (1 + leaf.nd + i), 8)
                strides[i] = <cnp.npy_intp>size
        return array_at(memory, offset, <cnp.dtype>leaf.dtype, leaf.nd, dims, leaf.order == COLUMNS,
                        strides if leaf.order == STRIDED else NULL)

    cdef object build_leaf(self, int k, list arrays, list converters):
        cdef object value = <object>PyList_GET_ITEM(arrays, k)
        if self.leaf[k].kind == TENSOR:
            value = self.from_numpy(value)
            if self.leaf[k].torch_dtype != NULL:
                value = value.view(<object>self.leaf[k].torch_dtype)
        if converters is None:
            return value
        convert = <object>PyList_GET_ITEM(converters, k)
        return value if convert is None else convert(value)

    cdef object build_child(self, Node* n, Cursor* at, int k, list arrays, list objects,
                            list converters):
        if n.leaf >= 0:
            return self.build_leaf(n.leaf + k, arrays, converters)
        return self.build_node(at, arrays, objects, converters)

    cdef object build_node(self, Cursor* at, list arrays, list objects, list converters):
        cdef Node* n = &self.nodes[at.node]
        cdef int k
        cdef list children
        cdef dict mapping
        at.node += 1
        if n.kind <= BYTES:
            return self.build_leaf(n.leaf, arrays, converters)
        if n.kind == OBJECT:
            value = objects[at.object]
            at.object += 1
            if converters is None or is_object(value, MOST_SEARCHED, True):
                return value
            return (<object>PyList_GET_ITEM(converters, self.leaf_count))(value)
        if n.kind == DICT:
            mapping = PyDict_Copy(<dict>n.blank)  # its keys need not be added one by one
            for k in range(n.count):
                child = self.build_child(n, at, k, arrays, objects, converters)
                PyDict_SetItem(mapping, <object>PyTuple_GET_ITEM(<tuple>n.keys, k), child)
            return mapping
        children = [None] * n.count
        for k in range(n.count):
            children[k] = self.build_child(n, at, k, arrays, objects, converters)
        if n.kind == LIST:
            return children
        if <object>n.cls is tuple:
            return PyList_AsTuple(children)
        return tuple.__new__(<object>n.cls, children)

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
        cdef int k, kind
        cdef list result = [None] * self.leaf_count
        for k in range(self.leaf_count):
            kind = self.leaf[k].kind
            if kind != BYTES:
                result[k] = leaf_for(None if kind == TENSOR else <object>self.leaf[k].dtype)
        result.append(convert)
        return result


cdef bint is_object(object value, int depth, bint plain) except -1:
    """Whether a value is pickled whatever it contains: not a leaf of another kind, nor such a container.

    At most `depth` containers inside one another are searched. If `plain`: whether it is numbers and
    texts, alone or in such containers.
    """
    cdef Py_ssize_t k = 0
    cdef PyObject* key
    cdef PyObject* child
    cls = type(value)
    if cls is str or cls is int or cls is float or value is None or cls is bool:
        return True
    if cls is bytes:
        return len(<bytes>value) < MOST_PICKLED
    cdef bint named = cls is not tuple and isinstance(value, tuple) and hasattr(value, "_fields")
    if cls is not list and cls is not tuple and cls is not dict and not named:
        return not (plain or cls is cnp.ndarray or cls is MEMMAP
                    or strcmp((<PyTypeObject*>cls).tp_name, "Tensor") == 0)
    if not depth or (plain and named):
        return False
    if cls is tuple or named:
        for k in range(PyTuple_GET_SIZE(value)):
            if not is_object(<object>PyTuple_GET_ITEM(value, k), depth - 1, plain):
                return False
        return True
    with cython.critical_section(value):
        if cls is list:
            while k < PyList_GET_SIZE(value):
                if not is_object(<object>PyList_GET_ITEM(value, k), depth - 1, plain):
                    return False
                k += 1
        else:
            while PyDict_Next(value, &k, &key, &child):
                if not is_object(<object>child, depth - 1, plain):
                    return False
    return True


def is_plain(value):
    """Whether a value is numbers and texts, alone or in a few containers."""
    return is_object(value, MOST_SEARCHED, True)


cdef bint is_text(object key, object expected):
    """Whether a key is a text that is known."""
    return key is expected or (type(key) is str and key == expected)


@cython.final
cdef class PlanReader:
    """Reads batches of any structure, and remembers the structures.

    Parameters
    ----------
    parse : callable
        ``parse(structure)`` → Plan.
    load : callable
        ``load(memory, offset, nbytes, home)`` → list: the objects that went by pickle. `home`: what large
        buffers lie on; None: on copies. Others are copied, unless it is `memory`.
    """

    def __cinit__(self, parse, load):
        self.parse, self.load = parse, load
        self.plans = {}
        self.recent = []

    cdef Plan find(self, Memory memory, uint64_t* record):
        """The plan of the batch in a memory, if its structure is known."""
        cdef Py_ssize_t k
        cdef Plan plan
        cdef bytes structure
        cdef list recent
        cdef char* at = memory.data + record[0]
        if record[0] > <uint64_t>memory.size or record[1] > <uint64_t>memory.size - record[0]:
            memory.inside(<Py_ssize_t>min(record[0], <uint64_t>MOST_BYTES),
                          <Py_ssize_t>min(record[1], <uint64_t>MOST_BYTES))
        with cython.critical_section(self):
            recent = self.recent
            for k in range(PyList_GET_SIZE(recent)):
                plan = <Plan>PyList_GET_ITEM(recent, k)
                if (<uint64_t>plan.text_bytes == record[1]
                        and memcmp(plan.text, at, record[1]) == 0):
                    if k:
                        recent.insert(0, recent.pop(k))
                    return plan
        structure = at[:record[1]]
        with cython.critical_section(self):  # or it could be cleared before `get` counts its reference
            plan = self.plans.get(structure)
            if plan is not None:
                self.recent = [plan, *self.recent[:RECENT - 1]]
        return plan

    cdef Plan learn(self, bytes structure):
        """Make the plan of a structure, and remember it."""
        cdef Plan plan = self.parse(structure)
        with cython.critical_section(self):
            if len(self.plans) >= MOST_KNOWN:
                self.plans.clear()
            self.plans[structure] = plan
        return plan

    def decode(self, Memory memory not None, record, lend=None, Py_ssize_t slot=-1, uint64_t capacity=0):
        """Read a batch.

        Parameters
        ----------
        memory : Memory
        record : sequence of int
            See `codec.Record`.
        lend : callable, optional
            Arrays of up to `COPIED` bytes are copies; larger ones lie on what
            ``lend(slot, capacity)`` returns, a memory of the same bytes, or are copies of their own
            where that is None. Without it, all are views of `memory`.
        slot, capacity : int
            For `lend`.

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
        plan = self.find(memory, f)
        if plan is None:
            plan = self.learn(memory.data[f[0]:f[0] + f[1]])
        return plan.read(memory, f, lend, slot, capacity, self.load, None)
