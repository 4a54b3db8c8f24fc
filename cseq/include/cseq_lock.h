/* A lock for threads of one process, which its owner may take again.
 *
 *   word     0: free; 1: taken; 2: taken, and threads may sleep until it is free
 *   owner    the thread that has it, by a number that is not 0; else 0
 *   depth    how often the owner has it
 *
 * The thread that has changed `word` from 0 writes the other two. Any thread may read `owner`, but it
 * can find its own number there only if it has the lock: it alone writes that number, and takes it
 * out before it frees the lock.
 */
#ifndef CSEQ_LOCK_H
#define CSEQ_LOCK_H

#include "cseq_atomic.h"
#include "cseq_list.h"
#include "cseq_wait.h"

typedef struct {
    cseq_link link; /* in a list of all locks, for forks */
    uint64_t owner;
    uint32_t word, depth;
} cseq_lock;

CSEQ_INLINE int cseq_lock_is_mine(const cseq_lock *l, uint64_t me) {
    return cseq_load_rlx_u64(&l->owner) == me;
}

/* The owner has it for the first time. */
CSEQ_INLINE int cseq_lock_enter(cseq_lock *l, uint64_t me) {
    cseq_store_rlx_u64(&l->owner, me);
    l->depth = 1;
    return 1;
}

/* Take it if that is possible at once; 1 if it was.
 * SYNC: what the last owner did (free's swap; against this compare-and-swap, or await's swap) */
CSEQ_INLINE int cseq_lock_try(cseq_lock *l, uint64_t me) {
    if (cseq_lock_is_mine(l, me)) {
        l->depth++;
        return 1;
    }
    return cseq_cas_sc_u32(&l->word, 0, 1) && cseq_lock_enter(l, me);
}

/* Take it after a `try` in vain; sleep until it is free, at most `ns`. 1 if it was taken. It may
 * return early for no reason.
 * A thread that has slept takes it with `word` 2, since it does not know whether others sleep: that
 * costs one needless wake-up at most, where 1 could leave one asleep. */
CSEQ_INLINE int cseq_lock_await(cseq_lock *l, uint64_t me, uint64_t ns) {
    if (cseq_swap_sc_u32(&l->word, 2) == 0) return cseq_lock_enter(l, me);
    cseq_wait(&l->word, 2, ns, 0);
    return cseq_swap_sc_u32(&l->word, 2) == 0 && cseq_lock_enter(l, me);
}

/* Give it back, as often as it was taken. */
CSEQ_INLINE void cseq_lock_release(cseq_lock *l) {
    if (--l->depth) return;
    cseq_store_rlx_u64(&l->owner, 0);
    if (cseq_swap_sc_u32(&l->word, 0) == 2) cseq_wake(&l->word, 0);
}

/* In a forked process, whose one thread is `me`: free all locks of a list that it does not have. */
CSEQ_INLINE void cseq_locks_child(cseq_list *all, uint64_t me) {
    for (cseq_link *link = all->first; link; link = link->after) {
        cseq_lock *l = (cseq_lock *)link;
        if (cseq_lock_is_mine(l, me)) continue;
        cseq_store_rlx_u64(&l->owner, 0);
        cseq_swap_sc_u32(&l->word, 0);
    }
    cseq_list_unlock(all);
}

CSEQ_INLINE void cseq_lock_remove(cseq_list *all, cseq_lock *l) {
    cseq_list_lock(all);
    cseq_list_unlink(all, &l->link);
    cseq_list_unlock(all);
}

#endif
