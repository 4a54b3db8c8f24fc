/* Meters: what each party of a ring has done, and what time that took.
 *
 * The trainer and each runner have a record in the ring's memory, alike for processes, threads and
 * streams. Only the party writes its record, by relaxed stores. Readers take what they see: each number is
 * valid alone, and none is used as a pointer or an index. A runner that dies leaves what it has counted,
 * and the next one with its number goes on from there.
 *
 *                trainer                                     runner
 *   work         the loop's own time between two batches     claim to publish, of each ticket
 *   wait         what the loop waited for a batch            each sleep without a ticket
 *   gil          after a sleep: until it has the GIL again   once in CSEQ_POLL: if it asks for the GIL
 */
#ifndef CSEQ_METER_H
#define CSEQ_METER_H

#include "cseq_atomic.h"
#include "cseq_wait.h"

#if defined(_MSC_VER)
#include <intrin.h>
#endif
#if defined(__linux__)
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if !defined(_WIN32)
#include <time.h>
#endif

/* Four an octave, from 64 ns to 73 minutes. */
#define CSEQ_BUCKETS 144
#define CSEQ_SLOWEST 8
/* ns between two polls of what the system has counted; and between two readings, which take some
 * microseconds each. */
#define CSEQ_POLL 100000000u
#define CSEQ_READ_GAP 1000000u

typedef struct {
    uint64_t sum;
    uint32_t bucket[CSEQ_BUCKETS];
    char pad[56];
} cseq_histogram;

/* A ticket and how long it took; `ns` is 0 if there is none. */
typedef struct {
    uint64_t ns, epoch, batch;
} cseq_slow;

/* `batches`: published by a runner; taken by the trainer, without errors. `samples` and `nbytes` of these,
 * and `epochs` that began after the first batch, are the trainer's alone; `slowest` is a runner's.
 *
 * `since_ns`: when the present step or ticket began, or 0. `waited_ns`: how long this step slept, which
 * `wait` does not have yet. `asleep_ns`: when the present sleep began, or 0.
 *
 * `start_ns`: what the loop waited for its first batch, which `wait` leaves out. `first_ns`: when it took
 * that batch; in a runner's record, what `work` had then, written by the trainer. Parts of `wait` are
 * `behind_ns`, waits at whose end half of the other tickets were ready, and `early_ns`, waits for the
 * first batches of an epoch, one for each runner.
 *
 * `cpu_ns`: what the party has computed. `queued_ns`: what its thread has waited for a core. `polled_ns`:
 * when that was polled last, or 0. `read_ns`, `cpu_seen`, `queued_seen`: the last reading. `thread`: the
 * system's number of the thread, or of the process. */
typedef struct {
    uint64_t batches, samples, nbytes;
    uint64_t since_ns, waited_ns, asleep_ns;
    uint64_t start_ns, first_ns, behind_ns, early_ns;
    uint64_t cpu_ns, queued_ns, polled_ns;
    uint64_t read_ns, cpu_seen, queued_seen;
    uint64_t epochs, thread;
    cseq_histogram work, wait, gil;
    cseq_slow slowest[CSEQ_SLOWEST];
    char pad[48];
} cseq_meter;

typedef char cseq_check_histogram[sizeof(cseq_histogram) == 640 ? 1 : -1];
typedef char cseq_check_meter[sizeof(cseq_meter) == 18 * 128 ? 1 : -1];

CSEQ_INLINE uint32_t cseq_bucket_of(uint64_t ns) {
    uint32_t top, k;
    if (ns < 64) ns = 64;
#if defined(_MSC_VER)
    unsigned long highest;
    _BitScanReverse64(&highest, ns);
    top = (uint32_t)highest;
#else
    top = 63u - (uint32_t)__builtin_clzll(ns);
#endif
    k = ((top - 6) << 2) + (uint32_t)((ns >> (top - 2)) & 3);
    return k < CSEQ_BUCKETS ? k : CSEQ_BUCKETS - 1;
}

CSEQ_INLINE void cseq_histogram_add(cseq_histogram *h, uint64_t ns) {
    uint32_t *bucket = &h->bucket[cseq_bucket_of(ns)];
    cseq_store_rlx_u32(bucket, cseq_load_rlx_u32(bucket) + 1);
    cseq_count_u64(&h->sum, ns);
}

/* ── a runner ─────────────────────────────────────────────────────────────────────────── */

/* A ticket took `ns`. `slowest` is in order; the `ns` of an entry is 0 while its other words change. */
CSEQ_INLINE void cseq_meter_worked(cseq_meter *m, uint64_t ns, uint64_t epoch, uint64_t batch) {
    cseq_histogram_add(&m->work, ns);
    cseq_count_u64(&m->batches, 1);
    if (ns <= m->slowest[CSEQ_SLOWEST - 1].ns) return;
    int k = CSEQ_SLOWEST - 1;
    for (; k > 0 && ns > m->slowest[k - 1].ns; k--) {
        cseq_store_rlx_u64(&m->slowest[k].ns, 0);
        cseq_store_rlx_u64(&m->slowest[k].epoch, m->slowest[k - 1].epoch);
        cseq_store_rlx_u64(&m->slowest[k].batch, m->slowest[k - 1].batch);
        cseq_store_rel_u64(&m->slowest[k].ns, m->slowest[k - 1].ns);
    }
    cseq_store_rlx_u64(&m->slowest[k].ns, 0);
    cseq_store_rlx_u64(&m->slowest[k].epoch, epoch);
    cseq_store_rlx_u64(&m->slowest[k].batch, batch);
    cseq_store_rel_u64(&m->slowest[k].ns, ns);
}

/* A runner goes on with the record of one that has ended. */
CSEQ_INLINE void cseq_meter_renew(cseq_meter *m) {
    cseq_store_rlx_u64(&m->since_ns, 0);
    cseq_store_rlx_u64(&m->polled_ns, 0);
}

/* ── the trainer ──────────────────────────────────────────────────────────────────────── */

/* The clock of an epoch runs from here. What the loop waits before its very first batch is the start. */
CSEQ_INLINE void cseq_meter_start_epoch(cseq_meter *m, uint64_t now) {
    const uint64_t since = cseq_load_rlx_u64(&m->since_ns);
    if (cseq_load_rlx_u64(&m->first_ns)) {
        if (since) cseq_histogram_add(&m->work, now - since - cseq_load_rlx_u64(&m->waited_ns));
        cseq_store_rlx_u64(&m->waited_ns, 0);
    }
    cseq_store_rlx_u64(&m->since_ns, now);
}

/* The trainer has waited from `before` to `now`. */
CSEQ_INLINE void cseq_meter_slept(cseq_meter *m, uint64_t before, uint64_t now) {
    cseq_count_u64(&m->waited_ns, now - before);
    cseq_store_rlx_u64(&m->asleep_ns, 0);
}

/* The loop's step after a batch is over; return how long it waited. `first`: the epoch had no batch yet. */
CSEQ_INLINE uint64_t cseq_meter_step(cseq_meter *m, uint64_t now, int first) {
    const uint64_t since = cseq_load_rlx_u64(&m->since_ns), waited = cseq_load_rlx_u64(&m->waited_ns);
    const uint64_t took = now - since, step = since && took > waited ? took - waited : 0;
    if (first) cseq_count_u64(&m->work.sum, step);
    else if (since) cseq_histogram_add(&m->work, step);
    if (waited) {
        cseq_histogram_add(&m->wait, waited);
        cseq_store_rlx_u64(&m->waited_ns, 0);
    }
    return waited;
}

/* ── what the system has counted ──────────────────────────────────────────────────────── */

/* What the calling thread has waited for a core, in ns; 0 where the system does not say. The file has
 * three numbers: the time computed, the time waited, and how often the thread ran. */
CSEQ_INLINE uint64_t cseq_queued_ns(void) {
    uint64_t queued = 0;
#if defined(__linux__)
    char text[64], *end;
    const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n > 0) {
        text[n] = 0;
        strtoull(text, &end, 10);
        queued = strtoull(end, NULL, 10);
    }
#endif
    return queued;
}

/* Read what the calling thread (`whole`: its process) has computed, and what the thread has waited for a
 * core. `counts`: add what came since the last reading; the first one of a record or thread adds nothing. */
CSEQ_INLINE void cseq_meter_read_system(cseq_meter *m, uint64_t now, int whole, int counts) {
    uint64_t cpu = 0, queued, thread = 0;
    if (m->polled_ns && now - m->read_ns < CSEQ_READ_GAP) return;
    queued = cseq_queued_ns();
#if !defined(_WIN32)
    struct timespec t;
    clock_gettime(whole ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID, &t);
    cpu = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#else
    (void)whole;
#endif
#if defined(__linux__)
    thread = (uint64_t)syscall(SYS_gettid);
#endif
    if (counts && m->polled_ns && m->thread == thread) {
        cseq_count_u64(&m->cpu_ns, cpu - m->cpu_seen);
        cseq_count_u64(&m->queued_ns, queued - m->queued_seen);
    }
    cseq_store_rlx_u64(&m->thread, thread);
    cseq_store_rlx_u64(&m->read_ns, now);
    cseq_store_rlx_u64(&m->cpu_seen, cpu);
    cseq_store_rlx_u64(&m->queued_seen, queued);
}

/* Read, and note when: this is a poll. Readings in between do not put a poll off. */
CSEQ_INLINE void cseq_meter_poll(cseq_meter *m, uint64_t now, int whole, int counts) {
    cseq_meter_read_system(m, now, whole, counts);
    cseq_store_rlx_u64(&m->polled_ns, now);
}

#endif
