# cython: language_level=3, freethreading_compatible=True
"""Ticket sources, which determine what each ticket requests."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from cseq._core cimport Reader, Ring
from cseq._headers cimport *
from cseq._memory cimport Block

import numpy

cnp.import_array()

# See `Cut` in sampler.py.
cdef struct Cut:
    uint64_t first, batches, full, start, stride, part_start, consumed
    uint32_t size, part

# Small batches are read together, up to about this many samples.
cdef uint64_t READ_AHEAD = 128


cdef class Source:
    """Determines each ticket's content, ring and number of units.

    Positions count units across all ranks. In a stream, each item is a unit.
    """

    cdef bint is_ready(self, uint64_t taken) noexcept:
        """Return True if the ticket due after `taken` tickets is prepared."""
        return True

    cdef int prepare(self, uint64_t taken) except -1:
        """Do one step of preparation, which may run user code."""
        return 0

    cdef Py_ssize_t target(self) noexcept:
        """Return the next ticket's ring, or -1 if no ticket is prepared or no ring has room."""
        return -1

    cdef uint64_t write(self, Py_ssize_t ring_number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        """Post the next ticket in a free cell. Return its number of units, over all ranks."""
        return 0

    cdef void end(self, Py_ssize_t ring_number) noexcept:
        """Stop posting tickets to a ring."""

    cdef bint is_over(self) noexcept:
        """Return True if there are no more tickets."""
        return True

    cpdef int finish(self) except -1:
        """Raise the exception that follows the last ticket, if any."""
        return 0


@cython.final
cdef class OrderSource(Source):
    """The batches of one or more consecutive epochs.

    `cut` is the `sampler.Cut` of the first epoch. `later` applies to the `more` epochs after it.
    """

    cdef readonly Reader reader
    cdef Cut cut, later
    cdef uint64_t more
    # `rest`: units after the full batches, over all ranks. `most`: the maximum batch size.
    cdef uint64_t posted, rest, most
    # Samples and unit sizes that have been read for batches [posted, prepared).
    cdef uint64_t prepared
    cdef Block data
    cdef int64_t* samples_read
    cdef int64_t* sizes_read
    # NULL if each unit is a single sample.
    cdef int64_t* sizes

    def __cinit__(self, Reader reader not None, uint64_t epoch, Cut cut, Cut later, uint64_t more):
        self.reader, self.epoch, self.later, self.consumed = reader, epoch, later, cut.consumed
        self.more = more if later.batches else 0
        self.most = max(<uint32_t>1, cut.size if cut.full else cut.part,
                        later.size if later.full else later.part)
        self.begin_epoch(&cut)

    cdef void begin_epoch(self, const Cut* cut) noexcept:
        self.cut = cut[0]
        self.rest = self.reader.units - min(<uint64_t>self.reader.units,
                                            cut.consumed + cut.full * cut.stride)
        self.posted = self.prepared = 0

    def __len__(self):
        """Return the number of batches after `consumed`."""
        return <Py_ssize_t>self.cut.batches

    cdef uint64_t position_of(self, uint64_t batch) noexcept:
        """Return the position of a batch's first unit."""
        if batch < self.cut.full:
            return self.cut.start + batch * self.cut.stride
        return self.cut.part_start

    cdef int64_t read_samples(self, uint64_t batch, int64_t* out, int64_t* sizes) except -1:
        """Write a batch's samples. The last batch may wrap around."""
        cdef uint64_t start = self.position_of(batch)
        cdef uint64_t done = 0, count
        cdef int64_t written = 0
        if batch < self.cut.full:
            done = self.cut.consumed + batch * self.cut.stride
            return self.reader.read_batch(self.epoch, done, self.cut.stride, start, self.cut.size, out,
                                          sizes)
        while done < self.cut.part:
            start %= self.reader.units
            count = min(self.cut.part - done, self.reader.units - start)
            written += self.reader.read(self.epoch, start, count, out + written,
                                        NULL if sizes == NULL else sizes + done)
            done += count
            start += count
        return written

    def samples(self, uint64_t batch):
        """Return a batch's samples and unit sizes."""
        if batch >= self.cut.batches:
            raise IndexError(f"batch {batch} is not in [0, {self.cut.batches})")
        sizes = numpy.ones(self.cut.size if batch < self.cut.full else self.cut.part, numpy.int64)
        out = numpy.empty(len(sizes) * self.reader.room, numpy.int64)
        written = self.read_samples(batch, <int64_t*>cnp.PyArray_DATA(out),
                                    <int64_t*>cnp.PyArray_DATA(sizes))
        return out[:written], sizes

    cdef bint is_ready(self, uint64_t taken) noexcept:
        return self.posted < self.prepared or self.is_over()

    cdef int prepare(self, uint64_t taken) except -1:
        """Read samples for the next ticket, or for several small batches."""
        cdef uint64_t room = self.reader.room
        cdef uint64_t count = 1, read, words, size
        cdef int64_t* out
        if self.posted >= self.cut.batches:
            self.begin_epoch(&self.later)
            self.epoch += 1
            self.more -= 1
        size = self.cut.size
        # Leave room for one more batch after almost READ_AHEAD samples.
        words = READ_AHEAD + self.most * room
        if self.data is None:
            self.data = Block(8 * <Py_ssize_t>(words + READ_AHEAD + self.most))
        out = self.samples_read = <int64_t*>self.data.data
        self.sizes = self.sizes_read = out + words if room > 1 else NULL
        # If there is only one rank, its batches are contiguous.
        if self.posted < self.cut.full and room == 1 and self.cut.stride == size:
            count = min(self.cut.full - self.posted, max(<uint64_t>1, READ_AHEAD // size))
            self.reader.read(self.epoch, self.position_of(self.posted), count * size, out, NULL)
        else:
            read = self.read_samples(self.posted, out, self.sizes)
            while (self.posted + count < self.cut.full and read < READ_AHEAD
                   and count * size < READ_AHEAD):
                read += self.read_samples(self.posted + count, out + read,
                                  NULL if room == 1 else self.sizes + count * size)
                count += 1
        self.prepared = self.posted + count
        return 0

    cdef Py_ssize_t target(self) noexcept:
        return 0 if self.posted < self.prepared else -1

    cdef uint64_t write(self, Py_ssize_t ring_number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words = cseq_ring_indices(ring.r, cell)
        cdef bint is_full = self.posted < self.cut.full
        cdef uint32_t k, parts = self.cut.size if is_full else self.cut.part
        cdef uint32_t count = parts
        if self.sizes != NULL:
            count = 0
            for k in range(parts):
                count += <uint32_t>self.sizes_read[k]
            memcpy(words + count, self.sizes_read, 8 * <size_t>parts)
            self.sizes_read += parts
        memcpy(words, self.samples_read, 8 * <size_t>count)
        self.samples_read += count
        cseq_ring_cell(ring.r, cell).parts = 0 if self.sizes == NULL else parts
        ring.offer(cell, ticket, self.epoch, self.cut.first + self.posted, count,
                   self.position_of(self.posted), self.reader.seed)
        self.posted += 1
        return self.cut.stride if is_full else self.rest

    cdef bint is_over(self) noexcept:
        return self.posted >= self.cut.batches and not self.more
