/* cseq_weights.h as a library of plain functions, for tests of what no sane weights reach. */
#include "cseq_weights.h"

uint64_t divide(uint64_t d, uint64_t high, uint64_t low)
{
    return cseq_divide(cseq_divisor_of(d), high, low);
}

void spread(uint64_t total, uint64_t size, uint64_t offset, uint64_t *numbers, uint64_t count)
{
    cseq_weights_spread(total, cseq_divisor_of(size), offset, numbers, count);
}
