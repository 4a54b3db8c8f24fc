/* A forked process gets private copies of the shared memory that is in use, or keeps it in use.
 *
 * A forked child has a copy of its parent's private memory, and shares its shared memory. Batches in
 * use lie in shared memory, which the parent and its workers write to again; so the child gets a
 * private copy of them, at the same addresses.
 *
 *     prepare   the forking thread copies what is in use into private memory
 *     child     moves the copies to where the originals are mapped
 *     parent    drops the copies
 *
 * Where cseq forks a worker, whose end it sees, leased slots are not copied but *kept*: each counts
 * one use more, under `lock`, and is not used again before that one has ended, too. The worker reads
 * the same memory as its parent.
 *
 * The parent's own mappings are not touched, so its other threads may go on writing there. Between
 * prepare and parent no lease begins or ends, since that takes `lock`, which is held. A child that
 * cannot have its copies ends: it must not run with the parent's memory.
 *
 * These handlers run inside fork() (pthread_atfork), also for a fork by a C library. They allocate
 * by mmap only; where slots are kept, by malloc.
 */
#ifndef CSEQ_FORK_H
#define CSEQ_FORK_H

#include <stdlib.h>

#include "cseq_list.h"
#include "cseq_map.h"

/* A leased slot. */
typedef struct {
    void *slots;    /* the object that it belongs to; each counted use has a reference */
    uint64_t slot;
    uint32_t *uses; /* 0: it is not leased yet */
} cseq_leased;

/* The slots that one forked worker keeps in use. */
typedef struct {
    cseq_leased *all;
    uint64_t count;
} cseq_kept;

/* Shared memory that is in use. */
typedef struct {
    cseq_link link;
    char *base;    /* the beginning of a mapping; 0: the span is in no list */
    uint64_t size; /* bytes of it that are in use */
    char *copy;    /* between prepare and child or parent; 0: there is none; `base`: it is kept */
    cseq_leased leased;
} cseq_span;

CSEQ_INLINE void cseq_span_add(cseq_list *spans, cseq_span *span, void *base, uint64_t size) {
    span->base = (char *)base;
    span->size = size;
    span->copy = 0;
    span->leased.uses = 0;
    cseq_list_add(spans, &span->link);
}

/* Takes a span out of its list; in a child, it is in none any more. */
CSEQ_INLINE void cseq_span_remove(cseq_list *spans, cseq_span *span) {
    cseq_list_lock(spans);
    if (span->base) {
        cseq_list_unlink(spans, &span->link);
        span->base = 0;
    }
    cseq_list_unlock(spans);
}

/* From now on, a lease has this memory: a worker that is forked can keep it in use. */
CSEQ_INLINE void cseq_span_lease(cseq_list *spans, cseq_span *span, void *slots, uint64_t slot,
                                 uint32_t *uses) {
    cseq_list_lock(spans);
    span->leased.slots = slots;
    span->leased.slot = slot;
    span->leased.uses = uses;
    cseq_list_unlock(spans);
}

#if !defined(_WIN32)

CSEQ_INLINE uint64_t cseq_whole_pages(uint64_t size) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* A private copy of `size` bytes, or 0. */
CSEQ_INLINE char *cseq_fork_copy(const char *base, uint64_t size) {
    void *copy = mmap(0, (size_t)cseq_whole_pages(size), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON, -1, 0);
    return copy == MAP_FAILED ? 0 : (char *)memcpy(copy, base, (size_t)size);
}

CSEQ_INLINE void cseq_fork_drop(char *copy, uint64_t size) {
    if (copy) munmap(copy, (size_t)cseq_whole_pages(size));
}

/* In the child: put the copy in the original's place, or end. */
CSEQ_INLINE void cseq_fork_put(char *base, uint64_t size, char *copy) {
    static const char message[] =
        "cseq: a forked process ends: there is no memory for its copy of the batches in use\n";
    if (copy) {
        size_t nbytes = (size_t)cseq_whole_pages(size);
#if defined(__linux__)
        if (mremap(copy, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, base) == (void *)base) return;
#else
        void *p = mmap(base, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
        if (p == (void *)base) {
            memcpy(base, copy, (size_t)size);
            munmap(copy, nbytes);
            return;
        }
#endif
    }
    if (write(2, message, sizeof message - 1) < 0) _exit(2);
    _exit(1);
}

/* `kept`, empty: gets the slots that are kept; 0, or without memory for it: all are copied. */
CSEQ_INLINE void cseq_spans_prepare(cseq_list *spans, cseq_kept *kept) {
    uint64_t count = 0;
    cseq_list_lock(spans);
    if (kept) {
        for (cseq_link *link = spans->first; link; link = link->after)
            count += ((cseq_span *)link)->leased.uses != 0;
        kept->all = count ? (cseq_leased *)malloc((size_t)count * sizeof *kept->all) : 0;
    }
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        if (kept && kept->all && span->leased.uses) {
            cseq_add_sc_u32(span->leased.uses, 1);
            kept->all[kept->count++] = span->leased;
            span->copy = span->base;
        } else {
            span->copy = cseq_fork_copy(span->base, span->size);
        }
    }
}

CSEQ_INLINE void cseq_spans_parent(cseq_list *spans) {
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        if (span->copy != span->base) cseq_fork_drop(span->copy, span->size);
        span->copy = 0;
    }
    cseq_list_unlock(spans);
}

CSEQ_INLINE void cseq_spans_child(cseq_list *spans) {
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        if (span->copy != span->base) cseq_fork_put(span->base, span->size, span->copy);
        span->base = 0; /* private from now on, or kept: the child's own forks copy nothing */
    }
    spans->first = 0;
    cseq_list_unlock(spans);
}

#endif
#endif
