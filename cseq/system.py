"""The machine or container: control groups, cores, library threads, memory.

Most libraries read the environment only when they are loaded. A forked process inherits loaded
libraries, so torch and OpenBLAS are limited with function calls instead.

::

    thread_variables(threads, environ) ──► the environment of fork servers and spawned workers
    limit_threads(threads) ──► a forked worker: its environment and its loaded libraries
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import re
import sys

# pathlib is slow to import.
from os.path import join
from typing import TYPE_CHECKING, Any, TypeAlias

from cseq._memory import ram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "GIB",
    "KIB",
    "LOCAL_SIZES",
    "MIB",
    "OPENMP",
    "ROOT",
    "VARIABLES",
    "Folder",
    "available_memory",
    "check_available",
    "cores",
    "default_memory_limit",
    "fields",
    "find_openblas",
    "gpu_is_idle",
    "groups",
    "limit_threads",
    "lines",
    "memory_limit_of",
    "neighbours",
    "number",
    "oom_kills",
    "private_memory",
    "quota",
    "share",
    "thread_variables",
]

Folder: TypeAlias = "str | os.PathLike[str]"

ROOT = "/"


def groups(root: Folder, controller: str, name: str, old: str) -> Iterator[tuple[str, str]]:
    """Yield (folder, file name) for this process's control groups and their ancestors.

    The file name is `name`, or `old` for cgroups v1. In a container, a folder may be missing.
    """
    for line in lines(join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(join(root, "sys/fs/cgroup"), path, name)
        elif controller in controllers.split(","):
            yield from _upwards(join(root, "sys/fs/cgroup", controller), path, old)


def _upwards(top: str, path: str, name: str) -> Iterator[tuple[str, str]]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield join(top, *parts[:depth]), name


def lines(path: str) -> list[str]:
    """Return the lines of a file, or [] if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def number(path: str) -> int | None:
    """Return the number in a file, or None if the file is missing or contains text ('max')."""
    text = "".join(lines(path)).strip()
    return int(text) if text.isdigit() else None


def fields(path: str) -> dict[str, int]:
    """Parse a file with one name and number per line into a dict."""
    words = [line.split() for line in lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


OPENMP = "OMP_NUM_THREADS"
# If one of these variables is unset, its library falls back to OMP_NUM_THREADS, as torch does.
FOLLOWING = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
VARIABLES = (OPENMP, *FOLLOWING, "VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM")


# Names that OpenBLAS builds give to the function that sets the thread count.
OPENBLAS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share() -> int:
    """Return this rank's share of the cores, at least 1."""
    allowed = quota()
    most = cores() if allowed is None else min(cores(), int(allowed + 0.5))
    return max(1, most // neighbours())


def quota(root: Folder = ROOT) -> float | None:
    """Return the control groups' CPU quota in cores, or None if there is no quota."""
    limits = []
    for group, name in groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = " ".join(lines(join(group, name))).split()
        if name == "cpu.cfs_quota_us":
            words += [str(number(join(group, "cpu.cfs_period_us")) or 0)]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def neighbours() -> int:
    """Return the number of ranks on this machine, as reported by the launcher."""
    sizes = (os.environ.get(name, "") for name in LOCAL_SIZES)
    return next((int(size) for size in sizes if size.isdecimal() and int(size)), 1)


def gpu_is_idle() -> bool | None:
    """Return whether the GPU is idle, or None if CUDA is unused or a graph is being captured."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    if cuda.is_current_stream_capturing():
        return None
    idle: bool = cuda.current_stream().query()
    return idle


def thread_variables(threads: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environ` so that libraries use at most `threads` threads.

    Omit any the user has set, directly or through OMP_NUM_THREADS. If `threads` is None, return {}.
    """
    if threads is None:
        return {}
    theirs = FOLLOWING if OPENMP in environ else ()
    unset = [name for name in VARIABLES if name not in environ and name not in theirs]
    return dict.fromkeys(unset, str(threads))


def limit_threads(threads: int | None) -> None:
    """Limit the number of threads that libraries use in a forked process."""
    if threads is None:
        return
    ours = thread_variables(threads, os.environ)
    os.environ.update(ours)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads") and {OPENMP, "MKL_NUM_THREADS"} <= ours.keys():
        torch.set_num_threads(threads)
    if "OPENBLAS_NUM_THREADS" in ours:
        for started, set_number in find_openblas():
            started.value = threads
            set_number(threads)


# Cache of `find_openblas`: the number of modules at the last search, and its result.
_openblas: tuple[int, list[tuple[Any, Any]]] = 0, []


def find_openblas() -> list[tuple[Any, Any]]:
    """Return the thread-count variable and setter of each loaded OpenBLAS (Linux only).

    Forked children reuse the result. In a forked child, OpenBLAS reads the number of threads to
    start from this internal variable, and each thread spins for 75 ms. Set the variable before
    calling the setter. Builds that hide the variable, such as NumPy 2.5's, are not limited.
    """
    global _openblas
    if _openblas[0] != len(sys.modules):
        settings = []
        paths = {line.split(maxsplit=5)[-1] for line in lines("/proc/self/maps")}
        for path in paths:
            if "openblas" in os.path.basename(path):
                ctypes = importlib.import_module("ctypes")
                with contextlib.suppress(OSError, ValueError):
                    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                    started = ctypes.c_int.in_dll(library, "blas_num_threads")
                    setters = [getattr(library, name, None) for name in OPENBLAS]
                    settings += [(started, setter) for setter in setters if setter is not None]
        _openblas = len(sys.modules), settings
    return _openblas[1]


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# The files that report memory usage and out-of-memory kills, keyed by the limit's file name.
USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
KILLS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}
# The amount of memory to assume if the actual amount is unknown.
UNKNOWN_RAM = 8 * GIB

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?i?B)", re.ASCII)


def memory_limit_of(value: int | str | None, name: str = "memory_limit") -> int:
    """Validate ``memory_limit`` or a similar argument, and return the number of bytes.

    Parameters
    ----------
    value : int, str or None
        A number of bytes, a number with a unit, such as ``'2GiB'`` or ``'500 MB'``, or None for
        this rank's share of a quarter of the machine's or control group's memory. With 0, batches
        are always copied out of their slots.

    Raises
    ------
    TypeError
        If the value has an unsupported type.
    ValueError
        If the value is negative, or if the text is not a size.
    """
    if value is None:
        return default_memory_limit()
    if isinstance(value, str):
        return _parse_size(value, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; pass a number of bytes, a size such as "
            "'2GiB', or None"
        )
    limit = operator.index(value)
    if limit < 0:
        raise ValueError(f"{name}={limit} is negative; pass at least 0 bytes")
    return limit


def _parse_size(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{name}={text!r} is not a size; pass a number with one of the units "
            f"{', '.join(_UNITS)}, such as '2GiB'"
        )
    count = float(match[1]) if "." in match[1] else int(match[1])
    return int(count * _UNITS[match[2]])


def default_memory_limit(root: Folder = ROOT) -> int:
    """Return a quarter of the memory, divided by the number of ranks, in bytes."""
    limits = [number(join(group, limit)) for group, limit in _groups(root)]
    return min([_ram(), *(limit for limit in limits if limit is not None)]) // (4 * neighbours())


def available_memory(root: Folder = ROOT) -> int | None:
    """Return the number of bytes that can still be allocated, or None if it is unknown."""
    machine = fields(join(root, "proc/meminfo"))
    if "MemAvailable:" not in machine:
        return None
    free = KIB * (machine["MemAvailable:"] + machine.get("SwapFree:", 0))
    return max(0, min([free, *_free_of_groups(root)]))


def private_memory(pid: int | None, root: Folder = ROOT) -> int:
    """Return a process's private memory in bytes, or 0 if it is unknown."""
    words = "".join(lines(join(root, f"proc/{pid}/statm"))).split()
    return os.sysconf("SC_PAGE_SIZE") * (int(words[1]) - int(words[2])) if len(words) > 2 else 0


def oom_kills(root: Folder = ROOT) -> int | None:
    """Return the number of out-of-memory kills in this control group, or None if unknown."""
    # Exhaust the generator, because closing it would lose an exception from a signal handler.
    counts = [fields(join(group, KILLS[name])).get("oom_kill") for group, name in _groups(root)]
    known = [count for count in counts if count is not None]
    return known[0] if known else None


def check_available(nbytes: int) -> None:
    """Raise MemoryError if fewer than `nbytes` bytes are available.

    Otherwise, Linux would kill a process, and macOS would fill its disk. On macOS, only requests
    that exceed the total memory are rejected.
    """
    free = available_memory()
    free = _ram() if free is None else free
    if nbytes > free:
        raise MemoryError(
            f"cannot allocate {nbytes} bytes of shared memory: only {free} are available; use "
            "smaller batches, or fewer at a time (batch_size, buffer or prefetch)"
        )


def _ram() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return ram() or UNKNOWN_RAM


def _free_of_groups(root: Folder) -> Iterator[int]:
    """Yield the free bytes in each control group, including inactive page cache."""
    for group, name in _groups(root):
        limit = number(join(group, name))
        taken = number(join(group, USAGE[name]))
        if limit is not None and taken is not None:
            cache = fields(join(group, "memory.stat"))
            yield limit - taken + cache.get("total_inactive_file", cache.get("inactive_file", 0))


def _groups(root: Folder) -> Iterator[tuple[str, str]]:
    return groups(root, "memory", "memory.max", "memory.limit_in_bytes")
