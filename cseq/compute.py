"""The cores there are, and the threads of numerical libraries in a worker.

By default each of these libraries uses all cores, in every process, while several workers share the
cores. Libraries read the environment when they load. In a forked process they may be loaded
already: torch and, where threadpoolctl is installed, OpenBLAS are told.

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
from typing import TYPE_CHECKING, Any

from cseq.cgroup import ROOT, Folder, groups, lines, number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "VARIABLES",
    "cores",
    "gpu_is_idle",
    "limit",
    "neighbours",
    "quota",
    "share",
    "threadpoolctl",
    "variables",
]

OPENMP = "OMP_NUM_THREADS"  # torch reads it, too
# Where one of these is not set, its library reads OPENMP.
FOLLOWING = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
VARIABLES = (OPENMP, *FOLLOWING, "VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM")


LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


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
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads") and {OPENMP, "MKL_NUM_THREADS"} <= ours.keys():
        torch.set_num_threads(threads)
    pools = threadpoolctl()
    if pools is not None and "OPENBLAS_NUM_THREADS" in ours:
        found = pools.ThreadpoolController().select(internal_api="openblas")
        found.limit(limits=threads)


def threadpoolctl() -> Any:
    """Import that library, if it is installed; before a fork, so that no child does."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("threadpoolctl")
    return None
