"""Memory that arrays are made on."""

from libc.stdint cimport uint64_t

cimport cython
cimport numpy as cnp

from cseq._headers cimport cseq_kept, cseq_list, cseq_span


cdef enum:
    MAX_DIMS = 64
    LARGE = 65536  # bytes; copies of this size or more release the GIL
    MOST_KEPT = 4194304  # bytes; the arena shrinks larger slots at times (arena.SLACK)
    LEAST = 16384  # bytes of a slot that are committed before it is used
    MOST_COPIED = 65536  # bytes; leaves up to this are copied out of their slots, together as many as fit

    # How the elements of an array lie in memory.
    ROWS = 0
    COLUMNS = 1
    STRIDED = 2  # in another order, or some in several places, and no more bytes than all elements have
    LOOSE = 3    # the rest: with gaps, backwards

cdef cseq_list* in_use   # leases and windows, which a fork copies

cdef long* forks_here    # see `fork_depth`

cdef object array_at(Memory memory, Py_ssize_t offset, cnp.dtype dtype, int nd, cnp.npy_intp* dims,
                     bint fortran, cnp.npy_intp* strides)
cdef int layout_of(cnp.ndarray array, Py_ssize_t* span) noexcept
cdef void* zeroed(uint64_t count, uint64_t size, str what) except NULL
cdef int fork_keeping(cseq_kept* kept) except -1


cdef class Memory:
    cdef char* data
    cdef Py_ssize_t size  # bytes
    @cython.final
    cdef int inside(self, Py_ssize_t offset, Py_ssize_t nbytes) except -1
    @cython.final
    cdef int put(self, Py_ssize_t offset, const char* source, Py_ssize_t nbytes) except -1


@cython.final
@cython.no_gc
cdef class Block(Memory):
    cdef void* raw


@cython.final
@cython.no_gc
cdef class Mapping(Memory):
    pass
