/* The latest tickets that the trainer has received, for a trace. */
#ifndef CSEQ_TRACE_H
#define CSEQ_TRACE_H

#include "cseq_ring.h"

/* A ticket that `thread` has received. Times are from `cseq_now_ns`. `converted_ns` may be 0. The
 * loop waited from `asked_ns` to `taken_ns`. */
typedef struct {
    uint64_t started_ns, indexed_ns;
    uint64_t converting_ns, converted_ns;
    uint64_t asked_ns, taken_ns;
    uint32_t batch, epoch, thread;
    uint16_t feed, worker, converter, pad[3];
} cseq_taken;

/* Tickets are recorded while `on` is set. Only one thread at a time writes `on`. There is space for `size`
 * records. `begun` counts the records that were started, and `done` the complete ones. */
typedef struct {
    uint32_t on;
    uint32_t pad;
    uint64_t begun, done;
    uint64_t size;
    cseq_taken *taken;
} cseq_log;

typedef char cseq_check_taken[sizeof(cseq_taken) == 72 ? 1 : -1];

/* Record a ticket received after a wait of `waited` ns. `queue` is the number of its queue, or -1.
 * The epochs of queues count from 1. A converter's claim time may be the time of its last publication. */
CSEQ_INLINE void cseq_log_add(cseq_log *l, const cseq_cell *c, uint64_t now, uint64_t waited,
                              uint32_t thread, uint16_t feed, int queue) {
    cseq_taken *r = l->taken + cseq_add_sc_u64(&l->begun, 1) % l->size;
    r->started_ns = c->indexing.started_ns;
    r->indexed_ns = c->indexing.published_ns;
    r->converting_ns = c->converting.started_ns > r->indexed_ns ? c->converting.started_ns : r->indexed_ns;
    r->converted_ns = c->stage ? c->converting.published_ns : 0;
    r->asked_ns = now - waited;
    r->taken_ns = now;
    r->batch = (uint32_t)(queue < 0 ? c->batch : c->start);
    r->epoch = (uint32_t)(queue < 0 ? c->epoch : c->epoch - 1);
    r->thread = thread;
    r->feed = feed;
    r->worker = (uint16_t)(queue < 0 ? c->owner[0] : c->owner[0] + queue);
    r->converter = c->owner[1];
    cseq_add_sc_u64(&l->done, 1);
}

#endif
