"""A pool's runners, as shown in a trace."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import NamedTuple

from cseq._core import now_ns

__all__ = ["Event", "Lanes", "record"]

# The maximum number of events kept per pool.
MOST_EVENTS = 1000

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()
# The pools of the current trace.
_recorded: list[Lanes] | None = None


def record(pools: list[Lanes] | None) -> None:
    """Add all current and future pools to a trace's list until this is called with None."""
    global _recorded
    _recorded = pools
    for pool in () if pools is None else sorted(_alive, key=lambda pool: pool.number):
        pool.join_trace()


class Event(NamedTuple):
    """A runner's start or death, or its exit at the pool's request.

    Attributes
    ----------
    held : tuple
        The tickets that will be remade, each as a pair of a start time (ns) and the ticket's name.
    """

    ns: int
    kind: str
    runner_number: int
    pid: int
    text: str
    held: tuple[tuple[int, str], ...]


class Lanes:
    """One pool's runners. All events are recorded, because a trace may start later.

    Parameters
    ----------
    num_workers : int
        The number of workers. Runners with higher numbers are converters.
    kind : 'process', 'thread' or 'inline'

    Attributes
    ----------
    number : int
        The pool's feed number in ticket records.
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def join_traces(self) -> None:
        """Join the current trace, if any, and all future traces."""
        _alive.add(self)
        self.join_trace()

    def join_trace(self) -> None:
        """Join the current trace, if any."""
        if _recorded is not None and self not in _recorded:
            _recorded.append(self)

    def leave_traces(self) -> None:
        """Do not join future traces."""
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
        """Return a runner's name."""
        if runner_number > self.num_workers:
            return f"converter {runner_number - self.num_workers - 1}"
        return f"worker {runner_number - 1}"
