"""Descendants, memory and CPU time of other processes on Linux."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["cpu_seconds", "queued_seconds", "resident", "starts", "tree"]

PROC = "/proc"


def _fields(pid: int) -> list[str]:
    """Return the fields after the name in a process's stat file. The name may contain spaces."""
    try:
        with open(f"{PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants. Without `/proc`, return only `pid`."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(PROC):
            fields = _fields(int(name)) if name.isdecimal() else []
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, ())
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and their exited children, or 0 if unknown."""
    fields = (_fields(pid)[11:15] for pid in pids)
    return sum(sum(map(int, times)) for times in fields) / _ticks()


def queued_seconds(pids: Iterable[int]) -> float:
    """Return how long the main threads have waited for a core, or 0 if unknown."""
    waited = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"{PROC}/{pid}/schedstat") as file:
            waited += int(file.read().split()[1])
    return waited / 1e9


def starts(pid: int) -> str | None:
    """Return the start time in clock ticks, or None if the process is not alive."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def resident(pid: int) -> int:
    """Return the resident memory in bytes, including shared memory, or 0 if unknown."""
    with contextlib.suppress(OSError, IndexError), open(f"{PROC}/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1
