/* The ring between threads, at full speed and with threads that die.
 *
 *   ring_stress SEED SECONDS
 *
 * Round after round of a random shape: stages, runners, cells, pins, order, tickets around 2^40,
 * the kind of waiting, turns at a lock (that is not there), threads that stop for good at a random
 * atomic operation, epochs that are broken off. A watcher thread joins the dead, reposts what they
 * held and starts others. Built with ThreadSanitizer it also checks the memory orders: the payload
 * is plain words.
 *
 * Sleeps are bounded by PARK, which is far longer than anything here takes: a sleep that lasts so
 * long is a lost wake-up, and fails.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#include "parties.h"

#ifndef PARK
#define PARK UINT64_C(20000000000) /* ns */
#endif
enum { WATCHDOG = 60 };            /* seconds for a round */

typedef struct {
    pthread_t thread;
    seat place;
    uint64_t rng;
    uint64_t latest;
    int left; /* the round is over for it; under the lock */
} runner;

static struct {
    uint64_t seed, round;
    uint32_t stages, indexers, runners, tickets, mortality, haste; /* the latter: per 65536 points */
    uint64_t cancel_every;
    uint32_t resize_every; /* runners come and go, cells are added; 0: not */
    uint32_t deaths_left; /* atomic */
} plan;

static runner runners[MOST_RUNNERS + 1];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint32_t dead[MOST_RUNNERS + 1], dead_count, left_count; /* under the lock */
static trainer boss;
static uint64_t kills, cancels, resizes, tickets_in_all;
static _Thread_local runner *self; /* 0: the trainer or the watcher */
static _Thread_local uint64_t own_rng;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAILED (seed %llu, round %llu): ", (unsigned long long)plan.seed,
            (unsigned long long)plan.round);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static void on_alarm(int number) {
    static const char text[] = "FAILED: a round does not end\n";
    (void)number;
    (void)!write(2, text, sizeof text - 1);
    abort();
}

/* ── points ─────────────────────────────────────────────────────────────────────────────── */

static void die(void) {
    uint32_t left = (cseq_load_acq_u32)(&plan.deaths_left);
    if (!left || (cseq_add_sc_u32)(&plan.deaths_left, (uint32_t)-1) - 1 >= left) return;
    pthread_mutex_lock(&lock);
    dead[dead_count++] = self->place.owner;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_exit(0);
}

static void point(const char *place) {
    (void)place;
    uint64_t *rng = self ? &self->rng : &own_rng;
    uint32_t fate = below(rng, 65536);
    if (self && fate < plan.mortality && plan.mortality) die();
    if (fate >= 65536 - plan.haste) {
        if (fate & 7)
            sched_yield();
        else
            usleep(below(rng, 50));
    }
}

static void ring_wait(uint32_t *word, uint32_t seen, uint64_t ns, int shared) {
    uint64_t before = cseq_now_ns();
    (cseq_wait)(word, seen, ns, shared);
    REQUIRE(cseq_now_ns() - before < PARK || (cseq_load_acq_u32)(word) != seen,
            "%s %u has slept for %.0f s: a wake-up was lost", self ? "runner" : "trainer",
            self ? self->place.owner : 0, (double)PARK / 1e9);
}

static void ring_wake(uint32_t *word, int shared) { (cseq_wake)(word, shared); }

/* ── threads ────────────────────────────────────────────────────────────────────────────── */

static void *run(void *argument) {
    self = argument;
    for (;;) {
        int cell = runner_claim(&self->place, PARK);
        if (cell == CSEQ_CLOSED) {
            if (ring_closed(self->place.ring)) break;
            sched_yield(); /* it has left: another one with its number comes when it is admitted */
            continue;
        }
        if (cell < 0) continue;
        runner_work(&self->place, (uint32_t)cell);
        runner_publish(&self->place, (uint32_t)cell);
    }
    pthread_mutex_lock(&lock);
    self->left = 1;
    left_count++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void start(uint32_t owner) {
    REQUIRE(pthread_create(&runners[owner].thread, 0, run, &runners[owner]) == 0, "no thread");
}

/* Joins the dead and replaces them, until all have left. */
static void *watch(void *argument) {
    uint32_t held[MOST_CELLS];
    (void)argument;
    own_rng = plan.seed + plan.round * 7 + 3;
    pthread_mutex_lock(&lock);
    while (left_count < plan.runners) {
        while (!dead_count && left_count < plan.runners) pthread_cond_wait(&changed, &lock);
        if (!dead_count) break;
        uint32_t owner = dead[--dead_count];
        kills++;
        pthread_mutex_unlock(&lock);
#ifdef M_REPOST_EARLY
        cseq_ring_repost(boss.ring, 1 + below(&own_rng, plan.runners), held, 0);
#endif
        pthread_join(runners[owner].thread, 0);
        cseq_ring_repost(boss.ring, owner, held, 0);
        start(owner);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ── a round ────────────────────────────────────────────────────────────────────────────── */

static void make_plan(void) {
    static const uint32_t cells[] = {1, 2, 3, 10};
    uint64_t *rng = &own_rng;
    own_rng = plan.seed * 1000003 + plan.round;
    plan.stages = 1 + below(rng, 2);
    plan.indexers = 1 + below(rng, 4);
    plan.runners = plan.indexers + (plan.stages == 2 ? 1 + below(rng, 4) : 0);
    plan.tickets = 50 + below(rng, 450);
    plan.mortality = below(rng, 3) ? 1 + below(rng, 200) : 0;
    plan.deaths_left = plan.mortality ? 1 + below(rng, 60) : 0;
    plan.haste = below(rng, 3) ? below(rng, 4000) : 0;
    plan.cancel_every = below(rng, 3) ? 0 : 1 + below(rng, 60);
    uint32_t capacity = cells[below(rng, 4)], calls = below(rng, 3) ? 0 : CALLS;
    if (calls) { /* a queue */
        plan.stages = plan.indexers = plan.runners = 1;
        capacity += calls;
    }
    uint64_t bytes = cseq_ring_bytes(capacity, BATCH, plan.runners);
    cseq_ring *ring = aligned_alloc(CSEQ_LINE, (bytes + CSEQ_LINE - 1) / CSEQ_LINE * CSEQ_LINE);
    REQUIRE(ring != 0, "no memory");
    memset(ring, 0, bytes);
    cseq_ring_init(ring, capacity, BATCH, plan.runners, calls, 0);
    plan.resize_every = calls || below(rng, 2) ? 0 : 1 + below(rng, 30);
    if (plan.resize_every) ring->round = 1 + below(rng, capacity);
    cseq_ring_set_spin(ring, below(rng, 2) ? 0 : below(rng, 50000), below(rng, 2) ? 0 : plan.runners);
    trainer_init(&boss, ring, below(rng, 2) ? 0 : ((uint64_t)1 << 40) - below(rng, 300), plan.tickets);
    boss.ordered = below(rng, 3) > 0;
    boss.wake_at = 1 + below(rng, capacity);
    boss.call_every = calls ? 2 + below(rng, 20) : 0;
    cseq_wait_nap = below(rng, 4) == 0;
}

static void play(void) {
    pthread_t watcher;
    make_plan();
    alarm(WATCHDOG);
    dead_count = left_count = 0;
    for (uint32_t o = 1; o <= plan.runners; o++) {
        uint32_t stage = o > plan.indexers;
        runner r = {.place = {boss.ring, stage, o, stage + 1 == plan.stages, &runners[o].latest},
                    .rng = plan.seed ^ (plan.round * 64 + o) * UINT64_C(0x5851F42D4C957F2D)};
        runners[o] = r;
    }
    for (uint32_t o = 1; o <= plan.runners; o++) start(o);
    REQUIRE(pthread_create(&watcher, 0, watch, 0) == 0, "no thread");
    uint64_t since = 0;
    while (trainer_next(&boss, 0, PARK)) {
        uint64_t *words = (uint64_t *)cseq_ring_meter(boss.ring, 1); /* as stats() does */
        for (size_t k = 0; k < sizeof(cseq_meter) / 8; k++) (void)cseq_load_rlx_u64(words + k);
        if (plan.cancel_every && ++since == plan.cancel_every) {
            trainer_cancel_all(&boss);
            cancels++;
            since = 0;
        }
        if (plan.resize_every && !below(&own_rng, plan.resize_every)) {
            cseq_ring_extend(boss.ring, 1 + below(&own_rng, boss.ring->capacity));
            cseq_ring_admit(boss.ring, 1 + below(&own_rng, plan.indexers));
            resizes++;
        }
    }
    trainer_check(&boss);
    cseq_ring_close(boss.ring);
    pthread_join(watcher, 0);
    for (uint32_t o = 1; o <= plan.runners; o++) pthread_join(runners[o].thread, 0);
    tickets_in_all += plan.tickets;
    free(boss.ring);
    alarm(0);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s SEED SECONDS\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, 0, _IOLBF, 0);
    signal(SIGALRM, on_alarm);
    plan.seed = strtoull(argv[1], 0, 0);
    printf("ring_stress: seed %llu\n", (unsigned long long)plan.seed);
    uint64_t end = cseq_now_ns() + (uint64_t)(atof(argv[2]) * 1e9);
    for (; cseq_now_ns() < end; plan.round++) play();
    printf("ok: %llu rounds, %llu tickets, %llu deaths, %llu epochs broken off, %llu resizes\n",
           (unsigned long long)plan.round, (unsigned long long)tickets_in_all,
           (unsigned long long)kills, (unsigned long long)cancels, (unsigned long long)resizes);
    return 0;
}
