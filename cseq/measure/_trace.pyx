# cython: language_level=3, freethreading_compatible=True
"""What a trace records: tickets that were taken."""

from libc.stdint cimport uint64_t, uintptr_t

from cseq._headers cimport cseq_load_acq_u64

import numpy

TAKEN = numpy.dtype([  # cseq_taken
    ("started", "u8"), ("indexed", "u8"), ("converting", "u8"), ("converted", "u8"), ("asked", "u8"),
    ("taken", "u8"), ("batch", "u4"), ("epoch", "u4"), ("thread", "u4"), ("feed", "u2"),
    ("worker", "u2"), ("converter", "u2"), ("pad", "V6")])

cdef cseq_log here_log
log = &here_log
cdef object room = None  # of the log


def begin_log(uint64_t size):
    """Begin to record the tickets that are taken: the newest `size` of them."""
    global room
    made = numpy.empty(size, TAKEN)
    made.view(numpy.uint8).fill(0)  # its pages are there before the first ticket
    log.taken, log.size = <void*><uintptr_t>made.ctypes.data, size
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


def drop_log():
    """Record nothing in a forked child: the process that has forked it does."""
    log.on = False
