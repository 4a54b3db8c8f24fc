"""The thread pool: indexers and converters in threads of this process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import Lock, Ring, Turns, now_ns, ring_bytes
from cseq._memory import HAS_GIL, Block, Mapping, Reuse, commit
from cseq._work import Runner
from cseq.converter.host import Converter
from cseq.encoding import failure
from cseq.encoding.transport import Objects
from cseq.errors import WorkerTimeout
from cseq.indexing import context, indexer
from cseq.measure.lanes import Lanes
from cseq.memory.descriptors import sparse_file
from cseq.pools.base import BatchPool, file_name
from cseq.stage import CONVERTER, HURRY, INDEXER, overdue, run, spin_ns
from cseq.threads import Threads, leave_running

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._memory import Descriptor
    from cseq.arguments import Job
    from cseq.encoding.transport import BatchWriter, Source
    from cseq.pools.base import Working

__all__ = ["MADE", "ThreadGroup", "ThreadPool", "add_converters", "convert", "open_rings"]

log = logging.getLogger("cseq")

CLOSE_SECONDS = 5.0  # how long close waits for threads, in all
LOOK_SECONDS = 0.5  # how often a waiting thread checks whether the pool was closed
LINE = 64  # bytes: a ring begins at a multiple of it
MADE, WAITS = 0, -1  # of a thread's indexer


class ThreadGroup:
    """Threads that run one stage each, and the first exception of any of them.

    Attributes
    ----------
    begun : dict
        By owner, since when its thread makes an indexer (ns of `now_ns`); or MADE, or WAITS.
    """

    instead = "threads cannot be restarted; the processes of an MPSequence can"

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._idents: dict[int, int] = {}  # of threads that have begun, by owner
        self.begun: dict[int, int] = {}
        self._threads = Threads()  # to be started
        self._started: list[Threads] = []
        self.failure = failure.Failure()

    def add(self, name: str, target: Callable[[], None], owner: int) -> None:
        """Add a thread, which ends when the ring is closed; `owner`: the runner that it is."""
        self._threads.add(name, partial(self._guard, target, owner))

    def start(self) -> None:
        """Start the threads that were added since the last start."""
        threads, self._threads = self._threads, Threads()
        self._started.append(threads)  # first: a signal handler may raise, and `join` waits for it
        threads.start()

    def _guard(self, target: Callable[[], None], owner: int) -> None:
        """Run a thread's work; its exception is raised in the loop."""
        self._idents[owner] = threading.get_ident()
        try:
            with Reuse():
                target()
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Store the first exception, and wake the loop."""
        self.failure.note(error)
        self._ring.notify_all()

    def check(self) -> None:
        """Raise the exception that has ended a thread."""
        self.failure.check()

    def is_ready(self, owner: int) -> bool:
        """Whether a worker has made its indexer, or producer."""
        return self.begun.get(owner) == MADE

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:  # noqa: ARG002
        """Raise WorkerTimeout for what takes longer; no thread can be restarted."""
        starting = [(owner, since) for owner, since in list(self.begun.items()) if since > 0]
        for owner, took in overdue(working, starting, timeout):
            raise WorkerTimeout(
                f"{took}; its thread is here:\n{self._stack(owner)}({self.instead})"
            )

    def _stack(self, owner: int) -> str:
        frame = sys._current_frames().get(self._idents.get(owner, 0))
        return "(not running)\n" if frame is None else "".join(traceback.format_stack(frame))

    def join(self, seconds: float, *, hurried: bool = False) -> None:
        """Wait for all threads, so long in all; `hurried`: not longer than `HURRY`."""
        deadline = time.monotonic() + (HURRY if hurried else seconds)
        stuck = []
        for threads in self._started:
            if names := threads.join(deadline):
                stuck += names
                leave_running(threads)
        if stuck and not hurried:
            log.warning(
                "threads %s did not end within %g s: what they call hangs; they are left running",
                stuck,
                seconds,
            )
        self._threads, self._started = Threads(), []


def add_converters(
    job: Job, ring: Ring, source: Source, batch_writer: Objects, group: ThreadGroup
) -> None:
    """Add threads of the second stage, each with a CUDA stream of its own."""
    first = job.num_workers + 1
    for number in range(job.num_converters):
        runner = Runner(ring, CONVERTER, first + number, last=True)
        work = partial(_convert, job, runner, source, batch_writer)
        group.add(f"cseq-c{number}", work, first + number)


def _convert(job: Job, runner: Runner, source: Source, batch_writer: Objects) -> None:
    import torch

    from cseq.converter.cuda import CudaConverter

    torch.set_num_threads(1)  # of this thread: a copy by all cores takes them from the indexers
    converter = CudaConverter(job.output)
    try:
        run(runner, partial(convert, source, converter.convert, batch_writer), idle=converter.reap)
    finally:
        converter.close()


def convert(
    source: Source, function: Callable[[Any], Any], batch_writer: BatchWriter, runner: Runner
) -> None:
    """Do the work of a converter: its batch, converted by a function, is published."""
    try:
        record = batch_writer.write(runner, function(source.fetch(runner)))
        batch_writer.publish(runner, record)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        batch_writer.fail(runner, error)


def open_rings(
    count: int, name: str, cells: int, room: int, runners: int, calls: int = 0, limit: int = 0
) -> tuple[list[Ring], Descriptor | None]:
    """Make rings of threads in one memory, and the file that this is in, if it is in one."""
    width = -(-ring_bytes(cells, room, runners) // LINE) * LINE
    file = _file_for(count * width, name)
    size = count * width
    memory = Block(size, zero=True) if file is None else Mapping(file.fd, 0, size)
    rings, turns = [], Turns(count) if HAS_GIL and count > 1 else None
    for number in range(count):
        ring = Ring(memory, cells, room, runners, calls, number * width, limit, threads=True)
        ring.turns = turns
        ring.set_spin(spin_ns(count * runners, turns=HAS_GIL), runners if HAS_GIL else 0)
        ring.first = number * cells
        rings.append(ring)
    return rings, file


def _file_for(size: int, name: str) -> Descriptor | None:
    """Make a file in memory for a ring, where other programs can read its meters: on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        file = sparse_file(size, name)
        if os.readlink(f"/proc/self/fd/{file.fd}").startswith("/memfd:"):  # else it is on a disk
            commit(file.fd, 0, size)
            return file
    except OSError:  # of descriptors, there are none left
        pass
    return None


class ThreadPool(BatchPool):
    """Indexers in threads, batches handed over as objects."""

    of = "MTSequence"

    def __init__(self, job: Job) -> None:
        runners = job.num_workers + job.num_converters
        words = job.sampler.words
        name = file_name(job.num_workers, job.num_converters, threads=True, sampler=job.sampler)
        (ring,), self._file = open_rings(
            1, name, job.buffer, words, runners, limit=job.start.buffer
        )
        lanes = Lanes(job.num_workers, "thread")
        self._objects = Objects(job.buffer)
        self._group = ThreadGroup(ring)
        self._crews = (self._group,)
        self._unwarned = threading.Lock()  # the thread that acquires it warns of a first batch
        self._lock = Lock()  # around `begun`, which has the owners that have a thread
        self._making = threading.Lock()  # some libraries cannot open a data set in two threads
        convert: Callable[[Any], Any] | None = None
        if job.num_converters:
            from cseq.converter.cuda import receive

            convert = receive
        super().__init__(
            job,
            ring,
            self._objects,
            convert=convert,
            num_converters=job.num_converters,
            lanes=lanes,
        )

    def open(self) -> None:
        """Start the threads."""
        add_converters(self._job, self._ring, self._objects, self._objects, self._group)
        self._fit()

    def resize(self, num_workers: int, buffer: int) -> None:
        """Go on with another number of workers, and of batches; see `BatchPool`."""
        super().resize(num_workers, buffer)
        self._staff()
        self._group.start()

    def _staff(self) -> None:
        """Add the threads that are wanted and not there."""
        with self._lock.hold():
            for number in range(self.num_workers):
                if number + 1 not in self._group.begun:
                    self._group.begun[number + 1] = WAITS
                    self._group.add(f"cseq-w{number}", partial(self._serve, number), number + 1)

    def _serve(self, number: int) -> None:
        """Index for as long as the ring is open to this thread's number."""
        owner = number + 1
        while True:
            self._index(number)
            with self._lock.hold():  # `_staff` finds this one, which goes on, or adds another
                if self._is_over or owner > self.num_workers:
                    del self._group.begun[owner]
                    return

    def _warn(self, text: str) -> None:
        if self._unwarned.acquire(blocking=False):
            log.warning(text)

    def _index(self, number: int) -> None:
        """Make an indexer and index until the ring is closed to it."""
        job = self._job
        batch_context = context.BatchContext(number, job.num_workers, job.sampler.seed)
        context.enter(batch_context)
        made = self._make(number + 1, job.worker)
        if made is None:
            return
        runner = Runner(self._ring, INDEXER, number + 1, last=not job.num_converters)
        working = indexer.leaving(made, batch_context, job.on_error)
        convert = None
        if not job.num_converters and job.output.kind != "null":
            convert = Converter(job.output).convert
        indexing = indexer.Indexing(self._objects, working, batch_context, convert)
        indexer.FirstBatch(indexing, job.output, self._warn)
        try:
            run(runner, indexing.work)
        finally:
            self._group.begun[number + 1] = WAITS
            batch_context.clear()
            del indexing.indexer  # before the first batch, a `_FirstBatch`, which refers back
            indexer.dispose(job.worker, made, copied=False)

    def _make(self, owner: int, worker: Any) -> Any:
        """Make a thread's indexer, one after another; None once the pool is over."""
        while not self._making.acquire(timeout=LOOK_SECONDS):
            if self._is_over:
                return None
        try:
            if self._is_over:
                return None
            self._group.begun[owner] = now_ns()
            made = indexer.build(worker)
            self._group.begun[owner] = MADE
            return made
        finally:
            self._making.release()

    @property
    def _is_over(self) -> bool:
        """Whether the pool was closed, or a thread has failed."""
        return self._ring.closed == 1 or bool(self._group.failure)

    def close(self) -> None:
        """Close the ring and wait for the threads."""
        self._ring.close()
        self._group.join(CLOSE_SECONDS, hurried=self.is_hurried)
        if self._file is not None:
            self._file.close()
        self._job = self._job.without_worker()
