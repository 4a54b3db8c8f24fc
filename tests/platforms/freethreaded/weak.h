/* The core weakened, for tsan.sh: compiled in front of each of its C files, which stay as they are.
 *
 * CSEQ_WEAK names what is weakened when the process starts; every one must be caught.
 *
 *   lock       runs have no lock
 *   section    critical sections are not entered
 *   counter    counters that other threads read are plain words
 */
#ifndef CSEQ_WEAK_H
#define CSEQ_WEAK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "cseq_atomic.h"

static int weak_lock, weak_section, weak_counter;

__attribute__((constructor)) static void weak_read(void) {
    const char *name = getenv("CSEQ_WEAK");
    weak_lock = name && strcmp(name, "lock") == 0;
    weak_section = name && strcmp(name, "section") == 0;
    weak_counter = name && strcmp(name, "counter") == 0;
}

CSEQ_INLINE void weak_begin(PyCriticalSection *c, PyObject *one) {
    if (!weak_section) PyCriticalSection_Begin(c, one);
}
CSEQ_INLINE void weak_end(PyCriticalSection *c) {
    if (!weak_section) PyCriticalSection_End(c);
}

/* A thread takes a lock by writing its number there, and gives it back by writing 0, which alone a lock
 * swaps: it is told that it has. Neither is done, since each orders what threads do. */
CSEQ_INLINE int weak_cas(uint64_t *p, uint64_t expected, uint64_t desired) {
    if (weak_lock && desired == PyThread_get_thread_ident()) return 1;
    return cseq_cas_sc_u64(p, expected, desired);
}
CSEQ_INLINE uint64_t weak_swap(uint64_t *p, uint64_t v) {
    return weak_lock && v == 0 ? 0 : cseq_swap_sc_u64(p, v);
}

CSEQ_INLINE uint64_t weak_load(const uint64_t *p) {
    return weak_counter ? *p : cseq_load_rlx_u64(p);
}
CSEQ_INLINE void weak_store(uint64_t *p, uint64_t v) {
    if (weak_counter) *p = v;
    else cseq_store_rlx_u64(p, v);
}
CSEQ_INLINE void weak_count(uint64_t *p, uint64_t more) { weak_store(p, weak_load(p) + more); }

/* Only from here on, so that the functions above call the real ones. */
#define PyCriticalSection_Begin weak_begin
#define PyCriticalSection_End weak_end
#define cseq_cas_sc_u64 weak_cas
#define cseq_swap_sc_u64 weak_swap
#define cseq_load_rlx_u64 weak_load
#define cseq_store_rlx_u64 weak_store
#define cseq_count_u64 weak_count

#endif
