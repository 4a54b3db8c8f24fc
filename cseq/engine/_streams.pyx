# cython: language_level=3, freethreading_compatible=True
"""What an epoch of a stream asks for: workers' own items, or items of keys."""

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

cdef uint64_t NO_MORE = <uint64_t>-1  # tickets: the items of a worker have ended
cdef uint64_t MOST_AHEAD = <uint64_t>1 << 40
cdef object NOTHING = object()


cdef int64_t* refer(Ring ring, uint32_t cell, Request key, Request assignment, str name) noexcept:
    """Write the requests that the ticket in a cell refers to: the cell's words.

    `name`: what messages call it, if it is a call.
    """
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
    """Data for a worker process, in a slot that is taken for as long as this object exists; for a thread,
    the object itself.

    Parameters
    ----------
    slots : SlotTable, optional
    value : object, optional

    Attributes
    ----------
    slot : int
        The lowest free one; -1: none.
    value : object
    """

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
        """Set where in the slot the data lie: the slot's committed bytes, and a `codec.Record`."""
        cdef int k
        self.slots.resize(self.slot, capacity)
        self.words[0], self.words[1] = self.slot, <int64_t>capacity
        for k in range(4):
            self.words[2 + k] = record[k]


cdef class StreamSource(Source):
    """Tickets of workers, each of which has a queue of its own and an assignment for the epoch.

    Parameters
    ----------
    rings : list of Ring
        By worker.
    epoch : int
    assignments : list of Request
    depth : int
        The most tickets of a worker that are in the ring.
    first : int
        The worker whose turn is the first.
    """

    cdef list rings
    cdef list assignments      # by worker: the `Request` that a ticket refers to
    cdef uint32_t depth        # the most tickets of a worker
    cdef Py_ssize_t latest     # the worker of the last ticket

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
    """The workers' own items, of one worker after the other; a worker whose items have ended gets no
    more tickets."""

    cdef uint64_t* asked       # by worker: tickets so far; or NO_MORE

    def __cinit__(self, *_, **__):
        self.asked = <uint64_t*>PyMem_RawCalloc(len(self.rings), sizeof(uint64_t))
        if self.asked == NULL:
            raise MemoryError(f"no memory for {len(self.rings)} workers")

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

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        self.latest = number
        refer(ring, cell, None, self.assignment(number), None)
        ring.offer(cell, ticket, self.epoch, ASK_ITEM, 1, self.asked[number], 0)
        self.asked[number] += 1
        return 1

    cdef void end(self, Py_ssize_t number) noexcept:
        self.asked[number] = NO_MORE

    cdef bint is_over(self) noexcept:
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(self.rings)):
            if self.asked[k] != NO_MORE:
                return False
        return True


cdef Block ints_of(key, Py_ssize_t most):
    """The numbers of a list of 1 to `most` ints within int64 (no subclasses); else None."""
    cdef Py_ssize_t k
    cdef int64_t* words
    cdef int overflow = 0
    cdef Block block
    cdef tuple numbers  # another thread may change the list
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
    """Items that are named by keys, which an iterator gives: so many ahead, then one for each item taken.

    A key goes through three steps::

        draw     store the iterator's next key in `key`; the next step may be interrupted
        write    store its ints, or a `Request`, in `drawn`
        post     post its ticket, in the step that takes an item out: C alone

    Parameters
    ----------
    keys : iterator
    pickle : callable
        ``pickle(key, number)`` → `Request`.
    prefetch : int
        How many keys of each worker are drawn ahead of the items that were taken.
    in_order : bool
        The items come in the order of the keys: so do the tickets go to the workers in turn.
    free : bool
        A key goes to the worker that has the fewest keys to work on; else to the workers in turn.
    samples : callable, optional
        ``samples(key)``: how many samples its item counts for, at least 1. None: one each.
    """

    cdef object keys           # the iterator; None: there is none, or it has ended
    cdef object key            # drawn and not yet written; NOTHING: there is none
    cdef list drawn            # to be posted: a `Block` or `Request`, and how many samples it is
    cdef object samples        # how many there are in the item of a key; None: one
    cdef object error          # to be raised after the items of all keys
    cdef object incomplete     # the one of them that is raised until an epoch begins
    cdef object pickle
    cdef bint in_order, free
    cdef uint64_t ahead        # keys that are drawn ahead of what was taken
    cdef uint64_t each         # the most of one worker that are posted and not taken
    cdef uint64_t posted

    def __cinit__(self, list rings not None, uint64_t epoch, list assignments not None, keys, pickle, *,
                  uint32_t depth, uint64_t prefetch, bint in_order, bint free, samples=None, **__):
        self.keys, self.pickle, self.keyed = keys, pickle, True
        self.in_order, self.free = in_order, free
        self.ahead = min(prefetch, MOST_AHEAD) * <uint64_t>PyList_GET_SIZE(rings)
        self.each = min(prefetch, <uint64_t>depth)
        self.key, self.drawn, self.samples = NOTHING, [], samples

    cdef bint is_ready(self, uint64_t taken) noexcept:
        return self.key is NOTHING and (
            self.keys is None
            or self.posted + <uint64_t>PyList_GET_SIZE(self.drawn) >= self.ahead + taken)

    cdef int prepare(self, uint64_t taken) except -1:
        return self.draw() if self.key is NOTHING else self.put()

    cdef int draw(self) except -1:
        """Draw a key. An exception of the iterator is raised after the items of the keys before.

        One that is no `Exception`, such as KeyboardInterrupt of a signal handler, is raised at
        once. The iterator is asked again afterwards; if it has ended, as a generator has, that is
        an error, which is raised again and again until an epoch begins.
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
                f"the iterator of keys was interrupted ({type(cause).__name__}) and has ended: "
                "the rest of the epoch may be missing")
            raise
        else:
            self.error = None
        return 0

    cdef int put(self) except -1:
        """Write the key that was drawn."""
        written = ints_of(self.key, <Py_ssize_t>self.ring(0).r.batch_size - KEY_INTS)
        count = 1 if self.samples is None else max(1, self.samples(self.key))  # 0: see `publish`
        if written is None:
            try:
                written = self.pickle(self.key, self.posted + <uint64_t>len(self.drawn))
            except (TypeError, ValueError) as error:  # it cannot be pickled, or is too long
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
            if self.ring(worker).outstanding < self.each:
                return worker
        return -1

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words
        cdef Block ints
        cdef uint32_t count
        self.latest = number
        key, count = self.drawn.pop(0)
        if type(key) is Block:
            ints = <Block>key
            words = refer(ring, cell, None, self.assignment(number), None)
            words[KEY_LENGTH] = ints.size // 8
            memcpy(words + KEY_INTS, ints.data, <size_t>ints.size)
        else:
            refer(ring, cell, <Request>key, self.assignment(number), None)
        ring.offer(cell, ticket, self.epoch, ASK_ITEM, count, self.posted, 0)
        self.posted += 1
        return 1

    cdef bint is_over(self) noexcept:
        return self.keys is None and self.key is NOTHING and not PyList_GET_SIZE(self.drawn)

    cpdef int finish(self) except -1:
        error = self.error
        if error is not self.incomplete:  # that is raised until an epoch begins
            self.error = None
        if error is not None:
            raise error
        return 0
