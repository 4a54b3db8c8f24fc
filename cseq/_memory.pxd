"""Memory for arrays."""

from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

# Copies of at least LARGE bytes release the GIL. The first LEAST bytes of a slot are committed up
# front. Leaves of up to MOST_COPIED bytes are copied out of their slots.
cdef enum:
    MAX_DIMS = 64
    LARGE = 65536
    LEAST = 16384
    MOST_COPIED = 65536

# `forks_here` is what `fork_depth` returns. `forker_here` is the thread that forked this process.
cdef uint32_t* forks_here
cdef uint64_t* forker_here

cdef extern from *:
    """
    /* Return an array in the memory of `owner` that keeps `owner` alive. If `strides` is NULL, the array is
     * contiguous. */
    static inline PyObject *cseq_array_on(PyObject *owner, char *data, PyObject *dtype, int nd, npy_intp *dims,
                                          npy_intp *strides, int flags) {
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef(dtype), nd, dims,
                                               strides, data, flags, NULL);
        if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0)
            Py_CLEAR(array);
        return array;
    }
    """
    object cseq_array_on(object owner, char* data, PyObject* dtype, int nd, cnp.npy_intp* dims,
                         cnp.npy_intp* strides, int flags)

cdef bint lies_in(cnp.ndarray array, const uint8_t* axes) noexcept
cdef bint is_permuted(cnp.ndarray array, uint8_t* axes) noexcept


cdef class Memory:
    cdef char* data
    cdef Py_ssize_t size
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
