"""The cores there are, and the threads of numerical libraries in a worker.

By default each of these libraries uses all cores, in every process, while several workers share the
cores. Libraries that a process loads read the environment; for those that a forked process finds
loaded, a function of theirs is called.

::

    variables(threads, environ) ──► the environment of fork servers and spawned workers
    limit(threads) ──► a forked worker: its environment, and each library that is there
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["VARIABLES", "cores", "limit", "variables"]

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
STARTED = "blas_num_threads"  # a variable of OpenBLAS: how many threads it starts


def cores() -> int:
    """Count the cores that this process may run on, as far as the system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        for path in _loaded("openblas"):
            _set_openblas(path, threads)


def _loaded(name: str) -> Iterator[str]:
    """Find the loaded shared libraries whose file names contain `name`, on Linux."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        places = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if name in line}
        yield from (place for place in places if name in os.path.basename(place))


def _set_openblas(path: str, threads: int) -> None:
    """Set the threads of an OpenBLAS that is loaded, and whose own threads a fork has ended.

    Its function starts as many threads as `STARTED` says before it reads the new number, and each
    of them spins for some 25 ms, for which the start of a worker waits on two cores. So the number
    is written to `STARTED` first; the OpenBLAS of numpy 2.5's wheels hides that.
    """
    ctypes = importlib.import_module("ctypes")
    with contextlib.suppress(OSError):  # a file that is no library, or is gone
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        with contextlib.suppress(ValueError):  # a build without threads
            ctypes.c_int.in_dll(library, STARTED).value = threads
        for name in OPENBLAS:
            if hasattr(library, name):
                getattr(library, name)(threads)
