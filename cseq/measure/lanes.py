"""The runners of a pool, as a trace shows them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import NamedTuple

from cseq._core import now_ns

__all__ = ["Event", "Lanes", "record"]

# The events of a pool that are remembered.
MOST_EVENTS = 1000

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()
# The pools of the present trace.
_recorded: list[Lanes] | None = None


def record(pools: list[Lanes] | None) -> None:
    """Append all pools, and those that begin later, to a trace's list, until called with None."""
    global _recorded
    _recorded = pools
    for pool in () if pools is None else sorted(_alive, key=lambda pool: pool.number):
        pool.join_trace()


class Event(NamedTuple):
    """A runner's start, death, or end at the pool's request.

    Attributes
    ----------
    held : tuple
        The tickets that are made again: when the runner began each (ns), and its name.
    """

    ns: int
    kind: str
    runner_number: int
    pid: int
    text: str
    held: tuple[tuple[int, str], ...]


class Lanes:
    """The runners of one pool. Events are always remembered, since a trace may begin later.

    Parameters
    ----------
    num_workers : int
        The runners after these are converters.
    kind : 'process', 'thread' or 'inline'

    Attributes
    ----------
    number : int
        The feed in records of tickets.
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def join_traces(self) -> None:
        """Join the present trace, if any, and the traces that begin later."""
        _alive.add(self)
        self.join_trace()

    def join_trace(self) -> None:
        """Join the present trace, if any."""
        if _recorded is not None and self not in _recorded:
            _recorded.append(self)

    def leave_traces(self) -> None:
        """Join no trace that begins later."""
        _alive.discard(self)

    def note(
        self,
        kind: str,
        runner_number: int,
        pid: int,
        *,
        text: str = "",
        held: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """Remember an event. Thread-safe."""
        self.events.append(Event(now_ns(), kind, runner_number, pid, text, held))

    def name(self, runner_number: int) -> str:
        """Name a runner by its number."""
        if runner_number > self.num_workers:
            return f"converter {runner_number - self.num_workers - 1}"
        return f"worker {runner_number - 1}"
