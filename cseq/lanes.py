"""The runners of a pool, as a trace shows them, and what has happened to them."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Marks

__all__ = ["Event", "Lanes", "all_lanes", "on_new"]

MOST_EVENTS = 1000  # of a pool, that are remembered

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()
on_new: list[Callable[[Lanes], object]] = []  # called with each, while a trace records


def all_lanes() -> list[Lanes]:
    """List those of all pools that are alive."""
    return list(_alive)


class Event(NamedTuple):
    """Something that has happened to a runner, or to the processes that they are started from.

    Attributes
    ----------
    what : str
        'start', 'death' or 'import'.
    owner : int
        The runner; 0: none.
    since : int
        When it began, if it took its time; else 0.
    held : tuple
        Tickets that are made again: since when (ns), and which.
    """

    ns: int
    what: str
    owner: int = 0
    pid: int = 0
    tid: int = 0
    text: str = ""
    since: int = 0
    held: tuple[tuple[int, str], ...] = ()


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
    marks : dict
        By owner, those of each process that shares memory with this one.
    commit : callable
        Allocates the memory of `marks`.
    """

    def __init__(self, num_workers: int, kind: str) -> None:
        self.number = next(_numbers) & 0xFFFF
        self.num_workers, self.kind = num_workers, kind
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.marks: dict[int, Marks] = {}
        self.commit: Callable[[], object] = lambda: None
        _alive.add(self)

    def announce(self) -> None:
        """Have a trace that records look at these, too; they are complete."""
        for watch in on_new:
            watch(self)

    def end(self) -> None:
        """No trace that begins after this looks at these; one that records has them."""
        _alive.discard(self)

    def note(
        self,
        what: str,
        owner: int = 0,
        *,
        pid: int = 0,
        text: str = "",
        since: int = 0,
        held: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """Remember an event; any thread may."""
        self.events.append(Event(now_ns(), what, owner, pid, 0, text, since, held))

    def note_thread(self, owner: int) -> None:
        """Remember that this thread is a runner from now on."""
        ids = os.getpid(), threading.get_native_id()
        self.events.append(Event(now_ns(), "start", owner, *ids))

    def name(self, owner: int) -> str:
        """Name a runner."""
        if owner > self.num_workers:
            return f"converter {owner - self.num_workers - 1}"
        return f"worker {owner - 1}"
