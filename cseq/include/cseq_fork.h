/* A forked process gets private copies of the shared memory that is in use.
 *
 * A forked child has a copy of its parent's private memory, and shares its shared memory. Batches in
 * use lie in shared memory, which the parent and its workers write to again; so the child gets a
 * private copy of them, at the same addresses.
 *
 *     prepare   the forking thread copies what is in use into private memory
 *     child     moves the copies to where the originals are mapped
 *     parent    drops the copies
 *
 * The parent's own mappings are not touched, so its other threads may go on writing there. Between
 * prepare and parent no lease begins or ends, since that takes `lock`, which is held. A child that
 * cannot have its copies ends: it must not run with the parent's memory.
 *
 * These handlers run inside fork() (pthread_atfork), also for a fork by a C library. They allocate
 * by mmap only.
 */
#ifndef CSEQ_FORK_H
#define CSEQ_FORK_H

#include "cseq_list.h"
#include "cseq_map.h"

/* Shared memory that is in use. */
typedef struct {
    cseq_link link;
    char *base;    /* the beginning of a mapping; 0: the span is in no list */
    uint64_t size; /* bytes of it that are in use */
    char *copy;    /* between prepare and child or parent; 0: there is none */
} cseq_span;

CSEQ_INLINE void cseq_span_add(cseq_list *spans, cseq_span *span, void *base, uint64_t size) {
    span->base = (char *)base;
    span->size = size;
    span->copy = 0;
    cseq_list_add(spans, &span->link);
}

/* Takes a span out of its list; in a child, it is in none any more. */
CSEQ_INLINE void cseq_span_remove(cseq_list *spans, cseq_span *span) {
    cseq_list_take(spans);
    if (span->base) {
        cseq_list_unlink(spans, &span->link);
        span->base = 0;
    }
    cseq_list_leave(spans);
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

CSEQ_INLINE void cseq_spans_prepare(cseq_list *spans) {
    cseq_list_take(spans);
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        span->copy = cseq_fork_copy(span->base, span->size);
    }
}

CSEQ_INLINE void cseq_spans_parent(cseq_list *spans) {
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        cseq_fork_drop(span->copy, span->size);
        span->copy = 0;
    }
    cseq_list_leave(spans);
}

CSEQ_INLINE void cseq_spans_child(cseq_list *spans) {
    for (cseq_link *link = spans->first; link; link = link->after) {
        cseq_span *span = (cseq_span *)link;
        cseq_fork_put(span->base, span->size, span->copy);
        span->base = 0; /* private from now on: the child's own forks copy it as usual */
    }
    spans->first = 0;
    cseq_list_leave(spans);
}

#endif
#endif
