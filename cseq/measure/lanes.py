"""The runners of a pool in a trace."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import NamedTuple

from cseq._core import now_ns

__all__ = ["Event", "Lanes", "record"]

# Maximum number of events to keep per pool.
MOST_EVENTS = 1000

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()
# The pools in the current trace.
_recorded: list[Lanes] | None = None


def record(pools: list[Lanes] | None) -> None:
    """Collect all current and future pools in a list, until called with None."""
    global _recorded
    _recorded = pools
    for pool in () if pools is None else sorted(_alive, key=lambda pool: pool.number):
        pool.join_trace()


class Event(NamedTuple):
    """A runner's start, death or planned exit.

    Attributes
    ----------
    held : tuple
        The start time (ns) and the name of each ticket that must be made again.
    """

    ns: int
    kind: str
    runner_number: int
    pid: int
    text: str
    held: tuple[tuple[int, str], ...]


class Lanes:
    """A pool's runners and their events, which are kept for later traces.

    Parameters
    ----------
    num_workers : int
        The number of workers. Runners with higher numbers are converters.
    kind : 'process', 'thread' or 'inline'

    Attributes
    ----------
    number : int
        The pool's number in ticket records.
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def join_traces(self) -> None:
        """Join the current trace, if any, and all later ones."""
        _alive.add(self)
        self.join_trace()

    def join_trace(self) -> None:
        """Join the current trace, if any."""
        if _recorded is not None and self not in _recorded:
            _recorded.append(self)

    def leave_traces(self) -> None:
        """Do not join later traces."""
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
        """Record an event. Thread-safe."""
        self.events.append(Event(now_ns(), kind, runner_number, pid, text, held))

    def name(self, runner_number: int) -> str:
        """Return the name of a runner."""
        if runner_number > self.num_workers:
            return f"converter {runner_number - self.num_workers - 1}"
        return f"worker {runner_number - 1}"
