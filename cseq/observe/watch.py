"""``cseq run --watch``: measures the cost of torch DataLoaders in a script.

Three methods of the DataLoaders are timed. The cost of each kind of loader is printed at the end::

    __iter__ ──► Turn: an epoch, its workers ──► Watched: a kind of loader ──► Window ──► advise
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cseq.measure.advice import LITTLE, Window, advise, duration
from cseq.observe.processes import cpu_seconds, queued_seconds
from cseq.system import share

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Watched", "tell", "watch"]

# The start of the line about the possible gain.
FREE = "if data were free:"


@dataclass
class Watched:
    """The cost of a kind of loader.

    Attributes
    ----------
    name : str
        The class and size of the data set, and the arguments of the loader.
    num_workers : int
        The number of workers.
    persistent : bool
        Whether workers are kept between epochs.
    computed : float
        CPU seconds that the workers (or the loop's thread, if there are none) used after the first
        batch of each epoch.
    queued : float
        Seconds that the workers waited for a core during this time.
    epochs, batches : int
        The number of epochs, and the number of batches, excluding the first of each epoch.
    started : float
        Seconds from `iter` to the first batch, summed over all epochs.
    waited, stepped : float
        Seconds that the loop waited for later batches, and seconds that it worked between batches.
    turns : list of Turn
        The epochs in progress.
    """

    name: str
    num_workers: int
    persistent: bool = False
    computed: float = 0.0
    queued: float = 0.0
    epochs: int = 0
    batches: int = 0
    started: float = 0.0
    waited: float = 0.0
    stepped: float = 0.0
    turns: list[Turn] = field(default_factory=list)

    def window(self, cores: int) -> Window:
        """Return the figures for `advise`. Workers are assumed to be always busy."""
        count, workers, elapsed = self.batches, self.num_workers, self.waited + self.stepped
        worked = elapsed * workers if workers else self.waited
        if not worked:
            return Window(workers=workers, cores=cores)
        is_known = not workers or sys.platform.startswith("linux")
        return Window(
            batches=count, elapsed=elapsed, waited=self.waited, step=self.stepped / count,
            index=worked / count if self.waited >= LITTLE * elapsed else 0.0, workers=workers,
            busy=float(workers > 0), cpu=self.computed / worked if is_known else None,
            queued=min(self.queued / worked, 1.0), cores=cores,
        )  # fmt: skip

    def lines(self, cores: int) -> list[str]:
        """Describe the cost of these loaders, and what would help."""
        window = self.window(cores)
        advice = advise(window)
        count, of = self.batches + self.epochs, f" in {self.epochs} epochs" * (self.epochs > 1)
        lines = [f"{self.name}: {count} batch{'es' * (count > 1)}{of}"]
        if advice.cause == "unknown":
            return [*lines, f"  {advice}"]
        if window.w >= LITTLE:
            lines.append(
                f"  {FREE} {window.most:.1f} times as fast; a batch arrives after "
                f"{duration(self.waited / self.batches)}, the first batch of an epoch after "
                f"{duration(self.started / self.epochs)}"
            )
        lines.append(f"  {advice}")
        starts = self.started / (window.elapsed + self.started)
        if self.num_workers and self.epochs > 1 and starts > LITTLE:
            kept = "" if self.persistent else "; persistent_workers=True keeps the workers running"
            lines.append(f"  {starts:.0%} of the time went to the first batches of epochs{kept}")
        return lines


class Turn:
    """An epoch in progress. `begun` is the time of the call to `iter`."""

    def __init__(self, watched: Watched, begun: float) -> None:
        self.watched, self.begun = watched, begun
        self.given = 0.0
        self._pids: Sequence[int] = ()

    def begin_epoch(self, pids: Sequence[int]) -> None:
        """Record the process ids of the workers, and their CPU time so far."""
        self._pids = pids
        self._computed, self._queued = cpu_seconds(pids), queued_seconds(pids)
        self.watched.turns.append(self)

    def end_epoch(self) -> None:
        """Add the workers' CPU time and waits for a core to the totals, before the workers exit."""
        if self in self.watched.turns:
            self.watched.turns.remove(self)
            self.watched.computed += max(cpu_seconds(self._pids) - self._computed, 0.0)
            self.watched.queued += max(queued_seconds(self._pids) - self._queued, 0.0)


def watch(loaders: dict[Any, Watched]) -> None:
    """Time all torch DataLoaders in this process. Collect the figures in `loaders`."""
    from torch.utils.data import DataLoader, IterableDataset

    from cseq.adapters.torch import names

    patched: Any = DataLoader
    patched_base: Any = names.Base
    patched_workers: Any = names.Workers
    iterate, following = DataLoader.__iter__, names.Base.__next__
    shut = names.Workers._shutdown_workers
    clock = time.perf_counter

    def __iter__(loader: DataLoader[Any]) -> names.Base:  # noqa: N807
        begun = clock()
        iterator = iterate(loader)
        # Other iterators, such as cseq's, are not timed.
        if type(iterator).__next__ is not names.Base.__next__:
            return iterator
        size = "" if isinstance(loader.dataset, IterableDataset) else _size_of(loader.dataset)
        name = f"DataLoader of {type(loader.dataset).__name__}{size}"
        name += f", batch_size={loader.batch_size}, num_workers={loader.num_workers}"
        watched = Watched(name, loader.num_workers, loader.persistent_workers)
        watched = loaders.setdefault((name, watched.persistent), watched)
        # Persistent workers use the same iterator for the next epoch.
        end(iterator)
        vars(iterator)["_cseq_turn"] = Turn(watched, begun)
        return iterator

    def __next__(iterator: names.Base) -> object:  # noqa: N807
        turn: Turn | None = getattr(iterator, "_cseq_turn", None)
        # A subclass may override `__iter__` without calling the original.
        if turn is None:
            return following(iterator)
        begun, before = clock(), time.thread_time()
        try:
            batch: object = following(iterator)
        except StopIteration:
            turn.end_epoch()
            raise
        now = clock()
        if turn.given:
            turn.watched.batches += 1
            turn.watched.stepped += begun - turn.given
            turn.watched.waited += now - begun
            if not turn.watched.num_workers:
                turn.watched.computed += time.thread_time() - before
        else:
            turn.watched.epochs += 1
            turn.watched.started += now - turn.begun
            turn.begin_epoch([worker.pid for worker in getattr(iterator, "_workers", ())])
            now = clock()
        turn.given = now
        return batch

    def end(iterator: object) -> None:
        turn: Turn | None = getattr(iterator, "_cseq_turn", None)
        if turn is not None:
            turn.end_epoch()

    def _shutdown_workers(iterator: names.Workers) -> None:
        end(iterator)
        shut(iterator)

    patched.__iter__ = __iter__
    patched_base.__next__ = __next__
    patched_workers._shutdown_workers = _shutdown_workers


def _size_of(dataset: Any) -> str:
    try:
        return f", {len(dataset):,} samples"
    except (TypeError, NotImplementedError):
        return ""


def tell(loaders: dict[Any, Watched], pid: int) -> None:
    """Print the cost of all loaders, except in a forked process."""
    if os.getpid() != pid or sys.stderr is None:
        return
    rank = os.environ.get("RANK", "")
    before = f"cseq (rank {rank}):" if rank else "cseq:"
    if not loaders:
        print(before, "no torch DataLoader was iterated over", file=sys.stderr)  # noqa: T201
    for watched in loaders.values():
        for turn in list(watched.turns):
            turn.end_epoch()
    lines = [line for watched in loaders.values() for line in watched.lines(share())]
    if any(FREE in line for line in lines):
        lines.append("to use cseq's workers instead: cseq run …")
    for line in lines:
        print(before, line, file=sys.stderr)  # noqa: T201
