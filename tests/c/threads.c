/* The ring's headers alone, under load, in threads: for ThreadSanitizer and AddressSanitizer.
 *
 *   threads SEED ROUNDS [nap]
 *
 * Each round: a random ring, one trainer (this thread) and some runners. Runners sometimes end
 * without publishing what they claimed, as a killed process does; the trainer joins them, which is its
 * certainty that they are gone, posts again and starts others. Sometimes it gives up an epoch. What
 * trainer and runners write for one another are plain words, so a missing release or acquire is a
 * data race that ThreadSanitizer reports. Checked: every ticket once, in order, with its own data.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "cseq_ring.h"

enum { BATCH = 3, MOST = 8 };

typedef struct {
    pthread_t thread;
    uint32_t stage, owner;
    uint64_t random;
    int dies_after; /* claims; 0: never */
    uint32_t over;  /* set as its last act */
} runner;

static cseq_ring *ring;
static runner runners[MOST];
static uint32_t stages;

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "failed: %s\n", what);
    abort();
}

static uint32_t draw(uint64_t *state, uint32_t range) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(((*state >> 32) * range) >> 32);
}

static void work(const runner *me, uint32_t cell) {
    cseq_cell *c = cseq_ring_cell(ring, cell);
    const int64_t *indices = cseq_ring_indices(ring, cell);
    cseq_store_rlx_u64(&c->started_ns, cseq_now_ns());
    if (me->stage == 0) {
        for (int k = 0; k < BATCH; k++) c->record[k] = (uint64_t)indices[k] * 3 + c->batch;
    } else {
        for (int k = 0; k < BATCH; k++) c->converted[k] = c->record[k] + 1;
    }
    c->stage = me->stage;
}

static void *run(void *argument) {
    runner *me = argument;
    int claims = 0;
    for (;;) {
        int cell = cseq_ring_claim(ring, me->stage, me->owner);
        if (cell < 0) cell = cseq_ring_await(ring, me->stage, me->owner, 100000000);
        if (cell == CSEQ_CLOSED) break;
        if (cell < 0) continue;
        claims++;
        if (draw(&me->random, 4) == 0) sched_yield();
        if (claims == me->dies_after && draw(&me->random, 2)) break; /* nothing written yet */
        work(me, (uint32_t)cell);
        if (claims == me->dies_after) break; /* all written, not published */
        cseq_ring_publish(ring, (uint32_t)cell, me->stage + 1 == stages ? CSEQ_READY : CSEQ_INDEXED);
    }
    cseq_store_rel_u32(&me->over, 1);
    cseq_gate_alarm(&ring->gate[2]); /* as the end of its socket wakes the keeper */
    return 0;
}

static void start(runner *me, uint64_t *random) {
    me->random = *random + me->owner;
    me->dies_after = draw(random, 3) ? 0 : 1 + (int)draw(random, 20);
    me->over = 0;
    require(pthread_create(&me->thread, 0, run, me) == 0, "a thread starts");
}

static void replace_the_dead(uint32_t count, uint64_t *random) {
    uint32_t held[16];
    for (uint32_t k = 0; k < count; k++) {
        if (!cseq_load_acq_u32(&runners[k].over)) continue;
        pthread_join(runners[k].thread, 0);
        cseq_ring_repost(ring, runners[k].owner, held);
        start(&runners[k], random);
    }
}

static void post(uint32_t cell, uint64_t ticket, uint64_t batch) {
    cseq_cell *c = cseq_ring_cell(ring, cell);
    int64_t *indices = cseq_ring_indices(ring, cell);
    for (int k = 0; k < BATCH; k++) indices[k] = (int64_t)batch * 7 + k;
    c->batch = batch;
    c->stage = 0;
    cseq_store_rlx_u64(&c->started_ns, 0);
    cseq_ring_post(ring, cell, ticket, 0);
    cseq_gate_knock(&ring->gate[0]);
}

static void check(uint32_t cell, uint64_t batch) {
    const cseq_cell *c = cseq_ring_cell(ring, cell);
    require(c->batch == batch, "tickets come in order");
    for (int k = 0; k < BATCH; k++) {
        uint64_t made = (batch * 7 + (uint64_t)k) * 3 + batch;
        require(c->record[k] == made, "the indexer's record is its own");
        require(stages == 1 || c->converted[k] == made + 1, "the converter's record is its own");
    }
}

/* One epoch in a ring whose cells are used in turn; `stop` tickets of it are wanted. */
static uint64_t epoch(uint64_t ticket, uint64_t stop, uint32_t count, uint64_t *random) {
    uint64_t posted = 0, taken = 0;
    const uint32_t n = ring->capacity;
    cseq_ring_begin(ring, (uint32_t)(ticket % n));
    while (taken < stop) {
        uint32_t seen = cseq_ring_alarms(ring);
        replace_the_dead(count, random);
        for (; posted < stop + n / 2 && posted - taken < n; posted++)
            post((uint32_t)((ticket + posted) % n), ticket + posted, posted);
        uint32_t head = (uint32_t)((ticket + taken) % n);
        if (cseq_ring_ready(ring, head)) {
            check(head, taken++);
            cseq_ring_retire(ring, head);
        } else {
            cseq_ring_doze(ring, (int)head, seen, 100000000);
        }
    }
    while (taken < posted) { /* the rest is given up; what is in work is waited for */
        uint32_t cell = (uint32_t)((ticket + taken) % n);
        uint32_t seen = cseq_ring_alarms(ring);
        replace_the_dead(count, random);
        if (cseq_ring_cancel(ring, cell)) {
            cseq_ring_retire(ring, cell);
            taken++;
        } else {
            cseq_ring_doze(ring, (int)cell, seen, 100000000);
        }
    }
    return ticket + posted;
}

static void round_of(uint64_t *random) {
    static const uint32_t capacities[] = {1, 2, 3, 10};
    uint32_t capacity = capacities[draw(random, 4)], count = 1 + draw(random, 4);
    stages = 1 + draw(random, 2);
    count += stages - 1;
    uint64_t bytes = cseq_ring_bytes(capacity, BATCH, count);
    ring = aligned_alloc(CSEQ_LINE, (bytes + CSEQ_LINE - 1) / CSEQ_LINE * CSEQ_LINE);
    memset(ring, 0, bytes);
    cseq_ring_init(ring, capacity, BATCH, count);
    for (uint32_t k = 0; k < count; k++) {
        runners[k].owner = k + 1;
        runners[k].stage = stages == 2 && k == 0;
        start(&runners[k], random);
    }
    uint64_t ticket = (UINT64_C(1) << 40) - 50 * capacity; /* past the wrap on the way */
    ticket -= ticket % capacity;
    for (int e = 0; e < 4; e++) ticket = epoch(ticket, draw(random, 100), count, random);
    cseq_ring_close(ring);
    for (uint32_t k = 0; k < count; k++) pthread_join(runners[k].thread, 0);
    free(ring);
}

int main(int argc, char **argv) {
    uint64_t random = argc > 1 ? strtoull(argv[1], 0, 10) : 1;
    int rounds = argc > 2 ? atoi(argv[2]) : 20;
    cseq_wait_nap = argc > 3;
    for (int k = 0; k < rounds; k++) round_of(&random);
    printf("%d rounds: every ticket once, in order\n", rounds);
    return 0;
}
