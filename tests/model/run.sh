#!/bin/sh
# Checks ring.pml and commit.pml with spin: they must hold, and every mutant of them must be caught.
#
#   tests/model/run.sh [short | normal | long]
#
# short: half a minute, small bounds; normal (the default): a minute or two; long: larger bounds as
# well, up to 6 GB and half an hour. JOBS=n runs n checks at a time (default 2). Needs spin and a C
# compiler ($CC). A failure leaves spin's trail in a folder that is named.

set -u
here=$(cd "$(dirname "$0")" && pwd)

# set   expected     model   options
table() {
    cat <<'TABLE'
# ── the protocol, without any timeout: no deadlock, in order, exactly once, nobody sleeps forever
short   holds        ring    -DDEATHS=0 -DTICKETS=2 -DGREEDY -DNEVER_LAZY
normal  holds        ring    -DDEATHS=0 -DTICKETS=2
short   holds        ring    -DCOARSE -DTICKETS=2 -DGREEDY -DNEVER_LAZY
short   holds        ring    -DRUNNERS=1 -DCELLS=3 -DTICKETS=4 -DGREEDY
short   holds        ring    -DRUNNERS=1 -DQUEUE -DTICKETS=2
normal  holds        ring    -DTICKETS=2 -DGREEDY
long    holds        ring    -DTICKETS=2
normal  holds        ring    -DCELLS=1 -DTICKETS=2 -DGREEDY
normal  holds        ring    -DCOARSE -DGREEDY
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DDEATHS=2 -DNEVER_LAZY
long    holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DDEATHS=2
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DSTAGES=2 -DALWAYS_LAZY
long    holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DSTAGES=2
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DABANDON -DALWAYS_LAZY
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DRESTARTS=0
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DUNORDERED -DALWAYS_LAZY
long    holds        ring    -DCOARSE -DGREEDY -DUNORDERED -DALWAYS_LAZY
normal  holds        ring    -DRUNNERS=1 -DQUEUE -DCELLS=3 -DTICKETS=4 -DGREEDY -DDEATHS=2
normal  holds        ring    -DRUNNERS=1 -DQUEUE -DTICKETS=4 -DABANDON -DGREEDY
normal  holds        ring    -DRUNNERS=1 -DQUEUE -DTICKETS=4 -DABANDON -DCELLS=3 -DDEATHS=2
normal  holds        ring    -DRUNNERS=1 -DCELLS=3 -DTICKETS=4 -DDEATHS=2
normal  holds        ring    -DRUNNERS=1 -DCELLS=2 -DTICKETS=4 -DABANDON
long    holds        ring    -DRUNNERS=1 -DCELLS=3 -DTICKETS=4 -DABANDON
short   holds        ring    -DCOARSE -DGREEDY -DTICKETS=1 -DDEATHS=0 -DRESIZES=1
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DDEATHS=0 -DRESIZES=1 -DNEVER_LAZY
normal  holds        ring    -DCOARSE -DGREEDY -DTICKETS=1 -DRESIZES=1
normal  holds        ring    -DTICKETS=1 -DDEATHS=0 -DRESIZES=1
long    holds        ring    -DCOARSE -DGREEDY -DTICKETS=2 -DRESIZES=1 -DNEVER_LAZY
long    holds        ring    -DTICKETS=2 -DDEATHS=0 -DRESIZES=1 -DGREEDY -DNEVER_LAZY
long    holds        ring    -DCOARSE
long    holds        ring    -DCOARSE -DGREEDY -DDEATHS=2
long    holds        ring    -DCOARSE -DGREEDY -DCELLS=3 -DTICKETS=4 -DALWAYS_LAZY
long    holds        ring    -DCOARSE -DGREEDY -DSTAGES=2
long    holds        ring    -DCOARSE -DGREEDY -DSTAGES=2 -DRUNNERS=3 -DTICKETS=1 -DCELLS=1
long    holds        ring    -DCOARSE -DGREEDY -DABANDON -DALWAYS_LAZY
long    holds        ring    -DGREEDY
long    holds        ring    -DRUNNERS=1 -DQUEUE -DTICKETS=5 -DABANDON -DCELLS=3 -DDEATHS=2
long    holds        ring    -DGREEDY -DTICKETS=2 -DSTAGES=2

# ── every run ends (LTL, weak fairness): notifications without timeouts, timeouts without notifications or wake-ups
normal  ends         ring    -DCOARSE -DGREEDY -DNEVER_LAZY -DTICKETS=1 -DCELLS=1
short   ends         ring    -DPARK -DM_NO_ALARM -DCOARSE -DGREEDY -DNEVER_LAZY -DTICKETS=1 -DCELLS=1
normal  ends         ring    -DPARK -DM_NO_ALARM -DCOARSE -DGREEDY -DTICKETS=1 -DCELLS=1 -DSTAGES=2
normal  ends         ring    -DPARK -DM_NO_WAKE -DCOARSE -DGREEDY -DTICKETS=2 -DRUNNERS=1
short   runs-on      ring    -DM_NO_ALARM -DCOARSE -DGREEDY -DNEVER_LAZY -DTICKETS=1 -DCELLS=1

# ── what only a timeout ends: a runner that is stopped, not dead, between a swap and the wake-up
short   fails        ring    -DSTOPS -DCOARSE -DGREEDY -DTICKETS=2 -DNEVER_LAZY
normal  ends         ring    -DPARK -DSTOPS -DCOARSE -DGREEDY -DTICKETS=2 -DCELLS=1 -DNEVER_LAZY

# ── mutants of the ring: each must fail
short   fails        ring    -DM_ENTER_ORDER -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_NO_SECOND_LOOK -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_KNOCK_ORDER -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_KNOCK_FIRST -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_NO_EVENT -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_NO_WAKE -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_NO_KNOCK -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_NO_FLAG -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_WANTED_LATE -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_CLOSE_NO_ALARM -DCOARSE -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_ALARM_ORDER -DCOARSE -DTICKETS=2
short   fails        ring    -DM_NO_ALARM -DCOARSE -DTICKETS=2 -DGREEDY
short   fails        ring    -DM_NO_ALARM_OUTPUT -DCOARSE -DTICKETS=2 -DGREEDY
short   fails        ring    -DM_SEEN_LATE -DCOARSE -DTICKETS=2 -DRUNNERS=1 -DRESTARTS=0
short   fails        ring    -DM_POST_BEYOND -DCOARSE -DGREEDY -DTICKETS=2 -DDEATHS=0 -DRESIZES=1 -DRUNNERS=1
short   fails        ring    -DM_CLAIM_NO_CAS -DTICKETS=2 -DDEATHS=0
short   fails        ring    -DM_CLAIM_THEN_OWNER -DTICKETS=1
short   fails        ring    -DM_CANCEL_NO_CAS -DCOARSE -DTICKETS=2 -DDEATHS=0 -DGREEDY -DABANDON
short   fails        ring    -DM_REPOST_LIVING -DCOARSE -DTICKETS=2 -DDEATHS=0 -DGREEDY
short   fails        ring    -DM_QUEUE_SCANS -DTICKETS=2 -DDEATHS=0 -DRUNNERS=1 -DQUEUE
short   fails        ring    -DM_NO_REWIND -DTICKETS=2 -DRUNNERS=1 -DQUEUE
short   fails        ring    -DM_CANCEL_OLDEST -DTICKETS=4 -DDEATHS=0 -DRUNNERS=1 -DQUEUE -DABANDON -DCELLS=3

# ── peek, decode, commit, and whose a slot is: each ticket once and in its place, no slot lost or of two owners,
#    with handlers that raise at any point
short   holds        commit  -DTICKETS=2
normal  holds        commit  -DTICKETS=3
short   holds        commit  -DTICKETS=2 -DCELLS=1 -DTIDY
normal  holds        commit  -DTICKETS=2 -DUNORDERED
normal  holds        commit  -DTICKETS=2 -DCELLS=1 -DEPOCHS=2 -DDEATHS=1
normal  holds        commit  -DTICKETS=2 -DEPOCHS=2
short   holds        commit  -DTICKETS=2 -DCELLS=1 -DDEATHS=1
normal  holds        commit  -DTICKETS=2 -DDEATHS=1
normal  holds        commit  -DTICKETS=2 -DCELLS=1 -DRUNNERS=2 -DDEATHS=1
long    holds        commit  -DTICKETS=3 -DDEATHS=1 -DUNORDERED
normal  holds        commit  -DTICKETS=2 -DRUNNERS=2 -DDEATHS=1

# ── mutants of these: each must fail
short   fails        commit  -DM_COMMIT_BEFORE_DECODE -DTICKETS=2
short   fails        commit  -DM_ARM_IN_DECODE -DTICKETS=2
short   fails        commit  -DM_FREE_BEFORE_ARM -DTICKETS=2 -DRUNNERS=2
short   fails        commit  -DM_POST_BEFORE_COUNT -DTICKETS=2
short   fails        commit  -DM_INTERRUPT_FREE_COUNT -DTICKETS=2
short   fails        commit  -DM_REENTRANT -DTICKETS=2 -DCELLS=1
short   fails        commit  -DM_TAKE_NO_CAS -DTICKETS=2 -DRUNNERS=2
short   fails        commit  -DM_TAKE_NO_CAS -DTICKETS=2 -DCELLS=1 -DTIDY
short   fails        commit  -DM_RETIRE_BEFORE_ADOPT -DTICKETS=2 -DDEATHS=1
short   fails        commit  -DM_KEEP_NAME -DTICKETS=2 -DDEATHS=1
short   fails        commit  -DM_CLEAR_BEFORE_ADOPT -DTICKETS=2 -DDEATHS=1
short   fails        commit  -DM_REPOST_WITH_SLOT -DTICKETS=2 -DEPOCHS=2 -DDEATHS=1
short   fails        commit  -DM_RECLAIM_NAMED -DTICKETS=2 -DDEATHS=1
short   fails        commit  -DM_NO_RECLAIM -DTICKETS=2 -DDEATHS=1
short   fails        commit  -DM_LAUNCH_FIRST -DTICKETS=2 -DDEATHS=1
TABLE
}

# One row of the table; its verdict is the exit status.
check() {
    expected=$2 model=$3
    shift 3
    folder=$(mktemp -d "${TMPDIR:-/tmp}/ring.XXXXXX") || exit 2
    cd "$folder" || exit 2
    # The full search is bounded by memory (MB), not by depth: a cut search is a failure.
    case $expected in
        ends | runs-on) claim=-DLIVE flags="-DNFAIR=3" search="-a -f" ;;
        *) claim= flags="-DSAFETY -DNOCLAIM" search= ;;
    esac
    spin -a $claim "$@" "$here/$model.pml" >spin.txt 2>&1 &&
        ${CC:-cc} -O2 -w $flags -DCOLLAPSE -DMEMLIM="${MEMORY:-1900}" -o pan pan.c >cc.txt 2>&1 ||
        { cat spin.txt cc.txt; exit 2; }
    nice -n 10 ./pan $search -m2000000 >pan.txt 2>&1
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.txt)
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.txt)
    cut=$(grep -c -E 'max search depth too small|reached -DMEMLIM|out of memory' pan.txt)
    case $expected in
        holds | ends) [ "$errors" = 0 ] && [ "$cut" = 0 ] ;;
        fails) [ "${errors:-0}" -gt 0 ] && grep -q -E 'invalid end state|assertion violated' pan.txt ;;
        runs-on) [ "${errors:-0}" -gt 0 ] && grep -q 'acceptance cycle' pan.txt ;;
    esac
    verdict=$?
    found=$(sed -n 's/^pan:1: \([a-z ]*\).*/\1/p' pan.txt)
    if [ $verdict = 0 ]; then
        echo "ok      $expected: $model $* (${states:-?} states${found:+, $found})"
        rm -rf "$folder"
    else
        echo "FAILED  not '$expected': $model $* (${found:-see} $folder)"
        exit 1
    fi
}

case ${1:-normal} in
    --check) shift; check "$@"; exit ;;
    short) sets='^short' ;;
    normal) sets='^short|^normal' ;;
    long) sets='^short|^normal|^long'; MEMORY=${MEMORY:-6000}; export MEMORY ;;
    *) sed -n '2,/^$/p' "$0"; exit 2 ;;
esac
command -v spin >/dev/null || { echo "spin is not installed"; exit 2; }

table | grep -E "$sets" | xargs -P "${JOBS:-2}" -L 1 "$0" --check || { echo "FAILED"; exit 1; }
echo "all as expected"
