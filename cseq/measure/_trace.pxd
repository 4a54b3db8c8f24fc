"""The log of tickets for traces."""

from libc.stdint cimport uint32_t, uint64_t

from cseq._headers cimport cseq_cell


cdef extern from "cseq_trace.h" nogil:
    ctypedef struct cseq_log:
        uint32_t on
        uint64_t begun
        uint64_t done
        uint64_t size
        void* taken

    void cseq_log_add(cseq_log* l, const cseq_cell* c, uint64_t now, uint64_t waited, uint32_t thread,
                      unsigned short feed, int queue) noexcept


# The log of this process.
cdef cseq_log* log

cdef uint32_t thread_number() noexcept
