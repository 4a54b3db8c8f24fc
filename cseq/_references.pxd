"""References to objects: whether there are others, and how one is handed on.

Without a GIL, to count a reference to an object of another thread takes an atomic operation, and
memory that goes from core to core.
"""

from cpython.ref cimport PyObject


cdef extern from *:
    """
    /* Whether no other reference to an object exists, and no other thread can make one. */
    static inline int cseq_is_unique(PyObject *one) {
    #ifndef Py_GIL_DISABLED
        return Py_REFCNT(one) == 1;
    #elif PY_VERSION_HEX >= 0x030E0000
        return PyUnstable_Object_IsUniquelyReferenced(one);
    #else
        return _Py_IsOwnedByCurrentThread(one)
            && _Py_atomic_load_uint32_relaxed(&one->ob_ref_local) == 1
            && _Py_atomic_load_ssize_relaxed(&one->ob_ref_shared) == 0;
    #endif
    }
    /* The reference that the caller has is the result's now. */
    static inline PyObject *cseq_given(PyObject *one) { return one; }
    """
    bint cseq_is_unique(PyObject* one) noexcept
    object cseq_given(PyObject* one)
