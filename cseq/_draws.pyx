# cython: language_level=3, freethreading_compatible=True
"""Readers of orders that draw: by weight, from orders, from windows of blocks."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM
from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp

from cseq._core cimport SLICE, Reader
from cseq._headers cimport *
from cseq._memory cimport zeroed

import math

import numpy

cnp.import_array()


cdef extern from "cseq_weights.h" nogil:
    enum:
        CSEQ_DRAWS  # numbers that are looked up together

    uint64_t CSEQ_WEIGHTS_MOST

    ctypedef struct cseq_divisor:
        uint64_t d

    ctypedef struct cseq_weights:
        const uint64_t* sums
        const uint32_t* guide
        uint64_t n, total
        int shift

    cseq_divisor cseq_divisor_of(uint64_t d) noexcept
    uint64_t cseq_weights_look(const double* weights, uint64_t first, uint64_t last, double scale,
                               double* sum) noexcept
    void cseq_weights_add(const double* weights, uint64_t first, uint64_t last, int k, uint64_t* sums,
                          uint64_t* sum) noexcept
    int cseq_weights_shift(uint64_t n, uint64_t total) noexcept
    uint64_t cseq_weights_guides(uint64_t total, int shift) noexcept
    void cseq_weights_lead(const uint64_t* sums, uint64_t n, uint64_t first, uint64_t last, int shift,
                           uint32_t* guide, uint64_t* at) noexcept
    void cseq_weights_find(const cseq_weights* w, const uint64_t* numbers, uint64_t count,
                           int64_t* out) noexcept
    void cseq_weights_spread(uint64_t total, cseq_divisor size, uint64_t offset, uint64_t* numbers,
                             uint64_t count) noexcept
    uint64_t cseq_weights_stream(uint64_t seed, uint64_t epoch) noexcept
    void cseq_weights_draw(uint64_t total, uint64_t z, uint64_t start, uint64_t* numbers,
                           uint64_t count) noexcept


cdef str READER = "the reader of an order"

cdef enum:
    BRIEF = 1 << 16   # samples that are too few to release the GIL for
    SCRATCH = 1 << 16 # samples of sources that a mixture reads together, unless a unit has more


def integers_of(const double[::1] weights not None):
    """The weights of samples as integers: their cumulative sums, of uint64, and the guide to these.

    Each is ``weight * 2**k``, rounded half to even, and at least 1 unless the weight is 0; k is the
    largest for which the total is below 2**62.

    Raises
    ------
    ValueError
        A weight is negative, infinite or nan, or all are 0.
    """
    cdef uint64_t n = <uint64_t>weights.shape[0]
    cdef uint64_t i, last, done, total = CSEQ_WEIGHTS_MOST
    cdef double scale = 1, total_weight
    cdef const double* w = &weights[0]
    while True:
        i = 0
        total_weight = 0
        while i < n:
            last = min(i + SLICE, n)
            with nogil:
                done = cseq_weights_look(w, i, last, scale, &total_weight)
            if done < last:
                raise ValueError(f"weights has {weights[done]} for sample {done}; give finite numbers of "
                                 "at least 0")
            PyErr_CheckSignals()
            i = last
        if scale != 1 or 2.0**-900 < total_weight < float("inf"):
            break
        scale = 2.0**600 if total_weight < 1 else 2.0**-600
    if total_weight == 0:
        raise ValueError(f"all of the {n} weights are 0; give one above 0 at least")
    mantissa, exponent = math.frexp(total_weight)  # the sum may be wrong by some 10^-6
    cdef int k = 62 - exponent + math.frexp(scale)[1] - (mantissa > 0.5001)
    cdef cnp.ndarray sums = numpy.empty(n, numpy.uint64)
    cdef uint64_t* s = <uint64_t*>cnp.PyArray_DATA(sums)
    while total >= CSEQ_WEIGHTS_MOST:  # once, as a rule
        i = total = 0
        while i < n and total < CSEQ_WEIGHTS_MOST:
            last = min(i + SLICE, n)
            with nogil:
                cseq_weights_add(w, i, last, k, s, &total)
            PyErr_CheckSignals()
            i = last
        k -= 1
    cdef int shift = cseq_weights_shift(n, total)
    cdef cnp.ndarray guide = numpy.empty(cseq_weights_guides(total, shift), numpy.uint32)
    cdef uint32_t* g = <uint32_t*>cnp.PyArray_DATA(guide)
    i = done = 0
    while i < n:
        last = min(i + SLICE, n)
        with nogil:
            cseq_weights_lead(s, n, i, last, shift, g, &done)
        PyErr_CheckSignals()
        i = last
    return sums, guide


@cython.final
cdef class WeightedReader(Reader):
    """Samples drawn by weight: weighted-v1, see docs/inside/orders.md.

    Parameters
    ----------
    integers : tuple of numpy.ndarray
        What `integers_of` returned.
    size : int
        Draws of an epoch.
    seed : int
    replacement : bool
        The draws do not depend on each other.
    """

    cdef cseq_weights weights
    cdef cseq_divisor size
    cdef cseq_permutation places
    cdef uint32_t* table
    cdef tuple integers
    cdef bint replacement, begun
    cdef uint64_t epoch, offset, z

    def __cinit__(self, tuple integers not None, uint64_t size, uint64_t seed, bint replacement):
        self.integers = integers
        sums, guide = integers
        self.units, self.room, self.seed, self.replacement = size, 1, seed, replacement
        self.weights.sums = <const uint64_t*>cnp.PyArray_DATA(sums)
        self.weights.guide = <const uint32_t*>cnp.PyArray_DATA(guide)
        self.weights.n, self.weights.total = len(sums), sums[len(sums) - 1]
        self.weights.shift = cseq_weights_shift(self.weights.n, self.weights.total)
        self.size = cseq_divisor_of(size)

    def __dealloc__(self):
        PyMem_RawFree(self.table)

    cdef int begin(self, uint64_t epoch) except -1:
        cdef uint64_t words[17]
        cdef uint64_t low
        self.begun = False
        if self.replacement:
            self.z = cseq_weights_stream(self.seed, epoch)
        else:
            if self.table == NULL:
                self.table = <uint32_t*>zeroed(cseq_permutation_entries(self.units), 4, READER)
            cseq_permutation_init(&self.places, self.units, self.seed, epoch, CSEQ_PURPOSE_WEIGHTS,
                                  CSEQ_NO_KEY, self.table)
            cseq_derive_keyed(self.seed, epoch, CSEQ_PURPOSE_WEIGHTS, CSEQ_NO_KEY, words, 17)
            self.offset = cseq_multiply(words[16], self.weights.total, &low)
        self.epoch, self.begun = epoch, True
        return 0

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        cdef uint64_t numbers[CSEQ_DRAWS]
        cdef uint64_t done = 0, some
        if not self.begun or epoch != self.epoch:
            self.begin(epoch)
        while done < count:
            some = min(count - done, <uint64_t>CSEQ_DRAWS)
            if self.replacement:
                cseq_weights_draw(self.weights.total, self.z, start + done, numbers, some)
            else:
                cseq_permutation_read(&self.places, start + done, some, <int64_t*>numbers)
                cseq_weights_spread(self.weights.total, self.size, self.offset, numbers, some)
            cseq_weights_find(&self.weights, numbers, some, out + done)
            done += some
        return count


cdef int64_t read_passes(Reader reader, uint64_t unit, uint64_t count, int64_t* out,
                         int64_t* sizes) except -1:
    """`Reader.read`, of units of the endless sequence of a reader's epochs."""
    cdef uint64_t some, done = 0
    cdef int64_t written = 0
    while done < count:
        some = min(count - done, reader.units - (unit + done) % reader.units)
        written += reader.read((unit + done) // reader.units, (unit + done) % reader.units, some,
                               out + written, NULL if sizes == NULL else sizes + done)
        done += some
    return written


# ---- mixtures --------------------------------------------------------------------------------------


def seed_of(seed, str name not None):
    """The seed of a mixture's source: word 0 of (seed, 0, 12, word of its name)."""
    cdef uint64_t word, key = 0
    cdef unsigned char byte
    for byte in name.encode():
        key = cseq_mix(key ^ byte)
    cseq_derive_keyed(seed, 0, CSEQ_PURPOSE_SOURCE, key, &word, 1)
    return word


def block_order(uint32_t length, uint64_t seed, uint64_t block):
    """The order of a mixture's block: a permutation of 0 … length-1."""
    order = numpy.empty(length, numpy.uint32)
    shuffle_block(length, seed, block, <uint32_t*>cnp.PyArray_DATA(order))
    return order


cdef void shuffle_block(uint64_t length, uint64_t seed, uint64_t block, uint32_t* out) noexcept:
    cdef uint64_t words[4]
    cseq_derive_keyed(seed, 0, CSEQ_PURPOSE_MIXTURE, block, words, 4)
    cseq_permute(out, 4, length, 0, length, words)


cdef struct Share:  # of a source, in what is read together
    uint32_t source
    uint32_t count  # units
    int64_t* unit   # the size of its next unit
    int64_t* value  # its next sample


@cython.final
cdef class MixtureReader(Reader):
    """Units of several orders, in exact shares: mixture-v1, see docs/inside/orders.md.

    Parameters
    ----------
    sources : list of Reader
        Each with its own seed.
    firsts : numpy.ndarray
        Added to the samples of each source. Shape (sources,), int64.
    block, units, seed : int
        Units of a block, and of an epoch.
    since : int
        The unit of the endless sequence of epochs that block 0 begins with.
    blocks, quotas, taken : numpy.ndarray
        From block ``blocks[k]`` on, a block has ``quotas[k]`` units of the sources, of which
        ``taken[k]`` were drawn before it. Shapes (phases,), uint64; (phases, sources), uint32 and
        uint64; all contiguous.
    """

    cdef list sources
    cdef tuple kept               # the arrays
    cdef const int64_t* firsts
    cdef const uint64_t* blocks
    cdef const uint32_t* quotas
    cdef const uint64_t* taken
    cdef uint64_t count, phases, length, since
    cdef uint64_t block, phase    # that `order` and `owners` are of
    cdef uint32_t at              # units of the block that `seen` has counted
    cdef uint16_t* owners         # the sources of a block's units before they are shuffled
    cdef uint16_t* order          # and after it
    cdef uint32_t* table
    cdef uint32_t* seen           # units of each source before `at`
    cdef uint32_t* slots          # where a source is in `shares`, if it is there
    cdef Share* shares
    cdef int64_t* values          # samples that were read, source by source
    cdef int64_t* lengths         # and the sizes of their units
    cdef uint64_t most            # units that are read together
    cdef uint64_t turn            # +1 for whatever changes the above: a signal handler may read, too
    # Where units are samples, those up to the end of a block are read at once if they are asked for in
    # order: `ahead` has `ready` of them, from unit `ahead_from` after `since`; `next` is asked for next.
    cdef int64_t* ahead
    cdef uint64_t ahead_from, ready, next

    def __cinit__(self, list sources not None, firsts, *, uint64_t block, uint64_t units, uint64_t seed,
                  uint64_t since, blocks, quotas, taken):
        cdef Reader reader
        self.sources, self.count, self.phases = sources, len(sources), len(blocks)
        self.kept = firsts, blocks, quotas, taken
        self.firsts = <const int64_t*>cnp.PyArray_DATA(firsts)
        self.blocks = <const uint64_t*>cnp.PyArray_DATA(blocks)
        self.quotas = <const uint32_t*>cnp.PyArray_DATA(quotas)
        self.taken = <const uint64_t*>cnp.PyArray_DATA(taken)
        self.length, self.units, self.seed, self.since = block, units, seed, since
        self.block = self.phase = <uint64_t>-1
        for reader in sources:
            self.room = max(self.room, reader.room)
        self.most = max(<uint64_t>1, min(block, <uint64_t>SCRATCH // self.room))
        self.owners = <uint16_t*>zeroed(block, 2, READER)
        self.order = <uint16_t*>zeroed(block, 2, READER)
        self.table = <uint32_t*>zeroed(block, 4, READER)
        self.seen = <uint32_t*>zeroed(self.count, 4, READER)
        self.slots = <uint32_t*>zeroed(self.count, 4, READER)
        self.shares = <Share*>zeroed(self.count, sizeof(Share), READER)
        self.values = <int64_t*>zeroed(self.most * self.room, 8, READER)
        self.lengths = <int64_t*>zeroed(self.most, 8, READER)
        self.ahead = <int64_t*>zeroed(self.most if self.room == 1 else 0, 8, READER)

    def __dealloc__(self):
        PyMem_RawFree(self.owners)
        PyMem_RawFree(self.order)
        PyMem_RawFree(self.table)
        PyMem_RawFree(self.seen)
        PyMem_RawFree(self.slots)
        PyMem_RawFree(self.shares)
        PyMem_RawFree(self.values)
        PyMem_RawFree(self.lengths)
        PyMem_RawFree(self.ahead)

    cdef void seek(self, uint64_t block, uint32_t at) noexcept:
        """Shuffle a block, and count the units of each source in it before `at`."""
        cdef uint64_t k, i, s
        cdef uint64_t phase = self.phases - 1
        if block != self.block:
            while self.blocks[phase] > block:
                phase -= 1
            if phase != self.phase:
                i = 0
                for s in range(self.count):
                    for k in range(self.quotas[phase * self.count + s]):
                        self.owners[i] = <uint16_t>s
                        i += 1
            shuffle_block(self.length, self.seed, block, self.table)
            for i in range(self.length):
                self.order[i] = self.owners[self.table[i]]
            self.block, self.phase = block, phase
            self.at = 0
            memset(self.seen, 0, 4 * self.count)
        elif at < self.at:
            self.at = 0
            memset(self.seen, 0, 4 * self.count)
        for i in range(self.at, at):
            self.seen[self.order[i]] += 1
        self.at = at

    cdef uint64_t draw(self, uint64_t source) noexcept:
        """The number of a source's next draw."""
        cdef uint64_t k = self.phase * self.count + source
        return (self.taken[k] + (self.block - self.blocks[self.phase]) * self.quotas[k]
                + self.seen[source])

    cdef int64_t take(self, uint64_t source, uint64_t draw, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        """Write the samples of draws [draw, draw + count) of a source, pass by pass."""
        cdef Reader reader = <Reader>PyList_GET_ITEM(self.sources, <Py_ssize_t>source)
        cdef uint64_t k
        if sizes != NULL and reader.room == 1:
            for k in range(count):
                sizes[k] = 1
        return read_passes(reader, draw, count, out, sizes)

    cdef bint gather(self, uint64_t block, uint32_t at, uint32_t count) except -1:
        """Read units [at, at + count) of a block, source by source; False: begin again."""
        cdef uint32_t i, k, s, shares = 0
        cdef uint64_t turn
        cdef int64_t* value = self.values
        cdef int64_t* unit = self.lengths
        cdef Share* share
        self.turn += 1
        turn = self.turn
        self.seek(block, at)
        for i in range(at, at + count):
            s = self.order[i]
            k = self.slots[s]
            if k >= shares or self.shares[k].source != s:
                self.slots[s] = k = shares
                self.shares[k].source, self.shares[k].count = s, 0
                shares += 1
            self.shares[k].count += 1
        for k in range(shares):
            share = self.shares + k
            share.unit, share.value = unit, value
            s = share.count
            value += self.take(share.source, self.draw(share.source), s, value,
                               unit if self.room > 1 else NULL)
            if self.turn != turn:
                return False
            unit += s
        for k in range(shares):
            self.seen[self.shares[k].source] += self.shares[k].count
        self.at = at + count
        return True

    cdef int64_t spread(self, uint32_t at, uint32_t count, int64_t* out, int64_t* sizes) noexcept:
        """Write what was gathered in the order of the block."""
        cdef uint32_t i
        cdef int64_t k, size = 1
        cdef int64_t written = 0
        cdef int64_t first
        cdef Share* share
        for i in range(count):
            share = self.shares + self.slots[self.order[at + i]]
            first = self.firsts[share.source]
            if self.room > 1:
                size = share.unit[0]
                share.unit += 1
            if sizes != NULL:
                sizes[i] = size
            for k in range(size):
                out[written + k] = share.value[k] + first
            share.value += size
            written += size
        return written

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        cdef uint64_t unit = epoch * self.units + start - self.since  # modulo 2^64, as draws are
        cdef uint64_t block, some, done = 0
        cdef uint32_t at
        cdef int64_t written = 0
        cdef bint in_order = unit == self.next
        self.next = unit + count
        while done < count:
            if unit - self.ahead_from < self.ready:
                some = min(count - done, self.ready - (unit - self.ahead_from))
                memcpy(out + done, self.ahead + (unit - self.ahead_from), 8 * some)
                written += some
            else:
                block, at = unit // self.length, <uint32_t>(unit % self.length)
                some = min(self.length - at, self.most)
                if unit:  # those before `since` are numbered up to 2**64, which may be within a block
                    some = min(some, <uint64_t>0 - unit)
                if self.room > 1 or not in_order:
                    some = min(some, count - done)
                while not self.gather(block, at, <uint32_t>some):
                    pass
                if self.room == 1 and in_order:
                    self.spread(at, <uint32_t>some, self.ahead, NULL)
                    self.ahead_from, self.ready = unit, some
                    continue
                written += self.spread(at, <uint32_t>some, out + written,
                                       NULL if sizes == NULL else sizes + done)
            done += some
            unit += some
        return written


@cython.final
cdef class ResizedReader(Reader):
    """The endless sequence of a reader's epochs, cut into epochs of another size."""

    cdef Reader reader

    def __cinit__(self, Reader reader not None, uint64_t units):
        self.reader, self.units, self.room, self.seed = reader, units, reader.room, reader.seed

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        return read_passes(self.reader, epoch * self.units + start, count, out, sizes)


# ---- blocks ----------------------------------------------------------------------------------------


cdef struct Lane:
    void* table        # samples of the window, shuffled
    int64_t* blocks    # room for those of a window
    uint64_t first     # the lane's element that `table` begins with
    uint64_t size      # elements in it; 0: none


@cython.final
cdef class BlocksReader(Reader):
    """Shuffled within windows of shuffled blocks: blocks-v1, see docs/inside/orders.md.

    Parameters
    ----------
    n : int
        Samples.
    rows, window, lanes : int
        Samples of a block; blocks of a window over all lanes; lanes, which divide `window`.
    seed : int
    """

    cdef uint64_t rows, window, lanes, blocks   # `window`: blocks of one lane's
    cdef uint64_t short_by                      # rows that the last block has less
    cdef uint64_t by_rows                       # 2^64 / rows + 1; rows 1: 0
    cdef uint32_t width                         # bytes of a table's entry
    cdef Lane* lane
    cdef uint32_t* order                        # of the blocks, where they are few
    cdef cseq_permutation places
    cdef bint begun
    cdef uint64_t epoch
    cdef uint64_t short_lane, short_place       # where the last block is: its number in the lane
    cdef uint64_t body                          # positions at which the lanes take turns
    cdef uint64_t turn                          # +1 for each read: a signal handler may read, too

    def __cinit__(self, uint64_t n, *, uint64_t rows, uint64_t window, uint64_t lanes, uint64_t seed):
        self.units, self.room, self.seed = n, 1, seed
        self.rows, self.window, self.lanes = rows, window // lanes, lanes
        self.blocks = (n - 1) // rows + 1
        self.short_by = self.blocks * rows - n
        self.by_rows = <uint64_t>-1 // rows + 1
        self.width = cseq_table_width(n)
        self.lane = <Lane*>zeroed(lanes, sizeof(Lane), READER)
        self.order = <uint32_t*>zeroed(cseq_permutation_entries(self.blocks), 4, READER)

    def __dealloc__(self):
        cdef uint64_t k
        if self.lane != NULL:
            for k in range(self.lanes):
                PyMem_RawFree(self.lane[k].table)
                PyMem_RawFree(self.lane[k].blocks)
        PyMem_RawFree(self.lane)
        PyMem_RawFree(self.order)

    cdef void begin(self, uint64_t epoch) noexcept:
        cdef uint64_t k, last = self.blocks - 1, place = 0, shortest
        cseq_permutation_init(&self.places, self.blocks, self.seed, epoch, CSEQ_PURPOSE_BLOCKS, 0,
                              self.order)
        if self.blocks >= CSEQ_FEISTEL_LEAST:
            place = cseq_feistel_find(&self.places.feistel, last)
        else:
            while self.order[place] != last:
                place += 1
        self.short_lane, self.short_place = place % self.lanes, place // self.lanes
        self.epoch, self.begun = epoch, True
        shortest = self.length_of(0)
        for k in range(self.lanes):
            self.lane[k].size = 0
            shortest = min(shortest, self.length_of(k))
        self.body = shortest * self.lanes

    cdef uint64_t blocks_of(self, uint64_t lane) noexcept:
        """Blocks of a lane: those at places lane, lane + lanes, …"""
        return (self.blocks + self.lanes - 1 - lane) // self.lanes

    cdef uint64_t length_of(self, uint64_t lane) noexcept:
        """Elements of a lane."""
        cdef uint64_t elements = self.blocks_of(lane) * self.rows
        return elements - self.short_by if lane == self.short_lane else elements

    cdef bint shuffle(self, uint64_t number, uint64_t element) except -1:
        """Shuffle the window that an element of a lane is in; False: begin again."""
        cdef uint64_t state[4]
        cdef Lane* lane = self.lane + number
        cdef uint64_t turn = self.turn
        cdef uint64_t full = self.window * self.rows
        cdef uint64_t short_at = self.short_place // self.window
        cdef uint64_t window, count, size, k, done = 0, end
        cdef uint64_t short_end = <uint64_t>-1  # in the window: elements of it up to the short block's
        cdef uint64_t moved = element
        if number == self.short_lane and element >= (short_at + 1) * full - self.short_by:
            moved += self.short_by
        window = moved // full
        count = min(self.window, self.blocks_of(number) - window * self.window)
        size = count * self.rows
        if number == self.short_lane and window == short_at:
            size -= self.short_by
            short_end = (self.short_place % self.window + 1) * self.rows - self.short_by
        lane.size = 0
        if lane.table == NULL:
            lane.table = zeroed(min(self.window, self.blocks_of(number)) * self.rows, self.width, READER)
        if lane.blocks == NULL:
            lane.blocks = <int64_t*>zeroed(self.window, 8, READER)
        for k in range(count):
            cseq_permutation_read(&self.places, number + self.lanes * (window * self.window + k), 1,
                                  lane.blocks + k)
        cseq_derive_keyed(self.seed, self.epoch, CSEQ_PURPOSE_WINDOW, (number << 40) | window, state, 4)
        while done < size:
            end = min(size, done + SLICE)
            if size <= BRIEF:
                cseq_permute(lane.table, self.width, size, done, end, state)
            else:
                with nogil:
                    cseq_permute(lane.table, self.width, size, done, end, state)
                PyErr_CheckSignals()
                if self.turn != turn:
                    return False
            done = end
        if size <= BRIEF:
            self.number(lane, size, short_end)
        else:
            with nogil:
                self.number(lane, size, short_end)
        lane.first = window * full
        if number == self.short_lane and window > short_at:
            lane.first -= self.short_by
        lane.size = size
        return True

    cdef void number(self, Lane* lane, uint64_t size, uint64_t short_end) noexcept nogil:
        """Put the numbers of samples in the place of their numbers in the window."""
        cdef uint64_t k, t, b, low
        for k in range(size):
            t = (<uint32_t*>lane.table)[k] if self.width == 4 else (<uint64_t*>lane.table)[k]
            if t >= short_end:
                t += self.short_by
            b = cseq_multiply(t, self.by_rows, &low) if self.by_rows else t
            t += (<uint64_t>lane.blocks[b] - b) * self.rows
            if self.width == 4:
                (<uint32_t*>lane.table)[k] = <uint32_t>t
            else:
                (<uint64_t*>lane.table)[k] = t

    cdef bint copy(self, uint64_t start, uint64_t count, int64_t* out) except -1:
        """Write the samples at positions [start, start + count); False: begin again."""
        cdef uint64_t number, element, k = 0, least = self.body // self.lanes
        cdef Lane* lane
        if start < self.body:
            number, element = start % self.lanes, start // self.lanes
        else:
            number, element = 0, start - self.body + least
            while element >= self.length_of(number):
                element -= self.length_of(number) - least
                number += 1
        while k < count:
            lane = self.lane + number
            if element - lane.first >= lane.size and not self.shuffle(number, element):
                return False
            if self.width == 4:
                out[k] = (<uint32_t*>lane.table)[element - lane.first]
            else:
                out[k] = <int64_t>(<uint64_t*>lane.table)[element - lane.first]
            k += 1
            if start + k < self.body:
                number += 1
                if number == self.lanes:
                    number = 0
                    element += 1
            elif k < count:
                if start + k == self.body:
                    number, element = 0, least - 1
                element += 1
                while element >= self.length_of(number):
                    number, element = number + 1, least
        return True

    cdef bint choose(self, uint64_t start, uint64_t count, uint64_t first, uint64_t last,
                     int64_t* out) except -1:
        """Write the samples at those of the positions whose lanes are in [first, last)."""
        cdef uint64_t end = start + count, lane, some
        while start < end:
            lane = start % self.lanes
            if lane < first:
                start += first - lane
            elif lane >= last:
                start += self.lanes - lane + first
            else:
                some = min(last - lane, end - start)
                if not self.copy(start, some, out):
                    return False
                start += some
                out += some
        return True

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        while True:
            self.turn += 1
            if not self.begun or epoch != self.epoch:
                self.begin(epoch)
            if self.copy(start, count, out):
                return count

    cdef int64_t read_batch(self, uint64_t epoch, uint64_t first, uint64_t together, uint64_t start,
                            uint64_t count, int64_t* out, int64_t* sizes) except -1:
        cdef uint64_t ranks = together // count, rank = (start - first) // count
        cdef uint64_t ours = self.lanes // ranks
        while True:
            self.turn += 1
            if not self.begun or epoch != self.epoch:
                self.begin(epoch)
            if self.lanes % ranks or together % self.lanes or first + together > self.body:
                return self.read(epoch, start, count, out, sizes)
            if self.choose(first, together, rank * ours, (rank + 1) * ours, out):
                return count
