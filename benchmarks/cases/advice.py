"""Loops that wait for different reasons: whether the advice finds the reason, and what it gains.

If a case measures how much waiting disappears, nothing computes for long, and cores are never
scarce. The figure then shows whether the advice is right, not how fast the machine is. If a case
judges a promise, some loops compute, and some run next to two other busy processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cseq
from harness.case import Case, Contender, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq.measure.advice import Advice
    from cseq.measure.stats import Stats

# The rounds for each contender. A round takes some seconds.
ROUNDS = 2
BATCHES = scaled(300, 25)
# How long a slow constructor takes, in seconds.
START = scaled(25, 1) / 10
# The batch at the first pause. Before it, a larger buffer does not help.
EARLY = 5


class Sleeps:
    """An indexer that waits for a disk, sometimes for a long time."""

    def __init__(self, seconds: float, every: int = 0, longer: float = 0.0) -> None:
        self.seconds, self.every, self.longer = seconds, every, longer

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        is_long = self.every and indices[0] % self.every == 0
        time.sleep(self.longer if is_long else self.seconds)
        return indices


def parse(seconds: float) -> None:
    """Compute in Python, holding the GIL, for a given CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


NUMBERS = np.random.default_rng(0).random(10_000)


def sort(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    """Compute without the GIL for a given CPU time of this thread, or time of another clock."""
    end = clock() + seconds
    while clock() < end:
        np.sort(NUMBERS)


def multiply(seconds: float) -> None:
    """Compute with one torch thread per core for a given wall-clock time."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    square = torch.ones(300, 300)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        square @ square


class Works:
    """An indexer with a slow constructor that does several things per batch."""

    def __init__(self, *parts: tuple[Callable[[float], None], float], start: float = 0.0) -> None:
        time.sleep(start)
        self.parts = parts

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        for do, seconds in self.parts:
            do(seconds)
        return indices


class Script(NamedTuple):
    """A loop: its indexer, manager arguments, step time and pauses."""

    # If the loop computes on a busy machine, several causes may be right.
    cause: str
    worker: Callable[[], Any]
    arguments: dict[str, Any]
    step: float
    pause: float = 0.0
    every: int = 0
    do: Callable[[float], None] = time.sleep
    epochs: int = 1
    samples: int = BATCHES

    def run(self, **changed: Any) -> tuple[float, Advice]:
        """Run the loop. Return the seconds waited per batch, and the advice."""
        stats = self.stats(**changed)
        return stats.loop_waited / stats.batches, stats.advice()

    def stats(self, **changed: Any) -> Stats:
        """Run the loop with changed arguments."""
        arguments = {"batch_size": 1, "out_type": "null", "shuffle": False} | self.arguments
        manager = cseq.MSequence(self.worker, self.samples // self.epochs, **arguments | changed)
        with manager.start() as batches:
            for number, _ in enumerate((b for _ in range(self.epochs) for b in batches), 1):
                pauses = self.every and number % self.every == EARLY
                if self.step:
                    self.do(self.pause if pauses else self.step)
            return manager.stats()


def removed(script: Script) -> Iterator[Callable[[], float]]:
    """Follow the advice. Measure the percentage of waiting removed, or 0 for a wrong cause."""

    def once() -> float:
        before, advice = script.run()
        if advice.cause != script.cause or not advice.change:
            return 0.0
        after, _ = script.run(**advice.change)
        return 100 * (1 - after / before)

    yield once


def named(script: Script) -> Iterator[Callable[[], float]]:
    """Measure whether the advised cause is right: 100 if so, else 0."""

    def once() -> float:
        _, advice = script.run()
        causes = script.cause.split()
        return 100.0 * (advice.cause in causes or ("start" in causes and advice.start != ""))

    yield once


def gained(script: Script) -> Iterator[Callable[[], float]]:
    """Measure the gain that the advice promises if nothing is wrong."""
    yield lambda: script.run()[1].gain


@contextlib.contextmanager
def beside(busy: int) -> Iterator[None]:
    """Keep other processes computing in the meantime."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def followed(advice: Advice) -> dict[str, Any]:
    """Return the arguments that the advice changes, if any."""
    size = re.search(r"batch_size=(\d+)", advice.action)
    change = advice.change | ({"batch_size": int(size[1])} if size else {})
    return change | ({"thread_type": "proc"} if advice.cause == "gil" else {})


def kept(script: Script, busy: int) -> Iterator[Callable[[], float]]:
    """Follow the advice. Measure its gain in percent of the promise, or 100 without a promise.

    Compare two loops of equal length, excluding their starts.
    """

    def once() -> float:
        with beside(busy):
            stats = script.stats()
            advice = stats.advice()
            change = followed(advice)
            if not change:
                return 100.0
            after = script.stats(**change)
        got = stats.elapsed / stats.samples / (after.elapsed / after.samples)
        return 100 * got / advice.gain

    yield once


def both(**arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the arguments for processes, and for threads."""
    for kind, name in (("proc", "processes"), ("thread", "threads")):
        yield name, {"thread_type": kind, **arguments}


DISK, RARE = partial(Sleeps, 0.02), partial(Sleeps, 0.002, 50, 0.2)
BAD = {
    f"{name}, {kind}": script
    for name, scripts in {
        "too few workers": [(k, Script("workers", DISK, a, 0.005)) for k, a in both(num_workers=2)],
        "buffer below the workers": [
            (k, Script("buffer", DISK, a, 0.004)) for k, a in both(num_workers=8, buffer=2)
        ],
        "stragglers": [
            (k, Script("stragglers", RARE, a, 0.006)) for k, a in both(num_workers=8, buffer=10)
        ],
        "pauses of the loop": [
            (k, Script("buffer", DISK, a, 0.006, 0.5, 55)) for k, a in both(num_workers=2)
        ],
    }.items()
    for kind, script in scripts
}
QUICK, PYTHON = partial(Sleeps, 0.0005), partial(Works, (parse, 0.005))
BOTH = partial(Works, (time.sleep, 0.015), (parse, 0.005))
# This takes equally long on a busy machine.
SORTS_ON = partial(sort, clock=time.perf_counter)
SORTS, MULTIPLIES = partial(Works, (sort, 0.01)), partial(Works, (multiply, 0.01))
TWO = {"thread_type": "proc", "num_workers": 2}
MANY = TWO | {"num_workers": 3 * (os.cpu_count() or 1)}
THREADS = {"thread_type": "thread", "num_workers": 2}
OTHERS = {
    f"{name}, {kind}": script
    for name, scripts in {
        "a slow loop": [(k, Script("loop", QUICK, a, 0.005)) for k, a in both(num_workers=2)],
        "a slow start": [
            (k, Script("start", partial(Works, (time.sleep, 0.001), start=START), a, 0.002))
            for k, a in both(num_workers=2)
        ],
        "short epochs": [
            (k, Script("epochs", partial(Sleeps, 0.03), a, 0.006, epochs=25))
            for k, a in both(num_workers=6)
        ],
        "a disk beside a loop that computes": [
            (k, Script("workers", DISK, a, 0.004, do=SORTS_ON)) for k, a in both(num_workers=4)
        ],
        "a disk beside a slow loop of Python": [
            (k, Script("loop", DISK, a, 0.02, do=parse)) for k, a in both(num_workers=4)
        ],
        "a disk, then Python": [
            ("threads", Script("workers cores", BOTH, THREADS, 0.001)),
        ],
        "Python": [("threads", Script("gil", PYTHON, THREADS, 0.001))],
        "Python on both sides": [("threads", Script("gil", PYTHON, THREADS, 0.006, do=parse))],
        "more workers than cores": [("processes", Script("cores", SORTS, MANY, 0.001))],
        "torch's threads": [("processes", Script("cores", MULTIPLIES, TWO, 0.001))],
    }.items()
    for kind, script in scripts
}
TINY = Script("handover", partial(np.zeros, (scaled(200_000, 1_000), 8), "float32"), TWO, 0.0)
TINY = TINY._replace(samples=scaled(200_000, 1_000))
PROMISES = {
    f"{name}, {kind}": script
    for name, worker, step in (
        ("too few workers", DISK, 0.005),
        ("a disk, then Python", BOTH, 0.001),
        ("Python", PYTHON, 0.001),
        ("Python, a longer step", PYTHON, 0.012),
        ("sorting", SORTS, 0.001),
    )
    for kind, arguments in both(num_workers=2)
    for script in [Script("", worker, arguments, step)]
} | {"tiny batches, processes": TINY, "tiny batches, threads": TINY._replace(arguments=THREADS)}
KEPT = {
    f"{name}{', beside 2 busy processes' * (busy > 0)}": (script, busy)
    for busy in (0, 2)
    for name, script in PROMISES.items()
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
        "causes",
        "Other loops that wait: whether the cause is the right one",
        "% of the rounds",
        tuple(
            Contender(name, partial(named, script), ours=True) for name, script in OTHERS.items()
        ),
        rounds=ROUNDS,
        goals=tuple(
            Goal(f"{name}: % right", lambda f, name=name: f[name], at_least=100) for name in OTHERS
        ),
        more_is_better=True,
    ),
    Case(
        "advice",
        "Loops that wait, before and after the advice is taken",
        "% of the waiting removed",
        tuple(Contender(name, partial(removed, script), ours=True) for name, script in BAD.items()),
        rounds=ROUNDS,
        goals=tuple(
            Goal(f"{name}: % removed", lambda f, name=name: f[name], at_least=80) for name in BAD
        ),
        more_is_better=True,
    ),
    Case(
        "advice_kept",
        "Loops before and after the advice is followed: what it gained of what was promised",
        "% of the promised speed-up",
        tuple(Contender(name, partial(kept, *of), ours=True) for name, of in KEPT.items()),
        rounds=ROUNDS,
        goals=tuple(
            Goal(
                f"{name}: times as much, or as little",
                lambda f, name=name: max(f[name] / 100, 100 / max(f[name], 0.01)),
                at_most=2,
            )
            for name in KEPT
        ),
        more_is_better=True,
    ),
    Case(
        "advice_good",
        "Loops that do not wait: what the advice promises",
        "times as fast at most",
        tuple(Contender(name, partial(gained, script), ours=True) for name, script in GOOD.items()),
        rounds=ROUNDS,
        goals=tuple(
            Goal(f"{name}: gain", lambda f, name=name: f[name], at_most=1.06) for name in GOOD
        ),
    ),
)
