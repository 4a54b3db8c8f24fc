"""``cseq run --watch``: what torch's DataLoaders cost the loops of a script.

Nothing of them is changed: three of their methods are timed, and at the end each kind of loader has
its lines, with the advice for what was measured::

    __iter__ ──► Turn: an epoch, its workers ──► Watched: a kind of loader ──► Window ──► advise
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.advice import ENOUGH_BATCHES, LITTLE, Window, advise
from cseq.compute import share
from cseq.observe.figures import duration
from cseq.observe.processes import cpu_seconds, queued_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Watched", "tell", "told", "watch", "window_of"]

FREE = "if data were free:"  # begins a line about what a faster loader would gain


@dataclass
class Watched:
    """What loaders of one kind have cost.

    Attributes
    ----------
    dataset : str
        The data set's class.
    samples : int or None
        How many it has.
    batch_size : int or None
    num_workers : int
    persistent : bool
        Workers stay from one epoch to the next.
    computed, queued : float
        CPU seconds of what made the batches, the workers or the loop's own thread, after the first
        one of each epoch; and seconds that it was ready to run without a core.
    firsts : array of float
        Seconds from each `iter` to its first batch.
    waits, steps : array of float
        Seconds that the loop waited for each other batch, and what it did between two.
    turns : list of Turn
        Epochs that are under way.
    """

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    persistent: bool
    computed: float = 0.0
    queued: float = 0.0
    firsts: array[float] = field(default_factory=lambda: array("d"))
    waits: array[float] = field(default_factory=lambda: array("d"))
    steps: array[float] = field(default_factory=lambda: array("d"))
    turns: list[Turn] = field(default_factory=list)


class Turn:
    """An epoch: when the loop got its last batch, or asked for the first; its workers.

    Parameters
    ----------
    watched : Watched
    begun : float
    """

    def __init__(self, watched: Watched, begun: float) -> None:
        self.watched, self.begun = watched, begun
        self.given = 0.0
        self._pids: Sequence[int] = ()

    def begin(self, pids: Sequence[int]) -> None:
        """Note the workers, when they have made the first batch."""
        self._pids = pids
        self._computed, self._queued = cpu_seconds(pids), queued_seconds(pids)
        self.watched.turns.append(self)

    def end(self) -> None:
        """Note what they have computed, before they end; once."""
        if self in self.watched.turns:
            self.watched.turns.remove(self)
            self.watched.computed += max(cpu_seconds(self._pids) - self._computed, 0.0)
            self.watched.queued += max(queued_seconds(self._pids) - self._queued, 0.0)


def watch(loaders: dict[Any, Watched]) -> None:
    """Time every DataLoader of torch in this process from now on.

    Parameters
    ----------
    loaders : dict
        Gets a `Watched` for each kind of loader.
    """
    from torch.utils.data import DataLoader, IterableDataset

    from cseq.adapters.torch import names

    kind: Any = DataLoader
    iterate: Any = kind.__iter__
    following: Any = names.Base.__next__
    shut: Any = names.Workers._shutdown_workers
    clock = time.perf_counter

    def __iter__(loader: Any) -> Any:  # noqa: N807
        begun = clock()
        iterator = iterate(loader)
        if type(iterator).__next__ is not names.Base.__next__:
            return iterator  # not torch's own: cseq.DataLoader's, say
        key = (
            type(loader.dataset),
            None if isinstance(loader.dataset, IterableDataset) else _size_of(loader.dataset),
            loader.batch_size,
            loader.num_workers,
            loader.persistent_workers,
        )
        watched = loaders.get(key)
        if watched is None:
            watched = loaders[key] = Watched(key[0].__name__, *key[1:])
        end(iterator)  # of persistent workers, the epoch before
        iterator._cseq_turn = Turn(watched, begun)
        return iterator

    def __next__(iterator: Any) -> Any:  # noqa: N807
        turn: Turn | None = getattr(iterator, "_cseq_turn", None)
        if turn is None:  # made by a subclass without `__iter__`
            return following(iterator)
        begun, before = clock(), time.thread_time()
        try:
            batch = following(iterator)
        except StopIteration:
            turn.end()
            raise
        now = clock()
        if turn.given:
            turn.watched.steps.append(begun - turn.given)
            turn.watched.waits.append(now - begun)
            if not turn.watched.num_workers:
                turn.watched.computed += time.thread_time() - before
        else:
            turn.watched.firsts.append(now - turn.begun)
            turn.begin([worker.pid for worker in getattr(iterator, "_workers", ())])
            now = clock()
        turn.given = now
        return batch

    def end(iterator: Any) -> None:
        turn: Turn | None = getattr(iterator, "_cseq_turn", None)
        if turn is not None:
            turn.end()

    def _shutdown_workers(iterator: Any) -> None:
        end(iterator)
        shut(iterator)

    kind.__iter__ = __iter__
    names.Base.__next__ = __next__
    names.Workers._shutdown_workers = _shutdown_workers


def _size_of(dataset: Any) -> int | None:
    """Return the number of samples; None where the loader's own sampler alone knows it."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def window_of(watched: Watched, cores: int) -> Window:
    """Return what `advise` looks at.

    Where the loop waits, workers are taken to have worked all the time.

    Parameters
    ----------
    watched : Watched
    cores : int
    """
    waits, steps = np.asarray(watched.waits), np.asarray(watched.steps)
    count, workers, waited = len(waits), watched.num_workers, float(waits.sum())
    elapsed = waited + float(steps.sum())
    worked = elapsed * workers if workers else waited
    if not count:
        return Window(workers=workers, cores=cores)
    is_known = not workers or sys.platform.startswith("linux")
    half, rare = np.quantile(steps, (0.5, 0.99)).tolist()
    return Window(
        batches=count, elapsed=elapsed, waited=waited, step=float(steps.mean()), step_p50=half,
        step_p99=rare, index=worked / count if waited >= LITTLE * elapsed else 0.0, workers=workers,
        busy=float(workers > 0), cpu=watched.computed / worked if is_known else None,
        queued=min(watched.queued / worked, 1.0), cores=cores,
    )  # fmt: skip


def told(watched: Watched, cores: int) -> list[str]:
    """Say what a kind of loader has cost, and what would help.

    Parameters
    ----------
    watched : Watched
    cores : int

    Returns
    -------
    list of str
        Lines.
    """
    waits, firsts = np.asarray(watched.waits), np.asarray(watched.firsts)
    count, epochs = len(waits) + len(firsts), len(firsts)
    of = "" if epochs == 1 else f" in {epochs} epochs"
    size = "" if watched.samples is None else f", {watched.samples:,} samples"
    name = f"DataLoader of {watched.dataset}{size}, batch_size={watched.batch_size}"
    lines = [f"{name}, num_workers={watched.num_workers}: {count} batch{'es' * (count > 1)}{of}"]
    if len(waits) < ENOUGH_BATCHES:
        return [
            *lines,
            f"  fewer than {ENOUGH_BATCHES + 1} in a row: too few to say what they cost",
        ]
    window, late = window_of(watched, cores), float(np.quantile(waits, 0.99))
    if window.w < LITTLE:
        lines.append(
            f"  the loop waits {window.w:.0%} of the time: nothing is to be gained from a faster "
            "loader"
        )
    else:
        lines.append(
            f"  {FREE} {window.most:.1f} times as fast; a batch comes after "
            f"{duration(waits.mean())} (p99 {duration(late)}), the first one of an epoch after "
            f"{duration(firsts.mean())}"
        )
        lines.append(f"  {advise(window)}")
    whole = window.elapsed + firsts.sum()
    if watched.num_workers and epochs > 1 and firsts.sum() > LITTLE * whole:
        lines.append(
            f"  {firsts.sum() / whole:.0%} of all time went with first batches of epochs"
            + ("" if watched.persistent else ": persistent_workers=True keeps the workers")
        )
    return lines


def tell(loaders: dict[Any, Watched], pid: int) -> None:
    """Print the lines of all kinds of loaders; not in a copy of the process.

    Parameters
    ----------
    loaders : dict
        What `watch` has filled.
    pid : int
        Of the process that was watched.
    """
    if os.getpid() != pid or sys.stderr is None:
        return
    rank = os.environ.get("RANK", "")
    before = f"cseq (rank {rank}):" if rank else "cseq:"
    if not loaders:
        print(before, "no DataLoader of torch was iterated over", file=sys.stderr)  # noqa: T201
    crowd = queued_seconds([pid]) / time.process_time()
    for each in loaders.values():
        for turn in list(each.turns):
            turn.end()
        if not each.num_workers:
            each.queued = crowd * each.computed
    lines = [line for each in loaders.values() for line in told(each, share())]
    if any(FREE in line for line in lines):
        lines.append("cseq's workers in their place: cseq run …")
    for line in lines:
        print(before, line, file=sys.stderr)  # noqa: T201
