#!/usr/bin/env bash
# Runs stress.py and some tests under ThreadSanitizer: tsan.sh ENVIRONMENT [PYTEST-ARGUMENTS...]
#
# ENVIRONMENT/tsan has a CPython without a GIL that was built for it, and ENVIRONMENT/free the same
# one without it, with packages; its numpy is not instrumented. It fails if a report has a frame of
# cseq, except lookups in dicts (`ours`). First it shows that it would: stress.py must have reports of a core
# that is weakened, each time in another way. TIMES=n (1) does that n times.
set -euo pipefail
environment=$(cd "$1" && pwd)
shift
cd "$environment/tsan/checkout"
free=$environment/free/venv
python=$environment/tsan/python/bin/python3
here=$PWD/tests/platforms/freethreaded
unset PYTHON_GIL

# The core's own flags come last otherwise: they optimise, and leave out the lines.
mkdir -p build
printf '#!/bin/sh\nexec %s "$@" -O1 -g -fsanitize=thread\n' "${CC:-cc}" >build/cc
chmod +x build/cc
# By the other Python, whose headers are the same: Cython itself is slow under ThreadSanitizer.
compile() {
    CC=$PWD/build/cc "$free/bin/python" setup.py --quiet build_ext "$@"
}
compile --inplace

# The same C files with weak.h in front of them, beside a copy of the Python files.
weak=$PWD/build/weak
[ "$here/weak.h" -ot "$weak/made" ] || rm -rf "$weak"
mkdir -p "$weak/lib"
CFLAGS="-include $here/weak.h" compile --build-temp "$weak/temp" --build-lib "$weak/lib"
touch "$weak/made"
(cd cseq && find . -name '*.py' | tar --files-from=- -cf -) | tar -xf - -C "$weak/lib/cseq"

# All packages but torch, which is not instrumented either, and would be slow.
installed=$("$free/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
packages=$PWD/build/packages
rm -rf "$packages"
mkdir "$packages"
find "$installed" -mindepth 1 -maxdepth 1 ! -name torch -exec ln -s {} "$packages" \;
export OPENBLAS_NUM_THREADS=1
reports=$PWD/build/tsan
rm -rf "$reports"
result=0

# under FOLDER COMMAND...: with cseq of a folder
under() {
    PYTHONPATH=$1:$packages "${@:2}"
}

# watch NAME: reports go to files of that name.
# exitcode: CPython has reports of its own. die_after_fork: workers are forked beside threads.
# allocator_may_return_null: tests ask for more memory than there is.
watch() {
    mkdir -p "$reports/$1"
    TSAN_OPTIONS="exitcode=0 history_size=7 die_after_fork=0 allocator_may_return_null=1"
    export TSAN_OPTIONS="$TSAN_OPTIONS log_path=$reports/$1/report"
}

# ours NAME: count the reports that have a frame of cseq. Frames of a thread's creation do not count: cseq
# starts threads, and CPython's own races with these have no other frame of cseq. Nor do lookups in a dict
# without its lock: they try to refer to a key that another thread may have freed, whose memory may be that of
# a new object. A script without cseq, whose threads look up, insert and clear, has the same reports.
ours() {
    cat "$reports/$1"/* 2>/dev/null | awk '
        /^WARNING: ThreadSanitizer/ { mine = lookup = 0 }
        / _Py_TryIncrefCompare / { lookup = 1 }
        /^  [^ ]/ { created = /^  Thread / }
        /^ +#[0-9]+ .*(__pyx_|cseq_)/ && /cseq\// && !created { mine = 1 }
        /^SUMMARY:/ { count += mine && !lookup; mine = 0 }
        END { print count + 0 }'
}

# weakened NAME FOLDER ARGUMENTS...: stress.py must have a report; it may also fail,
# or hang.
weakened() {
    name=$1 folder=$2 count=0
    watch "weak-$name"
    shift 2
    CSEQ_WEAK=$name under "$folder" timeout -k 5 240 "$python" "$here/stress.py" "$@" \
        >"$reports/weak-$name/output" 2>&1 || true
    count=$(ours "weak-$name")
    if [ "$count" = 0 ]; then
        echo "FAILED: stress.py has not caught the weakness $name:" >&2
        tail -n 5 "$reports/weak-$name/output" >&2
        result=1
    else
        echo "caught: $name, $count reports"
    fi
    rm -rf "$reports/weak-$name"
}

for _ in $(seq "${TIMES:-1}"); do
    weakened lock "$weak/lib" threads
    weakened section "$weak/lib" readers
    weakened counter "$weak/lib" threads
done

watch core
under "$PWD" timeout 1800 "$python" "$here/stress.py" || result=1
under "$PWD" "$python" -m pytest -p no:cacheprovider -m "not slow" "${@:-tests/unit/test_feed_core.py}" || result=1
count=$(ours core)
if [ "$count" != 0 ]; then
    echo "FAILED: ThreadSanitizer has $count reports of cseq, in $reports/core" >&2
    result=1
fi
all=$(cat "$reports/core"/* 2>/dev/null | grep -c "^SUMMARY:" || true)
echo "$count reports of cseq, $all in all: the others are of CPython alone"
exit $result
