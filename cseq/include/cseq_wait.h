/* Sleeping on a 32-bit word that processes share, and waking the sleepers.
 *
 *   cseq_wait(word, seen, ns)  sleeps while *word == seen, at most ns nanoseconds;
 *                              it may also return early for no reason
 *   cseq_wake(word)            wakes all sleepers on word
 *
 * One branch per system: the Linux futex, *without* the private flag (the word lies
 * in memory that processes share); macOS 14.4's os_sync_wait_on_address with its shared
 * flag, where it exists at run time; elsewhere a nap that looks at the word now and then
 * (Windows can wake by address only inside one process). The nap is compiled everywhere
 * and can be chosen by `cseq_wait_nap = 1`, so that Linux tests it too.
 *
 * Callers bound ns, so a wake-up lost with a dying process costs one bounded sleep.
 */
#ifndef CSEQ_WAIT_H
#define CSEQ_WAIT_H

#include "cseq_atomic.h"

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>
#else
#include <errno.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__APPLE__)
/* Declared here and linked weakly: wheels target systems that lack them. */
extern int os_sync_wait_on_address_with_timeout(void *, uint64_t, size_t, uint32_t, uint32_t,
                                                uint64_t) __attribute__((weak_import));
extern int os_sync_wake_by_address_all(void *, size_t, uint32_t) __attribute__((weak_import));
#endif

/* 1: always nap. Set once, before any wait. */
static int cseq_wait_nap = 0;

/* Nanoseconds on a clock that never goes back. */
CSEQ_INLINE uint64_t cseq_now_ns(void) {
#if defined(_WIN32)
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    return (uint64_t)((double)count.QuadPart * 1e9 / (double)rate.QuadPart);
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#endif
}

CSEQ_INLINE void cseq_sleep_ns(uint64_t ns) {
#if defined(_WIN32)
    Sleep((DWORD)((ns + 999999u) / 1000000u));
#else
    struct timespec t;
    t.tv_sec = (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    nanosleep(&t, 0); /* a signal ends it early, as it should */
#endif
}

/* Sleeps of 20 us that double up to 2 ms: late by a tenth of what was slept already. */
CSEQ_INLINE void cseq_wait_by_nap(const uint32_t *word, uint32_t seen, uint64_t ns) {
    uint64_t nap = 20000, slept = 0;
    while (slept < ns && cseq_load_acq_u32(word) == seen) {
        uint64_t now = ns - slept < nap ? ns - slept : nap;
        cseq_sleep_ns(now);
        slept += now;
        if (slept >= 10 * nap && nap < 2000000) nap *= 2;
    }
}

CSEQ_INLINE void cseq_wait(uint32_t *word, uint32_t seen, uint64_t ns) {
    if (!cseq_wait_nap) {
#if defined(__linux__)
        struct timespec t;
        t.tv_sec = (time_t)(ns / 1000000000u);
        t.tv_nsec = (long)(ns % 1000000000u);
        /* EAGAIN (the word changed), EINTR (a signal) and ETIMEDOUT all mean: look again. */
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, 0, 0);
        return;
#elif defined(__APPLE__)
        if (os_sync_wait_on_address_with_timeout != 0) {
            os_sync_wait_on_address_with_timeout(word, seen, 4, 1u /* SHARED */,
                                                 32u /* OS_CLOCK_MACH_ABSOLUTE_TIME */, ns);
            return;
        }
#endif
    }
    cseq_wait_by_nap(word, seen, ns);
}

CSEQ_INLINE void cseq_wake(uint32_t *word) {
    if (cseq_wait_nap) return;
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, 0, 0, 0);
#elif defined(__APPLE__)
    if (os_sync_wake_by_address_all != 0) os_sync_wake_by_address_all(word, 4, 1u /* SHARED */);
#else
    (void)word;
#endif
}

#endif
