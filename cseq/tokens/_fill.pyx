# cython: language_level=3, freethreading_compatible=True
"""Fills the arrays of a batch, piece by piece."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t

cimport cython
cimport numpy as cnp

from cseq._core cimport int64s

import numpy

cnp.import_array()

ctypedef fused Token:
    int8_t
    uint8_t
    int16_t
    uint16_t
    int32_t
    uint32_t
    int64_t

ctypedef fused Out:
    int32_t
    int64_t

cdef struct Piece:
    const char* tokens
    # NULL if the loss uses all labels.
    const uint8_t* mask
    # The token size in bytes. It is negative for unsigned types.
    int kind

cdef enum:
    IGNORED = -100


cdef void convert(const Token* tokens, Out* out, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = <Out>tokens[i]


cdef void copy(const Piece* piece, Py_ssize_t first, Out* out, Py_ssize_t count) noexcept nogil:
    """Copy `count` tokens of a piece, starting with token `first`."""
    cdef const char* tokens = piece.tokens + first * (piece.kind if piece.kind > 0 else -piece.kind)
    if piece.kind == -2:
        convert(<const uint16_t*>tokens, out, count)
    elif piece.kind == 4:
        convert(<const int32_t*>tokens, out, count)
    elif piece.kind == -4:
        convert(<const uint32_t*>tokens, out, count)
    elif piece.kind == 8:
        convert(<const int64_t*>tokens, out, count)
    elif piece.kind == 2:
        convert(<const int16_t*>tokens, out, count)
    elif piece.kind == -1:
        convert(<const uint8_t*>tokens, out, count)
    else:
        convert(<const int8_t*>tokens, out, count)


cdef int64_t lay(const Piece* piece, Py_ssize_t count, const int64_t* counts, const int64_t* is_cut,
                 const int64_t* numbers, Out pad, Out* ids, Out* labels, Out* positions,
                 int32_t* documents) noexcept nogil:
    """Fill all arrays that are not NULL. Return the number of valid labels."""
    cdef Py_ssize_t k, i, n, labeled
    cdef int64_t valid = 0
    for k in range(count):
        n, labeled = counts[k], 0
        if numbers[k] < 0:
            for i in range(n):
                ids[i] = pad
        else:
            copy(piece, 0, ids, n)
            labeled = n - 1 + is_cut[k]
        if labels != NULL:
            for i in range(n - 1):
                labels[i] = ids[i + 1]
            if labeled == n:
                copy(piece, n, labels + n - 1, 1)
            for i in range(labeled, n):
                labels[i] = IGNORED
            valid += labeled
            if labeled and piece.mask != NULL:
                for i in range(labeled):
                    if not piece.mask[i + 1]:
                        labels[i] = IGNORED
                        valid -= 1
            labels += n
        if positions != NULL:
            for i in range(n):
                positions[i] = <Out>i
            positions += n
        if documents != NULL:
            for i in range(n):
                documents[i] = <int32_t>numbers[k]
            documents += n
        ids += n
        piece += numbers[k] >= 0
    return valid


def cut(cnp.ndarray left not None, cnp.ndarray sizes not None, int64_t row, bint by_row):
    """Cut pieces at the end of their row and pad rows that are not full.

    `left` counts the tokens from each piece to its document's end, and is set to the piece lengths.
    `sizes` is the number of pieces per row. For each piece or padding, return its length, whether
    the document continues, and its index in the row (`by_row`) or batch (-1 for padding).
    """
    cdef int64_t* there = <int64_t*>int64s(left)
    cdef const int64_t* pieces = int64s(sizes)
    cdef Py_ssize_t k = 0, n = 0, r, rows = len(sizes), most = len(left) + rows
    cdef int64_t used, number = 0
    cdef Py_ssize_t last = 0
    made = numpy.empty((3, most), numpy.int64)
    cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(made)
    if sizes.sum() != len(left):
        raise ValueError(f"left has {len(left)} pieces, but sizes={sizes} adds up to a different number")
    for r in range(rows):
        used = 0
        last += pieces[r]
        if by_row:
            number = 0
        while k < last:
            if used == row or there[k] < 1:
                raise ValueError(
                    f"the order has pieces beyond the end of a row of {row} tokens, so it is not the order of "
                    "these Rows; leave order= out"
                )
            out[n] = min(there[k], row - used)
            out[most + n], out[2 * most + n] = there[k] > row - used, number
            there[k] = out[n]
            used += out[n]
            k, n, number = k + 1, n + 1, number + 1
        if used < row:
            out[n], out[most + n], out[2 * most + n] = row - used, 0, -1
            n += 1
    return made[:, :n]


cdef void* data_of(cnp.ndarray array, int kind, Py_ssize_t size) except? NULL:
    """Return a pointer to the memory of an array, or NULL for None."""
    if array is None:
        return NULL
    if array.descr.itemsize != kind or array.size != size or not cnp.PyArray_ISCARRAY(array):
        raise ValueError(f"an array of type {array.dtype} and shape {(<object>array).shape} cannot be filled")
    return cnp.PyArray_DATA(array)


cdef Py_ssize_t find(Piece* pieces, list arrays, list masks, cnp.ndarray owners, cnp.ndarray starts,
                     Py_ssize_t count, const int64_t* counts, const int64_t* is_cut,
                     const int64_t* numbers, list kept, int most) except -1:
    """Find the memory of each piece. Converted copies are added to `kept`."""
    cdef Py_ssize_t k, stop, n = 0, there = len(owners)
    cdef const int64_t* owner = int64s(owners)
    cdef const int64_t* start = int64s(starts)
    cdef int64_t at
    cdef cnp.ndarray array, mask
    for k in range(count):
        if numbers[k] < 0:
            continue
        if n == there:
            raise ValueError(f"owners has {there} pieces, but the batch has more")
        array, mask, at = arrays[owner[n]], masks[owner[n]], start[n]
        stop = at + counts[k] + is_cut[k]
        pieces[n].kind = array.descr.itemsize * (-1 if array.descr.kind == b"u" else 1)
        if (array.descr.kind not in b"iu" or not -most < pieces[n].kind <= most
                or not 0 <= at <= stop <= array.size or not (mask is None or stop <= mask.size)):
            raise ValueError(
                f"tokens [{at}, {stop}) of at most {most} bytes cannot be read from an array of shape "
                f"{(<object>array).shape} and type {array.dtype}"
            )
        pieces[n].mask = NULL
        if mask is not None:
            if mask.descr.itemsize != 1 or not cnp.PyArray_ISCARRAY_RO(mask):
                mask = mask[at:stop] != 0
                kept.append(mask)
                pieces[n].mask = <const uint8_t*>cnp.PyArray_DATA(mask)
            else:
                pieces[n].mask = <const uint8_t*>cnp.PyArray_DATA(mask) + at
        if not cnp.PyArray_ISCARRAY_RO(array):
            array, at = numpy.array(array[at:stop], (<object>array).dtype.newbyteorder("=")), 0
            kept.append(array)
        pieces[n].tokens = <const char*>cnp.PyArray_DATA(array) + at * array.descr.itemsize
        n += 1
    return n


def fill(list arrays not None, list masks not None, cnp.ndarray owners not None, cnp.ndarray starts not None,
         cnp.ndarray cuts not None, int64_t pad, cnp.ndarray ids not None, cnp.ndarray labels,
         cnp.ndarray positions, cnp.ndarray documents):
    """Fill all arrays of a batch that are not None. Return the number of valid labels.

    `masks` contains the mask of each array, or None. `owners` contains the index of each piece's
    array, and `starts` the piece's position in that array. `cuts` is the result of `cut`.
    """
    cdef Py_ssize_t count = cuts.shape[1], size = ids.size
    cdef int kind = ids.descr.itemsize
    counts, more, numbers = cuts
    cdef const int64_t* lengths = int64s(counts)
    cdef const int64_t* is_cut = int64s(more)
    cdef const int64_t* given = int64s(numbers)
    if counts.sum() != size or len(owners) != len(starts) or kind not in (4, 8):
        raise ValueError(f"pieces of {counts} tokens do not fill an array of {size} {ids.dtype} values")
    cdef void* first = data_of(ids, kind, size)
    cdef void* second = data_of(labels, kind, size)
    cdef void* third = data_of(positions, kind, size)
    cdef int32_t* fourth = <int32_t*>data_of(documents, 4, size)
    cdef int64_t valid
    cdef Piece* pieces = <Piece*>PyMem_RawMalloc((count + 1) * sizeof(Piece))
    kept = []
    if pieces == NULL:
        raise MemoryError
    try:
        find(pieces, arrays, masks, owners, starts, count, lengths, is_cut, given, kept, kind)
        with nogil:
            if kind == 8:
                valid = lay(pieces, count, lengths, is_cut, given, <int64_t>pad, <int64_t*>first,
                            <int64_t*>second, <int64_t*>third, fourth)
            else:
                valid = lay(pieces, count, lengths, is_cut, given, <int32_t>pad, <int32_t*>first,
                            <int32_t*>second, <int32_t*>third, fourth)
    finally:
        PyMem_RawFree(pieces)
    return valid
