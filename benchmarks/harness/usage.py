"""What a process and all its descendants use: CPU seconds, memory, descriptors.

Read from `/proc`; on systems without it, every figure is NaN.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from math import nan
from pathlib import Path

PROC = Path("/proc")
COMPACT = PROC / "sys" / "vm" / "compact_memory"
HAS_PROC = (PROC / "self" / "smaps_rollup").exists()


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    session: int
    # The CPU time of children that ended.
    reaped_seconds: float


def join_free_memory() -> None:
    """Make the kernel compact free memory, if permitted (`COMPACT`).

    Scattered pages are slower. Among equal contenders, the process that started first got these
    pages and was up to 12 % slower than the others.
    """
    if os.access(COMPACT, os.W_OK):
        if os.sysconf("SC_AVPHYS_PAGES") < os.sysconf("SC_PHYS_PAGES") // 2:
            # Drop cached files, which occupy the rest.
            COMPACT.with_name("drop_caches").write_text("1")
        COMPACT.write_text("1")


def tree(root: int) -> list[Process]:
    """Find a process, its descendants, and the other processes of its session."""
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
        # The process may have ended in the meantime.
        with contextlib.suppress(OSError):
            fields = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
            reaped = (int(fields[13]) + int(fields[14])) / ticks
            found.append(Process(int(name), int(fields[1]), int(fields[3]), reaped))
    return found


def cpu_seconds(root: int, *, with_root: bool = True) -> float:
    """Return the CPU time that a process and its descendants have used so far."""
    if not HAS_PROC:
        return nan
    members = [process for process in tree(root) if with_root or process.pid != root]
    return sum(process.reaped_seconds + clock(process.pid) for process in members)


def clock(pid: int) -> float:
    """Return the CPU time of all of a process's threads from its Linux clock, to the nanosecond."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def memory_bytes(root: int) -> float:
    """Return the memory of a process and its descendants. Shared memory counts once.

    The memory is the sum of their proportional set sizes, plus any shared memory that they have
    open but no process has mapped: a DataLoader's batches on their way from worker to trainer.
    """
    if not HAS_PROC:
        return nan
    pids = [process.pid for process in tree(root)]
    opened: dict[tuple[str, int], int] = {}
    mapped: Counter[tuple[str, int]] = Counter()
    for pid in pids:
        opened |= open_shared_memory(pid)
        mapped += mapped_bytes(pid)
    unmapped = sum(max(0, size - mapped[file]) for file, size in opened.items())
    return mapped.total() + unmapped


def mapped_bytes(pid: int) -> Counter[tuple[str, int]]:
    """Return the proportional set size of a process by the device and inode of each mapped file."""
    found: Counter[tuple[str, int]] = Counter()
    with contextlib.suppress(OSError):
        file = "", 0
        for line in (PROC / str(pid) / "smaps").read_bytes().splitlines():
            fields = line.split()
            if fields[0] == b"Pss:":
                found[file] += int(fields[1]) * 1024
            elif not fields[0].endswith(b":"):
                file = fields[3].decode(), int(fields[4])
    return found


def open_shared_memory(pid: int) -> dict[tuple[str, int], int]:
    """Return the bytes of shared memory that a process has open, by device and inode."""
    found = {}
    folder = PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            # The file may have been closed in the meantime.
            with contextlib.suppress(OSError):
                if os.readlink(folder / name).startswith(("/memfd:", "/dev/shm/")):
                    about = os.stat(folder / name)
                    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
                    found[device, about.st_ino] = about.st_blocks * 512
    return found


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
