"""Batches that take a few microseconds: the cost of waiting for each other, asleep or awake."""

from __future__ import annotations

import resource
from functools import partial
from typing import TYPE_CHECKING, Any

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Brief, Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATCHES = scaled(3000, 40)

ONE, TWO = "cseq, 1 worker", "cseq, 2 workers"
PIPE, SPDL, LIMIT = "pipe, 1 process", "SPDL subprocess, 1 worker", "bare loop"


def usage_of(work: Work, loader: Iterable[Any], of: Callable[[Any], float]) -> float:
    """Run the epochs. Return the trainer's usage per batch, measured by `of`."""
    before = of(resource.getrusage(resource.RUSAGE_SELF))
    microseconds(work, loader)
    return (of(resource.getrusage(resource.RUSAGE_SELF)) - before) / work.batches


def processor(work: Work, loader: Iterable[Any]) -> float:
    """Return the trainer's CPU time per batch in microseconds."""
    return usage_of(work, loader, lambda used: (used.ru_utime + used.ru_stime) * 1e6)


def sleeps(work: Work, loader: Iterable[Any]) -> float:
    """Return the percentage of batches for which the trainer slept."""
    return 100 * usage_of(work, loader, lambda used: used.ru_nvcsw)


def case(us: int, name: str, unit: str, figure: Any, goals: tuple[Goal, ...] = ()) -> Case:
    """Declare the case for batches of `us` microseconds."""
    work = Work(partial(Brief, us), BATCHES, figure)
    contenders = (
        Contender(ONE, partial(loaders.cseq_processes, work, num_workers=1), ours=True),
        Contender(TWO, partial(loaders.cseq_processes, work), ours=True),
        Contender(PIPE, partial(loaders.pipe, work)),
        Contender(SPDL, partial(loaders.spdl_process, work), needs=("spdl-core",)),
        Contender(LIMIT, partial(loaders.bare, work)),
    )
    title = f"Batches of {us} µs of work: {unit}"
    return Case(f"brief_{us}{name}", title, unit, contenders, limit=LIMIT, goals=goals)


def beyond(f: Any, name: str) -> float:
    """Return a contender's time in excess of the work."""
    return f[name] - f[LIMIT]


GOALS = (
    Goal("1 worker: part of the pipe's time", lambda f: f[ONE] / f[PIPE], at_most=1),
    Goal(
        "1 worker: part of what the pipe takes beyond the work",
        lambda f: beyond(f, ONE) / beyond(f, PIPE),
        at_most=0.5,
    ),
)

CASES = tuple(
    one
    for us in (0, 10, 40, 160)
    for one in (
        case(us, "", "µs/batch", microseconds, GOALS),
        case(us, "_cpu", "µs of the trainer's processor/batch", processor),
        case(us, "_sleeps", "% of batches slept for", sleeps),
    )
)
