/* Spinning: a party with nothing to do looks at the ring again and again for a while, before it sleeps.
 *
 * A wake-up takes longer than a quick batch, and keeps the one that wakes from its work. After spinning in
 * vain, the next times are skipped, up to 256 of them; so where it is of no use (long batches, more parties
 * than cores), it costs little. The trainer spins, and one runner of each stage.
 *
 * Threads that share a GIL take turns. One that is woken while another one has the GIL sleeps again, for
 * the GIL. So both sides release it to wait, and leave the other one alone:
 *
 *   trainer    goes on once its batch is ready and the whole crew is `parked`
 *   a runner   claims once there is a ticket and the trainer waits
 *
 * No result depends on it: one that has spun for long enough sleeps. All words are hints; wrong values cost
 * time only.
 */
#ifndef CSEQ_SPIN_H
#define CSEQ_SPIN_H

#include "cseq_atomic.h"

typedef struct {
    uint32_t who; /* the owner that spins now; 0: none */
    uint32_t doubt, rest; /* times to be skipped: 2^doubt at first, and as yet */
} cseq_spin;

/* Whether to spin now. */
CSEQ_INLINE int cseq_spin_may(cseq_spin *s) {
    const uint32_t rest = cseq_load_rlx_u32(&s->rest);
    if (rest) cseq_store_rlx_u32(&s->rest, rest - 1);
    return rest == 0;
}

/* Spinning was worth it, or in vain, which outweighs two times that were worth it. */
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
