"""Declarations from the headers in `include/`, for all modules of the core."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, intptr_t, uint32_t, uint64_t


cdef extern from "cseq_atomic.h" nogil:
    uint32_t cseq_swap_sc_u32(uint32_t* p, uint32_t v) noexcept
    uint64_t cseq_swap_sc_u64(uint64_t* p, uint64_t v) noexcept
    int cseq_cas_sc_u32(uint32_t* p, uint32_t expected, uint32_t desired) noexcept
    int cseq_cas_sc_u64(uint64_t* p, uint64_t expected, uint64_t desired) noexcept
    void cseq_store_rel_u32(uint32_t* p, uint32_t v) noexcept
    void cseq_store_rlx_u64(uint64_t* p, uint64_t v) noexcept
    void cseq_store_rlx_u32(uint32_t* p, uint32_t v) noexcept
    uint64_t cseq_load_rlx_u64(const uint64_t* p) noexcept
    uint64_t cseq_load_acq_u64(const uint64_t* p) noexcept
    uint64_t cseq_add_sc_u64(uint64_t* p, uint64_t v) noexcept
    uint32_t cseq_add_sc_u32(uint32_t* p, uint32_t v) noexcept
    uint32_t cseq_load_acq_u32(const uint32_t* p) noexcept
    uint32_t cseq_load_sc_u32(const uint32_t* p) noexcept
    uint32_t cseq_load_rlx_u32(const uint32_t* p) noexcept
    void cseq_count_u64(uint64_t* p, uint64_t more) noexcept


cdef extern from "cseq_wait.h" nogil:
    void cseq_wait_choose() noexcept
    void cseq_wait(uint32_t* word, uint32_t seen, uint64_t ns, int shared) noexcept
    void cseq_wake(uint32_t* word, int shared) noexcept
    uint64_t cseq_now_ns() noexcept


cdef extern from "cseq_fault.h" nogil:
    int CSEQ_POISON
    void CSEQ_POINT(const char* name) noexcept


cdef extern from "cseq_meter.h" nogil:
    enum:
        CSEQ_POLL

    ctypedef struct cseq_histogram:
        uint64_t sum

    ctypedef struct cseq_meter:
        uint64_t batches, samples, nbytes
        uint64_t since_ns, waited_ns, asleep_ns
        uint64_t start_ns, first_ns, behind_ns, early_ns
        uint64_t polled_ns, epochs
        cseq_histogram work, wait, gil

    void cseq_histogram_add(cseq_histogram* h, uint64_t ns) noexcept
    void cseq_meter_renew(cseq_meter* m) noexcept
    void cseq_meter_start_epoch(cseq_meter* m, uint64_t now) noexcept
    void cseq_meter_slept(cseq_meter* m, uint64_t before, uint64_t now) noexcept
    uint64_t cseq_meter_step(cseq_meter* m, uint64_t now, int first) noexcept
    void cseq_meter_read_system(cseq_meter* m, uint64_t now, int whole, int counts) noexcept
    void cseq_meter_poll(cseq_meter* m, uint64_t now, int whole, int counts) noexcept


cdef extern from "cseq_ring.h" nogil:
    enum:
        CSEQ_FIELDS
        CSEQ_NO_SLOT
        CSEQ_FREE
        CSEQ_POSTED
        CSEQ_INDEXING
        CSEQ_INDEXED
        CSEQ_CONVERTING
        CSEQ_READY
        CSEQ_NONE
        CSEQ_CLOSED

    ctypedef struct cseq_gate:
        uint32_t event, shared

    ctypedef struct cseq_stint:
        uint64_t started_ns, published_ns

    ctypedef struct cseq_cell:
        uint64_t word
        uint64_t epoch, batch, start, seed
        uint32_t count, parts, slot
        uint64_t capacity
        uint32_t stage, status
        uint64_t* record
        uint64_t* converted
        unsigned short* owner
        cseq_stint indexing, converting

    ctypedef struct cseq_ring:
        uint32_t capacity, batch_size, runners, calls, round, closed
        int64_t output
        cseq_gate* gate

    uint64_t cseq_ring_bytes(uint32_t capacity, uint32_t batch_size, uint32_t runners) noexcept
    void cseq_ring_init(cseq_ring* r, uint32_t capacity, uint32_t batch_size, uint32_t runners,
                        uint32_t calls, uint32_t shared) noexcept
    uint32_t cseq_ring_round(const cseq_ring* r) noexcept
    int cseq_ring_fits(const cseq_ring* r, uint64_t nbytes) noexcept
    cseq_cell* cseq_ring_cell(const cseq_ring* r, uint32_t cell) noexcept
    cseq_stint* cseq_cell_stint(cseq_cell* c, uint32_t stage) noexcept
    cseq_meter* cseq_ring_meter(const cseq_ring* r, uint32_t owner) noexcept
    int64_t* cseq_ring_indices(const cseq_ring* r, uint32_t cell) noexcept
    void cseq_gate_notify_all(cseq_gate* g) noexcept
    void cseq_gate_notify(cseq_gate* g) noexcept
    int cseq_ring_claim(cseq_ring* r, uint32_t stage, uint32_t owner) noexcept
    int cseq_ring_publish(cseq_ring* r, uint32_t cell, int next, int later) noexcept
    void cseq_ring_post(cseq_ring* r, uint32_t cell, uint64_t ticket) noexcept
    void cseq_ring_set_hints(cseq_ring* r, uint32_t cell) noexcept
    int cseq_ring_leaves(const cseq_ring* r, uint32_t stage, uint32_t owner) noexcept
    void cseq_ring_extend(cseq_ring* r, uint32_t cells) noexcept
    void cseq_ring_admit(cseq_ring* r, uint32_t count) noexcept
    void cseq_ring_set_spin(cseq_ring* r, uint32_t ns, uint32_t crew) noexcept
    int cseq_ring_expect(cseq_ring** rings, const uint32_t* cells, uint32_t count, uint32_t seen) noexcept
    int cseq_ring_await(cseq_ring* r, uint32_t stage, uint32_t owner, uint64_t ns) noexcept
    void cseq_ring_wait_ready(cseq_ring* r, int cell, uint32_t seen, uint64_t ns) noexcept
    int cseq_ring_state(const cseq_ring* r, uint32_t cell) noexcept
    int cseq_ring_ready(const cseq_ring* r, uint32_t cell) noexcept
    int cseq_ring_cancel_newest(cseq_ring* r, uint32_t cell) noexcept
    int cseq_ring_cancel(cseq_ring* r, uint32_t cell) noexcept
    void cseq_ring_free(cseq_ring* r, uint32_t cell) noexcept
    uint32_t cseq_ring_repost(cseq_ring* r, uint32_t owner, uint32_t* held, uint32_t status) noexcept
    uint32_t cseq_ring_notices(const cseq_ring* r) noexcept
    cseq_gate* cseq_ring_output(cseq_ring* r) noexcept
    void cseq_ring_wait_any(cseq_ring** rings, const uint32_t* cells, uint32_t count, uint32_t seen,
                            uint64_t ns) noexcept
    void cseq_ring_close(cseq_ring* r) noexcept
    int CSEQ_STATE(uint64_t word) noexcept
    uint32_t CSEQ_OWNER(uint64_t word) noexcept
    uint64_t CSEQ_TICKET(uint64_t word) noexcept


cdef extern from "cseq_turns.h" nogil:
    ctypedef struct cseq_turns:
        uint32_t on, holder, runners, between

    void cseq_turns_enter(cseq_turns* t, uint32_t runner) noexcept
    int cseq_turns_has(const cseq_turns* t, uint32_t runner) noexcept
    void cseq_turns_leave(cseq_turns* t, uint32_t runner) noexcept
    void cseq_turns_learn(cseq_turns* t, uint64_t before, uint64_t awake, uint64_t taken) noexcept


cdef extern from "cseq_feistel.h" nogil:
    enum:
        CSEQ_FEISTEL_LEAST
        CSEQ_PURPOSE_FEISTEL
        CSEQ_ROUNDS

    uint64_t CSEQ_NO_KEY

    ctypedef struct cseq_feistel:
        uint64_t n

    void cseq_feistel_init(cseq_feistel* f, uint64_t n, const uint64_t* words) noexcept
    void cseq_feistel_gather(const cseq_feistel* f, const int64_t* positions, uint64_t count, int64_t* out) noexcept
    void cseq_feistel_range(const cseq_feistel* f, uint64_t start, uint64_t count, int64_t* out) noexcept
    void cseq_derive_keyed(uint64_t seed, uint64_t epoch, uint64_t purpose, uint64_t key, uint64_t* words,
                           size_t count) noexcept
    uint64_t cseq_fold(uint64_t z, const uint64_t* words, size_t count) noexcept


cdef extern from "cseq_shuffle.h" nogil:
    enum:
        CSEQ_PURPOSE_SHUFFLE

    uint64_t CSEQ_IV, CSEQ_GOLDEN, CSEQ_MOST_TABLED
    void CSEQ_PREFETCH(const void* address) noexcept
    uint64_t cseq_mix(uint64_t v) noexcept
    uint64_t cseq_stream(uint64_t seed, uint64_t epoch, uint64_t purpose) noexcept
    uint64_t cseq_multiply(uint64_t a, uint64_t b, uint64_t* low) noexcept
    uint64_t cseq_bounded(uint64_t* s, uint64_t range) noexcept

    ctypedef struct cseq_order:
        uint64_t n, position, generation

    void cseq_derive(uint64_t seed, uint64_t epoch, uint64_t purpose, uint64_t* words, size_t count) noexcept

    uint64_t cseq_table_pages(uint64_t n) noexcept
    void cseq_order_init(cseq_order* order, uint64_t n, uint32_t* table, uint32_t* tags) noexcept
    void cseq_order_start(cseq_order* order, uint64_t seed, uint64_t epoch) noexcept
    uint64_t cseq_order_advance(cseq_order* order, uint64_t upto, uint64_t most) noexcept
    void cseq_order_copy(const cseq_order* order, uint64_t start, uint64_t count, int64_t* out) noexcept
    void cseq_permute(uint32_t* result, uint64_t n, uint64_t start, uint64_t end, uint64_t* state) noexcept


cdef extern from "cseq_map.h" nogil:
    int cseq_section(uint64_t nbytes) noexcept
    void* cseq_map(int fd, uint64_t offset, uint64_t nbytes, int own) noexcept
    uint64_t cseq_ram() noexcept
    void cseq_unmap(void* p, uint64_t nbytes) noexcept
    void cseq_close(int fd) noexcept
    int cseq_lift(int fd) noexcept
    int cseq_commit(int fd, uint64_t offset, uint64_t nbytes) noexcept
    int cseq_punch(int fd, uint64_t offset, uint64_t nbytes) noexcept
    void cseq_await_hangup(intptr_t socket) noexcept


cdef extern from "cseq_allocator.h":
    ctypedef struct cseq_allocator:
        pass


cdef extern from "cseq_slot_allocator.h":
    enum:
        LINE "CSEQ_SLOT_ALIGN"

    ctypedef struct cseq_region:
        char* base
        uint64_t size, live
        void* owner

    ctypedef struct cseq_slot_allocator:
        cseq_allocator below
        void (*release)(void* owner) noexcept
        int active
        cseq_region slot
        uint64_t used
        uint32_t count
        uint64_t wanted

    void* cseq_slot_malloc(void* ctx, size_t size) noexcept
    void* cseq_slot_calloc(void* ctx, size_t count, size_t size) noexcept
    void* cseq_slot_realloc(void* ctx, void* p, size_t size) noexcept
    void cseq_slot_free(void* ctx, void* p, size_t size) noexcept
    int cseq_slot_serve(cseq_slot_allocator* p, void* base, uint64_t size, void* owner) noexcept
    uint64_t cseq_slot_stop(cseq_slot_allocator* p) noexcept
    int cseq_slot_holds(const cseq_slot_allocator* p, const void* base) noexcept
    void cseq_slot_learn(cseq_slot_allocator* p, const void* address, uint64_t* wanted) noexcept


cdef extern from "cseq_reuse.h":
    ctypedef struct cseq_reuse:
        cseq_allocator below

    void* cseq_reuse_malloc(void* ctx, size_t size) noexcept
    void* cseq_reuse_calloc(void* ctx, size_t count, size_t size) noexcept
    void* cseq_reuse_realloc(void* ctx, void* p, size_t size) noexcept
    void cseq_reuse_free(void* ctx, void* p, size_t size) noexcept
    void cseq_reuse_count_thread(cseq_reuse* r, bint begins) noexcept


# Without a GIL, each reference count update on another thread's object is a slow atomic operation.

cdef extern from *:
    """
    /* Return 1 if there is only one reference to an object and no other thread can create another. */
    static inline int cseq_is_unique(PyObject *one) {
    #ifndef Py_GIL_DISABLED
        return Py_REFCNT(one) == 1;
    #elif PY_VERSION_HEX >= 0x030E0000
        return PyUnstable_Object_IsUniquelyReferenced(one);
    #else
        return _Py_IsOwnedByCurrentThread(one)
            && _Py_atomic_load_uint32_relaxed(&one->ob_ref_local) == 1
            && _Py_atomic_load_ssize_relaxed(&one->ob_ref_shared) == 0;
    #endif
    }
    /* Transfer ownership of the caller's reference to the result. */
    static inline PyObject *cseq_given(PyObject *one) { return one; }
    """
    bint cseq_is_unique(PyObject* one) noexcept
    object cseq_given(PyObject* one)
