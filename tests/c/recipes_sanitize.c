/* cseq_recipes.h for AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 *   recipes_sanitize SEED
 *
 * All memory is allocated to the byte. Random histograms are packed, their rooms looked up beside a
 * plain search; epochs are read in random portions and steps, and each sample must come once.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cseq_recipes.h"

#define REQUIRE(condition) \
    do {                   \
        if (!(condition)) { \
            fprintf(stderr, "FAILED: %s (line %d, case %llu)\n", #condition, __LINE__, \
                    (unsigned long long)cases); \
            abort(); \
        } \
    } while (0)

static uint64_t rng[4], cases;

static uint64_t below(uint64_t range) { return cseq_bounded(rng, range); }

static void *bytes(uint64_t count) {
    void *p = calloc(1, count ? count : 1);
    if (!p) abort();
    return p;
}

/* Rooms in the bits of levels, and in an array that is searched one by one. */
static void one_search(uint64_t budget) {
    cseq_fit f = {.budget = budget};
    char *there = bytes(budget + 1);
    for (int l = 0; l < CSEQ_FIT_LEVELS; l++) f.level[l] = bytes(8 * cseq_fit_words(budget, l));
    for (int k = 0; k < 300; k++) {
        uint64_t room = below(budget + 1), found = below(budget + 1);
        there[room] = (char)below(2);
        cseq_fit_mark(&f, room, there[room]);
        room = found;
        while (found <= budget && !there[found]) found++;
        REQUIRE(cseq_fit_find(&f, room) == found);
    }
    REQUIRE(cseq_fit_find(&f, budget + 1) == budget + 1);
    for (int l = 0; l < CSEQ_FIT_LEVELS; l++) free(f.level[l]);
    free(there);
    cases++;
}

/* Samples of classes, as many as `counts` says: the table, and what a reader has for it. */
static cseq_members members_of(const int64_t *counts, uint64_t classes, uint64_t n) {
    uint64_t small = 0, large = 0;
    uint32_t *of = bytes(4 * n), *table = bytes(4 * n);
    int64_t *offsets = bytes(8 * (classes + 1)), *next = bytes(8 * classes), *places = bytes(8 * classes);
    for (uint64_t c = 0, k = 0; c < classes; c++) {
        next[c] = offsets[c];
        offsets[c + 1] = offsets[c] + counts[c];
        places[c] = (int64_t)(counts[c] < CSEQ_FEISTEL_LEAST ? small : large);
        if (counts[c] < CSEQ_FEISTEL_LEAST) small += (uint64_t)counts[c];
        else large++;
        for (int64_t i = 0; i < counts[c]; i++) of[k++] = (uint32_t)c;
    }
    for (uint64_t k = n; k > 1; k--) { /* in any order */
        uint64_t j = below(k);
        uint32_t held = of[j];
        of[j] = of[k - 1];
        of[k - 1] = held;
    }
    for (uint64_t start = 0, end; start < n; start = end) {
        end = start + 1 + below(n - start);
        cseq_sort_classes(of, start, end, next, table);
    }
    for (uint64_t c = 0; c < classes; c++)
        for (int64_t i = offsets[c]; i < offsets[c + 1]; i++) {
            REQUIRE(of[table[i]] == c);
            REQUIRE(i == offsets[c] || table[i] > table[i - 1]);
        }
    free(of);
    free(next);
    cseq_members m = {table, offsets, places, bytes(8 * classes), bytes(4 * small),
                      bytes(sizeof(cseq_feistel) * large), bytes(4 * CSEQ_FEISTEL_LEAST)};
    return m;
}

static void members_free(cseq_members *m) {
    free((void *)m->table);
    free((void *)m->offsets);
    free((void *)m->places);
    free(m->made);
    free(m->permuted);
    free(m->networks);
    free(m->scratch);
}

/* Best fit of a random histogram, and two epochs of it. */
static void one_order(uint64_t budget, uint64_t classes, uint64_t most) {
    int64_t *lengths = bytes(8 * classes), *counts = bytes(8 * classes), *ranks = bytes(8 * classes);
    uint64_t n = 0, parts, count, units = 0;
    for (uint64_t c = 0; c < classes; c++) {
        uint64_t least = c ? (uint64_t)lengths[c - 1] + 1 : 1;
        lengths[c] = (int64_t)(least + below(budget - (classes - c - 1) - least + 1) / (1 + below(9)));
        counts[c] = (int64_t)(1 + below(most));
        n += (uint64_t)counts[c];
    }
    cseq_fit f = {.budget = budget, .lengths = lengths, .counts = counts};
    f.class_ = (int64_t)classes - 1;
    f.left = counts[classes - 1];
    f.made = 1;
    f.head = bytes(4 * (budget + 1));
    f.tail = bytes(4 * (budget + 1));
    for (int l = 0; l < CSEQ_FIT_LEVELS; l++) f.level[l] = bytes(8 * cseq_fit_words(budget, l));
    while (f.class_ >= 0) { /* room for what is made, and not for more */
        f.most = f.made + 2 + (uint32_t)below(3);
        cseq_kind *kinds = bytes(f.most * sizeof *kinds);
        if (f.kinds) memcpy(kinds, f.kinds, f.made * sizeof *kinds);
        free(f.kinds);
        f.kinds = kinds;
        cseq_fit_advance(&f, 1 + below(9));
    }
    count = cseq_fit_count(&f, &parts);
    int64_t *copies = bytes(8 * count), *first = bytes(8 * (count + 1)), *starts = bytes(8 * (count + 1));
    cseq_part *all = bytes(parts * sizeof *all);
    cseq_fit_write(&f, copies, first, all, ranks);
    REQUIRE(first[count] == (int64_t)parts);
    for (uint64_t c = 0; c < classes; c++) REQUIRE(ranks[c] == counts[c]);
    for (uint64_t r = 0; r < count; r++) {
        int64_t filled = 0;
        for (int64_t p = first[r]; p < first[r + 1]; p++) filled += lengths[all[p].class_] * all[p].many;
        REQUIRE(copies[r] > 0 && filled > 0 && filled <= (int64_t)budget);
        starts[r + 1] = starts[r] + copies[r];
        units += (uint64_t)copies[r];
    }
    cseq_recipes recipes = {.members = members_of(counts, classes, n), .starts = starts, .first = first,
                            .parts = all, .recipes = count, .together = 1 + below(9)};
    recipes.seed = below(1000);
    recipes.longest = below(2) ? -1 : (int64_t)below(units);
    recipes.table = bytes(4 * cseq_permutation_entries(units / recipes.together));
    for (uint64_t epoch = 3; epoch < 5; epoch++) {
        char *seen = bytes(n);
        int64_t *out = bytes(8 * n), *sizes = bytes(8 * units);
        uint64_t done = 0, written = 0, total = 0;
        while (done < units) {
            uint64_t some = 1 + below(units - done), steps = CSEQ_FEISTEL_LEAST + below(1000);
            done += cseq_recipes_read(&recipes, epoch, done, some, out, sizes + done, &written, steps);
        }
        REQUIRE(written == n);
        for (uint64_t u = 0; u < units; u++) total += (uint64_t)sizes[u];
        REQUIRE(total == n);
        for (uint64_t k = 0; k < n; k++) REQUIRE(!seen[out[k]]++);
        free(seen);
        free(out);
        free(sizes);
    }
    for (int l = 0; l < CSEQ_FIT_LEVELS; l++) free(f.level[l]);
    members_free(&recipes.members);
    free(recipes.table);
    free(f.kinds);
    free(f.head);
    free(f.tail);
    free(lengths);
    free(counts);
    free(ranks);
    free(copies);
    free(first);
    free(starts);
    free(all);
    cases++;
}

/* Batches of groups, of epochs anywhere in the sequence. */
static void some_groups(uint64_t total, uint64_t most) {
    int64_t *counts = bytes(8 * total);
    uint64_t n = 0;
    for (uint64_t c = 0; c < total; c++) n += (uint64_t)(counts[c] = (int64_t)(1 + below(most)));
    cseq_groups g = {.members = members_of(counts, total, n), .seed = 5, .total = total};
    g.classes = 1 + below(total);
    g.each = 1 + below(9);
    g.units = 1 + below(40);
    g.table = bytes(4 * cseq_permutation_entries(total));
    for (int k = 0; k < 20; k++) {
        uint64_t epoch = below(2) ? UINT64_MAX - below(2) : below(9), start = below(g.units);
        uint64_t count = 1 + below(g.units - start), done = 0, size = g.classes * g.each;
        int64_t *out = bytes(8 * count * size);
        while (done < count)
            done += cseq_groups_read(&g, epoch, start + done, count - done, out + done * size,
                                     CSEQ_FEISTEL_LEAST + below(1000));
        for (uint64_t i = 0; i < count * size; i++) REQUIRE((uint64_t)out[i] < n);
        free(out);
    }
    members_free(&g.members);
    free(g.table);
    free(counts);
    cases++;
}

int main(int argc, char **argv) {
    static const uint64_t budgets[] = {1, 2, 63, 64, 65, 4095, 4096, 4097, 300000};
    uint64_t seed = argc > 1 ? strtoull(argv[1], 0, 0) : 1;
    printf("recipes_sanitize: seed %llu\n", (unsigned long long)seed);
    cseq_derive(seed, 0, 99, rng, 4);
    for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
        uint64_t budget = budgets[b], classes = budget < 40 ? budget : 40;
        one_search(budget);
        for (int k = 0; k < 30; k++) one_order(budget, 1 + below(classes), 1 + below(k % 10 ? 60 : 70000));
    }
    for (int k = 0; k < 60; k++) some_groups(1 + below(20), 1 + below(k % 10 ? 40 : 70000));
    printf("ok: %llu cases\n", (unsigned long long)cases);
    return 0;
}
