#!/usr/bin/env bash
# Builds CPython from Debian's source package: setup.sh PYTHON VERSION FOLDER CONFIGURE-OPTIONS...
#
# PYTHON is any Python 3 that runs here; VERSION is 3.13 or 3.14.
# What is built is installed into FOLDER. PYTHON_SOURCE=FILE names the archive where there is no apt.
set -euo pipefail
case $2 in
3.13) # 3.13.5, for as long as there is Debian 13
    release=trixie sha256=93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640
    ;;
3.14) # the one that Debian 14 has by now: until it is released, no SHA-256 would stay the right one
    release=forky sha256=
    ;;
*)
    echo "this recipe is for CPython 3.13 and 3.14, not $2" >&2
    exit 1
    ;;
esac

platforms=$(cd "$(dirname "$0")/.." && pwd)
python=$1
version=$2
mkdir -p "$3"
folder=$(cd "$3" && pwd)
shift 3
scratch=$(mktemp -d "$folder/build-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
archive=${PYTHON_SOURCE:-$("$python" "$platforms/debian.py" $release "python$version" "$scratch")}
if [ -n "$sha256" ] && ! echo "$sha256  $archive" | sha256sum --check --quiet; then
    echo "$archive is not the source of CPython $version that this recipe is for" >&2
    exit 1
fi
mkdir "$scratch/source"
tar -xf "$archive" -C "$scratch/source" --strip-components 1
if ! grep -q "^#define PY_VERSION  *\"$version\." "$scratch/source/Include/patchlevel.h"; then
    echo "$archive is not the source of a CPython $version" >&2
    exit 1
fi

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
