/* Turns: of threads whose batches are quick and need the GIL, one works at a time.
 *
 * Two such threads take the GIL from each other in the middle of a batch: at each call that releases
 * it, and whenever one of them sleeps. In turns, a thread works on all tickets of its queue while the
 * others wait without the GIL. It leaves its turn once no ticket is left, and only then wakes the
 * trainer, which needs the GIL as well.
 *
 * Whether this is quicker depends on the user's code, so the trainer tries: it measures CSEQ_TRIAL
 * batches both ways, keeps the better way, and tries the other one again, each time that it loses after
 * twice as many batches. It measures the time between two of its sleeps, and only where it sleeps for
 * most of that time: otherwise the loop takes the time.
 *
 * No result depends on this. A thread waits for its turn for CSEQ_PATIENCE at most, since user code may
 * wait for another thread. All words are hints, and wrong values cost only time.
 *
 *   word                        written by
 *   on                          the trainer
 *   holder                      a runner: its number by compare-and-swap, then 0
 *   waiters                     each runner: +1 on its way into a wait, -1 on its way out
 *   all others                  the trainer, which alone reads them
 */
#ifndef CSEQ_TURNS_H
#define CSEQ_TURNS_H

#include "cseq_wait.h"

/* ns that a runner waits for its turn at most; and ns of a batch in its thread, above which there are no
 * turns. */
#define CSEQ_PATIENCE 2000000
#define CSEQ_QUICK 6000000
/* Batches of a measurement, and measurements between two trials, at most. */
#define CSEQ_TRIAL 64
#define CSEQ_RARELY 256

/* In a `trial`, the present way is tried, and `cost` (ns a batch) is what the other one took. There are
 * `left` measurements until the next trial, and `between` from one to the next. The trainer woke up last
 * at `awake_ns`, with `taken` batches. The present measurement has `count` batches in `ns`. */
typedef struct {
    uint32_t on, holder, waiters;
    char pad[CSEQ_LINE - 12];
    uint32_t runners, trial;
    uint32_t left, between;
    uint64_t awake_ns, taken;
    uint64_t ns, count, cost;
} cseq_turns;

/* A runner without its turn waits for it, without the GIL.
 * SYNC: turn seen (the count of waiters, then the compare-and-swap; against cseq_turns_leave) */
CSEQ_INLINE void cseq_turns_enter(cseq_turns *t, uint32_t runner) {
    if (!cseq_load_rlx_u32(&t->on) || cseq_cas_sc_u32(&t->holder, 0, runner)) return;
    const uint64_t begun = cseq_now_ns();
    uint64_t waited = 0;
    cseq_add_sc_u32(&t->waiters, 1);
    while (!cseq_cas_sc_u32(&t->holder, 0, runner) && waited < CSEQ_PATIENCE) {
        const uint32_t seen = cseq_load_sc_u32(&t->holder);
        if (seen) cseq_wait(&t->holder, seen, CSEQ_PATIENCE - waited, 0);
        waited = cseq_now_ns() - begun;
    }
    cseq_add_sc_u32(&t->waiters, (uint32_t)-1);
}

CSEQ_INLINE int cseq_turns_has(const cseq_turns *t, uint32_t runner) {
    return cseq_load_rlx_u32(&t->on) && cseq_load_rlx_u32(&t->holder) == runner;
}

/* A runner leaves its turn, if it has it. SYNC: turn seen (the swap, then the load) */
CSEQ_INLINE void cseq_turns_leave(cseq_turns *t, uint32_t runner) {
    if (cseq_load_rlx_u32(&t->holder) != runner) return;
    cseq_swap_sc_u32(&t->holder, 0);
    if (cseq_load_sc_u32(&t->waiters)) cseq_wake(&t->holder, 0);
}

/* The trainer has slept from `before` to `awake`, and has taken `taken` batches in all. If it was awake
 * for most of the time since its last sleep, the loop took that time, or was elsewhere. */
CSEQ_INLINE void cseq_turns_learn(cseq_turns *t, uint64_t before, uint64_t awake, uint64_t taken) {
    const uint64_t ns = awake - t->awake_ns, count = taken - t->taken;
    t->awake_ns = awake;
    t->taken = taken;
    if (awake - before < ns / 2) return;
    t->ns += ns;
    t->count += count;
    if (t->count < CSEQ_TRIAL) return;
    const uint64_t cost = t->ns / t->count;
    t->ns = t->count = 0;
    if (t->trial) {
        const int wins = cost < t->cost - t->cost / 10;
        t->between = wins ? 1 : t->between < CSEQ_RARELY ? 2 * t->between : CSEQ_RARELY;
        t->left = t->between;
        t->trial = 0;
        if (wins) return;
    } else if (t->left) {
        t->left--;
        return;
    } else if (cost * t->runners > CSEQ_QUICK) {
        return;
    } else {
        t->trial = 1;
        t->cost = cost;
    }
    cseq_store_rlx_u32(&t->on, !t->on);
}

#endif
