"""What a trace records: tickets that were taken; spans and counters."""

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from cseq._memory cimport Memory


cdef extern from "cseq_trace.h" nogil:
    enum:
        CSEQ_MARKS
        CSEQ_SPAN
        CSEQ_COUNT

    ctypedef struct cseq_taken:
        uint64_t started_ns
        uint64_t indexed_ns
        uint64_t taken_ns
        float converting_ns  # from `indexed_ns` to the converter's claim; no converter: -1
        float converted_ns   # from there to its publish
        float waited_ns
        uint32_t batch
        uint32_t epoch
        uint32_t thread
        unsigned short feed
        unsigned short worker
        unsigned short converter
        unsigned short status

    ctypedef struct cseq_log:
        uint32_t on
        uint64_t begun
        uint64_t done
        uint64_t begun_ns
        uint64_t mask
        cseq_taken* taken

    ctypedef struct cseq_mark:
        uint64_t number
        uint64_t begin_ns
        uint64_t value
        uint64_t what

    ctypedef struct cseq_marks:
        uint32_t on
        uint64_t begun

    cseq_taken* cseq_log_begin(cseq_log* l) noexcept
    void cseq_log_end(cseq_log* l) noexcept
    void cseq_marks_add(
        cseq_marks* m, uint64_t begin_ns, uint64_t value, uint64_t what, const char* name, size_t length) noexcept
    int cseq_marks_read(const cseq_marks* m, uint64_t number, cseq_mark* out) noexcept
    uint64_t cseq_bits_of(double value) noexcept


cdef cseq_log* log       # of this process's trace
cdef cseq_marks** marks  # where this process writes its own

cdef uint32_t thread_id() noexcept
cdef void copied(uint64_t begin_ns, uint64_t end_ns) noexcept


@cython.final
cdef class Marks:
    cdef cseq_marks* m
    cdef readonly Memory memory
