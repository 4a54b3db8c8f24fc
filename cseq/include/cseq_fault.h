/* Fault points for tests in which a process dies. In a debug build, CSEQ_FAULT=point:n kills a worker process
 * when it passes a point for the n-th time. CSEQ_FAULT=point:n:worker kills only the worker with this number.
 *
 * Include this header before cseq_ring.h. Release builds have no fault points.
 */
#ifndef CSEQ_FAULT_H
#define CSEQ_FAULT_H

/* If 1, unused memory is overwritten. */
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

/* The passes left until the process dies, or -1 until the environment is read. Only workers are killed. */
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
