/* Makes clang for MinGW pretend to be MSVC (`make check-headers`): what is included after this sees MSVC's macros
 * and none of GNU's, and the functions of Windows and of the C library that MinGW's headers declare. */
#include <winsock2.h>
#include <windows.h>

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef __GNUC__
#undef __clang__
#undef __MINGW32__
#undef __MINGW64__
#undef __SIZEOF_INT128__
#undef __forceinline /* MinGW's macro; with -fms-extensions it is a keyword, as in MSVC */
#undef __has_attribute
#undef __has_builtin
#undef __x86_64__
#undef __aarch64__

/* GNU's own words, where a header asks for no compiler before it uses them. */
#define __attribute__(what) no_such_thing_in_msvc
#define __asm__ no_such_thing_in_msvc
#define __atomic_load_n no_such_thing_in_msvc
#define __builtin_expect no_such_thing_in_msvc
#define __extension__ no_such_thing_in_msvc
#define __typeof__ no_such_thing_in_msvc

#ifdef _M_ARM64
#undef YieldProcessor /* made of __asm__ */
#define YieldProcessor() ((void)0)
#endif

#define _MSC_VER 1944
