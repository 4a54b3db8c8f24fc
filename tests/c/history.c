/* cseq_history.h under ThreadSanitizer: one thread adds rows, another one reads them meanwhile.
 *
 *   history SEED SECONDS
 *
 * What is read begins with the first row, has rows that are equally far from each other, words that
 * belong together, and at least half as many rows as there is room for, once it was full.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cseq_history.h"

#define REQUIRE(condition) \
    do {                   \
        if (!(condition)) { \
            fprintf(stderr, "FAILED: %s (line %d)\n", #condition, __LINE__); \
            abort(); \
        } \
    } while (0)

#define EVERY 100

static cseq_history history;
static uint64_t over, reads, full;

static void *read_all(void *unused) {
    uint64_t *rows = calloc(CSEQ_POINTS * history.width, 8), before = 0;
    while (!cseq_load_acq_u64(&over)) {
        const uint64_t count = cseq_history_read(&history, rows);
        REQUIRE(count <= CSEQ_POINTS);
        if (!count) continue;
        const uint64_t last = rows[(count - 1) * history.width];
        const uint64_t gap = count > 1 ? rows[history.width] : 0;
        REQUIRE(rows[0] == 0 && last >= before);
        before = last;
        for (uint64_t k = 0; k < count; k++) {
            const uint64_t *row = rows + k * history.width;
            REQUIRE(row[0] == k * gap);
            for (uint64_t i = 1; i < history.width; i++) REQUIRE(row[i] == row[0] * (i + 1));
        }
        REQUIRE(gap <= EVERY || count >= CSEQ_POINTS / 2);
        full += gap > EVERY;
        cseq_count_u64(&reads, 1);
    }
    free(rows);
    return unused;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s SEED SECONDS\n", argv[0]);
        return 2;
    }
    const uint64_t seed = strtoull(argv[1], 0, 0);
    const time_t end = time(0) + atoi(argv[2]);
    uint64_t rounds = 0;
    for (; time(0) < end || !rounds; rounds++) {
        pthread_t reader;
        cseq_history empty = {.every_ns = EVERY, .width = 1 + (seed + rounds) % 9};
        history = empty;
        history.rows = calloc(CSEQ_POINTS * history.width, 8);
        over = 0;
        REQUIRE(history.rows && !pthread_create(&reader, 0, read_all, 0));
        for (uint64_t now = 0; now < 4000 * EVERY; now += EVERY) {
            if (now < history.due_ns) continue;
            uint64_t *row = cseq_history_begin(&history, now);
            for (uint64_t i = 0; i < history.width; i++) cseq_store_rel_u64(row + i, now * (i + 1));
            cseq_history_end(&history);
            const uint64_t seen = cseq_load_acq_u64(&reads);
            if (now / EVERY % 50 == 0)
                while (cseq_load_acq_u64(&reads) == seen) sched_yield();
        }
        cseq_store_rel_u64(&over, 1);
        pthread_join(reader, 0);
        free(history.rows);
    }
    printf("ok: %llu rounds, %llu reads, %llu of them after rows had gone\n",
           (unsigned long long)rounds, (unsigned long long)reads, (unsigned long long)full);
    return 0;
}
