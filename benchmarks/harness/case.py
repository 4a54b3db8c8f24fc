"""What a case is: contenders that do the same work, and the goals among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# If this environment variable is set, the work is just enough to see that all runs.
TINY = "CSEQ_BENCHMARKS_TINY"
# These end the name of a contender that runs another checkout of cseq, or in another Python.
BEFORE = " (before)"
OTHER = " (other Python)"

# A generator function. It yields a function that runs one round and returns its figure. The code
# before the yield runs once, unmeasured; the code after it cleans up.
Make = Callable[[], Iterator[Callable[[], float]]]


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes
    ----------
    name : str
        How the table calls it.
    make : callable
        See `Make`.
    needs : tuple of str
        Distributions, or modules with dots in their names, without which it is left out.
    ours : bool
        Whether it is cseq: every other contender is compared with those that are.
    checkout : Path, optional
        Another checkout of cseq, to run instead of the installed one.
    python : str
        Another Python, to run it in instead of this one.
    """

    name: str
    make: Make
    needs: tuple[str, ...] = ()
    ours: bool = False
    checkout: Path | None = None
    python: str = ""

    def before(self, checkout: Path) -> Contender:
        """Return the same contender with another checkout of cseq, to be compared with this one."""
        return replace(self, name=self.name + BEFORE, ours=False, checkout=checkout)

    def elsewhere(self, python: str) -> Contender:
        """Return the same contender in another Python."""
        return replace(self, name=self.name + OTHER, ours=False, python=python)

    @property
    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [name for name in self.needs if not is_installed(name)]


@dataclass(frozen=True)
class Goal:
    """A figure to reach: a value computed from the medians of the contenders, and its bound."""

    text: str
    value: Callable[[Mapping[str, float]], float]
    at_most: float | None = None
    at_least: float | None = None

    def is_reached(self, value: float) -> bool:
        """Whether the value is inside the bound."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work.

    Attributes
    ----------
    name : str
        For the command line.
    title : str
        A line that says what is measured.
    unit : str
        Of the figures.
    contenders : tuple of Contender
    limit : str
        The name of the contender that shows what the machine can do; empty if there is none.
    goals : tuple of Goal
    more_is_better : bool
        For rates.
    fresh : bool
        A new process for every round, without a warm-up: for what can be measured but once.
    alone : bool
        The same, with a warm-up: for contenders that take CPU time while others are measured.
    rounds : int
        So many at most, without a warm-up and a look at the memory: for what takes long and is a
        judgement rather than a time. 0: as many as are asked for.
    """

    name: str
    title: str
    unit: str
    contenders: tuple[Contender, ...]
    limit: str = ""
    goals: tuple[Goal, ...] = ()
    more_is_better: bool = False
    fresh: bool = False
    alone: bool = False
    rounds: int = 0

    def contender(self, name: str) -> Contender:
        """Find a contender by its name, with or without `BEFORE` or `OTHER`."""
        declared = name.removesuffix(BEFORE).removesuffix(OTHER)
        return next(contender for contender in self.contenders if contender.name == declared)


def is_installed(name: str) -> bool:
    """Whether a distribution, or a module with dots in its name, exists, without an import."""
    # Here, as workers import this file: it would be 10 ms of every loader's start.
    from importlib.metadata import version
    from importlib.util import find_spec

    # PackageNotFoundError is a ModuleNotFoundError.
    with contextlib.suppress(ModuleNotFoundError):
        return bool(find_spec(name) if "." in name else version(name))
    return False


def scaled(full: int, tiny: int) -> int:
    """Return the amount of work: `full`, or `tiny` where only a trial run is wanted."""
    return tiny if os.environ.get(TINY) else full


class Counter:
    """How many batches the process of a contender has taken, if it counts them."""

    batches = 0
