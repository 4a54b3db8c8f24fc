/* Meters that record what each party of a ring has done and how long it took.
 *
 * The trainer and each runner have a record in the memory of the ring, in the same format for processes,
 * threads and streams. Each party writes only its own record, with relaxed stores. Readers can use each
 * number on its own, and no number is used as a pointer or an index. When a runner dies, its counts remain,
 * and the next runner with the same number adds to them.
 *
 *                trainer                                     runner
 *   work         the loop's own time between two batches     from claim to publish of each ticket
 *   wait         the loop's waiting time for a batch         each sleep without a ticket
 *   gil          from waking up until it has the GIL again   wait for the GIL, once per CSEQ_POLL
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

/* Four buckets per octave, from 64 ns to 73 minutes. */
#define CSEQ_BUCKETS 144
#define CSEQ_SLOWEST 8
/* Minimum ns between polls of the system counters, and between readings of the wait for a core.
 * Each takes 5 to 50 us. */
#define CSEQ_POLL 100000000u
#define CSEQ_READ_GAP 50000000u

typedef struct {
    uint64_t sum;
    uint32_t bucket[CSEQ_BUCKETS];
    char pad[56];
} cseq_histogram;

/* A ticket and how long it took. `ns` is 0 in an unused entry. */
typedef struct {
    uint64_t ns, epoch, batch;
} cseq_slow;

/* `batches` is the number of batches that a runner has published, or that the trainer has received without an
 * error. Only the trainer has `samples` and `nbytes` (totals over its batches), and `epochs` (epochs started
 * after the first batch). Only runners have `slowest`.
 *
 * `since_ns` is the start of the current step or ticket, or 0. `waited_ns` is how long the party has slept in
 * this step, which `wait` does not include yet. `asleep_ns` is the start of the current sleep, or 0.
 *
 * `start_ns` is how long the loop waited for its first batch, which `wait` does not include. `first_ns` is
 * the time at which this batch arrived. In a runner's record, the trainer sets `first_ns` to the sum of
 * `work` at that time. Two parts of `wait` are also counted separately: `behind_ns` sums the waits after which
 * half of the other tickets were ready, and `early_ns` those for an epoch's first batches (one per runner).
 *
 * `cpu_ns` is the CPU time of the party, and `queued_ns` is the time that its thread waited for a core.
 * `polled_ns` is the time of the last poll, or 0. `read_ns`, `cpu_seen` and `queued_seen` are the time and
 * values of the last reading. `thread` is the system's id of the thread or process. */
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

/* Record a ticket that took `ns`. `slowest` is sorted. While an entry changes, its `ns` is 0. */
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

/* Prepare the record of an exited runner for the next one. */
CSEQ_INLINE void cseq_meter_renew(cseq_meter *m) {
    cseq_store_rlx_u64(&m->since_ns, 0);
    cseq_store_rlx_u64(&m->polled_ns, 0);
}

/* ── the trainer ──────────────────────────────────────────────────────────────────────── */

/* Start the clock for an epoch. The startup time is the wait for the very first batch. */
CSEQ_INLINE void cseq_meter_start_epoch(cseq_meter *m, uint64_t now) {
    const uint64_t since = cseq_load_rlx_u64(&m->since_ns);
    if (cseq_load_rlx_u64(&m->first_ns)) {
        if (since) cseq_histogram_add(&m->work, now - since - cseq_load_rlx_u64(&m->waited_ns));
        cseq_store_rlx_u64(&m->waited_ns, 0);
    }
    cseq_store_rlx_u64(&m->since_ns, now);
}

CSEQ_INLINE void cseq_meter_slept(cseq_meter *m, uint64_t before, uint64_t now) {
    cseq_count_u64(&m->waited_ns, now - before);
    cseq_store_rlx_u64(&m->asleep_ns, 0);
}

/* End a step of the loop, and return how long it waited. `first` is 1 for the first batch of the epoch. */
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

/* ── system counters ──────────────────────────────────────────────────────────────────── */

/* Return how long this thread has waited for a core in ns, or 0 if unknown. The file contains the time on a
 * core, the waiting time, and the number of time slices. */
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

/* Read the CPU time of the thread (or of the process, with `whole`), and its wait for a core. With `counts`,
 * add the increase since the last reading of the same thread. The wait is read at most once in CSEQ_READ_GAP,
 * so that short epochs do not pay for it. */
CSEQ_INLINE void cseq_meter_read_system(cseq_meter *m, uint64_t now, int whole, int counts) {
    uint64_t cpu = 0, queued, thread = 0;
    int goes_on;
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
    goes_on = m->polled_ns && m->thread == thread;
    if (counts && goes_on) cseq_count_u64(&m->cpu_ns, cpu - m->cpu_seen);
    cseq_store_rlx_u64(&m->cpu_seen, cpu);
    if (goes_on && now - m->read_ns < CSEQ_READ_GAP) return;
    queued = cseq_queued_ns();
    if (counts && goes_on) cseq_count_u64(&m->queued_ns, queued - m->queued_seen);
    cseq_store_rlx_u64(&m->queued_seen, queued);
    cseq_store_rlx_u64(&m->thread, thread);
    cseq_store_rlx_u64(&m->read_ns, now);
}

/* Read the counters, and record the time of this poll. */
CSEQ_INLINE void cseq_meter_poll(cseq_meter *m, uint64_t now, int whole, int counts) {
    cseq_meter_read_system(m, now, whole, counts);
    cseq_store_rlx_u64(&m->polled_ns, now);
}

#endif
