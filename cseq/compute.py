"""The cores there are, and the threads of numerical libraries in a worker.

By default each of these libraries uses all cores, in every process, while several workers share the
cores. Libraries read the environment when they load. In a forked process they may be loaded
already, so their functions are called.

::

    variables(threads, environ) ──► the environment of fork servers and spawned workers
    limit(threads) ──► a forked worker: its environment, and each library that is there
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from os.path import join
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.cgroup import ROOT, Folder, groups, lines, number

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping

__all__ = [
    "VARIABLES",
    "cores",
    "find_openblas",
    "gpu_is_idle",
    "limit",
    "neighbours",
    "quota",
    "share",
    "variables",
]

OPENMP = "OMP_NUM_THREADS"  # torch reads it, too
# Where one of these is not set, its library reads OPENMP.
FOLLOWING = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
VARIABLES = (OPENMP, *FOLLOWING, "VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM")


class Library(NamedTuple):
    """A Python module, the function that sets its threads, and the variables that it reads."""

    module: str
    function: str
    variables: tuple[str, ...]


LIBRARIES = (
    Library("torch", "set_num_threads", (OPENMP, "MKL_NUM_THREADS")),
    Library("mkl", "set_num_threads", ("MKL_NUM_THREADS",)),
    Library("numexpr", "set_num_threads", ("NUMEXPR_NUM_THREADS",)),
    Library("cv2", "setNumThreads", ("OPENCV_FOR_THREADS_NUM",)),
)

# OpenBLAS has no module; the names under which numpy's and scipy's copies have this function.
OPENBLAS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

STARTED = "blas_num_threads"  # a variable of OpenBLAS: how many threads it starts


def cores() -> int:
    """Count the cores that this process may run on, as far as the system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share() -> int:
    """Count the cores for this process: within its container's quota, one part for each rank."""
    allowed = quota()
    most = cores() if allowed is None else min(cores(), int(allowed + 0.5))
    return max(1, most // neighbours())


def quota(root: Folder = ROOT) -> float | None:
    """Return how many cores the control groups allow; None: they do not limit them."""
    limits = []
    for group, name in groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = " ".join(lines(join(group, name))).split()
        if name == "cpu.cfs_quota_us":
            words += [str(number(join(group, "cpu.cfs_period_us")) or 0)]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def neighbours() -> int:
    """Count the ranks on this machine, as launchers tell (torchrun, Open MPI, MPICH)."""
    told = (os.environ.get(name, "") for name in LOCAL_SIZES)
    return next((int(each) for each in told if each.isdecimal() and int(each)), 1)


def gpu_is_idle() -> bool | None:
    """Whether the GPU has done all that this thread gave it; None: it does not use CUDA."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    if cuda.is_current_stream_capturing():  # a graph, in which nothing may be asked
        return None
    idle: bool = cuda.current_stream().query()
    return idle


def variables(threads: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for `threads` threads; those that the user has set win.

    Some libraries read OMP_NUM_THREADS if their own variable is not set; where the user has set it,
    theirs are left unset. ``threads=None`` sets none.
    """
    if threads is None:
        return {}
    theirs = FOLLOWING if OPENMP in environ else ()
    unset = [name for name in VARIABLES if name not in environ and name not in theirs]
    return dict.fromkeys(unset, str(threads))


def limit(threads: int | None) -> None:
    """Limit the threads of libraries in a forked process: loaded ones, and those loaded later."""
    if threads is None:
        return
    ours = variables(threads, os.environ)
    os.environ.update(ours)
    for library in LIBRARIES:
        setter = getattr(sys.modules.get(library.module), library.function, None)
        if setter is not None and all(name in ours for name in library.variables):
            setter(threads)
    if "OPENBLAS_NUM_THREADS" in ours:
        for openblas in find_openblas():
            openblas.set(threads)


class OpenBLAS:
    """An OpenBLAS that is loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # `set` is called after a fork, which has ended its threads. The functions start as many as
        # this variable says before they read the new number, and each of them spins for some 25 ms,
        # for which the start of a worker waits on two cores. So the number is written there first;
        # the OpenBLAS of numpy 2.5's wheels hides it.
        self._started: Any = None
        with contextlib.suppress(ValueError):  # a build without threads
            self._started = _ctypes().c_int.in_dll(library, STARTED)
        self._setters = [getattr(library, name) for name in OPENBLAS if hasattr(library, name)]

    def set(self, threads: int) -> None:
        """Set its threads."""
        if self._started is not None:
            self._started.value = threads
        for setter in self._setters:
            setter(threads)


_found: tuple[int, list[OpenBLAS]] = 0, []  # how many modules there were, and what was found


def find_openblas() -> list[OpenBLAS]:
    """Find the loaded ones, on Linux: once, unless modules have been imported since.

    Call it before a fork: otherwise each child copies the pages that this writes to.
    """
    global _found
    if _found[0] != len(sys.modules):
        paths = _loaded("openblas")
        found = []
        for path in paths:
            with contextlib.suppress(OSError):  # a file that is no library, or is gone
                library = _ctypes().CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                found.append(OpenBLAS(library))
        _found = len(sys.modules), found
    return _found[1]


def _loaded(name: str) -> set[str]:
    """Find the loaded shared libraries whose file names contain `name`."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        places = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if name in line}
        return {place for place in places if name in os.path.basename(place)}
    return set()


def _ctypes() -> Any:
    """Import ctypes, which few need."""
    return importlib.import_module("ctypes")
