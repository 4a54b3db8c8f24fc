"""The runners of a pool, as a trace shows them; the file of marks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns
from cseq.memory.descriptors import appended_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring

__all__ = ["Event", "Lanes", "MarksFile", "alive", "forget", "marks_file", "on_new"]

MOST_EVENTS = 1000  # of a pool, that are remembered

_numbers = itertools.count(1)
alive: weakref.WeakSet[Lanes] = weakref.WeakSet()  # of all pools
on_new: list[Callable[[Lanes], object]] = []  # called with each, while a trace records
_guard = threading.Lock()  # around the next one
_file: weakref.ref[MarksFile] | None = None


class _Opened:
    """Closes the file of a `MarksFile`, once no weak reference returns that any more."""

    def __init__(self) -> None:
        self.file, self.fd = appended_file("cseq-marks")

    def __del__(self) -> None:
        self.file.close()


class MarksFile:
    """A file that this process and its workers append marks to; see `appended_file`.

    It has no `__del__`: while one runs, and gives the GIL away, weak references still return the
    object, so `marks_file` would hand out a file that is closed already.
    """

    def __init__(self) -> None:
        self.opened = _Opened()
        self.file, self.fd = self.opened.file, self.opened.fd

    def take(self) -> bytes:
        """Read all of it, and empty it."""
        self.file.seek(0)
        found = self.file.read()
        self.file.seek(0)
        self.file.truncate()
        return found


def marks_file() -> MarksFile:
    """Return that file: there is one, for as long as a worker process or a trace has it."""
    global _file
    with _guard:
        found = (None if _file is None else _file()) or MarksFile()
        _file = weakref.ref(found)
        return found


def forget() -> None:
    """Have a file of its own: this process is a copy of the one that had that file."""
    global _file, _guard
    _file, _guard = None, threading.Lock()
    on_new.clear()


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
    tid: int
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
        alive.add(self)
        for watch in on_new:
            watch(self)

    def end(self) -> None:
        """No trace that begins after this looks at these; one that records has them."""
        alive.discard(self)
        self.rings = []

    def note(
        self,
        what: str,
        owner: int,
        pid: int,
        tid: int = 0,
        *,
        text: str = "",
        held: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """Remember an event; any thread may. The main thread of a process has its number."""
        self.events.append(Event(now_ns(), what, owner, pid, tid or pid, text, held))

    def name(self, owner: int) -> str:
        """Name a runner."""
        if owner > self.num_workers:
            return f"converter {owner - self.num_workers - 1}"
        return f"worker {owner - 1}"
