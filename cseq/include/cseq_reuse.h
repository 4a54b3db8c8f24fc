/* An allocator for large arrays in worker threads. It reuses the memory of arrays that the loop dropped.
 *
 * malloc unmaps freed blocks or trims the heap, and the system clears the pages of every new block. Because a
 * thread can replace NumPy's data allocator (NEP 49), this allocator keeps freed blocks for later arrays of
 * the same size. The newest block is reused first.
 *
 * Blocks are allocated by NumPy's own allocator with a rounded size. When NumPy frees the memory of an array,
 * it passes the size of the array. If code has reduced the array's shape, this size is too small. This is
 * safe, because the block is then kept for arrays of that size, or freed. NumPy's own cache of small blocks
 * also relies on this.
 *
 * Any thread can free an array. The thread that holds `lock` updates the table of free blocks in a few
 * instructions without the interpreter. An allocation never waits for the lock. If the lock is held, which
 * can only happen without a GIL, the thread uses NumPy's own allocator.
 */
#ifndef CSEQ_REUSE_H
#define CSEQ_REUSE_H

#include <string.h>

#include "cseq_allocator.h"
#include "cseq_atomic.h"

/* Smallest block to keep and maximum size of all free blocks, in bytes, and maximum number of free blocks. */
#define CSEQ_REUSE_LEAST ((size_t)128 << 10)
#define CSEQ_REUSE_MOST ((size_t)128 << 20)
#define CSEQ_REUSE_BLOCKS 128u

/* `below` is NumPy's own allocator. The words after `lock` belong to the thread that has set it to 1. No
 * blocks are kept if `threads`, the number of threads that make arrays, is 0. `blocks` are the `count` free
 * blocks, newest last, of `nbytes` bytes in total. */
typedef struct {
    cseq_allocator below;

    uint32_t lock, threads, count;
    size_t nbytes;
    struct {
        void *p;
        size_t size;
    } blocks[CSEQ_REUSE_BLOCKS];
} cseq_reuse;

/* Round up in steps of an eighth, so that batches of padded samples can share blocks. */
CSEQ_INLINE size_t cseq_reuse_room(size_t size) {
    size_t step = CSEQ_REUSE_LEAST / 8;
    if (size < CSEQ_REUSE_LEAST || size > CSEQ_REUSE_MOST) return size;
    while (step * 16 <= size) step *= 2;
    return (size + step - 1) & ~(step - 1);
}

CSEQ_INLINE int cseq_reuse_try(cseq_reuse *r) { return cseq_cas_sc_u32(&r->lock, 0, 1); }

CSEQ_INLINE void cseq_reuse_unlock(cseq_reuse *r) { cseq_store_rel_u32(&r->lock, 0); }

/* The caller must hold the lock. */
CSEQ_INLINE void *cseq_reuse_remove(cseq_reuse *r, uint32_t k) {
    void *p = r->blocks[k].p;
    r->nbytes -= r->blocks[k].size;
    memmove(&r->blocks[k], &r->blocks[k + 1], (--r->count - k) * sizeof r->blocks[0]);
    return p;
}

/* Free the oldest blocks until one of this size fits. The caller must hold the lock. */
CSEQ_INLINE void cseq_reuse_trim(cseq_reuse *r, size_t size) {
    while (r->count && (r->count == CSEQ_REUSE_BLOCKS || r->nbytes > CSEQ_REUSE_MOST - size)) {
        size_t oldest = r->blocks[0].size;
        r->below.free(r->below.ctx, cseq_reuse_remove(r, 0), oldest);
    }
}

/* Return a free block of this size, or NULL. */
CSEQ_INLINE void *cseq_reuse_find(cseq_reuse *r, size_t room) {
    void *p = 0;
    if (room < CSEQ_REUSE_LEAST || !cseq_reuse_try(r)) return 0;
    for (uint32_t k = r->count; k-- > 0 && !p;)
        if (r->blocks[k].size == room) p = cseq_reuse_remove(r, k);
    cseq_reuse_unlock(r);
    return p;
}

CSEQ_INLINE void *cseq_reuse_malloc(void *ctx, size_t size) {
    cseq_reuse *r = (cseq_reuse *)ctx;
    size_t room = cseq_reuse_room(size);
    void *p = cseq_reuse_find(r, room);
    return p ? p : r->below.malloc(r->below.ctx, room);
}

CSEQ_INLINE void *cseq_reuse_calloc(void *ctx, size_t count, size_t size) {
    cseq_reuse *r = (cseq_reuse *)ctx;
    if (size && count > (size_t)-1 / size) return 0;
    size_t room = cseq_reuse_room(count * size);
    void *p = cseq_reuse_find(r, room);
    return p ? memset(p, 0, count * size) : r->below.calloc(r->below.ctx, 1, room);
}

CSEQ_INLINE void *cseq_reuse_realloc(void *ctx, void *p, size_t size) {
    cseq_reuse *r = (cseq_reuse *)ctx;
    return r->below.realloc(r->below.ctx, p, cseq_reuse_room(size));
}

CSEQ_INLINE void cseq_reuse_free(void *ctx, void *p, size_t size) {
    cseq_reuse *r = (cseq_reuse *)ctx;
    size_t room = cseq_reuse_room(size);
    if (p && room >= CSEQ_REUSE_LEAST && room <= CSEQ_REUSE_MOST && cseq_reuse_try(r)) {
        if (r->threads) {
            cseq_reuse_trim(r, room);
            r->blocks[r->count].p = p;
            r->blocks[r->count++].size = room;
            r->nbytes += room;
            p = 0;
        }
        cseq_reuse_unlock(r);
    }
    if (p) r->below.free(r->below.ctx, p, room);
}

/* Count a thread that starts or stops making arrays. The last one to stop frees all blocks. Waiting for the
 * lock is safe, because its holder does not need the interpreter. */
CSEQ_INLINE void cseq_reuse_count_thread(cseq_reuse *r, int begins) {
    while (!cseq_reuse_try(r)) {
    }
    if (begins) {
        r->threads++;
    } else if (r->threads && !--r->threads) {
        cseq_reuse_trim(r, CSEQ_REUSE_MOST);
    }
    cseq_reuse_unlock(r);
}

/* Discard the table in a forked process. The table may be half updated, so the blocks stay allocated. */
CSEQ_INLINE void cseq_reuse_forget(cseq_reuse *r) {
    r->threads = r->count = 0;
    r->nbytes = 0;
    cseq_reuse_unlock(r);
}

#endif
