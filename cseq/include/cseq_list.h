/* A list that several threads change, and that a fork holds while it looks at it.
 *
 *   first    0: it is empty
 *   locked   1 while a thread changes the list, for a few instructions, or forks, and copies all
 *            batches in use; others wait without a sleep (cseq_seize). In the child, the thread that
 *            forked has it locked still
 *
 * What is in the list has its link as its first member.
 */
#ifndef CSEQ_LIST_H
#define CSEQ_LIST_H

#include "cseq_wait.h"

typedef struct cseq_link {
    struct cseq_link *before, *after;
} cseq_link;

typedef struct {
    cseq_link *first;
    uint32_t locked;
} cseq_list;

CSEQ_INLINE void cseq_list_lock(cseq_list *list) {
    cseq_seize(&list->locked);
}

CSEQ_INLINE void cseq_list_unlock(cseq_list *list) {
    cseq_store_rel_u32(&list->locked, 0);
}

CSEQ_INLINE void cseq_list_add(cseq_list *list, cseq_link *link) {
    cseq_list_lock(list);
    link->before = 0;
    link->after = list->first;
    if (link->after) link->after->before = link;
    list->first = link;
    cseq_list_unlock(list);
}

/* The caller has locked the list. */
CSEQ_INLINE void cseq_list_unlink(cseq_list *list, cseq_link *link) {
    if (link->before) link->before->after = link->after;
    else list->first = link->after;
    if (link->after) link->after->before = link->before;
}

#endif
