"""What an epoch asks for, ticket by ticket."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython

from cseq._core cimport Reader, Ring
from cseq._memory cimport Block
from cseq._slots cimport Slots


cdef enum:
    ASK_ITEM = 0       # kinds of tickets of a stream; see producer.py
    ASK_BEGIN = 1
    ASK_CALL = 2
    REQUEST_WORDS = 6  # where a request lies: slot, bytes committed, record
    # A cell's words: the call or key, and the assignment, both requests; and after these:
    KEY_LENGTH = 12    # how many ints the key has; or one of these:
    WITHOUT_KEY = -1
    KEY_IN_REQUEST = -2
    KEY_INTS = 13


cdef class Source:
    cdef readonly uint64_t epoch
    cdef readonly uint64_t consumed  # units before the first ticket
    cdef readonly bint keyed         # its items are named by keys
    cdef bint is_ready(self, uint64_t taken) noexcept
    cdef int prepare(self, uint64_t taken) except -1
    cdef Py_ssize_t target(self) noexcept
    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept
    cdef void end(self, Py_ssize_t number) noexcept
    cdef bint is_over(self, Py_ssize_t number) noexcept
    cdef int finish(self) except -1


@cython.final
cdef class OrderSource(Source):
    cdef readonly Reader reader
    # Batch k has the number `first` + k. For k < `full` it is `size` units from position `start` + k *
    # `stride` on, and counts `stride`; the one after them is `part` units from `part_start` on, and
    # counts `rest`.
    cdef uint64_t posted, batches, first, full, start, stride, part_start, rest
    cdef uint32_t size, part
    cdef object later     # how the epochs after this one are cut
    cdef uint64_t more    # how many there are
    cdef uint64_t most    # units of a batch
    # What was read of batches `posted` to `known`.
    cdef uint64_t known
    cdef Block data
    cdef int64_t* samples_read
    cdef int64_t* sizes_read  # of their units; NULL: each is one sample
    cdef int64_t* sizes       # where those of all that was read are
    cdef int divide(self, cut) except -1
    cdef uint64_t at(self, uint64_t batch) noexcept
    cdef int64_t read(self, uint64_t batch, int64_t* out, int64_t* sizes) except -1


@cython.final
@cython.no_gc
cdef class Request:
    cdef Slots slots
    cdef readonly Py_ssize_t slot
    cdef int64_t words[REQUEST_WORDS]


cdef int64_t* refer(Ring ring, uint32_t cell, Request key, Request assignment, str name) noexcept


cdef class StreamSource(Source):
    cdef list rings
    cdef list assignments      # by worker: the `Request` that a ticket refers to
    cdef uint32_t depth        # the most tickets of a worker
    cdef Py_ssize_t latest     # the worker of the last ticket
    cdef Ring ring(self, Py_ssize_t worker)
    cdef Request assignment(self, Py_ssize_t worker)


@cython.final
cdef class ItemSource(StreamSource):
    cdef uint64_t* asked       # by worker: tickets so far; or ENDED
    cdef uint32_t beginning    # 1 until `open`


@cython.final
cdef class KeySource(StreamSource):
    cdef object keys           # the iterator; None: there is none, or it has ended
    cdef object key            # drawn and not yet written; NOTHING: there is none
    cdef list drawn            # `Block`s and `Request`s, to be posted
    cdef object samples        # how many there are in the item of a key; None: one
    cdef list counts           # of the keys in `drawn`, unless that is None
    cdef object error          # to be raised after the items of all keys
    cdef object incomplete     # the one of them that is raised until an epoch begins
    cdef object pickle
    cdef bint in_order, in_turn, free
    cdef uint64_t ahead        # keys that are drawn ahead of what was taken
    cdef uint64_t each         # the most of one worker that are posted and not taken
    cdef uint64_t posted
    cdef int draw(self) except -1
    cdef int put(self) except -1
