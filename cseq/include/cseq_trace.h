/* What a trace records: tickets that were taken, and marks: spans and counters of the user's code.
 *
 *   log      in the trainer's private memory: a ring of the newest tickets, written where they are taken
 *   marks    in one file, to whose end all processes and threads append theirs
 */
#ifndef CSEQ_TRACE_H
#define CSEQ_TRACE_H

#include <string.h>

#include "cseq_map.h"
#include "cseq_ring.h"

/* What a mark is. */
enum { CSEQ_SPAN = 0, CSEQ_COUNT = 1 };

/* A ticket that was taken, on the clock of `cseq_now_ns`. */
typedef struct {
    uint64_t started_ns, indexed_ns;
    uint64_t converting_ns, converted_ns; /* no converter: 0 */
    uint64_t asked_ns, taken_ns;   /* the loop waited in between */
    uint32_t batch, epoch, thread; /* the thread that has taken it */
    uint16_t feed, worker, converter, pad[3];
} cseq_taken;

typedef struct {
    uint32_t on; /* tickets are to be recorded. Written by one thread at a time */
    uint32_t pad;
    uint64_t begun, done; /* records that were begun, and that are whole */
    uint64_t size;        /* how many there is room for */
    cseq_taken *taken;
} cseq_log;

typedef struct {
    uint64_t begin_ns;
    double value; /* of a span, what it took (ns); of a counter, what was added */
    uint32_t thread, kind;
    char name[40]; /* UTF-8; the rest is cut off */
} cseq_mark;

typedef char cseq_check_taken[sizeof(cseq_taken) == 72 ? 1 : -1];
typedef char cseq_check_mark[sizeof(cseq_mark) == 64 ? 1 : -1];

/* Record a ticket that is taken now, after a wait (ns). `queue`: the number of its queue; of a shared
 * ring, -1. A queue's tickets count epochs from 1, and a converter's claim may bear the time of the
 * publish before it. */
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

/* Append a mark to a file: 1 if it is there. */
CSEQ_INLINE int cseq_mark_append(int fd, const cseq_mark *m) {
#if defined(_WIN32)
    DWORD written;
    return WriteFile(CSEQ_HANDLE(fd), m, sizeof *m, &written, 0) && written == sizeof *m;
#else
    ssize_t written;
    do written = write(fd, m, sizeof *m);
    while (written < 0 && errno == EINTR);
    return written == (ssize_t)sizeof *m;
#endif
}

#endif
