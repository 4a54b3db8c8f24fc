/* Functions to sleep on a 32-bit word and to wake up the sleepers.
 *
 *   cseq_wait(word, seen, ns, shared)  sleeps while *word == seen, for up to ns nanoseconds;
 *                                      spurious returns are possible
 *   cseq_wake(word, shared)            wakes up all sleepers on word
 *
 * With `shared`, the word is in memory that is shared between processes, and any of them can sleep on it.
 * Otherwise, all sleepers are threads of this process, which is cheaper. On Windows, wake-ups by address only
 * work for threads.
 *
 * There is an implementation for each system: the futex on Linux, os_sync_wait_on_address on macOS 14.4 if it
 * is available at run time, and WaitOnAddress on Windows for threads. In all other cases, the word is polled
 * between naps. The code for naps is compiled everywhere, and `cseq_wait_nap = 1` selects it, so it can be
 * tested on Linux.
 *
 * Callers limit ns. If a process dies before it wakes up the sleepers, they wake up after this time.
 */
#ifndef CSEQ_WAIT_H
#define CSEQ_WAIT_H

#include <stdlib.h>
#include <string.h>

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
/* Linked weakly, because some supported systems do not have them. */
extern int os_sync_wait_on_address_with_timeout(void *, uint64_t, size_t, uint32_t, uint32_t,
                                                uint64_t) __attribute__((weak_import));
extern int os_sync_wake_by_address_all(void *, size_t, uint32_t) __attribute__((weak_import));
#endif

#if defined(_WIN32)
/* Available since Windows 8. Looked up in kernelbase.dll, because the import library differs between
 * toolchains. */
typedef BOOL(WINAPI *cseq_wait_function)(volatile void *, void *, SIZE_T, DWORD);
typedef void(WINAPI *cseq_wake_function)(void *);

CSEQ_INLINE FARPROC cseq_find_function(const char *name) {
    HMODULE kernel = GetModuleHandleW(L"kernelbase.dll");
    return kernel == 0 ? 0 : GetProcAddress(kernel, name);
}
#endif

/* If 1, always nap. Set once, before any wait. */
static int cseq_wait_nap = 0;

/* Nap if CSEQ_WAIT=nap is set in the environment. Each module that waits or wakes calls this on import. */
CSEQ_INLINE void cseq_wait_choose(void) {
    const char *how = getenv("CSEQ_WAIT");
    cseq_wait_nap = how != 0 && strcmp(how, "nap") == 0;
}

/* Return the monotonic time in ns. Like CLOCK_MONOTONIC on Linux, CLOCK_UPTIME_RAW on macOS stops while the
 * system is suspended. */
CSEQ_INLINE uint64_t cseq_now_ns(void) {
#if defined(_WIN32)
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    uint64_t n = (uint64_t)count.QuadPart, hz = (uint64_t)rate.QuadPart;
    return n / hz * 1000000000u + n % hz * 1000000000u / hz;
#else
    struct timespec t;
#if defined(__APPLE__)
    clock_gettime(CLOCK_UPTIME_RAW, &t);
#else
    clock_gettime(CLOCK_MONOTONIC, &t);
#endif
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#endif
}

/* Yield to the other hardware thread of this core. */
CSEQ_INLINE void cseq_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ __volatile__("yield");
#elif defined(_MSC_VER)
    YieldProcessor();
#endif
}

/* Sleep for `ns`, or until a signal. On Windows, Sleep has ticks of up to 16 ms, so use a timer with flag 2,
 * HIGH_RESOLUTION (Windows 10, 1803). */
CSEQ_INLINE void cseq_sleep_ns(uint64_t ns) {
#if defined(_WIN32)
    HANDLE timer = CreateWaitableTimerExW(0, 0, 2, TIMER_ALL_ACCESS);
    LARGE_INTEGER due;
    due.QuadPart = -(LONGLONG)((ns + 99) / 100);
    if (timer != 0 && SetWaitableTimer(timer, &due, 0, 0, 0, 0))
        WaitForSingleObject(timer, INFINITE);
    else
        Sleep((DWORD)((ns + 999999u) / 1000000u));
    if (timer != 0) CloseHandle(timer);
#else
    struct timespec t;
    t.tv_sec = (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    nanosleep(&t, 0);
#endif
}

/* Poll the word between naps of 20 us to 2 ms. The wait ends up to about 10% late. */
CSEQ_INLINE void cseq_wait_by_nap(const uint32_t *word, uint32_t seen, uint64_t ns) {
    uint64_t nap = 20000, slept = 0;
    while (slept < ns && cseq_load_acq_u32(word) == seen) {
        uint64_t now = ns - slept < nap ? ns - slept : nap;
        cseq_sleep_ns(now);
        slept += now;
        if (slept >= 10 * nap && nap < 2000000) nap *= 2;
    }
}

/* On macOS, 1 is SHARED, and 32 is OS_CLOCK_MACH_ABSOLUTE_TIME. */
CSEQ_INLINE void cseq_wait(uint32_t *word, uint32_t seen, uint64_t ns, int shared) {
    (void)shared;
    if (!cseq_wait_nap) {
#if defined(__linux__)
        struct timespec t;
        t.tv_sec = (time_t)(ns / 1000000000u);
        t.tv_nsec = (long)(ns % 1000000000u);
        /* After EAGAIN (the word has changed), EINTR (a signal) and ETIMEDOUT, the caller checks again. */
        syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, &t, 0, 0);
        return;
#elif defined(__APPLE__)
        if (os_sync_wait_on_address_with_timeout != 0) {
            os_sync_wait_on_address_with_timeout(word, seen, 4, shared ? 1u : 0u, 32u, ns);
            return;
        }
#elif defined(_WIN32)
        if (!shared) {
            cseq_wait_function wait = (cseq_wait_function)(void *)cseq_find_function("WaitOnAddress");
            if (wait != 0) {
                wait(word, &seen, 4, (DWORD)((ns + 999999u) / 1000000u));
                return;
            }
        }
#endif
    }
    cseq_wait_by_nap(word, seen, ns);
}

CSEQ_INLINE void cseq_wake(uint32_t *word, int shared) {
    if (cseq_wait_nap) return;
#if defined(__linux__)
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, 0x7fffffff, 0, 0, 0);
#elif defined(__APPLE__)
    if (os_sync_wake_by_address_all != 0)
        os_sync_wake_by_address_all(word, 4, shared ? 1u : 0u);
#elif defined(_WIN32)
    if (!shared) {
        cseq_wake_function wake = (cseq_wake_function)(void *)cseq_find_function("WakeByAddressAll");
        if (wake != 0) wake(word);
    }
#else
    (void)word, (void)shared;
#endif
}

#endif
