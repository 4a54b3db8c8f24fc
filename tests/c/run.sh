#!/bin/sh
# The core's headers, compiled alone, under sanitizers, killed, and interleaving by interleaving.
#
#   tests/c/run.sh [SECONDS [CHECK...]]
#
# Each check runs SECONDS long (default 10; those without a clock as long as they take). All checks
# by default, or some of: shuffle explore all stress tsan asan kill darwin mutants (or one:
# mutant-NO_FLAG). darwin: what the headers have for macOS; stress and kill with it.
# SEED=n repeats a run; CC, INCLUDE (of the headers) may be given. For Linux.
# Exit status: 0 all passed, 1 one failed, 77 none failed but one could not run here.

set -u
here=$(cd "$(dirname "$0")" && pwd)
include=${INCLUDE:-$here/../../cseq/include}
seconds=${1:-10}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- shuffle explore all stress tsan asan kill darwin mutants
seed=${SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
build=$(mktemp -d "${TMPDIR:-/tmp}/cseq-c.XXXXXX") || exit 2
trap 'rm -rf "$build"' EXIT
result=0

# Weakened rings, see points.h: the first kind must end in a state or an assertion that the fibers
# find, the second in a data race that ThreadSanitizer sees.
LOST="NO_FLAG PLAIN_FLAG PLAIN_PUBLISH KNOCK_ORDER NO_EVENT NO_WAKE NO_ALARM NO_CAS NO_OWNER"
LOST="$LOST NO_REWIND CANCEL_OLDEST OWN_GATE"
RACE="RELAXED_PUBLISH RELAXED_CLAIM RELAXED_LOAD"

PLAIN="-O2 -U_FORTIFY_SOURCE" # whose longjmp knows no fibers
TSAN="-O1 -fsanitize=thread"
DARWIN="$PLAIN -U__linux__ -D__APPLE__ -DDARWIN_ALIKE -include $here/darwin.h"
DARWIN="$DARWIN -Wno-attributes -Wno-address"
ASAN="-O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}"

# compile PROGRAM FLAGS...
compile() {
    program=$1
    shift
    ${CC:-cc} -std=gnu11 -g -Wall -Wextra -Werror -pthread -I"$include" "$@" \
        -o "$build/$program" "$here/$program.c"
}

# Whether programs with these flags can be linked and run; some kernels need a fixed layout of memory.
can_run() {
    echo 'int main(void) { return 0; }' >"$build/probe.c"
    under=
    ${CC:-cc} "$@" -pthread -o "$build/probe" "$build/probe.c" 2>/dev/null || return 1
    "$build/probe" 2>/dev/null && return 0
    under="setarch -R"
    $under "$build/probe" 2>/dev/null
}

# check NAME PROGRAM "FLAGS" ARGUMENTS...
check() {
    name=$1 program=$2 flags=$3
    shift 3
    echo "== $name: $program $*"
    if ! can_run $flags; then
        echo "skipped: ${CC:-cc} cannot build or run programs with $flags"
        [ $result = 0 ] && result=77
    elif ! compile "$program" $flags || ! $under "$build/$program" "$@"; then
        echo "FAILED: $name"
        result=1
    fi
}

# mutant NAME: must be caught.
mutant() {
    case " $LOST $RACE " in
        *" $1 "*) ;;
        *) echo "FAILED: there is no mutant $1"; result=1; return ;;
    esac
    case " $LOST " in
        *" $1 "*) program=ring_explore flags=$PLAIN arguments="random 1 30" ;;
        *) program=ring_stress flags=$TSAN arguments="1 30" ;;
    esac
    if ! can_run $flags; then
        echo "skipped: mutant $1 needs $flags"
        [ $result = 0 ] && result=77
    elif ! compile "$program" $flags "-DM_$1"; then
        result=1
    elif $under "$build/$program" $arguments >"$build/out" 2>&1; then
        echo "FAILED: $program has not caught the mutant $1"
        result=1
    else
        echo "caught: $1: $(grep -m1 -E 'FAILED|WARNING: Thread' "$build/out")"
    fi
}

for name; do
    case $name in
        shuffle) check shuffle shuffle_sanitize "$ASAN" "$seed" ;;
        explore) check explore ring_explore "$PLAIN" random "$seed" "$seconds" ;;
        all) check all ring_explore "$PLAIN" all 1 0 && check all ring_explore "$PLAIN" all 0 1 ;;
        stress) check stress ring_stress "$PLAIN" "$seed" "$seconds" ;;
        tsan) check tsan ring_stress "$TSAN" "$seed" "$seconds" ;;
        asan) check asan ring_stress "$ASAN" "$seed" "$seconds" ;;
        kill) check kill process_kill "$PLAIN" "$seed" "$seconds" ;;
        darwin)
            check darwin darwin "$DARWIN" "$build"
            check darwin ring_stress "$DARWIN" "$seed" "$seconds"
            check darwin process_kill "$DARWIN" "$seed" "$seconds"
            ;;
        mutants) for weakness in $LOST $RACE; do mutant "$weakness"; done ;;
        mutant-*) mutant "${name#mutant-}" ;;
        *) sed -n '2,/^$/p' "$0"; exit 2 ;;
    esac
done
exit $result
