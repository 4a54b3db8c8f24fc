"""A case: contenders that do the same work, and goals for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# If this environment variable is set, the work is just enough to check that everything runs.
TINY = "CSEQ_BENCHMARKS_TINY"
# The suffixes of contenders that run another checkout of cseq, or run in another Python.
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
        The contender's name in the table.
    make : callable
        See `Make`.
    needs : tuple of str
        Required distributions, or modules with dots in their names.
    ours : bool
        Whether it is cseq; every other contender is compared with these contenders.
    checkout : Path, optional
        Another checkout of cseq to run, instead of the installed one.
    python : str
        Another Python to run it in, instead of this one.
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
        """The requirements that are not installed."""
        return [name for name in self.needs if not is_installed(name)]


@dataclass(frozen=True)
class Goal:
    """A figure to reach: a value computed from the medians of the contenders, and its bound."""

    text: str
    value: Callable[[Mapping[str, float]], float]
    at_most: float | None = None
    at_least: float | None = None

    def is_reached(self, value: float) -> bool:
        """Return whether the value is within the bound."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work.

    Attributes
    ----------
    name : str
        The case's name on the command line.
    title : str
        One line that says what is measured.
    unit : str
        The unit of the figures.
    contenders : tuple of Contender
    limit : str
        The name of the contender that shows what the machine can do; empty if there is none.
    goals : tuple of Goal
    more_is_better : bool
        True for rates.
    fresh : bool
        Use a new process for every round, without a warm-up: for one-time events such as a start.
    alone : bool
        The same with a warm-up: for contenders that use CPU time while others are measured.
    rounds : int
        The maximum number of rounds, without a warm-up or a memory measurement: for long cases that
        judge rather than time. 0 means no maximum.
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
    """Return whether a distribution, or a module with dots in its name, exists. Import nothing."""
    # Workers import this file, and at its top, this import would add 10 ms to every loader's start.
    from importlib.metadata import version
    from importlib.util import find_spec

    # PackageNotFoundError is a ModuleNotFoundError.
    with contextlib.suppress(ModuleNotFoundError):
        return bool(find_spec(name) if "." in name else version(name))
    return False


def scaled(full: int, tiny: int) -> int:
    """Return the amount of work: `full`, or `tiny` for a trial run."""
    return tiny if os.environ.get(TINY) else full


class Counter:
    """The number of batches that a contender's process has taken, if it counts them."""

    batches = 0
