"""Writes a trace of every batch as JSON for Perfetto."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from cseq._core import now_ns
from cseq.check import integer
from cseq.files import whole
from cseq.measure import lanes
from cseq.measure._trace import begin_log, drop_log, end_log
from cseq.processes.launcher.forks import in_forked_children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from cseq.measure.lanes import Lanes

__all__ = ["Trace", "full", "record_if_asked", "trace"]

log = logging.getLogger("cseq")

TICKETS = 100_000
MOST_TICKETS = 1 << 24
# A quarter of a year in ns. `baseTimeNanoseconds` is a multiple of this, as in torch's profiler.
QUARTER = 7_889_238 * 10**9
# In a trace, rows for loops are numbered from MADE_UP, and rows for runners from RUNNERS.
MADE_UP = 1 << 30
RUNNERS = MADE_UP // 2
SUPERVISOR = RUNNERS - 1

# A record of type `_trace.TAKEN`.
Record = Any

# Held while a trace starts or stops.
_guard = threading.Lock()
_present: Trace | None = None


def trace(path: str | os.PathLike[str], *, tickets: int = TICKETS) -> Trace:
    """Record the events of every batch inside a ``with`` statement and write the trace on exit.

    The trace covers all managers, loaders and streams in this process, even if they were started
    before the trace. Open the file at https://ui.perfetto.dev or in chrome://tracing.

    Parameters
    ----------
    path : str or path
        A file name that ends in ``.json`` or ``.json.gz``. ``%p`` is replaced by the process id,
        and ``%r`` by the rank (0 for a single process).
    tickets : int
        The maximum number of batches to keep, at 72 bytes each. The oldest are dropped, and a log
        message reports how many.

    Returns
    -------
    context manager

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    FileNotFoundError, NotADirectoryError
        If the folder does not exist. The ``with`` statement raises this error.
    RuntimeError
        If another trace is active in this process. The ``with`` statement raises this error.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
    >>> with cseq.trace("run.json"), manager.start() as batches:
    ...     for batch in batches:
    ...         pass
    """
    return Trace(path, tickets)


class Trace:
    """The context manager that `trace` returns."""

    def __init__(
        self, path: str | os.PathLike[str], tickets: int = TICKETS, rank: int | None = None
    ) -> None:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(name, str):
            raise TypeError(
                f"path={path!r} is not a str; pass a name that ends in .json or .json.gz"
            )
        if not re.search(r"\.json(\.gz)?$", name):
            raise ValueError(
                f"path={name!r} does not end in .json or .json.gz; pass a name that does"
            )
        self.path = name
        self._rank = rank
        self._tickets = integer("tickets", tickets, most=MOST_TICKETS)

    def begin_recording(self) -> None:
        """Start recording."""
        global _present
        path = full(self.path, self._rank)
        os.stat(os.path.join(os.path.dirname(path), ""))
        with _guard:
            if _present is not None:
                raise RuntimeError(
                    f"this process is already recording a trace to {_present.path}; end that "
                    "trace first (or unset CSEQ_TRACE if the variable started the trace)"
                )
            self.path = path
            self._pid, self._thread = os.getpid(), threading.get_native_id()
            self._begun = now_ns()
            begin_log(self._tickets)
            _present = self
            try:
                self._lanes: list[Lanes] = []
                lanes.record(self._lanes)
            except BaseException:
                self._stop()
                raise

    def __enter__(self) -> Self:
        self.begin_recording()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_recording(error)

    def end_recording(self, ended: BaseException | None = None) -> None:
        """Stop recording and write the file.

        If `ended` is the exception that ended the program, a write error is logged, not raised.
        """
        with _guard:
            if _present is not self:
                return
            self._stop()
        try:
            with whole(self.path) as file:
                for text in Writing(self).file():
                    file.write(text)
        except Exception as error:
            if ended is None:
                raise
            log.error("the trace %s was not written: %s", self.path, str(error))

    def _stop(self) -> None:
        """Stop recording, while holding `_guard`."""
        global _present
        lanes.record(None)
        self._taken, self._ever = end_log()
        self._ended = now_ns()
        _present = None


def full(path: str, rank: int | None = None) -> str:
    """Return an absolute path, with %p replaced by the process id and %r by the rank."""
    path = path.replace("%p", str(os.getpid()))
    if "%r" in path:
        from cseq.order import shard

        path = path.replace("%r", str(shard.find_shard().rank if rank is None else rank))
    return os.path.abspath(path)


class Writing:
    """Generates the text of a trace.

    `_names` maps rows to names. `_runners` maps (pool, runner) to rows.
    """

    def __init__(self, trace: Trace) -> None:
        self._of, self._pid = trace, trace._pid
        self._pools = {pool.number: pool for pool in trace._lanes}
        self._names = {trace._thread: "main"}
        self._runners: dict[tuple[int, int], int] = {}
        shift = min((abs(b - a), t - (a + b) // 2) for a, t, b in _clocks())[1]
        self._base = (trace._begun + shift) // QUARTER * QUARTER
        self._shift = shift - self._base

    def file(self) -> Iterator[str]:
        """Yield the text in pieces."""
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "traceName": self._of.path,
        }
        yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
        for text in self._events():
            yield text + ",\n"
        count = len(self._of._taken)
        version = getattr(sys.modules.get("cseq"), "__version__", "")
        more = {"cseq": str(version), "tickets": count}
        if self._of._ever > count:
            more["dropped"] = text = f"the first {self._of._ever - count} tickets"
            log.warning("the trace %s is incomplete; it lacks %s", self._of.path, text)
        last = self._event("i", "end", self._of._ended, SUPERVISOR, s="t")
        yield last + '\n], "otherData": ' + json.dumps(more) + "}\n"

    def _events(self) -> Iterator[str]:
        taken = self._of._taken
        taken = taken[np.isin(taken["feed"], list(self._pools))]
        for thread in np.unique(taken["thread"]):
            yield from self._loop(taken[taken["thread"] == thread], int(thread))
        for pool in self._pools.values():
            yield from self._happenings(pool)
        yield from self._headings()

    def _loop(self, taken: np.ndarray[Any, Any], thread: int) -> Iterator[str]:
        """Yield a thread's waits and training steps, and the work done on its batches."""
        inline = [number for number, pool in self._pools.items() if pool.kind == "inline"]
        is_inline = np.isin(taken["feed"], inline)
        asked = np.where(is_inline, taken["started"], taken["asked"])
        asked = np.maximum(asked, np.r_[self._of._begun, taken["taken"][:-1]].astype(np.uint64))
        asked = np.minimum(asked, taken["taken"])
        row = MADE_UP + thread % MADE_UP
        self._names[row] = "loop"
        for n, record in enumerate(taken):
            if record["asked"] < record["taken"]:
                yield self._slice(f"wait {_name_of(record)}", asked[n], record["taken"], row)
            if n + 1 < len(taken):
                after = taken[n + 1]
                over = after["feed"] == record["feed"] and after["epoch"] != record["epoch"]
                name = f"after epoch {record['epoch']}" if over else f"train {_name_of(record)}"
                yield self._slice(name, record["taken"], asked[n + 1], row)
            yield from self._made(record, self._pools[int(record["feed"])])

    def _made(self, record: Record, pool: Lanes) -> Iterator[str]:
        if pool.kind == "inline":
            row = int(record["thread"])
            self._names[row] = "indexer (test mode)"
        else:
            row = self._runner(pool, int(record["worker"]))
        yield self._slice(f"index {_name_of(record)}", record["started"], record["indexed"], row)
        if record["converted"]:
            row = self._runner(pool, int(record["converter"]))
            yield self._slice(
                f"convert {_name_of(record)}", record["converting"], record["converted"], row
            )

    def _happenings(self, pool: Lanes) -> Iterator[str]:
        self._names[SUPERVISOR] = "supervisor"
        for event in pool.events:
            if not self._of._begun <= event.ns <= self._of._ended:
                continue
            name = f"{event.kind} {self._title(pool, event.runner_number)}"
            more = {"pid": event.pid, "text": event.text}
            yield self._event("i", name, event.ns, SUPERVISOR, s="p", args=more)
            for since, ticket in event.held:
                row = self._runner(pool, event.runner_number)
                yield self._slice(f"index {ticket} (lost)", since, event.ns, row)

    def _runner(self, pool: Lanes, runner_number: int) -> int:
        """Return a runner's row. A replacement runner uses the same row."""
        row = self._runners.setdefault((pool.number, runner_number), RUNNERS + len(self._runners))
        self._names[row] = self._title(pool, runner_number)
        return row

    def _title(self, pool: Lanes, runner_number: int) -> str:
        """Return a runner's name, including its manager if there are several."""
        if len(self._pools) == 1:
            return pool.name(runner_number)
        return f"{pool.name(runner_number)} of manager {1 + list(self._pools).index(pool.number)}"

    def _headings(self) -> Iterator[str]:
        first, program = self._of._begun, os.path.basename(sys.argv[0] or "python")
        for row, name in self._names.items():
            yield self._event("M", "thread_name", first, row, args={"name": name})
            if name == "loop":
                yield self._event("M", "thread_sort_index", first, row, args={"sort_index": -1})
        yield self._event("M", "process_name", first, 0, args={"name": program})

    def _event(self, phase: str, name: str, ns: SupportsInt, row: int, **more: object) -> str:
        at = {"pid": self._pid, "tid": row, "ts": (int(ns) + self._shift) / 1000}
        return json.dumps({"ph": phase, "name": name, **at, **more})

    def _slice(self, name: str, start: SupportsInt, end: SupportsInt, row: int) -> str:
        lasts = max(0, int(end) - int(start)) / 1000
        return self._event("X", name, start, row, dur=lasts, cat="cseq")


def _name_of(record: Record) -> str:
    return f"{record['epoch']}/{record['batch']}"


def _clocks() -> Iterator[tuple[int, int, int]]:
    """Yield readings of the system clock, each taken between two readings of cseq's clock."""
    for _ in range(9):
        yield now_ns(), time.time_ns(), now_ns()


# True once CSEQ_TRACE has been handled, and in forked processes, where it does not apply.
_was_asked = False


def record_if_asked() -> None:
    """If CSEQ_TRACE is set, start a trace that ends at program exit."""
    global _was_asked
    path = os.environ.get("CSEQ_TRACE", "")
    if _was_asked or not path:
        return
    _was_asked = True
    asked = Trace(path)
    asked.begin_recording()
    atexit.register(asked.end_recording)


def _forget() -> None:
    """Drop the parent's trace in a forked process."""
    global _was_asked, _present, _guard
    _was_asked, _present, _guard = True, None, threading.Lock()
    lanes.record(None)
    drop_log()


in_forked_children(_forget)
