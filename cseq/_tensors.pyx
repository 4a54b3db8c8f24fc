# cython: language_level=3, freethreading_compatible=True
"""Tensors of copied bytes, by DLPack: no array comes between."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport (
    PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

cnp.import_array()

# The structs of DLPack, in the layout that every version of it up to 1.0 has.

cdef struct Device:
    int32_t kind
    int32_t number

cdef struct Type:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct Described:
    void* data
    Device device
    int32_t nd
    Type dtype
    int64_t* shape
    int64_t* strides   # in elements; NULL: row-major
    uint64_t offset

cdef struct Managed:
    Described tensor
    void* ctx
    void (*deleter)(Managed*) noexcept nogil

cdef enum:
    ON_CPU = 1
    ALIGNMENT = 64     # as torch's allocator has it; XLA copies what has less

cdef const char* FRESH = "dltensor"  # the name of a capsule that no tensor has taken over

cdef dict CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


cdef void release(Managed* managed) noexcept nogil:
    """Free a tensor's bytes: on any thread, without the GIL."""
    PyMem_RawFree(managed)


cdef void drop(object capsule) noexcept:
    """Free the bytes of a capsule that no tensor has taken over."""
    if PyCapsule_IsValid(capsule, FRESH):
        PyMem_RawFree(PyCapsule_GetPointer(capsule, FRESH))


@cython.final
@cython.no_gc
cdef class TensorMaker:
    """Makes CPU tensors of one type: of copied bytes, or on the memory of arrays.

    Bytes are copied into one block, with what describes them in front. The tensor frees it, without
    the GIL. Each tensor has a block, and so a storage, of its own.

    Parameters
    ----------
    from_numpy : callable
        ``torch.from_numpy``.
    from_dlpack : callable
        Makes a tensor of a capsule: what ``torch.from_dlpack`` calls, which is in Python and costs
        half as much again.
    dtype : numpy.dtype
        Of bool, int, uint, float or complex, in native byte order.
    """

    def __cinit__(self, from_numpy, from_dlpack, dtype):
        self.from_numpy, self.from_dlpack = from_numpy, from_dlpack
        if dtype.kind not in CODES or not dtype.isnative:
            raise ValueError(f"there is no DLPack of {dtype!r}")
        self.code = CODES[dtype.kind]
        self.itemsize = dtype.itemsize

    def __call__(self, value):
        """Make a tensor on an array's memory, or of a capsule."""
        return self.make(value)

    def copy(self, cnp.ndarray array not None):
        """Copy a contiguous array's bytes: a capsule, for a call."""
        cdef bint fortran = not cnp.PyArray_IS_C_CONTIGUOUS(array)
        if (cnp.PyArray_ITEMSIZE(array) != self.itemsize
                or (fortran and not cnp.PyArray_IS_F_CONTIGUOUS(array))):
            raise ValueError(f"{array.dtype!r} is of another size, or not contiguous")
        return self.capsule(cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array),
                            cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), fortran)

    cdef object capsule(self, const void* source, uint64_t nbytes, int nd, const cnp.npy_intp* dims,
                        bint fortran):
        """Copy bytes: what `make` makes a tensor of. No Python code runs."""
        cdef size_t head = sizeof(Managed) + 8 * <size_t>nd * (2 if fortran else 1)
        cdef Managed* managed
        cdef int64_t* shape
        cdef int64_t stride = 1
        cdef int k
        managed = <Managed*>PyMem_RawMalloc(head + (ALIGNMENT - 1) + <size_t>nbytes)
        if managed == NULL:
            raise MemoryError(f"no memory for a tensor of {nbytes} bytes")
        shape = <int64_t*>(managed + 1)
        for k in range(nd):
            shape[k] = dims[k]
        managed.tensor.strides = NULL
        if fortran:
            managed.tensor.strides = shape + nd
            for k in range(nd):
                shape[nd + k] = stride
                stride *= max(shape[k], <int64_t>1)
        managed.tensor.data = <void*>(
            (<uintptr_t>managed + head + (ALIGNMENT - 1)) & ~<uintptr_t>(ALIGNMENT - 1))
        managed.tensor.device.kind = ON_CPU
        managed.tensor.device.number = 0
        managed.tensor.nd = nd
        managed.tensor.dtype.code = self.code
        managed.tensor.dtype.bits = <uint8_t>(8 * self.itemsize)
        managed.tensor.dtype.lanes = 1
        managed.tensor.shape = shape
        managed.tensor.offset = 0
        managed.ctx = NULL
        managed.deleter = release
        memcpy(managed.tensor.data, source, <size_t>nbytes)
        try:
            return PyCapsule_New(managed, FRESH, drop)
        except MemoryError:
            PyMem_RawFree(managed)
            raise

    cdef object make(self, value):
        """Make a tensor of a capsule, or on an array's memory."""
        return self.from_dlpack(value) if PyCapsule_CheckExact(value) else self.from_numpy(value)
