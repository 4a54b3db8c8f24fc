"""The ring; locks; what an epoch asks for."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython

from cseq._headers cimport *
from cseq._memory cimport Memory



@cython.final
@cython.no_gc
cdef class Turns:
    cdef cseq_turns t

@cython.final
cdef class Ring:
    cdef cseq_ring* r
    cdef Memory memory
    cdef readonly uint32_t limit
    cdef uint32_t outstanding     # posted, and neither committed nor cancelled; but calls
    cdef readonly list kept
    cdef int calling          # of a queue: the cell of the call that is to be answered; -1: none
    cdef uint32_t next_cell   # where a free cell is looked for; in a queue, the one to post in
    cdef uint32_t unwoken     # tickets posted since the runners were last woken
    cdef public uint32_t wake_at  # as many tickets posted wake the runners
    cdef public uint32_t first  # of a queue of a thread: where its cells' objects begin, among all queues'
    cdef public Turns turns     # of a thread's queue, the same in all; else None
    cdef cseq_meter* meter      # the trainer's: that of the ring at 0
    cdef cseq_cell* at(self, uint32_t cell) except NULL
    cdef int find_vacant(self) noexcept
    cdef void offer(self, uint32_t cell, uint64_t ticket, uint64_t epoch, uint64_t batch,
                    uint32_t count, uint64_t start, uint64_t seed) noexcept
    cpdef void wake(self) noexcept
    cdef uint32_t unanswered(self) noexcept
    cdef inline void committed(self, cseq_cell* c) noexcept:
        """Count a ticket that is committed, before the next post in its cell."""
        cdef uint64_t* f = c.converted if c.stage else c.record
        if c.status == 0:
            cseq_count_u64(&self.meter.batches, 1)
            cseq_count_u64(&self.meter.samples, c.count)
            cseq_count_u64(&self.meter.nbytes, f[0] + f[1] + f[2] + f[3])
    cdef inline void free(self, uint32_t cell) noexcept:
        """Free a cell that is the trainer's; an outstanding ticket there is subtracted already."""
        if self.kept is None:
            self.next_cell = cell  # at hand for the next ticket
        else:
            self.kept[cell] = None
        cseq_ring_free(self.r, cell)
    cdef inline uint64_t sleep(self) noexcept:
        """A sleep of the trainer begins now."""
        cdef uint64_t now = cseq_now_ns()
        cseq_store_rlx_u64(&self.meter.asleep_ns, now)
        return now
    cdef inline void slept(self, uint64_t before, uint64_t awake) noexcept:
        """It is over, and so is the wait for the GIL after it."""
        cdef uint64_t now = cseq_now_ns()
        cseq_histogram_add(&self.meter.gil, now - awake)
        cseq_meter_slept(self.meter, before, now)
    cdef bint cancel_newest(self, uint32_t cell) noexcept
    cdef void wait(self, uint32_t seen, int cell) noexcept
    cdef bint expect(self, uint32_t cell, uint32_t seen) noexcept


# What a trace records: tickets that were taken.

cdef extern from "cseq_trace.h" nogil:
    ctypedef struct cseq_log:
        uint32_t on
        uint64_t begun
        uint64_t done
        uint64_t size
        void* taken

    void cseq_log_add(cseq_log* l, const cseq_cell* c, uint64_t now, uint64_t waited, uint32_t thread,
                      unsigned short feed, int queue) noexcept


cdef cseq_log* log  # of this process's trace



# Locks and latches for threads, which the core takes without a call of Python.

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept
    unsigned long PyThread_get_thread_native_id() noexcept


cpdef int check_depth() except -1
cpdef bint is_deep(int depth=*) except -1


@cython.final
@cython.no_gc
cdef class Lock:
    cdef uint64_t owner  # the thread that has it, or 0
    cdef uint32_t asleep # a thread may be, until it is free
    cdef uint32_t depth  # how often
    cdef uint32_t forks  # `forks_here`, when it was last looked at
    cdef uint32_t due    # there are
    cdef list calls      # that were put off
    cdef bint has(self) noexcept
    cdef int look_at_fork(self) noexcept
    cdef bint take(self, double timeout) except -1
    cdef bint take_anew(self, double timeout) except -1
    cdef bint sleep(self, double timeout) except -1
    cdef int leave(self) except -1
    cdef int make_calls(self) except -1
    cdef object next_call(self)
    cpdef int refuse_mine(self) except -1
    cdef inline int enter_anew(self) except -1:
        """Take it; RuntimeError if this thread has it."""
        return self.refuse_mine() if self.has() else self.take_anew(-1)


@cython.final
cdef class RunState:
    cdef uint64_t number
    cdef readonly Lock lock
    cdef inline bint is_at(self, uint64_t generation) noexcept:
        """Whether this is the present generation."""
        return cseq_load_acq_u64(&self.number) == generation


# What an epoch asks for, ticket by ticket.

cdef enum:
    ASK_ITEM = 0       # kinds of tickets of a stream; see producer.py
    ASK_CALL = 1
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
    cdef bint is_over(self) noexcept
    cpdef int finish(self) except -1

cpdef int rest() except -1
