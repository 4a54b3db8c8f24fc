/* The MSVC branch of the atomics, read by a clang that pretends to be MSVC (`make cross`). */
#include "cseq_atomic.h"
