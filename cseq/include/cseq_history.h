/* History: how the counts of a run have grown, as at most CSEQ_POINTS rows of words.
 *
 * When it is full, every second row goes, and rows are added half as often: it always covers the whole
 * run. The trainer writes it; any thread reads. `version` is odd while rows change: a reader that finds
 * it odd, or changed, reads again. The words have acquire and release order, so that none is read from
 * another version than those around it (SYNC: history).
 */
#ifndef CSEQ_HISTORY_H
#define CSEQ_HISTORY_H

#include "cseq_atomic.h"

#define CSEQ_POINTS 512

typedef struct {
    uint64_t version;
    uint64_t count;
    uint64_t every_ns, due_ns; /* the trainer's alone */
    uint64_t width;            /* words of a row */
    uint64_t *rows;
} cseq_history;

/* The row that is added next; `cseq_history_end` follows. SYNC: history. */
CSEQ_INLINE uint64_t *cseq_history_begin(cseq_history *h, uint64_t now) {
    const uint64_t width = h->width;
    cseq_swap_sc_u64(&h->version, h->version + 1);
    if (h->count == CSEQ_POINTS) {
        for (uint64_t k = 1; k < CSEQ_POINTS / 2; k++)
            for (uint64_t i = 0; i < width; i++)
                cseq_store_rel_u64(&h->rows[k * width + i], h->rows[2 * k * width + i]);
        cseq_store_rel_u64(&h->count, CSEQ_POINTS / 2);
        h->every_ns *= 2;
    }
    h->due_ns = now + h->every_ns;
    return h->rows + h->count * width;
}

CSEQ_INLINE void cseq_history_end(cseq_history *h) {
    cseq_store_rel_u64(&h->count, h->count + 1);
    cseq_store_rel_u64(&h->version, h->version + 1);
}

/* Copy all rows to `out`, which has room for CSEQ_POINTS, from any thread. Returns how many there are.
 * SYNC: history. */
CSEQ_INLINE uint64_t cseq_history_read(const cseq_history *h, uint64_t *out) {
    for (;;) {
        const uint64_t version = cseq_load_acq_u64(&h->version);
        const uint64_t count = cseq_load_acq_u64(&h->count);
        if (version & 1) continue;
        for (uint64_t k = 0; k < count * h->width; k++) out[k] = cseq_load_acq_u64(&h->rows[k]);
        if (cseq_load_rlx_u64(&h->version) == version) return count;
    }
}

#endif
