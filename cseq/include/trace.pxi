# What a trace records: tickets that were taken; spans and counters.

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #define CSEQ_THREAD __declspec(thread)
    #else
    #define CSEQ_THREAD _Thread_local
    #endif
    /* The system's number of this thread, and the process's generation in which it was asked for. */
    static CSEQ_THREAD uint32_t cseq_thread_known;
    static uint32_t cseq_thread(void) {
        if (!cseq_thread_known) cseq_thread_known = (uint32_t)PyThread_get_thread_native_id();
        return cseq_thread_known;
    }
    static void cseq_thread_forget(void) { cseq_thread_known = 0; }
    """
    uint32_t cseq_thread() noexcept
    void cseq_thread_forget() noexcept


MARKS = CSEQ_MARKS
SPAN, COUNT = CSEQ_SPAN, CSEQ_COUNT
MARKS_BYTES = sizeof(cseq_marks)
cdef uint64_t LEAST_NS = 2000  # shorter copies are not recorded

TAKEN = numpy.dtype([  # cseq_taken
    ("started", "u8"), ("indexed", "u8"), ("taken", "u8"), ("converting", "f4"), ("converted", "f4"),
    ("waited", "f4"), ("batch", "u4"), ("epoch", "u4"), ("thread", "u4"), ("feed", "u2"),
    ("worker", "u2"), ("converter", "u2"), ("status", "u2"), ("pad", "u8")])
MARK = numpy.dtype([  # cseq_mark
    ("number", "u8"), ("begin", "u8"), ("value", "u8"), ("kind", "u4"), ("thread", "u4"),
    ("name", "S32")])

cdef cseq_log here_log
cdef cseq_marks nowhere  # that of a process which records nothing
cdef cseq_marks* here_marks = &nowhere
log = &here_log
marks = &here_marks

cdef Marks here = None   # whose memory `here_marks` is
cdef dict sums = {}      # of its counters
cdef object guard = object()  # of the critical section around a sum
cdef uint32_t own = 0    # the thread that has attached
cdef Block room = None   # of the log


cdef uint32_t thread_id() noexcept:
    """The system's number of this thread."""
    return cseq_thread()


# -- tickets

def begin_log(uint64_t least):
    """Record the tickets that are taken from now on, at least so many of the newest ones."""
    global room
    cdef uint64_t size = 64
    while size < least:
        size *= 2
    if room is None or room.size != <Py_ssize_t>(size * sizeof(cseq_taken)):
        room = Block(size * sizeof(cseq_taken))
        memset(room.data, 0, room.size)  # its pages are there before the first ticket
    log.taken, log.mask = <cseq_taken*>room.data, size - 1
    log.begun = log.done = 0
    log.begun_ns = cseq_now_ns()
    log.on = True


def end_log():
    """Record no more tickets; return an array of those that there are, and how many there were.

    Its memory is used again by the next `begin_log`, which no thread may call before that is read.
    """
    log.on = False
    while cseq_load_acq_u64(&log.done) != cseq_load_acq_u64(&log.begun):
        pass  # another thread is in the middle of one, without a GIL: some ten ns
    cdef uint64_t begun = log.begun
    cdef uint64_t kept = min(begun, log.mask + 1)
    whole = room.view(0, TAKEN, (log.mask + 1,))
    order = numpy.arange(begun - kept, begun, dtype=numpy.uint64) & numpy.uint64(log.mask)
    return whole[order], begun


# -- marks

@cython.final
cdef class Marks:
    """The marks of one process, in memory that it shares with the trainer.

    Parameters
    ----------
    memory : Memory
        Zeroed at first.
    at : int
        Bytes from its beginning to the `MARKS_BYTES` of these.
    """

    def __cinit__(self, Memory memory not None, Py_ssize_t at=0):
        memory.inside(at, sizeof(cseq_marks))
        self.memory, self.m = memory, <cseq_marks*>(memory.data + at)

    @property
    def on(self):
        """Whether they are recorded; set by the trainer."""
        return bool(cseq_load_rlx_u32(&self.m.on))

    @on.setter
    def on(self, bint wanted):
        cseq_swap_sc_u32(&self.m.on, wanted)

    @property
    def begun(self):
        """How many there have been."""
        return cseq_load_acq_u64(&self.m.begun)

    def attach(self):
        """Have this process's threads write their marks here: those of this thread first."""
        global here, here_marks, own
        forget()
        here, own, here_marks = self, cseq_thread(), self.m

    def read(self, uint64_t first=0):
        """The marks from number `first` on that are still there: an array of `MARK`, the oldest first."""
        cdef uint64_t begun = self.begun
        cdef uint64_t number = max(first, begun - CSEQ_MARKS if begun > CSEQ_MARKS else 0)
        cdef cseq_mark one
        cdef uint64_t count = 0
        found = numpy.empty(begun - number if begun > number else 0, MARK)
        cdef char* out = <char*>cnp.PyArray_DATA(found)
        while number < begun:
            if cseq_marks_read(self.m, number, &one):
                memcpy(out + count * sizeof(cseq_mark), &one, sizeof(cseq_mark))
                count += 1
            number += 1
        return found[:count]


def forget():
    """Write no marks any more: this process is a copy of the one that did, or begins anew."""
    global here, here_marks, own
    here_marks = &nowhere
    cseq_thread_forget()
    here = None
    sums.clear()


def in_forked_child():
    """Record nothing: the process that has forked this one does."""
    log.on = False
    forget()


cdef int mark(str name, uint64_t kind, uint64_t begin_ns, uint64_t value) except -1:
    """Record a mark of this thread."""
    cdef uint64_t thread = cseq_thread()
    cdef Py_ssize_t length
    cdef const char* text
    if not name.isascii():
        name = name.encode("utf-8", "replace").decode()
    text = PyUnicode_AsUTF8AndSize(name, &length)
    cseq_marks_add(here_marks, begin_ns, value, (0 if thread == own else thread << 32) | kind, text, length)
    return 0


cdef void copied(uint64_t begin_ns, uint64_t end_ns) noexcept:
    """A batch was written into its slot by this thread, unless that was a pointer's copy."""
    cdef uint64_t thread = cseq_thread()
    if end_ns - begin_ns >= LEAST_NS:
        cseq_marks_add(here_marks, begin_ns, end_ns, (0 if thread == own else thread << 32) | CSEQ_SPAN, "copy", 4)


@cython.final
@cython.no_gc
@cython.freelist(8)
@cython.auto_pickle(False)
cdef class Span:
    """What `span` returns while a trace records."""

    cdef str name
    cdef uint64_t begun

    def __enter__(self):
        self.begun = cseq_now_ns()

    def __exit__(self, kind, error, trace):
        if here_marks.on and self.begun:
            mark(self.name, CSEQ_SPAN, self.begun, cseq_now_ns())


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
        How the trace shows it: its first 32 bytes.

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
    if not cseq_load_rlx_u32(&here_marks.on):
        return NO_SPAN
    made = Span.__new__(Span)
    made.name = name
    return made


@cython.binding(False)
def count(str name not None, double n=1.0):
    """Add to a counter in the trace that is being recorded, which shows its sum over time.

    In indexers, in the loop, in any thread of these processes; each process has sums of its own,
    which begin with the trace, or with the process. While nothing is recorded, it does nothing.

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
    if cseq_load_rlx_u32(&here_marks.on):
        with cython.critical_section(guard):
            total = sums.get(name, 0.0) + n
            sums[name] = total
        mark(name, CSEQ_COUNT, cseq_now_ns(), cseq_bits_of(total))
