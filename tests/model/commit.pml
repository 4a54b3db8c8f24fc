/* How a batch leaves the ring (Feed in cseq/engine/_feed.pyx), and who has each slot (SlotTable), as a model
 * for spin; see run.sh. The ring itself is ring.pml; here a claim is one step, and nothing sleeps.
 *
 *   trainer   posts; peeks, decodes, commits; is interrupted; begins epochs; tidies  (one thread)
 *   runner    claims, takes a slot, works, publishes the slot, or keeps it and publishes a copy in
 *             another one; may be dead at any step
 *   watcher   once a runner is gone: reposts what it held, reclaims its slots, starts another
 *   holder    drops leases at any time                                            (any thread)
 *
 * A slot has one word, which says who has it: FREE, a runner's number, or TRAINER.
 *
 * A signal handler raises at any point between two steps of the trainer that are Python, as often as
 * it likes: the trainer then starts again. Commit is one call of C, in which no handler runs; the other
 * parties see its steps one by one, as where there is no GIL. A handler takes no batch and begins no
 * epoch: that is refused in the middle of a call (M_REENTRANT: it is not).
 *
 * A ticket's number stands for its batch, in a slot and in the caller's hands.
 */
#ifndef RUNNERS
#define RUNNERS 1
#endif
#ifndef CELLS
#define CELLS 2
#endif
#ifndef TICKETS
#define TICKETS 3 /* of an epoch */
#endif
#ifndef EPOCHS
#define EPOCHS 1 /* each but the last may be left at any time */
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SLOTS
#define SLOTS (CELLS + RUNNERS + 1) /* of tickets; of kept arrays; one more for a lease */
#endif
#if SLOTS < 3 || SLOTS > 5 || CELLS > 2 || RUNNERS > 2
#error "the model is written for fewer"
#endif
#define NUMBERS (TICKETS * EPOCHS)

#define FREE 0 /* a cell, or a slot */
#define POSTED 1
#define INDEXING 2
#define READY 3
#define TRAINER 9
#define NONE 255
#define TORN 255

/* A cell: its word, which changes in one step, and what goes with it. */
byte state[CELLS];
byte ticket[CELLS];
byte owner[CELLS];
byte slot[CELLS] = NONE;

/* A slot: its word in the table, and what lies there. */
byte has[SLOTS];
byte data[SLOTS];
bit leased[SLOTS];     /* the trainer's, until the last view is gone */
byte leased_to[SLOTS]; /* the batch whose views hold it; 0: what they show is wanted by no party */
byte lent[SLOTS];      /* for which ticket a decode has made a lease, which counts from the commit on */

/* What no party can see. */
byte own[RUNNERS + 1] = NONE;  /* the slot that this runner writes to */
byte kept[RUNNERS + 1] = NONE; /* and one in which arrays are alive */
bit busy[RUNNERS + 1];
bit dead[RUNNERS + 1];
bit gone[RUNNERS + 1];
byte deaths;
bit closed;
bit given[NUMBERS + 1]; /* batches that the caller has */

#define IS_FREE(s) (has[s] == FREE)
#if SLOTS == 3
#define ANY_FREE (IS_FREE(0) || IS_FREE(1) || IS_FREE(2))
#elif SLOTS == 4
#define ANY_FREE (IS_FREE(0) || IS_FREE(1) || IS_FREE(2) || IS_FREE(3))
#else
#define ANY_FREE (IS_FREE(0) || IS_FREE(1) || IS_FREE(2) || IS_FREE(3) || IS_FREE(4))
#endif

inline find_free(s) {
    s = 0;
    do
    :: s < SLOTS && has[s] != FREE -> s++
    :: else -> break
    od
}

/* Take the lowest free slot. (Where none is free, there is no bound in the program: it makes one.) */
inline take(s, who) {
#ifdef M_TAKE_NO_CAS
    atomic { ANY_FREE -> find_free(s) };
    has[s] = who
#else
    atomic { ANY_FREE -> find_free(s); has[s] = who }
#endif
}

/* ── runners ───────────────────────────────────────────────────────────────────────────── */

#define HOLDS(who, s) (own[who] == (s) || kept[who] == (s))
#if RUNNERS > 1
#define IS_HELD(s) (HOLDS(1, s) || HOLDS(2, s))
#else
#define IS_HELD(s) HOLDS(1, s)
#endif

inline take_up(cell) {
    busy[me] = 1;
    state[cell] = INDEXING;
    owner[cell] = me;
    c = cell;
    t = ticket[cell]
}

proctype runner(byte me) {
    byte c = NONE, t, s = NONE;
born:
    {
        do
        :: atomic { state[0] == POSTED -> take_up(0) };
            goto work;
#if CELLS > 1
        :: atomic { state[1] == POSTED -> take_up(1) };
            goto work;
#endif
        :: atomic { kept[me] != NONE && data[kept[me]] != TORN -> data[kept[me]] = TORN };
            goto next; /* an array in a kept slot is written to */
        :: atomic { kept[me] != NONE -> busy[me] = 1; s = kept[me]; kept[me] = NONE };
            atomic { assert(has[s] == me); has[s] = FREE; s = NONE; busy[me] = 0 }; /* the last array there is gone */
            goto next;
        :: atomic { closed -> goto left };
work:
            take(s, me);
            atomic { assert(!IS_HELD(s)); own[me] = s };
            data[s] = TORN;
            if
            :: true
            :: atomic { kept[me] == NONE -> kept[me] = s; own[me] = NONE; s = NONE };
                take(s, me); /* arrays in it are kept: a copy in another one */
                atomic { assert(!IS_HELD(s)); own[me] = s }
            fi;
            data[s] = t;
            slot[c] = s;
            atomic {
                assert(state[c] == INDEXING && owner[c] == me && ticket[c] == t && has[s] == me);
                state[c] = READY; owner[c] = 0; own[me] = NONE
            };
            atomic { c = NONE; t = 0; s = NONE; busy[me] = 0 };
next:
            skip
        od
    } unless {
        atomic {
            dead[me] ->
            c = NONE; t = 0; s = NONE; busy[me] = 0;
            own[me] = NONE; kept[me] = NONE;
            gone[me] = 1
        }
    };
    atomic { !gone[me] -> goto born };
left:
    skip
}

/* ── watcher, killer, holder ───────────────────────────────────────────────────────────── */

inline repost(who) {
    c = 0;
    do
    :: atomic { c == CELLS -> c = 0; break }
    :: atomic { c < CELLS && !(state[c] == INDEXING && owner[c] == who) -> c++ }
    :: atomic { c < CELLS && state[c] == INDEXING && owner[c] == who -> skip };
#ifndef M_REPOST_WITH_SLOT
        slot[c] = NONE;
#endif
        atomic { state[c] = POSTED; owner[c] = 0; c++ }
    od
}

/* Which slots published tickets lie in. The state is read, then the slot: that may be a later one's. */
inline look_at_cells() {
    c = 0;
    do
    :: atomic { c == CELLS -> c = 0; break }
    :: atomic { c < CELLS && state[c] != READY -> c++ }
    :: atomic { c < CELLS && state[c] == READY -> skip };
        atomic {
            if
            :: slot[c] != NONE -> named[slot[c]] = 1
            :: else
            fi;
            c++
        }
    od
}

/* Free the slots of a runner that is gone, except for its published tickets: the trainer takes over
 * their slots before it retires the cell. */
inline reclaim(who) {
#ifndef M_RECLAIM_NAMED
    look_at_cells();
#endif
    c = 0;
    do
    :: atomic { c == SLOTS -> break }
    :: atomic { c < SLOTS && (named[c] || has[c] != who) -> c++ }
    :: atomic { c < SLOTS && !named[c] && has[c] == who -> assert(!IS_HELD(c)); has[c] = FREE; c++ }
    od;
    atomic {
        c = 0;
        do
        :: c < SLOTS -> named[c] = 0; c++
        :: else -> c = 0; break
        od
    }
}

inline replace(who) {
    repost(who);
#ifdef M_LAUNCH_FIRST
    atomic { dead[who] = 0; gone[who] = 0 };
#endif
#ifndef M_NO_RECLAIM
    reclaim(who);
#endif
    atomic { dead[who] = 0; gone[who] = 0 }
}

proctype watcher() {
    byte c;
    bit named[SLOTS];
end:
    do
    :: atomic { gone[1] -> skip }; replace(1)
#if RUNNERS > 1
    :: atomic { gone[2] -> skip }; replace(2)
#endif
    od
}

proctype killer() {
end:
    do
    :: atomic { deaths < DEATHS && !dead[1] && !closed -> deaths++; dead[1] = 1 }
#if RUNNERS > 1
    :: atomic { deaths < DEATHS && deaths > 0 && !dead[2] && !closed -> deaths++; dead[2] = 1 }
#endif
    od
}

/* A batch is whole until its last view is gone. */
#define DROP(s) \
    atomic { \
        leased[s] -> \
        assert(has[s] == TRAINER && (leased_to[s] == 0 || data[s] == leased_to[s])); \
        leased[s] = 0; has[s] = FREE; leased_to[s] = 0 \
    }

proctype holder() {
end:
    do
    :: DROP(0)
    :: DROP(1)
    :: DROP(2)
#if SLOTS > 3
    :: DROP(3)
#endif
#if SLOTS > 4
    :: DROP(4)
#endif
    od
}

/* ── trainer ───────────────────────────────────────────────────────────────────────────── */

#define LAST (base + TICKETS) /* the epoch's tickets are base … LAST - 1 */

inline deliver(number) {
    assert(number >= base && number < LAST && !given[number]);
#ifndef UNORDERED
    assert(number == base + handed);
#endif
    given[number] = 1;
    handed++
}

/* The next ticket, in a cell that is free. */
inline offer(cell) {
    slot[cell] = NONE;
    atomic {
        assert(state[cell] == FREE);
        ticket[cell] = posted; state[cell] = POSTED; posted++
    }
}

/* The slot of a ticket that leaves becomes the trainer's, and the cell names it no more. */
inline adopt(cell) {
    keep = slot[cell];
#ifdef M_CLEAR_BEFORE_ADOPT
    slot[cell] = NONE;
#endif
    if
    :: atomic { keep != NONE -> assert(has[keep] != FREE && !leased[keep]); has[keep] = TRAINER }
    :: atomic { keep == NONE -> skip } /* it was given up before it was claimed */
    fi;
#ifndef M_KEEP_NAME
    slot[cell] = NONE
#endif
}
/* Then the lease's, or free. */
inline vacate(number) {
    if
    :: atomic {
            keep != NONE && lent[keep] ->
            leased[keep] = 1;
            leased_to[keep] = (lent[keep] == number -> number : 0);
            lent[keep] = 0
        }
    :: atomic { keep != NONE && !lent[keep] -> assert(has[keep] == TRAINER); has[keep] = FREE }
    :: atomic { keep == NONE -> skip }
    fi;
    keep = NONE
}

inline retire(cell) {
    atomic { state[cell] = FREE; ticket[cell] = 0 }
}

/* A handler that raises in the middle: only if commit were steps of Python. */
inline interrupted() {
    if
    :: true
    :: atomic { true -> p = NONE; at = NONE; token = 0; keep = NONE; goto again }
    fi
}

/* A ticket leaves its cell. */
inline leave(cell, number) {
#ifdef M_FREE_BEFORE_ARM
    adopt(cell);
    has[keep] = FREE;
    atomic { has[keep] = TRAINER };
    vacate(number);
    retire(cell)
#elif defined(M_RETIRE_BEFORE_ADOPT)
    retire(cell);
    adopt(cell);
    vacate(number)
#else
    adopt(cell);
    vacate(number);
    retire(cell)
#endif
}

/* Into the caller's hands; the cell's next ticket is posted. No handler runs in it. */
inline commit(cell, number) {
    leave(cell, number);
#ifdef M_INTERRUPT_FREE_COUNT
    interrupted();
#endif
#ifndef M_POST_BEFORE_COUNT
    taken++;
#endif
    if
    :: atomic { posted < LAST -> skip }; offer(cell)
    :: atomic { posted == LAST -> skip }
    fi;
#ifdef M_POST_BEFORE_COUNT
    interrupted();
    taken++;
#endif
    deliver(number)
}

/* The epoch ends, as another begins: its tickets are given up. */
inline begin() {
    d_step {
        k = 0;
        do
        :: k < CELLS ->
            if
            :: state[k] != FREE -> abandoned[k] = 1
            :: else
            fi;
            k++
        :: else -> break
        od;
        k = 0; epoch++; base = posted; taken = 0; handed = 0
    }
}

#define GIVEN_UP(cell) (abandoned[cell] && (state[cell] == POSTED || state[cell] == READY))

/* Free the cell of a ticket that was given up: from here on no runner claims it. */
inline sweep(cell) {
    atomic { GIVEN_UP(cell) -> state[cell] = READY; k = 0 };
    leave(cell, ticket[cell]);
    abandoned[cell] = 0
}

/* The runners are idle, and alive; no views are left. */
#define IDLE(who) (!dead[who] && !busy[who])
#define ALL_FREE (state[0] == FREE && (CELLS == 1 || state[CELLS - 1] == FREE))
#define LEASES \
    (leased[0] || leased[1] || leased[2] || leased[SLOTS - 2] || leased[SLOTS - 1])
#define QUIET (ALL_FREE && IDLE(1) && (RUNNERS == 1 || IDLE(RUNNERS)) && !LEASES)

/* Whether the ticket in a cell can be taken next. */
#ifdef UNORDERED
#define IS_NEXT(cell) (state[cell] == READY && !abandoned[cell])
#else
#define IS_NEXT(cell) (state[cell] == READY && !abandoned[cell] && ticket[cell] == base + taken)
#endif

/* Where a handler may run: it raises, or returns. */
inline interrupt() {
    if
    :: true
    :: atomic { true -> p = NONE; at = NONE; token = 0; is_lent = 0; goto again }
#ifdef M_REENTRANT
    :: atomic { IS_NEXT(0) -> old = ticket[0]; commit(0, old); old = 0 }
#endif
    fi
}

#define VACANT(cell) (state[cell] == FREE && posted < LAST)

/* A ticket that is READY; nothing changes. */
inline peek() {
    if
    :: atomic { IS_NEXT(0) -> p = 0; at = slot[0]; token = ticket[0] }
#if CELLS > 1
    :: atomic { IS_NEXT(1) -> p = 1; at = slot[1]; token = ticket[1] }
#endif
    fi
}

/* A copy of the batch, or views of the slot under a lease: one, for all decodes of the ticket. */
inline decode() {
    if
    :: true
#ifdef M_ARM_IN_DECODE
    :: atomic { true -> has[at] = TRAINER; leased[at] = 1; leased_to[at] = token }
#else
    :: atomic { has[at] != FREE && !leased[at] -> is_lent = 1; lent[at] = token }
#endif
    fi;
    interrupt();
    atomic {
        assert(!(state[p] == READY && ticket[p] == token) || data[at] == token);
        assert(!(state[p] == READY && ticket[p] == token) || !is_lent || lent[at] == token)
    }
}

proctype trainer() {
    bit abandoned[CELLS];
    byte posted = 1, base = 1, taken, handed, epoch;
    byte p = NONE, at = NONE, token, keep = NONE, k, old;
    bit is_lent;
again:
    do
    :: atomic {
            VACANT(0) || VACANT(CELLS - 1) ->
            assert(taken == handed); /* what is counted is what the caller has had */
            k = (VACANT(0) -> 0 : CELLS - 1)
        };
        offer(k); /* one step of C */
        k = 0
#ifdef TIDY
    :: take(keep, TRAINER); /* pages of a free slot are given back */
        data[keep] = TORN;
        atomic { has[keep] = FREE; keep = NONE }
#endif
    :: sweep(0)
#if CELLS > 1
    :: sweep(1)
#endif
#if EPOCHS > 1
    :: atomic { epoch + 1 < EPOCHS && posted > base -> begin() } /* the loop is left */
#endif
    :: peek();
#ifdef M_COMMIT_BEFORE_DECODE
        commit(p, token);
        interrupt();
        assert(data[at] == token);
#else
        interrupt();
        decode();
        interrupt();
        commit(p, token);
#endif
        atomic { p = NONE; at = NONE; token = 0; is_lent = 0 }
    :: atomic {
            posted == LAST && taken == TICKETS ->
            assert(taken == handed);
            if
#if EPOCHS > 1
            :: epoch + 1 < EPOCHS -> begin()
#endif
            :: epoch + 1 == EPOCHS -> break
            fi
        }
    od;
    /* All cells are free, every slot is free or of one runner: none is lost. */
    do
    :: sweep(0)
#if CELLS > 1
    :: sweep(1)
#endif
    :: atomic {
            QUIET ->
            do
            :: k < SLOTS ->
                if
                :: IS_HELD(k) -> assert(HOLDS(has[k], k))
                :: else -> assert(has[k] == FREE)
                fi;
                k++
            :: else -> break
            od;
            closed = 1;
            break
        }
    od
}

init {
    atomic {
        run runner(1);
#if RUNNERS > 1
        run runner(2);
#endif
        run watcher();
        run killer();
        run holder();
        run trainer()
    }
}
