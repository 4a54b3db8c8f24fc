/* Permutations that orders are made of: of n elements, for (seed, epoch, purpose, key).
 *
 * From CSEQ_FEISTEL_LEAST elements on feistel-v1, without memory; below, fisher-yates-v1 on a table of
 * the caller's. See docs/inside/orders.md.
 */
#ifndef CSEQ_PERMUTATION_H
#define CSEQ_PERMUTATION_H

#include "cseq_feistel.h"

/* What the words are for; those below 6 are in cseq_shuffle.h and context.py. */
enum {
    CSEQ_PURPOSE_BLOCKS = 7,   /* the order of blocks */
    CSEQ_PURPOSE_WINDOW = 8,   /* samples within a window of blocks; key: lane * 2^40 + window */
    CSEQ_PURPOSE_UNITS = 9,    /* the order of a recipe's units; key 1: where the short group is */
    CSEQ_PURPOSE_MEMBERS = 10, /* samples of a class; key: class */
    CSEQ_PURPOSE_MIXTURE = 11, /* sources within a block of a mixture; key: block */
    CSEQ_PURPOSE_SOURCE = 12,  /* the seed of a source; key: word of its name */
    CSEQ_PURPOSE_WEIGHTS = 13, /* draws by weight; key 1: with replacement */
    CSEQ_PURPOSE_GROUPS = 14,  /* classes of groups; key: round, or (class + 1) * 2^32 + pass */
};
#define CSEQ_NO_KEY UINT64_MAX

typedef struct {
    uint64_t n;
    const uint32_t *table; /* NULL: by `feistel` */
    cseq_feistel feistel;
} cseq_permutation;

/* The first `count` words of (seed, epoch, purpose), and of `key` if it is not CSEQ_NO_KEY. */
static inline void cseq_derive_keyed(uint64_t seed, uint64_t epoch, uint64_t purpose, uint64_t key,
                                     uint64_t *words, size_t count)
{
    uint64_t z = cseq_stream(seed, epoch, purpose);
    cseq_words(key == CSEQ_NO_KEY ? z : cseq_mix(z ^ key), words, count);
}

/* Entries of the table that a permutation of n needs. */
static inline size_t cseq_permutation_entries(uint64_t n)
{
    return n < CSEQ_FEISTEL_LEAST ? (size_t)n : 0;
}

/* n >= 1. `table` has room for `cseq_permutation_entries(n)`, and is filled: O(n) below
 * CSEQ_FEISTEL_LEAST, else O(1). */
static inline void cseq_permutation_init(cseq_permutation *p, uint64_t n, uint64_t seed,
                                         uint64_t epoch, uint64_t purpose, uint64_t key,
                                         uint32_t *table)
{
    uint64_t words[2 * CSEQ_ROUNDS];
    cseq_derive_keyed(seed, epoch, purpose, key, words, 2 * CSEQ_ROUNDS);
    p->n = n;
    p->table = NULL;
    if (n >= CSEQ_FEISTEL_LEAST) {
        cseq_feistel_init(&p->feistel, n, words);
    } else {
        cseq_permute(table, 4, n, 0, n, words);
        p->table = table;
    }
}

/* The elements at positions start .. start+count-1, which must be below n. */
static inline void cseq_permutation_read(const cseq_permutation *p, uint64_t start, uint64_t count,
                                         int64_t *out)
{
    if (!p->table) {
        cseq_feistel_read(&p->feistel, start, count, out);
        return;
    }
    for (uint64_t k = 0; k < count; k++)
        out[k] = p->table[start + k];
}

/* Fold words into `z`, in their order: a fingerprint. */
static inline uint64_t cseq_fold(uint64_t z, const uint64_t *words, size_t count)
{
    for (size_t k = 0; k < count; k++)
        z = cseq_mix(z ^ words[k]);
    return z;
}

#endif
