/* Spinning: a party with nothing to do watches the ring for a while before it sleeps.
 *
 * A wake-up takes longer than a quick batch, and keeps the party that wakes another from its work. After
 * spinning in vain, up to 256 next times are skipped, so spinning costs little where it is of no use (long
 * batches, more parties than cores). The trainer spins, and one runner of each stage.
 *
 * Threads that share a GIL take turns. A thread that is woken while another one has the GIL sleeps again,
 * for the GIL. So both sides release it to wait, and leave each other alone:
 *
 *   trainer    goes on once its batch is ready and the whole crew is `parked`
 *   a runner   claims once there is a ticket and the trainer waits
 *
 * No result depends on this: a party that has spun for long enough sleeps. All words are hints, and wrong
 * values cost only time.
 */
#ifndef CSEQ_SPIN_H
#define CSEQ_SPIN_H

#include "cseq_atomic.h"

/* `who` is the owner that spins now, or 0. After spinning in vain, the next 2^doubt times are skipped;
 * `rest` of them are left. */
typedef struct {
    uint32_t who, doubt, rest;
} cseq_spin;

CSEQ_INLINE int cseq_spin_may(cseq_spin *s) {
    const uint32_t rest = cseq_load_rlx_u32(&s->rest);
    if (rest) cseq_store_rlx_u32(&s->rest, rest - 1);
    return rest == 0;
}

/* Learn from spinning: one time in vain outweighs two that were worth it. */
CSEQ_INLINE void cseq_spin_tell(cseq_spin *s, int worth) {
    uint32_t doubt = cseq_load_rlx_u32(&s->doubt);
    if (worth) {
        if (doubt) cseq_store_rlx_u32(&s->doubt, doubt - 1);
        return;
    }
    doubt = doubt < 6 ? doubt + 2 : 8;
    cseq_store_rlx_u32(&s->doubt, doubt);
    cseq_store_rlx_u32(&s->rest, (uint32_t)1 << doubt);
}

#endif
