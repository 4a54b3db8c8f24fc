/* Every header of the core in one file, for compilers of other systems (`make check-headers`). */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* as Python.h does before _core includes the headers */
#endif

#include "cseq_allocator.h"
#include "cseq_atomic.h"
#include "cseq_fault.h"
#include "cseq_fault.h"
#include "cseq_feistel.h"
#include "cseq_map.h"
#include "cseq_meter.h"
#include "cseq_slot_allocator.h"
#include "cseq_reuse.h"
#include "cseq_ring.h"
#include "cseq_shuffle.h"
#include "cseq_spin.h"
#include "cseq_trace.h"
#include "cseq_turns.h"
#include "cseq_wait.h"
