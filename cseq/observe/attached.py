"""Reads statistics of runs in other processes.

A run's rings are in an anonymous file. Processes of the same user can open it at
``/proc/<pid>/fd``. `Ring` reads a copy, so the file is never modified.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from cseq._core import Ring, now_ns
from cseq._memory import Block, Descriptor
from cseq.engine.crews.base import RUN
from cseq.measure.advice import ENOUGH_BATCHES, advise
from cseq.measure.stats import Stats, added
from cseq.observe.processes import starts, tree

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from cseq.measure.advice import Advice

__all__ = ["AttachedRun", "Watcher", "runs_of"]

# Interval between searches for new runs, in seconds.
LOOK = 2.0
# Window for the current rate and waiting time, in seconds.
RECENT = 2.0
# Window for the advice, in seconds.
WINDOW = 20.0
# Maximum number of readings to keep.
KEPT = 20


class AttachedRun:
    """A run in another process, and its latest readings.

    Parameters
    ----------
    file : Descriptor
        The file of the run, opened for reading.
    pid : int
        The process id in this namespace.
    facts : dict of str to int
        See `engine.crews.base.file_name`.

    Attributes
    ----------
    stats : Stats
        The latest reading.
    tasks : dict of int to (int, int, int)
        The epoch, batch and start time (ns) of each worker's current task.
    next_batch : (int, int) or None
        The epoch and the number of the loop's next batch or item.
    ended : str
        Why the run can no longer be read, or an empty string.
    """

    def __init__(self, file: Descriptor, pid: int, facts: dict[str, int]) -> None:
        self._file, self.pid, self.facts = file, pid, facts
        self._started, self.script = starts(pid), _script(pid)
        self._past: deque[tuple[float, Stats]] = deque(maxlen=KEPT)
        self.stats = Stats()
        self.tasks: dict[int, tuple[int, int, int]] = {}
        self.next_batch: tuple[int, int] | None = None
        self.ended = ""

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running (and its pid has not been reused)."""
        return self._started is not None and starts(self.pid) == self._started

    def fact(self, name: str) -> int:
        """Return a number from the file's name, or 0 if it is missing."""
        return self.facts.get(name, 0)

    def process(self, number: int) -> int:
        """Return `number` if it is a worker's pid in this namespace, or else 0."""
        return 0 if self.fact("threads") or self.fact("pid") != self.pid else number

    def update(self, now: float) -> None:
        """Take a reading, unless the run has ended."""
        if self.ended:
            return
        try:
            if not self.is_alive:
                self.ended = "ended"
            rings = list(self._rings())
            if rings[0].closed == 1 and not self.ended:
                self.ended = "finished"
            self._read(rings)
            self._past.append((now, self.stats))
        except (OSError, ArithmeticError, LookupError, MemoryError, ValueError) as error:
            self.ended = f"cannot be read: {error}"
        if self.ended:
            self._file.close()

    def _rings(self) -> Iterator[Ring]:
        """Yield the rings in a copy of the file."""
        size = os.fstat(self._file.fd).st_size
        copy = Block(size)
        if os.preadv(self._file.fd, [copy], 0) < size:
            raise ValueError("the file was truncated")
        for k in range(self.fact("rings")):
            yield Ring(copy, at=k * (size // self.fact("rings")))

    def _read(self, rings: list[Ring]) -> None:
        # `closed` is 1 once the run is closed. If larger, workers from that runner number on exit.
        count, leaving = self.fact("workers"), rings[0].closed
        self.stats = stats = Stats.read(
            rings,
            num_workers=min(leaving - 1, count) if leaving > 1 else count,
            num_converters=self.fact("converters"),
            threads=bool(self.fact("threads") and self.fact("gil")),
        )
        self.tasks, self.next_batch, first = {}, None, 0
        for k, ring in enumerate(rings):
            for cell in range(ring.capacity):
                token, (epoch, batch, _) = ring.token(cell), ring.ticket(cell)
                owner, since = ring.holder(cell)
                # Streams count epochs from 1, and have one ring per worker.
                if not stats.buffer:
                    epoch, batch, owner = epoch - 1, ring.start(cell), owner and k + 1
                if owner:
                    self.tasks[owner - 1] = epoch, batch, since
                if token and (not first or token < first):
                    first, self.next_batch = token, (epoch, batch)

    def since(self, seconds: float) -> Stats:
        """Return statistics for the last `seconds`, or for the whole run if it has ended."""
        for then, earlier in self._past if not self.ended else ():
            if 0 < self._past[-1][0] - then <= seconds:
                return added(self.stats, earlier)
        return self.stats

    def window(self) -> Stats:
        """Return statistics for the last 20 s, or for the whole run if that is too few batches."""
        recent = self.since(WINDOW)
        return recent if recent.batches >= ENOUGH_BATCHES else self.stats

    def advice(self) -> Advice:
        """Return advice for the current window."""
        return advise(replace(self.window().window(), cores=max(1, self.fact("cores"))))

    @property
    def title(self) -> list[str]:
        """The program, the process and the rank."""
        title, world = [self.script, f"pid {self.pid}"], self.fact("world_size")
        if world > 1:
            title.append(f"rank {self.fact('rank')} of {world}")
        return title


def runs_of(pid: int, opened: Container[int] = ()) -> Iterator[tuple[int, AttachedRun]]:
    """Yield (inode, run) for each run of a process, except runs whose inode is in `opened`.

    Raises OSError if the process is gone or belongs to another user.
    """
    own = _own_number(pid)
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        path = f"/proc/{pid}/fd/{name}"
        # The file may have been closed by now.
        with contextlib.suppress(FileNotFoundError):
            called, number = os.readlink(path), os.stat(path).st_ino
            if not called.startswith(f"/memfd:{RUN}") or number in opened:
                continue
            facts = {word: int(value) for word, value in re.findall(r"(\w+)=(\d+)", called)}
            # A forked process inherits its parent's files.
            if facts.get("pid", own) == own:
                file = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                yield number, AttachedRun(file, pid, facts)


def _script(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode("utf-8", "replace").split("\0")
        script = next((word for word in words[1:] if word and word[0] != "-"), words[0])
        return "".join(c if c.isprintable() else "?" for c in os.path.basename(script))
    return "python"


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    return {}


def _own_number(pid: int) -> int:
    return int(_status(pid).get("NSpid", str(pid)).split()[-1])


class Watcher:
    """Watches runs. `problems` lists why some of them could not be read."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._runs: dict[int, AttachedRun] = {}
        self._looked = 0.0
        self._shown: AttachedRun | None = None
        self.problems: list[str] = []

    @property
    def runs(self) -> list[AttachedRun]:
        """All runs by rank and process id, finished runs last."""
        return sorted(
            self._runs.values(), key=lambda run: (bool(run.ended), run.fact("rank"), run.pid)
        )

    @property
    def shown(self) -> AttachedRun | None:
        """The run to show in full. When it was chosen, its loop was waiting more than any other."""
        runs = self.runs
        if self._shown not in runs or (self._shown.ended and not runs[0].ended):
            waits = {run: run.since(RECENT).loop_waiting for run in runs}
            self._shown = max(runs, key=lambda run: (not run.ended, waits[run]), default=None)
        return self._shown

    def update(self) -> None:
        """Read all runs. Search for new ones at most every `LOOK` seconds."""
        now = now_ns() / 1e9
        if not self._looked or now - self._looked >= LOOK:
            self._looked = now
            self._look(now)
        for run in self._runs.values():
            run.update(now)

    def _look(self, now: float) -> None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        self.problems = []
        for pid in pids if self._pid is None else tree(self._pid):
            # The process may have exited, or may belong to another user.
            with contextlib.suppress(OSError):
                for number, run in runs_of(pid, self._runs):
                    run.update(now)
                    if run.ended.startswith("cannot"):
                        self.problems.append(f"a run of process {pid} {run.ended}")
                    else:
                        self._runs[number] = run
        # If the process of an ended run is still alive, drop the run, because another may follow.
        for number, run in list(self._runs.items()):
            if run.ended and run.is_alive:
                del self._runs[number]
