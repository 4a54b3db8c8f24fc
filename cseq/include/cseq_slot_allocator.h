/* An allocator that makes NumPy create arrays directly in a batch's slot, without changes to the indexer.
 *
 * NumPy's data allocator can be replaced (NEP 49). In a worker process, the large allocations of each ticket
 * are numbered. If the allocation with the same number was part of the last batch, the new one is served from
 * the slot of the ticket. All other allocations are passed to NumPy's own allocator.
 *
 * Allocations in a slot are counted until they are freed, so the worker can detect that the indexer has kept
 * an array. In this case, the worker keeps the slot (cseq_slot_stop) and publishes a copy of the batch in
 * another slot.
 *
 * Only one thread at a time may use the allocator, with the GIL.
 */
#ifndef CSEQ_SLOT_ALLOCATOR_H
#define CSEQ_SLOT_ALLOCATOR_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cseq_allocator.h"
#include "cseq_atomic.h"

/* Smaller allocations are not numbered, and the numbers of a ticket are limited to the bits of a word. In a
 * slot, allocations are aligned to cache lines, which are at least as wide as vector registers. */
#define CSEQ_SLOT_LEAST 65536u
#define CSEQ_SLOT_NUMBERED 64u
#define CSEQ_SLOT_ALIGN 64u

/* A slot with `live` allocations that have not been freed yet. `owner` keeps the slot mapped. */
typedef struct {
    char *base;
    uint64_t size, live;
    void *owner;
} cseq_region;

/* `below` is NumPy's own allocator. `release` is called with the owner of a region that has no more
 * allocations.
 *
 * While `active` is set, the indexer makes a batch and can allocate in `slot`, whose first `used` bytes are
 * in use. `made` contains the `count` large allocations of this ticket. Bit k of `wanted` is set if allocation
 * k was part of the last batch. `kept` contains slots of earlier tickets that are still in use. */
typedef struct {
    cseq_allocator below;
    void (*release)(void *owner);

    int active;
    cseq_region slot;
    uint64_t used;
    uint32_t count;
    uint64_t wanted;
    struct {
        char *p;
        uint64_t size;
    } made[CSEQ_SLOT_NUMBERED];

    cseq_region *kept;
    uint32_t kept_count, kept_room;
} cseq_slot_allocator;

/* Allocate memory in the slot, or return NULL. */
CSEQ_INLINE void *cseq_slot_carve(cseq_slot_allocator *p, uint64_t size) {
    uint64_t offset = (p->used + (CSEQ_SLOT_ALIGN - 1)) & ~(uint64_t)(CSEQ_SLOT_ALIGN - 1);
    if (offset > p->slot.size || size > p->slot.size - offset) return 0;
    p->used = offset + size;
    p->slot.live++;
    return p->slot.base + offset;
}

/* Return the region of an address, or NULL. */
CSEQ_INLINE cseq_region *cseq_slot_region_of(cseq_slot_allocator *p, const void *address) {
    const char *a = (const char *)address;
    if (p->slot.live && a >= p->slot.base && a < p->slot.base + p->slot.size) return &p->slot;
    for (uint32_t k = 0; k < p->kept_count; k++) {
        cseq_region *r = &p->kept[k];
        if (a >= r->base && a < r->base + r->size) return r;
    }
    return 0;
}

CSEQ_INLINE int cseq_slot_is_numbered(const cseq_slot_allocator *p, size_t size) {
    return p->active && size >= CSEQ_SLOT_LEAST && p->count < CSEQ_SLOT_NUMBERED;
}

/* Number an allocation. Return memory in the slot, or NULL. */
CSEQ_INLINE void *cseq_slot_next(cseq_slot_allocator *p, size_t size) {
    uint32_t k = p->count++;
    return p->wanted >> k & 1 ? cseq_slot_carve(p, size) : 0;
}

/* Record the address of the last numbered allocation, or NULL. */
CSEQ_INLINE void *cseq_slot_note(cseq_slot_allocator *p, void *made, size_t size) {
    p->made[p->count - 1].p = (char *)made;
    p->made[p->count - 1].size = made ? size : 0;
    return made;
}

CSEQ_INLINE void *cseq_slot_malloc(void *ctx, size_t size) {
    cseq_slot_allocator *p = (cseq_slot_allocator *)ctx;
    if (!cseq_slot_is_numbered(p, size)) return p->below.malloc(p->below.ctx, size);
    void *made = cseq_slot_next(p, size);
    return cseq_slot_note(p, made ? made : p->below.malloc(p->below.ctx, size), size);
}

/* NumPy's own allocator knows which memory is already zero. */
CSEQ_INLINE void *cseq_slot_calloc(void *ctx, size_t count, size_t size) {
    cseq_slot_allocator *p = (cseq_slot_allocator *)ctx;
    if ((size && count > (size_t)-1 / size) || !cseq_slot_is_numbered(p, count * size))
        return p->below.calloc(p->below.ctx, count, size);
    void *made = cseq_slot_next(p, count * size);
    made = made ? memset(made, 0, count * size) : p->below.calloc(p->below.ctx, count, size);
    return cseq_slot_note(p, made, count * size);
}

/* If the last allocation in the slot is freed, it was temporary, and its memory can be reused. */
CSEQ_INLINE void cseq_slot_free(void *ctx, void *address, size_t size) {
    cseq_slot_allocator *p = (cseq_slot_allocator *)ctx;
    cseq_region *r = cseq_slot_region_of(p, address);
    if (!r) {
        p->below.free(p->below.ctx, address, size);
        return;
    }
    r->live--;
    if (r == &p->slot) {
        if ((char *)address + size == r->base + p->used) p->used = (uint64_t)((char *)address - r->base);
    } else if (!r->live) {
        void *owner = r->owner;
        *r = p->kept[--p->kept_count];
        p->release(owner);
    }
}

/* The size of the allocation is unknown, so copy at most until the end of the region. */
CSEQ_INLINE void *cseq_slot_realloc(void *ctx, void *address, size_t size) {
    cseq_slot_allocator *p = (cseq_slot_allocator *)ctx;
    cseq_region *r = cseq_slot_region_of(p, address);
    if (!r) return p->below.realloc(p->below.ctx, address, size);
    void *made = p->below.malloc(p->below.ctx, size);
    if (!made) return 0;
    uint64_t rest = (uint64_t)(r->base + r->size - (char *)address);
    memcpy(made, address, size < rest ? size : (size_t)rest);
    cseq_slot_free(ctx, address, 0);
    return made;
}

/* Stop serving from the slot, and return how many allocations are live. If none are, the owner is released.
 * Otherwise, the slot is added to `kept`, where cseq_slot_serve has reserved space. */
CSEQ_INLINE uint64_t cseq_slot_stop(cseq_slot_allocator *p) {
    cseq_region left = p->slot;
    memset(&p->slot, 0, sizeof p->slot);
    p->active = 0;
    if (left.live) {
        left.size = p->used;
        p->kept[p->kept_count++] = left;
    } else if (left.owner) {
        p->release(left.owner);
    }
    return left.live;
}

/* Serve from a slot without live allocations. Return 0 or an errno. After an error, the caller keeps `owner`. */
CSEQ_INLINE int cseq_slot_serve(cseq_slot_allocator *p, void *base, uint64_t size, void *owner) {
    if (p->kept_count == p->kept_room) {
        uint32_t room = p->kept_room ? 2 * p->kept_room : 16;
        void *more = realloc(p->kept, room * sizeof(cseq_region));
        if (!more) return ENOMEM;
        p->kept = (cseq_region *)more;
        p->kept_room = room;
    }
    (void)cseq_slot_stop(p);
    p->slot.base = (char *)base;
    p->slot.size = size;
    p->slot.owner = owner;
    p->used = 0;
    p->count = 0;
    p->active = 1;
    return 0;
}

/* Return 1 if an earlier slot at `base` has live allocations. */
CSEQ_INLINE int cseq_slot_holds(const cseq_slot_allocator *p, const void *base) {
    for (uint32_t k = 0; k < p->kept_count; k++)
        if (p->kept[k].base == (const char *)base) return 1;
    return 0;
}

/* Mark the allocation with this address as wanted next time. If there are several, use the latest, because
 * earlier ones may have been freed. */
CSEQ_INLINE void cseq_slot_learn(cseq_slot_allocator *p, const void *address, uint64_t *wanted) {
    const char *a = (const char *)address;
    for (uint32_t k = p->count; k-- > 0;) {
        if (a >= p->made[k].p && a < p->made[k].p + p->made[k].size) {
            *wanted |= (uint64_t)1 << k;
            return;
        }
    }
}

#endif
