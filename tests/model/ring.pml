/* The ring's protocol (cseq/include/cseq_ring.h) as a model for spin; see run.sh.
 *
 * One statement here is one atomic operation there, so that every interleaving of those is tried,
 * and a runner may vanish before any of them. Sequential consistency is assumed: docs/inside/ring.md says
 * why that is enough, and the C harnesses check the memory orders.
 *
 *   trainer   posts, takes in order, waits, abandons, sweeps, closes        (one thread)
 *   runner    claims, works, publishes, sleeps; may be dead at any step
 *   watcher   once a runner is gone: reposts what it held, notifies all, starts another
 *   killer    kills at most DEATHS times, whomever and whenever it likes
 *   resizer   RESIZES times has fewer indexers, or all again; adds cells to the round: the trainer does,
 *             here at any time
 *
 * The event counter of a gate is kept as one bit per sleeper, fresh: "event still equals what I
 * have seen". Adding to the event clears the bits of everybody at that gate. That is the same as
 * counting, unless 2^32 events pass within one sleep.
 *
 * A sleeper sleeps forever unless PARK is defined, which lets any sleep end at any time.
 */
#ifndef STAGES
#define STAGES 1
#endif
#ifndef RUNNERS
#define RUNNERS 2 /* with two stages, the last one is the converter */
#endif
#ifndef CELLS
#define CELLS 2
#endif
#ifndef TICKETS
#define TICKETS 3
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef RESTARTS
#define RESTARTS DEATHS /* a death beyond these is an error that the trainer must hear of */
#endif

#ifndef RESIZES
#define RESIZES 0
#endif

#ifdef QUEUE /* a ring of one runner, which claims in the order of the posts; else a shared ring */
#if defined(COARSE) || RUNNERS > 1 || STAGES > 1
#error "COARSE takes any ticket, also out of order; a queue has one runner"
#endif
#endif

#define FREE 0
#define POSTED 1
#define INDEXING 2
#define INDEXED 3
#define CONVERTING 4
#define READY 5

#define INPUT 0
#define MIDDLE 1
#define OUTPUT 2
#define TRAINER 0 /* runners are 1 .. RUNNERS, as owners are */
#define NONE 255
#define TORN 255 /* a payload that is being written */

#define STAGE_OF(me) (STAGES == 2 && (me) == RUNNERS -> 1 : 0)
#define OPEN(me) (STAGE_OF(me) == 1 -> INDEXED : POSTED)
#define NEXT(me) (STAGES == 2 && STAGE_OF(me) == 0 -> INDEXED : READY)
#define GATE_OF(p) ((p) == TRAINER -> OUTPUT : STAGE_OF(p))
#define AFTER(c) ((c) + 1 == CELLS -> 0 : (c) + 1)

/* The word of a cell: all of it changes in one step. */
byte state[CELLS];
byte ticket[CELLS];
byte owner[CELLS];

/* What the other fields and the slot carry: the ticket's number stands for the data. */
byte input[CELLS];
byte middle[CELLS];
byte output[CELLS];

#ifdef QUEUE
byte hint; /* the next cell to claim */
#endif
bit closed;
byte admits = RUNNERS; /* indexers with higher numbers leave */
byte round = (RESIZES -> 1 : CELLS); /* the cells that are looked at */
byte resizes;
bit asleep[3];
byte wanted;
bit fresh[RUNNERS + 1];
bit sleeping[RUNNERS + 1]; /* in the kernel */

/* What nobody in the program can see. */
byte worked_by[CELLS]; /* the living runner that works on the cell */
byte latest[RUNNERS + 1]; /* the ticket that a queue's runner has claimed last */
byte deaths;
bit dead[RUNNERS + 1];    /* takes no step any more */
bit gone[RUNNERS + 1];    /* and that is known for certain */
bit serving[RUNNERS + 1]; /* has not left */
bit failed;               /* the watcher's message to the trainer, outside the ring */
bit finished;

/* ── gates ─────────────────────────────────────────────────────────────────────────────── */

inline event_add(g) {
    d_step {
        i = 0;
        do
        :: i <= RUNNERS ->
            if
            :: GATE_OF(i) == g -> fresh[i] = 0
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0
    }
}

inline kernel_wake(g) {
    d_step {
        i = 0;
        do
        :: i <= RUNNERS ->
            if
            :: GATE_OF(i) == g -> sleeping[i] = 0
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0
    }
}

inline enter(g, me) {
#ifdef M_ENTER_ORDER
    asleep[g] = 1;
    fresh[me] = 1
#else
    fresh[me] = 1;
    asleep[g] = 1
#endif
}

inline sleep(me) {
    atomic { sleeping[me] = fresh[me]; fresh[me] = 0 } /* compares and queues in one step */
    atomic {
        if
        :: !sleeping[me]
#ifdef PARK
        :: sleeping[me] = 0
#endif
        fi
    }
}

inline notify_all(g) {
#ifdef M_ALARM_ORDER
    event_add(g);
    asleep[g] = 0;
#else
    asleep[g] = 0;
    event_add(g);
#endif
    kernel_wake(g)
}

inline notify(g) {
    if
    :: atomic { !asleep[g] -> skip }
    :: atomic { asleep[g] -> skip };
        atomic { old = asleep[g]; asleep[g] = 0 }
        if
        :: atomic { old -> old = 0 };
#ifdef M_KNOCK_ORDER
            event_add(g);
            kernel_wake(g);
            asleep[g] = 0
#else
#ifndef M_NO_EVENT
            event_add(g);
#endif
#ifndef M_NO_WAKE
            kernel_wake(g)
#else
            skip
#endif
#endif
        :: atomic { !old -> skip }
        fi
    fi
}

/* ── runners ───────────────────────────────────────────────────────────────────────────── */

/* Work is not a step of its own: from here on the data is torn, until the cell is handed on. */
inline begin_work() {
    assert(worked_by[got] == 0);
    worked_by[got] = me;
#ifdef QUEUE
    assert(t >= latest[me]);
    latest[me] = t;
#endif
    if
    :: STAGE_OF(me) == 0 -> assert(input[got] == t); middle[got] = TORN
    :: else -> assert(middle[got] == t); output[got] = TORN
    fi
}

#define IS_OPEN(c) (state[c] == OPEN(me))
#define LEAVES(me) (closed || (STAGE_OF(me) == 0 && (me) > admits))

/* Where to look: `seen_at` with its ticket in `t`, or NONE. A shared ring: from 0, or (HINT) from
 * anywhere on. A queue: at one cell. */
#if defined(QUEUE) && !defined(M_QUEUE_SCANS)
inline look() {
    c = hint;
    atomic {
        if
        :: IS_OPEN(c) -> seen_at = c; t = ticket[c]
        :: else -> seen_at = NONE; t = NONE
        fi;
        c = 0
    }
}
#else
inline look() {
    atomic {
        k = 0;
        n = round;
        seen_at = NONE;
        t = NONE;
#ifdef QUEUE
        c = hint
#else
#ifdef HINT
        if
        :: c = 0
#if CELLS > 1
        :: c = 1
#endif
#if CELLS > 2
        :: c = 2
#endif
        fi
#else
        c = 0
#endif
#endif
    }
    do
    :: atomic { k == CELLS -> k = 0; c = 0; n = 0; break }
    :: atomic { k < CELLS && !(c < n && IS_OPEN(c)) -> k++; c = AFTER(c) }
    :: atomic { k < CELLS && c < n && IS_OPEN(c) -> seen_at = c; t = ticket[c]; k = 0; c = 0; n = 0; break }
    od
}
#endif

/* The effect of a compare-and-swap that succeeds. */
inline grab() {
    t = ticket[got];
    state[got] = OPEN(me) + 1;
    owner[got] = me;
    begin_work()
}

/* A cell in `got`, or NONE. */
#ifdef COARSE
inline claim() {
    n = round;
    do
    :: atomic { k == n -> k = 0; n = 0; break }
    :: atomic { k < n && !IS_OPEN(k) -> k++ }
    :: atomic { k < n && IS_OPEN(k) -> got = k; k = 0; n = 0; grab(); break }
    od
}
#else
inline claim() {
    do
    :: look();
        if
        :: atomic { seen_at == NONE -> t = 0; seen_at = 0; break }
        :: atomic { seen_at != NONE -> skip }
        fi;
        atomic {
            if
#ifdef M_CLAIM_NO_CAS
            :: true ->
#else
            :: state[seen_at] == OPEN(me) && ticket[seen_at] == t ->
#endif
                got = seen_at;
                seen_at = 0;
#ifdef M_CLAIM_THEN_OWNER
                state[got] = OPEN(me) + 1;
#else
                grab();
#endif
                break
            :: else ->
                t = 0;
                seen_at = 0
            fi
        }
    od
#ifdef M_CLAIM_THEN_OWNER
    ;
    if
    :: atomic { got != NONE -> owner[got] = me; begin_work() }
    :: else
    fi
#endif
#ifdef QUEUE
    ;
    if
    :: atomic { got != NONE -> hint = AFTER(got) }
    :: else
    fi
#endif
}
#endif

/* What comes before the flag is set, without regard to whether there is something to claim. */
inline quick() {
#ifdef COARSE
    atomic {
        if
        :: closed -> break
        :: !closed && LEAVES(me) -> (closed || !LEAVES(me)) /* has left, and is started again */
        :: !LEAVES(me) && IS_OPEN(0) -> got = 0; grab()
#if CELLS > 1
        :: !LEAVES(me) && round > 1 && IS_OPEN(1) -> got = 1; grab()
#endif
#if CELLS > 2
        :: !LEAVES(me) && round > 2 && IS_OPEN(2) -> got = 2; grab()
#endif
        :: !LEAVES(me) -> skip
        fi
    }
#else
    if
    :: atomic { closed -> break }
    :: atomic { !closed && LEAVES(me) -> skip };
        (closed || !LEAVES(me)) /* has left, and is started again */
    :: atomic { !LEAVES(me) -> skip };
        claim()
    fi
#endif
}

inline hand_on() {
    atomic {
        assert(worked_by[got] == me && ticket[got] == t);
        if
        :: STAGE_OF(me) == 0 -> middle[got] = t
        :: else -> output[got] = t
        fi;
        state[got] = NEXT(me);
        owner[got] = 0;
        worked_by[got] = 0;
        t = 0
    }
}

inline tell() {
    if
    :: NEXT(me) == INDEXED -> notify(MIDDLE)
    :: else ->
        if
        :: atomic { wanted == 0 || wanted == got + 1 -> skip }; notify(OUTPUT)
        :: atomic { wanted != 0 && wanted != got + 1 -> skip }
        fi
    fi
}

inline publish() {
#ifdef M_KNOCK_FIRST
    tell();
    hand_on()
#else
    hand_on();
    tell()
#endif
}

proctype runner(byte me) {
    byte got = NONE, seen_at, c, k, n, t, i;
    bit old;
born:
    {
        do
        :: quick();
            if
            :: atomic { got == NONE -> skip };
                enter(STAGE_OF(me), me);
#ifndef M_NO_SECOND_LOOK
                claim()
#endif
            :: atomic { got != NONE -> skip }
            fi;
            if
            :: atomic { got == NONE -> skip };
                if
                :: atomic { closed -> break }
                :: atomic { !closed && LEAVES(me) -> skip }
                :: atomic { !LEAVES(me) -> skip }; sleep(me)
                fi
            :: atomic { got != NONE -> skip };
                publish();
                got = NONE
            fi
        od;
        atomic { !dead[me] -> serving[me] = 0; fresh[me] = 0; got = NONE }
    } unless {
        atomic {
            dead[me] ->
            got = NONE; seen_at = 0; c = 0; k = 0; n = 0; t = 0; i = 0; old = 0;
            fresh[me] = 0;
            sleeping[me] = 0;
            do
            :: c < CELLS ->
                if
                :: worked_by[c] == me -> worked_by[c] = 0
                :: else
                fi;
                c++
            :: else -> c = 0; break
            od;
#ifndef STOPS
            gone[me] = 1;
#endif
            goto buried
        }
    };
    goto left;
buried:
    if
    :: atomic { !gone[me] && serving[me] -> goto born }
    :: atomic { !gone[me] && !serving[me] -> skip }
    fi;
left:
    skip
}

/* ── watcher and killer ────────────────────────────────────────────────────────────────── */

inline repost(who) {
    c = 0;
    do
    :: atomic { c == CELLS -> c = 0; break }
    :: atomic { c < CELLS && !(owner[c] == who && (state[c] == INDEXING || state[c] == CONVERTING)) -> c++ }
    :: atomic { c < CELLS && owner[c] == who && (state[c] == INDEXING || state[c] == CONVERTING) -> t = ticket[c] };
        atomic {
            /* only one reposts an owner, so its compare-and-swap cannot fail */
            assert(owner[c] == who && ticket[c] == t && worked_by[c] == 0);
            state[c] = state[c] - 1;
            owner[c] = 0;
#if defined(QUEUE) && !defined(M_NO_REWIND)
            hint = c;
#endif
            t = 0;
            c++
        }
    od;
#ifndef M_NO_ALARM
    notify_all(INPUT);
#if STAGES == 2
    notify_all(MIDDLE);
#endif
#ifndef M_NO_ALARM_OUTPUT
    notify_all(OUTPUT)
#endif
#endif
}

inline replace(who) {
    if
    :: deaths <= RESTARTS -> atomic { dead[who] = 0; gone[who] = 0 }
    :: else ->
        failed = 1;
        notify_all(OUTPUT);
        atomic { serving[who] = 0; gone[who] = 0 }
    fi
}

proctype watcher() {
    byte c, t, i;
end:
    do
    :: atomic { gone[1] -> skip }; repost(1); replace(1)
#if RUNNERS > 1
    :: atomic { gone[2] -> skip }; repost(2); replace(2)
#endif
#if RUNNERS > 2
    :: atomic { gone[3] -> skip }; repost(3); replace(3)
#endif
#ifdef M_REPOST_LIVING
    :: atomic { serving[1] && !dead[1] -> skip }; repost(1); break
#endif
    od
}

#ifdef STOPS
/* Stopped forever (SIGSTOP, a debugger), with nothing in hand, and unnoticed by all others. */
#define FREE_OF(who) (worked_by[0] != who && (CELLS < 2 || worked_by[CELLS - 1] != who))
#define KILL(who, allowed) \
    atomic { \
        deaths < DEATHS && (allowed) && FREE_OF(who) && serving[who] && !dead[who] -> \
        deaths++; dead[who] = 1; serving[who] = 0 \
    }
#else
#define KILL(who, allowed) \
    atomic { deaths < DEATHS && (allowed) && serving[who] && !dead[who] -> deaths++; dead[who] = 1 }
#endif

proctype killer() {
end:
    do
    :: KILL(1, true)
#if RUNNERS > 1
#if STAGES == 1
    :: KILL(2, deaths > 0) /* they are alike: call the first to die 1 */
#else
    :: KILL(2, true)
#endif
#endif
#if RUNNERS > 2
    :: KILL(3, true)
#endif
    od
}

#if RESIZES
proctype resizer() {
    byte i;
end:
    do
    :: atomic { resizes < RESIZES && admits > 1 -> resizes++; admits = 1 }; notify_all(INPUT)
    :: atomic { resizes < RESIZES && admits < RUNNERS -> resizes++; admits = RUNNERS }; notify_all(INPUT)
    :: atomic { round < CELLS -> round++ }
    od
}
#endif

/* ── trainer ───────────────────────────────────────────────────────────────────────────── */

inline vacant() {
    d_step {
#ifdef QUEUE
        c = (state[at] == FREE -> at : CELLS)
#else
        c = 0;
        do
#ifdef M_POST_BEYOND
        :: c < CELLS && state[c] != FREE -> c++
#else
        :: c < round && state[c] != FREE -> c++
#endif
        :: else -> break
        od;
#ifndef M_POST_BEYOND
        c = (c < round -> c : CELLS)
#endif
#endif
    }
}

inline post() {
    atomic {
        assert(worked_by[c] == 0);
        input[c] = posted;
        middle[c] = 0;
        output[c] = 0;
        state[c] = POSTED;
        ticket[c] = posted;
        where[posted] = c;
#ifdef QUEUE
        at = AFTER(c);
#endif
        c = 0;
        posted++
    }
    if
#ifndef ALWAYS_LAZY
    :: true -> notify(INPUT) /* as many as wake_at have gathered */
#endif
#ifndef NEVER_LAZY
    :: true -> unwoken = 1 /* not yet */
#endif
    fi
}

/* READY is the trainer's: what was computed must be whole, and of this ticket. Peek, decode and commit are
 * one step here; commit.pml has them apart. */
inline take(number) {
    atomic {
        c = where[number];
        assert(ticket[c] == number && worked_by[c] == 0);
#if STAGES == 2
        assert(output[c] == number);
#else
        assert(middle[c] == number);
#endif
        middle[c] = 0; output[c] = 0; input[c] = 0;
        state[c] = FREE; ticket[c] = 0; c = 0; where[number] = NONE }
}

#define ANY_READY (state[0] == READY || (CELLS > 1 && state[1] == READY) || (CELLS > 2 && state[2] == READY))

#define IS_READY(cell) ((cell) == 0 -> ANY_READY : state[(cell) - 1] == READY)

/* Look for news, then sleep until `cell` (from 1; 0: any) may be ready. */
inline await(cell) {
#ifndef M_SEEN_LATE
    fresh[TRAINER] = 1; /* cseq_ring_notices */
#endif
    if
    :: atomic { failed -> break }
    :: atomic { !failed -> skip }
    fi;
#ifndef M_NO_KNOCK
    if
    :: unwoken -> unwoken = 0; notify(INPUT)
    :: else
    fi;
#endif
#ifndef M_WANTED_LATE
    wanted = cell;
#endif
#ifdef M_SEEN_LATE
    fresh[TRAINER] = 1;
#endif
#ifndef M_NO_FLAG
    asleep[OUTPUT] = 1;
#endif
    if
    :: atomic { !IS_READY(cell) -> skip };
#ifdef M_WANTED_LATE
        wanted = cell;
#endif
        sleep(TRAINER)
    :: atomic { IS_READY(cell) -> fresh[TRAINER] = 0 }
    fi;
    asleep[OUTPUT] = 0
}

/* Take back what a queue's runner has not claimed, newest first, so that no gap is left. */
inline retract() {
#ifdef M_CANCEL_OLDEST
    k = next;
#else
    k = posted - 1;
#endif
    do
    :: atomic { k < next || k == posted -> k = 0; break }
    :: atomic {
            k >= next && k < posted ->
            c = where[k];
            if
            :: state[c] == POSTED ->
                state[c] = FREE; ticket[c] = 0; where[k] = NONE; at = c; c = 0;
#ifdef M_CANCEL_OLDEST
                k++
#else
                k--
#endif
            :: else ->
                c = 0;
#ifdef M_CANCEL_OLDEST
                k++
#else
                k = 0;
                break
#endif
            fi
        }
    od
}

/* Give back what can be; `left`: outstanding among the tickets nobody wants. */
inline sweep() {
    k = 1;
    left = 0;
    do
    :: atomic { k >= given_up || k > TICKETS -> k = 0; break }
    :: atomic { k < given_up && k <= TICKETS && where[k] == NONE -> k++ }
    :: atomic { k < given_up && k <= TICKETS && where[k] != NONE -> c = where[k]; old = 0; s = state[c] };
        if
        :: s == READY -> old = 1
#ifndef QUEUE /* where that would leave a gap: it runs */
        :: s == POSTED || s == INDEXED ->
            atomic {
                if
#ifdef M_CANCEL_NO_CAS
                :: true ->
#else
                :: state[c] == s && ticket[c] == k ->
#endif
                    state[c] = READY; owner[c] = 0; old = 1
                :: else
                fi
            }
#endif
        :: else
        fi;
        atomic {
            if
            :: old ->
                assert(worked_by[c] == 0 && ticket[c] == k);
                state[c] = FREE; ticket[c] = 0; where[k] = NONE
            :: else -> left++
            fi;
            k++; c = 0; s = 0; old = 0
        }
    od
}

#define CAN_POST (posted <= TICKETS && c < CELLS)
#ifdef GREEDY /* post whenever possible, as the sequence does; else whatever is possible */
#define MUST_POST CAN_POST
#else
#define MUST_POST false
#endif

proctype trainer() {
    byte where[TICKETS + 1] = NONE;
    byte posted = 1, next = 1, taken, given_up = 1, left, c, k, s, i;
    bit unwoken, old, broken;
#ifdef QUEUE
    byte at; /* where to post next */
#endif
    do
    :: true ->
#ifdef ABANDON
        if
        :: !broken && next < posted -> /* the loop was left in the middle of an epoch */
#ifdef QUEUE
            retract();
#endif
            atomic { broken = 1; given_up = posted; next = posted; unwoken = 0 }
        :: true
        fi;
        sweep();
#endif
        vacant();
        if
        :: atomic { CAN_POST -> skip }; post()
#ifdef UNORDERED
        :: atomic { !MUST_POST && next < posted -> skip };
            k = next;
            do
            :: atomic { k >= posted -> k = 0; break }
            :: atomic { k < posted && (where[k] == NONE || state[where[k]] != READY) -> k++ }
            :: atomic { k < posted && where[k] != NONE && state[where[k]] == READY -> skip };
                take(k);
                atomic { taken++; k = TICKETS + 2; break }
            od;
            c = 0;
            if
            :: atomic { k == TICKETS + 2 -> k = 0 };
                if
                :: taken == posted - next -> atomic { next = posted; taken = 0 }
                :: else
                fi
            :: atomic { k == 0 -> skip }; await(0)
            fi
#else
        :: atomic { !MUST_POST && next < posted && state[where[next]] == READY -> c = 0 }; take(next); next++
        :: atomic { !MUST_POST && next < posted && state[where[next]] != READY -> c = 0 }; await(where[next] + 1)
#endif
        :: atomic { next == posted && left > 0 && !CAN_POST -> c = 0 }; await(0)
        :: atomic { next == posted && posted > TICKETS && left == 0 -> c = 0; break }
        fi
    od;
    assert(failed || (next == TICKETS + 1 && left == 0));
    c = 0;
    closed = 1;
#ifndef M_CLOSE_NO_ALARM
    notify_all(INPUT);
#if STAGES == 2
    notify_all(MIDDLE);
#endif
#endif
    fresh[TRAINER] = 0;
    wanted = 0;
    (serving[1] + (RUNNERS > 1 -> serving[2] : 0) + (RUNNERS > 2 -> serving[3] : 0) == 0);
    finished = 1
}

init {
    atomic {
        serving[1] = 1; run runner(1);
#if RUNNERS > 1
        serving[2] = 1; run runner(2);
#endif
#if RUNNERS > 2
        serving[3] = 1; run runner(3);
#endif
        run watcher();
#if RESIZES
        run resizer();
#endif
        run killer();
        run trainer()
    }
}

#ifdef LIVE
ltl live { <> finished }
#endif
