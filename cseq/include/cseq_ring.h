/* The ring. Each cell contains one ticket from post to commit.
 *
 *             post          claim          publish         claim           publish        commit
 *   FREE ───► POSTED ───► INDEXING ───► INDEXED ───► CONVERTING ───► READY ───► FREE
 *             [input]                   [middle]                     [output]
 *
 * With a single stage, a cell goes directly from INDEXING to READY. The same layout is used in memory that
 * processes share and in the private memory of threads, because it contains no pointers and all widths are
 * fixed. The gates, the cells and the meter of each party are in separate cache lines.
 *
 * There are two kinds of rings. A *shared* ring has any number of runners. Each runner claims the first
 * open cell at or after the hint, and the trainer posts in any free cell. A *queue* has one runner and
 * preserves the order. The trainer posts in consecutive cells, and the runner checks only the cell after its
 * last claim. The last `calls` cells of a queue are not part of this *round*, and the runner checks them
 * first. The round of a shared ring does not have to include all cells, and can grow.
 *
 * The state of a cell's word determines which party may write the word:
 *   FREE                    the trainer (post)
 *   POSTED, INDEXED         a runner of the stage (claim), or the trainer (cancel). Both use
 *                           compare-and-swap, so exactly one of them succeeds.
 *   INDEXING, CONVERTING    the owner named in the word (publish). After the owner's death,
 *                           the trainer's supervisor thread (repost).
 *   READY                   the trainer (commit)
 * The party that may write the word may also write the other fields of the cell.
 *
 * A claim is a single compare-and-swap that also records the owner. Therefore, if a process dies while it
 * holds a cell, the cell always names this process, and nothing has to be repaired.
 */
#ifndef CSEQ_RING_H
#define CSEQ_RING_H

#include <stddef.h>
#include <string.h>

#include "cseq_atomic.h"
#include "cseq_meter.h"
#include "cseq_spin.h"
#include "cseq_wait.h"

/* A point where tests can kill a process. */
#ifndef CSEQ_POINT
#define CSEQ_POINT(name) ((void)0)
#endif

/* Many processors fetch 64-byte cache lines in pairs. */
#define CSEQ_LINE 128
#define CSEQ_MAGIC 0x63736571u
#define CSEQ_LAYOUT 12u
#define CSEQ_NO_SLOT 0xffffffffu
/* The number of words in a record, which describes where a batch is in its slot. */
#define CSEQ_FIELDS 4

enum {
    CSEQ_FREE = 0,
    CSEQ_POSTED = 1,
    CSEQ_INDEXING = 2,
    CSEQ_INDEXED = 3,
    CSEQ_CONVERTING = 4,
    CSEQ_READY = 5
};

/* Results of claim and await that are not cells. */
enum { CSEQ_NONE = -1, CSEQ_CLOSED = -2 };

/* word = ticket (40 bits) | owner (16 bits) | state (8 bits) */
#define CSEQ_WORD(ticket, owner, state) \
    (((uint64_t)(ticket) << 24) | ((uint64_t)(owner) << 8) | (uint64_t)(state))
#define CSEQ_STATE(word) ((int)((word)&0xff))
#define CSEQ_OWNER(word) ((uint32_t)(((word) >> 8) & 0xffff))
#define CSEQ_TICKET(word) ((word) >> 24)

/* A word on which parties sleep, and information about the sleepers.
 *
 * Parties sleep on `event`, which is incremented by every wake-up. `asleep` is 1 while a party may be asleep.
 * If a sleeper dies, `asleep` stays set, which causes one unnecessary wake-up. `wanted` is used only at the
 * output gate: 1 + the cell that the trainer is waiting for, or 0 for any cell. `shared` is 1 if the parties
 * are processes, or 0 if they are threads of one process, and is written before any party exists. `spin`
 * belongs to the party that spins before it sleeps at this gate. At the output gate, `spin.who` is 1 while
 * the trainer is waiting for a cell of this ring. */
typedef struct {
    uint32_t event, asleep, wanted, shared;
    char pad[CSEQ_LINE / 2 - 16];
    cseq_spin spin;
    char pad1[CSEQ_LINE / 2 - 12];
} cseq_gate;

/* The times (`cseq_now_ns`) at which a stage's owner claimed and published a ticket. `started_ns` is 0 before
 * the claim. `published_ns` is valid after the ticket is published. */
typedef struct {
    uint64_t started_ns, published_ns;
} cseq_stint;

/* The trainer writes these before the post: `batch` is the number in the epoch. `start` is the position of
 * the first sample in the epoch. `count` is the number of samples. `seed` is for the order and the
 * generators. `parts` is the number of unit sizes after the indices (0 if each unit is a sample).
 *
 * The owner writes these: `slot` contains the batch (CSEQ_NO_SLOT at the post), and has `capacity` committed
 * bytes. `stage` wrote the last record. `status` is 0 for a batch, or a value from stage.py. `owner[stage]`
 * is the owner's number. The indexer's `record` is valid until the converter has published `converted`. */
typedef struct {
    uint64_t word;
    uint64_t epoch, batch, start;
    uint32_t count;
    uint32_t slot;
    uint64_t capacity;
    uint32_t stage, status;
    uint64_t record[CSEQ_FIELDS];
    uint64_t seed;
    uint32_t parts;
    uint16_t owner[2];
    cseq_stint indexing;
    uint64_t converted[CSEQ_FIELDS];
    cseq_stint converting;
    char pad2[CSEQ_LINE - 8 - 8 * CSEQ_FIELDS];
} cseq_cell;

/* The first cache line is written only once, except for `round`.
 *
 * `calls` is the number of cells that the runner checks first, or 0 in a shared ring. `round` is the number
 * of other cells that runners check. The trainer of a shared ring increases `round` before it posts in
 * additional cells. `output` is the offset in bytes from the ring to the gate where the trainer sleeps. This
 * gate is `gate[2]` of this ring or of another ring in the same memory, so that the trainer can wait for
 * several rings at once.
 *
 * The trainer writes `closed`, `spin` and `crew`. `closed` is 0 if the ring is open, and 1 if it is closed.
 * If it is larger, indexers from this number on exit when they hold no ticket. A party spins for `spin` ns
 * before it sleeps. `crew` runners share the GIL with the trainer (cseq_spin.h), and each adds 1 to `parked`
 * while it waits.
 *
 * `hint` is the first cell to check in each stage. In a shared ring, any value is correct. In a queue, it is
 * the next cell to claim, and is written by the runner, or by repost after the runner's death.
 *
 * Runners of stage 0 sleep at `gate[0]`, runners of stage 1 at `gate[1]`, and the trainer at the gate that
 * `output` refers to. `wanted` and `spin.who` of `gate[2]` always belong to this ring. */
typedef struct {
    uint32_t magic, layout, capacity, batch_size, runners, fields;
    uint32_t calls, round;
    int64_t output;
    char pad[CSEQ_LINE - 40];
    uint32_t closed, spin, crew;
    char pad1[CSEQ_LINE - 12];
    uint32_t parked;
    char pad4[CSEQ_LINE - 4];
    uint32_t hint[2];
    char pad2[CSEQ_LINE - 8];
    cseq_gate gate[3];
} cseq_ring;

typedef char cseq_check_gate[sizeof(cseq_gate) == CSEQ_LINE ? 1 : -1];
typedef char cseq_check_cell[sizeof(cseq_cell) == 2 * CSEQ_LINE ? 1 : -1];
typedef char cseq_check_ring[sizeof(cseq_ring) == 7 * CSEQ_LINE ? 1 : -1];

/* ── layout: ring | cells | meters | indices ──────────────────────────────────────────── */

CSEQ_INLINE cseq_cell *cseq_ring_cell(const cseq_ring *r, uint32_t cell) {
    return (cseq_cell *)((char *)r + sizeof(cseq_ring)) + cell;
}
CSEQ_INLINE cseq_stint *cseq_cell_stint(cseq_cell *c, uint32_t stage) {
    return stage ? &c->converting : &c->indexing;
}
/* Owners are numbered from 1. The trainer is 0. */
CSEQ_INLINE cseq_meter *cseq_ring_meter(const cseq_ring *r, uint32_t owner) {
    return (cseq_meter *)(void *)cseq_ring_cell(r, r->capacity) + owner;
}
CSEQ_INLINE int64_t *cseq_ring_indices(const cseq_ring *r, uint32_t cell) {
    return (int64_t *)(void *)cseq_ring_meter(r, r->runners + 1) + (uint64_t)cell * r->batch_size;
}
CSEQ_INLINE uint64_t cseq_ring_bytes(uint32_t capacity, uint32_t batch_size, uint32_t runners) {
    return sizeof(cseq_ring) + (uint64_t)capacity * sizeof(cseq_cell) +
           ((uint64_t)runners + 1) * sizeof(cseq_meter) + (uint64_t)capacity * batch_size * 8;
}

/* Create a ring in zeroed memory. */
CSEQ_INLINE void cseq_ring_init(cseq_ring *r, uint32_t capacity, uint32_t batch_size,
                                uint32_t runners, uint32_t calls, uint32_t shared) {
    r->magic = CSEQ_MAGIC;
    r->layout = CSEQ_LAYOUT;
    r->capacity = capacity;
    r->batch_size = batch_size;
    r->runners = runners;
    r->fields = CSEQ_FIELDS;
    r->calls = calls;
    r->round = capacity - calls;
    for (int g = 0; g < 3; g++) r->gate[g].shared = shared;
    r->output = (int64_t)offsetof(cseq_ring, gate) + 2 * (int64_t)sizeof(cseq_gate);
}

/* The gate where the trainer sleeps. */
CSEQ_INLINE cseq_gate *cseq_ring_output(cseq_ring *r) {
    return (cseq_gate *)(void *)((char *)r + r->output);
}

/* Return the number of cells in the round. SYNC: round has the cell */
CSEQ_INLINE uint32_t cseq_ring_round(const cseq_ring *r) { return cseq_load_sc_u32(&r->round); }

/* Allow the trainer of a shared ring to post in `cells` cells from now on. A smaller number has no effect.
 * SYNC: round has the cell (this swap, before post's swap; against a check after gate_enter's swap) */
CSEQ_INLINE void cseq_ring_extend(cseq_ring *r, uint32_t cells) {
    if (cells > r->round) cseq_swap_sc_u32(&r->round, cells);
}

/* Return 1 if `bytes` of memory contain a ring. The limit on `batch_size` prevents an overflow. */
CSEQ_INLINE int cseq_ring_fits(const cseq_ring *r, uint64_t bytes) {
    return bytes >= sizeof(cseq_ring) && r->magic == CSEQ_MAGIC && r->layout == CSEQ_LAYOUT &&
           r->fields == CSEQ_FIELDS && r->batch_size <= bytes &&
           r->capacity <= bytes / sizeof(cseq_cell) &&
           bytes >= cseq_ring_bytes(r->capacity, r->batch_size, r->runners);
}

/* ── gates ────────────────────────────────────────────────────────────────────────────── */

/* Announce a sleep. The caller must then check the ring again before it waits for `event` to change.
 * SYNC: sleeper seen (gate_enter's swap, then the check; against the store, then gate_notify's load) */
CSEQ_INLINE uint32_t cseq_gate_enter(cseq_gate *g) {
    uint32_t seen = cseq_load_acq_u32(&g->event);
    cseq_swap_sc_u32(&g->asleep, 1);
    return seen;
}

CSEQ_INLINE void cseq_gate_notify_all(cseq_gate *g) {
    cseq_swap_sc_u32(&g->asleep, 0);
    cseq_add_sc_u32(&g->event, 1);
    cseq_wake(&g->event, (int)g->shared);
}

/* Wake up the sleepers if the flag is set. If a process dies between the swap and the wake, the sleepers wake
 * up after their time limit, or when the trainer notices the death. SYNC: sleeper seen */
CSEQ_INLINE void cseq_gate_notify(cseq_gate *g) {
    if (cseq_load_sc_u32(&g->asleep) && cseq_swap_sc_u32(&g->asleep, 0)) {
        CSEQ_POINT("notify");
        cseq_add_sc_u32(&g->event, 1);
        cseq_wake(&g->event, (int)g->shared);
    }
}

/* ── runners ──────────────────────────────────────────────────────────────────────────── */

/* Return 1 if a runner that holds no ticket must exit. */
CSEQ_INLINE int cseq_ring_leaves(const cseq_ring *r, uint32_t stage, uint32_t owner) {
    const uint32_t closed = cseq_load_sc_u32(&r->closed);
    return closed && (closed == 1 || (stage == 0 && owner >= closed));
}

/* Return 1 if ticket `a` comes before `b`. Ticket numbers wrap around at 2^40. */
CSEQ_INLINE int cseq_before(uint64_t a, uint64_t b) {
    return (((a - b) >> 39) & 1) != 0;
}

/* Return an open cell that a runner can claim, or CSEQ_NONE. Store the word of the cell in `word`.
 * A scan of several cells is not a snapshot. It can miss a ticket and still find a later one. In a queue, the
 * runner therefore checks only one cell of the round, and the trainer fills the cells in sequence. */
CSEQ_INLINE int cseq_ring_find_open(const cseq_ring *r, uint32_t stage, uint64_t *word) {
    const uint32_t n = cseq_ring_round(r), most = r->calls ? 1 : n;
    const int open = stage == 0 ? CSEQ_POSTED : CSEQ_INDEXED;
    for (uint32_t c = n; c < n + r->calls; c++) {
        *word = cseq_load_sc_u64(&cseq_ring_cell(r, c)->word);
        if (CSEQ_STATE(*word) == open) return (int)c;
    }
    uint32_t c = cseq_load_rlx_u32(&r->hint[stage]) % n;
    for (uint32_t k = 0; k < most; k++, c = c + 1 == n ? 0 : c + 1) {
        *word = cseq_load_sc_u64(&cseq_ring_cell(r, c)->word);
        if (CSEQ_STATE(*word) == open) return (int)c;
    }
    return CSEQ_NONE;
}

/* Claim a ticket of `stage` (0: POSTED, 1: INDEXED) for `owner`. Return the cell, or CSEQ_NONE.
 * If the compare-and-swap fails, another runner or the trainer has made progress, so the loop ends.
 * If a runner dies before it moves the hint, it still holds the cell, and repost sets the hint.
 * SYNC: ticket visible to runner (post's swap or publish's swap; against this swap) */
CSEQ_INLINE int cseq_ring_claim(cseq_ring *r, uint32_t stage, uint32_t owner) {
    const int open = stage == 0 ? CSEQ_POSTED : CSEQ_INDEXED;
    uint64_t w = 0;
    int c;
    while ((c = cseq_ring_find_open(r, stage, &w)) != CSEQ_NONE) {
        uint64_t mine = CSEQ_WORD(CSEQ_TICKET(w), owner, open + 1);
        if (cseq_cas_sc_u64(&cseq_ring_cell(r, (uint32_t)c)->word, w, mine)) {
            CSEQ_POINT("claim");
            if ((uint32_t)c < cseq_ring_round(r)) cseq_store_rlx_u32(&r->hint[stage], (uint32_t)c + 1);
            break;
        }
    }
    return c;
}

/* Spin for a limited time and try to claim a ticket. A crew tries only while the trainer is waiting. Return
 * a cell, or CSEQ_NONE. Only one runner spins at a time. */
CSEQ_INLINE int cseq_ring_spin(cseq_ring *r, uint32_t stage, uint32_t owner) {
    const uint64_t ns = cseq_load_rlx_u32(&r->spin);
    const uint32_t crew = cseq_load_rlx_u32(&r->crew);
    cseq_spin *s = &r->gate[stage].spin;
    int cell = CSEQ_NONE;
    if (!ns || cseq_load_rlx_u32(&s->who) || !cseq_spin_may(s)) return cell;
    cseq_store_rlx_u32(&s->who, owner);
    const uint64_t begun = cseq_now_ns();
    do {
        cseq_pause();
        if (!crew || cseq_load_rlx_u32(&r->gate[2].spin.who)) cell = cseq_ring_claim(r, stage, owner);
    } while (cell < 0 && !cseq_ring_leaves(r, stage, owner) && cseq_now_ns() - begun < ns);
    cseq_spin_tell(s, cell >= 0);
    cseq_store_rlx_u32(&s->who, 0);
    return cell;
}

/* Claim a ticket, sleeping for up to `ns`. Return a cell, CSEQ_NONE, or CSEQ_CLOSED. */
CSEQ_INLINE int cseq_ring_await(cseq_ring *r, uint32_t stage, uint32_t owner, uint64_t ns) {
    cseq_gate *g = &r->gate[stage];
    const uint32_t crew = cseq_load_rlx_u32(&r->crew) != 0;
    if (crew) cseq_add_sc_u32(&r->parked, 1);
    int cell = cseq_ring_spin(r, stage, owner);
    if (cell < 0) {
        const uint32_t seen = cseq_gate_enter(g);
        cell = cseq_ring_claim(r, stage, owner);
        if (cell < 0 && cseq_ring_leaves(r, stage, owner)) cell = CSEQ_CLOSED;
        if (cell == CSEQ_NONE) {
            const uint64_t before = cseq_now_ns();
            cseq_wait(&g->event, seen, ns, (int)g->shared);
            cseq_histogram_add(&cseq_ring_meter(r, owner)->wait, cseq_now_ns() - before);
            cell = cseq_ring_claim(r, stage, owner);
        }
    }
    if (crew) cseq_add_sc_u32(&r->parked, (uint32_t)-1);
    return cell;
}

/* Publish a claimed cell whose stint contains both times. `next` is CSEQ_INDEXED or CSEQ_READY. Return 1 if
 * the trainer is waiting for the cell. With `later`, the caller must then notify the trainer. Calls have no
 * samples and are not measured.
 * SYNC: batch visible to reader (this swap; against claim's swap, or ready's load) */
CSEQ_INLINE int cseq_ring_publish(cseq_ring *r, uint32_t cell, int next, int later) {
    cseq_cell *c = cseq_ring_cell(r, cell);
    uint64_t w = cseq_load_rlx_u64(&c->word);
    const cseq_stint *stint = cseq_cell_stint(c, CSEQ_STATE(w) == CSEQ_CONVERTING);
    cseq_meter *me = cseq_ring_meter(r, CSEQ_OWNER(w));
    if (c->count)
        cseq_meter_worked(me, stint->published_ns - stint->started_ns, c->epoch,
                          r->calls ? c->start : c->batch);
    cseq_store_rlx_u64(&me->since_ns, 0);
    CSEQ_POINT("publish");
    cseq_swap_sc_u64(&c->word, CSEQ_WORD(CSEQ_TICKET(w), 0, next));
    CSEQ_POINT("published");
    if (next == CSEQ_INDEXED) {
        cseq_gate_notify(&r->gate[1]);
        return 0;
    }
    const uint32_t wanted = cseq_load_sc_u32(&r->gate[2].wanted);
    if (wanted && wanted != cell + 1) return 0;
    if (!later) cseq_gate_notify(cseq_ring_output(r));
    return 1;
}

/* ── trainer ──────────────────────────────────────────────────────────────────────────── */

/* Post a FREE cell, in which all fields have been written. In a queue, it must follow the last posted cell.
 * This function does not wake up runners; see cseq_gate_notify(&r->gate[0]).
 * SYNC: ticket visible to runner; SYNC: start visible with owner (the swap) */
CSEQ_INLINE void cseq_ring_post(cseq_ring *r, uint32_t cell, uint64_t ticket) {
    cseq_cell *c = cseq_ring_cell(r, cell);
    for (uint32_t stage = 0; stage < 2; stage++)
        cseq_store_rlx_u64(&cseq_cell_stint(c, stage)->started_ns, 0);
    cseq_store_rlx_u32(&c->slot, CSEQ_NO_SLOT);
    cseq_swap_sc_u64(&c->word, CSEQ_WORD(ticket, 0, CSEQ_POSTED));
}

/* Make the runners of a shared ring check this cell first. */
CSEQ_INLINE void cseq_ring_set_hints(cseq_ring *r, uint32_t cell) {
    cseq_store_rlx_u32(&r->hint[0], cell);
    cseq_store_rlx_u32(&r->hint[1], cell);
}

CSEQ_INLINE void cseq_ring_set_spin(cseq_ring *r, uint32_t ns, uint32_t crew) {
    cseq_store_rlx_u32(&r->spin, ns);
    cseq_store_rlx_u32(&r->crew, crew);
}

CSEQ_INLINE int cseq_ring_state(const cseq_ring *r, uint32_t cell) {
    return CSEQ_STATE(cseq_load_sc_u64(&cseq_ring_cell(r, cell)->word));
}

/* Return 1 if the batch in the cell can be read. SYNC: batch visible to reader */
CSEQ_INLINE int cseq_ring_ready(const cseq_ring *r, uint32_t cell) {
    return cseq_ring_state(r, cell) == CSEQ_READY;
}

/* Cancel the ticket that was posted last in a queue. Return 1 if no runner had claimed it. The next ticket
 * must be posted in the same cell. */
CSEQ_INLINE int cseq_ring_cancel_newest(cseq_ring *r, uint32_t cell) {
    cseq_cell *c = cseq_ring_cell(r, cell);
    uint64_t w = cseq_load_sc_u64(&c->word);
    return CSEQ_STATE(w) == CSEQ_POSTED && cseq_cas_sc_u64(&c->word, w, CSEQ_WORD(0, 0, CSEQ_FREE));
}

/* Cancel a ticket if no runner is working on it. Return 1 if the cell belongs to the trainer again. In a
 * queue's round, use cseq_ring_cancel_newest, which leaves no gap. SYNC: batch visible to reader */
CSEQ_INLINE int cseq_ring_cancel(cseq_ring *r, uint32_t cell) {
    cseq_cell *c = cseq_ring_cell(r, cell);
    uint64_t w = cseq_load_sc_u64(&c->word);
    int state = CSEQ_STATE(w);
    if (state == CSEQ_READY || state == CSEQ_FREE) return 1;
    if (state != CSEQ_POSTED && state != CSEQ_INDEXED) return 0;
    return cseq_cas_sc_u64(&c->word, w, CSEQ_WORD(CSEQ_TICKET(w), 0, CSEQ_READY));
}

CSEQ_INLINE void cseq_ring_free(cseq_ring *r, uint32_t cell) {
    cseq_store_rel_u64(&cseq_ring_cell(r, cell)->word, CSEQ_WORD(0, 0, CSEQ_FREE));
}

CSEQ_INLINE void cseq_ring_notify_all(cseq_ring *r) {
    for (int g = 0; g < 2; g++) cseq_gate_notify_all(&r->gate[g]);
    cseq_gate_notify_all(cseq_ring_output(r));
}

/* Repost the tickets of `owner`, which must have exited and must not be replaced yet. Write the cells to
 * `held` and return their number. Runners then check the oldest of these cells first. (A queue has only one.)
 * With a `status`, publish the tickets with this status instead. A ticket of an indexer loses its slot,
 * because the owner may have died before it published the slot. Calling this twice, or losing the last
 * notification, is harmless.
 * SYNC: ticket visible to runner; SYNC: start visible with owner (the compare-and-swap) */
CSEQ_INLINE uint32_t cseq_ring_repost(cseq_ring *r, uint32_t owner, uint32_t *held,
                                      uint32_t status) {
    uint32_t count = 0;
    uint64_t oldest = 0;
    cseq_store_rlx_u64(&cseq_ring_meter(r, owner)->since_ns, 0);
    for (uint32_t c = 0; c < r->capacity; c++) {
        cseq_cell *cell = cseq_ring_cell(r, c);
        uint64_t w = cseq_load_sc_u64(&cell->word);
        int state = CSEQ_STATE(w);
        if (CSEQ_OWNER(w) != owner || (state != CSEQ_INDEXING && state != CSEQ_CONVERTING)) continue;
        uint64_t again = CSEQ_WORD(CSEQ_TICKET(w), 0, status ? CSEQ_READY : state - 1);
        cseq_store_rlx_u64(&cseq_cell_stint(cell, state == CSEQ_CONVERTING)->started_ns, 0);
        if (state == CSEQ_INDEXING)
            cseq_store_rlx_u32(&cell->slot, CSEQ_NO_SLOT);
        if (status) {
            cell->status = status;
            cell->stage = state == CSEQ_CONVERTING;
        }
        if (!cseq_cas_sc_u64(&cell->word, w, again)) continue;
        if (count == 0 || cseq_before(CSEQ_TICKET(w), oldest)) {
            oldest = CSEQ_TICKET(w);
            if (c < cseq_ring_round(r))
                cseq_store_rlx_u32(&r->hint[state == CSEQ_CONVERTING], status ? c + 1 : c);
        }
        held[count++] = c;
    }
    for (int s = 0; s < 2; s++)
        if (cseq_load_rlx_u32(&r->gate[s].spin.who) == owner) cseq_store_rlx_u32(&r->gate[s].spin.who, 0);
    cseq_ring_notify_all(r);
    return count;
}

/* Return how many times the trainer has been woken up. Call this before checking for failures and for a
 * close, and pass the result to wait_ready. A notification after this call then ends the wait at once. */
CSEQ_INLINE uint32_t cseq_ring_notices(const cseq_ring *r) {
    return cseq_load_acq_u32(&cseq_ring_output((cseq_ring *)r)->event);
}

/* Sleep for up to `ns` until a cell (any cell if cell < 0) may be ready. The caller must check the cell. The
 * trainer is the only sleeper at this gate, and clears `asleep` itself.
 * SYNC: sleeper seen (the two swaps, then the checks; against publish's swap, then its loads) */
CSEQ_INLINE void cseq_ring_wait_ready(cseq_ring *r, int cell, uint32_t seen, uint64_t ns) {
    cseq_gate *g = cseq_ring_output(r);
    cseq_store_rlx_u32(&r->gate[2].spin.who, 1);
    cseq_swap_sc_u32(&r->gate[2].wanted, (uint32_t)(cell + 1));
    (void)cseq_gate_enter(g);
    int ready = 0;
    if (cell >= 0) {
        ready = cseq_ring_ready(r, (uint32_t)cell);
    } else {
        for (uint32_t c = 0; c < r->round + r->calls && !ready; c++) ready = cseq_ring_ready(r, c);
    }
    if (!ready) cseq_wait(&g->event, seen, ns, (int)g->shared);
    cseq_store_rlx_u32(&g->asleep, 0);
    cseq_store_rlx_u32(&r->gate[2].spin.who, 0);
}

/* Spin before the trainer sleeps, until one of the cells (each in its own ring) is ready and all crews are
 * parked, or for a limited time. Return 1 if a cell is ready. */
CSEQ_INLINE int cseq_ring_expect(cseq_ring *const *rings, const uint32_t *cells, uint32_t count,
                                 uint32_t seen) {
    cseq_spin *s = &cseq_ring_output(rings[0])->spin;
    const uint64_t ns = cseq_load_rlx_u32(&rings[0]->spin);
    int ready = 0, parked;
    if (!ns || !cseq_spin_may(s)) return 0;
    for (uint32_t k = 0; k < count; k++) cseq_store_rlx_u32(&rings[k]->gate[2].spin.who, 1);
    const uint64_t begun = cseq_now_ns();
    do {
        cseq_pause();
        parked = 1;
        for (uint32_t k = 0; k < count; k++) {
            ready |= cseq_ring_ready(rings[k], cells[k]);
            parked &= cseq_load_rlx_u32(&rings[k]->parked) >= cseq_load_rlx_u32(&rings[k]->crew);
        }
    } while (!(ready && parked) && cseq_ring_notices(rings[0]) == seen && cseq_now_ns() - begun < ns);
    cseq_spin_tell(s, ready && parked);
    for (uint32_t k = 0; k < count; k++) cseq_store_rlx_u32(&rings[k]->gate[2].spin.who, 0);
    return ready;
}

/* Like cseq_ring_wait_ready, but wait for one of several cells, each in a separate ring. All rings have the
 * same output gate. SYNC: sleeper seen */
CSEQ_INLINE void cseq_ring_wait_any(cseq_ring **rings, const uint32_t *cells, uint32_t count,
                                    uint32_t seen, uint64_t ns) {
    cseq_gate *g = cseq_ring_output(rings[0]);
    int ready = 0;
    for (uint32_t k = 0; k < count; k++)
        cseq_swap_sc_u32(&rings[k]->gate[2].wanted, cells[k] + 1);
    (void)cseq_gate_enter(g);
    for (uint32_t k = 0; k < count && !ready; k++) ready = cseq_ring_ready(rings[k], cells[k]);
    if (!ready) cseq_wait(&g->event, seen, ns, (int)g->shared);
    cseq_store_rlx_u32(&g->asleep, 0);
}

/* Admit `count` indexers (at least 1). Indexers with higher numbers exit, and may be restarted when
 * admitted again. Only one thread can call this. If the ring is closed concurrently, it stays closed. */
CSEQ_INLINE void cseq_ring_admit(cseq_ring *r, uint32_t count) {
    uint32_t closed;
    do closed = cseq_load_sc_u32(&r->closed);
    while (closed != 1 && !cseq_cas_sc_u32(&r->closed, closed, count + 1));
    cseq_gate_notify_all(&r->gate[0]);
}

/* Close the ring. Runners exit when there are no more tickets. */
CSEQ_INLINE void cseq_ring_close(cseq_ring *r) {
    cseq_swap_sc_u32(&r->closed, 1);
    cseq_ring_notify_all(r);
}

#endif
