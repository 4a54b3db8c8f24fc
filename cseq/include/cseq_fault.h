/* Fault points for testing process deaths. In a debug build, CSEQ_FAULT=point:n kills a worker process when
 * it passes a point for the n-th time. CSEQ_FAULT=point:n:worker kills only the worker with that number.
 *
 * Include this header before cseq_ring.h. A release build has no fault points.
 */
#ifndef CSEQ_FAULT_H
#define CSEQ_FAULT_H

/* If 1, memory that is no longer in use is overwritten. */
#ifdef CSEQ_DEBUG
#define CSEQ_POISON 1
#else
#define CSEQ_POISON 0
#endif

#if defined(CSEQ_DEBUG) && !defined(_WIN32)

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number of passes until death, or -1 before the environment is read. Only workers, whose number is in
 * CSEQ_WORKER, are killed, although the trainer also passes these points. */
static long cseq_fault_left = -1;
static char cseq_fault_name[32];

static inline void cseq_fault_parse(const char *worker) {
    const char *spec = getenv("CSEQ_FAULT");
    const char *colon = spec ? strchr(spec, ':') : 0;
    const char *only = colon ? strchr(colon + 1, ':') : 0;
    cseq_fault_left = 0;
    if (only && atol(only + 1) != atol(worker)) return;
    if (!colon || (size_t)(colon - spec) >= sizeof cseq_fault_name) return;
    memcpy(cseq_fault_name, spec, (size_t)(colon - spec));
    cseq_fault_left = atol(colon + 1);
}

static inline void cseq_fault_pass(const char *name) {
    const char *worker = cseq_fault_left < 0 ? getenv("CSEQ_WORKER") : 0;
    if (worker) cseq_fault_parse(worker);
    if (cseq_fault_left > 0 && strcmp(name, cseq_fault_name) == 0 && --cseq_fault_left == 0)
        kill(getpid(), SIGKILL);
}

#define CSEQ_POINT(name) cseq_fault_pass(name)

#else

#define CSEQ_POINT(name) ((void)0)

#endif
#endif
