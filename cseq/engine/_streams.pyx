# cython: language_level=3, freethreading_compatible=True
"""Ticket sources for streams."""

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cimport cython

from cseq._core cimport (
    ASK_ITEM, KEY_IN_REQUEST, KEY_INTS, KEY_LENGTH, REQUEST_WORDS, WITHOUT_KEY, Ring,
)
from cseq._headers cimport *
from cseq._lock cimport check_depth
from cseq._memory cimport Block
from cseq.memory._slots cimport SlotTable
from cseq.order._source cimport Source

cdef uint64_t NO_MORE = <uint64_t>-1
cdef uint64_t MOST_AHEAD = <uint64_t>1 << 40
cdef object NOTHING = object()


cdef int64_t* refer(Ring ring, uint32_t cell, Request key, Request assignment, str name) noexcept:
    """Write a ticket's requests into its cell and return the cell's words."""
    cdef int64_t* words = cseq_ring_indices(ring.r, cell)
    words[KEY_LENGTH] = WITHOUT_KEY
    if assignment is not None:
        memcpy(words + REQUEST_WORDS, assignment.words, sizeof(assignment.words))
    if key is not None:
        words[KEY_LENGTH] = KEY_IN_REQUEST
        memcpy(words, key.words, sizeof(key.words))
    ring.kept[cell] = assignment, key, name
    return words


@cython.final
@cython.no_gc_clear
cdef class Request:
    """Data for a worker: a value for a thread, or a slot for a process. It owns the slot."""

    def __cinit__(self, SlotTable slots=None, value=None):
        memset(self.words, 0, sizeof(self.words))
        self.slot = -1
        self.slots, self.value = slots, value
        if slots is not None:
            self.slot = slots.take()

    def __dealloc__(self):
        if self.slot >= 0:
            self.slots.set_free(self.slot)

    def locate(self, uint64_t capacity, record):
        """Set the location of the data in the slot; see `codec.Record`."""
        cdef int k
        self.slots.resize(self.slot, capacity)
        self.words[0], self.words[1] = self.slot, <int64_t>capacity
        for k in range(4):
            self.words[2 + k] = record[k]


cdef class StreamSource(Source):
    """The base class for sources with one queue and one assignment per worker.

    `depth` is the maximum number of tickets per ring. Worker `first` receives the first ticket.
    """

    cdef list rings
    cdef list assignments
    cdef uint32_t depth
    cdef Py_ssize_t latest

    def __cinit__(self, list rings not None, uint64_t epoch, list assignments not None, *_,
                  uint32_t depth, Py_ssize_t first=0, **__):
        self.rings, self.epoch, self.assignments = rings, epoch, assignments
        self.depth, self.latest = depth, first - 1

    cdef inline Ring ring(self, Py_ssize_t worker):
        return <Ring>PyList_GET_ITEM(self.rings, worker)

    cdef inline Request assignment(self, Py_ssize_t worker):
        return <Request>PyList_GET_ITEM(self.assignments, worker)


@cython.final
cdef class ItemSource(StreamSource):
    """Requests items from the workers in turn. Exhausted workers are skipped."""

    cdef uint64_t* asked

    def __cinit__(self, *_, **__):
        self.asked = <uint64_t*>PyMem_RawCalloc(len(self.rings), sizeof(uint64_t))
        if self.asked == NULL:
            raise MemoryError(f"not enough memory for {len(self.rings)} workers")

    def __dealloc__(self):
        PyMem_RawFree(self.asked)

    cdef Py_ssize_t target(self) noexcept:
        cdef Py_ssize_t count = PyList_GET_SIZE(self.rings)
        cdef Py_ssize_t k, worker
        for k in range(count):
            worker = (self.latest + 1 + k) % count
            if self.asked[worker] != NO_MORE and self.ring(worker).outstanding < self.depth:
                return worker
        return -1

    cdef uint64_t write(self, Py_ssize_t worker, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        self.latest = worker
        refer(ring, cell, None, self.assignment(worker), None)
        ring.offer(cell, ticket, self.epoch, ASK_ITEM, 1, self.asked[worker], 0)
        self.asked[worker] += 1
        return 1

    cdef void end(self, Py_ssize_t worker) noexcept:
        self.asked[worker] = NO_MORE

    cdef bint is_over(self) noexcept:
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(self.rings)):
            if self.asked[k] != NO_MORE:
                return False
        return True


cdef Block ints_of(key, Py_ssize_t most):
    """Convert a list of 1 to `most` ints to int64. Return None for other keys."""
    cdef Py_ssize_t k
    cdef int64_t* words
    cdef int overflow = 0
    cdef Block block
    # A copy of the list, because another thread may change it.
    cdef tuple numbers
    if type(key) is not list:
        return None
    numbers = tuple(key)
    if not 0 < PyTuple_GET_SIZE(numbers) <= most:
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
cdef class KeySource(StreamSource):
    """Requests an item for each key of an iterator.

    Initially, `prefetch` keys per worker are drawn. After that, each consumed item draws a key.
    Each key takes three steps::

        draw     store the next key of the iterator in `key`, in case the next step is interrupted
        write    add the ints of the key, or a `Request`, to `drawn`
        post     post the ticket while an item is being committed; runs only C code

    Parameters
    ----------
    keys : iterator
    pickle : callable
        ``pickle(key, number)`` returns a `Request`.
    prefetch : int
        The number of keys per worker to draw before their items are consumed.
    in_order : bool
        Whether items are delivered in the order of their keys.
    free : bool
        Whether the worker with the fewest keys receives the next key.
    samples : callable, optional
        ``samples(key)`` returns the number of samples in an item (at least 1). By default, it is 1.
    """

    cdef object keys
    # A key that has been drawn but not yet written, or NOTHING.
    cdef object key
    # Each entry is a pair: a `Block` or `Request`, and the number of samples.
    cdef list drawn
    # `error` is raised after the last item, and again by later calls if it is `incomplete`.
    cdef object samples, error, incomplete, pickle
    cdef bint in_order, free
    cdef uint64_t ahead, per_worker, posted

    def __cinit__(self, list rings not None, uint64_t epoch, list assignments not None, keys, pickle, *,
                  uint32_t depth, uint64_t prefetch, bint in_order, bint free, samples=None, **__):
        self.keys, self.pickle, self.keyed = keys, pickle, True
        self.in_order, self.free = in_order, free
        self.ahead = min(prefetch, MOST_AHEAD) * <uint64_t>PyList_GET_SIZE(rings)
        self.per_worker = min(prefetch, <uint64_t>depth)
        self.key, self.drawn, self.samples = NOTHING, [], samples

    cdef bint is_ready(self, uint64_t taken) noexcept:
        return self.key is NOTHING and (
            self.keys is None
            or self.posted + <uint64_t>PyList_GET_SIZE(self.drawn) >= self.ahead + taken)

    cdef int prepare(self, uint64_t taken) except -1:
        return self.draw_key() if self.key is NOTHING else self.write_key()

    cdef int draw_key(self) except -1:
        """Draw a key.

        An Exception from the iterator is raised after the items for all earlier keys. Other
        exceptions, such as KeyboardInterrupt, are raised immediately. If they end the iterator,
        later calls raise an error until a new epoch starts.
        """
        check_depth()
        try:
            self.key = next(self.keys)
        except StopIteration:
            self.keys = None
        except Exception as error:
            self.keys, self.error = None, error
        except BaseException as cause:
            self.error = self.incomplete = RuntimeError(
                f"the iterator of keys was interrupted ({type(cause).__name__}) and has ended; the "
                "rest of the epoch may be missing")
            raise
        else:
            self.error = None
        return 0

    cdef int write_key(self) except -1:
        written = ints_of(self.key, <Py_ssize_t>self.ring(0).r.batch_size - KEY_INTS)
        # A ticket without samples would not be measured; see `cseq_ring_publish`.
        count = 1 if self.samples is None else max(1, self.samples(self.key))
        if written is None:
            try:
                written = self.pickle(self.key, self.posted + <uint64_t>len(self.drawn))
            except (TypeError, ValueError) as error:
                self.keys, self.error, self.key = None, error, NOTHING
                return 0
        self.drawn.append((written, count))
        self.key = NOTHING
        return 0

    cdef Py_ssize_t target(self) noexcept:
        cdef Py_ssize_t count = PyList_GET_SIZE(self.rings)
        cdef Py_ssize_t k, worker
        cdef Py_ssize_t chosen = -1
        cdef uint32_t fewest = 0, working
        cdef Ring ring
        if not PyList_GET_SIZE(self.drawn):
            return -1
        if self.free:
            for k in range(count):
                ring = self.ring(k)
                working = ring.unanswered()
                if ring.outstanding < self.depth and (chosen < 0 or working < fewest):
                    chosen, fewest = k, working
            return chosen
        for k in range(1 if self.in_order else count):
            worker = (self.latest + 1 + k) % count
            if self.ring(worker).outstanding < self.per_worker:
                return worker
        return -1

    cdef uint64_t write(self, Py_ssize_t worker, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words
        cdef Block ints
        cdef uint32_t count
        self.latest = worker
        key, count = self.drawn.pop(0)
        if type(key) is Block:
            ints = <Block>key
            words = refer(ring, cell, None, self.assignment(worker), None)
            words[KEY_LENGTH] = ints.size // 8
            memcpy(words + KEY_INTS, ints.data, <size_t>ints.size)
        else:
            refer(ring, cell, <Request>key, self.assignment(worker), None)
        ring.offer(cell, ticket, self.epoch, ASK_ITEM, count, self.posted, 0)
        self.posted += 1
        return 1

    cdef bint is_over(self) noexcept:
        return self.keys is None and self.key is NOTHING and not PyList_GET_SIZE(self.drawn)

    cpdef int finish(self) except -1:
        error = self.error
        if error is not self.incomplete:
            self.error = None
        if error is not None:
            raise error
        return 0
