# cython: language_level=3, freethreading_compatible=True
"""Readers of orders that are made of others, or of the user's own code."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._core cimport Reader
from cseq._headers cimport *
from cseq._memory cimport Memory

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


cdef enum:
    CHUNK_BITS = 38  # of a word: chunk | generation of the slot, 24 bits | state, 2 bits
    TABLE_HEAD = 64  # bytes: the identity, where the next victim is looked for, chunks that were read
    IS_EMPTY = 0
    IS_LOADING = 1
    IS_READY = 2

EMPTY, LOADING, READY = IS_EMPTY, IS_LOADING, IS_READY


@cython.final
cdef class ChunkTable:
    """Which slot of a cache has which chunk, in memory that several processes may share.

    A slot's word is written by the process that owns the slot, alone: see `order.chunks`. A reader copies
    out of a slot, and then looks whether its word is the same: the copy is of no use if it is not.

    Parameters
    ----------
    memory : Memory
        Begins with the table, which is zero at first.
    slots : int
    identity : int
        Not 0. Of another table than the one that is there: ValueError.
    """

    cdef Memory memory
    cdef uint64_t* words
    cdef readonly uint32_t slots

    def __cinit__(self, Memory memory not None, uint32_t slots, uint64_t identity):
        memory.inside(0, TABLE_HEAD + 8 * <Py_ssize_t>slots)
        self.memory, self.slots = memory, slots
        self.words = <uint64_t*>(memory.data + TABLE_HEAD)
        cseq_cas_sc_u64(<uint64_t*>memory.data, 0, identity)
        if (<uint64_t*>memory.data)[0] != identity:
            raise ValueError("the memory has a table of another cache")

    @property
    def reads(self):
        """Chunks that were read so far, by all processes."""
        return cseq_load_rlx_u64(<uint64_t*>(self.memory.data + 16))

    def find(self, uint64_t chunk):
        """(slot, word, state) of a chunk; slot -1: it is in none."""
        cdef uint32_t k
        cdef uint64_t word
        for k in range(self.slots):
            word = cseq_load_acq_u64(&self.words[k])  # SYNC: the chunk is written before its word
            if word >> (64 - CHUNK_BITS) == chunk and word & 3:
                return k, word, word & 3
        return -1, 0, 0

    def victim(self):
        """The slot that is to be used next: that of the chunk which was read first."""
        return cseq_add_sc_u32(<uint32_t*>(self.memory.data + 8), 1) % self.slots

    def set(self, uint32_t slot, uint64_t chunk, uint64_t state):
        """Write the word of a slot, by its owner; the generation grows unless it becomes READY."""
        cdef uint64_t word = self.words[slot]
        cdef uint64_t generation = (word >> 2) + (state != IS_READY) & 0xFFFFFF
        if state == IS_READY:
            cseq_add_sc_u64(<uint64_t*>(self.memory.data + 16), 1)
        # SYNC: the chunk is written before its word
        # SYNC: no copy goes on after it
        word = cseq_swap_sc_u64(&self.words[slot], chunk << (64 - CHUNK_BITS) | generation << 2 | state)

    def gather(self, uint32_t slot, uint64_t word, Py_ssize_t at, Py_ssize_t nbytes, rows, places,
               cnp.ndarray out not None):
        """Copy rows of `nbytes` each, from byte `at` of the memory on, to places in `out`; return
        whether the chunk is still there."""
        cdef const int64_t[::1] row = rows
        cdef const int64_t[::1] place = places
        cdef Py_ssize_t k, count = row.shape[0]
        cdef const char* source = self.memory.data + at
        cdef char* target = <char*>cnp.PyArray_DATA(out)
        for k in range(count):
            self.memory.inside(at + row[k] * nbytes, nbytes)
            if not 0 <= place[k] < cnp.PyArray_DIM(out, 0):
                raise IndexError(f"row {place[k]} is not one of {out.shape[0]}")
        with nogil:
            for k in range(count):
                memcpy(target + place[k] * nbytes, source + row[k] * nbytes, <size_t>nbytes)
        return bool(cseq_cas_sc_u64(&self.words[slot], word, word))  # SYNC: no copy goes on after it
