"""Worker and converter threads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

from cseq._core import Ring, Turns, now_ns, ring_bytes
from cseq._lock import Lock
from cseq._memory import HAS_GIL, Block, Mapping, Reuse, commit
from cseq._work import Runner
from cseq.encoding import failure
from cseq.encoding._codec import Objects, ObjectTable
from cseq.engine._streams import Request
from cseq.engine.crews.base import Crew, file_name
from cseq.engine.worker import convert, serve
from cseq.errors import WorkerTimeout
from cseq.indexing.context import BatchContext
from cseq.measure.lanes import Lanes
from cseq.memory.descriptors import sparse_file
from cseq.stage import CONVERTER, HURRY, INDEXER, overdue, run, spin_ns
from cseq.threads import Threads, leave_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq._memory import Descriptor
    from cseq.converter.output import Output
    from cseq.encoding.transport import Source
    from cseq.engine.tickets.base import Tickets, Working

__all__ = ["MADE", "ThreadCrew", "ThreadGroup", "add_converters", "open_rings"]

log = logging.getLogger("cseq")

CLOSE_SECONDS, LOOK_SECONDS = 5.0, 0.5
LINE = 64
MADE, WAITS = 0, -1


class ThreadGroup:
    """A group of runner threads, and the first exception raised in any of them.

    Attributes
    ----------
    begun : dict
        The state of each runner, by number: WAITS, then the time (`now_ns`) at which it started to
        create its indexer, then MADE.
    """

    def __init__(self, ring: Ring, instead: str = "") -> None:
        self._ring, self._instead = ring, instead
        self._idents: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self._threads = Threads()
        self._started: list[Threads] = []
        self.failure = failure.Failure()

    def add(self, name: str, target: Callable[[], None], runner_number: int) -> None:
        """Add a thread. It must exit when the ring is closed."""
        self._threads.add(name, partial(self._guard, target, runner_number))

    def start_threads(self) -> None:
        """Start the threads added since the previous call."""
        threads, self._threads = self._threads, Threads()
        # Append first, so that `join` waits for these threads even if a signal handler raises.
        self._started.append(threads)
        threads.start()

    def _guard(self, target: Callable[[], None], runner_number: int) -> None:
        self._idents[runner_number] = threading.get_ident()
        try:
            with Reuse():
                target()
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Store the first exception and wake up the loop."""
        self.failure.note(error)
        self._ring.notify_all()

    def check(self) -> None:
        """Raise the stored exception."""
        self.failure.check()

    def is_ready(self, runner_number: int) -> bool:
        """Return True if a worker has created its indexer or producer."""
        return self.begun.get(runner_number) == MADE

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:  # noqa: ARG002
        """Raise WorkerTimeout if a ticket takes too long. Threads cannot be restarted."""
        starting = [(k, since) for k, since in list(self.begun.items()) if since > 0]
        for runner_number, took in overdue(working, starting, timeout):
            raise WorkerTimeout(
                f"{took}; stack of its thread:\n{self._stack(runner_number)}({self._instead})"
            )

    def _stack(self, runner_number: int) -> str:
        frame = sys._current_frames().get(self._idents.get(runner_number, 0))
        return "(not running)\n" if frame is None else "".join(traceback.format_stack(frame))

    def join(self, seconds: float, *, hurried: bool = False) -> None:
        """Wait at most `seconds` for the threads, or `HURRY` seconds if `hurried`."""
        deadline = time.monotonic() + (HURRY if hurried else seconds)
        stuck = []
        for threads in self._started:
            if names := threads.join(deadline):
                stuck += names
                leave_running(threads)
        if stuck and not hurried:
            log.warning(
                "threads %s did not end within %g s, because a call hangs; they are left running",
                stuck,
                seconds,
            )
        self._threads, self._started = Threads(), []


def add_converters(
    tickets: Tickets, ring: Ring, source: Source, batch_writer: Objects, group: ThreadGroup
) -> None:
    """Add converter threads, each with its own CUDA stream."""
    first, output = tickets.num_workers + 1, tickets.output
    if output is None:
        return
    for converter in range(tickets.num_converters):
        runner = Runner(ring, CONVERTER, first + converter, last=True)
        work = partial(_convert, output, runner, source, batch_writer)
        group.add(f"cseq-c{converter}", work, first + converter)


def _convert(output: Output, runner: Runner, source: Source, batch_writer: Objects) -> None:
    import torch

    from cseq.converter.cuda import CudaConverter

    # Copying on all cores would slow down the indexers.
    torch.set_num_threads(1)
    converter = CudaConverter(output)
    try:
        run(runner, partial(convert, source, converter.convert, batch_writer), idle=converter.reap)
    finally:
        converter.close()


def open_rings(tickets: Tickets, name: str) -> tuple[list[Ring], Descriptor | None]:
    """Create the rings in one block of memory. Return them and their file, if any."""
    count, cells, words, runners = tickets.rings, tickets.cells, tickets.words, tickets.runners
    width = -(-ring_bytes(cells, words, runners) // LINE) * LINE
    size = count * width
    file = _file_for(size, name)
    memory = Block(size, zero=True) if file is None else Mapping(file.fd, 0, size)
    rings, turns = [], Turns(count) if HAS_GIL and count > 1 else None
    for ring_number in range(count):
        offset, limit = ring_number * width, tickets.limit
        ring = Ring(memory, cells, words, runners, tickets.calls, offset, limit, threads=True)
        ring.turns = turns
        ring.set_spin(spin_ns(count * runners, turns=HAS_GIL), runners if HAS_GIL else 0)
        ring.first_entry = ring_number * cells
        rings.append(ring)
    return rings, file


def _file_for(size: int, name: str) -> Descriptor | None:
    """Create a file from which other programs can read the meters (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        file = sparse_file(size, name)
        if os.readlink(f"/proc/self/fd/{file.fd}").startswith("/memfd:"):
            commit(file.fd, 0, size)
            return file
    except OSError:
        pass
    return None


class ThreadCrew(Crew):
    """Worker threads, which pass batches on as objects without copying them."""

    of = "MTSequence"
    _worker: object = None

    def __init__(self, tickets: Tickets) -> None:
        super().__init__(tickets)
        self.rings, self._file = open_rings(tickets, file_name(tickets, threads=True))
        self.lanes = Lanes(tickets.num_workers, "thread")
        self.timed = tickets.num_workers + tickets.num_converters
        self._objects = ObjectTable(tickets.rings * tickets.cells)
        self.reader: Objects = Objects(tickets.cells, objects=self._objects)
        self.staff = self._group = ThreadGroup(self.rings[0], tickets.instead)
        self._wanted = tickets.num_workers
        self._is_launched = False
        # Only the first thread to acquire this lock logs a warning about its first batch.
        self._unwarned = threading.Lock()
        # Protects `ThreadGroup.begun`.
        self._lock = Lock()
        # Some libraries cannot open data sets in several threads at once.
        self._making = threading.Lock()
        if tickets.num_converters:
            from cseq.converter.cuda import receive

            self.convert = receive

    def prepare(self, worker: object, name: str = "worker") -> None:  # noqa: ARG002
        """Set the user's worker object and add the converters."""
        self._worker = worker
        add_converters(self.tickets, self.rings[0], self.reader, self.reader, self._group)

    def launch(self) -> None:
        """Start the threads that are not running."""
        self._is_launched = True
        with self._lock.hold():
            for worker in range(self._wanted):
                if worker + 1 not in self._group.begun:
                    self._group.begun[worker + 1] = WAITS
                    self._group.add(f"cseq-w{worker}", partial(self._serve, worker), worker + 1)
        self._group.start_threads()

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""
        self._wanted = num_workers
        if self._is_launched:
            self.launch()

    def check(self) -> None:
        """Raise the first exception from a thread."""
        self._group.check()

    def write(self, value: object, name: str) -> Request:  # noqa: ARG002
        """Wrap a value for a worker."""
        return Request(None, value)

    def requested_key(self, ring_number: int, cell: int) -> object:
        """Return the key of a cell's ticket. Thread-safe."""
        _, key, _ = self.rings[ring_number].kept[cell] or (None, None, None)
        return key and key.value

    def _serve(self, worker: int) -> None:
        runner_number, is_alone = worker + 1, len(self.rings) > 1
        ring = self.rings[worker if is_alone else 0]
        while True:
            self._work(worker, ring, 1 if is_alone else runner_number)
            # The lock ensures that `launch` either sees this thread as running or adds a new one.
            with self._lock.hold():
                if self._is_over(ring) or runner_number > self._wanted:
                    del self._group.begun[runner_number]
                    return

    def _work(self, worker: int, ring: Ring, owner: int) -> None:
        tickets = self.tickets
        task = tickets.task(worker + 1, forks=False)
        converter = None if tickets.num_converters else self._converter()
        try:
            serve(
                task,
                Runner(ring, INDEXER, owner, last=task.last),
                BatchContext(worker, tickets.num_workers, task.seed),
                Objects(ring.capacity, objects=self._objects, first=ring.first_entry),
                lambda: self._worker,
                self._starting(worker + 1, ring),
                self._warn,
                copied=False,
                convert=None if converter is None else converter.convert,
            )
        except _Over:
            pass
        finally:
            self._group.begun[worker + 1] = WAITS

    @contextlib.contextmanager
    def _starting(self, runner_number: int, ring: Ring) -> Iterator[None]:
        """Let one thread at a time create its indexer."""
        while not self._making.acquire(timeout=LOOK_SECONDS):
            if self._is_over(ring):
                raise _Over
        try:
            if self._is_over(ring):
                raise _Over
            self._group.begun[runner_number] = now_ns()
            yield
            self._group.begun[runner_number] = MADE
        finally:
            self._making.release()

    def _warn(self, text: str) -> None:
        if self._unwarned.acquire(blocking=False):
            log.warning(text)

    def _is_over(self, ring: Ring) -> bool:
        return ring.closed == 1 or bool(self._group.failure)

    def close(self, *, hurried: bool) -> None:
        """Close the rings and wait for the threads."""
        for ring in self.rings:
            ring.close()
        self._group.join(CLOSE_SECONDS, hurried=hurried)
        if self._file is not None:
            self._file.close()
        self._worker = None


class _Over(Exception):
    """Raised if the pool was closed before a thread could start."""
