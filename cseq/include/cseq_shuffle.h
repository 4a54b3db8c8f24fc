/* The order of an epoch: the algorithm "fisher-yates-v1" in docs/inside/shuffle.md.
 *
 * This is a forward Fisher-Yates shuffle of a table that stores value XOR position, so zeroed memory is
 * the identity. A position is final as soon as the walk has passed it:
 *
 *      final, read by batches        not final; untouched entries are still zero
 *     [ 0 ................ i - 1 ][ i ......... j ......................... n - 1 ]
 *                                   \__ swap __/   j = i + bounded(n - i)
 *
 * The caller owns the memory. None of the functions allocates, waits or fails. Entries have 4 bytes, for up
 * to CSEQ_MOST_TABLED samples. The partners j are drawn up to CSEQ_AHEAD steps before they are swapped, and
 * their entries are prefetched. This does not change the order of the swaps, nor the result.
 */
#ifndef CSEQ_SHUFFLE_H
#define CSEQ_SHUFFLE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#define CSEQ_FORCE_INLINE static __forceinline
#define CSEQ_UNLIKELY(condition) (condition)
#if defined(_M_X64) || defined(_M_IX86)
#define CSEQ_PREFETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T1)
#else
#define CSEQ_PREFETCH(address) __prefetch(address)
#endif
#else
#define CSEQ_FORCE_INLINE static inline __attribute__((always_inline))
#define CSEQ_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define CSEQ_PREFETCH(address) __builtin_prefetch((address), 1, 2)
#endif

/* "cseq-v1" followed by a zero byte, and the increment of SplitMix64, 2^64 / golden ratio. */
#define CSEQ_IV UINT64_C(0x637365712D763100)
#define CSEQ_GOLDEN UINT64_C(0x9E3779B97F4A7C15)
/* The number of steps between a draw and its swap. */
#define CSEQ_AHEAD 64
/* Sizes in bytes: a table that fits into a cache, and a page. */
#define CSEQ_CACHED (1u << 20)
#define CSEQ_PAGE 4096
#define CSEQ_MOST_TABLED (UINT64_C(1) << 32)

/* context.py defines the other purposes. */
enum { CSEQ_PURPOSE_SHUFFLE = 1 };

/* ---- 64-bit words -------------------------------------------------------------------------- */

/* Return the high half of a * b, and store the low half in *low. CSEQ_PORTABLE_MUL selects plain C. Without
 * the empty assembly, GCC would count down a 128-bit range. */
CSEQ_FORCE_INLINE uint64_t cseq_multiply(uint64_t a, uint64_t b, uint64_t *low)
{
#if defined(__SIZEOF_INT128__) && !defined(CSEQ_PORTABLE_MUL)
    __asm__("" : "+r"(b));
    __extension__ unsigned __int128 product = (__extension__ (unsigned __int128)a) * b;
    *low = (uint64_t)product;
    return (uint64_t)(product >> 64);
#elif defined(_MSC_VER) && defined(_M_X64) && !defined(CSEQ_PORTABLE_MUL)
    uint64_t high;
    *low = _umul128(a, b, &high);
    return high;
#elif defined(_MSC_VER) && defined(_M_ARM64) && !defined(CSEQ_PORTABLE_MUL)
    *low = a * b;
    return __umulh(a, b);
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t bottom = a0 * b0;
    uint64_t left = a1 * b0 + (bottom >> 32);
    uint64_t right = a0 * b1 + (uint32_t)left;
    *low = (right << 32) | (uint32_t)bottom;
    return a1 * b1 + (left >> 32) + (right >> 32);
#endif
}

/* One step of SplitMix64. */
CSEQ_FORCE_INLINE uint64_t cseq_mix(uint64_t v)
{
    v += CSEQ_GOLDEN;
    v = (v ^ (v >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    v = (v ^ (v >> 27)) * UINT64_C(0x94D049BB133111EB);
    return v ^ (v >> 31);
}

/* Return the start of the stream for (seed, epoch, purpose). */
static inline uint64_t cseq_stream(uint64_t seed, uint64_t epoch, uint64_t purpose)
{
    return cseq_mix(cseq_mix(cseq_mix(CSEQ_IV ^ seed) ^ epoch) ^ purpose);
}

/* Write the first `count` words of the stream at `z`. */
static inline void cseq_words(uint64_t z, uint64_t *words, size_t count)
{
    for (size_t k = 0; k < count; k++)
        words[k] = cseq_mix(z + (uint64_t)k * CSEQ_GOLDEN);
}

static inline void cseq_derive(uint64_t seed, uint64_t epoch, uint64_t purpose,
                               uint64_t *words, size_t count)
{
    cseq_words(cseq_stream(seed, epoch, purpose), words, count);
}

CSEQ_FORCE_INLINE uint64_t cseq_rotate(uint64_t v, int bits)
{
    return (v << bits) | (v >> (64 - bits));
}

/* Return the next word of `s` (xoshiro256++ by Blackman and Vigna, https://prng.di.unimi.it). */
CSEQ_FORCE_INLINE uint64_t cseq_next(uint64_t s[4])
{
    uint64_t word = cseq_rotate(s[0] + s[3], 23) + s[0];
    uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = cseq_rotate(s[3], 45);
    return word;
}

/* Return an unbiased random number below `range` >= 1 (Lemire 2019, https://arxiv.org/abs/1805.10941).
 * `surplus` is the number of words that must be rejected, 2^64 mod range. */
CSEQ_FORCE_INLINE uint64_t cseq_bounded(uint64_t s[4], uint64_t range)
{
    uint64_t low, high = cseq_multiply(cseq_next(s), range, &low);
    if (CSEQ_UNLIKELY(low < range)) {
        uint64_t surplus = (0 - range) % range;
        while (low < surplus)
            high = cseq_multiply(cseq_next(s), range, &low);
    }
    return high;
}

/* ---- the table ----------------------------------------------------------------------------- */

/* The generator, and the partners drawn for positions below `drawn`. The partner of position i is at i %
 * CSEQ_AHEAD until the walk has passed i. */
typedef struct {
    uint64_t state[4];
    uint64_t drawn;
    uint64_t partners[CSEQ_AHEAD];
} cseq_draws;

/* An order of n samples. Positions below `position` are final. `table` has n entries of value XOR position in
 * whole pages. Epochs that reuse the table increment `generation`. `tags` is the generation in which each page
 * was last zeroed, and `stale` is the number of older pages. If `stale` is 0, the table needs no checks. */
typedef struct {
    uint64_t n, position;
    cseq_draws draws;
    uint32_t *table, *tags;
    uint64_t stale;
    uint32_t generation;
} cseq_order;

/* Return the number of pages (at least 1), which is also the number of tags. */
CSEQ_FORCE_INLINE uint64_t cseq_table_pages(uint64_t n)
{
    return n ? (n - 1) / (CSEQ_PAGE / 4) + 1 : 1;
}

/* Zero the page of entry `k` if an earlier epoch wrote to it. */
CSEQ_FORCE_INLINE void cseq_refresh(cseq_order *order, uint64_t k)
{
    uint64_t page = k / (CSEQ_PAGE / 4);
    if (order->tags[page] != order->generation) {
        memset(order->table + page * (CSEQ_PAGE / 4), 0, CSEQ_PAGE);
        order->tags[page] = order->generation;
        order->stale--;
    }
}

/* Draw the partner of position `i`, and prefetch its entry. */
CSEQ_FORCE_INLINE uint64_t cseq_draw(uint32_t *table, uint64_t n, uint64_t i, uint64_t state[4],
                                     cseq_order *order)
{
    uint64_t j = i + cseq_bounded(state, n - i);
    if (order) {
        cseq_refresh(order, i);
        cseq_refresh(order, j);
    }
    CSEQ_PREFETCH(table + j);
    return j;
}

/* Swap the values at i and j. If `masked` is set, entries are value XOR position. */
CSEQ_FORCE_INLINE void cseq_swap(uint32_t *table, int masked, uint64_t i, uint64_t j)
{
    uint32_t mask_i = masked ? (uint32_t)i : 0, mask_j = masked ? (uint32_t)j : 0;
    uint32_t at_i = table[i] ^ mask_i, at_j = table[j] ^ mask_j;
    table[j] = at_i ^ mask_j;
    table[i] = at_j ^ mask_i;
}

/* Execute steps i .. end-1, and draw partners up to `limit` >= `end`. Before `ahead`, each swap is paired
 * with a draw. A constant `masked` and a null `order` (no checks) are optimized away. */
CSEQ_FORCE_INLINE void cseq_walk(uint32_t *table, int masked, uint64_t n, uint64_t i, uint64_t end,
                                 uint64_t limit, cseq_draws *draws, cseq_order *order)
{
    uint64_t *partners = draws->partners;
    uint64_t s[4] = {draws->state[0], draws->state[1], draws->state[2], draws->state[3]};
    uint64_t drawn = draws->drawn;
    for (; drawn < limit && drawn - i < CSEQ_AHEAD; drawn++)
        partners[drawn % CSEQ_AHEAD] = cseq_draw(table, n, drawn, s, order);
    uint64_t ahead = limit > CSEQ_AHEAD ? limit - CSEQ_AHEAD : 0;
    for (uint64_t stop = ahead < end ? ahead : end; i < stop; i++) {
        uint64_t j = partners[i % CSEQ_AHEAD];
        partners[i % CSEQ_AHEAD] = cseq_draw(table, n, i + CSEQ_AHEAD, s, order);
        cseq_swap(table, masked, i, j);
    }
    draws->drawn = limit - i > CSEQ_AHEAD ? i + CSEQ_AHEAD : limit;
    memcpy(draws->state, s, sizeof s);
    for (; i < end; i++)
        cseq_swap(table, masked, i, partners[i % CSEQ_AHEAD]);
}

/* ---- an incremental order ------------------------------------------------------------------ */

/* `table` and `tags` must be zeroed, but are not accessed here. */
static inline void cseq_order_init(cseq_order *order, uint64_t n, uint32_t *table, uint32_t *tags)
{
    memset(order, 0, sizeof *order);
    order->n = n;
    order->table = table;
    order->tags = tags;
}

/* Start an epoch in O(1). Pages of a used table are zeroed when needed. The tags are cleared after 2^32
 * epochs. */
static inline void cseq_order_start(cseq_order *order, uint64_t seed, uint64_t epoch)
{
    uint64_t pages = cseq_table_pages(order->n);
    if (order->position) {
        order->position = 0;
        order->stale = pages;
        if (++order->generation == 0) {
            memset(order->tags, 0, (size_t)pages * sizeof *order->tags);
            order->generation = 1;
        }
    }
    order->draws.drawn = 0;
    cseq_derive(seed, epoch, CSEQ_PURPOSE_SHUFFLE, order->draws.state, 4);
}

/* Make positions below `upto` final in at most `most` steps. Return how many steps remain. */
static inline uint64_t cseq_order_advance(cseq_order *order, uint64_t upto, uint64_t most)
{
    uint64_t n = order->n, start = order->position, end = upto < n ? upto : n;
    if (end <= start)
        return 0;
    uint64_t left = end - start > most ? end - start - most : 0;
    end -= left;
    if (order->stale)
        cseq_walk(order->table, 1, n, start, end, n, &order->draws, order);
    else
        cseq_walk(order->table, 1, n, start, end, n, &order->draws, NULL);
    order->position = end;
    return left;
}

/* Copy the samples at final positions start .. start+count-1. Compilers can vectorize 32-bit arithmetic. */
static inline void cseq_order_copy(const cseq_order *order, uint64_t start, uint64_t count,
                                   int64_t *out)
{
    uint64_t k = 0;
    for (; k + 8 <= count; k += 8)
        for (uint32_t j = 0, i = (uint32_t)(start + k); j < 8; j++)
            out[k + j] = order->table[start + k + j] ^ (i + j);
    for (; k < count; k++)
        out[k] = order->table[start + k] ^ (uint32_t)(start + k);
}

/* ---- a complete permutation ---------------------------------------------------------------- */

/* Entries are plain values here. This takes another pass, but fewer operations per step. */
CSEQ_FORCE_INLINE void cseq_identity(uint32_t *result, uint64_t n)
{
    uint64_t k = 0;
    for (; k + 8 <= n; k += 8)
        for (uint32_t j = 0; j < 8; j++)
            result[k + j] = (uint32_t)k + j;
    for (; k < n; k++)
        result[k] = (uint32_t)k;
}

/* Execute steps i .. end-1 without prefetching. */
CSEQ_FORCE_INLINE void cseq_walk_cached(uint32_t *result, uint64_t n, uint64_t i, uint64_t end,
                                        uint64_t state[4])
{
    uint64_t s[4] = {state[0], state[1], state[2], state[3]};
    for (; i < end; i++)
        cseq_swap(result, 0, i, i + cseq_bounded(s, n - i));
    memcpy(state, s, sizeof s);
}

/* Execute steps i .. end-1 and draw no partners beyond `end`, so `state` is exact. */
CSEQ_FORCE_INLINE void cseq_walk_result(uint32_t *result, uint64_t n, uint64_t i, uint64_t end,
                                        uint64_t state[4])
{
    cseq_draws draws;
    draws.drawn = i;
    memcpy(draws.state, state, sizeof draws.state);
    cseq_walk(result, 0, n, i, end, end, &draws, NULL);
    memcpy(state, draws.state, sizeof draws.state);
}

/* Execute steps start .. end-1 of a permutation of n. At end == n, `result` is complete. Before step 0, it
 * can be uninitialized, and `state` is cseq_derive(seed, epoch, CSEQ_PURPOSE_SHUFFLE, 4). */
static inline void cseq_permute(uint32_t *result, uint64_t n, uint64_t start, uint64_t end,
                                uint64_t state[4])
{
    if (start == 0)
        cseq_identity(result, n);
    if (n <= CSEQ_CACHED / 4)
        cseq_walk_cached(result, n, start, end, state);
    else
        cseq_walk_result(result, n, start, end, state);
}

#endif
