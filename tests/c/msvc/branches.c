/* The MSVC branches of the headers, read by a clang that pretends to be MSVC (`make cross`). */
#include "cseq_atomic.h"
#include "cseq_shuffle.h"
