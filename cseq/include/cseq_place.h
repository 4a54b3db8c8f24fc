/* Arrays that numpy allocates in the batch's slot, transparently to the indexer.
 *
 * numpy's data allocator can be replaced (NEP 49). In a worker process, the large allocations of one
 * ticket are numbered; those whose numbers were part of the last batch are served from the ticket's
 * slot. Everything else goes to numpy's own allocator.
 *
 * The guarantee: allocations in a slot are counted until they are freed, so it is known whether the
 * indexer has kept an array. If so, the worker keeps the slot (cseq_place_end), and publishes a
 * copy of the batch in another one.
 *
 * One thread at a time, with the GIL.
 */
#ifndef CSEQ_PLACE_H
#define CSEQ_PLACE_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cseq_allocator.h"
#include "cseq_atomic.h"

#define CSEQ_PLACE_LEAST 65536u /* bytes; smaller allocations are not numbered */
#define CSEQ_PLACE_SEEN 64u     /* of these, in one ticket; a word has as many bits */
#define CSEQ_PLACE_ALIGN 64u    /* bytes; a cache line, and the widest vector register */

/* A slot, or the used part of one, from which allocations were served. */
typedef struct {
    char *base;
    uint64_t size; /* bytes */
    uint64_t live; /* allocations that were not freed */
    void *owner;   /* what keeps it mapped */
} cseq_region;

typedef struct {
    cseq_allocator below;         /* numpy's own */
    void (*release)(void *owner); /* called when no allocation is left in its region */

    int active;       /* the indexer is making a batch, and may allocate in `at` */
    cseq_region at;  /* its slot */
    uint64_t used;   /* bytes of that, from its beginning */
    uint32_t count;  /* large allocations of this ticket */
    uint64_t wanted; /* bit k: number k was part of the last batch */
    struct {
        char *p;
        uint64_t size;
    } seen[CSEQ_PLACE_SEEN];

    cseq_region *kept; /* slots of earlier tickets that are still in use */
    uint32_t kept_count, kept_room;
} cseq_place;

/* Memory of the slot, or NULL if there is no room. */
CSEQ_INLINE void *cseq_place_take(cseq_place *p, uint64_t size) {
    uint64_t offset = (p->used + (CSEQ_PLACE_ALIGN - 1)) & ~(uint64_t)(CSEQ_PLACE_ALIGN - 1);
    if (offset > p->at.size || size > p->at.size - offset) return 0;
    p->used = offset + size;
    p->at.live++;
    return p->at.base + offset;
}

/* The region that an address lies in, or NULL. */
CSEQ_INLINE cseq_region *cseq_place_find(cseq_place *p, const void *address) {
    const char *a = (const char *)address;
    if (p->at.live && a >= p->at.base && a < p->at.base + p->at.size) return &p->at;
    for (uint32_t k = 0; k < p->kept_count; k++) {
        cseq_region *r = &p->kept[k];
        if (a >= r->base && a < r->base + r->size) return r;
    }
    return 0;
}

/* Whether an allocation is one to number. */
CSEQ_INLINE int cseq_place_counts(const cseq_place *p, size_t size) {
    return p->active && size >= CSEQ_PLACE_LEAST && p->count < CSEQ_PLACE_SEEN;
}

/* Number an allocation; its memory, if it is served from the slot. */
CSEQ_INLINE void *cseq_place_next(cseq_place *p, size_t size) {
    uint32_t k = p->count++;
    return p->wanted >> k & 1 ? cseq_place_take(p, size) : 0;
}

/* Note where the allocation that was numbered last is; NULL: there was no memory. */
CSEQ_INLINE void *cseq_place_note(cseq_place *p, void *made, size_t size) {
    p->seen[p->count - 1].p = (char *)made;
    p->seen[p->count - 1].size = made ? size : 0;
    return made;
}

CSEQ_INLINE void *cseq_place_malloc(void *ctx, size_t size) {
    cseq_place *p = (cseq_place *)ctx;
    if (!cseq_place_counts(p, size)) return p->below.malloc(p->below.ctx, size);
    void *made = cseq_place_next(p, size);
    return cseq_place_note(p, made ? made : p->below.malloc(p->below.ctx, size), size);
}

/* Memory that is not the slot's is cleared by the allocator, which knows what is zero already. */
CSEQ_INLINE void *cseq_place_calloc(void *ctx, size_t count, size_t size) {
    cseq_place *p = (cseq_place *)ctx;
    if ((size && count > (size_t)-1 / size) || !cseq_place_counts(p, count * size))
        return p->below.calloc(p->below.ctx, count, size);
    void *made = cseq_place_next(p, count * size);
    made = made ? memset(made, 0, count * size) : p->below.calloc(p->below.ctx, count, size);
    return cseq_place_note(p, made, count * size);
}

CSEQ_INLINE void cseq_place_free(void *ctx, void *address, size_t size) {
    cseq_place *p = (cseq_place *)ctx;
    cseq_region *r = cseq_place_find(p, address);
    if (!r) {
        p->below.free(p->below.ctx, address, size);
        return;
    }
    r->live--;
    if (r == &p->at) {
        /* The last allocation: a temporary, whose memory the next one can have. */
        if ((char *)address + size == r->base + p->used) p->used = (uint64_t)((char *)address - r->base);
    } else if (!r->live) {
        void *owner = r->owner;
        *r = p->kept[--p->kept_count];
        p->release(owner);
    }
}

CSEQ_INLINE void *cseq_place_realloc(void *ctx, void *address, size_t size) {
    cseq_place *p = (cseq_place *)ctx;
    cseq_region *r = cseq_place_find(p, address);
    if (!r) return p->below.realloc(p->below.ctx, address, size);
    void *made = p->below.malloc(p->below.ctx, size);
    if (!made) return 0;
    uint64_t rest = (uint64_t)(r->base + r->size - (char *)address); /* at least its own size */
    memcpy(made, address, size < rest ? size : (size_t)rest);
    cseq_place_free(ctx, address, 0);
    return made;
}

/* Serve nothing from the slot any more; return how many allocations in it are live. Its owner is
 * released when there are none. */
CSEQ_INLINE uint64_t cseq_place_end(cseq_place *p) {
    cseq_region left = p->at;
    memset(&p->at, 0, sizeof p->at);
    p->active = 0;
    if (left.live) {
        left.size = p->used;
        p->kept[p->kept_count++] = left; /* cseq_place_begin has made room */
    } else if (left.owner) {
        p->release(left.owner);
    }
    return left.live;
}

/* Serve the next allocations from an empty slot. No allocation may be live in the slot before.
 * 0, or an errno; then `owner` is not taken over. */
CSEQ_INLINE int cseq_place_begin(cseq_place *p, void *base, uint64_t size, void *owner) {
    if (p->kept_count == p->kept_room) {
        uint32_t room = p->kept_room ? 2 * p->kept_room : 16;
        void *more = realloc(p->kept, room * sizeof(cseq_region));
        if (!more) return ENOMEM;
        p->kept = (cseq_region *)more;
        p->kept_room = room;
    }
    (void)cseq_place_end(p);
    p->at.base = (char *)base;
    p->at.size = size;
    p->at.owner = owner;
    p->used = 0;
    p->count = 0;
    p->active = 1;
    return 0;
}

/* Whether allocations are live in an earlier ticket's slot that is mapped at `base`. */
CSEQ_INLINE int cseq_place_holds(const cseq_place *p, const void *base) {
    for (uint32_t k = 0; k < p->kept_count; k++)
        if (p->kept[k].base == (const char *)base) return 1;
    return 0;
}

/* The batch holds this address: the allocation that it lies in is wanted next time. */
CSEQ_INLINE void cseq_place_learn(cseq_place *p, const void *address, uint64_t *wanted) {
    const char *a = (const char *)address;
    for (uint32_t k = p->count; k-- > 0;) { /* the latest: an earlier one may have been freed */
        if (a >= p->seen[k].p && a < p->seen[k].p + p->seen[k].size) {
            *wanted |= (uint64_t)1 << k;
            return;
        }
    }
}

#endif
