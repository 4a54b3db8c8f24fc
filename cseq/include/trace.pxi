# What a trace records: tickets that were taken; spans and counters.

from libc.errno cimport EFBIG, errno

import logging
import os

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #define CSEQ_THREAD __declspec(thread)
    #else
    #define CSEQ_THREAD _Thread_local
    #endif
    /* The number that this thread has in traces: that of the system, once it was asked for. */
    static CSEQ_THREAD uint32_t cseq_thread_known;
    static uint32_t cseq_thread(void) {
        if (!cseq_thread_known) cseq_thread_known = (uint32_t)PyThread_get_thread_native_id();
        return cseq_thread_known;
    }
    static void cseq_thread_is(uint32_t number) { cseq_thread_known = number; }
    """
    uint32_t cseq_thread() noexcept
    void cseq_thread_is(uint32_t number) noexcept


cdef extern from "cseq_trace.h" nogil:
    enum:
        CSEQ_SPAN
        CSEQ_COUNT

    ctypedef struct cseq_mark:
        uint64_t begin_ns
        double value
        uint32_t thread
        uint32_t kind
        char[40] name

    int cseq_mark_append(int fd, const cseq_mark* m) noexcept


cdef uint64_t MOST_MARKS = 1 << 18  # of a process in a trace; the others are not recorded
COUNT = CSEQ_COUNT

TAKEN = numpy.dtype([  # cseq_taken
    ("started", "u8"), ("indexed", "u8"), ("converting", "u8"), ("converted", "u8"), ("asked", "u8"),
    ("taken", "u8"), ("batch", "u4"), ("epoch", "u4"), ("thread", "u4"), ("feed", "u2"),
    ("worker", "u2"), ("converter", "u2"), ("pad", "V6")])
MARK = numpy.dtype([  # cseq_mark
    ("begin", "u8"), ("value", "f8"), ("thread", "u4"), ("kind", "u4"), ("name", "S40")])

cdef cseq_log here_log
log = &here_log
cdef object room = None  # of the log

cdef uint32_t here_traced  # the number of the trace that records here; 0: none
cdef uint32_t* traced = &here_traced  # the same, of a worker process: a word of its ring
cdef Ring traced_ring = None  # which it keeps
cdef int marks_fd = -1
cdef uint32_t own_pid, marked  # of this process; the trace that the latest mark was of
cdef uint64_t marks_left  # that are still recorded in that
cdef object guard = object()  # of critical sections around a mark, and around the end of all


cdef uint32_t thread_id() noexcept:
    """The number that this thread has in traces."""
    return cseq_thread()


# -- tickets

def begin_log(uint64_t size):
    """Begin to record the tickets that are taken: the newest `size` of them."""
    global room
    made = numpy.empty(size, TAKEN)
    made.view(numpy.uint8).fill(0)  # its pages are there before the first ticket
    log.taken, log.size = cnp.PyArray_DATA(made), size
    log.begun = log.done = 0
    log.on = True
    room = made


def end_log():
    """Record no more tickets; return an array of those that there are, and how many there were."""
    log.on = False
    while cseq_load_acq_u64(&log.done) != cseq_load_acq_u64(&log.begun):
        pass  # another thread is in the middle of one, without a GIL: some ten ns
    if log.begun < log.size:
        return room[:log.begun], log.begun
    return numpy.roll(room, -<Py_ssize_t>(log.begun % log.size)), log.begun


# -- marks

def attach_marks(int fd, Ring own=None):
    """Have this process append its marks to a file, as long as `trace_here` says so; in a worker process,
    this thread's among them, as long as its own ring does."""
    global marks_fd, own_pid, traced, traced_ring
    marks_fd, own_pid = fd, os.getpid()
    traced, traced_ring = &here_traced, own
    if own is not None:
        traced = &own.r.traced
        cseq_thread_is(own_pid)


def trace_here(uint32_t number):
    """Have this process record marks for the trace of this number; 0: for none."""
    with cython.critical_section(guard):
        cseq_swap_sc_u32(&here_traced, number)


def trace_workers(Ring ring not None, uint32_t number):
    """Have the worker processes of a ring record marks for the trace of this number; 0: for none."""
    cseq_store_rlx_u32(&ring.r.traced, number)


def in_forked_child():
    """Record nothing: the process that has forked this one does."""
    global traced, traced_ring
    log.on = False
    trace_here(0)
    traced, traced_ring = &here_traced, None
    cseq_thread_is(0)


cdef int mark(str name, uint32_t kind, uint64_t begin_ns, double value) except -1:
    """Append a mark of this thread, if a trace records."""
    cdef cseq_mark m
    cdef Py_ssize_t length
    cdef const char* text
    cdef int error
    if not name.isascii():
        name = name.encode("utf-8", "replace").decode()
    text = PyUnicode_AsUTF8AndSize(name, &length)
    memset(&m, 0, sizeof(m))
    memcpy(m.name, text, min(length, <Py_ssize_t>sizeof(m.name)))
    m.begin_ns, m.value, m.thread, m.kind = begin_ns, value, cseq_thread(), kind
    with cython.critical_section(guard):
        error = append_mark(&m)
    if error:
        logging.getLogger("cseq").warning(
            "the trace has no more spans of process %d: %s", own_pid, os.strerror(error))
    return 0


cdef int append_mark(cseq_mark* m) noexcept:
    """Append a mark, unless none is wanted, or not so many: 0, or an errno."""
    global marked, marks_left
    cdef uint32_t number = cseq_load_rlx_u32(traced)
    cdef int error = EFBIG
    if number != marked:
        marked, marks_left = number, MOST_MARKS + 1
    if not number or not marks_left:
        return 0
    marks_left -= 1
    if marks_left:
        if cseq_mark_append(marks_fd, m):
            return 0
        error = errno
    marks_left = 0
    return error


@cython.final
@cython.no_gc
cdef class Span:
    """What `span` returns while a trace records."""

    cdef str name
    cdef uint64_t begun

    def __enter__(self):
        self.begun = cseq_now_ns()

    def __exit__(self, kind, error, trace):
        if self.begun:
            mark(self.name, CSEQ_SPAN, self.begun, <double>(cseq_now_ns() - self.begun))


@cython.binding(False)
def enter_nothing():
    pass


@cython.binding(False)
def exit_nothing(kind, error, trace):
    pass


class NoSpan:
    """What `span` returns while nothing records: functions that are no methods, so none is bound."""

    __slots__ = ()
    __enter__, __exit__ = enter_nothing, exit_nothing


cdef object NO_SPAN = NoSpan()


@cython.binding(False)
@cython.always_allow_keywords(False)
def span(str name not None):
    """Record what a piece of code takes, in the trace that is being recorded.

    In indexers, in the loop, in any thread of these processes. While nothing is recorded, it does
    nothing, and takes about as long as a call of an empty function.

    Parameters
    ----------
    name : str
        How the trace shows it: its first 40 bytes.

    Returns
    -------
    context manager
        It ends before the batch, or the step of the loop, in which it began.

    See Also
    --------
    trace : What records.

    Examples
    --------
    >>> class Images:
    ...     def __getitem__(self, indices):
    ...         with cseq.span("decode"):
    ...             return np.repeat(indices, 2)
    >>> with cseq.MPSequence(Images, 4, batch_size=4, shuffle=False, out_type="null").start() as b:
    ...     print(*b)
    [0 0 1 1 2 2 3 3]
    """
    cdef Span made
    if not cseq_load_rlx_u32(traced):
        return NO_SPAN
    made = Span.__new__(Span)
    made.name = name
    return made


@cython.binding(False)
def count(str name not None, double n=1.0):
    """Add to a counter in the trace that is being recorded, which shows its sum over time.

    In indexers, in the loop, in any thread of these processes; the sum is that of all, since the trace
    began. While nothing is recorded, it does nothing.

    Parameters
    ----------
    name : str
        How the trace shows it.
    n : float
        What is added.

    See Also
    --------
    trace : What records.

    Examples
    --------
    >>> cseq.count("bytes read", 4096)
    """
    if cseq_load_rlx_u32(traced):
        mark(name, CSEQ_COUNT, cseq_now_ns(), n)
