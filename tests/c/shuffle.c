/* Doors to cseq_shuffle.h for test_shuffle.py: what no sane number of samples reaches. */
#if defined(_WIN32)
#define DOOR __declspec(dllexport)
#else
#define DOOR
#endif

#include "cseq_shuffle.h"

DOOR uint64_t multiply(uint64_t a, uint64_t b, uint64_t *low)
{
    return cseq_multiply(a, b, low);
}

DOOR void bounded(uint64_t state[4], uint64_t range, uint64_t *out, uint64_t count)
{
    for (uint64_t k = 0; k < count; k++)
        out[k] = cseq_bounded(state, range);
}

/* The first samples of an order on memory of the caller's. */
DOOR void first(uint64_t n, uint32_t *table, uint32_t *tags, uint64_t seed, uint64_t epoch,
                int64_t *out, uint64_t count)
{
    cseq_order order;
    cseq_order_init(&order, n, table, tags);
    cseq_order_start(&order, seed, epoch);
    while (cseq_order_advance(&order, count, 7)) {
    }
    cseq_order_copy(&order, 0, count, out);
}

/* `count` epochs on a table that was last used in generation 1 and is in `generation` now; `out`
 * receives the last one. */
DOOR void epochs(uint64_t n, uint32_t *table, uint32_t *tags, uint32_t generation, uint64_t seed,
                 uint64_t count, int64_t *out)
{
    cseq_order order;
    cseq_order_init(&order, n, table, tags);
    order.generation = 1;
    for (uint64_t page = 0; page < cseq_table_pages(n); page++)
        tags[page] = 1;
    cseq_order_start(&order, seed, 0);
    cseq_order_advance(&order, n, n);
    order.generation = generation;
    for (uint64_t epoch = 0; epoch < count; epoch++) {
        cseq_order_start(&order, seed, epoch);
        cseq_order_advance(&order, n, n);
    }
    cseq_order_copy(&order, 0, n, out);
}
