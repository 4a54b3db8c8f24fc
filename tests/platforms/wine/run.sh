#!/usr/bin/env bash
# Runs a Windows program in the environment that setup.sh made: run.sh FOLDER PROGRAM ARGUMENTS...
#
# `python` is that environment's CPython; the current folder is C:\cseq, which build.py fills. Output
# goes through a pipe: with a file as its standard output, CPython fails to start under Wine 8.
set -euo pipefail
wine=$(PATH="$PATH:/usr/lib/wine" && { command -v wine64 || command -v wine; }) || {
    echo "make check-wine needs Wine, which root installs (Debian, Ubuntu: apt install wine64; Fedora: dnf" \
        "install wine)" >&2
    exit 1
}
mkdir -p "$1/prefix"
# Without Wine's menus, its offers to download .NET and a browser, and its debugger, which lets a wait
# for a process that has crashed not end; quiet about what it lacks. KMP_TOPOLOGY_METHOD: torch's OpenMP
# would ask for NUMA nodes otherwise, which Wine 8 does not know of. msvcp140: see setup.sh.
# Python keeps what it compiles, for any variables of the caller: recompiling torch's files takes each
# process half as long again as importing them.
export WINEPREFIX=$(cd "$1/prefix" && pwd) WINEARCH=win64 WINEDEBUG=${WINEDEBUG:--all} \
    WINEDLLOVERRIDES='winemenubuilder.exe,winedbg.exe,mscoree,mshtml=;msvcp140=n,b' \
    KMP_TOPOLOGY_METHOD=flat PYTHONDONTWRITEBYTECODE=
program=$2
shift 2
if [ "$program" = python ]; then program='C:\python\python.exe'; fi
mkdir -p "$WINEPREFIX/drive_c/cseq" && cd "$WINEPREFIX/drive_c/cseq"
status=0
"$wine" "$program" "$@" </dev/null > >(cat) 2>&1 || status=$?
# A process that it has left (a `cmd.exe /c ver` of a killed one) may wait forever and hold the pipe, so
# it ends now.
"$wine" wineboot --kill </dev/null >/dev/null 2>&1 || true
exit $status
