# cython: language_level=3, freethreading_compatible=True
"""Memory for arrays."""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, strcpy, strerror

cimport cython
cimport numpy as cnp

from cseq._headers cimport *

import os
import sys

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
    PyObject* PyDataMem_DefaultHandler

cdef Py_ssize_t PY_SSIZE_T_MAX = <Py_ssize_t>(<size_t>-1 >> 1)

cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef __GLIBC__
    #include <malloc.h>
    /* Blocks above CSEQ_MAPPED bytes are zeroed when allocated and unmapped when freed. Up to
     * CSEQ_FREED bytes are kept at the top of the heap. glibc caches up to seven freed blocks per
     * torch-aligned size. */
    enum { CSEQ_MAPPED = 32 << 20, CSEQ_FREED = 128 << 20 };
    static int cseq_keep_freed(void) {
        return mallopt(M_MMAP_THRESHOLD, CSEQ_MAPPED) && mallopt(M_TRIM_THRESHOLD, CSEQ_FREED);
    }
    #else
    static int cseq_keep_freed(void) { return 0; }
    #endif
    """
    int cseq_keep_freed() noexcept nogil

cdef extern from *:
    """
    /* One of each per process, because the arrays that use them can outlive all other objects. */
    static cseq_slot_allocator cseq_slot_arrays;
    static cseq_reuse cseq_reused;
    /* Forks since the last exec, and the id of the thread that forked this process. */
    static uint32_t cseq_forks;
    static uint64_t cseq_forker;

    #ifdef _WIN32
    static int cseq_fork_install(void) { return 0; }
    static int cseq_fork(void) { errno = ENOSYS; return -1; }
    #else
    #include <pthread.h>
    #include <unistd.h>
    static int cseq_fork(void) {
        int pid, error;
        PyOS_BeforeFork();
        pid = fork();
        error = errno;
        if (pid == 0) PyOS_AfterFork_Child();
        else PyOS_AfterFork_Parent();
        errno = error;
        return pid;
    }
    /* A forked child is not working on any ticket, so it allocates nothing in slots. */
    static void cseq_at_child(void) {
        cseq_slot_arrays.active = 0;
        cseq_reuse_forget(&cseq_reused);
        cseq_forks++;
        cseq_forker = PyThread_get_thread_ident();
    }
    static int cseq_fork_install(void) { return pthread_atfork(0, 0, cseq_at_child); }
    #endif
    """
    cseq_slot_allocator cseq_slot_arrays
    cseq_reuse cseq_reused
    uint32_t cseq_forks
    uint64_t cseq_forker
    int cseq_fork_install() noexcept
    int cseq_fork() noexcept


if cseq_fork_install():
    raise MemoryError("cannot allocate memory for a fork handler")
forks_here, forker_here = &cseq_forks, &cseq_forker


def fork_depth():
    """Return the number of forks since the last exec, which is higher in a forked child."""
    return cseq_forks


def fork():
    """Fork like `os.fork`, but without the warning about threads in Python 3.12.

    Python warns after forking. If warnings are errors, the caller would not receive the child's id.

    Raises
    ------
    OSError
        If no more processes can be created.
    """
    cdef int pid, error
    sys.audit("os.fork")
    pid = cseq_fork()
    if pid < 0:
        error = errno
        raise OSError(error, os.strerror(error))
    return pid


DEBUG = bool(CSEQ_POISON)
HAS_GIL = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
COPIED = MOST_COPIED
SMALL = LEAST


cdef class Memory:
    """A writable buffer that stays valid until the last array in it is gone."""

    @property
    def address(self):
        return <uintptr_t>self.data

    @property
    def nbytes(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 0, flags)

    @cython.final
    cdef int inside(self, Py_ssize_t offset, Py_ssize_t nbytes) except -1:
        if offset < 0 or nbytes < 0 or offset > self.size or nbytes > self.size - offset:
            raise IndexError(
                f"bytes [{offset}, {offset + nbytes}) are outside a memory of {self.size} bytes")
        return 0

    def view(self, Py_ssize_t offset, cnp.dtype dtype, tuple shape):
        """Return an array at `offset` that keeps the memory alive. Object types are rejected."""
        cdef cnp.npy_intp dims[MAX_DIMS]
        cdef int nd = <int>len(shape)
        cdef int i
        cdef Py_ssize_t nbytes = dtype.itemsize
        if nd > MAX_DIMS:
            raise ValueError(f"shape has {nd} dimensions; pass at most {MAX_DIMS}")
        if dtype.hasobject:
            raise ValueError(f"dtype {dtype} holds Python objects, which raw memory cannot store")
        for i in range(nd):
            dims[i] = shape[i]
            if dims[i] < 0:
                raise ValueError(f"shape {shape} has a negative dimension")
            if dims[i] and nbytes > PY_SSIZE_T_MAX // dims[i]:
                raise ValueError(f"shape {shape} of {dtype} is too large")
            nbytes *= dims[i]
        self.inside(offset, nbytes)
        return cseq_array_on(self, self.data + offset, <PyObject*>dtype, nd, dims, NULL, cnp.NPY_ARRAY_CARRAY)

    @cython.final
    cdef int put(self, Py_ssize_t offset, const char* source, Py_ssize_t nbytes) except -1:
        """Copy bytes to `offset`. Large copies release the GIL."""
        self.inside(offset, nbytes)
        CSEQ_POINT("encode")
        if nbytes < LARGE:
            memcpy(self.data + offset, source, nbytes)
        else:
            with nogil:
                memcpy(self.data + offset, source, nbytes)
        return 0

    def store_from(self, Py_ssize_t offset, Memory source not None, Py_ssize_t nbytes):
        """Copy `nbytes` bytes of another memory to `offset`."""
        source.inside(0, nbytes)
        self.put(offset, source.data, nbytes)


@cython.final
@cython.no_gc
cdef class Block(Memory):
    """Private memory, aligned to 128 bytes."""

    def __cinit__(self, Py_ssize_t nbytes, *, bint zero=False):
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} is negative")
        self.raw = PyMem_RawCalloc(nbytes + 128, 1) if zero else PyMem_RawMalloc(nbytes + 128)
        if self.raw == NULL:
            raise MemoryError(f"cannot allocate {nbytes} bytes")
        self.data = <char*>((<uintptr_t>self.raw + 127) & ~<uintptr_t>127)
        self.size = nbytes

    def __dealloc__(self):
        PyMem_RawFree(self.raw)


def copy_of(Memory source not None, Py_ssize_t nbytes, Py_ssize_t offset=0):
    """Copy the bytes [offset, offset + nbytes) into a new `Block`."""
    cdef Block block = Block(nbytes)
    source.inside(offset, nbytes)
    block.put(0, source.data + offset, nbytes)
    return block


cdef bint lies_in(cnp.ndarray array, const uint8_t* axes) noexcept:
    """Return True if an array is dense and its axes are in the given order, outermost first."""
    cdef Py_ssize_t step = cnp.PyArray_ITEMSIZE(array)
    cdef int k
    for k in range(cnp.PyArray_NDIM(array) - 1, -1, -1):
        if cnp.PyArray_STRIDE(array, axes[k]) != step:
            return False
        step *= cnp.PyArray_DIM(array, axes[k])
    return True


cdef bint is_permuted(cnp.ndarray array, uint8_t* axes) noexcept:
    """Return True if an array is dense but not row-major. Set `axes` to their order in memory.

    Strides of axes of length 1 also count, because some torch memory formats differ only in them.
    """
    cdef Py_ssize_t step = cnp.PyArray_ITEMSIZE(array)
    cdef int nd = cnp.PyArray_NDIM(array)
    cdef int k, i, inner
    cdef uint8_t axis
    for k in range(nd):
        axes[k] = k
    if lies_in(array, axes) or not cnp.PyArray_NBYTES(array):
        return False
    for k in range(nd - 1, -1, -1):
        inner = -1
        for i in range(k + 1):
            if cnp.PyArray_STRIDE(array, axes[i]) == step and (
                    inner < 0 or cnp.PyArray_DIM(array, axes[i]) == 1
                    or cnp.PyArray_DIM(array, axes[inner]) != 1):
                inner = i
        if inner < 0:
            for k in range(nd):
                axes[k] = k
            return False
        axis = axes[inner]
        step *= cnp.PyArray_DIM(array, axis)
        for i in range(inner, k):
            axes[i] = axes[i + 1]
        axes[k] = axis
    return True


def axes_of(cnp.ndarray array not None):
    """Return the order in which an array's axes are stored in a slot, as bytes, outermost first."""
    cdef uint8_t axes[MAX_DIMS]
    is_permuted(array, axes)
    return (<char*>axes)[:cnp.PyArray_NDIM(array)]


def flat_of(cnp.ndarray array not None):
    """Return the elements as a one-dimensional view in memory order, or None if that needs a copy.

    The view is marked writable so that objects made from it are, but callers must not write to it.
    """
    cdef uint8_t axes[MAX_DIMS]
    cdef cnp.npy_intp itemsize = cnp.PyArray_ITEMSIZE(array)
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(array)
    cdef int k
    if not cnp.PyArray_IS_C_CONTIGUOUS(array) and not is_permuted(array, axes):
        return None
    for k in range(cnp.PyArray_NDIM(array)):
        if cnp.PyArray_STRIDE(array, k) < 0:
            return None
    return cseq_array_on(array, <char*>cnp.PyArray_DATA(array), <PyObject*>cnp.PyArray_DESCR(array), 1,
                         &count, &itemsize, cnp.NPY_ARRAY_WRITEABLE)


@cython.final
@cython.no_gc
cdef class Loan(Memory):
    """The first `nbytes` bytes of another memory. Supports weak references."""

    cdef Memory whole
    cdef object __weakref__

    def __cinit__(self, Memory whole not None, Py_ssize_t nbytes=-1):
        whole.inside(0, max(nbytes, 0))
        self.whole = whole
        self.data = whole.data
        self.size = whole.size if nbytes < 0 else nbytes


@cython.final
@cython.no_gc
cdef class Mapping(Memory):
    """A mapping of part of a file. It is unmapped when the last array in it is gone.

    `offset` must be a multiple of the page size. If `own` is True, the mapping is private.
    """

    def __cinit__(self, int fd, uint64_t offset, uint64_t nbytes, *, bint own=False):
        cdef void* p
        if nbytes == 0 or nbytes > <uint64_t>PY_SSIZE_T_MAX:
            raise ValueError(f"nbytes={nbytes} cannot be mapped")
        with nogil:
            p = cseq_map(fd, offset, nbytes, own)
        if p == NULL:
            raise MemoryError(f"cannot map {nbytes} bytes: {os.strerror(errno)}")
        self.data = <char*>p
        self.size = <Py_ssize_t>nbytes

    def __dealloc__(self):
        if self.data != NULL:
            cseq_unmap(self.data, self.size)


@cython.final
@cython.no_gc
cdef class Descriptor:
    """A file descriptor above 2 (on Windows, a handle) that is closed on deallocation.

    The constructor calls ``opener(*args)``, so a signal handler cannot raise before `fd` is stored.
    """

    cdef readonly int fd

    def __cinit__(self, opener, *args):
        self.fd = -1
        self.fd = lift(opener(*args))

    def close(self):
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0:
            cseq_close(fd)

    def __dealloc__(self):
        if self.fd >= 0:
            cseq_close(self.fd)


cpdef int lift(int fd) except -1:
    """Return `fd` if it is above 2. Otherwise, close it and return a duplicate above 2."""
    fd = cseq_lift(fd)
    if fd < 0:
        raise OSError(errno, os.strerror(errno))
    return fd


def section(uint64_t nbytes):
    """Create a zeroed section (shared memory on Windows), and return its handle."""
    cdef int fd
    with nogil:
        fd = cseq_section(nbytes)
    if fd < 0:
        raise OSError(errno, f"cannot create a section of {nbytes} bytes: {os.strerror(errno)}")
    return fd


def commit(int fd, uint64_t offset, uint64_t nbytes):
    """Allocate the pages for part of a file, so that writes to it cannot fail."""
    cdef int error
    with nogil:
        error = cseq_commit(fd, offset, nbytes)
    if error:
        raise MemoryError(f"cannot allocate {nbytes} bytes of shared memory: {os.strerror(error)}")


def ram():
    """Return the size of physical memory in bytes on Windows, and 0 elsewhere."""
    return cseq_ram()


def address_of(cnp.ndarray array not None):
    return <uintptr_t>cnp.PyArray_DATA(array)


def keep_freed():
    """Make malloc keep freed blocks of up to 32 MiB, so that fewer new pages have to be zeroed.

    Return True on success. Only glibc supports this.
    """
    return bool(cseq_keep_freed())


cdef PyDataMem_Handler slot_handler, reuse_handler


cdef int put_above(object numpys, cseq_allocator* below, PyDataMem_Handler* handler, const char* name,
                   PyDataMemAllocator allocator) except -1:
    """Copy the allocator of NumPy's handler to `below`, and set up a handler that wraps it."""
    handler[0] = (<PyDataMem_Handler*>PyCapsule_GetPointer(numpys, "mem_handler"))[0]
    memcpy(below, &handler.allocator, sizeof(cseq_allocator))
    strcpy(handler.name, name)
    handler.allocator = allocator
    return 0


cdef void release_slot(void* owner) noexcept:
    """Release a `Mapping` that has no more arrays."""
    Py_DECREF(<object>owner)


@cython.final
@cython.no_gc
cdef class SlotAllocator:
    """Makes NumPy allocate the arrays of a batch in its slot. See cseq_slot_allocator.h.

    Each worker process has one, installed for the calling thread and context.
    """

    def __cinit__(self):
        if cseq_slot_arrays.release == NULL:
            put_above(
                PyDataMem_GetHandler(), &cseq_slot_arrays.below, &slot_handler, b"cseq", PyDataMemAllocator(
                    &cseq_slot_arrays, cseq_slot_malloc, cseq_slot_calloc, cseq_slot_realloc, cseq_slot_free))
            cseq_slot_arrays.release = release_slot
        PyDataMem_SetHandler(PyCapsule_New(&slot_handler, "mem_handler", NULL))

    @property
    def count(self):
        """The number of large allocations since the last `serve`."""
        return cseq_slot_arrays.count

    @property
    def used(self):
        return cseq_slot_arrays.used

    @used.setter
    def used(self, uint64_t nbytes):
        cseq_slot_arrays.used = nbytes

    @property
    def live(self):
        return cseq_slot_arrays.slot.live

    def serve(self, Mapping slot not None, uint64_t nbytes):
        """Serve wanted allocations from the first `nbytes` bytes of a slot."""
        if cseq_slot_arrays.slot.live:
            raise RuntimeError(f"the previous slot still holds {cseq_slot_arrays.slot.live} arrays; "
                               "call stop() first")
        if nbytes > <uint64_t>slot.size:
            raise ValueError(f"nbytes={nbytes} exceeds a mapping of {slot.size} bytes")
        if cseq_slot_serve(&cseq_slot_arrays, slot.data, nbytes, <void*>slot):
            raise MemoryError("cannot allocate the table of slots in use")
        Py_INCREF(slot)

    def pause(self):
        """Serve nothing until the next `serve`."""
        cseq_slot_arrays.active = 0

    def learn(self, list arrays not None):
        """After the next `serve`, serve allocations with the same numbers as these arrays."""
        cdef uint64_t wanted = 0
        cdef cnp.ndarray array
        for array in arrays:
            cseq_slot_learn(&cseq_slot_arrays, cnp.PyArray_DATA(array), &wanted)
        cseq_slot_arrays.wanted = wanted

    def stop(self):
        """Stop using the slot. Return how many arrays still exist in it."""
        return cseq_slot_stop(&cseq_slot_arrays)

    def holds(self, Mapping slot not None):
        """Return whether arrays still exist in a slot after `stop`."""
        return bool(cseq_slot_holds(&cseq_slot_arrays, slot.data))


put_above(
    <object>PyDataMem_DefaultHandler, &cseq_reused.below, &reuse_handler, b"cseq_reuse", PyDataMemAllocator(
        &cseq_reused, cseq_reuse_malloc, cseq_reuse_calloc, cseq_reuse_realloc, cseq_reuse_free))


@cython.final
cdef class Reuse:
    """Makes this thread's large arrays reuse freed memory. See cseq_reuse.h."""

    def __enter__(self):
        cseq_reuse_count_thread(&cseq_reused, True)
        if PyDataMem_GetHandler() is <object>PyDataMem_DefaultHandler:
            PyDataMem_SetHandler(PyCapsule_New(&reuse_handler, "mem_handler", NULL))

    def __exit__(self, *_):
        cseq_reuse_count_thread(&cseq_reused, False)
