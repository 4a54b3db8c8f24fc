#!/usr/bin/env bash
# Runs stress.py and some tests under ThreadSanitizer: tsan.sh ENVIRONMENT [PYTEST-ARGUMENTS...]
#
# ENVIRONMENT/tsan has a CPython without a GIL that was built for it, and ENVIRONMENT/free the same
# one without it, with packages; its numpy is not instrumented. It fails if a report has a frame of
# cseq, but for those of suppressions.txt.
set -euo pipefail
environment=$(cd "$1" && pwd)
shift
cd "$environment/tsan/checkout"
free=$environment/free/venv
python=$environment/tsan/python/bin/python3
unset PYTHON_GIL

# By the other Python, whose headers are the same: Cython itself is slow under ThreadSanitizer.
CFLAGS="-O1 -g -fsanitize=thread" LDFLAGS=-fsanitize=thread \
    "$free/bin/python" setup.py --quiet build_ext --inplace
PYTHONPATH=$PWD:$("$free/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export PYTHONPATH OPENBLAS_NUM_THREADS=1

reports=$PWD/build/tsan
rm -rf "$reports" && mkdir -p "$reports"
# exitcode: CPython has reports of its own. die_after_fork: workers are forked beside threads.
# allocator_may_return_null: tests ask for more memory than there is.
export TSAN_OPTIONS="exitcode=0 history_size=7 die_after_fork=0 allocator_may_return_null=1 log_path=$reports/report"
TSAN_OPTIONS+=" suppressions=$PWD/tests/freethreaded/suppressions.txt"
result=0
timeout 600 "$python" tests/freethreaded/stress.py 100 || result=1
"$python" -m pytest -p no:cacheprovider -m "not slow" \
    "${@:-tests/test_consumer.py}" || result=1
if grep -l cseq "$reports"/* 2>/dev/null; then
    echo "ThreadSanitizer reports races of cseq: see the files above" >&2
    result=1
fi
echo "$(cat "$reports"/* 2>/dev/null | grep -c "^SUMMARY:" || true) reports in all, the others of CPython"
exit $result
