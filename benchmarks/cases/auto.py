"""``num_workers='auto'`` and ``buffer='auto'`` compared with the best fixed numbers.

A sleep in the indexer simulates a slow disk, and a sleep in the loop simulates a step on a GPU.
Only one kind of work computes and needs cores; its figures mean little on a busy machine.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cseq
from harness import usage
from harness.case import Case, Contender, Goal, scaled
from work import Floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The seconds in which 'auto' must settle.
SETTLE = scaled(50, 2) / 10
WARM, MEASURED = scaled(5, 1) / 10, scaled(20, 1) / 10
# Among settings that reach this fraction of the best rate, the one that computes least wins.
SAME = 0.97
# The rounds for each contender. A round takes about 10 s.
ROUNDS = 2
# The seconds after settling in which nothing should change.
STILL = scaled(50, 1) / 10
AUTO: dict[str, Any] = {"num_workers": "auto", "buffer": "auto"}
# Settings that a user may have chosen.
FIXED = tuple(
    {"num_workers": workers, "buffer": buffer}
    for workers, buffer in ((1, 10), (2, 10), (4, 10), (8, 16), (4, 64), (8, 64))
)[: scaled(6, 1)]


class Reads:
    """An indexer that waits for a disk, sometimes for a long time."""

    def __init__(self, seconds: float, longer: float = 0.0) -> None:
        self.seconds, self.longer = seconds, longer

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        is_long = self.longer and indices[0] % 20 == 0
        time.sleep(self.longer if is_long else self.seconds)
        return indices


class Computes:
    """An indexer that keeps a core busy."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return indices


class Kind(NamedTuple):
    """A kind of work: an indexer and the loop's step time."""

    worker: Callable[[], Any]
    step: float


KINDS = {
    "cheap": Kind(partial(Floats, 32_000), 0.0005),
    "computing": Kind(partial(Computes, 0.01), 0.004),
    "disk": Kind(partial(Reads, 0.02), 0.004),
    "stragglers": Kind(partial(Reads, 0.005, 0.1), 0.004),
}


class Run(NamedTuple):
    """The result of a loop: batches per second, CPU seconds per batch, logged changes."""

    rate: float
    cpu: float
    changes: int


class Changes(logging.Handler):
    """Counts the log lines about changes."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith(("num_workers", "buffer"))


def run(kind: Kind, warm: float, measured: float, sizes: dict[str, Any]) -> Run:
    """Run a loop for some seconds to warm up, then measure it for some more."""
    options = {"batch_size": 1, "shuffle": False, "out_type": "null"} | sizes
    manager = cseq.MPSequence(kind.worker, np.arange(32_000), **options, repeat=True)
    log, handler = logging.getLogger("cseq"), Changes()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with manager.start() as batches:
            taken = iter(batches)
            next(taken)
            go(taken, kind.step, warm)
            before, changes = usage.cpu_seconds(os.getpid()), handler.count
            began = time.perf_counter()
            count = go(taken, kind.step, measured)
            took = time.perf_counter() - began
            cpu = usage.cpu_seconds(os.getpid()) - before
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return Run(count / took, cpu / count, handler.count - changes)


def go(batches: Iterator[Any], step: float, seconds: float) -> int:
    """Take batches for some seconds, and return their number."""
    end = time.perf_counter() + seconds
    for number in itertools.count(1):
        next(batches)
        time.sleep(step)
        if time.perf_counter() > end:
            return number
    raise AssertionError("unreachable")


def beside_the_best(kind: Kind, figure: str) -> Iterator[Callable[[], float]]:
    """Measure 'auto' after some seconds, in percent of the best fixed numbers."""
    runs = [(run(kind, WARM, MEASURED, sizes), sizes) for sizes in FIXED]
    enough = SAME * max(one.rate for one, _ in runs)
    _, best = min(((one.cpu, k) for k, (one, _) in enumerate(runs) if one.rate >= enough))

    def once() -> float:
        fixed = run(kind, WARM, MEASURED, FIXED[best])
        auto = run(kind, SETTLE, MEASURED, AUTO)
        return 100 * float(getattr(auto, figure)) / float(getattr(fixed, figure))

    yield once


def changes(kind: Kind) -> Iterator[Callable[[], float]]:
    """Count the changes after 'auto' has had time to settle."""
    yield lambda: run(kind, SETTLE, STILL, AUTO).changes


def contenders(make: Callable[..., Iterator[Callable[[], float]]], *more: str) -> Any:
    """Return one contender for each kind of work."""
    return tuple(Contender(n, partial(make, kind, *more), ours=True) for n, kind in KINDS.items())


def goals(text: str, **bound: float) -> tuple[Goal, ...]:
    """Return the same goal for each kind of work."""
    return tuple(Goal(f"{name}: {text}", lambda f, n=name: f[n], **bound) for name in KINDS)


CASES = (
    Case(
        "auto_rate",
        "num_workers='auto', buffer='auto' after 5 s, beside the best numbers given",
        "% of its rate",
        contenders(beside_the_best, "rate"),
        rounds=ROUNDS,
        goals=goals("% of the rate", at_least=90),
        more_is_better=True,
    ),
    Case(
        "auto_cpu",
        "The same: CPU time of all processes for a batch",
        "% of its CPU time",
        contenders(beside_the_best, "cpu"),
        rounds=ROUNDS,
        goals=goals("% of the CPU time", at_most=105),
    ),
    Case(
        "auto_still",
        "Changes of the numbers from 5 s to 10 s",
        "changes",
        contenders(changes),
        rounds=ROUNDS,
        goals=goals("changes", at_most=0),
    ),
)
