"""What a process and all its descendants use: CPU seconds, memory, descriptors.

Read from `/proc`; on systems without it, every figure is NaN.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path

PROC = Path("/proc")
HAS_PROC = (PROC / "self" / "smaps_rollup").exists()


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    session: int
    reaped_seconds: float  # CPU time of its children that have ended


def tree(root: int) -> list[Process]:
    """Find a process and its descendants, and who else is of the session that it leads."""
    table = {process.pid: process for process in processes()} if HAS_PROC else {}

    def belongs(process: Process | None) -> bool:
        while process is not None:
            if process.pid == root or process.session == root:
                return True
            process = table.get(process.parent)
        return False

    return [process for process in table.values() if belongs(process)]


def processes() -> list[Process]:
    """Read the process table."""
    found = []
    ticks = os.sysconf("SC_CLK_TCK")
    for name in filter(str.isdecimal, os.listdir(PROC)):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
            reaped = (int(fields[13]) + int(fields[14])) / ticks
            found.append(Process(int(name), int(fields[1]), int(fields[3]), reaped))
    return found


def cpu_seconds(root: int, *, with_root: bool = True) -> float:
    """CPU time that a process and its descendants have used up to now."""
    if not HAS_PROC:
        return nan
    members = [process for process in tree(root) if with_root or process.pid != root]
    return sum(process.reaped_seconds + clock(process.pid) for process in members)


def clock(pid: int) -> float:
    """CPU time of all threads of a process, to the nanosecond: Linux gives it a clock."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def memory_bytes(root: int) -> float:
    """Proportional set size of a process and its descendants: shared pages count once."""
    if not HAS_PROC:
        return nan
    return sum(proportional_bytes(process.pid) for process in tree(root))


def proportional_bytes(pid: int) -> int:
    """Proportional set size of one process."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def descriptors(root: int) -> float:
    """Open descriptors of a process and its descendants."""
    if not HAS_PROC:
        return nan
    return sum(open_files(process.pid) for process in tree(root))


def open_files(pid: int) -> int:
    """Open descriptors of one process."""
    with contextlib.suppress(OSError):
        return len(os.listdir(PROC / str(pid) / "fd"))
    return 0
