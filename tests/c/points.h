/* The ring with a point before every atomic operation: where a test yields, stops or dies.
 *
 * The shipped header is compiled as it is; macros between cseq_atomic.h and cseq_ring.h put
 * themselves around its operations. Include this instead of cseq_ring.h, and define
 *
 *   point(place)     called before the operation; `place` is the ring's function
 *   ring_wait, ring_wake                          what the ring sleeps and wakes with
 *   ON_LOAD, ON_STORE, ON_RMW                     optional: a model of the memory (ring_explore.c)
 *
 * -DM_… weakens one thing. Every such mutant must be caught: see run.sh.
 */
#ifndef CSEQ_POINTS_H
#define CSEQ_POINTS_H

#include <string.h>

#include "cseq_atomic.h"
#include "cseq_wait.h"

static void point(const char *place);
static void ring_wait(uint32_t *word, uint32_t seen, uint64_t ns, int shared);
static void ring_wake(uint32_t *word, int shared);

#ifndef ON_LOAD
#define ON_LOAD(p, loaded) (loaded)
#define ON_STORE(p, v, store) (store)
#define ON_RMW() ((void)0)
#endif

#define PLACE(name) (strcmp(place, name) == 0)

/* ── loads ──────────────────────────────────────────────────────────────────────────────── */

CSEQ_INLINE uint32_t point_load_rlx_u32(const char *place, const uint32_t *p) {
    point(place);
    return ON_LOAD(p, cseq_load_rlx_u32(p));
}
CSEQ_INLINE uint32_t point_load_acq_u32(const char *place, const uint32_t *p) {
    point(place);
    return ON_LOAD(p, cseq_load_acq_u32(p));
}
CSEQ_INLINE uint32_t point_load_sc_u32(const char *place, const uint32_t *p) {
    point(place);
    return ON_LOAD(p, cseq_load_sc_u32(p));
}
CSEQ_INLINE uint64_t point_load_sc_u64(const char *place, const uint64_t *p) {
    point(place);
#if defined(M_RELAXED_LOAD) || defined(M_RELAXED_CLAIM)
    return ON_LOAD(p, cseq_load_rlx_u64(p));
#else
    return ON_LOAD(p, cseq_load_sc_u64(p));
#endif
}

/* ── stores ─────────────────────────────────────────────────────────────────────────────── */

CSEQ_INLINE void point_store_rlx_u32(const char *place, uint32_t *p, uint32_t v) {
    point(place);
#ifdef M_NO_REWIND
    if (PLACE("cseq_ring_repost")) return;
#endif
    ON_STORE(p, v, cseq_store_rlx_u32(p, v));
}
CSEQ_INLINE void point_store_rel_u64(const char *place, uint64_t *p, uint64_t v) {
    point(place);
    ON_STORE(p, v, cseq_store_rel_u64(p, v));
}

/* ── reads that write ───────────────────────────────────────────────────────────────────── */

CSEQ_INLINE uint32_t point_swap_sc_u32(const char *place, uint32_t *p, uint32_t v) {
    point(place);
#ifdef M_NO_FLAG
    if (PLACE("cseq_gate_enter")) return 0;
#endif
#ifdef M_PLAIN_FLAG
    if (PLACE("cseq_gate_enter")) {
        ON_STORE(p, v, cseq_store_rlx_u32(p, v));
        return 0;
    }
#endif
#ifdef M_KNOCK_ORDER
    if (PLACE("cseq_gate_notify")) return cseq_load_sc_u32(p);
#endif
    ON_RMW();
    return cseq_swap_sc_u32(p, v);
}
CSEQ_INLINE uint64_t point_swap_sc_u64(const char *place, uint64_t *p, uint64_t v) {
    point(place);
#ifdef M_PLAIN_PUBLISH
    ON_STORE(p, v, cseq_store_rel_u64(p, v));
    return 0;
#elif defined(M_RELAXED_PUBLISH)
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
#else
    ON_RMW();
    return cseq_swap_sc_u64(p, v);
#endif
}
CSEQ_INLINE uint32_t point_add_sc_u32(const char *place, uint32_t *p, uint32_t v) {
    point(place);
#ifdef M_NO_EVENT
    if (PLACE("cseq_gate_notify")) return 0;
#endif
#ifdef M_NO_ALARM
    if (PLACE("cseq_gate_notify_all")) return 0;
#endif
    ON_RMW();
    return cseq_add_sc_u32(p, v);
}
CSEQ_INLINE int point_cas_sc_u64(const char *place, uint64_t *p, uint64_t expected,
                                 uint64_t desired) {
    point(place);
#ifdef M_NO_OWNER
    if (PLACE("cseq_ring_claim")) desired &= ~(uint64_t)0xffff00;
#endif
#ifdef M_NO_CAS
    if (ON_LOAD(p, cseq_load_sc_u64(p)) != expected) return 0;
    point(place);
    ON_RMW();
    cseq_swap_sc_u64(p, desired);
    return 1;
#elif defined(M_RELAXED_CLAIM)
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
#else
    ON_RMW();
    return cseq_cas_sc_u64(p, expected, desired);
#endif
}

/* ── sleeping and waking ────────────────────────────────────────────────────────────────── */

CSEQ_INLINE void point_wait(const char *place, uint32_t *word, uint32_t seen, uint64_t ns,
                            int shared) {
    point(place);
    ring_wait(word, seen, ns, shared);
}
CSEQ_INLINE void point_wake(const char *place, uint32_t *word, int shared) {
    point(place);
#ifdef M_NO_WAKE
    if (PLACE("cseq_gate_notify")) return;
#endif
    ring_wake(word, shared);
#ifdef M_KNOCK_ORDER
    point(place);
    if (PLACE("cseq_gate_notify")) cseq_swap_sc_u32(word + 1, 0); /* asleep */
#endif
}

/* Only from here on, so that the functions above call the real ones. The operations on words that
 * one runner alone uses (started_ns, its meter) are left out. */
#include "cseq_meter.h"

#define cseq_load_rlx_u32(p) point_load_rlx_u32(__func__, p)
#define cseq_load_acq_u32(p) point_load_acq_u32(__func__, p)
#define cseq_load_sc_u32(p) point_load_sc_u32(__func__, p)
#define cseq_load_sc_u64(p) point_load_sc_u64(__func__, p)
#define cseq_store_rlx_u32(p, v) point_store_rlx_u32(__func__, p, v)
#define cseq_store_rel_u64(p, v) point_store_rel_u64(__func__, p, v)
#define cseq_swap_sc_u32(p, v) point_swap_sc_u32(__func__, p, v)
#define cseq_swap_sc_u64(p, v) point_swap_sc_u64(__func__, p, v)
#define cseq_add_sc_u32(p, v) point_add_sc_u32(__func__, p, v)
#define cseq_cas_sc_u64(p, e, d) point_cas_sc_u64(__func__, p, e, d)
#define cseq_wait(word, seen, ns, shared) point_wait(__func__, word, seen, ns, shared)
#define cseq_wake(word, shared) point_wake(__func__, word, shared)

#include "cseq_fault.h"
#include "cseq_ring.h"

#endif
