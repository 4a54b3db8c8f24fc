/* A runner that holds many tickets (Carrier in cseq/_parcel.pyx), and a trainer that gives epochs up, as
 * a model for spin; see run.sh. The ring itself is ring.pml; here a claim is one step, nothing sleeps,
 * and no process dies.
 *
 *   trainer   posts in any free cell, takes in order, sweeps; begins epochs: the feed gives up what it
 *             has posted, then the carrier does (Carrier.give_up), then the feed posts again
 *   carrier   claims what is posted, reads what it asks for, publishes answers            (one thread)
 *
 * The agents are the answers alone: to each ticket that was asked for comes none, one or two (hedged), in
 * any order. Once an epoch is given up, none may come any more, whichever the run chooses (mute): its cells
 * become free all the same.
 *
 * A ticket's number stands for its indices and its batch; 0 is what is published in its place when it is
 * given up.
 */
#ifndef CELLS
#define CELLS 2
#endif
#ifndef TICKETS
#define TICKETS 2 /* of an epoch */
#endif
#ifndef EPOCHS
#define EPOCHS 2 /* each but the last may be left at any time */
#endif
#ifndef ANSWERS
#define ANSWERS 2 /* to a ticket, at most */
#endif
#define NUMBERS (TICKETS * EPOCHS)

#define FREE 0
#define POSTED 1
#define INDEXING 2
#define READY 3
#define TORN 255

/* A cell: its word, which changes in one step, and what goes with it. */
byte state[CELLS];
byte ticket[CELLS];
byte input[CELLS];
byte output[CELLS];

/* The carrier's, of the one that has the lock. */
bit lock;
byte words[CELLS]; /* the ticket that is held there; 0: none */
byte floor;        /* tickets before this one were given up */

/* What no party can see. */
byte cell_of[NUMBERS + 1];
byte answers[NUMBERS + 1]; /* that may still come */
byte over = 1;             /* tickets before this one were given up by the feed */
bit mute;                  /* none of these is answered any more */
bit closed;

inline enter() {
#ifndef M_NO_LOCK
    atomic { !lock -> lock = 1 }
#else
    skip
#endif
}

inline leave() {
#ifndef M_NO_LOCK
    lock = 0
#else
    skip
#endif
}

/* The owner's word alone may be written, and of this ticket. */
inline publish(cell, number, data) {
    assert(state[cell] == INDEXING && ticket[cell] == number);
    output[cell] = data;
    atomic {
        assert(state[cell] == INDEXING && ticket[cell] == number);
        state[cell] = READY
    }
}

/* ── the carrier ───────────────────────────────────────────────────────────────────────── */

#ifdef M_BY_CELL
#define IS_HELD(number) (words[cell_of[number]] != 0)
#else
#define IS_HELD(number) (words[cell_of[number]] == (number))
#endif
#ifdef M_NO_FLOOR
#define IS_GIVEN_UP(number) false
#else
#define IS_GIVEN_UP(number) ((number) < floor)
#endif
#define MAY_COME(number) (answers[number] > 0 && !(mute && (number) < over))

#define IS_OPEN (state[0] == POSTED || state[CELLS - 1] == POSTED)

inline claim(cell) {
    t = ticket[cell];
    state[cell] = INDEXING
}

proctype carrier() {
    byte c, t;
    do
    :: atomic { IS_OPEN };
        enter();
        do
        :: atomic { state[0] == POSTED -> c = 0; claim(0) };
            goto claimed;
#if CELLS > 1
        :: atomic { state[1] == POSTED -> c = 1; claim(1) };
            goto claimed;
#endif
        :: break;
claimed:
            if
            :: atomic { IS_GIVEN_UP(t) -> skip };
                publish(c, t, 0)
            :: atomic { !IS_GIVEN_UP(t) -> words[c] = t }
            fi;
            /* what it asks for, found by its number: it may be given up by now */
            leave();
            enter();
            if
            :: atomic { IS_HELD(t) -> assert(input[c] == t); answers[t] = ANSWERS }
            :: atomic { !IS_HELD(t) -> skip }
            fi
        od;
        atomic { c = 0; t = 0 };
        leave()
    :: atomic { /* an answer has come, which the ledger may have counted already */
            if
            :: MAY_COME(1) -> t = 1
            :: MAY_COME(2) -> t = 2
#if NUMBERS > 2
            :: MAY_COME(3) -> t = 3
#endif
#if NUMBERS > 3
            :: MAY_COME(4) -> t = 4
#endif
#if NUMBERS > 4
            :: MAY_COME(5) -> t = 5
            :: MAY_COME(6) -> t = 6
#endif
            fi;
            answers[t]--
        };
        enter();
        if
        :: atomic { IS_HELD(t) -> c = cell_of[t] };
#ifdef M_BY_CELL
            publish(c, ticket[c], t);
#else
            publish(c, t, t);
#endif
#ifndef M_STAYS_HELD
            words[c] = 0
#endif
        :: atomic { !IS_HELD(t) -> skip }
        fi;
        atomic { c = 0; t = 0 };
        leave()
    :: atomic { closed -> break }
    od
}

/* ── the trainer ───────────────────────────────────────────────────────────────────────── */

/* Carrier.give_up */
inline carrier_gives_up() {
    enter();
    floor = next;
    do
    :: atomic { k < CELLS && (words[k] == 0 || words[k] >= floor) -> k++ }
    :: atomic { k < CELLS && words[k] != 0 && words[k] < floor -> skip };
        publish(k, words[k], 0);
        atomic { words[k] = 0; k++ }
    :: atomic { k == CELLS -> k = 0; break }
    od;
    leave()
}

/* Feed.begin: what is in the line is abandoned. */
inline feed_gives_up() {
    d_step {
        do
        :: head < next -> abandoned[cell_of[head]] = 1; head++
        :: else -> break
        od;
        over = next
    }
    if
    :: mute = 1
    :: mute = 0
    fi
}

#define IN_HEAD cell_of[head]

inline post(cell) {
    ticket[cell] = next;
    input[cell] = TORN;
    input[cell] = next;
    output[cell] = TORN;
    atomic { cell_of[next] = cell; next++; state[cell] = POSTED }
}

/* A cell that was given up: its ticket is published, or was not claimed. */
#define MAY_SWEEP(cell) (abandoned[cell] && (state[cell] == READY || state[cell] == POSTED))
#define SWEEP(cell) state[cell] = FREE; abandoned[cell] = 0

active proctype trainer() {
    byte head = 1, next = 1, end = TICKETS + 1, epoch = 1, k;
    bit abandoned[CELLS];
    run carrier();
    do
    :: next < end && state[0] == FREE -> post(0)
#if CELLS > 1
    :: next < end && state[1] == FREE -> post(1)
#endif
    :: atomic { MAY_SWEEP(0) -> SWEEP(0) }
#if CELLS > 1
    :: atomic { MAY_SWEEP(1) -> SWEEP(1) }
#endif
    :: head < next && state[IN_HEAD] == READY ->
        assert(ticket[IN_HEAD] == head && output[IN_HEAD] == head);
        atomic { state[IN_HEAD] = FREE; head++ }
    :: epoch < EPOCHS -> /* at any time */
#ifdef M_CARRIER_FIRST
        carrier_gives_up();
        if
        :: true
        :: next < end && state[0] == FREE -> post(0)
        fi;
        feed_gives_up();
#else
        feed_gives_up();
#ifndef M_CARRIER_KEEPS
        carrier_gives_up();
#endif
#endif
        atomic { epoch++; end = next + TICKETS }
    :: atomic { epoch == EPOCHS && head == end -> break }
    od;
    feed_gives_up();
    carrier_gives_up();
    do
    :: atomic { MAY_SWEEP(0) -> SWEEP(0) }
#if CELLS > 1
    :: atomic { MAY_SWEEP(1) -> SWEEP(1) }
#endif
    :: atomic { !abandoned[0] && !abandoned[CELLS - 1] -> break }
    od;
    atomic {
        assert(state[0] == FREE && state[CELLS - 1] == FREE);
        closed = 1
    }
}
