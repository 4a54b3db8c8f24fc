"""The runners of a pool, as a trace shows them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cseq import _core

if TYPE_CHECKING:
    from cseq._core import Ring

__all__ = ["Event", "Lanes", "forget", "record"]

MOST_EVENTS = 1000  # of a pool, that are remembered

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()  # of all pools
_present: tuple[int, list[Lanes]] = 0, []  # the number of the trace that records, and its pools


def record(number: int) -> list[Lanes]:
    """Have the trace of this number record all pools; 0: none does.

    Returns the pools of the trace, to which those are added that begin later.
    """
    global _present
    _present = number, []
    for each in sorted(_alive, key=lambda pool: pool.number):
        each.tell()
    return _present[1]


def forget() -> None:
    """Have no trace: this process is a copy of the one that had it."""
    global _present
    _present = 0, []


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
    rings : list of Ring
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.rings: list[Ring] = []

    def begin(self, rings: list[Ring]) -> None:
        """Have traces look at these, which are complete; also one that records."""
        self.rings = rings
        _alive.add(self)
        self.tell()

    def tell(self) -> None:
        """Be one of the pools of the trace that records, if one does."""
        number, pools = _present
        if number and self not in pools:
            pools.append(self)

    def end(self) -> None:
        """No trace that begins after this looks at these."""
        _alive.discard(self)
        self.rings = []

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
        self.events.append(Event(_core.now_ns(), what, owner, pid, text, held))

    def name(self, owner: int) -> str:
        """Name a runner."""
        if owner > self.num_workers:
            return f"converter {owner - self.num_workers - 1}"
        return f"worker {owner - 1}"
