"""The cost of a trace per batch in test mode, where one thread runs both sides."""

from __future__ import annotations

import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import cseq
from harness.case import Case, Contender, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCHES = scaled(50_000, 500)
PLAIN, TRACED = "a batch", "what a trace adds to it"


def batches() -> float:
    """Return the CPU time per batch in test mode, in nanoseconds."""
    manager = cseq.MPSequence(
        np.arange(2 * BATCHES), batch_size=2, out_type="null", seed_globals=False
    )
    with manager.start_test() as taken:
        iterator = iter(taken)
        next(iterator)
        begun = time.thread_time_ns()
        for _ in iterator:
            pass
        return (time.thread_time_ns() - begun) / (BATCHES - 1)


def measured(what: Callable[[], float], *, recorded: bool) -> Iterator[Callable[[], float]]:
    """Measure with or without a trace."""
    with tempfile.TemporaryDirectory() as folder:

        def once() -> float:
            path = Path(folder, "run.json")
            with cseq.trace(path) if recorded else contextlib.nullcontext():
                return what()

        yield once


def added() -> Iterator[Callable[[], float]]:
    """Measure the cost of a trace: batches without and with one, in a single process."""
    traced = measured(batches, recorded=True)
    once = next(traced)
    yield lambda: once() - batches()
    next(traced, None)


def contender(name: str, what: Callable[[], float], *, recorded: bool) -> Contender:
    """Declare a contender."""
    return Contender(name, partial(measured, what, recorded=recorded), ours=True)


CASES = (
    Case(
        "tracing",
        "What a trace costs while it records",
        "ns of processor time",
        (
            contender(PLAIN, batches, recorded=False),
            Contender(TRACED, added, ours=True),
        ),
        goals=(Goal("more for a batch, both sides", lambda f: f[TRACED], at_most=120),),
    ),
)
