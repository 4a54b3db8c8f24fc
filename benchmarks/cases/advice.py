"""Loops that wait, each for another reason: what of it is gone if the advice is taken.

Nothing here computes for long, and a core is never what is missing: so a figure says whether the
advice is right, and not how fast the machine is.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cseq
from harness.case import Case, Contender, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from cseq.advice import Advice

BATCHES = scaled(300, 60)
EARLY = 5  # the batch of the first pause: no buffer helps before it


class Sleeps:
    """An indexer that waits for a disk, now and then for long."""

    def __init__(self, seconds: float, every: int = 0, longer: float = 0.0) -> None:
        self.seconds, self.every, self.longer = seconds, every, longer

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        is_long = self.every and indices[0] % self.every == 0
        time.sleep(self.longer if is_long else self.seconds)
        return indices


class Script(NamedTuple):
    """A loop: an indexer, the manager's arguments, what a step takes and how often it pauses."""

    cause: str
    worker: Callable[[], Any]
    arguments: dict[str, Any]
    step: float
    pause: float = 0.0
    every: int = 0

    def run(self, **changed: Any) -> tuple[float, Advice]:
        """Go through it: seconds that a batch was waited for, and the advice."""
        arguments = {"batch_size": 1, "out_type": "null", "shuffle": False} | self.arguments
        manager = cseq.MSequence(self.worker, BATCHES, **arguments | changed)
        with manager.start() as batches:
            for number, _ in enumerate(batches, 1):
                pauses = self.every and number % self.every == EARLY
                time.sleep(self.pause if pauses else self.step)
            stats = manager.stats()
        return stats.loop_waited / stats.batches, stats.advice()


def removed(script: Script) -> Iterator[Callable[[], float]]:
    """Take the advice: percent of the waiting that is gone; 0 if the cause is another one."""

    def once() -> float:
        before, advice = script.run()
        if advice.cause != script.cause or not advice.change:
            return 0.0
        after, _ = script.run(**advice.change)
        return 100 * (1 - after / before)

    yield once


def gained(script: Script) -> Iterator[Callable[[], float]]:
    """Ask for advice where nothing is wrong: how many times as fast it might get."""
    yield lambda: script.run()[1].gain


def both(**arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the arguments for processes, and for threads."""
    for kind, name in (("proc", "processes"), ("thread", "threads")):
        yield name, {"thread_type": kind, **arguments}


DISK, RARE = partial(Sleeps, 0.02), partial(Sleeps, 0.002, 50, 0.2)
BAD = {
    f"{name}, {kind}": script
    for name, scripts in {
        "too few workers": [(k, Script("medium", DISK, a, 0.005)) for k, a in both(num_workers=2)],
        "buffer below the workers": [
            (k, Script("buffer", DISK, a, 0.004)) for k, a in both(num_workers=8, buffer=2)
        ],
        "stragglers": [
            (k, Script("stragglers", RARE, a, 0.006)) for k, a in both(num_workers=8, buffer=10)
        ],
        "pauses of the loop": [
            (k, Script("bursts", DISK, a, 0.006, 0.5, 55)) for k, a in both(num_workers=2)
        ],
    }.items()
    for kind, script in scripts
}
GOOD = {
    f"{name}, {kind}": script
    for name, worker, step in (
        ("a slow loop", DISK, 0.015),
        ("enough workers", DISK, 0.008),
        ("stragglers within the buffer", partial(Sleeps, 0.005, 50, 0.04), 0.01),
    )
    for kind, arguments in both(num_workers=4)
    for script in [Script("loop", worker, arguments, step)]
}

CASES = (
    Case(
        "advice",
        "Loops that wait, before and after the advice is taken",
        "% of the waiting removed",
        tuple(Contender(name, partial(removed, script), ours=True) for name, script in BAD.items()),
        goals=tuple(
            Goal(f"{name}: % removed", lambda f, name=name: f[name], at_least=80) for name in BAD
        ),
        more_is_better=True,
    ),
    Case(
        "advice_good",
        "Loops that do not wait: what the advice promises",
        "times as fast at most",
        tuple(Contender(name, partial(gained, script), ours=True) for name, script in GOOD.items()),
        goals=tuple(
            Goal(f"{name}: gain", lambda f, name=name: f[name], at_most=1.06) for name in GOOD
        ),
    ),
)
