/* The ring between processes that are killed and stopped at random.
 *
 *   process_kill SEED SECONDS
 *
 * Runners are forked processes that map the ring again, at another address. A keeper thread sends
 * SIGKILL, and now and then SIGSTOP, after random microseconds; a runner also kills itself before
 * random atomic operations, so that every one of them comes to be the last. The keeper reaps,
 * reposts, forks another. The main thread is the trainer and checks that every ticket comes once,
 * in order, whole. Linux only: memfd and the futex.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parties.h"

#define PARK UINT64_C(20000000000) /* ns; a sleep of that length is a lost wake-up */
enum { WATCHDOG = 60, MOST_PLACES = 32, WRONG = 3 };

/* Behind the ring, in the same shared memory. */
typedef struct {
    uint64_t latest[MOST_RUNNERS + 1];
    const char *place[MOST_RUNNERS + 1]; /* where a runner killed itself; 0: it did not */
} notes;

static struct {
    uint64_t seed, round;
    uint32_t stages, indexers, runners, tickets, mortality; /* the latter: per 65536 points */
    uint32_t gap; /* most microseconds between two blows of the keeper */
} plan;

static int memory_fd;
static uint64_t memory_bytes, notes_at;
static trainer boss;
static notes *shared;
static pid_t pids[MOST_RUNNERS + 1];
static uint64_t kills, suicides, stops, tickets_in_all;
static struct { const char *name; uint64_t count; } places[MOST_PLACES];
static uint32_t self; /* a runner's owner number; 0 in the trainer's process */
static notes *own_notes;
static _Thread_local uint64_t own_rng;

static void fail(const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dprintf(2, "FAILED (seed %llu, round %llu, %s %u): %s\n", (unsigned long long)plan.seed,
            (unsigned long long)plan.round, self ? "runner" : "trainer", self, text);
    if (self) _exit(WRONG);
    for (uint32_t o = 1; o <= MOST_RUNNERS; o++)
        if (pids[o] > 0) kill(pids[o], SIGKILL);
    abort();
}

static void on_alarm(int number) {
    static const char text[] = "FAILED: a round does not end\n";
    (void)number;
    (void)!write(2, text, sizeof text - 1);
    abort();
}

/* ── points ─────────────────────────────────────────────────────────────────────────────── */

static void point(const char *place) {
    if (self && plan.mortality && below(&own_rng, 65536) < plan.mortality) {
        own_notes->place[self] = place;
        kill(getpid(), SIGKILL);
    }
}

static void ring_wait(uint32_t *word, uint32_t seen, uint64_t ns, int shared) {
    uint64_t before = cseq_now_ns();
    (cseq_wait)(word, seen, ns, shared);
    REQUIRE(cseq_now_ns() - before < PARK || (cseq_load_acq_u32)(word) != seen,
            "slept for %.0f s: a wake-up was lost", (double)PARK / 1e9);
}

static void ring_wake(uint32_t *word, int shared) { (cseq_wake)(word, shared); }

/* ── runners ────────────────────────────────────────────────────────────────────────────── */

static void run(uint32_t owner) {
    self = owner;
    alarm(0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char *memory = mmap(0, memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    REQUIRE(memory != MAP_FAILED && memory != (char *)boss.ring, "cannot map the ring elsewhere");
    munmap(boss.ring, memory_bytes);
    cseq_ring *ring = (cseq_ring *)(void *)memory;
    own_notes = (notes *)(void *)(memory + notes_at);
    REQUIRE(cseq_ring_fits(ring, memory_bytes), "this is no ring");
    uint32_t stage = owner > plan.indexers;
    seat place = {ring, stage, owner, stage + 1 == plan.stages, &own_notes->latest[owner]};
    for (;;) {
        int cell = runner_claim(&place, PARK);
        if (cell == CSEQ_CLOSED) _exit(0);
        if (cell < 0) continue;
        runner_work(&place, (uint32_t)cell);
        runner_publish(&place, (uint32_t)cell);
    }
}

static void start(uint32_t owner) {
    uint64_t seed = draw(&own_rng);
    shared->place[owner] = 0;
    pid_t pid = fork();
    REQUIRE(pid >= 0, "cannot fork");
    if (pid == 0) {
        own_rng = seed;
        run(owner);
    }
    pids[owner] = pid;
}

/* ── keeper ─────────────────────────────────────────────────────────────────────────────── */

static void count_place(const char *name) {
    uint32_t k = 0;
    while (k < MOST_PLACES && places[k].name && strcmp(places[k].name, name) != 0) k++;
    REQUIRE(k < MOST_PLACES, "more than %d places", MOST_PLACES);
    places[k].name = name;
    places[k].count++;
    suicides++;
}

/* A runner is gone for certain. */
static void bury(pid_t pid, int status) {
    uint32_t held[MOST_CELLS], owner = 1;
    while (owner <= plan.runners && pids[owner] != pid) owner++;
    REQUIRE(owner <= plan.runners, "who was %d?", (int)pid);
    pids[owner] = 0;
    if (WIFEXITED(status)) {
        REQUIRE(WEXITSTATUS(status) == 0, "runner %u says so", owner);
        REQUIRE(ring_closed(boss.ring), "runner %u has left an open ring", owner);
        return;
    }
    REQUIRE(WTERMSIG(status) == SIGKILL, "runner %u died of signal %d", owner, WTERMSIG(status));
    if (shared->place[owner]) count_place(shared->place[owner]);
    kills++;
    cseq_ring_repost(boss.ring, owner, held, 0);
    if (!ring_closed(boss.ring)) start(owner);
}

static void reap(pid_t which, int flags) {
    int status;
    pid_t pid;
    while ((pid = waitpid(which, &status, flags)) > 0) {
        bury(pid, status);
        if (which > 0) break;
    }
}

static void *keep(void *argument) {
    (void)argument;
    own_rng = plan.seed + plan.round * 7 + 3;
    for (uint32_t o = 1; o <= plan.runners; o++) start(o);
    while (!ring_closed(boss.ring)) {
        usleep(below(&own_rng, plan.gap));
        reap(-1, WNOHANG);
        pid_t victim = pids[1 + below(&own_rng, plan.runners)];
        if (victim <= 0) continue; /* it has left: the ring was closed just now */
        if (below(&own_rng, 16) == 0) {
            kill(victim, SIGSTOP);
            usleep(below(&own_rng, 3000));
            kill(victim, SIGCONT);
            stops++;
        } else {
            kill(victim, SIGKILL);
            reap(victim, 0);
        }
    }
    reap(-1, 0); /* those that leave */
    return 0;
}

/* ── a round ────────────────────────────────────────────────────────────────────────────── */

static void make_plan(void) {
    static const uint32_t cells[] = {1, 2, 3, 10};
    uint64_t *rng = &own_rng;
    own_rng = plan.seed * 1000003 + plan.round;
    plan.stages = 1 + below(rng, 2);
    plan.indexers = 1 + below(rng, 3);
    plan.runners = plan.indexers + (plan.stages == 2 ? 1 + below(rng, 3) : 0);
    plan.tickets = MOST_TICKETS;
    plan.mortality = below(rng, 3) ? 20 + below(rng, 600) : 0;
    plan.gap = 1 + below(rng, 2) * below(rng, 2000) + below(rng, 300);
    uint32_t capacity = cells[below(rng, 4)], calls = below(rng, 3) ? 0 : CALLS;
    if (calls) { /* a queue */
        plan.stages = plan.indexers = plan.runners = 1;
        capacity += calls;
    }
    notes_at = (cseq_ring_bytes(capacity, BATCH, plan.runners) + CSEQ_LINE - 1) / CSEQ_LINE * CSEQ_LINE;
    memory_bytes = notes_at + sizeof(notes);
    memory_fd = memfd_create("ring", MFD_CLOEXEC);
    REQUIRE(memory_fd >= 0 && ftruncate(memory_fd, (off_t)memory_bytes) == 0, "no memory");
    cseq_ring *ring = mmap(0, memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    REQUIRE(ring != MAP_FAILED, "no memory");
    shared = (notes *)(void *)((char *)ring + notes_at);
    cseq_ring_init(ring, capacity, BATCH, plan.runners, calls, 1);
    trainer_init(&boss, ring, below(rng, 2) ? 0 : ((uint64_t)1 << 40) - below(rng, 3000), plan.tickets);
    boss.ordered = below(rng, 3) > 0;
    boss.wake_at = 1 + below(rng, capacity);
    boss.call_every = calls ? 2 + below(rng, 20) : 0;
    cseq_wait_nap = below(rng, 4) == 0;
}

static void play(uint64_t end) {
    pthread_t keeper;
    uint32_t cancel_every;
    make_plan();
    cancel_every = below(&own_rng, 2) ? 0 : 50 + below(&own_rng, 500);
    alarm(WATCHDOG);
    REQUIRE(pthread_create(&keeper, 0, keep, 0) == 0, "no thread");
    while (trainer_next(&boss, 0, PARK)) {
        if (cancel_every && boss.delivered % cancel_every == 0) trainer_cancel_all(&boss);
        if (cseq_now_ns() > end) boss.end = boss.posted; /* the rest is not posted any more */
    }
    trainer_check(&boss);
    cseq_ring_close(boss.ring);
    pthread_join(keeper, 0);
    tickets_in_all += boss.end - boss.start;
    munmap(boss.ring, memory_bytes);
    close(memory_fd);
    alarm(0);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s SEED SECONDS\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, 0, _IOLBF, 0);
    signal(SIGALRM, on_alarm);
    plan.seed = strtoull(argv[1], 0, 0);
    printf("process_kill: seed %llu\n", (unsigned long long)plan.seed);
    uint64_t end = cseq_now_ns() + (uint64_t)(atof(argv[2]) * 1e9);
    for (; cseq_now_ns() < end; plan.round++) play(end);
    for (uint32_t k = 0; k < MOST_PLACES && places[k].name; k++)
        printf("  %8llu killed themselves in %s\n", (unsigned long long)places[k].count, places[k].name);
    printf("ok: %llu rounds, %llu tickets, %llu processes killed (%llu by themselves), %llu stopped\n",
           (unsigned long long)plan.round, (unsigned long long)tickets_in_all, (unsigned long long)kills,
           (unsigned long long)suicides, (unsigned long long)stops);
    return 0;
}
