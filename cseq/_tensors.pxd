"""Tensors of copied bytes."""

from libc.stdint cimport uint8_t, uint64_t

cimport cython
cimport numpy as cnp


@cython.final
cdef class TensorMaker:
    cdef object from_numpy, from_dlpack
    cdef uint8_t code
    cdef Py_ssize_t itemsize
    cdef object capsule(self, const void* source, uint64_t nbytes, int nd, const cnp.npy_intp* dims,
                        bint fortran)
    cdef object make(self, value)
