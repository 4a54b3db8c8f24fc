/* Turns: threads whose batches are quick and need the GIL work one at a time.
 *
 * Without turns, such threads interrupt each other in the middle of a batch: at each call that releases the
 * GIL, and whenever a thread sleeps. With turns, a thread processes all tickets of its queue while the others
 * wait without the GIL. When no ticket is left, the thread ends its turn. Only then does it wake up the
 * trainer, which also needs the GIL.
 *
 * Whether this is faster depends on the user's code, so the trainer runs trials. It measures CSEQ_TRIAL
 * batches in both modes and keeps the faster mode. Later, it tries the other mode again. Each time the other
 * mode loses, the trainer waits twice as long before the next trial. The trainer measures the time from one
 * of its sleeps to the next, but only if it sleeps for most of this time, because the loop determines the
 * time otherwise.
 *
 * No result depends on turns. A thread waits for its turn for up to CSEQ_PATIENCE, because user code may wait
 * for another thread. All words are hints, so wrong values only cost time.
 *
 *   word                        written by
 *   on                          the trainer
 *   holder                      a runner: its number by compare-and-swap, then 0
 *   waiters                     each runner: +1 before a wait, -1 after the wait
 *   all others                  the trainer, which is also the only reader
 */
#ifndef CSEQ_TURNS_H
#define CSEQ_TURNS_H

#include "cseq_wait.h"

/* How long a runner waits for its turn, and the longest batch for which turns are tried, in ns. */
#define CSEQ_PATIENCE 2000000
#define CSEQ_QUICK 6000000
/* The number of batches per measurement, and the maximum number of measurements between two trials. */
#define CSEQ_TRIAL 64
#define CSEQ_RARELY 256

/* If `trial` is set, the current mode is being tried, and `cost` is the other mode's cost in ns per batch.
 * `left` of `between` measurements remain until the next trial. The trainer last woke up at `awake_ns`, after
 * `taken` batches. The current measurement covers `count` batches in `ns`. */
typedef struct {
    uint32_t on, holder, waiters;
    char pad[CSEQ_LINE - 12];
    uint32_t runners, trial;
    uint32_t left, between;
    uint64_t awake_ns, taken;
    uint64_t ns, count, cost;
} cseq_turns;

/* Wait for the turn of the runner, without the GIL.
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

/* Leave the turn if the runner has it. SYNC: turn seen (the swap, then the load) */
CSEQ_INLINE void cseq_turns_leave(cseq_turns *t, uint32_t runner) {
    if (cseq_load_rlx_u32(&t->holder) != runner) return;
    cseq_swap_sc_u32(&t->holder, 0);
    if (cseq_load_sc_u32(&t->waiters)) cseq_wake(&t->holder, 0);
}

/* Record that the trainer slept from `before` to `awake`, after `taken` batches. If it was mostly awake since
 * its last sleep, this time is ignored, because the loop determined it. */
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
