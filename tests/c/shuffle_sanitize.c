/* cseq_shuffle.h and cseq_feistel.h for AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 *   shuffle_sanitize SEED
 *
 * Tables, tags and results are allocated to the byte, at all sizes around the edges of pages and of
 * the look-ahead. Orders are walked in random portions, broken off, begun again, and over the wrap of
 * the generation, and compared with the plain algorithm.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cseq_feistel.h"

#define REQUIRE(condition) \
    do {                   \
        if (!(condition)) { \
            fprintf(stderr, "FAILED: %s (line %d, n=%llu)\n", #condition, __LINE__, \
                    (unsigned long long)at_n); \
            abort(); \
        } \
    } while (0)

static uint64_t at_n, rng[4], orders;

static uint64_t below(uint64_t range) { return cseq_bounded(rng, range); }

static void *bytes(uint64_t count) {
    void *p = calloc(1, count ? count : 1);
    if (!p) abort();
    return p;
}

/* The plain algorithm: an identity, swapped from the front. */
static uint64_t *expected(uint64_t n, uint64_t seed, uint64_t epoch) {
    uint64_t *table = bytes(n * 8), state[4];
    cseq_derive(seed, epoch, CSEQ_PURPOSE_SHUFFLE, state, 4);
    for (uint64_t i = 0; i < n; i++) table[i] = i;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t j = i + cseq_bounded(state, n - i), held = table[j];
        table[j] = table[i];
        table[i] = held;
    }
    return table;
}

/* Walks to `upto` in random portions and compares what has become final. */
static void walk(cseq_order *order, const uint64_t *right, uint64_t upto) {
    uint64_t done = 0;
    while (done < upto) {
        uint64_t count = 1 + below(upto - done), most = 1 + below(2 * CSEQ_AHEAD);
        uint64_t goal = done + count + (upto == order->n && below(4) == 0 ? below(2000) : 0);
        while (cseq_order_advance(order, goal, most)) { /* `goal` may be beyond n */
        }
        int64_t *out = bytes(count * 8);
        cseq_order_copy(order, done, count, out);
        for (uint64_t k = 0; k < count; k++) REQUIRE((uint64_t)out[k] == right[done + k]);
        free(out);
        done += count;
    }
}

static void one_order(uint64_t n, uint32_t generation) {
    at_n = n;
    uint64_t pages = cseq_table_pages(n);
    cseq_order order;
    void *table = bytes(pages * CSEQ_PAGE);
    uint32_t *tags = bytes(pages * sizeof *tags);
    cseq_order_init(&order, n, table, tags);
    for (uint64_t epoch = 0; epoch < 7; epoch++) {
        uint64_t seed = below(3) ? below(1000) : cseq_next(rng);
        cseq_order_start(&order, seed, epoch);
        /* 2^32 epochs later: pages that were written in generation 1, and not since */
        if (epoch == 2 && generation) order.generation = generation;
        uint64_t *right = expected(n, seed, epoch);
        int brief = epoch >= 2 && below(4); /* leaves pages as an older epoch left them */
        walk(&order, right, brief ? n > 0 : below(2) ? n : below(n + 1));
        free(right);
        orders++;
    }
    REQUIRE(order.stale <= pages);
    free(table);
    free(tags);
}

/* At once, in random portions, in a result of exactly n entries. */
static void one_permutation(uint64_t n) {
    at_n = n;
    uint64_t seed = cseq_next(rng), state[4], start = 0;
    uint32_t *result = bytes(n * 4);
    uint64_t *right = expected(n, seed, 9);
    cseq_derive(seed, 9, CSEQ_PURPOSE_SHUFFLE, state, 4);
    while (start < n) {
        uint64_t end = start + 1 + below(n - start);
        cseq_permute(result, n, start, end, state);
        start = end;
    }
    for (uint64_t k = 0; k < n; k++) REQUIRE(result[k] == right[k]);
    free(result);
    free(right);
    orders++;
}

/* Any positions at once, from memory of just their size. */
static void one_network(uint64_t n) {
    uint64_t words[2 * CSEQ_ROUNDS], count = below(40);
    int64_t *places = bytes(8 * count), *out = bytes(8 * count), alone;
    cseq_feistel f;
    cseq_derive_keyed(cseq_next(rng), 9, 14, below(2) ? CSEQ_NO_KEY : below(99), words, 2 * CSEQ_ROUNDS);
    cseq_feistel_init(&f, n, words);
    for (uint64_t k = 0; k < count; k++) places[k] = (int64_t)below(n);
    cseq_feistel_gather(&f, places, count, out);
    for (uint64_t k = 0; k < count; k++) {
        alone = places[k];
        cseq_feistel_gather(&f, &alone, 1, &alone);
        REQUIRE(alone == out[k]);
    }
    uint64_t start = n > count ? below(n - count) : 0;
    cseq_feistel_range(&f, start, n > count ? count : 0, out);
    for (uint64_t k = 0; k < count && n > count; k++) {
        alone = (int64_t)(start + k);
        cseq_feistel_gather(&f, &alone, 1, &alone);
        REQUIRE(alone == out[k]);
    }
    free(places);
    free(out);
    orders++;
}

int main(int argc, char **argv) {
    static const uint64_t edges[] = {0, 1, 2, 3, 31, CSEQ_AHEAD, 2 * CSEQ_AHEAD, 512, 1024, 1536, 2048, 4096, 70000};
    uint64_t seed = argc > 1 ? strtoull(argv[1], 0, 0) : 1;
    printf("shuffle_sanitize: seed %llu\n", (unsigned long long)seed);
    cseq_derive(seed, 0, 99, rng, 4);
    for (size_t e = 0; e < sizeof edges / sizeof *edges; e++)
        for (uint64_t n = edges[e] ? edges[e] - 1 : 0; n <= edges[e] + 1; n++) {
            one_order(n, 0);
            one_order(n, UINT32_MAX - (uint32_t)below(2));
            one_permutation(n);
        }
    for (int shift = 16; shift < 48; shift++)
        one_network((UINT64_C(1) << shift) + below(3));
    for (int shift = 31; shift < 48; shift++) /* sizes without a table */
        for (uint64_t n = ((uint64_t)1 << shift) - 1; n <= ((uint64_t)1 << shift) + 1; n++) {
            at_n = n;
            REQUIRE(cseq_table_pages(n) == (n + 1023) / 1024);
            for (int k = 0; k < 100; k++) REQUIRE(below(n) < n);
        }
    REQUIRE(below(UINT64_MAX) < UINT64_MAX);
    printf("ok: %llu orders\n", (unsigned long long)orders);
    return 0;
}
