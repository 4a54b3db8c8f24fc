"""Runs of other processes, read from outside.

What is read: their meters, and what their workers work on. A run's rings lie in a file without a
name, which ``/proc/<pid>/fd`` opens for the same user. It is read as any file is, never mapped:
what was cut off or overwritten is an `UnreadableError`. `Watcher` finds the runs and keeps what it
has read.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cseq._core import now_ns
from cseq._memory import Descriptor
from cseq.advice import ENOUGH_BATCHES, advise
from cseq.memory import facts
from cseq.meters import METER, Meters
from cseq.observe.processes import starts, tree
from cseq.processes.worker import STACK_QUIET, STACK_SECONDS, STACK_SIGNAL
from cseq.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cseq.advice import Advice

__all__ = [
    "Attached",
    "Task",
    "UnreadableError",
    "Watched",
    "Watcher",
    "attach",
    "stacks",
]

LOOK = 2.0  # seconds between two searches for runs
RECENT = 2.0  # seconds that the rate and the share of waiting are of
WINDOW = 5.0, 4  # seconds between readings that are kept whole, and how many are
KEPT = 8  # readings whose numbers are kept

MAGIC, LAYOUT, FIELDS = 0x63736571, 10, 4  # of include/cseq_ring.h
HEAD = struct.Struct("=8I96xI764x")  # cseq_ring: its first words, and `closed`
CELL = np.dtype(
    {
        "names": ["word", "epoch", "batch", "start", "indexing", "converting"],
        "formats": ["u8"] * 6,
        "offsets": [0, 8, 16, 24, 112, 160],
        "itemsize": 256,
    }
)
FREE, POSTED, INDEXING, INDEXED, CONVERTING, READY = range(6)
STACKS = "cseq-stacks"  # what `/proc` calls the file of a worker's stacks


class UnreadableError(Exception):
    """There is no run of this version of cseq in a file."""


class Task(NamedTuple):
    """What a runner works on: a batch, and since when (ns)."""

    stage: str
    epoch: int
    batch: int
    since: int


class Attached:
    """A run of another process.

    Parameters
    ----------
    fd : int
        Of the file, open for reading; closed with this object.
    pid : int
        Of the process, as it is called here.

    Attributes
    ----------
    facts : dict of str to str
        See `facts.write`.
    workers, buffer : int
        How many there were of each at the latest reading.
    length : int
        Batches in an epoch; 0: not known.
    is_closed : bool
        The trainer has ended the run.

    Raises
    ------
    UnreadableError
    """

    def __init__(self, fd: int, pid: int) -> None:
        self._file = Descriptor(os.dup, fd)
        self.pid, self.started = pid, starts(pid)
        self.facts = facts.read(self._file.fd)
        self.length, self.threads = self.fact("length"), self.fact("threads")
        self.workers, self.buffer, self.is_closed = self.fact("workers"), 0, False
        rings, width, size = self.fact("rings"), self.fact("width"), os.fstat(self._file.fd).st_size
        if width < HEAD.size or not 0 < rings * width <= size:
            raise UnreadableError("the file has no facts of a run")
        _, meters = self._rings()
        runners = sum(len(each) // METER.itemsize - 1 for each in meters)
        if runners != self.workers + self.fact("converters"):
            raise UnreadableError(f"the facts are impossible: {self.facts}")

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._file.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process is there, and is the same."""
        return self.started is not None and starts(self.pid) == self.started

    def fact(self, name: str) -> int:
        """Return a number of the facts; 0: there is none."""
        told = self.facts.get(name, "")[:20]  # of 64 bits
        return int(told) if told.isdecimal() else 0

    def process(self, number: int) -> int:
        """Return the pid, here, of a worker that is called so where it runs; 0: there is none."""
        if self.threads:
            return 0
        if self.fact("pid") == self.pid:
            return number
        return next((pid for pid in tree(self.pid) if number and _own_number(pid) == number), 0)

    def _read(self, size: int, at: int) -> bytes:
        data = os.pread(self._file.fd, size, at)
        if len(data) < size:
            raise UnreadableError(f"the file ends after {at + len(data)} bytes")
        return data

    def _rings(self) -> tuple[NDArray[np.void], list[bytes]]:
        """Return the cells of all rings, and the meters of each."""
        cells, meters, width = [], [], self.fact("width")
        for at in range(0, self.fact("rings") * width, width):
            words = HEAD.unpack(self._read(HEAD.size, at))
            magic, layout, capacity, _, runners, fields, _, in_use, closed = words
            if magic != MAGIC:
                raise UnreadableError("there is no ring in the file")
            if layout != LAYOUT or fields != FIELDS:
                raise UnreadableError(
                    f"process {self.pid} has another version of cseq: layout {layout}, not {LAYOUT}"
                )
            size = capacity * CELL.itemsize
            whole = size + (runners + 1) * METER.itemsize
            if HEAD.size + whole > width:
                raise UnreadableError(f"a ring of {capacity} cells does not fit into the file")
            data = self._read(whole, at + HEAD.size)
            cells.append(np.frombuffer(data, CELL, capacity))
            meters.append(data[size:])
        self.is_closed = closed == 1
        if closed > 1:  # to indexers from this number on
            self.workers = min(closed - 1, self.fact("workers"))
        self.buffer = 0 if self.fact("streams") else in_use
        return np.concatenate(cells), meters

    def read(self) -> tuple[Stats, dict[int, Task], tuple[int, int] | None]:
        """Return the counts, by runner what it works on, and the loop's place: epoch and batch."""
        cells, copies = self._rings()
        streams, meters = self.fact("streams"), Meters(copies, now_ns(), bytes)
        states = cells["word"] & np.uint64(0xFF)
        depths = [int((states == state).sum()) for state in (POSTED, INDEXED, READY)]
        stats = Stats(
            batches=meters.batches, samples=meters.samples, nbytes=meters.nbytes,
            depths=(depths[0], depths[1], depths[2]), start_waited=meters.start,
            elapsed=meters.elapsed, loop_waited=meters.waited, num_workers=self.workers,
            num_converters=self.fact("converters"), buffer=self.buffer,
            threads=bool(self.threads and self.fact("gil")), streams=bool(streams), meters=meters,
        )  # fmt: skip
        each = len(cells) // self.fact("rings")  # cells of a ring
        tasks = {}
        for stage, state in (("indexing", INDEXING), ("converting", CONVERTING)):
            for k in np.flatnonzero(states == state).tolist():
                cell = cells[k]
                owner = int(cell["word"]) >> 8 & 0xFFFF
                runner = k // each if streams else owner - 1
                epoch = int(cell["epoch"]) - streams  # tickets of streams count them from 1
                batch = int(cell["start" if streams else "batch"])
                tasks[runner] = Task(stage, epoch, batch, int(cell[stage]))
        return stats, tasks, self._place(cells[states != FREE])

    def _place(self, cells: NDArray[np.void]) -> tuple[int, int] | None:
        """Return epoch and batch of the ticket that the loop gets next; of a stream, 0 as batch."""
        if not len(cells):
            return None
        first = cells[np.argmin(cells["word"] >> np.uint64(24))]
        if self.fact("streams"):
            return int(first["epoch"]) - 1, 0
        return int(first["epoch"]), int(first["batch"])


def attach(pid: int, known: Iterable[int] = ()) -> tuple[dict[int, Attached], list[str]]:
    """Look for runs of a process.

    Parameters
    ----------
    pid : int
    known : iterable of int
        Numbers (inodes) of files that are not opened again.

    Returns
    -------
    dict of int to Attached
        By number of their files, those that are new.
    list of str
        What could not be read, and why.

    Raises
    ------
    OSError
        The process is gone, or another user's.
    """
    new, problems = {}, []
    folder = f"/proc/{pid}/fd"
    for name in sorted(os.listdir(folder), key=int):  # as they were opened
        path = f"{folder}/{name}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if facts.FILE not in os.path.basename(os.readlink(path)):
                continue
            number = os.stat(path).st_ino
            if number in known or number in new:
                continue
            file = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = Attached(file.fd, pid)
            except UnreadableError as error:
                problems.append(str(error))
                continue
            if found.fact("pid") == _own_number(pid):  # else it was inherited by a fork
                new[number] = found
    return new, problems


def _status(pid: int, name: str) -> str:
    """Return a line of `/proc/<pid>/status`; empty: there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def _own_number(pid: int) -> int:
    """Return what a process calls itself, which may be in a container."""
    return int((_status(pid, "NSpid").split() or [str(pid)])[-1])


def stacks(pids: Sequence[int]) -> list[str]:
    """Have worker processes write their stacks, and return these; empty: it is none of cseq's."""
    files = [_file_of_stacks(pid) for pid in pids]
    sizes = begun = [0 if file is None else os.fstat(file.fd).st_size for file in files]
    for pid, file in zip(pids, files, strict=True):
        if file is not None and STACK_SIGNAL is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
    since = grown = time.monotonic()
    while time.monotonic() < since + STACK_SECONDS:
        now = [0 if file is None else os.fstat(file.fd).st_size for file in files]
        if now != sizes:
            sizes, grown = now, time.monotonic()
        waiting = any(file and a == b for file, a, b in zip(files, begun, now, strict=True))
        if not waiting and time.monotonic() - grown > STACK_QUIET:
            break
        time.sleep(0.01)
    return [
        "" if file is None else os.pread(file.fd, max(b - a, 0), a).decode(errors="replace")
        for file, a, b in zip(files, begun, sizes, strict=True)
    ]


def _file_of_stacks(pid: int) -> Descriptor | None:
    """Open the file that a worker process writes its stacks to; None: the signal would end it."""
    caught = int(_status(pid, "SigCgt") or "0", 16)
    if STACK_SIGNAL is None or not caught >> (STACK_SIGNAL - 1) & 1:
        return None
    with contextlib.suppress(OSError):
        for path in (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if STACKS in os.path.basename(os.readlink(path)):
                    return Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    return None


@dataclass
class Watched:
    """A run, and what was read of it.

    Attributes
    ----------
    run : Attached
    points : deque
        Of each reading: the time (s), batches, seconds of the epochs, seconds waited.
    whole : deque of Stats
        Older readings, the first of which the window begins with.
    stats : Stats or None
        The latest reading.
    tasks : dict of int to Task
    place : (int, int) or None
    ended : str
        Why nothing more is read.
    number : int
        Of the run, among those that its process has begun since they are watched.
    """

    run: Attached
    points: deque[tuple[float, int, float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )
    whole: deque[tuple[float, Stats]] = field(default_factory=lambda: deque(maxlen=WINDOW[1]))
    stats: Stats | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    place: tuple[int, int] | None = None
    ended: str = ""
    number: int = 1

    def update(self, now: float) -> None:
        """Read it; what is left of one that has ended is kept."""
        if self.ended:
            return
        try:
            if not self.run.is_alive:
                self.ended = "ended"
            self.stats, self.tasks, self.place = self.run.read()
            if self.run.is_closed and not self.ended:
                self.ended = "finished"
        except (UnreadableError, OSError, ArithmeticError, ValueError) as error:
            self.ended = f"cannot be read: {error}"
        if self.stats is not None:
            stats = self.stats
            self.points.append((now, stats.batches, stats.elapsed, stats.loop_waited))
            if not self.whole or now - self.whole[-1][0] >= WINDOW[0]:
                self.whole.append((now, stats))
        if self.ended:
            self.run.close()

    def recent(self) -> tuple[float, float]:
        """Return batches a second and the share of waiting, lately; of one that ended, in all."""
        if not self.points:
            return 0.0, 0.0
        last = self.points[-1]
        first = next(each for each in self.points if last[0] - each[0] <= RECENT)
        if first is last or self.ended:  # since the start
            first = (last[0] - max(last[2], 1e-9), 0, 0.0, 0.0)
        took, elapsed = last[0] - first[0], last[2] - first[2]
        return (
            (last[1] - first[1]) / took if took > 0 else 0.0,
            min(max((last[3] - first[3]) / elapsed, 0.0), 1.0) if elapsed > 0 else 0.0,
        )

    def window(self) -> Stats:
        """Return the counts of the last 15 to 20 s, or since the start if these are few."""
        assert self.stats is not None
        with contextlib.suppress(ValueError):  # it counts less than before
            recent = self.stats.since(self.whole[0][1])
            if recent.batches >= ENOUGH_BATCHES:
                return recent
        return self.stats

    def advice(self) -> Advice:
        """Return the advice for that window, on the cores that the program has."""
        return advise(replace(self.window().window(), cores=max(1, self.run.fact("cores"))))

    @property
    def script(self) -> str:
        """The name of the program."""
        return os.path.basename(self.run.facts.get("script", "")) or "python"

    @property
    def title(self) -> list[str]:
        """The program, the process and the rank."""
        title, world = [self.script, f"pid {self.run.pid}"], self.run.fact("world_size")
        if world > 1:
            title.append(f"rank {self.run.fact('rank')} of {world}")
        if self.number > 1:
            title.append(f"run {self.number}")
        return title


class Watcher:
    """All runs of a process and its descendants, or of all processes that can be read.

    Attributes
    ----------
    runs : list of Watched
    problems : list of str
        What could not be read.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._found: dict[int, Watched] = {}
        self._looked = 0.0
        self._shown: Watched | None = None
        self._counts: Counter[int] = Counter()  # runs of each process so far
        self.problems: list[str] = []

    def label(self, watched: Watched) -> str:
        """Return the rank; where its process has had several runs, with the number of this one."""
        rank = str(watched.run.fact("rank"))
        return f"{rank}.{watched.number}" if self._counts[watched.run.pid] > 1 else rank

    @property
    def runs(self) -> list[Watched]:
        """By rank, and by the time of their start; after these, those that have ended."""
        return sorted(
            self._found.values(),
            key=lambda each: (bool(each.ended), each.run.fact("rank"), each.run.pid),
        )

    @property
    def shown(self) -> Watched | None:
        """The run that all is shown of: the one whose loop waited most, until it ends."""
        runs = self.runs
        if self._shown not in runs or (self._shown.ended and not runs[0].ended):
            self._shown = max(runs, key=lambda run: (not run.ended, run.recent()[1]), default=None)
        return self._shown

    def update(self) -> None:
        """Look for new runs from time to time, and read all."""
        now = now_ns() / 1e9
        if not self._looked or now - self._looked >= LOOK:
            self._looked = now
            self._look()
        for each in self._found.values():
            each.update(now)

    def _look(self) -> None:
        if self._pid is None:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        else:
            pids = tree(self._pid)
        self.problems = []
        for pid in pids:
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                new, problems = attach(pid, self._found)
                for number, run in new.items():
                    self._counts[pid] += 1
                    self._found[number] = Watched(run, number=self._counts[pid])
                self.problems += problems
        for number, each in list(self._found.items()):
            if each.ended and each.run.is_alive:  # another run takes its place
                del self._found[number]
