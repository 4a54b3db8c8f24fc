# cython: language_level=3, freethreading_compatible=True
"""Writes batches to cells or slots, and reads them."""

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport PyObject, PyTypeObject, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._headers cimport *
from cseq._memory cimport MAX_DIMS, Mapping, Memory, cseq_array_on
from cseq._work cimport BatchWriter, Runner
from cseq.encoding._plan cimport (
    MOST_PLANS, MOST_SEARCHED, PLAIN, RECENT, Leaf, Plan, aligned, check_record, contents_of,
    cseq_set_own, plan_of,
)
from cseq.encoding._room cimport Room
from cseq.memory._slots cimport SlotTable

from pickle import dumps

from cseq._memory import flat_of
from cseq.encoding import failure
from cseq.encoding.survey import Partial, dump, plan_for
from cseq.stage import BATCH, ENDED, RAISED

cnp.import_array()

# Markers for a batch that Python must decode, and for one that is passed on unchanged.
cdef object UNREAD = object()
cdef object AS_IT_IS = object()
PARTIAL = <PyTypeObject*>Partial

cdef Leaf BUFFER
BUFFER.rows, BUFFER.words, BUFFER.itemsize = True, 2, 1

cdef extern from "numpy/arrayobject.h":
    int PyArray_CopyInto(cnp.ndarray target, cnp.ndarray source) except -1

@cython.final
cdef class Encoder:
    """Writes batches to a room. Set `cast`, the type for numbers, before the first batch."""

    cdef readonly Room room
    cdef public object cast
    cdef readonly list plans
    # The leaves of the current batch, all None between batches.
    cdef list arrays
    cdef list objects
    # The kind of values in `objects`; see `contents_of`.
    cdef int contents
    cdef int64_t* words
    cdef Py_ssize_t most

    def __cinit__(self, Room room not None):
        self.room, self.plans = room, []

    def __dealloc__(self):
        PyMem_RawFree(self.words)

    def remember(self, Plan plan not None):
        """Add a plan for `find_plan` to try."""
        self.plans = [plan, *self.plans[:RECENT - 1]]

    cdef Plan find_plan(self, batch):
        """Find the plan of a batch and set `arrays` and `objects`."""
        cdef list plans = self.plans
        cdef list arrays = self.arrays
        cdef list objects = None
        cdef Plan plan
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(plans)):
            plan = <Plan>PyList_GET_ITEM(plans, k)
            if arrays is None or PyList_GET_SIZE(arrays) != plan.leaf_count:
                arrays = self.arrays = [None] * plan.leaf_count
            if plan.objects:
                objects = self.objects = []
            self.contents = plan.match(batch, arrays, objects)
            if self.contents:
                if k:
                    plans.insert(0, plans.pop(k))
                return plan
            self.objects = objects = None
        return None

    cdef void forget(self) noexcept:
        cdef list arrays = self.arrays
        cdef Py_ssize_t k
        if arrays is not None:
            for k in range(PyList_GET_SIZE(arrays)):
                cseq_set_own(arrays, k, None)

    cdef Py_ssize_t find_own(self, int k, Plan plan, object array, Py_ssize_t nbytes,
                             Py_ssize_t base) except -2:
        """Return the offset of an array in the slot, or -1 if it is outside or overlaps another."""
        cdef Py_ssize_t offset = self.room.offset_of(array)
        cdef int64_t* word = self.words
        cdef int j
        for j in range(k if offset >= 0 else 0):
            if word[0] < base and offset < word[0] + word[1] and offset + nbytes > word[0]:
                return -1
            word += plan.leaf[j].words if j < plan.leaf_count else BUFFER.words
        return offset

    cdef int grow_words(self, Py_ssize_t count) except -1:
        cdef int64_t* words
        if count > self.most:
            words = <int64_t*>PyMem_RawCalloc(count, 8)
            if words == NULL:
                raise MemoryError(f"not enough memory for a layout of {count} numbers")
            PyMem_RawFree(self.words)
            self.words, self.most = words, count
        return 0

    def encode(self, batch):
        """Write a batch to the room, without copying arrays in it. Return a `codec.Record`."""
        cdef uint64_t[4] f
        self.write_batch(batch, f)
        return f[0], f[1], f[2], f[3]

    def encode_parts(self, Plan plan not None, list arrays not None, bytes pickled=None):
        """Write a batch from its arrays. `arrays` ends with the buffers of `pickled`."""
        cdef uint64_t[4] f
        self.write_parts(plan, arrays, pickled, f)
        return f[0], f[1], f[2], f[3]

    cdef int write_batch(self, object batch, uint64_t* record) except -1:
        cdef Plan plan
        cdef list arrays
        cdef bytes pickled = None
        try:
            plan = self.find_plan(batch)
            if plan is None:
                plan, self.arrays, self.objects = plan_for(batch, self)
                self.contents = contents_of(self.objects, MOST_SEARCHED)
            arrays = self.arrays
            if plan.objects and self.contents == PLAIN:
                pickled = dumps(self.objects, protocol=5)
            elif plan.objects:
                pickled, buffers = dump(self.objects)
                arrays = arrays + buffers
            # Arrays that will be cast should not be allocated in the slot.
            if self.room.watched:
                self.room.slot_allocator.learn([
                    array for k, array in enumerate(arrays) if flat_of(array) is not None
                    and not (k < plan.leaf_count and plan.leaf[k].casts)])
            self.write_parts(plan, arrays, pickled, record)
        finally:
            self.forget()
            self.objects = None
        return 0

    cdef int write_parts(self, Plan plan, list arrays, bytes pickled, uint64_t* record) except -1:
        cdef Room room = self.room
        cdef Py_ssize_t base = room.reserve(0) if room.target is not None else aligned(room.used)
        cdef Py_ssize_t end = base
        cdef Py_ssize_t structure = plan.text_bytes
        cdef int leaves = plan.leaf_count
        cdef int count = <int>PyList_GET_SIZE(arrays)
        cdef Py_ssize_t layout = 8 * plan.words
        cdef Py_ssize_t table = 8 * (2 * (count - leaves) + 1)
        cdef Py_ssize_t objects = 0 if pickled is None else len(pickled) + table
        cdef Py_ssize_t offset, nbytes
        cdef int64_t* word
        cdef int k, i
        cdef Leaf* leaf
        cdef cnp.ndarray array
        cdef Memory memory
        self.grow_words(plan.words + table // 8)
        word = self.words
        for k in range(count):
            leaf = &plan.leaf[k] if k < leaves else &BUFFER
            array = <cnp.ndarray>PyList_GET_ITEM(arrays, k)
            nbytes = cnp.PyArray_SIZE(array) * leaf.itemsize
            for i in range(leaf.nd):
                set_word(&word[2 + i], cnp.PyArray_DIM(array, i))
            offset = -1
            if room.loaned and not leaf.casts:
                offset = self.find_own(k, plan, array, nbytes, base)
            if offset < 0:
                offset = end
                end += aligned(nbytes)
            set_word(&word[0], offset)
            set_word(&word[1], nbytes)
            word += leaf.words
        word[0] = count - leaves
        nbytes = end + structure + layout + objects
        if room.target is None and nbytes <= room.capacity and nbytes <= room.memory.size:
            room.used = nbytes
        else:
            room.reserve(nbytes - base)
        memory = room.memory
        memory.inside(0, nbytes)
        word = self.words
        for k in range(count):
            leaf = &plan.leaf[k] if k < leaves else &BUFFER
            if word[0] >= base:
                write_array(memory, word, leaf, <cnp.ndarray>PyList_GET_ITEM(arrays, k))
            word += leaf.words
        memcpy(memory.data + end, plan.text, structure)
        memcpy(memory.data + end + structure, self.words, layout)
        if pickled is not None:
            memory.put(end + structure + layout, <const char*>pickled, len(pickled))
            memory.put(nbytes - table, <const char*>self.words + layout, table)
        record[0], record[1], record[2], record[3] = end, structure, layout, objects
        return 0


cdef inline void set_word(int64_t* word, int64_t value) noexcept:
    """Store a word only if it has changed, because a recent store delays wider reads."""
    if word[0] != value:
        word[0] = value


cdef int write_array(Memory memory, int64_t* word, Leaf* leaf, cnp.ndarray array) except -1:
    """Copy an array to its place in the slot, casting it if necessary."""
    cdef cnp.npy_intp dims[MAX_DIMS]
    cdef int i, nd = leaf.nd
    if not leaf.casts and (not leaf.rows or cnp.PyArray_IS_C_CONTIGUOUS(array)):
        return memory.put(word[0], <const char*>cnp.PyArray_DATA(array), word[1])
    for i in range(nd):
        dims[i] = word[2 + i]
    if not leaf.rows:
        nd, dims[0] = 1, word[1] // leaf.itemsize
        array = flat_of(array)
    memory.inside(word[0], word[1])
    PyArray_CopyInto(cseq_array_on(memory, memory.data + word[0], leaf.dtype, nd, dims, NULL,
                                   cnp.NPY_ARRAY_CARRAY), array)
    return 0


@cython.final
cdef class ObjectTable:
    """One object or None for each cell of a ring. The writer of the cell owns the entry.

    Normal list access would make both sides write the list's lock and reference count for every
    batch, so the core bypasses them. Each entry has its own cache line.
    """

    def __cinit__(self, Py_ssize_t cells):
        self.cells = cells
        self.held = [None] * (STRIDE * cells)
        self.items = cseq_items(self.held)

    cdef int check(self, Py_ssize_t entry) except -1:
        if entry < 0 or entry >= self.cells:
            raise IndexError(f"cell {entry} is not in [0, {self.cells})")
        return 0

    def __getitem__(self, Py_ssize_t entry):
        self.check(entry)
        return self.get(entry)

    def __setitem__(self, Py_ssize_t entry, value):
        self.check(entry)
        self.put(entry, value)


@cython.final
cdef class TicketWriter(BatchWriter):
    """Writes batches and exceptions to slots, in a worker; see `Room`."""

    cdef readonly Room room
    cdef readonly Encoder encoder

    def __cinit__(self, int fd, uint64_t width, SlotTable slots=None):
        self.room = Room(fd, width, slots)
        self.encoder = Encoder(self.room)

    def cast_to(self, dtype):
        self.encoder.cast = dtype

    cdef int open_ticket(self) except -1:
        return self.room.open_slot()

    def fetch(self, Runner runner not None):
        """Decode the batch of a converter's ticket. The converted batch is written after it."""
        self.room.select(runner.slot, runner.capacity, sum(runner.record))
        return decode(self.room.loan(), runner.record)

    def write(self, Runner runner not None, batch):
        self.room.settle()
        return self.encoder.encode(batch)

    cdef bint publish_batch(self, Runner runner, object batch) except -1:
        """Write and publish a batch, unless its arrays may be in the slot."""
        cdef cseq_cell* c = runner.held()
        CSEQ_POINT("index")
        if self.room.target is not None or self.room.loaned:
            return False
        self.encoder.write_batch(batch, c.record)
        # Pickling may have created arrays in the slot and kept them.
        if self.room.loaned:
            return False
        self.hand_over(runner, c, 0)
        return True

    def publish(self, Runner runner not None, record):
        self.room.end_slot()
        self.deliver(runner, BATCH, record)

    def end_items(self, Runner runner not None):
        self.room.settle()
        self.room.end_slot()
        self.deliver(runner, ENDED, (0, 0, 0, 0))

    def fail(self, Runner runner not None, error, uint32_t status=RAISED):
        """Write an exception to the slot, or only its text if memory is short."""
        try:
            record = self.write_error(runner, failure.pack(error))
        except MemoryError:
            try:
                record = self.write_error(runner, failure.pack_text(error))
            except MemoryError:
                runner.publish(status)
                return
        self.deliver(runner, status, record)

    cdef tuple write_error(self, Runner runner, packed):
        if self.room.slots is None:
            self.room.select(runner.slot, runner.capacity)
        else:
            self.room.begin_slot()
        record = self.encoder.encode(packed)
        self.room.end_slot()
        return record

    cdef int deliver(self, Runner runner, uint32_t status, record) except -1:
        cdef cseq_cell* c = runner.held()
        cdef uint64_t* fields = c.converted if runner.stage else c.record
        fields[0], fields[1], fields[2], fields[3] = record
        self.hand_over(runner, c, status)
        return 0

    cdef void hand_over(self, Runner runner, cseq_cell* c, uint32_t status) noexcept:
        """Publish the slot, which then no longer belongs to this process."""
        if self.room.slots is not None:
            cseq_store_rel_u32(&c.slot, <uint32_t>self.room.slot)
            self.room.slot = -1
            CSEQ_POINT("named")
        c.capacity = max(c.capacity, <uint64_t>self.room.capacity)
        runner.deliver(c, status)


@cython.final
cdef class Objects(BatchWriter):
    """Both ends of a transfer between threads.

    `below` reads batches from a previous stage that writes to slots. Several rings may share
    `objects`. This ring's entries start at `first`.
    """

    cdef readonly ObjectTable objects
    cdef readonly object below
    cdef readonly Py_ssize_t first

    def __cinit__(self, Py_ssize_t cells, below=None, *, ObjectTable objects=None, Py_ssize_t first=0):
        self.objects, self.first = ObjectTable(cells) if objects is None else objects, first
        self.below = below

    def decoder(self, *, convert=None, leaf_for=None):
        """Create a decoder that also frees the objects and the slots of the previous stage."""
        slots = None if self.below is None else self.below.arena.slots
        return Decoder(objects=self.objects, slots=slots, convert=convert, leaf_for=leaf_for)

    cdef bint publish_batch(self, Runner runner, object batch) except -1:
        cdef cseq_cell* c = runner.held()
        self.objects.put(self.first + runner.cell, batch)
        runner.deliver(c, 0)
        return True

    def write(self, Runner runner not None, batch):
        self.objects[self.first + runner.cell] = batch
        return ()

    def publish(self, Runner runner not None, record):
        runner.publish(BATCH, record)

    def fail(self, Runner runner not None, error, uint32_t status=RAISED):
        """Publish an exception."""
        self.objects[self.first + runner.cell] = error
        runner.publish(status)

    def end_items(self, Runner runner not None):
        runner.publish(ENDED)

    def fetch(self, Runner runner not None):
        """Return the batch of the current ticket."""
        return self.objects[self.first + runner.cell]

    def decode(self, Py_ssize_t entry, slot, capacity, record):
        """Return the object in an entry."""
        return self.objects[entry]

    def error(self, Py_ssize_t entry, slot, capacity, record):
        """Return the exception. It is in the slot if the previous stage raised it."""
        # Check the entry first, because a converter may raise while its batch is still in the slot.
        error = self.objects[entry]
        if error is None:
            error = self.below.error(entry, slot, capacity, record)
        return error


@cython.final
cdef class Decoder:
    """Decodes batches in cells and slots in C, if possible.

    Parameters
    ----------
    objects : ObjectTable, optional
        The batches from threads.
    slots : SlotTable, optional
        The slots of batches from processes.
    mapped : list of Mapping or None, optional
        The mapping of each slot.
    lend : callable, optional
        See `decode`.
    convert : callable, optional
        Applied to each batch that is decoded in C. The pool converts all others.
    leaf_for : callable, optional
        The same conversion for single leaves; see `Plan.converters`.
    """

    def __cinit__(self, *, ObjectTable objects=None, SlotTable slots=None, list mapped=None, lend=None,
                  convert=None, leaf_for=None):
        self.objects, self.slots, self.mapped, self.lend = objects, slots, mapped, lend
        self.convert, self.leaf_for = convert, leaf_for
        self.passes = objects is not None and slots is None and convert is None
        self.converters = {}

    cdef object peek(self, uint32_t entry, cseq_cell* c):
        """Return the batch in a cell for `take_peeked`, or UNREAD if Python must decode it.

        The batch stays in the cell. Do not call this if `hands_over` returns True.
        """
        batch = self.decode(entry, c)
        return batch if batch is UNREAD else self.divide(batch)

    cdef object divide(self, batch):
        """Unwrap a decoded batch if it is a `Partial`, and set `left`."""
        self.left = None
        if (<PyObject*>batch).ob_type is PARTIAL:
            batch, self.left = batch
        return batch

    cdef PyObject* take_peeked(self, uint32_t entry, object batch) noexcept:
        """Return the result of `peek` as an owned reference."""
        if batch is AS_IT_IS:
            return self.objects.take_object(entry)
        Py_INCREF(batch)
        return <PyObject*>batch

    cdef object decode(self, uint32_t entry, cseq_cell* c):
        """Return the batch in a cell, or UNREAD if Python must decode it."""
        if c.status:
            return UNREAD
        if self.objects is not None:
            batch = self.objects.get(entry)
            if batch is None:
                return UNREAD
        else:
            batch = self.decode_slot(c)
            if self.leaf_for is not None or batch is UNREAD:
                return batch
        return batch if self.convert is None else self.convert(batch)

    cdef object decode_slot(self, cseq_cell* c):
        cdef Mapping slot
        cdef Plan plan
        cdef uint64_t* f = c.record
        if c.stage or self.mapped is None or c.slot >= <uint64_t>PyList_GET_SIZE(self.mapped):
            return UNREAD
        slot = self.mapped[c.slot]
        if slot is None or <uint64_t>slot.size < c.capacity:
            return UNREAD
        check_record(slot, f)
        plan = <Plan>self.plan
        if plan is None or not plan.is_of(slot, f):
            plan = plan_of(slot, f)
            self.leaves = self.leaves_of(plan)
            self.plan = plan
        return plan.read(slot, f, self.lend, c.slot, c.capacity, self.leaves)

    cdef list leaves_of(self, plan):
        """Return the converters for the leaves of a plan, or None to convert whole batches."""
        cdef list leaves
        if self.leaf_for is None:
            return None
        leaves = self.converters.get(plan)
        if leaves is None:
            if len(self.converters) >= MOST_PLANS:
                self.converters.clear()
            leaves = self.converters[plan] = plan.converters(self.leaf_for, self.convert)
        return leaves


def decode(Memory memory not None, record, lend=None, Py_ssize_t slot=-1, uint64_t capacity=0):
    """Read a batch from `memory`, given its `codec.Record`.

    ``lend(slot, capacity)`` returns the memory for views of large arrays, or None to copy them.
    Small arrays are copied. Without `lend`, all arrays are views of `memory`. Raises IndexError if
    the record does not fit in the memory.
    """
    cdef uint64_t f[4]
    cdef int k
    for k in range(4):
        word = record[k]
        f[k] = word if 0 <= word <= memory.size else <uint64_t>-1
    check_record(memory, f)
    return plan_of(memory, f).read(memory, f, lend, slot, capacity, None)
