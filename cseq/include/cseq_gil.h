/* Spinning between threads of one interpreter, so that they need not sleep for the GIL.
 *
 * A thread that is woken for a batch or a ticket while another one has the GIL sleeps again, for the
 * GIL. That is two wake-ups of some 15 us for each time that the GIL changes hands, many times what a
 * quick indexer takes. So a thread with nothing to do releases the GIL and spins for a while, until
 * there is something to do *and* the other side has released the GIL, too:
 *
 *   trainer    goes on once its batch is ready and all runners are `parked`
 *   a runner   claims once there is a ticket and the trainer `waits`
 *
 * Without a GIL both sides work at the same time, but `apart`: a thread that works on what the other
 * core has just written waits for that memory, or sleeps and is woken, for each batch. So it spins
 * until it has several batches or tickets to go through:
 *
 *   trainer    goes on once its batch is ready and the one `apart` - 1 after it, or all runners are
 *              `parked`
 *   a runner   claims once there is a ticket `apart` - 1 after the first, or one and the trainer `waits`
 *
 * No result depends on it: a thread that has spun for `ns` sleeps as without this file
 * (cseq_ring_wait_ready, cseq_ring_await). All words are hints; wrong values cost time only.
 *
 *   word       written by
 *   ns         the trainer, before there are runners
 *   apart      the trainer
 *   crew       the trainer
 *   parked     each runner: +1 on its way into a wait, -1 on its way out
 *   spinner    a runner: its number by compare-and-swap, then 0. One is enough to catch the next
 *              ticket
 *   runners    the runner that is the spinner: whether spinning is worth it for runners
 *   waits      the trainer: 1 while it waits, else 0
 *   trainer    the trainer: whether spinning is worth it for the trainer
 */
#ifndef CSEQ_GIL_H
#define CSEQ_GIL_H

#include "cseq_ring.h"

typedef struct {
    uint32_t ns;    /* to spin at most; 0: not at all */
    uint32_t apart; /* batches or tickets that a thread goes on for; 0: both sides take turns */
    uint32_t crew;  /* how many runners there are to be */
    char pad[CSEQ_LINE - 12];
    uint32_t parked, spinner;
    cseq_trust runners;
    char pad1[CSEQ_LINE - 24];
    uint32_t waits;
    cseq_trust trainer;
    char pad2[CSEQ_LINE - 24];
} cseq_gil;

/* Whether there are tickets that a runner goes on for while the trainer works. */
CSEQ_INLINE int cseq_gil_is_stocked(const cseq_gil *t, const cseq_ring *r, uint32_t stage) {
    const uint32_t apart = cseq_load_rlx_u32(&t->apart);
    if (!apart) return 0;
    const uint32_t last = (cseq_load_rlx_u32(&r->hint[stage]) + apart - 1) % cseq_ring_round(r);
    return cseq_ring_state(r, last) == (stage == 0 ? CSEQ_POSTED : CSEQ_INDEXED);
}

/* For a runner without a ticket and without the GIL: spin; a claimed cell, or CSEQ_NONE.
 * SYNC: spinner's trust (the store of 0; against the compare-and-swap) */
CSEQ_INLINE int cseq_gil_claim(cseq_gil *t, cseq_ring *r, uint32_t stage, uint32_t owner) {
    int cell = CSEQ_NONE;
    if (!t->ns || cseq_load_rlx_u32(&t->spinner)) return cell;
    if (!cseq_cas_sc_u32(&t->spinner, 0, owner)) return cell;
    if (cseq_trust_ask(&t->runners)) {
        const uint64_t begun = cseq_now_ns();
        while (cell < 0 && !cseq_ring_leaves(r, stage, owner) && cseq_now_ns() - begun < t->ns) {
            cseq_pause();
            if (cseq_load_rlx_u32(&t->waits) || cseq_gil_is_stocked(t, r, stage))
                cell = cseq_ring_claim(r, stage, owner);
        }
        cseq_trust_tell(&t->runners, cell >= 0);
    }
    cseq_store_rel_u32(&t->spinner, 0);
    return cell;
}

/* A runner waits for a ticket, without the GIL. As cseq_ring_await. */
CSEQ_INLINE int cseq_gil_await(cseq_gil *t, cseq_ring *r, uint32_t stage, uint32_t owner,
                                uint64_t ns) {
    cseq_add_sc_u32(&t->parked, 1);
    int cell = cseq_gil_claim(t, r, stage, owner);
    if (cell < 0) cell = cseq_ring_await(r, stage, owner, ns);
    cseq_add_sc_u32(&t->parked, (uint32_t)-1);
    return cell;
}

/* For the trainer: whether a runner sees new tickets without a wake-up, since it spins, or since it
 * works and will look for the next one. The others are not woken then, while batches are quick: before
 * the trainer sleeps, it wakes them. */
CSEQ_INLINE int cseq_gil_is_served(const cseq_gil *t) {
    return cseq_load_rlx_u32(&t->spinner) != 0 ||
           (cseq_load_rlx_u32(&t->apart) && !t->trainer.doubt &&
            cseq_load_rlx_u32(&t->parked) < cseq_load_rlx_u32(&t->crew));
}

/* For the trainer that waits for a cell, without the GIL: spin; 1 if its batch is ready. `last`: the
 * cell `apart` - 1 after it. */
CSEQ_INLINE int cseq_gil_spin(cseq_gil *t, const cseq_ring *r, uint32_t cell, uint32_t last,
                              uint32_t seen) {
    int ready = 0, worth = 0;
    if (!t->ns || !cseq_trust_ask(&t->trainer)) return ready;
    const uint64_t begun = cseq_now_ns();
    do {
        cseq_pause();
        ready = cseq_ring_ready(r, cell);
        worth = ready && (cseq_load_rlx_u32(&t->parked) >= cseq_load_rlx_u32(&t->crew) ||
                          (cseq_load_rlx_u32(&t->apart) && cseq_ring_ready(r, last)));
    } while (!worth && cseq_ring_notices(r) == seen && cseq_now_ns() - begun < t->ns);
    cseq_trust_tell(&t->trainer, worth);
    return ready;
}

/* The trainer waits for a cell, without the GIL, and does not sleep: 1 if its batch is ready. `last`: as
 * for cseq_gil_spin. */
CSEQ_INLINE int cseq_gil_expect(cseq_gil *t, const cseq_ring *r, uint32_t cell, uint32_t last,
                                uint32_t seen) {
    cseq_store_rlx_u32(&t->waits, 1);
    const int ready = cseq_gil_spin(t, r, cell, last, seen);
    cseq_store_rlx_u32(&t->waits, 0);
    return ready;
}

/* The trainer waits for a cell (for cell < 0, any), without the GIL, has spun for it, and has woken the
 * runners. As cseq_ring_wait_ready. */
CSEQ_INLINE void cseq_gil_wait_ready(cseq_gil *t, cseq_ring *r, int cell, uint32_t seen, uint64_t ns) {
    cseq_store_rlx_u32(&t->waits, 1);
    cseq_ring_wait_ready(r, cell, seen, ns);
    cseq_store_rlx_u32(&t->waits, 0);
}

#endif
