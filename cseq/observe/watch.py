"""``python -m cseq watch``: what torch's DataLoaders cost the loops of a script.

Nothing of them is changed: two of their methods are timed, and at the end each kind of loader has
its lines.
"""

from __future__ import annotations

import math
import os
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.compute import cores as available
from cseq.observe.figures import duration
from cseq.observe.processes import queued_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Watched", "judge", "tell", "watch"]

ENOUGH_BATCHES = 8  # for a verdict
LITTLE = 0.05  # part of the time that a loop may wait
SPARE = 1.1  # workers for one that is needed
COMPUTING = 0.5  # part of their time from which workers need a core each
MOST_READERS = 4  # workers for each core, if they wait for something else than a core
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
    computed : float
        CPU seconds of the loop's thread while it waited.
    firsts : array of float
        Seconds from each `iter` to its first batch.
    waits, steps : array of float
        Seconds that the loop waited for each other batch, and what it did between two.
    """

    dataset: str
    samples: int | None
    batch_size: int | None
    num_workers: int
    persistent: bool
    computed: float = 0.0
    firsts: array[float] = field(default_factory=lambda: array("d"))
    waits: array[float] = field(default_factory=lambda: array("d"))
    steps: array[float] = field(default_factory=lambda: array("d"))


class _Turn:
    """Where an iterator is: when the loop got its last batch, or asked for the first."""

    def __init__(self, watched: Watched, begun: float) -> None:
        self.watched, self.begun = watched, begun
        self.given = 0.0


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
        iterator._cseq_turn = _Turn(watched, begun)
        return iterator

    def __next__(iterator: Any) -> Any:  # noqa: N807
        turn: _Turn | None = getattr(iterator, "_cseq_turn", None)
        if turn is None:  # made by a subclass without `__iter__`
            return following(iterator)
        begun, before = clock(), time.thread_time()
        batch = following(iterator)
        now = clock()
        turn.watched.computed += time.thread_time() - before
        if turn.given:
            turn.watched.steps.append(begun - turn.given)
            turn.watched.waits.append(now - begun)
        else:
            turn.watched.firsts.append(now - turn.begun)
        turn.given = now
        return batch

    kind.__iter__ = __iter__
    names.Base.__next__ = __next__


def _size_of(dataset: Any) -> int | None:
    """Return the number of samples; None where the loader's own sampler alone knows it."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def judge(watched: Watched, cores: int, children: float = 0.0, crowd: float = 1.0) -> list[str]:
    """Say what a kind of loader has cost, and what would help.

    Parameters
    ----------
    watched : Watched
    cores : int
    children : float
        CPU seconds of worker processes that have ended.
    crowd : float
        Seconds that one second of computing takes here, where others use the cores as well.

    Returns
    -------
    list of str
        Lines.
    """
    waits, steps, firsts = (np.asarray(each) for each in _seconds(watched))
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
    wait, step, first = waits.mean(), steps.mean(), firsts.mean()
    share = wait / (wait + step)
    late = float(np.quantile(waits, 0.99))
    lines.append(
        f"  the loop waits {share:.0%} of the time: {duration(wait)} a batch "
        f"(p99 {duration(late)}), its own step takes {duration(step)}; "
        f"the first batch of an epoch comes after {duration(first)}"
    )
    if share < LITTLE:
        lines.append("  nothing is to be gained from a faster loader")
    else:
        lines.append(
            f"  {FREE} {_times(1 / (1 - share))}. {_more(watched, cores, children, crowd)}"
        )
    whole = waits.sum() + steps.sum() + firsts.sum()
    if watched.num_workers and epochs > 1 and firsts.sum() > LITTLE * whole:
        lines.append(
            f"  {firsts.sum() / whole:.0%} of all time went with first batches of epochs"
            + ("" if watched.persistent else ": persistent_workers=True keeps the workers")
        )
    return lines


def _seconds(watched: Watched) -> Iterable[array[float]]:
    """Return what all its seconds are summed from."""
    return watched.waits, watched.steps, watched.firsts


def _more(watched: Watched, cores: int, children: float, crowd: float) -> str:
    """Say how many workers would keep up with the loop."""
    wait, step = float(np.mean(watched.waits)), float(np.mean(watched.steps))
    whole = sum(float(np.sum(each)) for each in _seconds(watched))
    now = watched.num_workers
    if now:  # all of them worked all the time
        makes, computes = now * (wait + step), children / (now * whole)
    else:
        makes, computes = wait, watched.computed / (whole - float(np.sum(watched.steps)))
    enough = max(now + 1, math.ceil(SPARE * makes / step) if step > 0 else MOST_READERS * cores)
    if crowd * computes < COMPUTING:  # they wait for a disk, say, and need no core for that
        most = max(MOST_READERS * cores, now + 1)
    elif now < max(cores - 1, 1):
        most = max(cores - 1, 1)
    else:
        return f"{now} workers compute on {cores} cores: see what costs the CPU"
    if enough <= most:
        return f"num_workers={enough}"
    gain = _times((wait + step) / max(step, makes / most))
    return (
        f"num_workers={most}: at most {gain}; {enough} would keep up, but there are {cores} cores"
    )


def _times(gain: float) -> str:
    return f"{gain:.1f} times as fast"


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
    times = os.times()
    if not loaders:
        print(before, "no DataLoader of torch was iterated over", file=sys.stderr)  # noqa: T201
    children = times.children_user + times.children_system
    crowd = 1 + queued_seconds([pid]) / time.process_time()
    lines = [
        line for each in loaders.values() for line in judge(each, available(), children, crowd)
    ]
    if any(FREE in line for line in lines):
        lines.append("cseq's workers in their place: python -m cseq run …")
    for line in lines:
        print(before, line, file=sys.stderr)  # noqa: T201
