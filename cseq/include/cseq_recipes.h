/* Units made of samples that can stand in for each other: `recipes-v1` and `groups-v1` of
 * docs/inside/orders.md.
 *
 * Samples are sorted by class once (4 bytes a sample). A recipe says how many samples of which classes
 * make a unit; which samples of a class these are, and which unit comes when, is a permutation for
 * each epoch. The samples of a class that has fewer than CSEQ_FEISTEL_LEAST are put in their order, 4 bytes
 * each, when it is first read, and then read in a row; those of others are looked up one by one.
 *
 * The caller owns the memory; nothing here allocates, waits or fails.
 */
#ifndef CSEQ_RECIPES_H
#define CSEQ_RECIPES_H

#include "cseq_permutation.h"

/* ---- construction -------------------------------------------------------------------------- */

/* Put samples start .. end-1 into the table; `next`: where the next sample of each class goes. */
static inline void cseq_sort_classes(const uint32_t *classes, uint64_t start, uint64_t end,
                                     int64_t *next, uint32_t *table)
{
    for (uint64_t k = start; k < end; k++)
        table[next[classes[k]]++] = (uint32_t)k;
}

/* Rows that are filled alike: `count` rows have what `parent` has, and `many` samples of a class. */
typedef struct {
    int64_t count, many;
    uint32_t parent; /* CSEQ_NO_KIND: they were empty */
    uint32_t class_;
    uint32_t next; /* the kind with as much room that was made after it */
    uint32_t depth;
} cseq_kind;

#define CSEQ_NO_KIND 0 /* no kind; those that there are begin with 1 */

enum { CSEQ_FIT_LEVELS = 6 }; /* 64^6 rooms */

/* Best fit decreasing on a histogram. */
typedef struct {
    uint64_t budget;
    const int64_t *lengths, *counts; /* of each class, ascending lengths */
    int64_t class_;                  /* the next one; -1: done */
    int64_t left;                    /* samples of it */
    cseq_kind *kinds;
    uint32_t made, most;             /* the kinds are 1 .. made-1; there is room for most-1 */
    uint32_t *head, *tail;           /* of each room: its kinds, in the order in which they were made */
    uint64_t *level[CSEQ_FIT_LEVELS]; /* bit r of level 0: there are kinds of room r; of the next: of 64 */
} cseq_fit;

/* Words of a level for rooms 0 .. budget. */
static inline uint64_t cseq_fit_words(uint64_t budget, int level)
{
    return (budget >> (6 * (level + 1))) + 1;
}

static inline void cseq_fit_mark(cseq_fit *f, uint64_t room, int present)
{
    for (int l = 0; l < CSEQ_FIT_LEVELS; l++, room >>= 6) {
        uint64_t *word = &f->level[l][room >> 6], bit = UINT64_C(1) << (room & 63);
        if (present) {
            *word |= bit;
        } else {
            *word &= ~bit;
            if (*word)
                return;
        }
    }
}

/* The least room of at least `room` that there are kinds of; budget + 1: none. */
static inline uint64_t cseq_fit_find(const cseq_fit *f, uint64_t room)
{
    int l = 0;
    uint64_t at = room;
    for (;; l++, at = (at >> 6) + 1) {
        if (l == CSEQ_FIT_LEVELS || at >> 6 >= cseq_fit_words(f->budget, l))
            return f->budget + 1;
        uint64_t word = f->level[l][at >> 6] >> (at & 63);
        if (!word)
            continue;
        for (;; l--) {
            for (; !(word & 1); word >>= 1)
                at++;
            if (!l)
                return at;
            word = f->level[l - 1][at];
            at <<= 6;
        }
    }
}

/* Add a kind: `count` rows of `parent` get `many` samples of a class, and have `room` left. */
static inline void cseq_fit_add(cseq_fit *f, uint64_t room, uint32_t parent, int64_t class_,
                                int64_t many, int64_t count)
{
    uint32_t k = f->made++;
    uint32_t depth = parent == CSEQ_NO_KIND ? 1 : f->kinds[parent].depth + 1;
    cseq_kind kind = {count, many, parent, (uint32_t)class_, CSEQ_NO_KIND, depth};
    f->kinds[k] = kind;
    if (f->head[room] == CSEQ_NO_KIND) {
        f->head[room] = k;
        cseq_fit_mark(f, room, 1);
    } else {
        f->kinds[f->tail[room]].next = k;
    }
    f->tail[room] = k;
}

/* Go on, for at most `steps`: until all is done (class_ is -1), or there is no room for two kinds. */
static inline void cseq_fit_advance(cseq_fit *f, uint64_t steps)
{
    for (; f->class_ >= 0 && f->most - f->made >= 2 && steps; steps--) {
        uint64_t length = (uint64_t)f->lengths[f->class_];
        if (!f->left) {
            if (--f->class_ >= 0)
                f->left = f->counts[f->class_];
            continue;
        }
        uint64_t room = cseq_fit_find(f, length);
        if (room > f->budget) { /* new rows */
            int64_t many = (int64_t)(f->budget / length), full = f->left / many;
            if (full)
                cseq_fit_add(f, f->budget - (uint64_t)many * length, CSEQ_NO_KIND, f->class_, many, full);
            many = f->left % many;
            if (many)
                cseq_fit_add(f, f->budget - (uint64_t)many * length, CSEQ_NO_KIND, f->class_, many, 1);
            f->left = 0;
            continue;
        }
        uint32_t k = f->head[room];
        cseq_kind *kind = &f->kinds[k];
        int64_t many = (int64_t)(room / length);
        many = many < f->left ? many : f->left;
        int64_t rows = f->left / many;
        rows = rows < kind->count ? rows : kind->count;
        kind->count -= rows;
        if (!kind->count) {
            f->head[room] = kind->next;
            if (kind->next == CSEQ_NO_KIND)
                cseq_fit_mark(f, room, 0);
        }
        f->left -= rows * many;
        cseq_fit_add(f, room - (uint64_t)many * length, k, f->class_, many, rows);
    }
}

/* A part of a recipe: copy i takes `many` samples of a class, from its rank base + i * many on. */
typedef struct {
    int64_t class_, many, base;
} cseq_part;

/* Recipes and parts that a fit has made. */
static inline uint64_t cseq_fit_count(const cseq_fit *f, uint64_t *parts)
{
    uint64_t recipes = 0;
    *parts = 0;
    for (uint32_t k = 1; k < f->made; k++) {
        if (f->kinds[k].count) {
            recipes++;
            *parts += f->kinds[k].depth;
        }
    }
    return recipes;
}

/* Write the recipes, least room first, of equal room in the order in which they were made: `copies` of
 * each, its parts from `first` on. `next`: of each class, 0, and then its number of samples. */
static inline void cseq_fit_write(const cseq_fit *f, int64_t *copies, int64_t *first, cseq_part *parts,
                                  int64_t *next)
{
    int64_t written = 0;
    for (uint64_t room = cseq_fit_find(f, 0); room <= f->budget; room = cseq_fit_find(f, room + 1)) {
        for (uint32_t k = f->head[room]; k != CSEQ_NO_KIND; k = f->kinds[k].next) {
            int64_t count = f->kinds[k].count;
            *copies++ = count;
            *first++ = written;
            written += f->kinds[k].depth;
            for (uint32_t p = k, d = 0; p != CSEQ_NO_KIND; p = f->kinds[p].parent) {
                cseq_part part = {f->kinds[p].class_, f->kinds[p].many, next[f->kinds[p].class_]};
                next[part.class_] += count * part.many;
                parts[written - ++d] = part;
            }
        }
    }
    *first = written;
}

/* ---- members of classes -------------------------------------------------------------------- */

/* The samples of classes, each class in the order of a permutation. */
typedef struct {
    const uint32_t *table;   /* samples, class after class */
    const int64_t *offsets;  /* where each class begins in it, and where the last one ends */
    const int64_t *places;   /* of each class: where it is in `permuted`, or its number in `networks` */
    uint64_t *made;          /* what the permutation of each class was made for; 0: none was made */
    uint32_t *permuted;      /* samples of classes with fewer than CSEQ_FEISTEL_LEAST, in their order */
    cseq_feistel *networks;  /* of the others */
    uint32_t *scratch;       /* CSEQ_FEISTEL_LEAST entries */
} cseq_members;

static inline uint64_t cseq_members_size(const cseq_members *m, uint64_t class_)
{
    return (uint64_t)(m->offsets[class_ + 1] - m->offsets[class_]);
}

/* Steps that `cseq_members_make` takes. */
static inline uint64_t cseq_members_cost(const cseq_members *m, uint64_t class_, uint64_t what)
{
    return m->made[class_] == what ? 0 : cseq_permutation_entries(cseq_members_size(m, class_));
}

/* Permute a class, unless it was for the same `what`. */
static inline void cseq_members_make(cseq_members *m, uint64_t class_, uint64_t what, uint64_t seed,
                                     uint64_t epoch, uint64_t purpose, uint64_t key)
{
    uint64_t n = cseq_members_size(m, class_);
    cseq_permutation p;
    if (m->made[class_] == what)
        return;
    m->made[class_] = what;
    cseq_permutation_init(&p, n, seed, epoch, purpose, key, m->scratch);
    if (p.table) {
        const uint32_t *table = m->table + m->offsets[class_];
        uint32_t *permuted = m->permuted + m->places[class_];
        for (uint64_t k = 0; k < n; k++)
            permuted[k] = table[p.table[k]];
    } else {
        m->networks[m->places[class_]] = p.feistel;
    }
}

/* The samples of a class that was permuted, from `rank` on. */
static inline void cseq_members_read(const cseq_members *m, uint64_t class_, uint64_t rank,
                                     uint64_t count, int64_t *out)
{
    const uint32_t *table = m->table + m->offsets[class_];
    if (cseq_members_size(m, class_) < CSEQ_FEISTEL_LEAST) {
        const uint32_t *permuted = m->permuted + m->places[class_] + rank;
        for (uint64_t k = 0; k < count; k++)
            out[k] = permuted[k];
        return;
    }
    cseq_feistel_read(&m->networks[m->places[class_]], rank, count, out);
    for (uint64_t k = 0; k < count; k++)
        out[k] = table[out[k]];
}

/* ---- recipes ------------------------------------------------------------------------------- */

typedef struct {
    cseq_members members;
    const int64_t *starts;  /* units before each recipe, and all */
    const int64_t *first;   /* parts before each recipe, and all */
    const cseq_part *parts;
    uint64_t recipes, together, seed;
    int64_t longest;        /* a unit of the group that comes first; -1: it is drawn */
    uint32_t *table;        /* cseq_permutation_entries(units / together) */
    uint64_t generation;    /* +1 for each epoch; 0: none was begun */
    uint64_t epoch;
    cseq_permutation order; /* of the groups */
    uint64_t groups, rest;  /* of `together` units; units of the short group */
    uint64_t at;            /* the groups before the short one */
    uint64_t turn;          /* added to the group, modulo `groups` */
    int64_t drawn[CSEQ_LANES]; /* of `order`, at places from `ahead` on: `known` of them */
    uint64_t ahead, known;
    uint64_t latest;        /* the recipe that was found last */
} cseq_recipes;

/* The group of a permutation's value. */
static inline uint64_t cseq_recipes_turned(const cseq_recipes *r, uint64_t group)
{
    group += r->turn;
    return group < r->groups ? group : group - r->groups;
}

static inline void cseq_recipes_begin(cseq_recipes *r, uint64_t epoch, uint64_t groups)
{
    uint64_t word, low;
    int64_t drawn;
    r->generation++;
    r->epoch = epoch;
    r->groups = groups;
    r->rest = (uint64_t)r->starts[r->recipes] - groups * r->together;
    r->turn = r->known = 0;
    if (r->groups)
        cseq_permutation_init(&r->order, r->groups, r->seed, epoch, CSEQ_PURPOSE_UNITS, 0, r->table);
    if (r->longest < 0 || !r->groups) {
        cseq_derive_keyed(r->seed, epoch, CSEQ_PURPOSE_UNITS, 1, &word, 1);
        r->at = cseq_multiply(word, r->groups + 1, &low);
        return;
    }
    uint64_t unit = (uint64_t)r->longest;
    r->at = unit < r->rest ? r->groups : 0;
    cseq_permutation_read(&r->order, 0, 1, &drawn);
    uint64_t wanted = (unit - (r->at ? 0 : r->rest)) / r->together;
    r->turn = (wanted + r->groups - (uint64_t)drawn) % r->groups;
}

/* The group at a place of the order. */
static inline uint64_t cseq_recipes_group(cseq_recipes *r, uint64_t place)
{
    if (place - r->ahead >= r->known) { /* also if it is before them */
        uint64_t left = r->groups - place;
        r->ahead = place;
        r->known = left < CSEQ_LANES ? left : CSEQ_LANES;
        cseq_permutation_read(&r->order, place, r->known, r->drawn);
    }
    return cseq_recipes_turned(r, (uint64_t)r->drawn[place - r->ahead]);
}

/* The recipe that a unit, by its number in the list of recipes, is a copy of: often that of the unit
 * before, since groups are of neighbours. */
static inline uint64_t cseq_recipes_find(cseq_recipes *r, int64_t unit)
{
    uint64_t low = 0, high = r->recipes;
    if (r->starts[r->latest] <= unit && unit < r->starts[r->latest + 1])
        return r->latest;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (r->starts[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return r->latest = low;
}

/* Write the samples of units start .. start+count-1 of an epoch from out[*written] on, and the size of
 * each unit unless `sizes` is NULL; return how many units these are, fewer than `count` when `steps`
 * were taken. To go on, call it again with the rest. Of CSEQ_FEISTEL_LEAST steps, some get it further. */
static inline uint64_t cseq_recipes_read(cseq_recipes *r, uint64_t epoch, uint64_t start, uint64_t count,
                                         int64_t *out, int64_t *sizes, uint64_t *written, uint64_t steps)
{
    uint64_t done = 0, taken = 0;
    if (!r->generation || epoch != r->epoch) {
        uint64_t groups = (uint64_t)r->starts[r->recipes] / r->together;
        taken = cseq_permutation_entries(groups);
        if (taken > steps)
            return 0;
        cseq_recipes_begin(r, epoch, groups);
    }
    uint64_t grouped = r->groups * r->together;
    for (; done < count && taken < steps; done++) {
        uint64_t t = start + done, x = r->at * r->together + (t - grouped);
        if (t < grouped) {
            uint64_t group = cseq_recipes_group(r, t / r->together);
            x = group * r->together + t % r->together + (group >= r->at ? r->rest : 0);
        }
        uint64_t recipe = cseq_recipes_find(r, (int64_t)x);
        uint64_t copy = x - (uint64_t)r->starts[recipe], size = 0;
        for (int64_t p = r->first[recipe]; p < r->first[recipe + 1]; p++) {
            const cseq_part *part = &r->parts[p];
            uint64_t cost = cseq_members_cost(&r->members, (uint64_t)part->class_, r->generation);
            if (cost > steps - taken)
                return done; /* what was made stays */
            taken += cost;
            cseq_members_make(&r->members, (uint64_t)part->class_, r->generation, r->seed, epoch,
                              CSEQ_PURPOSE_MEMBERS, (uint64_t)part->class_);
            cseq_members_read(&r->members, (uint64_t)part->class_,
                              (uint64_t)part->base + copy * (uint64_t)part->many, (uint64_t)part->many,
                              out + *written + size);
            size += (uint64_t)part->many;
        }
        *written += size;
        taken += taken + size < steps ? size : steps - taken;
        if (sizes)
            sizes[done] = (int64_t)size;
    }
    return done;
}

/* ---- groups -------------------------------------------------------------------------------- */

typedef struct {
    cseq_members members;
    uint64_t seed, total;   /* total: classes there are */
    uint64_t classes, each; /* of a unit: classes, and samples of each */
    uint64_t units;         /* of an epoch */
    uint32_t *table;        /* cseq_permutation_entries(total) */
    int begun;
    uint64_t round;         /* that `order` is of */
    cseq_permutation order;
} cseq_groups;

/* As `cseq_recipes_read`. Units of all epochs are one sequence, of 2^63; its words are those of epoch 0. */
static inline uint64_t cseq_groups_read(cseq_groups *g, uint64_t epoch, uint64_t start, uint64_t count,
                                        int64_t *out, uint64_t steps)
{
    uint64_t done = 0, taken = 0, a_round = g->total / g->classes;
    for (; done < count && taken < steps; done++) {
        uint64_t unit = (epoch * g->units + start + done) & INT64_MAX, round = unit / a_round;
        uint64_t place = unit % a_round * g->classes;
        if (!g->begun || round != g->round) {
            uint64_t cost = cseq_permutation_entries(g->total);
            if (cost > steps - taken)
                return done;
            taken += cost;
            cseq_permutation_init(&g->order, g->total, g->seed, 0, CSEQ_PURPOSE_GROUPS, round, g->table);
            g->begun = 1;
            g->round = round;
        }
        for (uint64_t k = 0; k < g->classes; k++) {
            int64_t drawn, *to = out + (done * g->classes + k) * g->each;
            cseq_permutation_read(&g->order, place + k, 1, &drawn);
            uint64_t class_ = (uint64_t)drawn;
            uint64_t n = cseq_members_size(&g->members, class_);
            uint64_t turns = n < g->each ? 1 : n / g->each, pass = round / turns;
            uint64_t cost = cseq_members_cost(&g->members, class_, pass + 1);
            if (cost > steps - taken)
                return done;
            taken += cost;
            cseq_members_make(&g->members, class_, pass + 1, g->seed, 0, CSEQ_PURPOSE_GROUPS,
                              ((class_ + 1) << 32) + pass);
            uint64_t first = round % turns * g->each;
            for (uint64_t made = 0; made < g->each;) { /* the samples of a class that has too few repeat */
                uint64_t some = g->each - made < n - first ? g->each - made : n - first;
                cseq_members_read(&g->members, class_, first, some, to + made);
                made += some;
                first = 0;
            }
        }
        uint64_t size = g->classes * g->each;
        taken += taken + size < steps ? size : steps - taken;
    }
    return done;
}

#endif
