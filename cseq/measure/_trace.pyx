# cython: language_level=3, freethreading_compatible=True
"""Records tickets for traces."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from cseq._headers cimport cseq_load_acq_u64
from cseq._lock cimport PyThread_get_thread_native_id

import numpy

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #define CSEQ_THREAD __declspec(thread)
    #else
    #define CSEQ_THREAD _Thread_local
    #endif
    static CSEQ_THREAD uint32_t cseq_thread_number;
    """
    # The system's number of this thread, or 0 if it is not known yet.
    uint32_t cseq_thread_number

# The layout of the C struct cseq_taken.
TAKEN = numpy.dtype([
    ("started", "u8"), ("indexed", "u8"), ("converting", "u8"), ("converted", "u8"), ("asked", "u8"),
    ("taken", "u8"), ("batch", "u4"), ("epoch", "u4"), ("thread", "u4"), ("feed", "u2"),
    ("worker", "u2"), ("converter", "u2"), ("pad", "V6")])

cdef cseq_log here_log
log = &here_log
# The array that the log writes to.
cdef object records = None


cdef uint32_t thread_number() noexcept:
    """Return the system's number of this thread. Only the first call needs a system call."""
    global cseq_thread_number
    if not cseq_thread_number:
        cseq_thread_number = <uint32_t>PyThread_get_thread_native_id()
    return cseq_thread_number


def begin_log(uint64_t size):
    """Start recording the tickets that loops take. The latest `size` tickets are kept."""
    global records
    array = numpy.empty(size, TAKEN)
    # Touch all pages now, to avoid page faults in the loop.
    array.view(numpy.uint8).fill(0)
    log.taken, log.size = <void*><uintptr_t>array.ctypes.data, size
    log.begun = log.done = 0
    log.on = True
    records = array


def end_log():
    """Stop recording. Return the latest tickets, and the total number of tickets."""
    log.on = False
    # Without the GIL, another thread may still be recording, which takes a few dozen ns.
    while cseq_load_acq_u64(&log.done) != cseq_load_acq_u64(&log.begun):
        pass
    if log.begun < log.size:
        return records[:log.begun], log.begun
    return numpy.roll(records, -<Py_ssize_t>(log.begun % log.size)), log.begun


def drop_log():
    """Stop recording in a forked process, whose thread has a new number."""
    global cseq_thread_number
    log.on = False
    cseq_thread_number = 0
