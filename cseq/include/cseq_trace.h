/* What a trace records: tickets that were taken, and marks: spans and counters of the user's code.
 *
 *   log      in the trainer's private memory: a ring of the newest tickets, written where they are taken
 *   marks    one ring of the newest for each process, in memory that it shares with the trainer: the
 *            process's threads write it, and the trainer reads it
 */
#ifndef CSEQ_TRACE_H
#define CSEQ_TRACE_H

#include <string.h>

#include "cseq_atomic.h"
#include "cseq_wait.h"

#define CSEQ_MARKS 16384u  /* of a process that are kept: a power of two */
#define CSEQ_NAME_WORDS 4u /* of a mark's name, the rest of which is cut off */

/* What a mark is. */
enum { CSEQ_SPAN = 0, CSEQ_COUNT = 1 };

/* A ticket that was taken. Durations are as exact as 24 bits are. */
typedef struct {
    uint64_t started_ns, indexed_ns, taken_ns;
    float converting_ns, converted_ns; /* from `indexed_ns` to the converter's claim, from there to its
                                          publish; no converter: -1 */
    float waited_ns;                   /* that the loop waited for it */
    uint32_t batch, epoch, thread;     /* the thread that has taken it */
    uint16_t feed, worker, converter, status;
    uint64_t pad;
} cseq_taken;

typedef struct {
    uint32_t on; /* tickets are to be recorded. Written by one thread at a time */
    uint32_t pad;
    uint64_t begun, done; /* records that were begun, and that are whole */
    uint64_t begun_ns;    /* when the trace began */
    uint64_t mask;        /* how many there is room for, less 1 */
    cseq_taken *taken;
} cseq_log;

/* The number of the mark + 1 once it is whole (else 0), and what it is. */
typedef struct {
    uint64_t number;
    uint64_t begin_ns;
    uint64_t value; /* the end (ns); of a counter, a double: the sum */
    uint64_t what;                  /* thread (32 bits; 0: the process's own) | kind (32) */
    uint64_t name[CSEQ_NAME_WORDS]; /* UTF-8 */
} cseq_mark;

typedef struct {
    uint32_t on; /* marks are to be recorded; written by the trainer */
    uint32_t pad;
    uint64_t begun; /* marks that were begun */
    char pads[112];
    cseq_mark mark[CSEQ_MARKS];
} cseq_marks;

typedef char cseq_check_taken[sizeof(cseq_taken) == 64 ? 1 : -1];
typedef char cseq_check_mark[sizeof(cseq_mark) == 64 ? 1 : -1];

/* A place for a record of the log, to be filled and then given to `cseq_log_end`. */
CSEQ_INLINE cseq_taken *cseq_log_begin(cseq_log *l) {
    return l->taken + (cseq_add_sc_u64(&l->begun, 1) & l->mask);
}
CSEQ_INLINE void cseq_log_end(cseq_log *l) { cseq_add_sc_u64(&l->done, 1); }

/* Record a mark. Threads of the process may do so at once: each has a number of its own.
 * A process that dies in the middle leaves number 0. SYNC: mark is whole (its number, last) */
CSEQ_INLINE void cseq_marks_add(cseq_marks *m, uint64_t begin_ns, uint64_t value, uint64_t what,
                                const char *name, size_t length) {
    uint64_t words[CSEQ_NAME_WORDS] = {0};
    const uint64_t number = cseq_add_sc_u64(&m->begun, 1);
    cseq_mark *mark = &m->mark[number % CSEQ_MARKS];
    memcpy(words, name, length < sizeof(words) ? length : sizeof(words));
    cseq_swap_sc_u64(&mark->number, 0);
    cseq_store_rlx_u64(&mark->begin_ns, begin_ns);
    cseq_store_rlx_u64(&mark->value, value);
    cseq_store_rlx_u64(&mark->what, what);
    for (size_t k = 0; k < CSEQ_NAME_WORDS; k++) cseq_store_rlx_u64(&mark->name[k], words[k]);
    cseq_store_rel_u64(&mark->number, number + 1);
}

/* Copy a mark: 1 if it is whole, and the one with this number. SYNC: mark is whole */
CSEQ_INLINE int cseq_marks_read(const cseq_marks *m, uint64_t number, cseq_mark *out) {
    const cseq_mark *mark = &m->mark[number % CSEQ_MARKS];
    out->number = cseq_load_acq_u64(&mark->number);
    out->begin_ns = cseq_load_acq_u64(&mark->begin_ns);
    out->value = cseq_load_acq_u64(&mark->value);
    out->what = cseq_load_acq_u64(&mark->what);
    for (size_t k = 0; k < CSEQ_NAME_WORDS; k++) out->name[k] = cseq_load_acq_u64(&mark->name[k]);
    return out->number == number + 1 && cseq_load_rlx_u64(&mark->number) == number + 1;
}

CSEQ_INLINE uint64_t cseq_bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

#endif
