# cython: language_level=3, freethreading_compatible=True
"""Permutations used by orders, and readers for orders written in Python."""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._core cimport Reader, int64s, shuffled
from cseq._headers cimport *

import numpy

from cseq.check import integers

cnp.import_array()

# Number of values to convert at a time.
CHUNK = 1 << 16
# Each purpose has its own random stream. Purposes up to 6 are defined in cseq_shuffle.h and
# context.py.
BLOCKS, WINDOW, UNITS, MEMBERS, MIXTURE, SOURCE, WEIGHTS, GROUPS, DOCUMENTS, BALANCE = range(7, 17)


def fingerprint(array):
    """Return a 64-bit hash of the values in a one-dimensional integer or float array.

    The hash does not depend on the item size or the memory layout. See docs/inside/orders.md.
    """
    values = numpy.asarray(array)
    wanted = numpy.float64 if values.dtype.kind == "f" else numpy.int64
    cdef uint64_t z = cseq_mix(CSEQ_IV ^ <uint64_t>len(values))
    for start in range(0, len(values), CHUNK):
        chunk = numpy.ascontiguousarray(values[start:start + CHUNK]).astype(wanted, copy=False)
        z = cseq_fold(z, <uint64_t*>cnp.PyArray_DATA(chunk), chunk.size)
    return z


def digest(array):
    """Return a 64-bit hash of an integer array, about three times as fast as `fingerprint`.

    Value k goes into chain k mod 4. The length and the other chains are folded into chain 0 last.
    """
    values = numpy.asarray(array)
    cdef uint64_t z[4]
    cdef const uint64_t* word
    cdef Py_ssize_t k, count
    for k in range(4):
        z[k] = CSEQ_IV + <uint64_t>k
    for start in range(0, len(values), CHUNK):
        chunk = numpy.ascontiguousarray(values[start:start + CHUNK]).astype(numpy.int64, copy=False)
        word, count = <const uint64_t*>cnp.PyArray_DATA(chunk), chunk.size
        for k in range(0, count - 3, 4):
            z[0] = cseq_mix(z[0] ^ word[k])
            z[1] = cseq_mix(z[1] ^ word[k + 1])
            z[2] = cseq_mix(z[2] ^ word[k + 2])
            z[3] = cseq_mix(z[3] ^ word[k + 3])
        for k in range(count - count % 4, count):
            z[k % 4] = cseq_mix(z[k % 4] ^ word[k])
    z[0] = cseq_mix(z[0] ^ <uint64_t>len(values))
    return cseq_fold(z[0], z + 1, 3)


def shuffle(uint64_t n, uint64_t seed, uint64_t epoch, uint64_t purpose, uint64_t key):
    """Return 0 … n-1 shuffled by fisher-yates-v1, as a uint32 or int64 array."""
    cdef uint64_t words[4]
    cseq_derive_keyed(seed, epoch, purpose, key, words, 4)
    return shuffled(n, words)


def seed_of(uint64_t seed, str name not None):
    """Derive the seed of a mixture source from its name."""
    cdef uint64_t word, key = 0
    cdef unsigned char byte
    for byte in name.encode():
        key = cseq_mix(key ^ byte)
    cseq_derive_keyed(seed, 0, SOURCE, key, &word, 1)
    return word


def drawn(cnp.ndarray positions not None, uint64_t below, uint64_t seed, uint64_t epoch, uint64_t purpose,
          uint64_t key=CSEQ_NO_KEY):
    """Return the random integers below `below` at the given positions of a random stream."""
    cdef Py_ssize_t k, count = positions.size
    cdef const int64_t* position = int64s(positions)
    cdef uint64_t low, z = cseq_stream(seed, epoch, purpose)
    if key != CSEQ_NO_KEY:
        z = cseq_mix(z ^ key)
    out = numpy.empty(count, numpy.uint64)
    cdef uint64_t* numbers = <uint64_t*>cnp.PyArray_DATA(out)
    for k in range(count):
        numbers[k] = cseq_multiply(cseq_mix(z + <uint64_t>position[k] * CSEQ_GOLDEN), below, &low)
    return out


def split(cnp.ndarray counts not None, cnp.ndarray nodes not None, cnp.ndarray factors not None):
    """Compute the counts in a `Shares` tree (see cseq/order/shares.py) with 64-bit arithmetic.

    Row k of `nodes` contains four indices into `counts`: base, node, left and right. The left child
    gets ``counts[base] * factors[k, 0] / 2**64``, rounded, and the right child gets the rest of
    ``counts[node]``. Return False if a share might be rounded incorrectly, which is possible only
    for counts above ``factors[k, 1]``.
    """
    cdef const int64_t* node = int64s(nodes)
    cdef const uint64_t* factor = <const uint64_t*>cnp.PyArray_DATA(factors)
    cdef uint64_t* values = <uint64_t*>cnp.PyArray_DATA(counts)
    cdef uint64_t count, high, low, half = <uint64_t>1 << 63
    cdef Py_ssize_t k, rows = len(nodes)
    for k in range(rows):
        count = values[node[4 * k]]
        high = cseq_multiply(count, factor[2 * k], &low)
        low += half
        if low < half:
            high += 1
        if low < count and count > factor[2 * k + 1]:
            return False
        values[node[4 * k + 2]] = high
        values[node[4 * k + 3]] = values[node[4 * k + 1]] - high
    return True


@cython.final
cdef class Permutation:
    """A permutation of 0 … n-1 for (seed, epoch, purpose, key). See docs/inside/orders.md.

    Permutations of fewer than `CSEQ_FEISTEL_LEAST` elements are stored in a table.
    """

    # None if the elements are computed on the fly.
    cdef readonly object table
    cdef cseq_feistel network

    def __cinit__(self, uint64_t n, uint64_t seed, uint64_t epoch, uint64_t purpose,
                  uint64_t key=CSEQ_NO_KEY):
        cdef uint64_t words[2 * CSEQ_ROUNDS]
        cseq_derive_keyed(seed, epoch, purpose, key, words, 2 * CSEQ_ROUNDS)
        self.network.n = n
        if n < CSEQ_FEISTEL_LEAST:
            self.table = shuffled(n, words)
        else:
            cseq_feistel_init(&self.network, n, words)

    def at(self, positions not None):
        """Return the elements at `positions` (int64, below n)."""
        if self.table is not None:
            return self.table[positions]
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.network.n:
            raise IndexError(f"positions {positions} are not all below {self.network.n}")
        out = numpy.empty(len(positions), numpy.int64)
        cseq_feistel_gather(&self.network, int64s(positions), len(positions),
                            <int64_t*>cnp.PyArray_DATA(out))
        return out


cdef enum:
    # Number of documents per stored sum.
    BLOCK = 64
    # Prefetch distance in iterations.
    EARLY = 8

cdef int64_t MOST_TOKENS = <int64_t>1 << 48


@cython.final
cdef class DocumentEnds:
    """Maps documents to their positions in a corpus and back, using 8 bytes per 64 documents.

    Positions count units from the start of the first document. The array of lengths is not copied
    and must not change.

    Parameters
    ----------
    lengths : array of int
        The number of tokens in each document (below 2**48 in total). May be a memory map.
    unit : int
        The number of tokens in a unit. An incomplete unit at the end of a document is ignored.
    ends : array of int64, optional
        The `ends` attribute of an instance with the same arguments, to avoid recomputing it.

    Attributes
    ----------
    total : int
        The total number of units in all documents.
    ends : array of int64
        The end position of every 64th document and of the last document.
    """

    cdef readonly cnp.ndarray lengths, ends
    cdef readonly int64_t total
    # `kind` is the item size in bytes. It is negative for unsigned lengths.
    cdef cnp.ndarray values
    cdef const char* data
    cdef const int64_t* sums
    cdef int kind
    cdef int64_t unit, count

    def __cinit__(self, lengths, int64_t unit=1, ends=None):
        self.lengths = values = integers("lengths", lengths)
        if not cnp.PyArray_IS_C_CONTIGUOUS(values) or not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        self.values, self.data = values, <const char*>cnp.PyArray_DATA(values)
        self.kind = values.itemsize * (-1 if values.dtype.kind == "u" else 1)
        self.unit, self.count = unit, len(values)
        self.ends = self.add_up() if ends is None else ends
        if unit < 1 or len(self.ends) != (self.count + BLOCK - 1) // BLOCK:
            raise ValueError(f"ends has {len(self.ends)} values, which does not fit lengths={values!r} and unit={unit}")
        self.sums = int64s(self.ends)
        self.total = self.sums[(self.count - 1) // BLOCK]

    def __reduce__(self):
        return DocumentEnds, (self.lengths, self.unit, self.ends)

    cdef object add_up(self):
        sums = numpy.empty((self.count + BLOCK - 1) // BLOCK, numpy.int64)
        for start in range(0, self.count, CHUNK):
            chunk = self.lengths[start:start + CHUNK]
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= MOST_TOKENS:
                at = start + int(chunk.argmin() if low < 0 else chunk.argmax())
                raise ValueError(f"lengths[{at}]={self.lengths[at]} is not in [0, {MOST_TOKENS}); pass the "
                                 "number of tokens, which is 0 for an empty document")
            units = (chunk if self.unit == 1 else chunk // self.unit).astype(numpy.int64, copy=False)
            blocks = numpy.add.reduceat(units, numpy.arange(0, len(units), BLOCK))
            sums[start // BLOCK:start // BLOCK + len(blocks)] = blocks
        if sums.sum(dtype=numpy.float64) >= MOST_TOKENS:
            raise ValueError(f"lengths adds up to {sums.sum(dtype=numpy.float64):.4g} tokens, which is not "
                             f"below {MOST_TOKENS}; divide the documents among several sources")
        return sums.cumsum()

    cdef inline int64_t length_of(self, int64_t k) noexcept nogil:
        """Return the number of whole units in a document. The stored length may be unaligned."""
        cdef int64_t value = 0
        cdef uint32_t word
        cdef uint16_t half
        cdef int size = self.kind if self.kind > 0 else -self.kind
        if size == 8:
            memcpy(&value, self.data + 8 * k, 8)
        elif size == 4:
            memcpy(&word, self.data + 4 * k, 4)
            value = word if self.kind < 0 else <int32_t>word
        elif size == 2:
            memcpy(&half, self.data + 2 * k, 2)
            value = half if self.kind < 0 else <int16_t>half
        else:
            value = (<const uint8_t*>self.data)[k] if self.kind < 0 else (<const int8_t*>self.data)[k]
        return value if self.unit == 1 else value // self.unit

    def starts(self, cnp.ndarray documents not None):
        """Return the start position of each document."""
        cdef Py_ssize_t n, count = len(documents)
        cdef const int64_t* given = int64s(documents)
        cdef int64_t k, begin, size = abs(self.kind)
        made = numpy.empty(count, numpy.int64)
        cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(made)
        if count and not 0 <= documents.min() <= documents.max() < self.count:
            raise IndexError(f"documents {documents} are not all in [0, {self.count})")
        with nogil:
            for n in range(count):
                if n + EARLY < count:
                    # Prefetch the block of a later document.
                    k = given[n + EARLY] // BLOCK * BLOCK
                    CSEQ_PREFETCH(self.sums + k // BLOCK - (k > 0))
                    while k < given[n + EARLY]:
                        CSEQ_PREFETCH(self.data + k * size)
                        k += 64 // size
                k = given[n] // BLOCK
                begin = self.sums[k - 1] if k else 0
                for k in range(k * BLOCK, given[n]):
                    begin += self.length_of(k)
                out[n] = begin
        return made

    def find(self, cnp.ndarray positions not None):
        """Return the document at each position, and the position where that document starts."""
        _, documents, inside, _ = locate([self], numpy.array([0, self.total]), positions)
        return documents, positions - inside

    cdef int64_t document_of(self, int64_t position, int64_t* begin) noexcept nogil:
        """Return the document at a position and store its start in `begin`."""
        cdef int64_t low = 0, high = (self.count - 1) // BLOCK, middle, end
        while low < high:
            middle = (low + high) // 2
            if self.sums[middle] > position:
                high = middle
            else:
                low = middle + 1
        begin[0] = end = self.sums[low - 1] if low else 0
        low = low * BLOCK - 1
        while end <= position:
            low, begin[0] = low + 1, end
            end += self.length_of(low)
        return low


def locate(list sources not None, cnp.ndarray firsts not None, cnp.ndarray positions not None):
    """Find the document at each position in several contiguous sources.

    `firsts` contains the start of each source and the end of the last one. Return four rows: the
    source, the document, the offset in the document, and the number of tokens left in the document.
    """
    cdef Py_ssize_t k, s = 0, count = len(positions)
    cdef const int64_t* first = int64s(firsts)
    cdef const int64_t* position = int64s(positions)
    cdef int64_t document, inside, begin = 0
    cdef DocumentEnds ends
    made = numpy.empty((4, count), numpy.int64)
    cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(made)
    for k in range(count):
        if not first[0] <= position[k] < first[len(sources)]:
            raise IndexError(f"positions {positions} are not all in [{first[0]}, {first[len(sources)]})")
        while position[k] < first[s]:
            s -= 1
        while position[k] >= first[s + 1]:
            s += 1
        ends = <DocumentEnds?>sources[s]
        document = ends.document_of(position[k] - first[s], &begin)
        inside = position[k] - first[s] - begin
        out[k], out[count + k], out[2 * count + k] = s, document, inside
        out[3 * count + k] = ends.length_of(document) - inside
    return made


cdef enum:
    # `keyed` shuffles a temporary table for sizes below this.
    BRIEFEST = 128


def keyed(cnp.ndarray sizes not None, cnp.ndarray keys not None, cnp.ndarray positions not None,
          uint64_t seed, uint64_t epoch, uint64_t purpose):
    """Return elements of many permutations, each with its own size and key.

    `positions[k]` is a position in the permutation of `sizes[k]` elements with key `keys[k]`. Sizes
    below `BRIEFEST` use fisher-yates-v1, and larger ones use feistel-v1. Nothing is cached.
    """
    cdef Py_ssize_t k, i, j, count = len(positions)
    cdef const int64_t* size = int64s(sizes)
    cdef const int64_t* key = int64s(keys)
    cdef const int64_t* position = int64s(positions)
    cdef uint64_t words[2 * CSEQ_ROUNDS]
    cdef uint8_t table[BRIEFEST]
    cdef cseq_feistel network
    if len(sizes) != count or len(keys) != count or (positions >= sizes).any() or (positions < 0).any():
        raise IndexError(f"positions {positions} are not all below {sizes}")
    out = numpy.empty(count, numpy.int64)
    cdef int64_t* element = <int64_t*>cnp.PyArray_DATA(out)
    for k in range(count):
        if not k or size[k] != size[k - 1] or key[k] != key[k - 1]:
            cseq_derive_keyed(seed, epoch, purpose, <uint64_t>key[k], words, 2 * CSEQ_ROUNDS)
            if size[k] >= BRIEFEST:
                cseq_feistel_init(&network, <uint64_t>size[k], words)
            else:
                for i in range(size[k]):
                    table[i] = <uint8_t>i
                for i in range(size[k]):
                    j = i + <Py_ssize_t>cseq_bounded(words, <uint64_t>(size[k] - i))
                    table[i], table[j] = table[j], table[i]
        if size[k] >= BRIEFEST:
            cseq_feistel_gather(&network, position + k, 1, element + k)
        else:
            element[k] = table[position[k]]
    return out


def deal(cnp.ndarray works not None, cnp.ndarray batches not None, Py_ssize_t ranks, Py_ssize_t count,
         Py_ssize_t size):
    """Assign each row to the rank with the least work so far. Ties go to the lowest rank.

    Each rank gets `size` rows from each of the `count` batches. `batches` contains each row's
    batch, and `works` each row's work, in descending order. Return each row's rank, and the row's
    index among that rank's rows in the batch.
    """
    cdef Py_ssize_t k, r, best, batch, rows = len(works)
    cdef const double* work = <const double*>cnp.PyArray_DATA(works)
    cdef const int64_t* batch_of = int64s(batches)
    if works.dtype != numpy.float64 or not len(batches) == rows == ranks * count * size:
        raise ValueError(f"expected {ranks} x {count} x {size} rows of float64, got {rows}")
    row_ranks, turns = numpy.empty(rows, numpy.int64), numpy.empty(rows, numpy.int64)
    loads, taken = numpy.zeros(ranks), numpy.zeros((count, ranks), numpy.int64)
    cdef int64_t* row_rank = <int64_t*>cnp.PyArray_DATA(row_ranks)
    cdef int64_t* turn = <int64_t*>cnp.PyArray_DATA(turns)
    cdef double* load = <double*>cnp.PyArray_DATA(loads)
    cdef int64_t* full = <int64_t*>cnp.PyArray_DATA(taken)
    for k in range(rows):
        batch, best = batch_of[k], -1
        if not 0 <= batch < count:
            raise IndexError(f"batch {batch} is not below {count}")
        for r in range(ranks):
            if full[batch * ranks + r] < size and (best < 0 or load[r] < load[best]):
                best = r
        if best < 0:
            raise ValueError(f"batch {batch} has more than {ranks} x {size} rows")
        row_rank[k], turn[k] = best, full[batch * ranks + best]
        full[batch * ranks + best] += 1
        load[best] += work[k]
    return row_ranks, turns


# Four bits select a child.
cdef enum:
    CHILDREN = 16


# The entries of a tree level, arranged in `count` rows of nearly equal length. The next level has
# `nodes` nodes with one child per row. In row j, node 0's child is entry start[j] + turn[j].
cdef struct Rows:
    uint64_t count
    uint64_t nodes
    uint64_t start[CHILDREN + 1]
    uint64_t turn[CHILDREN]


cdef Rows rows_of(uint64_t entries, uint64_t level):
    cdef Rows rows
    cdef uint64_t words[CHILDREN]
    cdef uint64_t j, low
    cseq_derive_keyed(0, 0, WEIGHTS, level + 1, words, CHILDREN)
    rows.count = min(entries, <uint64_t>CHILDREN)
    rows.nodes = (entries + rows.count - 1) // rows.count
    rows.start[0] = 0
    for j in range(rows.count):
        rows.start[j + 1] = (j + 1) * entries // rows.count
        rows.turn[j] = cseq_multiply(words[j], rows.start[j + 1] - rows.start[j], &low)
    return rows


def laid(values, uint64_t level=1):
    """Arrange the values of a tree level in an array with one row per parent node.

    Each row contains the values of a node's children, and 0 for missing children.
    """
    cdef cnp.ndarray given = numpy.ascontiguousarray(values)
    cdef Rows rows = rows_of(given.size, level)
    cdef cnp.ndarray nodes = numpy.empty((rows.nodes, rows.count), given.dtype)
    cdef const uint64_t* value = <uint64_t*>cnp.PyArray_DATA(given)
    cdef uint64_t* child = <uint64_t*>cnp.PyArray_DATA(nodes)
    cdef uint64_t x, j, at, length
    with nogil:
        for x in range(rows.nodes):
            for j in range(rows.count):
                length, at = rows.start[j + 1] - rows.start[j], x + rows.turn[j]
                at -= length if at >= length else 0
                child[x * rows.count + j] = value[rows.start[j] + at] if x < length else 0
    return nodes


@cython.final
cdef class Tree:
    """A tree that maps points on a line to samples. See docs/inside/orders.md.

    Each sample is an interval on the line. `masses` contains the interval lengths, arranged by
    `laid`, and their sum must be below 2**63. The intervals are in a different order in each epoch.
    """

    # 12 levels are enough for 16**12 = 2**48 samples.
    cdef readonly list levels
    cdef uint64_t* masses[12]
    cdef Rows rows[12]

    def __cinit__(self, cnp.ndarray masses not None, uint64_t samples):
        cdef uint64_t nodes, height = 0
        self.levels = []
        while True:
            self.rows[height] = rows_of(samples if not height else nodes, height + 1)
            self.masses[height] = <uint64_t*>cnp.PyArray_DATA(masses)
            self.levels.append(masses)
            nodes, height = len(masses), height + 1
            if nodes == 1:
                break
            masses = laid(masses.sum(1), height + 1)

    def __reduce__(self):
        return Tree, (self.levels[0], self.rows[0].start[self.rows[0].count])

    def samples_at(self, numbers, uint64_t seed, uint64_t epoch):
        """Return the samples at the given points of the line in an epoch."""
        cdef cnp.ndarray left = numpy.array(numbers, numpy.uint64)
        cdef cnp.ndarray nodes = numpy.zeros(left.size, numpy.int64)
        cdef uint64_t* lefts = <uint64_t*>cnp.PyArray_DATA(left)
        cdef uint64_t* entries = <uint64_t*>cnp.PyArray_DATA(nodes)
        cdef uint64_t node, rest, word, order, remaining, bits, child, length
        cdef uint64_t z = cseq_stream(seed, epoch, WEIGHTS)
        cdef const uint64_t* mass
        cdef const Rows* rows
        cdef Py_ssize_t k, count = left.size
        cdef int level, height = len(self.levels)
        with nogil:
            for level in range(height, 0, -1):
                rows = &self.rows[level - 1]
                for k in range(count):
                    if k + EARLY < count:
                        mass = self.masses[level - 1] + entries[k + EARLY] * rows.count
                        CSEQ_PREFETCH(mass)
                        CSEQ_PREFETCH(mass + 8)
                        CSEQ_PREFETCH(mass + 15)
                    node, rest = entries[k], lefts[k]
                    mass = self.masses[level - 1] + node * rows.count
                    word = cseq_mix(cseq_mix(z ^ (<uint64_t>level << 48 | node)))
                    order, remaining = 0xFEDCBA9876543210, rows.count
                    while True:
                        bits = 4 * cseq_multiply(word, remaining, &word)
                        child = order >> bits & 15
                        if rest < mass[child]:
                            break
                        rest -= mass[child]
                        # Replace this child with the last remaining one.
                        remaining -= 1
                        order ^= (order >> 4 * remaining & 15 ^ child) << bits
                    length = rows.start[child + 1] - rows.start[child]
                    node += rows.turn[child]
                    node -= length if node >= length else 0
                    lefts[k], entries[k] = rest, rows.start[child] + node
        return nodes


# Approximate number of samples to read ahead.
AHEAD = 1 << 14


@cython.final
cdef class ArrayReader(Reader):
    """A reader for orders computed with NumPy, many units at a time.

    It reads about `ahead` samples in advance. No Python code runs while the cache is being
    replaced, so signal handlers may use the reader or raise exceptions.

    Parameters
    ----------
    order : Order or Reader
        The order whose units are read.
    read : callable
        ``read(epoch, units)`` returns the samples in the given units, and the size of each unit (or
        None if all sizes are 1).
    share : callable, optional
        ``share(epoch, first, together, start, count)`` returns the units that a rank takes from the
        global batch at `first`, instead of the default [start, start + count).
    """

    cdef readonly object call, share
    cdef readonly uint64_t ahead
    cdef object samples_kept, sizes_kept
    # The cache contains `batches` batches of `count` units, at intervals of `together` units. The
    # first batch is [start, start + count), or a share of the global batch that starts at `first`.
    cdef uint64_t epoch, first, together, start, count, batches
    # The mean number of samples per cached unit.
    cdef double mean

    def __cinit__(self, order, uint64_t seed, read, share=None, uint64_t ahead=AHEAD):
        self.units, self.room, self.seed = order.units, order.room, seed
        self.call, self.share, self.ahead, self.mean = read, share, ahead, 1

    cdef int fetch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                   uint64_t count, uint64_t batches) except -1:
        if self.share is None or together == count:
            units = numpy.arange(start, start + count, dtype=numpy.int64)
            if batches > 1:
                units = (numpy.arange(batches)[:, None] * together + units).ravel()
        else:
            units = numpy.concatenate(
                [self.share(epoch, first + k * together, together, start + k * together, count)
                 for k in range(batches)])
        samples, sizes = gather(self, epoch, units)
        if sizes is not None:
            sizes = numpy.append(0, numpy.cumsum(sizes, dtype=numpy.int64))
        self.samples_kept, self.sizes_kept, self.mean = samples, sizes, len(samples) / len(units)
        self.epoch, self.first, self.together, self.start = epoch, first, together, start
        self.count, self.batches = count, batches
        return 0

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        return self.read_batch(epoch, start, count, start, count, out, sizes)

    cdef int64_t read_batch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                            uint64_t count, int64_t* out, int64_t* sizes) except -1:
        cdef uint64_t k, batch = self.batches + 1, more = 1
        cdef int64_t begin, written
        cdef int64_t* ends
        if not count:
            return 0
        if (self.batches and epoch == self.epoch and together == self.together and count == self.count
                and start - first == self.start - self.first and first >= self.first
                and (first - self.first) % together == 0):
            batch = (first - self.first) // together
        if batch >= self.batches:
            if batch == self.batches:
                more = min(<uint64_t>(self.ahead / (self.mean * count)), (self.units - first) // together)
                more = min(more, 4 * self.batches)
            self.fetch(epoch, first, together, start, count, max(more, <uint64_t>1))
            batch = 0
        begin, written = batch * count, count
        if self.sizes_kept is not None:
            ends = <int64_t*>cnp.PyArray_DATA(self.sizes_kept) + batch * count
            begin, written = ends[0], ends[count] - ends[0]
            if sizes != NULL:
                for k in range(count):
                    sizes[k] = ends[k + 1] - ends[k]
        memcpy(out, <int64_t*>cnp.PyArray_DATA(self.samples_kept) + begin, 8 * <size_t>written)
        return written


def gather(Reader reader not None, uint64_t epoch, units not None):
    """Return the samples in the given units, and the unit sizes (None if all are 1)."""
    cdef Py_ssize_t start = 0, end, count = len(units)
    if isinstance(reader, ArrayReader):
        samples, sizes = (<ArrayReader>reader).call(epoch, units)
        return numpy.ascontiguousarray(samples, dtype=numpy.int64), sizes
    cdef const int64_t* unit = int64s(units)
    samples = numpy.empty(count, numpy.int64)
    cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(samples)
    while start < count:
        end = start + 1
        while end < count and unit[end] == unit[end - 1] + 1:
            end += 1
        if unit[start] < 0 or <uint64_t>unit[end - 1] >= reader.units:
            raise IndexError(f"units [{unit[start]}, {unit[end - 1]}] are not all in [0, {reader.units})")
        reader.read(epoch, unit[start], end - start, out + start, NULL)
        start = end
    return samples, None
