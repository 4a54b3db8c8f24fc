"""The runners of a pool, as a trace shows them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import NamedTuple

from cseq._core import now_ns

__all__ = ["Event", "Lanes", "record"]

MOST_EVENTS = 1000  # of a pool, that are remembered

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()  # of all pools
_recorded: list[Lanes] | None = None  # the pools of the trace that records


def record(pools: list[Lanes] | None) -> None:
    """Append to a trace's list all pools, and those that begin later; None ends that."""
    global _recorded
    _recorded = pools
    for pool in () if pools is None else sorted(_alive, key=lambda pool: pool.number):
        pool.join_trace()


class Event(NamedTuple):
    """A runner's start, death or (if it was to leave) end.

    Attributes
    ----------
    held : tuple
        Tickets that are made again: since when (ns), and which.
    """

    ns: int
    what: str
    owner: int
    pid: int
    text: str
    held: tuple[tuple[int, str], ...]


class Lanes:
    """The runners of one pool. Events are remembered always: a trace may begin later.

    Parameters
    ----------
    num_workers : int
        The runners after these are converters.
    kind : 'process', 'thread' or 'inline'

    Attributes
    ----------
    number : int
        What records of tickets have as their feed.
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def join_traces(self) -> None:
        """Be in the traces that record from now on, and in one that records already."""
        _alive.add(self)
        self.join_trace()

    def join_trace(self) -> None:
        """Be one of the pools of the trace that records, if one does."""
        if _recorded is not None and self not in _recorded:
            _recorded.append(self)

    def leave_traces(self) -> None:
        """Be in no trace that begins after this."""
        _alive.discard(self)

    def note(
        self,
        what: str,
        owner: int,
        pid: int,
        *,
        text: str = "",
        held: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """Remember an event; any thread may."""
        self.events.append(Event(now_ns(), what, owner, pid, text, held))

    def name(self, owner: int) -> str:
        """Name a runner."""
        if owner > self.num_workers:
            return f"converter {owner - self.num_workers - 1}"
        return f"worker {owner - 1}"
