/* Stands in for MSVC's <intrin.h>; the other intrinsics clang knows by itself. */
__int64 _InterlockedExchange64(__int64 volatile *, __int64);
__int64 _InterlockedExchangeAdd64(__int64 volatile *, __int64);
