"""What the monitors of frameworks and metrics systems have in common."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.check import count
from cseq.meters import EDGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq.stats import Stats

__all__ = ["COUNTERS", "ENDS", "GAUGES", "HISTOGRAMS", "Totals", "Windows"]
__all__ += ["added", "needs", "totals_of"]

log = logging.getLogger("cseq")


class Metric(NamedTuple):
    """A number of `Stats`, as metrics systems name it."""

    name: str
    unit: str  # of Prometheus: 'seconds', 'bytes' or none
    read: Callable[[Stats], Any]
    text: str


COUNTERS = [
    Metric("batches", "", lambda s: s.batches, "Batches that the loop has taken."),
    Metric("samples", "", lambda s: s.samples, "Samples of those batches."),
    Metric("delivered", "bytes", lambda s: s.nbytes, "Shared memory of those batches."),
    Metric("elapsed", "seconds", lambda s: s.elapsed, "Time of epochs, from the first batch on."),
    Metric("waited", "seconds", lambda s: s.loop_waited, "Part of it that the loop waited."),
    Metric("restarts", "", lambda s: s.restarts, "Worker processes that were replaced."),
    Metric("retries", "", lambda s: s.retries, "Batches made again after their worker had died."),
    Metric("skips", "", lambda s: s.skips, "Batches left out because their indexer raised."),
    Metric("copies", "", lambda s: s.copies, "Batches copied because too many were held."),
]
HISTOGRAMS = [
    Metric("index", "seconds", lambda s: s.index_seconds, "Time that a batch took its worker."),
    Metric("step", "seconds", lambda s: s.step_seconds, "Time of the loop's own for a batch."),
    Metric("wait", "seconds", lambda s: s.wait_seconds, "Time that the loop waited for a batch."),
]
GAUGES = [
    Metric("workers", "", lambda s: s.num_workers, "Workers that make batches."),
    Metric("buffer", "", lambda s: s.buffer, "Batches ahead of the loop, at most."),
    Metric("ready", "", lambda s: s.depths[2], "Batches that are ready for the loop."),
    Metric("start", "seconds", lambda s: s.start_waited, "Time until the loop had a batch."),
]
ENDS = EDGES[16:121:4]  # of buckets that are told: octaves from 1 µs to 69 s
TOTALS = np.dtype(
    [(name, "f8") for name, *_ in COUNTERS]
    + [(name, [("sum", "f8"), ("counts", "f8", len(ENDS) + 1)]) for name, *_ in HISTOGRAMS]
)


class Windows:
    """Figures of a loader for each window of so many steps.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        None: the one that `begin` is given.
    every : int
        Steps of the loop from one window to the next.
    """

    def __init__(self, manager: Any, every: int) -> None:
        self.every = count("every", every)
        self._own = None if manager is None else stats_of(manager)
        self._before: Stats | None = None
        self._told = False

    def begin(self, manager: Any = None) -> None:
        """Begin a window here; the loop trains with `manager`."""
        self._stats = self._own or stats_of(manager)
        self._before = read(self._stats)

    def at(self, step: int) -> dict[str, float]:
        """Return the figures if a window ends with this step, which is counted from 1, or {}."""
        return self.end() if step % self.every == 0 else {}

    def end(self) -> dict[str, float]:
        """Return the figures since the window's begin, and begin the next one."""
        before, now = self._before, read(self._stats)
        self._before = now
        if now is None:
            if not self._told:
                log.warning("no figures to log: this loader has no worker processes of cseq's")
            self._told = True
            return {}
        return added(before, now).as_dict()


def added(before: Stats | None, now: Stats) -> Stats:
    """Return what was counted since then; all of it, if the loader has started again."""
    if before is None:
        return now
    try:
        return now.since(before)
    except ValueError:
        return now


class Totals:
    """What a loader has counted in all its runs; on any thread.

    Nothing goes down: neither with a new run, which counts from 0, nor because what is under way
    was read while the loop went on, which may make a time a little too long.

    Parameters
    ----------
    manager : manager or DataLoader
    """

    def __init__(self, manager: Any) -> None:
        self._stats = stats_of(manager)
        self._lock = threading.Lock()
        self._run = 0
        self._ended, self._present = np.zeros((2, TOTALS.itemsize // 8))

    def read(self) -> tuple[Stats | None, Any]:
        """Return what is counted now, None if that is nothing, and what was counted in all."""
        with self._lock:
            now = read(self._stats)
            if now is not None:
                if self._run not in (0, now._first):
                    self._ended, self._present = self._ended + self._present, 0 * self._present
                self._run, self._present = now._first, np.maximum(self._present, counted(now))
            return now, (self._ended + self._present).view(TOTALS)[0]


def counted(stats: Stats) -> Any:
    """Return what a run has counted, as numbers in a row."""
    found = np.zeros(1, TOTALS)
    for metric in COUNTERS:
        found[metric.name] = metric.read(stats)
    for metric in HISTOGRAMS:
        histogram = metric.read(stats)
        found[metric.name]["sum"] = histogram.total
        found[metric.name]["counts"] = [*histogram.below(ENDS), histogram.count]
    return found.view("f8")


def totals_of(managers: dict[str, Any]) -> dict[str, Totals]:
    """Check the loaders that a metrics system gets, with their names."""
    if not managers:
        raise TypeError("there is no loader; give a manager or cseq.DataLoader: train=manager")
    return {name: Totals(manager) for name, manager in managers.items()}


def stats_of(manager: Any) -> Callable[[], Stats]:
    """Check that something counts; return its `stats`."""
    stats: Callable[[], Stats] | None = getattr(manager, "stats", None)
    if stats is None:
        raise TypeError(
            f"manager={manager!r} has no stats(); give a manager of cseq or a cseq.DataLoader"
        )
    return stats


def read(stats: Callable[[], Stats]) -> Stats | None:
    """Return what was counted; None: nothing, of a DataLoader without workers at this moment."""
    try:
        return stats()
    except RuntimeError:
        return None


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Import a library in this block, or say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this needs {library}: pip install {package}", name=library) from error
