# cython: language_level=3, freethreading_compatible=True
"""Arrays made in place: numpy allocates them in the batch's slot (cseq_place.h)."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memcpy
from libc.stdint cimport uint8_t, uint64_t

cimport cython
cimport numpy as cnp

from cseq._headers cimport *
from cseq._memory cimport Mapping, place_here

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyDataMemAllocator:
        void* ctx
        void* (*malloc)(void* ctx, size_t size) noexcept
        void* (*calloc)(void* ctx, size_t count, size_t size) noexcept
        void* (*realloc)(void* ctx, void* p, size_t size) noexcept
        void (*free)(void* ctx, void* p, size_t size) noexcept

    ctypedef struct PyDataMem_Handler:
        char name[127]
        uint8_t version
        PyDataMemAllocator allocator

    object PyDataMem_SetHandler(object handler)
    object PyDataMem_GetHandler()


cdef PyDataMem_Handler place_handler
cdef bint place_installed = False


cdef void place_release(void* owner) noexcept:
    """Called when no array is left in the region of this `Mapping`."""
    Py_DECREF(<object>owner)


@cython.final
@cython.no_gc
cdef class SlotAllocator:
    """Makes numpy allocate the arrays of a batch in the batch's slot: see cseq_place.h.

    Holds for the thread and `contextvars` context that make it, until the process ends; a worker
    process has one.
    """

    def __cinit__(self):
        global place_installed
        cdef PyDataMem_Handler* before
        if not place_installed:
            before = <PyDataMem_Handler*>PyCapsule_GetPointer(PyDataMem_GetHandler(), "mem_handler")
            place_here.ctx = before.allocator.ctx
            place_here.malloc = before.allocator.malloc
            place_here.calloc = before.allocator.calloc
            place_here.realloc = before.allocator.realloc
            place_here.free = before.allocator.free
            place_here.release = place_release
            memcpy(place_handler.name, b"cseq", 5)
            place_handler.version = 1
            place_handler.allocator.ctx = place_here
            place_handler.allocator.malloc = cseq_place_malloc
            place_handler.allocator.calloc = cseq_place_calloc
            place_handler.allocator.realloc = cseq_place_realloc
            place_handler.allocator.free = cseq_place_free
            place_installed = True
        PyDataMem_SetHandler(PyCapsule_New(&place_handler, "mem_handler", NULL))

    @property
    def count(self):
        """Large allocations since `begin`."""
        return place_here.count

    @property
    def used(self):
        """Bytes of the slot that are allocated."""
        return place_here.used

    @used.setter
    def used(self, uint64_t nbytes):
        place_here.used = nbytes

    @property
    def live(self):
        """Arrays that lie in the slot."""
        return place_here.at.live

    @property
    def retired(self):
        """Earlier slots in which arrays are alive."""
        return place_here.retired_count

    def begin(self, Mapping slot not None, uint64_t nbytes):
        """Number large allocations from now on, and serve the wanted ones from this slot of
        `nbytes` bytes."""
        if place_here.at.live:
            raise RuntimeError(f"{place_here.at.live} arrays lie in the slot before")
        if nbytes > <uint64_t>slot.size:
            raise ValueError(f"nbytes={nbytes} exceeds a mapping of {slot.size} bytes")
        if cseq_place_begin(place_here, slot.data, nbytes, <void*>slot):
            raise MemoryError("no memory for the table of slots in use")
        Py_INCREF(slot)  # place_release gives it back

    def pause(self):
        """Serve no more allocations from the slot."""
        place_here.active = 0

    def learn(self, list arrays not None):
        """Serve the allocations that these arrays of the batch lie in from the slot next time."""
        cdef uint64_t wanted = 0
        cdef cnp.ndarray array
        for array in arrays:
            cseq_place_learn(place_here, cnp.PyArray_DATA(array), &wanted)
        place_here.wanted = wanted

    def leave(self):
        """Leave the slot; return how many arrays are alive in it."""
        return cseq_place_leave(place_here)

    def holds(self, Mapping slot not None):
        """Whether arrays are alive in a slot that was left."""
        return bool(cseq_place_holds(place_here, slot.data))
