"""A trace of every batch: recorded while it runs, written as JSON for Perfetto."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import logging
import os
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import _core
from cseq._core import now_ns
from cseq._memory import Block
from cseq.check import count
from cseq.lanes import all_lanes, on_new
from cseq.order import shard
from cseq.processes.launcher.forks import in_forked_children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from cseq.lanes import Event, Lanes

__all__ = ["Trace", "full", "record_as_told", "trace", "whole"]

log = logging.getLogger("cseq")

TICKETS = 100_000
MOST_TICKETS = 1 << 24
QUARTER = (
    7_889_238 * 10**9
)  # ns: what `baseTimeNanoseconds` is a multiple of, as torch's profiler has it
MADE_UP = 1 << 30  # thread ids of lanes that are no thread's
SUPERVISOR, AGENTS = MADE_UP - 1, MADE_UP - 1000

Record = Any  # a row of `_core.TAKEN`


class Lane(NamedTuple):
    """A row of the timeline."""

    pid: int
    tid: int


_guard = threading.Lock()  # around beginnings and ends of traces
_present: Trace | None = None


def trace(path: str | os.PathLike[str], *, tickets: int = TICKETS) -> Trace:
    """Record what happens to every batch inside a ``with``, and write it when that ends.

    Every manager, loader and stream of this process is recorded, also one that has been started
    before. Open the file at https://ui.perfetto.dev, or in chrome://tracing.

    Parameters
    ----------
    path : str or path
        Ends in ``.json`` or ``.json.gz``. ``%p`` in it becomes the process id, ``%r`` the rank (0
        where there is one process).
    tickets : int
        How many batches are kept, the newest ones; 64 bytes of memory for each. What was dropped is
        written into the file, and logged.

    Returns
    -------
    context manager

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    FileNotFoundError, NotADirectoryError
        There is no folder of that name. Raised by the ``with``, as is:
    RuntimeError
        Another trace records in this process.

    See Also
    --------
    span, count : What indexers do, and the loop, in the same trace.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
    >>> with cseq.trace("run.json"), manager.start() as batches:
    ...     for batch in batches:
    ...         with cseq.span("train"):
    ...             pass
    """
    return Trace(path, tickets)


class Trace:
    """What `trace` returns: a context manager, which records inside the ``with``."""

    def __init__(
        self, path: str | os.PathLike[str], tickets: int = TICKETS, rank: int | None = None
    ) -> None:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(name, str):
            raise TypeError(f"path={path!r} is not a str; give one that ends in .json or .json.gz")
        if not re.search(r"\.json(\.gz)?$", name):
            raise ValueError(f"path={name!r} ends in neither .json nor .json.gz; give such a name")
        self.path = name
        self._rank = rank
        self._tickets = count("tickets", tickets, most=MOST_TICKETS)
        self._lanes: list[Lanes] = []
        self._firsts: dict[tuple[int, int], int] = {}
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Record from now on; see `trace` for what is raised."""
        global _present
        path = full(self.path, self._rank)
        os.stat(os.path.join(os.path.dirname(path), ""))  # raises where there is no such folder
        with _guard:
            if _present is not None:
                raise RuntimeError(
                    f"a trace is recorded in this process already, into {_present.path}: end that "
                    "one first (or unset CSEQ_TRACE, if it has begun it)"
                )
            self.path = path
            self._marks = _core.Marks(Block(_core.MARKS_BYTES, zero=True))
            self._marks.attach()
            self._pid, self._thread = os.getpid(), threading.get_native_id()
            self._begun = now_ns()
            _core.begin_log(self._tickets)
            self._marks.on = True
            _present = self
            on_new.append(self.watch)
            try:
                for lanes in all_lanes():
                    self.watch(lanes)
            except BaseException:
                self._stop()
                raise

    def __enter__(self) -> Self:
        self.begin()
        return self

    def watch(self, lanes: Lanes) -> None:
        """Record a pool, too."""
        if lanes in self._lanes:
            return
        self._lanes.append(lanes)
        lanes.commit()
        for owner, marks in lanes.marks.items():
            self._firsts[lanes.number, owner] = marks.begun
            marks.on = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def end(self, ended: BaseException | None = None) -> None:
        """Record no more, and write the file; once.

        On a thread of its own, which goes on if a Ctrl-C ends the wait for it. If that fails, it
        raises, but for a program that `ended` has ended, which is to come out: then it logs.
        """
        with _guard:
            if _present is not self:
                return
            self._stop()
        writing = threading.Thread(target=self._write, name="cseq-trace", daemon=False)
        try:
            writing.start()
        except RuntimeError:  # the interpreter is ending, or the system has no more threads
            self._write()
        else:
            writing.join()
        if self._error is None:
            return
        if ended is None:
            raise self._error
        log.error("the trace %s was not written: %s", self.path, self._error)

    def _stop(self) -> None:
        """Record no more; `_guard` is held."""
        global _present
        on_new.remove(self.watch)
        self._marks.on = False
        for lanes in self._lanes:
            for marks in lanes.marks.values():
                marks.on = False
        taken, self._ever = _core.end_log()
        self._taken = taken[-self._tickets :]
        self._ended = now_ns()
        _core.forget()
        _present = None

    def _write(self) -> None:
        """Write the file, whole or not at all."""
        try:
            with whole(self.path) as file:
                for text in Writing(self).file():
                    file.write(text)
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self._error = error


@contextlib.contextmanager
def whole(path: str) -> Iterator[IO[str]]:
    """Write a file of text, packed if it ends in .gz, which then is there as a whole or not at all.

    An OSError names it. What lies where it is written first, a link say, is not followed.
    """
    part = f"{path}.{os.getpid()}.part"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)  # of an earlier process with that number, which was killed
        try:
            with _open(part, packed=path.endswith(".gz")) as file:
                yield file
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _open(path: str, *, packed: bool) -> IO[str]:
    """Open a new file to be written."""
    if packed:
        return gzip.open(path, "xt", compresslevel=4, encoding="utf-8")
    return open(path, "x", encoding="utf-8")


def full(path: str, rank: int | None = None) -> str:
    """Return a whole path, with the process id for %p and the rank for %r."""
    path = path.replace("%p", str(os.getpid()))
    if "%r" in path:
        path = path.replace("%r", _rank() if rank is None else str(rank))
    return os.path.abspath(path)


def _rank() -> str:
    """Return the rank of this process, as ``shard='auto'`` finds it."""
    return str(shard.resolve().rank)


# -- the file


class Writing:
    """Makes the text of a trace's file."""

    def __init__(self, trace: Trace) -> None:
        self._of = trace
        self._pid = trace._pid
        self._lanes = {lanes.number: lanes for lanes in trace._lanes if self._was_active(lanes)}
        self._rows: dict[Lane, str] = {}  # the name of each row
        self._processes: dict[int, str] = {}
        self._starts: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._deaths: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for lanes in trace._lanes:
            for event in lanes.events:
                if event.what in ("start", "death"):
                    key = lanes.number, event.owner
                    (self._starts if event.what == "start" else self._deaths)[key].append(event)
        shift = min((abs(b - a), t - (a + b) // 2) for a, t, b in _clocks())[1]
        self._base = (trace._begun + shift) // QUARTER * QUARTER
        self._shift = shift - self._base
        self._dropped: dict[str, int] = {}

    def _was_active(self, lanes: Lanes) -> bool:
        """Whether there is anything to tell of a pool."""
        trace = self._of
        firsts = trace._firsts
        return (
            bool((trace._taken["feed"] == lanes.number).any())
            or any(trace._begun <= event.ns <= trace._ended for event in lanes.events)
            or any(m.begun > firsts[lanes.number, k] for k, m in lanes.marks.items())
        )

    def file(self) -> Iterator[str]:
        """Make the whole text."""
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "traceName": self._of.path,
        }
        yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
        for text in self._events():
            yield text + ",\n"
        dropped = {f"dropped {what}": n for what, n in self._dropped.items()}
        if dropped:
            text = ", ".join(f"{n} {what}" for what, n in self._dropped.items())
            log.warning("the trace %s has the newest events; dropped: %s", self._of.path, text)
        other = {"cseq": _version(), "tickets": len(self._of._taken), **dropped}
        last = self._event("i", "end", self._of._ended, Lane(self._pid, SUPERVISOR), s="t")
        yield last + '\n], "otherData": ' + json.dumps(other) + "}\n"

    def _events(self) -> Iterator[str]:
        taken = self._of._taken
        dropped = self._of._ever - len(taken)
        if dropped:
            self._dropped["tickets"] = dropped
        known = np.isin(taken["feed"], list(self._lanes))
        taken = taken[known]
        for thread in np.unique(taken["thread"]):
            yield from self._loop(taken[taken["thread"] == thread], int(thread))
        for number, lanes in self._lanes.items():
            yield from self._happenings(lanes)
            for owner, marks in lanes.marks.items():
                first = self._of._firsts[number, owner]
                yield from self._marks(marks, first, lanes, owner)
        yield from self._marks(self._of._marks, 0, None, 0)
        yield from self._names()

    # -- the loop, and what it took

    def _loop(self, taken: np.ndarray[Any, Any], thread: int) -> Iterator[str]:
        """Tell of what one thread took: how it waits for each batch, and what it does with it."""
        inline = [n for n, lanes in self._lanes.items() if lanes.kind == "inline"]
        waited = taken["taken"] - np.maximum(taken["waited"], 0).astype(np.uint64)
        begun = np.where(np.isin(taken["feed"], inline), taken["started"], waited)
        asked = np.maximum(np.minimum(begun, waited), np.r_[np.uint64(0), taken["taken"][:-1]])
        asked = np.minimum(asked, taken["taken"])
        lane = self._row(Lane(self._pid, MADE_UP + thread % MADE_UP), "loop")
        for n, one in enumerate(taken):
            if one["waited"] > 0 and asked[n] < one["taken"]:
                yield self._slice(f"wait {_place(one)}", asked[n], one["taken"], lane)
            if n + 1 < len(taken):
                after = taken[n + 1]
                over = after["feed"] == one["feed"] and after["epoch"] != one["epoch"]
                name = f"after epoch {one['epoch']}" if over else f"train {_place(one)}"
                yield self._slice(name, one["taken"], asked[n + 1], lane)
            yield from self._made(one, self._lanes[int(one["feed"])])

    def _made(self, one: Record, lanes: Lanes) -> Iterator[str]:
        """Tell who made a batch, and how much the loop holds with it."""
        row = self._lane(lanes, int(one["worker"]), int(one["started"]), int(one["thread"]))
        if lanes.kind == "fleet":
            name, more = f"remote {_place(one)}", {"id": _place(one), "cat": "fleet"}
            yield self._event("b", name, one["started"], row, **more)
            yield self._event("e", name, one["indexed"], row, **more)
        else:
            yield self._slice(f"index {_place(one)}", one["started"], one["indexed"], row)
        if one["converting"] >= 0:
            begin = int(one["indexed"]) + int(one["converting"])
            end = begin + int(one["converted"])
            row = self._lane(lanes, int(one["converter"]), end)
            yield self._slice(f"convert {_place(one)}", begin, end, row)

    # -- what happened to runners, and what they tell

    def _happenings(self, lanes: Lanes) -> Iterator[str]:
        """Tell of starts, imports, deaths."""
        row = Lane(self._pid, SUPERVISOR)
        for event in lanes.events:
            if not self._of._begun <= event.ns <= self._of._ended:
                continue
            if event.since:
                self._row(row, "supervisor")
                yield self._slice(f"{event.what} {event.text}", event.since, event.ns, row)
            elif not (event.owner and lanes.kind == "thread"):
                self._row(row, "supervisor")
                name = self._titled(f"{event.what} {event.text}".strip(), lanes)
                if event.owner:
                    name = self._titled(f"{event.what} {lanes.name(event.owner)}", lanes)
                more = {"pid": event.pid, "text": event.text}
                yield self._event("i", name, event.ns, row, s="p", args=more)
            for since, place in event.held:
                lane = self._lane(lanes, event.owner, since)
                yield self._slice(f"index {place} (lost)", since, event.ns, lane)

    def _marks(
        self, marks: _core.Marks, first: int, lanes: Lanes | None, owner: int
    ) -> Iterator[str]:
        """Tell of a process's spans and counters."""
        found = marks.read(first)
        missing = marks.begun - first - len(found)
        if missing > 0:
            who = "the trainer" if lanes is None else self._titled(lanes.name(owner), lanes)
            self._dropped[f"spans of {who}"] = missing
        values = found["value"].view(np.float64)
        for one, value in zip(found, values, strict=True):
            thread, name = int(one["thread"]), one["name"].decode("utf-8", "ignore")
            if lanes is None:
                lane = Lane(self._pid, thread or self._of._thread)
                if not thread:
                    self._row(lane, "main")
            else:
                lane = self._lane(lanes, owner, int(one["begin"]))
                lane = Lane(lane.pid, thread or lane.tid)
            if one["kind"] == _core.COUNT:
                yield self._event("C", name, one["begin"], lane, args={"sum": float(value)})
            else:
                yield self._slice(name, one["begin"], one["value"], lane)

    # -- rows

    def _row(self, lane: Lane, name: str) -> Lane:
        """Name a row of the timeline."""
        self._rows.setdefault(lane, name)
        return lane

    def _lane(self, lanes: Lanes, owner: int, ns: int, thread: int = 0) -> Lane:
        """Return the row of a runner: of the process that it was at this time."""
        name = self._titled(lanes.name(owner), lanes)
        starts = self._starts.get((lanes.number, owner), [])
        if lanes.kind == "inline":
            return self._row(Lane(self._pid, thread), "indexer (test mode)")
        if not starts:
            return self._row(Lane(self._pid, AGENTS - owner), name)
        # Not by the times of the starts: a process claims its first ticket before that is noted.
        deaths = [event.ns for event in self._deaths.get((lanes.number, owner), [])]
        event = starts[min(bisect_right(deaths, ns), len(starts) - 1)]
        if event.pid != self._pid:
            self._processes.setdefault(event.pid, name)
        return self._row(Lane(event.pid, event.tid or event.pid), name)

    def _titled(self, name: str, lanes: Lanes) -> str:
        """Add which manager it is, if there are several."""
        if len(self._lanes) == 1:
            return name
        return f"{name} of manager {1 + list(self._lanes).index(lanes.number)}"

    def _names(self) -> Iterator[str]:
        """Name processes and rows."""
        first = self._of._begun
        script = os.path.basename(sys.argv[0] or "python")
        processes = {self._pid: script, **self._processes}
        for order, (pid, name) in enumerate(processes.items()):
            row = Lane(pid, 0)
            yield self._event("M", "process_name", first, row, args={"name": name})
            yield self._event("M", "process_sort_index", first, row, args={"sort_index": order})
        for row, name in self._rows.items():
            yield self._event("M", "thread_name", first, row, args={"name": name})
            if name == "loop":
                yield self._event("M", "thread_sort_index", first, row, args={"sort_index": -1})

    # -- events

    def _time(self, ns: Any) -> str:
        """Return a time in µs, as text."""
        whole = int(ns) + self._shift
        return f"{whole // 1000}.{whole % 1000:03}"

    def _event(self, phase: str, name: str, ns: Any, lane: Lane, **more: Any) -> str:
        """Make an event."""
        text = f'{{"ph":"{phase}","name":{json.dumps(name)},"pid":{lane.pid},"tid":{lane.tid}'
        rest = "".join(f',"{key}":{json.dumps(value)}' for key, value in more.items())
        return f'{text},"ts":{self._time(ns)}{rest}}}'

    def _slice(self, name: str, begin: Any, end: Any, lane: Lane, **args: Any) -> str:
        """Make a slice."""
        lasts = max(0, int(end) - int(begin))
        text = (
            f'{{"ph":"X","cat":"cseq","name":{json.dumps(name)},"pid":{lane.pid},"tid":{lane.tid}'
        )
        rest = f',"args":{json.dumps(args)}' if args else ""
        return f'{text},"ts":{self._time(begin)},"dur":{lasts // 1000}.{lasts % 1000:03}{rest}}}'


def _place(one: Record) -> str:
    """Name a ticket."""
    return f"{one['epoch']}/{one['batch']}"


def _clocks() -> Iterator[tuple[int, int, int]]:
    """Read the system's clock between two readings of ours."""
    for _ in range(9):
        yield now_ns(), time.time_ns(), now_ns()


def _version() -> str:
    return str(getattr(sys.modules.get("cseq"), "__version__", ""))


# -- CSEQ_TRACE

_told = False  # the environment was asked, or does not count in this process


def record_as_told() -> None:
    """Begin the trace that CSEQ_TRACE asks for, at the first start; it ends with the program."""
    global _told
    path = os.environ.get("CSEQ_TRACE", "")
    if _told or not path:
        return
    _told = True
    told = Trace(path)
    told.begin()
    atexit.register(told.end)


def _forget() -> None:
    """Leave the trace to the process that has forked this one."""
    global _told, _present, _guard
    _told, _present, _guard = True, None, threading.Lock()
    on_new.clear()
    _core.in_forked_child()


in_forked_children(_forget)
