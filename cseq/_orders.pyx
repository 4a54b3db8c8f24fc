# cython: language_level=3, freethreading_compatible=True
"""Readers of orders that are made of others, or of the user's own code."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._core cimport Reader
from cseq._headers cimport CSEQ_IV, cseq_fold, cseq_mix

import numpy

cnp.import_array()

CHUNK = 1 << 16  # values that are converted together


def fingerprint(array):
    """64 bits that stand for the values of a one-dimensional array, of integers or of floats.

    Equal values in another integer type or another layout have the same fingerprint; so do equal values
    in another type of floats. See docs/inside/orders.md.
    """
    values = numpy.asarray(array)
    wanted = numpy.float64 if values.dtype.kind == "f" else numpy.int64
    cdef uint64_t z = cseq_mix(CSEQ_IV ^ <uint64_t>len(values))
    for start in range(0, len(values), CHUNK):
        chunk = numpy.ascontiguousarray(values[start:start + CHUNK]).astype(wanted, copy=False)
        z = cseq_fold(z, <uint64_t*>cnp.PyArray_DATA(chunk), chunk.size)
    return z


@cython.final
cdef class ChosenReader(Reader):
    """Another reader, of positions in `indices`: one-dimensional integers, read and never written."""

    cdef Reader reader
    cdef object indices

    def __cinit__(self, Reader reader not None, indices):
        self.reader, self.indices = reader, indices
        self.units, self.room, self.seed = reader.units, reader.room, reader.seed

    cdef int64_t choose(self, int64_t count, int64_t* out) except -1:
        cdef cnp.npy_intp size = count
        chosen = cnp.PyArray_SimpleNewFromData(1, &size, cnp.NPY_INT64, out)
        chosen[...] = self.indices[chosen]
        return count

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        return self.choose(self.reader.read(epoch, start, count, out, sizes), out)

    cdef int64_t read_batch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                            uint64_t count, int64_t* out, int64_t* sizes) except -1:
        return self.choose(
            self.reader.read_batch(epoch, first, together, start, count, out, sizes), out)


cdef int64_t copied(object values, str what, uint64_t count, uint64_t most, int64_t* out) except -1:
    """Write integers that user code returned, at most `most` of them."""
    array = numpy.ascontiguousarray(values, dtype=numpy.int64)
    if array.ndim != 1 or array.size > most:
        raise ValueError(f"read() returned {what} of shape {array.shape} for {count} units; give one "
                         f"dimension, and at most {most}")
    memcpy(out, cnp.PyArray_DATA(array), 8 * <size_t>array.size)
    return array.size


@cython.final
cdef class CallReader(Reader):
    """An order that is written in Python: `order.read(seed, epoch, start, count)`."""

    cdef object order

    def __cinit__(self, order, uint64_t seed):
        self.order, self.units, self.room, self.seed = order, order.units, order.room, seed

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        indices, lengths = self.order.read(self.seed, epoch, start, count)
        cdef int64_t written = copied(indices, "indices", count, count * self.room, out)
        if lengths is None:
            if self.room == 1 and <uint64_t>written == count:
                return written
            raise ValueError(f"read() of {self.order!r} returned {written} indices for {count} units "
                             "and no sizes; give the size of each unit")
        lengths = numpy.ascontiguousarray(lengths, dtype=numpy.int64)
        if (lengths.shape != (count,) or lengths.sum() != written
                or count and not 1 <= lengths.min() <= lengths.max() <= self.room):
            raise ValueError(f"read() of {self.order!r} returned sizes {lengths} for {count} units with "
                             f"{written} indices; give one for each unit, in [1, {self.room}]")
        if sizes != NULL:
            copied(lengths, "sizes", count, count, sizes)
        return written
