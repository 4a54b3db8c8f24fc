/* The order of an epoch without a table: the algorithm "feistel-v1" in docs/inside/shuffle.md.
 *
 * A keyed bijection on n values maps each position to a sample. It represents the position by two digits, the
 * row and the column in a grid with a rows and b columns, where a * b >= n, and applies eight rounds of a
 * Feistel network. While the result is >= n, the rounds are repeated. The grid has fewer than a values >= n.
 *
 * The algorithm uses no memory and no state, and can compute any position directly. Each round processes
 * CSEQ_LANES positions together, so that their multiplications overlap. The rounds are not unrolled, so that
 * their words stay in registers. For fewer than CSEQ_FEISTEL_LEAST samples, the keys would have too few bits.
 */
#ifndef CSEQ_FEISTEL_H
#define CSEQ_FEISTEL_H

#include "cseq_shuffle.h"

enum {
    CSEQ_PURPOSE_FEISTEL = 6,
    CSEQ_ROUNDS = 8,
    CSEQ_LANES = 16,
};
#define CSEQ_FEISTEL_LEAST 65536

/* A network for n samples: a rows, b columns, and the keys x and m of each round. */
typedef struct {
    uint64_t n, a, b;
    uint64_t x[CSEQ_ROUNDS], m[CSEQ_ROUNDS];
} cseq_feistel;

#define CSEQ_NO_KEY UINT64_MAX

/* Derive `count` words from (seed, epoch, purpose) and, unless it is CSEQ_NO_KEY, `key`. */
static inline void cseq_derive_keyed(uint64_t seed, uint64_t epoch, uint64_t purpose, uint64_t key,
                                     uint64_t *words, size_t count)
{
    uint64_t z = cseq_stream(seed, epoch, purpose);
    cseq_words(key == CSEQ_NO_KEY ? z : cseq_mix(z ^ key), words, count);
}

static inline uint64_t cseq_fold(uint64_t z, const uint64_t *words, size_t count)
{
    for (size_t k = 0; k < count; k++)
        z = cseq_mix(z ^ words[k]);
    return z;
}

/* Return ceil(sqrt(n)) for n >= 1. */
static inline uint64_t cseq_ceil_sqrt(uint64_t n)
{
    uint64_t low = 1, high = UINT64_C(1) << 32;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (middle * middle >= n)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* n must be in [1, 2^63], and `words` must have 2 * CSEQ_ROUNDS entries. */
static inline void cseq_feistel_init(cseq_feistel *f, uint64_t n, const uint64_t *words)
{
    f->n = n;
    f->a = cseq_ceil_sqrt(n);
    f->b = (n - 1) / f->a + 1;
    for (int i = 0; i < CSEQ_ROUNDS; i++) {
        f->x[i] = words[2 * i];
        f->m[i] = words[2 * i + 1] | 1;
    }
}

/* Return the value of the round function for a digit in round i. The value is below `range`. */
CSEQ_FORCE_INLINE uint64_t cseq_feistel_round(const cseq_feistel *f, int i, uint64_t digit,
                                              uint64_t range)
{
    uint64_t low, high = cseq_multiply(digit ^ f->x[i], f->m[i], &low);
    return cseq_multiply(low ^ high, range, &low);
}

CSEQ_FORCE_INLINE void cseq_feistel_rounds(const cseq_feistel *f, uint64_t *row, uint64_t *column,
                                           int lanes)
{
    for (int i = 0; i < CSEQ_ROUNDS; i += 2) {
        for (int k = 0; k < lanes; k++) {
            uint64_t sum = row[k] + cseq_feistel_round(f, i, column[k], f->a);
            row[k] = sum < f->a ? sum : sum - f->a;
        }
        for (int k = 0; k < lanes; k++) {
            uint64_t sum = column[k] + cseq_feistel_round(f, i + 1, row[k], f->b);
            column[k] = sum < f->b ? sum : sum - f->b;
        }
    }
}

/* Return the sample for a value after the rounds. While it is >= n, repeat them. */
static inline uint64_t cseq_feistel_walk(const cseq_feistel *f, uint64_t value)
{
    while (value >= f->n) {
        uint64_t row = value / f->b, column = value % f->b;
        cseq_feistel_rounds(f, &row, &column, 1);
        value = row * f->b + column;
    }
    return value;
}

CSEQ_FORCE_INLINE void cseq_feistel_write(const cseq_feistel *f, uint64_t *rows, uint64_t *columns,
                                          int lanes, int64_t *out)
{
    cseq_feistel_rounds(f, rows, columns, lanes);
    for (int k = 0; k < lanes; k++)
        out[k] = (int64_t)cseq_feistel_walk(f, rows[k] * f->b + columns[k]);
}

/* Write the samples at positions below n. `out` can be equal to `positions`. */
static inline void cseq_feistel_gather(const cseq_feistel *f, const int64_t *positions, uint64_t count,
                                       int64_t *out)
{
    uint64_t rows[CSEQ_LANES], columns[CSEQ_LANES];
    for (uint64_t done = 0; done < count; done += CSEQ_LANES) {
        int lanes = count - done < CSEQ_LANES ? (int)(count - done) : CSEQ_LANES;
        for (int k = 0; k < lanes; k++) {
            rows[k] = (uint64_t)positions[done + k] / f->b;
            columns[k] = (uint64_t)positions[done + k] % f->b;
        }
        cseq_feistel_write(f, rows, columns, lanes, out + done);
    }
}

/* Write the samples at positions start .. start+count-1 below n, with one division. */
static inline void cseq_feistel_range(const cseq_feistel *f, uint64_t start, uint64_t count,
                                     int64_t *out)
{
    uint64_t rows[CSEQ_LANES], columns[CSEQ_LANES];
    uint64_t row = start / f->b, column = start % f->b;
    for (uint64_t done = 0; done < count; done += CSEQ_LANES) {
        int lanes = count - done < CSEQ_LANES ? (int)(count - done) : CSEQ_LANES;
        for (int k = 0; k < lanes; k++) {
            rows[k] = row;
            columns[k] = column;
            column = column + 1 == f->b ? 0 : column + 1;
            row += column == 0;
        }
        cseq_feistel_write(f, rows, columns, lanes, out + done);
    }
}

#endif
