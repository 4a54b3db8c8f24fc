# cython: language_level=3, freethreading_compatible=True
"""Samples sorted by class, and the readers of orders that are made of classes."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._core cimport BRIEF, SLICE, Reader
from cseq._headers cimport *
from cseq._memory cimport zeroed

import numpy

cnp.import_array()


cdef extern from "cseq_recipes.h" nogil:
    enum:
        CSEQ_FIT_LEVELS

    ctypedef struct cseq_kind:
        pass

    ctypedef struct cseq_part:
        pass

    ctypedef struct cseq_fit:
        uint64_t budget
        const int64_t* lengths
        const int64_t* counts
        int64_t class_
        int64_t left
        cseq_kind* kinds
        uint32_t made
        uint32_t most
        uint32_t* head
        uint32_t* tail
        uint64_t** level

    ctypedef struct cseq_members:
        const uint32_t* table
        const int64_t* offsets
        const int64_t* places
        uint64_t* made
        uint32_t* permuted
        cseq_feistel* networks
        uint32_t* scratch

    ctypedef struct cseq_recipes:
        cseq_members members
        const int64_t* starts
        const int64_t* first
        const cseq_part* parts
        uint64_t recipes
        uint64_t together
        uint64_t seed
        int64_t longest
        uint32_t* table

    ctypedef struct cseq_groups:
        cseq_members members
        uint64_t seed
        uint64_t total
        uint64_t classes
        uint64_t each
        uint64_t units
        uint32_t* table

    void cseq_sort_classes(const uint32_t* classes, uint64_t start, uint64_t end, int64_t* next,
                           uint32_t* table) noexcept
    uint64_t cseq_fit_words(uint64_t budget, int level) noexcept
    void cseq_fit_advance(cseq_fit* f, uint64_t steps) noexcept
    uint64_t cseq_fit_count(const cseq_fit* f, uint64_t* parts) noexcept
    void cseq_fit_write(const cseq_fit* f, int64_t* copies, int64_t* first, cseq_part* parts,
                        int64_t* next) noexcept
    uint64_t cseq_recipes_read(cseq_recipes* r, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                               int64_t* sizes, uint64_t* written, uint64_t steps) noexcept
    uint64_t cseq_groups_read(cseq_groups* g, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                              uint64_t steps) noexcept


cdef void* data_of(object array, str name, int kind) except NULL:
    """Where the values of a C-contiguous array are."""
    if not (isinstance(array, numpy.ndarray) and cnp.PyArray_TYPE(array) == kind
            and cnp.PyArray_ISCARRAY_RO(array)):
        raise TypeError(f"{name}={array!r} is not an array of the type that the core reads")
    return cnp.PyArray_DATA(array)


def sort_classes(classes not None, uint64_t count):
    """Samples by their class, those of a class in ascending order.

    Parameters
    ----------
    classes : numpy.ndarray of uint32
        The class of each sample, below `count`; at most 2**32 samples.
    count : int
        Classes.

    Returns
    -------
    tuple of numpy.ndarray
        The samples (uint32), and where each class begins among them and the last one ends (int64).
    """
    cdef uint64_t n = classes.size, start = 0, end, k
    cdef uint32_t* of = <uint32_t*>data_of(classes, "classes", cnp.NPY_UINT32)
    table = numpy.empty(n, numpy.uint32)
    offsets = numpy.zeros(count + 1, numpy.int64)
    cdef uint32_t* samples = <uint32_t*>cnp.PyArray_DATA(table)
    cdef int64_t* next_ = <int64_t*>cnp.PyArray_DATA(offsets)
    if n and classes.max() >= count:
        raise ValueError(f"classes has {classes.max()}, of {count} classes")
    with nogil:
        for k in range(n):
            next_[of[k] + 1] += 1
    numpy.cumsum(offsets, out=offsets)
    begin = offsets.copy()
    next_ = <int64_t*>cnp.PyArray_DATA(begin)
    while start < n:
        end = min(start + SLICE, n)
        with nogil:
            cseq_sort_classes(of, start, end, next_, samples)
        PyErr_CheckSignals()
        start = end
    return table, offsets


def best_fit(lengths not None, counts not None, uint64_t budget):
    """Recipes of rows that samples are packed into, by best fit decreasing.

    Parameters
    ----------
    lengths, counts : numpy.ndarray of int64
        Of each class, the length, ascending and in [1, `budget`], and the samples.
    budget : int
        Length of a row, below 2**36.

    Returns
    -------
    tuple of numpy.ndarray of int64
        Of each recipe: how many rows it makes; where its parts begin, and where the last one's end. Of
        each part: class, samples of it in a row, and the rank of the first one in the first row.
    """
    cdef cseq_fit f
    cdef uint64_t parts, recipes
    cdef uint64_t size = lengths.size
    cdef void* kinds
    cdef int l
    f.budget = budget
    f.lengths = <int64_t*>data_of(lengths, "lengths", cnp.NPY_INT64)
    f.counts = <int64_t*>data_of(counts, "counts", cnp.NPY_INT64)
    if not size or counts.size != size or budget >> 36 or lengths[0] < 1 or lengths[size - 1] > budget:
        raise ValueError(f"{size} lengths, {counts.size} counts, budget={budget}")
    f.class_ = <int64_t>size - 1
    f.left = f.counts[size - 1]
    f.made, f.most = 1, 0
    f.kinds, f.head, f.tail = NULL, NULL, NULL
    for l in range(CSEQ_FIT_LEVELS):
        f.level[l] = NULL
    try:
        f.head = <uint32_t*>zeroed(budget + 1, 4, "the rooms of rows")
        f.tail = <uint32_t*>zeroed(budget + 1, 4, "the rooms of rows")
        for l in range(CSEQ_FIT_LEVELS):
            f.level[l] = <uint64_t*>zeroed(cseq_fit_words(budget, l), 8, "the rooms of rows")
        while f.class_ >= 0:
            if f.most < f.made + 2:
                if f.most >> 31:
                    raise MemoryError(f"the rows have more than {f.most} kinds; give a quantum")
                f.most = max(2 * f.most, 4096)
                kinds = PyMem_RawRealloc(f.kinds, f.most * sizeof(cseq_kind))
                if kinds == NULL:
                    raise MemoryError(f"no memory for {f.most} kinds of rows")
                f.kinds = <cseq_kind*>kinds
            with nogil:
                cseq_fit_advance(&f, SLICE)
            PyErr_CheckSignals()
        recipes = cseq_fit_count(&f, &parts)
        copies = numpy.empty(recipes, numpy.int64)
        first = numpy.empty(recipes + 1, numpy.int64)
        table = numpy.empty((parts, 3), numpy.int64)
        ranks = numpy.zeros(size, numpy.int64)
        cseq_fit_write(&f, <int64_t*>cnp.PyArray_DATA(copies), <int64_t*>cnp.PyArray_DATA(first),
                       <cseq_part*>cnp.PyArray_DATA(table), <int64_t*>cnp.PyArray_DATA(ranks))
        return copies, first, table
    finally:
        PyMem_RawFree(f.kinds)
        PyMem_RawFree(f.head)
        PyMem_RawFree(f.tail)
        for l in range(CSEQ_FIT_LEVELS):
            PyMem_RawFree(f.level[l])


cdef tuple members_init(cseq_members* m, object classes):
    """Make memory for permutations of the classes of an `order.classes.Classes`; return its arrays."""
    arrays = table, offsets, places = classes.table, classes.offsets, classes.places
    m.table = <uint32_t*>data_of(table, "table", cnp.NPY_UINT32)
    m.offsets = <int64_t*>data_of(offsets, "offsets", cnp.NPY_INT64)
    m.places = <int64_t*>data_of(places, "places", cnp.NPY_INT64)
    m.made = <uint64_t*>zeroed(classes.count, 8, "the classes")
    m.permuted = <uint32_t*>zeroed(classes.tabled, 4, "the order of classes")
    m.networks = <cseq_feistel*>zeroed(classes.computed, sizeof(cseq_feistel), "the order of classes")
    m.scratch = <uint32_t*>zeroed(CSEQ_FEISTEL_LEAST, 4, "the order of a class")
    return arrays


cdef void members_free(cseq_members* m) noexcept:
    PyMem_RawFree(m.made)
    PyMem_RawFree(m.permuted)
    PyMem_RawFree(m.networks)
    PyMem_RawFree(m.scratch)


@cython.final
cdef class RecipesReader(Reader):
    """Units by recipes: `order` is an `order.recipes.Recipes`."""

    cdef tuple arrays
    cdef cseq_recipes r

    def __cinit__(self, order, uint64_t seed):
        self.units, self.room, self.seed = order.units, order.room, seed
        starts, first, parts = order.starts, order.first, order.parts
        self.arrays = starts, first, parts, members_init(&self.r.members, order.classes)
        self.r.starts = <int64_t*>data_of(starts, "starts", cnp.NPY_INT64)
        self.r.first = <int64_t*>data_of(first, "first", cnp.NPY_INT64)
        self.r.parts = <cseq_part*>data_of(parts, "parts", cnp.NPY_INT64)
        self.r.recipes, self.r.together = starts.size - 1, order.together
        self.r.longest = -1 if order.longest is None else order.longest
        self.r.seed = seed
        self.r.table = <uint32_t*>zeroed(
            cseq_permutation_entries(self.units // self.r.together), 4, "the order of units")

    def __dealloc__(self):
        members_free(&self.r.members)
        PyMem_RawFree(self.r.table)

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        cdef uint64_t written = 0
        cdef uint64_t done = cseq_recipes_read(&self.r, epoch, start, count, out, sizes, &written, BRIEF)
        while done < count:
            with nogil:
                done += cseq_recipes_read(&self.r, epoch, start + done, count - done, out,
                                          sizes + done if sizes != NULL else NULL, &written, SLICE)
            PyErr_CheckSignals()
        return <int64_t>written


@cython.final
cdef class GroupsReader(Reader):
    """Batches of some classes, and some samples of each: `order` is an `order.groups.Groups`."""

    cdef tuple arrays
    cdef cseq_groups g

    def __cinit__(self, order, uint64_t seed):
        self.units, self.room, self.seed = order.units, order.room, seed
        self.arrays = members_init(&self.g.members, order.classes)
        self.g.total, self.g.classes, self.g.each = order.classes.count, order.chosen, order.each
        self.g.units, self.g.seed = order.units, seed
        self.g.table = <uint32_t*>zeroed(cseq_permutation_entries(self.g.total), 4,
                                            "the order of classes")

    def __dealloc__(self):
        members_free(&self.g.members)
        PyMem_RawFree(self.g.table)

    cdef int64_t read(self, uint64_t epoch, uint64_t start, uint64_t count, int64_t* out,
                      int64_t* sizes) except -1:
        cdef uint64_t k, size = self.g.classes * self.g.each
        cdef uint64_t done = cseq_groups_read(&self.g, epoch, start, count, out, BRIEF)
        while done < count:
            with nogil:
                done += cseq_groups_read(&self.g, epoch, start + done, count - done, out + done * size,
                                         SLICE)
            PyErr_CheckSignals()
        if sizes != NULL:
            for k in range(count):
                sizes[k] = <int64_t>size
        return <int64_t>(count * size)
