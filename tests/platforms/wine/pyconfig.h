/* Stands in for Windows' pyconfig.h beside the other headers of CPython, which all systems share:
 * what they and Cython's code ask for, for a GNU-like compiler and 64 bits. */
#ifndef Py_CONFIG_H
#define Py_CONFIG_H

#include <io.h>
#include <stdio.h>

#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define MS_COREDLL /* symbols of python3xx.dll are imported */
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL
#define NT_THREADS
#define WITH_THREAD
#define PLATFORM "win32"
#define COMPILER "[gcc]"

#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_TIME_T 8
#define SIZEOF_PID_T SIZEOF_INT
#define SIZEOF_OFF_T 4
#define SIZEOF_FPOS_T 8
#define ALIGNOF_LONG 4
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 16
#define DOUBLE_IS_LITTLE_ENDIAN_IEEE754 1

#define HAVE_INTPTR_T 1
#define HAVE_UINTPTR_T 1
#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_STRERROR
#define HAVE_STRFTIME
#define HAVE_CLOCK
#define HAVE_PROTOTYPES 1
#define HAVE_LARGEFILE_SUPPORT
#define STDC_HEADERS 1
#define RETSIGTYPE void
#define WITH_DOC_STRINGS 1
#define WITH_PYMALLOC 1
#define WITH_MIMALLOC 1
#define PY_LONG_LONG long long
#define PY_LLONG_MIN LLONG_MIN
#define PY_LLONG_MAX LLONG_MAX
#define PY_ULLONG_MAX ULLONG_MAX

#endif
