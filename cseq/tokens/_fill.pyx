# cython: language_level=3, freethreading_compatible=True
"""The arrays of a batch of rows, piece by piece."""

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
    const void* tokens
    int kind  # bytes of a token; -1 times that if it has no sign

cdef enum:
    IGNORED = -100


cdef void convert(const Token* tokens, Out* out, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = <Out>tokens[i]


cdef void copy(const Piece* piece, Out* out, Py_ssize_t count) noexcept nogil:
    """Copy the tokens of a piece."""
    if piece.kind == -2:
        convert(<const uint16_t*>piece.tokens, out, count)
    elif piece.kind == 4:
        convert(<const int32_t*>piece.tokens, out, count)
    elif piece.kind == -4:
        convert(<const uint32_t*>piece.tokens, out, count)
    elif piece.kind == 8:
        convert(<const int64_t*>piece.tokens, out, count)
    elif piece.kind == 2:
        convert(<const int16_t*>piece.tokens, out, count)
    elif piece.kind == -1:
        convert(<const uint8_t*>piece.tokens, out, count)
    else:
        convert(<const int8_t*>piece.tokens, out, count)


cdef int64_t lay(const Piece* pieces, Py_ssize_t count, const int64_t* counts, const int64_t* numbers,
                 const int64_t* after, const uint8_t* masks, Out* ids, Out* labels, Out* positions,
                 int32_t* documents) noexcept nogil:
    """Fill arrays, those that are not NULL; return how many labels a loss counts."""
    cdef Py_ssize_t k, i, n
    cdef int64_t valid = 0
    for k in range(count):
        n = counts[k]
        if n < 1:
            continue
        copy(pieces + k, ids, n)
        if labels != NULL:
            for i in range(n - 1):
                labels[i] = ids[i + 1]
            labels[n - 1] = <Out>after[k]
            if masks != NULL:
                for i in range(n - 1):
                    if not masks[i + 1]:
                        labels[i] = IGNORED
                masks += n
            if numbers[k] < 0:
                for i in range(n):
                    labels[i] = IGNORED
            elif masks == NULL:
                valid += n - (after[k] == IGNORED)
            else:
                for i in range(n):
                    valid += labels[i] != IGNORED
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
    return valid


def cut(cnp.ndarray left not None, cnp.ndarray sizes not None, int64_t row, bint anew):
    """Cut the pieces of rows where their row is full, and put padding behind the others.

    `left` says what each piece's document has from there on, `sizes` how many pieces each row has. Returns
    of each piece, and of padding: its number in `left`, or -1; how many tokens it has; whether its document
    has more; and its number in its row, or, unless `anew`, in the batch, -1 for padding.
    """
    cdef const int64_t* there = int64s(left)
    cdef const int64_t* each = int64s(sizes)
    cdef Py_ssize_t k = 0, n = 0, r, rows = len(sizes), most = len(left) + rows
    cdef int64_t used, number = 0
    cdef Py_ssize_t last = 0
    made = numpy.empty((4, most), numpy.int64)
    cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(made)
    if sizes.sum() != len(left):
        raise ValueError(f"{len(left)} pieces are not those of rows of {sizes}")
    for r in range(rows):
        used = 0
        last += each[r]
        if anew:
            number = 0
        while k < last:
            if used == row or there[k] < 1:
                raise ValueError(
                    f"the order has pieces behind the end of a row of {row} tokens: it is not that of these "
                    "Rows; leave order= out"
                )
            out[n], out[most + n] = k, min(there[k], row - used)
            out[2 * most + n], out[3 * most + n] = there[k] > row - used, number
            used += out[most + n]
            k, n, number = k + 1, n + 1, number + 1
        if used < row:
            out[n], out[most + n], out[2 * most + n], out[3 * most + n] = -1, row - used, 0, -1
            n += 1
    return made[:, :n]


cdef void* data_of(cnp.ndarray array, int kind, Py_ssize_t size) except? NULL:
    """The memory of an array to fill, or NULL."""
    if array is None:
        return NULL
    if array.descr.itemsize != kind or array.size != size or not cnp.PyArray_ISCARRAY(array):
        raise ValueError(f"{array.dtype} array of shape {(<object>array).shape} cannot be filled")
    return cnp.PyArray_DATA(array)


cdef int find(Piece* pieces, list tokens, const int64_t* counts, list kept, int most) except -1:
    """Find the memory of pieces, in an order of bytes that can be read; `kept` owns copies."""
    cdef Py_ssize_t k
    cdef cnp.ndarray piece
    for k in range(len(tokens)):
        piece = tokens[k]
        if not cnp.PyArray_ISCARRAY_RO(piece):
            piece = numpy.array(piece, (<object>piece).dtype.newbyteorder("="))
            kept.append(piece)
        pieces[k].kind = piece.descr.itemsize * (-1 if piece.descr.kind == b"u" else 1)
        if piece.size != counts[k] or piece.descr.kind not in b"iu" or not -most < pieces[k].kind <= most:
            raise ValueError(
                f"{counts[k]} tokens of {most} bytes cannot be those of an array of shape "
                f"{(<object>piece).shape} and type {piece.dtype}"
            )
        pieces[k].tokens = cnp.PyArray_DATA(piece)
    return 0


def fill(list tokens not None, cnp.ndarray counts not None, cnp.ndarray numbers not None,
         cnp.ndarray after not None, cnp.ndarray masks, cnp.ndarray ids not None, cnp.ndarray labels,
         cnp.ndarray positions, cnp.ndarray documents):
    """Fill the arrays of a batch that are not None; return how many labels a loss counts.

    `tokens` has an array for each piece, `counts` its length, `numbers` its number or -1 for padding, and
    `after` the label of its last token. `masks` has a byte for each token of the batch.
    """
    cdef Py_ssize_t count = len(tokens), size = ids.size
    cdef int kind = ids.descr.itemsize
    cdef const int64_t* lengths = int64s(counts)
    cdef const int64_t* given = int64s(numbers)
    cdef const int64_t* last = int64s(after)
    if not len(counts) == len(numbers) == len(after) == count or counts.sum() != size or kind not in (4, 8):
        raise ValueError(f"pieces of {counts} tokens do not fill {size} of {ids.dtype}")
    cdef void* first = data_of(ids, kind, size)
    cdef void* second = data_of(labels, kind, size)
    cdef void* third = data_of(positions, kind, size)
    cdef int32_t* fourth = <int32_t*>data_of(documents, 4, size)
    cdef const uint8_t* mask = <const uint8_t*>data_of(masks, 1, size)
    cdef int64_t valid
    cdef Piece* pieces = <Piece*>PyMem_RawMalloc(count * sizeof(Piece))
    kept = []
    if pieces == NULL:
        raise MemoryError
    try:
        find(pieces, tokens, lengths, kept, kind)
        with nogil:
            if kind == 8:
                valid = lay(pieces, count, lengths, given, last, mask, <int64_t*>first,
                            <int64_t*>second, <int64_t*>third, fourth)
            else:
                valid = lay(pieces, count, lengths, given, last, mask, <int32_t*>first,
                            <int32_t*>second, <int32_t*>third, fourth)
    finally:
        PyMem_RawFree(pieces)
    return valid
