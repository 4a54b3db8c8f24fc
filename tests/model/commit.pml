/* How a batch leaves the ring (Consumer in cseq/_core.pyx, Slots in cseq/_slots.pyx) as a model for
 * spin; see run.sh. The ring itself is ring.pml; here a claim is one step, and nothing sleeps.
 *
 *   trainer   posts; peeks, decodes, commits; is interrupted; begins epochs       (one thread)
 *   runner    claims, works, publishes, perhaps in a slot of its own; may be dead at any step
 *   watcher   once a runner is gone: reposts what it held, reclaims its slots, starts another
 *   holder    drops leases at any time                                            (any thread)
 *
 * A signal handler raises at any point between two steps of the trainer that are Python, as often as
 * it likes: the trainer then begins anew. Commit is one call of C, in which no handler runs; the other
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
#define SLOTS (CELLS + RUNNERS + 1) /* one more than tickets and spares need: for a lease */
#endif
#if SLOTS < 3 || SLOTS > 5 || CELLS > 2 || RUNNERS > 2
#error "the model is written for fewer"
#endif
#define NUMBERS (TICKETS * EPOCHS)

#define FREE 0 /* a cell, or a slot */
#define POSTED 1
#define INDEXING 2
#define READY 3
#define TAKEN 1
#define LEASED 2
#define NONE 255
#define TORN 255

/* A cell: its word, which changes in one step, and what goes with it. */
byte state[CELLS];
byte ticket[CELLS];
byte owner[CELLS];
byte slot[CELLS] = NONE;
byte home[CELLS] = NONE;
byte by[CELLS];

/* A slot. `owned` is a partial sum until all tickets are settled; it is written under `lock`. */
byte slot_state[SLOTS];
short owned[SLOTS];
byte data[SLOTS];
byte leased_to[SLOTS]; /* the batch whose views hold it; 0: what they show is wanted by no party */
byte lent[SLOTS];      /* for which ticket a decode has made a lease, which counts from the commit on */
bit lock;

/* What no party can see. */
byte spare[RUNNERS + 1] = NONE; /* a slot that this runner knows to be its own */
bit busy[RUNNERS + 1];
bit dead[RUNNERS + 1];
bit gone[RUNNERS + 1];
byte deaths;
bit closed;
bit given[NUMBERS + 1]; /* batches that the caller has */

inline seize() {
#ifdef M_NO_LOCK
    skip
#else
    atomic { !lock -> lock = 1 }
#endif
}

/* The lowest free slot, taken, in `s`; or NONE. */
inline occupy(s) {
    d_step {
        s = 0;
        do
        :: s < SLOTS && slot_state[s] != FREE -> s++
        :: else -> break
        od;
        if
        :: s < SLOTS -> slot_state[s] = TAKEN
        :: else -> s = NONE
        fi
    }
}

/* ── runners ───────────────────────────────────────────────────────────────────────────── */

#define HOLDS(who, s) (spare[who] == (s))
#if RUNNERS > 1
#define IS_SPARE(s) (HOLDS(1, s) || HOLDS(2, s))
#else
#define IS_SPARE(s) HOLDS(1, s)
#endif

inline take_up(cell) {
    state[cell] = INDEXING;
    owner[cell] = me;
    c = cell;
    t = ticket[cell];
    own = slot[cell];
    assert(slot_state[own] == TAKEN && !IS_SPARE(own))
}

proctype runner(byte me) {
    byte c = NONE, t, own = NONE;
born:
    {
        do
        :: atomic { state[0] == POSTED -> busy[me] = 1; take_up(0) };
            goto work;
#if CELLS > 1
        :: atomic { state[1] == POSTED -> busy[me] = 1; take_up(1) };
            goto work;
#endif
        :: atomic { spare[me] != NONE && data[spare[me]] != TORN -> data[spare[me]] = TORN };
            goto next; /* an array in a kept slot is written to */
        :: atomic { closed -> goto left };
work:
            data[own] = TORN;
            if
            :: data[own] = t;
                atomic {
                    assert(state[c] == INDEXING && owner[c] == me && ticket[c] == t);
                    state[c] = READY; owner[c] = 0
                }
            :: atomic { spare[me] != NONE -> data[spare[me]] = t }; /* arrays in it are kept */
                by[c] = me;
                slot[c] = spare[me];
                atomic {
                    assert(state[c] == INDEXING && owner[c] == me && ticket[c] == t);
                    state[c] = READY; owner[c] = 0;
                    spare[me] = own
                }
            fi;
            atomic { c = NONE; t = 0; own = NONE; busy[me] = 0 };
next:
            skip
        od
    } unless {
        atomic {
            dead[me] ->
            c = NONE; t = 0; own = NONE; busy[me] = 0;
            spare[me] = NONE;
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
#ifndef M_NO_HOME
        slot[c] = home[c];
#endif
        atomic { state[c] = POSTED; owner[c] = 0; c++ }
    od
}

inline enter_owners(cell, number) {
    owned[home[cell]] = owned[home[cell]] + number;
    owned[slot[cell]] = owned[slot[cell]] - number;
    home[cell] = slot[cell]
}

/* The slots of a runner that is gone. A word that is the same after slot and home were read says that
 * both are that ticket's. */
inline reclaim(who) {
    seize();
#ifndef M_RECLAIM_UNSETTLED
    c = 0;
    do
    :: atomic { c == CELLS -> c = 0; break }
    :: atomic { c < CELLS && state[c] != READY -> c++ }
    :: atomic { c < CELLS && state[c] == READY -> t = ticket[c] };
        atomic { differs = (slot[c] != home[c]) };
        if
#ifdef M_NO_SECOND_WORD
        :: differs ->
#else
        :: differs && state[c] == READY && ticket[c] == t ->
#endif
            enter_owners(c, by[c])
        :: else
        fi;
        atomic { c++; t = 0; differs = 0 }
    od;
#endif
    c = 0;
    do
    :: atomic { c == SLOTS -> c = 0; break }
    :: atomic { c < SLOTS && owned[c] != who -> c++ }
    :: atomic {
            c < SLOTS && owned[c] == who ->
            owned[c] = 0;
            assert(slot_state[c] == TAKEN && !IS_SPARE(c));
            slot_state[c] = FREE;
            c++
        }
    od;
    lock = 0
}

/* Another one has its number, and a slot of its own if there is one. */
inline launch(who) {
    occupy(c);
    if
    :: c != NONE -> seize(); atomic { owned[c] = owned[c] + who; lock = 0; spare[who] = c }
    :: else
    fi;
    atomic { c = 0; dead[who] = 0; gone[who] = 0 }
}

inline replace(who) {
    repost(who);
    reclaim(who);
    launch(who)
}

proctype watcher() {
    byte c, t;
    bit differs;
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
        slot_state[s] == LEASED -> \
        assert(leased_to[s] == 0 || data[s] == leased_to[s]); \
        slot_state[s] = FREE; leased_to[s] = 0 \
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

/* The next ticket, in a cell that is free, with a slot that is taken. */
inline offer(cell, with) {
    slot[cell] = with;
    home[cell] = with;
    atomic {
        assert(state[cell] == FREE && slot_state[with] == TAKEN && !IS_SPARE(with));
        assert(CELLS == 1 || state[1 - cell] == FREE || slot[1 - cell] != with);
        ticket[cell] = posted; state[cell] = POSTED; posted++
    }
}

/* Enter in which slot the ticket lies. */
inline settle(cell) {
#ifndef M_NO_SETTLE
    if
    :: atomic { slot[cell] != home[cell] -> skip };
        seize();
        if
        :: slot[cell] != home[cell] -> enter_owners(cell, by[cell])
        :: else /* `reclaim` has done it */
        fi;
        lock = 0
    :: atomic { slot[cell] == home[cell] -> skip }
    fi
#else
    skip
#endif
}

/* The slot of a ticket that leaves: the lease's, or in `keep`. */
inline vacate(cell) {
    atomic {
        keep = slot[cell];
        assert(slot_state[keep] == TAKEN);
        if
        :: lent[keep] ->
            slot_state[keep] = LEASED;
            leased_to[keep] = (lent[keep] == ticket[cell] -> ticket[cell] : 0);
            lent[keep] = 0;
            keep = NONE
        :: else
        fi
    }
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

/* Into the caller's hands; the cell's next ticket is posted. No handler runs in it. */
inline commit(cell, number) {
#ifdef M_FREE_BEFORE_ARM
    settle(cell);
    keep = slot[cell];
    retire(cell);
#else
#ifndef M_SETTLE_LATE
    settle(cell);
#endif
    vacate(cell);
    retire(cell);
#endif
#ifdef M_INTERRUPT_FREE_COUNT
    interrupted();
#endif
#ifndef M_POST_BEFORE_COUNT
    taken++;
#endif
    if
    :: atomic { posted < LAST -> skip };
        if
        :: atomic { keep == NONE -> skip }; occupy(keep)
        :: atomic { keep != NONE -> skip }
        fi;
        if
        :: atomic { keep != NONE -> skip }; offer(cell, keep)
        :: atomic { keep == NONE -> skip } /* refilled later */
        fi
    :: atomic {
            posted == LAST ->
            if
            :: keep != NONE -> slot_state[keep] = FREE
            :: else
            fi
        }
    fi;
#ifdef M_FREE_BEFORE_ARM
    if
    :: lent[keep] -> lent[keep] = 0; slot_state[keep] = LEASED; leased_to[keep] = number
    :: else
    fi;
#endif
#ifdef M_SETTLE_LATE
    settle(cell);
#endif
#ifdef M_POST_BEFORE_COUNT
    interrupted();
    taken++;
#endif
    atomic { deliver(number); keep = NONE }
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
    settle(cell);
    vacate(cell);
    atomic {
        if
        :: keep != NONE -> slot_state[keep] = FREE
        :: else
        fi;
        keep = NONE; abandoned[cell] = 0
    };
    retire(cell)
}

/* The runners are idle, and alive; no views are left. */
#define IDLE(who) (!dead[who] && !busy[who])
#define ALL_FREE (state[0] == FREE && (CELLS == 1 || state[CELLS - 1] == FREE))
#define LEASES \
    ((slot_state[0] == LEASED) || (slot_state[1] == LEASED) || (slot_state[2] == LEASED) || \
     (slot_state[SLOTS - 2] == LEASED) || (slot_state[SLOTS - 1] == LEASED))
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
    :: atomic { true -> p = NONE; at = NONE; token = 0; leased = 0; goto again }
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
    :: atomic { true -> slot_state[at] = LEASED; leased_to[at] = token }
#else
    :: atomic { slot_state[at] == TAKEN -> leased = 1; lent[at] = token }
#endif
    fi;
    interrupt();
    atomic {
        assert(!(state[p] == READY && ticket[p] == token) || data[at] == token);
        assert(!(state[p] == READY && ticket[p] == token) || !leased || lent[at] == token)
    }
}

proctype trainer() {
    bit abandoned[CELLS];
    byte posted = 1, base = 1, taken, handed, epoch;
    byte p = NONE, at = NONE, token, keep = NONE, k, old;
    bit leased;
again:
    do
    :: atomic {
            VACANT(0) || VACANT(CELLS - 1) ->
            assert(taken == handed); /* what is counted is what the caller has had */
            k = (VACANT(0) -> 0 : CELLS - 1)
        };
        occupy(keep); /* and this is one step of C */
        if
        :: atomic { keep != NONE -> skip }; offer(k, keep)
        :: atomic { keep == NONE -> skip }
        fi;
        atomic { keep = NONE; k = 0 }
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
        atomic { p = NONE; at = NONE; token = 0; leased = 0 }
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
    /* All cells are free, every slot is free or the spare of one runner: none is lost. */
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
                :: IS_SPARE(k) -> assert(slot_state[k] == TAKEN && HOLDS(owned[k], k))
                :: else -> assert(slot_state[k] == FREE && owned[k] == 0)
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
        slot_state[0] = TAKEN; owned[0] = 1; spare[1] = 0; run runner(1);
#if RUNNERS > 1
        slot_state[1] = TAKEN; owned[1] = 2; spare[2] = 1; run runner(2);
#endif
        run watcher();
        run killer();
        run holder();
        run trainer()
    }
}
