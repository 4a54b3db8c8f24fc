/* NumPy's PyDataMemAllocator (NEP 49), declared without the NumPy headers. */
#ifndef CSEQ_ALLOCATOR_H
#define CSEQ_ALLOCATOR_H

#include <stddef.h>

typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t size);
    void *(*realloc)(void *ctx, void *p, size_t size);
    void (*free)(void *ctx, void *p, size_t size);
} cseq_allocator;

#endif
