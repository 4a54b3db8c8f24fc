/* Draws by weight: the algorithm "weighted-v1" of docs/inside/orders.md.
 *
 * Weights become integers that add up to a total below 2^62; a draw is a number below the total, and
 * the first sample whose cumulative sum is above it:
 *
 *      0 ........ sums[0] .. sums[1] ................ sums[2] ... sums[n - 1] = total
 *      |  sample 0   | sample 1 |      sample 2          |
 *                            ^ a number here: sample 1
 *
 * A guide says where to begin: the numbers are divided into ranges of 2^shift, about four samples
 * each, and guide[g] is the sample of the first number of range g.
 */
#ifndef CSEQ_WEIGHTS_H
#define CSEQ_WEIGHTS_H

#include "cseq_permutation.h"

#define CSEQ_WEIGHTS_MOST (UINT64_C(1) << 62) /* the total is below */
enum { CSEQ_DRAWS = 32 };                     /* numbers that are looked up together */

/* Division by d in [1, 2^63] (Moeller and Granlund 2011, https://doi.org/10.1109/TC.2010.143). */
typedef struct {
    uint64_t d, inverse; /* shifted until its highest bit is set; 2^128 / d - 2^64 */
    int shift;
} cseq_divisor;

typedef struct {
    const uint64_t *sums;  /* of the weights as integers, cumulative */
    const uint32_t *guide; /* `cseq_weights_guides` entries */
    uint64_t n, total;     /* samples; the last sum */
    int shift;
} cseq_weights;

static inline cseq_divisor cseq_divisor_of(uint64_t d)
{
    cseq_divisor by = {d, 0, 0};
    while (!(by.d >> 63)) {
        by.d <<= 1;
        by.shift++;
    }
    uint64_t rest = ~by.d; /* of (2^128 - 1) / d, whose first digit is 1, bit by bit */
    for (int bit = 0; bit < 64; bit++) {
        int carry = (int)(rest >> 63);
        rest = (rest << 1) | 1;
        by.inverse <<= 1;
        if (carry || rest >= by.d) {
            rest -= by.d;
            by.inverse |= 1;
        }
    }
    return by;
}

/* (high * 2^64 + low) / d, for high < d. */
CSEQ_FORCE_INLINE uint64_t cseq_divide(cseq_divisor by, uint64_t high, uint64_t low)
{
    if (by.shift) {
        high = (high << by.shift) | (low >> (64 - by.shift));
        low <<= by.shift;
    }
    uint64_t fraction, quotient = cseq_multiply(by.inverse, high, &fraction);
    fraction += low;
    quotient += high + (fraction < low) + 1;
    uint64_t rest = low - quotient * by.d;
    if (rest > fraction) {
        quotient--;
        rest += by.d;
    }
    return quotient + (rest >= by.d);
}

/* ---- making the sums ------------------------------------------------------------------------ */

/* Add weights first .. last-1, times `scale`, to `sum`; returns the first one that is negative,
 * infinite or nan, or `last`. */
static inline uint64_t cseq_weights_look(const double *weights, uint64_t first, uint64_t last,
                                         double scale, double *sum)
{
    double total = *sum;
    for (uint64_t i = first; i < last; i++) {
        double w = weights[i];
        if (!(w >= 0 && w <= 1.7976931348623157e308))
            return i;
        total += scale * w;
    }
    *sum = total;
    return last;
}

/* 2^k, for k in [-1022, 1023]. */
CSEQ_FORCE_INLINE double cseq_power(int k)
{
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* w * 2^k, rounded half to even; at least 1 unless w is 0. It is below 2^63. */
CSEQ_FORCE_INLINE uint64_t cseq_weights_round(double w, double scale, double again)
{
    const double whole = 4503599627370496.0; /* 2^52: from here on, all are integers */
    double x = w * scale * again;
    if (x < whole) {
        volatile double rounded = x + whole; /* kept from being computed in a wider register */
        x = rounded - whole;
    }
    return x >= 1 ? (uint64_t)x : w > 0;
}

/* Write the sums of samples first .. last-1, with weights times 2^k; `sum`: of those before, and then
 * of these. Stops where it is 2^62 or more. */
static inline void cseq_weights_add(const double *weights, uint64_t first, uint64_t last, int k,
                                    uint64_t *sums, uint64_t *sum)
{
    double scale = cseq_power(k / 2), again = cseq_power(k - k / 2);
    uint64_t total = *sum;
    for (uint64_t i = first; i < last && total < CSEQ_WEIGHTS_MOST; i++)
        sums[i] = total += cseq_weights_round(weights[i], scale, again);
    *sum = total;
}

/* The shift with which there is about one range for four samples. */
static inline int cseq_weights_shift(uint64_t n, uint64_t total)
{
    int shift = 0;
    while ((total - 1) >> shift > n / 4)
        shift++;
    return shift;
}

/* Entries of the guide. */
static inline uint64_t cseq_weights_guides(uint64_t total, int shift)
{
    return ((total - 1) >> shift) + 2;
}

/* Write the entries that samples first .. last-1 are in, for first < last; `at`: the next entry. The
 * last sample ends the last range, and the guide. */
static inline void cseq_weights_lead(const uint64_t *sums, uint64_t n, uint64_t first, uint64_t last,
                                     int shift, uint32_t *guide, uint64_t *at)
{
    uint64_t next = *at;
    for (uint64_t i = first; i < last; i++)
        while (next << shift < sums[i])
            guide[next++] = (uint32_t)i;
    if (last == n)
        guide[next] = (uint32_t)(n - 1);
    *at = next;
}

/* ---- draws ----------------------------------------------------------------------------------- */

/* The samples of `count` <= CSEQ_DRAWS numbers below the total. What one waits for from memory, the
 * others wait for at the same time. */
static inline void cseq_weights_find(const cseq_weights *w, const uint64_t *numbers, uint64_t count,
                                     int64_t *out)
{
    uint64_t low[CSEQ_DRAWS], high[CSEQ_DRAWS];
    for (uint64_t k = 0; k < count; k++)
        CSEQ_PREFETCH(w->guide + (numbers[k] >> w->shift));
    for (uint64_t k = 0; k < count; k++) {
        const uint32_t *range = w->guide + (numbers[k] >> w->shift);
        low[k] = range[0];
        high[k] = range[1];
        CSEQ_PREFETCH(w->sums + (low[k] + high[k]) / 2);
    }
    for (uint64_t k = 0; k < count; k++) {
        uint64_t first = low[k], last = high[k];
        while (first < last) { /* the first sum above the number is in [first, last] */
            uint64_t middle = (first + last) / 2;
            if (w->sums[middle] > numbers[k])
                last = middle;
            else
                first = middle + 1;
        }
        out[k] = (int64_t)first;
    }
}

/* Numbers by which a sample of weight w comes floor or ceil(size * w / total) times, in random order:
 * q * total / size, with one random offset, for the elements q of a permutation, in place. */
CSEQ_FORCE_INLINE void cseq_weights_spread(uint64_t total, cseq_divisor size, uint64_t offset,
                                           uint64_t *numbers, uint64_t count)
{
    for (uint64_t k = 0; k < count; k++) {
        uint64_t low, high = cseq_multiply(numbers[k], total, &low);
        low += offset;
        numbers[k] = cseq_divide(size, high + (low < offset), low);
    }
}

/* Where the words of (seed, epoch, CSEQ_PURPOSE_WEIGHTS) with key 1 begin. */
static inline uint64_t cseq_weights_stream(uint64_t seed, uint64_t epoch)
{
    return cseq_mix(cseq_stream(seed, epoch, CSEQ_PURPOSE_WEIGHTS) ^ 1);
}

/* Independent numbers below the total: words start .. start+count-1 of the stream at `z`. */
CSEQ_FORCE_INLINE void cseq_weights_draw(uint64_t total, uint64_t z, uint64_t start,
                                         uint64_t *numbers, uint64_t count)
{
    for (uint64_t k = 0; k < count; k++) {
        uint64_t low;
        numbers[k] = cseq_multiply(cseq_mix(z + (start + k) * CSEQ_GOLDEN), total, &low);
    }
}

#endif
