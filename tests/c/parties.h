/* The two parties at the ring, as _core.pyx plays them, with a payload that can be checked.
 *
 *   trainer_…   the class Feed: post, take, cancel, wait; and the loop of pools/base.py. On a
 *               queue (calls > 0): post in turn, cancel the newest first
 *   runner_…    the class Seat: claim, work, publish
 *
 * The payload is a pure function of the ticket, in plain words: the trainer writes indices, the
 * indexer makes `record` of them, the converter makes `converted` of that. Whoever reads a word
 * that was not made for this ticket, or twice, or half, reports it.
 */
#ifndef CSEQ_PARTIES_H
#define CSEQ_PARTIES_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "points.h"

enum { MOST_CELLS = 16, CALLS = 2, MOST_RUNNERS = 8, MOST_TICKETS = 4096, BATCH = 4 };
#define TICKET_MASK (((uint64_t)1 << 40) - 1)

/* Prints what went wrong and where, and ends the program. */
static void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#define REQUIRE(condition, ...) \
    do {                        \
        if (!(condition)) fail(__VA_ARGS__); \
    } while (0)

/* ── random numbers: splitmix64 ─────────────────────────────────────────────────────────── */

CSEQ_INLINE uint64_t draw(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}
CSEQ_INLINE uint32_t below(uint64_t *state, uint32_t range) {
    return (uint32_t)(((draw(state) >> 32) * range) >> 32);
}

/* ── payload ────────────────────────────────────────────────────────────────────────────── */

CSEQ_INLINE uint64_t index_of(uint64_t ticket, uint64_t k) { return ticket * 1000003 + k * 17 + 1; }
CSEQ_INLINE uint64_t field_of(uint64_t ticket, uint64_t k) { return index_of(ticket, k % BATCH) ^ (k << 32); }

static int ring_closed(const cseq_ring *r) { return cseq_load_acq_u32(&r->closed) == 1; }

/* ── runner ─────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    cseq_ring *ring;
    uint32_t stage, owner;
    int last;          /* no stage follows */
    uint64_t *latest;  /* 1 + the ticket of the round that a queue's runner has claimed last */
} seat;

/* A cell, CSEQ_NONE after a sleep, CSEQ_CLOSED. */
static int runner_claim(const seat *s, uint64_t ns) {
    if (ring_closed(s->ring)) return CSEQ_CLOSED;
    int cell = cseq_ring_claim(s->ring, s->stage, s->owner);
    if (cell < 0)
        cell = cseq_ring_await(s->ring, s->stage, s->owner, ns);
    if (cell >= 0)
        (cseq_store_rlx_u64)(&cseq_cell_stint(cseq_ring_cell(s->ring, (uint32_t)cell), s->stage)->started_ns, 1);
    return cell;
}

static void runner_work(const seat *s, uint32_t cell) {
    cseq_cell *c = cseq_ring_cell(s->ring, cell);
    uint64_t word = (cseq_load_rlx_u64)(&c->word), ticket = CSEQ_TICKET(word);
    REQUIRE(CSEQ_OWNER(word) == s->owner, "cell %u is worked on by %u and owned by %u", cell,
            s->owner, CSEQ_OWNER(word));
    if (s->ring->calls && cell < cseq_ring_round(s->ring)) { /* in order; again after a death */
        uint64_t before = *s->latest;
        REQUIRE(!before || before == ticket + 1 || cseq_before(before - 1, ticket),
                "ticket %llu comes behind %llu", (unsigned long long)ticket,
                (unsigned long long)before - 1);
        *s->latest = ticket + 1;
    }
    const int64_t *indices = cseq_ring_indices(s->ring, cell);
    REQUIRE(c->batch == ticket && c->count == 1 + ticket % BATCH, "cell %u: ticket %llu has batch %llu",
            cell, (unsigned long long)ticket, (unsigned long long)c->batch);
    for (uint64_t k = 0; k < c->count; k++)
        REQUIRE((uint64_t)indices[k] == index_of(ticket, k), "cell %u: index %d of ticket %llu is wrong",
                cell, (int)k, (unsigned long long)ticket);
    for (uint64_t k = 0; k < CSEQ_FIELDS; k++) {
        uint64_t made = field_of(ticket, k);
        if (s->stage == 1) {
            REQUIRE(c->record[k] == made, "cell %u: field %d of ticket %llu is wrong", cell, (int)k,
                    (unsigned long long)ticket);
            c->converted[k] = ~made;
        } else {
            c->record[k] = made;
        }
    }
    c->status = 0;
    c->stage = s->stage;
    cseq_cell_stint(c, s->stage)->published_ns = ticket << ticket % 40;
}

CSEQ_INLINE void runner_publish(const seat *s, uint32_t cell) {
    cseq_ring_publish(s->ring, cell, s->last ? CSEQ_READY : CSEQ_INDEXED, 0);
}

/* ── trainer ────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    cseq_ring *ring;
    uint32_t order[MOST_CELLS], first, outstanding;
    uint32_t cancelled[MOST_CELLS], cancelled_count;
    uint32_t next_cell, unwoken, wake_at;
    int ordered;
    uint32_t call_every;        /* on a queue: n, if every n-th ticket is a call; 0: none */
    uint64_t start, posted, end;        /* tickets: the first, the next to post, the one after the last */
    uint64_t next;                      /* nothing before this one may come any more */
    uint64_t delivered, cancelled_in_all;       /* tickets */
    uint8_t came[MOST_TICKETS];         /* by ticket - start */
} trainer;

static void trainer_init(trainer *t, cseq_ring *ring, uint64_t start, uint32_t tickets) {
    memset(t, 0, sizeof *t);
    t->ring = ring;
    t->start = t->posted = t->next = start;
    t->end = start + tickets;
    t->wake_at = 1;
    t->ordered = 1;
}

static int trainer_vacant(const trainer *t) {
    const cseq_ring *r = t->ring;
    uint32_t n = cseq_ring_round(r), c = t->next_cell, most = n;
    if (r->calls) most = 1;
    if (t->call_every && t->posted % t->call_every == 0) c = n, n = r->capacity, most = r->calls;
    for (uint32_t k = 0; k < most; k++, c = c + 1 == n ? 0 : c + 1)
        if (cseq_ring_state(r, c) == CSEQ_FREE) return (int)c;
    return -1;
}

static void trainer_wake(trainer *t) {
    t->unwoken = 0;
    cseq_gate_notify(&t->ring->gate[0]);
}

static void trainer_post(trainer *t, uint32_t cell) {
    cseq_cell *c = cseq_ring_cell(t->ring, cell);
    uint64_t ticket = t->posted & TICKET_MASK;
    int64_t *indices = cseq_ring_indices(t->ring, cell);
    c->epoch = 0;
    c->batch = ticket;
    c->count = (uint32_t)(1 + ticket % BATCH);
    for (uint64_t k = 0; k < c->count; k++) indices[k] = (int64_t)index_of(ticket, k);
    c->stage = c->status = 0;
    if (!t->outstanding && !t->ring->calls) cseq_ring_set_hints(t->ring, cell);
    t->order[(t->first + t->outstanding) % t->ring->capacity] = cell;
    t->outstanding++;
    if (cell < cseq_ring_round(t->ring)) t->next_cell = (cell + 1) % cseq_ring_round(t->ring);
    cseq_ring_post(t->ring, cell, ticket);
    t->posted++;
    if (++t->unwoken >= t->wake_at) trainer_wake(t);
}

static void trainer_free_cancelled(trainer *t) {
    uint32_t kept = 0;
    for (uint32_t k = 0; k < t->cancelled_count; k++) {
        uint32_t cell = t->cancelled[k];
        if (t->ring->calls && cell < cseq_ring_round(t->ring) ? cseq_ring_ready(t->ring, cell)
                                                              : cseq_ring_cancel(t->ring, cell)) {
            cseq_ring_cell(t->ring, cell)->record[0] = 0; /* the trainer's now: nobody reads it */
            cseq_ring_free(t->ring, cell);
        } else {
            t->cancelled[kept++] = cell;
        }
    }
    t->cancelled_count = kept;
}

static void trainer_refill(trainer *t) {
    int cell;
    if (t->cancelled_count) trainer_free_cancelled(t);
    while (t->posted != t->end && (cell = trainer_vacant(t)) >= 0) trainer_post(t, (uint32_t)cell);
}

/* On a queue: take back what the runner has not claimed, newest first. */
static void trainer_cancel_newest(trainer *t) {
    uint32_t n = t->ring->capacity, kept = 0;
    uint32_t order[MOST_CELLS];
    int stopped = 0;
#ifdef M_CANCEL_OLDEST
    for (uint32_t k = 0; k < t->outstanding; k++) {
#else
    for (uint32_t k = t->outstanding; k-- > 0;) {
#endif
        uint32_t cell = t->order[(t->first + k) % n];
        int in_round = cell < cseq_ring_round(t->ring);
#ifdef M_CANCEL_OLDEST
        stopped = 0;
#endif
        if (in_round && !stopped && cseq_ring_cancel_newest(t->ring, cell)) {
            t->next_cell = cell;
            t->cancelled_in_all++;
        } else {
            stopped |= in_round;
            order[kept++] = cell;
        }
    }
    t->outstanding = kept;
    for (uint32_t k = 0; k < kept; k++) t->order[(t->first + k) % n] = order[kept - 1 - k];
}

/* What is outstanding is not wanted: the next ticket delivered is the next one posted. */
static void trainer_cancel_all(trainer *t) {
    if (t->ring->calls) trainer_cancel_newest(t);
    for (uint32_t k = 0; k < t->outstanding; k++)
        t->cancelled[t->cancelled_count++] = t->order[(t->first + k) % t->ring->capacity];
    t->cancelled_in_all += t->outstanding;
    t->outstanding = t->unwoken = 0;
    t->next = t->posted;
}

/* A ticket is delivered: it must be the next one, or (unordered) one that has not come yet. */
static void trainer_account(trainer *t, uint64_t ticket) {
    uint64_t whole = t->start + ((ticket - t->start) & TICKET_MASK);
    REQUIRE(whole >= t->next && whole < t->posted && (!t->ordered || whole == t->next),
            "ticket %llu came while %llu was awaited", (unsigned long long)ticket,
            (unsigned long long)(t->next & TICKET_MASK));
    REQUIRE(!t->came[whole - t->start], "ticket %llu came twice", (unsigned long long)ticket);
    t->came[whole - t->start] = 1;
    t->delivered++;
    if (t->ordered) t->next++;
}

/* To be called when all is over. */
static void trainer_check(const trainer *t) {
    REQUIRE(t->delivered + t->cancelled_in_all == t->end - t->start, "%llu tickets came and %llu were cancelled, of %llu",
            (unsigned long long)t->delivered, (unsigned long long)t->cancelled_in_all,
            (unsigned long long)(t->end - t->start));
    for (uint32_t c = 0; c < t->ring->capacity; c++)
        REQUIRE(cseq_ring_state(t->ring, c) == CSEQ_FREE, "cell %u is not free at the end", c);
}

/* 1 if a ticket was taken. */
static int trainer_take(trainer *t) {
    uint32_t n = t->ring->capacity, k = 0, upto = t->ordered && t->outstanding ? 1 : t->outstanding;
    while (k < upto && !cseq_ring_ready(t->ring, t->order[(t->first + k) % n])) k++;
    if (k == upto) return 0;
    uint32_t cell = t->order[(t->first + k) % n];
    for (; k > 0; k--) t->order[(t->first + k) % n] = t->order[(t->first + k - 1) % n];
    t->first = (t->first + 1) % n;
    t->outstanding--;
    cseq_cell *c = cseq_ring_cell(t->ring, cell);
    uint64_t ticket = c->batch;
    REQUIRE(CSEQ_TICKET((cseq_load_rlx_u64)(&c->word)) == ticket, "cell %u holds another ticket", cell);
    trainer_account(t, ticket);
    for (uint64_t f = 0; f < CSEQ_FIELDS; f++)
        REQUIRE((c->stage ? ~c->converted[f] : c->record[f]) == field_of(ticket, f),
                "field %d of ticket %llu is wrong", (int)f, (unsigned long long)ticket);
    memset(c->record, 0, sizeof c->record);
    memset(c->converted, 0, sizeof c->converted);
    cseq_ring_free(t->ring, cell);
    return 1;
}

static void trainer_wait(trainer *t, uint32_t seen, uint64_t ns) {
    int cell = -1;
    if (t->ordered && t->outstanding) cell = (int)t->order[t->first];
    if (cell >= 0) {
        uint32_t at = (uint32_t)cell;
        if (t->unwoken) trainer_wake(t);
        if (t->ring->spin && cseq_ring_expect(&t->ring, &at, 1, seen)) return;
    }
    if (t->unwoken) trainer_wake(t);
    cseq_ring_wait_ready(t->ring, cell, seen, ns);
}

CSEQ_INLINE int trainer_finished(const trainer *t) {
    return t->posted == t->end && !t->outstanding && !t->cancelled_count;
}

/* Take one ticket; 0 when all is done, or when something `failed`. */
static int trainer_next(trainer *t, const uint32_t *failed, uint64_t ns) {
    trainer_refill(t);
    while (!trainer_take(t)) {
        uint32_t seen = cseq_ring_notices(t->ring);
        if (failed && cseq_load_acq_u32(failed)) return 0;
        trainer_refill(t);
        if (trainer_finished(t)) return 0;
        if (trainer_take(t)) return 1;
        trainer_wait(t, seen, ns);
    }
    return 1;
}

#endif
