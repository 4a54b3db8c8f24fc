#!/usr/bin/env bash
# Builds CPython from Debian's source package: setup.sh PYTHON FOLDER CONFIGURE-OPTIONS...
#
# PYTHON is any Python 3 that runs here.
# What is built is installed into FOLDER. PYTHON_SOURCE=FILE names the archive where there is no apt.
set -euo pipefail
version=3.13.5
sha256=93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640

tests=$(cd "$(dirname "$0")/.." && pwd)
python=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
shift 2
scratch=$(mktemp -d "$folder/build-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
archive=${PYTHON_SOURCE:-$("$python" "$tests/debian.py" trixie python3.13 "$scratch")}
if ! echo "$sha256  $archive" | sha256sum --check --quiet; then
    echo "$archive is not the source of CPython $version that this recipe is for" >&2
    exit 1
fi
mkdir "$scratch/source"
tar -xf "$archive" -C "$scratch/source" --strip-components 1

export TSAN_OPTIONS="report_bugs=0" # of the Python that builds itself
cd "$scratch/source"
{
    ./configure --quiet --prefix="$folder" "$@"
    nice -n 5 make -s -j "$(nproc)"
    nice -n 5 make -s install COMPILEALL_OPTS="-r 0" # the rest when it is imported
} >"$folder/build.log" 2>&1 || {
    tail -n 20 "$folder/build.log" >&2
    exit 1
}
# make leaves out what it finds no headers for, and says nothing.
"$folder/bin/python3" -c 'import bz2, ctypes, lzma, ssl, sqlite3, zlib' || {
    echo "headers were missing when CPython was built (Debian, Ubuntu: apt install libbz2-dev" \
        "libffi-dev liblzma-dev libssl-dev libsqlite3-dev zlib1g-dev)" >&2
    exit 1
}
