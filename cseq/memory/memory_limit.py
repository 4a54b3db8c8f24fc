"""How much memory this process may take of the machine and its control groups."""

from __future__ import annotations

import operator
import os
import re
from os.path import join  # pathlib is slow to import, and every start waits for it
from typing import TYPE_CHECKING

from cseq._memory import ram
from cseq.cgroup import ROOT, Folder, fields, groups, lines, number
from cseq.compute import neighbours

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Files of a control group: the limit of its memory, and the memory that it uses.
USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
# And the number of its processes that were killed for lack of memory.
KILLS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}
UNKNOWN_RAM = 8 * GIB  # bytes; assumed where the system does not say

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?i?B)", re.ASCII)


def memory_limit_of(value: int | str | None) -> int:
    """Check the argument ``memory_limit``, and return it in bytes.

    Parameters
    ----------
    value : int, str or None
        Bytes; or a number and a unit, as ``'2GiB'``, ``'500 MB'``; or None, this rank's part of a
        quarter of the memory that this machine, or its control group, has. 0: never lend a slot,
        always copy.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For a negative number, or a text that is no size.
    """
    if value is None:
        return default_memory_limit()
    if isinstance(value, str):
        return _parse_size(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"memory_limit={value!r} is a {type(value).__name__}: give bytes (an int), a size "
            "such as '2GiB', or None"
        )
    limit = operator.index(value)
    if limit < 0:
        raise ValueError(f"memory_limit={limit} is negative: give 0 or more bytes")
    return limit


def _parse_size(text: str) -> int:
    """Read a size such as '2GiB'."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"memory_limit={text!r} is not a size: write a number and one of {', '.join(_UNITS)}, "
            "such as '2GiB'"
        )
    count = float(match[1]) if "." in match[1] else int(match[1])
    return int(count * _UNITS[match[2]])


def default_memory_limit(root: Folder = ROOT) -> int:
    """Return one rank's part of a quarter of the memory that this process may use, in bytes."""
    limits = [number(join(group, limit)) for group, limit in _groups(root)]
    return min([_ram(), *(limit for limit in limits if limit is not None)]) // (4 * neighbours())


def available_memory(root: Folder = ROOT) -> int | None:
    """Return how many bytes this process may still use; None where the system does not say."""
    machine = fields(join(root, "proc/meminfo"))
    if "MemAvailable:" not in machine:
        return None
    free = KIB * (machine["MemAvailable:"] + machine.get("SwapFree:", 0))
    return max(0, min([free, *_free_of_groups(root)]))


def private_memory(pid: int | None, root: Folder = ROOT) -> int:
    """Return how many bytes a process has for itself alone; 0 where the system does not say."""
    words = "".join(lines(join(root, f"proc/{pid}/statm"))).split()
    return os.sysconf("SC_PAGE_SIZE") * (int(words[1]) - int(words[2])) if len(words) > 2 else 0


def oom_kills(root: Folder = ROOT) -> int | None:
    """Return how many processes of this control group were killed for lack of memory, or None."""
    # No generator is left in its middle: what a signal handler raises while it is closed is lost.
    counts = [fields(join(group, KILLS[name])).get("oom_kill") for group, name in _groups(root)]
    known = [count for count in counts if count is not None]
    return known[0] if known else None


def check_available(nbytes: int) -> None:
    """Raise MemoryError if fewer bytes are available: Linux would kill a process instead.

    A system that does not say how many are available (macOS) would fill the disk: there, more than
    its whole memory are refused.
    """
    free = available_memory()
    free = _ram() if free is None else free
    if nbytes > free:
        raise MemoryError(
            f"no room for {nbytes} bytes of shared memory: {free} are available; make batches "
            "smaller, or fewer of them at a time (batch_size, buffer or prefetch)"
        )


def _ram() -> int:
    """Bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return ram() or UNKNOWN_RAM


def _free_of_groups(root: Folder) -> Iterator[int]:
    """Bytes that are left in this process's control groups and all above them."""
    for group, name in _groups(root):
        limit = number(join(group, name))
        taken = number(join(group, USAGE[name]))
        if limit is not None and taken is not None:
            cache = fields(join(group, "memory.stat"))  # files' pages can be dropped
            yield limit - taken + cache.get("total_inactive_file", cache.get("inactive_file", 0))


def _groups(root: Folder) -> Iterator[tuple[str, str]]:
    return groups(root, "memory", "memory.max", "memory.limit_in_bytes")
