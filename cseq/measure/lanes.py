"""The runners of a pool, as a trace shows them; the file of marks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cseq import _core
from cseq.memory.descriptors import appended_file

if TYPE_CHECKING:
    from cseq._core import Ring

__all__ = ["Event", "Lanes", "MarksFile", "forget", "marks_file", "record"]

MOST_EVENTS = 1000  # of a pool, that are remembered

_numbers = itertools.count(1)
_alive: weakref.WeakSet[Lanes] = weakref.WeakSet()  # of all pools
_present: tuple[int, list[Lanes]] = 0, []  # the number of the trace that records, and its pools
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


def record(number: int) -> list[Lanes]:
    """Have this process and all workers record for the trace of this number; 0: for none.

    Returns the pools of the trace, to which those are added that begin later.
    """
    global _present
    _present = number, []
    _core.trace_here(number)
    for each in sorted(_alive, key=lambda pool: pool.number):
        each.tell()
    return _present[1]


def forget() -> None:
    """Have a file of its own, and no trace: this process is a copy of the one that had those."""
    global _file, _guard, _present
    _file, _guard, _present = None, threading.Lock(), (0, [])


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
        _alive.add(self)
        self.tell()

    def tell(self) -> None:
        """Have the workers record for the trace that records, if one does."""
        number, pools = _present
        if number and self not in pools:
            pools.append(self)
        for ring in self.rings:
            _core.trace_workers(ring, number)

    def end(self) -> None:
        """No trace that begins after this looks at these."""
        _alive.discard(self)
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
        self.events.append(Event(_core.now_ns(), what, owner, pid, tid or pid, text, held))

    def name(self, owner: int) -> str:
        """Name a runner."""
        if owner > self.num_workers:
            return f"converter {owner - self.num_workers - 1}"
        return f"worker {owner - 1}"
