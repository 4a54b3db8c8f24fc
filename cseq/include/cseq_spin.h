/* Spinning: an idle party watches the ring for a limited time before it sleeps.
 *
 * A wake-up takes longer than a quick batch, and delays the party that causes it. If spinning fails, up to
 * 256 attempts are skipped. Spinning is therefore cheap even if it does not help, as with long batches or
 * more parties than cores. The trainer and one runner of each stage spin.
 *
 * Threads that share a GIL alternate. If a thread wakes up while another thread has the GIL, it must sleep
 * again. Both sides therefore release the GIL while they wait, and do not disturb each other:
 *
 *   trainer    continues when its batch is ready and the whole crew is `parked`
 *   a runner   claims when there is a ticket and the trainer is waiting
 *
 * No result depends on spinning, because every party eventually stops spinning and sleeps. All words are
 * hints, so wrong values only cost time.
 */
#ifndef CSEQ_SPIN_H
#define CSEQ_SPIN_H

#include "cseq_atomic.h"

/* `who` is the owner that is spinning, or 0. After a failure, 2^doubt attempts are skipped, of which `rest`
 * remain. */
typedef struct {
    uint32_t who, doubt, rest;
} cseq_spin;

CSEQ_INLINE int cseq_spin_may(cseq_spin *s) {
    const uint32_t rest = cseq_load_rlx_u32(&s->rest);
    if (rest) cseq_store_rlx_u32(&s->rest, rest - 1);
    return rest == 0;
}

/* Record whether spinning helped. A failure outweighs two successes. */
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
