/* Atomic words with named memory orders, based on GCC/Clang builtins or MSVC intrinsics.
 *
 * `acq`, `rel`, `rlx` and `sc` stand for acquire, release, relaxed and sequentially consistent. If one side
 * publishes and then checks for a sleeper, while the other side announces a sleep and then checks for a
 * publication, all four accesses must be `sc`. Everywhere else, acquire and release are sufficient. There
 * are no stand-alone fences, because ThreadSanitizer does not support them.
 */
#ifndef CSEQ_ATOMIC_H
#define CSEQ_ATOMIC_H

#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)

#define CSEQ_INLINE static inline __attribute__((unused))

#define CSEQ_ATOMIC_OF(T, S)                                                              \
    CSEQ_INLINE T cseq_load_rlx_##S(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); } \
    CSEQ_INLINE T cseq_load_acq_##S(const T *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); } \
    CSEQ_INLINE T cseq_load_sc_##S(const T *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }  \
    CSEQ_INLINE void cseq_store_rlx_##S(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); } \
    CSEQ_INLINE void cseq_store_rel_##S(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); } \
    CSEQ_INLINE T cseq_swap_sc_##S(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
    CSEQ_INLINE T cseq_add_sc_##S(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
    CSEQ_INLINE int cseq_cas_sc_##S(T *p, T expected, T desired) {                            \
        return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST,        \
                                           __ATOMIC_SEQ_CST);                                 \
    }

#elif defined(_MSC_VER)

#include <intrin.h>

#ifdef _ISO_VOLATILE
#error "cseq needs /volatile:ms"
#endif

#define CSEQ_INLINE static __forceinline

/* With /volatile:ms, volatile reads acquire and volatile writes release. Interlocked operations are full
 * barriers, and all sequentially consistent writes are interlocked, so a plain read is enough. (An
 * interlocked read would take the cache line away from the writer.) */
#define CSEQ_MSVC_ATOMIC_OF(T, S, I, SUFFIX)                                                  \
    CSEQ_INLINE T cseq_load_rlx_##S(const T *p) { return *(const volatile T *)p; }            \
    CSEQ_INLINE T cseq_load_acq_##S(const T *p) { return *(const volatile T *)p; }            \
    CSEQ_INLINE T cseq_load_sc_##S(const T *p) { return *(const volatile T *)p; }             \
    CSEQ_INLINE void cseq_store_rlx_##S(T *p, T v) { *(volatile T *)p = v; }                  \
    CSEQ_INLINE void cseq_store_rel_##S(T *p, T v) { *(volatile T *)p = v; }                  \
    CSEQ_INLINE T cseq_swap_sc_##S(T *p, T v) {                                               \
        return (T)_InterlockedExchange##SUFFIX((volatile I *)p, (I)v);                        \
    }                                                                                         \
    CSEQ_INLINE T cseq_add_sc_##S(T *p, T v) {                                                \
        return (T)_InterlockedExchangeAdd##SUFFIX((volatile I *)p, (I)v);                     \
    }                                                                                         \
    CSEQ_INLINE int cseq_cas_sc_##S(T *p, T expected, T desired) {                            \
        return (T)_InterlockedCompareExchange##SUFFIX((volatile I *)p, (I)desired,            \
                                                      (I)expected) == expected;               \
    }
#define CSEQ_ATOMIC_OF(T, S) CSEQ_ATOMIC_OF_##S(T)
#define CSEQ_ATOMIC_OF_u32(T) CSEQ_MSVC_ATOMIC_OF(T, u32, long, )
#define CSEQ_ATOMIC_OF_u64(T) CSEQ_MSVC_ATOMIC_OF(T, u64, __int64, 64)

#else
#error "cseq needs GCC, Clang or MSVC"
#endif

CSEQ_ATOMIC_OF(uint32_t, u32)
CSEQ_ATOMIC_OF(uint64_t, u64)

/* Add to a counter that only one thread at a time writes. Readers may see an older value. */
CSEQ_INLINE void cseq_count_u64(uint64_t *p, uint64_t more) {
    cseq_store_rlx_u64(p, cseq_load_rlx_u64(p) + more);
}

#endif
