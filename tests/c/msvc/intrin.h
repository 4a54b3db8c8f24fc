/* Stands in for MSVC's <intrin.h>: what clang does not know by itself. */
__int64 _InterlockedExchange64(__int64 volatile *, __int64);
__int64 _InterlockedExchangeAdd64(__int64 volatile *, __int64);
unsigned __int64 _umul128(unsigned __int64, unsigned __int64, unsigned __int64 *);
unsigned __int64 __umulh(unsigned __int64, unsigned __int64);
void _mm_prefetch(const char *, int);
void __prefetch(const void *);
#define _MM_HINT_T1 2
