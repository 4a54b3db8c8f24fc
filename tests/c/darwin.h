/* What the macOS branches of the headers call, on Linux, so that `-U__linux__ -D__APPLE__` runs them.
 * Arguments that macOS does not know end the program. In a program whose words are all alike,
 * DARWIN_ALIKE ends it as well for one that is now shared by processes, now not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define CLOCK_UPTIME_RAW CLOCK_MONOTONIC

/* The futex's operation for these flags. */
static int darwin_operation(int operation, size_t size, uint32_t flags) {
    if (size != 4 || flags > 1) abort();
#ifdef DARWIN_ALIKE
    static uint32_t seen = 2; /* the flags of all words */
    uint32_t before = __atomic_exchange_n(&seen, flags, __ATOMIC_RELAXED);
    if (before != 2 && before != flags) abort();
#endif
    return flags ? operation : operation | FUTEX_PRIVATE_FLAG;
}

int os_sync_wait_on_address_with_timeout(void *word, uint64_t seen, size_t size, uint32_t flags,
                                         uint32_t clock, uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    if (clock != 32) abort();
    if (ns == 0) return errno = EINVAL, -1;
    return (int)syscall(SYS_futex, word, darwin_operation(FUTEX_WAIT, size, flags), (uint32_t)seen, &t,
                        0, 0);
}

int os_sync_wake_by_address_all(void *word, size_t size, uint32_t flags) {
    return (int)syscall(SYS_futex, word, darwin_operation(FUTEX_WAKE, size, flags), 0x7fffffff, 0, 0, 0);
}
