/* Tries the interleavings of the shipped ring, one by one, on one thread.
 *
 *   ring_explore random SEED SECONDS     random interleavings of random scenarios
 *   ring_explore all PREEMPTIONS DEATHS [SCENARIO]
 *                                        every interleaving of the small scenarios with at most so
 *                                        many preemptions and deaths
 *
 * Trainer, runners and watcher are fibers, and a point before each atomic operation of the ring
 * may pass on to another fiber, or be a runner's last. Nothing ever times out, so a lost wake-up is
 * a state in which no fiber can go on: it is found with certainty, and printed with the steps that
 * led there. Stores that are not read-modify-writes go through store buffers (x86-TSO): the random
 * search lets them become visible as late as the next read-modify-write of their fiber.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdint.h>
#include <time.h>
#include <ucontext.h>

/* The memory's model: see fiber.store. */
static uint64_t load_through(const void *p, uint64_t loaded);
static void store_late(void *p, uint64_t value, uint32_t bytes);
static void flush(void);
#define ON_LOAD(p, loaded) load_through(p, loaded)
#define ON_STORE(p, v, store) store_late(p, v, sizeof *(p))
#define ON_RMW() flush()

#include "parties.h"

enum { STACK = 128 << 10, MOST_STORES = 8, MOST_CHOICES = 20000, TRAINER = 0 };

typedef enum { CAN_RUN, ASLEEP, WAITING, OVER } condition;

typedef struct {
    condition is;
    const uint32_t *word;   /* ASLEEP on this */
    int (*ready)(void);     /* WAITING for this */
    const char *place;      /* of its next operation */
    uint32_t stores;
    struct { void *p; uint64_t value; uint32_t bytes; } store[MOST_STORES]; /* oldest first */
    jmp_buf where;
    ucontext_t begin;
    void (*body)(void);
    int begun;
    char *stack;
} fiber;

typedef struct {
    uint32_t stages, runners, capacity, tickets, deaths, wake_at;
    uint32_t call_every;  /* 0: a shared ring; else n of a queue whose every n-th ticket is a call */
    uint32_t cancel_at;  /* tickets delivered before; more than all: never */
    uint32_t restarts;    /* a death beyond these is news for the trainer */
    int ordered;
    uint64_t first;       /* ticket */
    uint32_t queues;      /* 0: one ring; else the number of queues with one output gate and a runner
                             each; the trainer takes what is ready in any of them */
} scenario;

static const scenario SMALL[] = {
    /* stages runners cells tickets deaths wake calls cancel restarts ordered first queues */
    {1, 1, 1, 2, 0, 1, 0, 99, 99, 1, 0, 0},
    {1, 2, 1, 2, 0, 1, 0, 99, 99, 1, 0, 0},
    {1, 2, 2, 2, 0, 1, 0, 99, 99, 1, 0, 0},
    {1, 2, 2, 3, 0, 2, 0, 99, 99, 1, 7, 0},
    {1, 2, 2, 3, 0, 1, 0, 99, 99, 0, 0, 0},
    {1, 2, 2, 3, 0, 1, 0, 1, 99, 1, 0, 0},
    {1, 1, 3, 3, 0, 1, 9, 1, 99, 1, 1, 0},
    {1, 1, 4, 4, 0, 2, 2, 99, 99, 1, 1, 0},
    {1, 1, 4, 4, 0, 1, 3, 1, 99, 0, 1, 0},
    {1, 1, 2, 2, 0, 1, 0, 99, 0, 1, 0, 0},
    {2, 2, 2, 2, 0, 1, 0, 99, 99, 1, 0, 0},
    {2, 2, 2, 3, 0, 2, 0, 1, 99, 1, 0, 0},
    {2, 3, 2, 2, 0, 1, 0, 99, 99, 1, ((uint64_t)1 << 40) - 1, 0},
    {1, 2, 3, 2, 0, 1, 99, 99, 99, 1, 1, 2},
};

static fiber fibers[MOST_RUNNERS + 2];
static uint32_t now, count; /* the fiber that runs; how many there are */
static jmp_buf outside;     /* back to where the run was started */
static scenario plan;
static trainer boss[MOST_RUNNERS]; /* of each ring; they are one party */
static seat seats[MOST_RUNNERS + 1];
static uint64_t latest[MOST_RUNNERS + 1];
static int gone[MOST_RUNNERS + 1], left[MOST_RUNNERS + 1];
static uint32_t deaths, failed;
enum { ROOM = 1 << 14 }; /* of a ring */
static char memory[MOST_RUNNERS * ROOM] __attribute__((aligned(128)));

/* What has been chosen, and in the search for all: what to choose, of how many. */
static struct { uint16_t taken, of; } choice[MOST_CHOICES];
static uint32_t choices, given;
static int searching;
static uint32_t preemptions, most_preemptions, most_deaths;
static uint64_t rng, lag; /* lag: in 1/256, how long stores stay in the buffer */
static uint32_t calm;     /* in 1/256, how often the fiber that runs goes on */

/* The steps, for the report. */
static struct { uint8_t who; char what; const char *place; } trace[1 << 16];
static uint32_t steps;

static void note(char what, const char *place) {
    if (steps < sizeof trace / sizeof *trace) {
        trace[steps].who = (uint8_t)now;
        trace[steps].what = what;
        trace[steps].place = place;
    }
    steps++;
}

static const char *name_of(uint32_t f) {
    static char names[MOST_RUNNERS + 2][16];
    snprintf(names[f], sizeof names[f], f == TRAINER ? "trainer" : f == count - 1 ? "watcher" : "runner %u", f);
    return names[f];
}

static void fail(const char *format, ...) {
    va_list arguments;
    uint32_t upto = steps < sizeof trace / sizeof *trace ? steps : sizeof trace / sizeof *trace;
    for (uint32_t k = upto > 400 ? upto - 400 : 0; k < upto; k++)
        printf("  %-9s %s%s\n", name_of(trace[k].who), trace[k].place,
               trace[k].what == 'x' ? "  DIES" : trace[k].what == 'z' ? "  sleeps" : "");
    printf("FAILED: ");
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n  stages=%u runners=%u cells=%u tickets=%u wake_at=%u call_every=%u cancel_at=%u restarts=%u "
           "ordered=%d first=%llu queues=%u; %u deaths, %u steps\n",
           plan.stages, plan.runners, plan.capacity, plan.tickets, plan.wake_at, plan.call_every, plan.cancel_at,
           plan.restarts, plan.ordered, (unsigned long long)plan.first, plan.queues, deaths, steps);
    exit(1);
}

/* ── store buffers ──────────────────────────────────────────────────────────────────────── */

static void flush_one(fiber *f) {
    if (f->store[0].bytes == 4)
        __atomic_store_n((uint32_t *)f->store[0].p, (uint32_t)f->store[0].value, __ATOMIC_SEQ_CST);
    else
        __atomic_store_n((uint64_t *)f->store[0].p, f->store[0].value, __ATOMIC_SEQ_CST);
    memmove(f->store, f->store + 1, --f->stores * sizeof *f->store);
}

static void flush(void) {
    while (fibers[now].stores) flush_one(&fibers[now]);
}

static uint64_t load_through(const void *p, uint64_t loaded) {
    const fiber *f = &fibers[now];
    for (uint32_t k = f->stores; k-- > 0;)
        if (f->store[k].p == p) return f->store[k].value;
    return loaded;
}

static void store_late(void *p, uint64_t value, uint32_t bytes) {
    fiber *f = &fibers[now];
    if (f->stores == MOST_STORES) flush_one(f);
    f->store[f->stores].p = p;
    f->store[f->stores].value = value;
    f->store[f->stores++].bytes = bytes;
    if (searching) flush();
}

/* ── scheduling ─────────────────────────────────────────────────────────────────────────── */

static int can_run(uint32_t f) {
    return fibers[f].is == CAN_RUN || (fibers[f].is == WAITING && fibers[f].ready());
}

/* One of `of` ways to go on; 0 is the plain one. */
static uint32_t choose(uint32_t of) {
    if (of < 2) return 0;
    if (choices == MOST_CHOICES) fail("more than %d choices", MOST_CHOICES);
    uint32_t taken = choices < given ? choice[choices].taken : 0;
    choice[choices].of = (uint16_t)of;
    choice[choices++].taken = (uint16_t)taken;
    return taken;
}

static void enter_fiber(void) {
    fiber *f = &fibers[now];
    f->body();
    flush();
    f->is = OVER;
    f->place = "end";
    longjmp(outside, 1); /* to the scheduler */
}

static void go_to(uint32_t next) {
    fiber *from = &fibers[now], *to = &fibers[next];
    if (next == now && from->is != OVER) {
        from->is = CAN_RUN;
        return;
    }
    if (from->is == OVER || !_setjmp(from->where)) {
        now = next;
        to->is = CAN_RUN;
        if (to->begun) _longjmp(to->where, 1);
        to->begun = 1;
        setcontext(&to->begin);
    }
}

/* Somebody goes on. The present fiber is an option if it can run; passing over it then counts. */
static void schedule(void) {
    uint32_t options[MOST_RUNNERS + 2], n = 0;
    int mine = can_run(now);
    if (mine) options[n++] = now;
    for (uint32_t k = 1; k < count; k++)
        if (can_run((now + k) % count)) options[n++] = (now + k) % count;
    if (n == 0) {
        if (fibers[TRAINER].is == OVER) longjmp(outside, 2);
        for (uint32_t f = 0; f < count; f++)
            printf("  %-9s %s\n", name_of(f),
                   fibers[f].is == ASLEEP ? "asleep" : fibers[f].is == WAITING ? "waits" : "is gone");
        fail("nobody can go on");
    }
    uint32_t k;
    if (searching) {
        k = choose(mine && preemptions == most_preemptions ? 1 : n);
        if (mine && k) preemptions++;
    } else {
        k = mine && below(&rng, 256) < calm ? 0 : below(&rng, n);
    }
    go_to(options[k]);
}

static int is_runner(uint32_t f) { return f != TRAINER && f != count - 1; }

/* Kill the present fiber? */
static int is_last_step(void) {
    if (!is_runner(now) || deaths >= plan.deaths) return 0;
    if (searching) return (int)choose(2);
    return below(&rng, 64) == 0;
}

static void point(const char *place) {
    fiber *f = &fibers[now];
    f->place = place;
    if (is_last_step()) {
        note('x', place);
        flush(); /* its stores were made */
        deaths++;
        f->is = OVER;
        gone[now] = 1;
        schedule();
    }
    schedule();
    note('.', place);
    for (uint32_t k = 0; !searching && k < count; k++)
        if (fibers[k].stores && below(&rng, 256) >= lag) flush_one(&fibers[k]);
}

static void ring_wait(uint32_t *word, uint32_t seen, uint64_t ns, int shared) {
    (void)ns, (void)shared;
    flush();
    if (*word != seen) return;
    fibers[now].is = ASLEEP;
    fibers[now].word = word;
    note('z', fibers[now].place);
    schedule();
}

static void ring_wake(uint32_t *word, int shared) {
    (void)shared;
    for (uint32_t f = 0; f < count; f++)
        if (fibers[f].is == ASLEEP && fibers[f].word == word) fibers[f].is = CAN_RUN;
}

static void wait_for(int (*ready)(void)) {
    flush();
    while (!ready()) {
        fibers[now].is = WAITING;
        fibers[now].ready = ready;
        schedule();
    }
}

/* ── the parties ────────────────────────────────────────────────────────────────────────── */

static void runner_body(void) {
    const uint32_t me = now;
    for (;;) {
        int cell = runner_claim(&seats[me], 1);
        if (cell == CSEQ_CLOSED) break;
        if (cell < 0) continue;
        runner_work(&seats[me], (uint32_t)cell);
        runner_publish(&seats[me], (uint32_t)cell);
    }
    left[me] = 1;
}

static void begin_fiber(uint32_t f, void (*body)(void)) {
    fiber *b = &fibers[f];
    b->is = CAN_RUN;
    b->begun = 0;
    b->stores = 0;
    b->body = body;
    b->place = "begin";
    getcontext(&b->begin);
    b->begin.uc_stack.ss_sp = b->stack;
    b->begin.uc_stack.ss_size = STACK;
    b->begin.uc_link = 0;
    makecontext(&b->begin, enter_fiber, 0);
}

static int anybody_gone(void) {
    for (uint32_t f = 1; f <= plan.runners; f++)
        if (gone[f]) return 1;
    return 0;
}

static void watcher_body(void) {
    uint32_t held[MOST_CELLS];
    for (;;) {
        wait_for(anybody_gone);
        for (uint32_t f = 1; f <= plan.runners; f++) {
            if (!gone[f]) continue;
            cseq_ring_repost(seats[f].ring, seats[f].owner, held, 0);
            gone[f] = 0;
            if (deaths > plan.restarts) {
                left[f] = 1;
                failed = 1;
                cseq_gate_notify_all(cseq_ring_output(boss[0].ring));
            } else {
                begin_fiber(f, runner_body);
            }
        }
    }
}

static int all_left(void) {
    for (uint32_t f = 1; f <= plan.runners; f++)
        if (!left[f]) return 0;
    return 1;
}

static void trainer_body(void) {
    while (trainer_next(boss, &failed, 1))
        if (boss->delivered == plan.cancel_at && !boss->cancelled_in_all) trainer_cancel_all(boss);
    if (!failed) trainer_check(boss);
    cseq_ring_close(boss->ring);
    wait_for(all_left);
}

/* As Feed.wait, for what is ready in any of several queues. */
static void trainer_of_several(void) {
    cseq_ring *rings[MOST_RUNNERS];
    uint32_t cells[MOST_RUNNERS], waiting = 1;
    while (waiting) {
        uint32_t seen = cseq_ring_notices(boss->ring), taken = 0;
        if (cseq_load_acq_u32(&failed)) break;
        waiting = 0;
        for (trainer *t = boss; t < boss + plan.queues; t++) {
            trainer_refill(t);
            if (t->outstanding) {
                rings[waiting] = t->ring;
                cells[waiting++] = t->order[t->first];
                taken |= (uint32_t)trainer_take(t);
            }
        }
        if (taken || !waiting) continue;
        for (trainer *t = boss; t < boss + plan.queues; t++)
            if (t->unwoken) trainer_wake(t);
        cseq_ring_wait_any(rings, cells, waiting, seen, 1);
    }
    for (trainer *t = boss; t < boss + plan.queues; t++) {
        if (!failed) trainer_check(t);
        cseq_ring_close(t->ring);
    }
    wait_for(all_left);
}

/* One run of the plan, from beginning to end. */
static void play(void) {
    uint32_t last = plan.stages == 2 ? plan.runners : 0; /* the last runner converts */
    for (uint32_t k = 0; k < (plan.queues ? plan.queues : 1); k++) {
        cseq_ring *ring = (cseq_ring *)(void *)(memory + k * ROOM);
        memset(ring, 0, ROOM);
        cseq_ring_init(ring, plan.capacity, BATCH, plan.queues ? 1 : plan.runners, plan.call_every ? CALLS : 0, 0);
#ifndef M_OWN_GATE
        ring->output -= k * ROOM;
#endif
        trainer_init(&boss[k], ring, plan.first, plan.tickets);
        boss[k].wake_at = plan.wake_at;
        boss[k].ordered = plan.ordered;
        boss[k].call_every = plan.call_every;
    }
    count = plan.runners + 2;
    choices = steps = deaths = failed = preemptions = 0;
    for (uint32_t f = 1; f <= plan.runners; f++) {
        seat s = {boss[plan.queues ? f - 1 : 0].ring, f == last, plan.queues ? 1 : f,
                  plan.stages == 1 || f == last, &latest[f]};
        seats[f] = s;
        latest[f] = 0;
        gone[f] = left[f] = 0;
        begin_fiber(f, runner_body);
    }
    begin_fiber(TRAINER, plan.queues ? trainer_of_several : trainer_body);
    begin_fiber(count - 1, watcher_body);
    now = TRAINER;
    switch (_setjmp(outside)) {
    case 0: fibers[TRAINER].begun = 1, setcontext(&fibers[TRAINER].begin); break;
    case 1: schedule(); break; /* a fiber has ended */
    default: break;            /* all have */
    }
}

/* ── searches ───────────────────────────────────────────────────────────────────────────── */

static uint64_t every_interleaving(void) {
    uint64_t runs = 0;
    searching = 1;
    given = 0;
    for (;;) {
        play();
        runs++;
        uint32_t k = choices;
        while (k > 0 && choice[k - 1].taken + 1 >= choice[k - 1].of) k--;
        if (k == 0) return runs;
        choice[k - 1].taken++;
        given = k;
    }
}

static void random_plan(void) {
    static const uint32_t cells[] = {1, 2, 3, 10};
    plan.stages = 1 + below(&rng, 2);
    plan.runners = plan.stages + below(&rng, 4 - plan.stages + 1);
    plan.capacity = cells[below(&rng, 4)];
    plan.tickets = 1 + below(&rng, 12);
    plan.deaths = below(&rng, 4) ? below(&rng, 6) : 0;
    plan.restarts = below(&rng, 6) ? 99 : below(&rng, 2);
    plan.wake_at = 1 + below(&rng, plan.capacity);
    plan.ordered = below(&rng, 3) > 0;
    plan.call_every = 0;
    if (below(&rng, 3) == 0) { /* a queue */
        plan.stages = plan.runners = 1;
        plan.capacity += CALLS;
        plan.call_every = below(&rng, 2) ? 99 : 2 + below(&rng, 4);
    }
    plan.queues = 0;
    if (plan.call_every && below(&rng, 2)) { /* several */
        plan.queues = plan.runners = 2 + below(&rng, 2);
        plan.tickets = 1 + plan.tickets % 6;
        plan.ordered = 1;
    }
    plan.cancel_at = below(&rng, 3) ? 99 : below(&rng, plan.tickets);
    plan.first = below(&rng, 2) ? 0 : ((uint64_t)1 << 40) - below(&rng, 6);
    calm = below(&rng, 2) ? below(&rng, 256) : 192 + below(&rng, 64);
    lag = below(&rng, 2) ? 0 : 200 + below(&rng, 57);
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    for (uint32_t f = 0; f < sizeof fibers / sizeof *fibers; f++) fibers[f].stack = malloc(STACK);
    if (argc >= 4 && strcmp(argv[1], "random") == 0) {
        uint64_t seed = strtoull(argv[2], 0, 0), runs = 0, killed = 0, ended = (uint64_t)(atof(argv[3]) * 1e9);
        printf("ring_explore random: seed %llu\n", (unsigned long long)seed);
        for (ended += cseq_now_ns(); cseq_now_ns() < ended; runs++) {
            rng = seed + runs * 1000003;
            random_plan();
            play();
            killed += deaths;
        }
        printf("ok: %llu interleavings, %llu deaths\n", (unsigned long long)runs, (unsigned long long)killed);
        return 0;
    }
    if (argc >= 4 && strcmp(argv[1], "all") == 0) {
        uint64_t total = 0;
        most_preemptions = (uint32_t)atoi(argv[2]);
        most_deaths = (uint32_t)atoi(argv[3]);
        for (uint32_t k = 0; k < sizeof SMALL / sizeof *SMALL; k++) {
            if (argc > 4 && (uint32_t)atoi(argv[4]) != k) continue;
            plan = SMALL[k];
            plan.deaths = most_deaths;
            uint64_t runs = every_interleaving();
            total += runs;
            printf("scenario %u: %llu interleavings\n", k, (unsigned long long)runs);
        }
        printf("ok: %llu interleavings with at most %u preemptions and %u deaths\n",
               (unsigned long long)total, most_preemptions, most_deaths);
        return 0;
    }
    fprintf(stderr, "usage: %s random SEED SECONDS | all PREEMPTIONS DEATHS [SCENARIO]\n", argv[0]);
    return 2;
}
