"""The process pool: stages in worker processes, which are replaced when they die.

::

    trainer                                        worker process
      Feed ── tickets, indices ──► ring ─────────►  Seat ── indices ──► indexer
      SlotReader ◄── views ── slots (arena) ◄─────  SlotWriter ◄── batch
      Keeper ◄── end of file ── socket ── setup ─►  `main`; ends when its socket does
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cseq import context, failure, indexer, payload
from cseq._core import (
    Mapping,
    Placement,
    Ring,
    Seat,
    arm_fault,
    commit,
    exit_on_hangup,
    now_ns,
    ring_bytes,
)
from cseq.arena import Arena, Segment, Writer
from cseq.converter import (
    Converter,
    CudaConverter,
    Output,
    PageLocks,
    Receiver,
    cast_dtype,
    converter_kind,
    receive,
)
from cseq.edge import Objects, SlotReader, SlotSource, SlotWriter
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.feed import Feed, wake_at
from cseq.keeper import FAILED, READY, STACK_SIGNAL, Keeper, send_state
from cseq.launcher import describe_exit, make_launcher
from cseq.pools.thread import ConverterThreads, Crew
from cseq.stage import CONVERTER, INDEXER, run

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from cseq.edge import Outlet
    from cseq.pools import Job
    from cseq.stats import Stats

__all__ = ["ProcessPool", "main"]

log = logging.getLogger("cseq")

TRIES = 3  # deaths that one batch may cause, or each worker before it is ready
SPIN = 20_000  # ns that an idle worker looks at the ring: about what a sleep costs both sides
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """What a worker process has to know, beside its file descriptors."""

    stage: int
    owner: int
    number: int
    num_workers: int
    last: bool
    seed: int
    ring_bytes: int
    width: int  # bytes between the slots in their file
    cast: np.dtype[Any] | None
    output: Output


# ── in the worker ──────────────────────────────────────────────────────────────────────────


def main(sock: socket.socket, local: Any = None) -> None:
    """Run one worker process.

    Parameters
    ----------
    sock : socket
        To the trainer. When it ends, so does this process.
    local : object, optional
        The user's worker, where it came by `os.fork` and not through a file.
    """
    arm_fault()
    setup, (ring_fd, arena_fd, *payload_fd) = _receive(sock)
    threading.Thread(target=exit_on_hangup, args=(sock.fileno(),), daemon=True).start()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=sock.fileno(), all_threads=True)
    ring = Ring(Mapping(ring_fd, 0, setup.ring_bytes))
    os.close(ring_fd)
    seat = Seat(ring, setup.stage, setup.owner, last=setup.last)
    if setup.stage == CONVERTER:
        _convert(sock, setup, seat, Writer(arena_fd, setup.width))
    else:
        _index(sock, setup, seat, make_writer(arena_fd, setup.width), payload_fd, local)


def make_writer(fd: int, width: int) -> Writer:
    """Make an indexer's writer; large arrays lie in the slot from the first, where that is safe.

    It is where an array that the indexer keeps can be taken out of the slot again.
    """
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if sys.platform != "linux" or not gil:
        return Writer(fd, width)
    writer = Writer(fd, width, Placement())

    def before_fork() -> None:
        """Keep a process that the indexer forks from sharing the slot."""
        if threading.current_thread() is threading.main_thread():
            writer.part()

    os.register_at_fork(before=before_fork)
    return writer


def _receive(sock: socket.socket) -> tuple[Setup, list[int]]:
    """Read the setup and the descriptors that come with it."""
    head, fds, _, _ = socket.recv_fds(sock, LENGTH.size, 8)
    (length,) = LENGTH.unpack(head)
    body = bytearray()
    while len(body) < length:
        piece = sock.recv(length - len(body))
        if not piece:
            os._exit(1)  # the trainer is gone
        body += piece
    setup: Setup = pickle.loads(body)
    return setup, list(fds)


def _send(sock: socket.socket, setup: Setup, fds: list[int]) -> None:
    """Send the setup and the descriptors that come with it."""
    body = pickle.dumps(setup)
    socket.send_fds(sock, [LENGTH.pack(len(body))], fds)
    sock.sendall(body)


def _index(
    sock: socket.socket,
    setup: Setup,
    seat: Seat,
    writer: Writer,
    payload_fd: list[int],
    local: Any,
) -> None:
    """Make the indexer and index until the ring is closed."""
    desk = context.Desk(setup.number, setup.num_workers, setup.seed)
    context.enter(desk)
    try:
        worker = payload.read(payload_fd[0]) if payload_fd else local
        made = indexer.build(worker)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        send_state(sock, FAILED, failure.pack(error))
        return
    send_state(sock, READY)
    desk.allocator = writer
    run(seat, indexer.Indexing(made, desk, SlotWriter(writer, setup.cast)))
    desk.rise()
    indexer.dispose(worker, made, copied=True)


def _convert(sock: socket.socket, setup: Setup, seat: Seat, writer: Writer) -> None:
    """Convert until the ring is closed."""
    try:
        converter = CudaConverter(setup.output)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        send_state(sock, FAILED, failure.pack(error))
        return
    send_state(sock, READY)
    source, inlet = SlotSource(writer), SlotWriter(writer, None)

    def work(seat: Seat) -> None:
        try:
            record = inlet.write(seat, converter.export(source.fetch(seat)))
            inlet.publish(seat, record)
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            inlet.fail(seat, error)

    run(seat, work, idle=converter.reap)
    converter.close()


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


class ProcessPool:
    """Worker processes behind a ring and slots in shared memory."""

    def __init__(self, job: Job) -> None:
        if not hasattr(socket, "send_fds"):
            raise OSError(
                "worker processes need file descriptors to be sent over a socket, which this "
                "system's Python cannot do; use thread_type='thread', or MTSequence"
            )
        self._job = job
        self._closed = False
        self._failure: BaseException | None = None
        self._deaths = Deaths(job.max_restarts, job.num_workers)
        in_processes = job.num_converters > 0 and converter_kind(job.compat, os.name) == "process"
        self._owners = job.num_workers + (job.num_converters if in_processes else 0)
        runners = job.num_workers + job.num_converters
        size = ring_bytes(job.buffer, job.room, runners)
        self._segment = Segment.create(size)
        commit(self._segment.fd, 0, size)
        self._ring = Ring(Mapping(self._segment.fd, 0, size), job.buffer, job.room, runners)
        self._ring_bytes = size
        self._ring.wake_at = wake_at(job.buffer, job.num_workers)
        self._ring.spin = SPIN if (os.cpu_count() or 1) > 1 else 0
        # Converter threads copy to the device from where a batch lies.
        on_cuda = job.output.use_cuda and job.output.device.startswith("cuda")
        self._locks = PageLocks(job.output.device) if on_cuda and not in_processes else None
        self._arena = Arena(job.memory_limit, self._locks)
        self._crew = Crew(self._ring)
        self._receiver = Receiver(job.output) if in_processes else None
        self._unpack = self._make_unpack()
        outlet = self._start_threads(in_processes)
        launcher = make_launcher(job.start_method, preload=["torch"] if in_processes else [])
        launcher.prepare()
        try:  # pickled once, and put where every worker process can read it
            self._payload_fd = -1 if launcher.takes_objects else payload.dump(job.worker).share()
        except BaseException:
            self._ring.close()
            launcher.close(time.monotonic())
            raise
        self.feed = Feed(
            self._ring,
            job.sampler,
            outlet,
            ordered=job.ordered,
            skip_errors=job.on_error == "skip",
            check=self._check,
        )
        self._keeper = Keeper(launcher, self, range(1, self._owners + 1), job.worker)

    def _make_unpack(self) -> Callable[[Any], Any] | None:
        """Return what the trainer does to a batch that came out of the ring."""
        if self._receiver is not None:
            return self._receiver.unpack
        if self._job.num_converters:
            return receive
        if self._job.output.kind == "null":
            return None
        return Converter(self._job.output).convert

    def _start_threads(self, in_processes: bool) -> Outlet:  # noqa: FBT001
        """Start converter threads, if converters are threads; return where batches come out."""
        reader = SlotReader(self._arena)
        if in_processes or not self._job.num_converters:
            return reader
        objects = Objects(self._job.buffer, reader)
        ConverterThreads(self._job, self._ring, reader, objects, self._crew)
        return objects

    # -- the keeper asks (on its thread)

    def greet(self, owner: int, sock: socket.socket) -> None:
        """Send a new worker its setup."""
        job = self._job
        stage = INDEXER if owner <= job.num_workers else CONVERTER
        setup = Setup(
            stage=stage,
            owner=owner,
            number=owner - 1,
            num_workers=job.num_workers,
            last=stage == CONVERTER or not job.num_converters,
            seed=job.seed,
            ring_bytes=self._ring_bytes,
            width=self._arena.segment.width,
            cast=cast_dtype(job.output),
            output=replace(job.output, function=None),  # that is applied in the trainer
        )
        fds = [self._segment.fd, self._arena.segment.fd]
        if stage == INDEXER and self._payload_fd >= 0:
            fds.append(self._payload_fd)
        _send(sock, setup, fds)

    def broke(self, error: BaseException) -> None:
        """Pass on why workers can no longer be looked after."""
        self._fail(error)

    def failed(self, packed: bytes) -> None:
        """Keep the first reason why a worker could not get ready."""
        self._fail(failure.unpack(packed))

    def died(self, owner: int, exitcode: int | None, *, was_ready: bool) -> bool:
        """Post again what a dead worker held; return whether to replace it."""
        cells = self._ring.held(owner)
        held = [(*self._ring.ticket(c)[:2], self._indices(c)) for c in cells]
        self._ring.repost(owner)
        if self._failure is not None or self._closed:
            return False
        error = self._deaths.count(exitcode, held, was_ready=was_ready)
        if error is not None:
            self._fail(error)
            return False
        log.warning("worker %d %s: replaced", owner - 1, describe_exit(exitcode))
        return True

    def _indices(self, cell: int) -> list[int]:
        """Return the indices of a cell's ticket."""
        indices: list[int] = self._ring.indices(cell)[: self._ring.ticket(cell)[2]].tolist()
        return indices

    def _fail(self, error: BaseException) -> None:
        """Let the consumer raise this."""
        if self._failure is None:
            self._failure = error
        self._ring.alarm()

    # -- the sequence asks (on the consumer's thread)

    def _check(self) -> None:
        """Raise what went wrong elsewhere, or deal with a batch that takes too long."""
        if self._closed:
            raise InterruptedError("the manager was finished while a batch was awaited")
        error = self._failure or self._crew.failure
        if error is not None:
            raise error
        if self._job.timeout is not None:
            self._look_for_hang(self._job.timeout)

    def _look_for_hang(self, timeout: float) -> None:
        """Raise, or kill the worker, if what is awaited has taken longer than `timeout` seconds."""
        for owner, since, place in self.feed.in_work():
            seconds = (now_ns() - since) / 1e9
            if seconds <= timeout or owner > self._owners:
                continue
            stack = self._keeper.stack(owner)
            message = (
                f"{place} has taken {seconds:.1f} s, timeout={timeout} s; "
                f"worker {owner - 1} is here:\n{stack}"
            )
            if self._job.on_timeout == "raise":
                raise WorkerTimeout(message)
            log.error("%sworker %d is restarted", message, owner - 1)
            self._keeper.kill(owner)

    @property
    def done(self) -> int:
        """Batches of this epoch that were delivered, or left out for an error."""
        return self.feed.done

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that were left out for an error: epoch, batch, what was raised."""
        return self.feed.skipped

    def stats(self) -> Stats:
        """Count what this pool has done so far."""
        counted = self.feed.stats(self._job.num_workers)
        return replace(
            counted,
            restarts=self._deaths.restarts,
            retries=self._deaths.retries,
            copies=self._arena.copies,
        )

    def begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch."""
        self._deaths.begin()
        self.feed.begin(epoch, consumed)

    def interrupt(self) -> None:
        """Let a `next` that waits in another thread raise InterruptedError."""
        self.feed.interrupt()

    def next(self) -> Any:
        """Return the next batch."""
        batch = self.feed.next()
        return batch if self._unpack is None else self._unpack(batch)

    def close(self) -> None:
        """Tell the workers to leave, and see to it that they have."""
        if self._keeper.is_here:  # garbage collection can strike anywhere
            threading.Thread(target=self.close, name="cseq-closer").start()
            return
        self._closed = True
        if self._receiver is not None:  # before the processes go whose memory it may still read
            self._receiver.close()
        self._ring.close()
        self._keeper.close()
        self._crew.join(time.monotonic() + 1.0)
        if self._locks is not None:
            self._locks.close()
        self._arena.close()
        self._segment.close()
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1


class Deaths:
    """How often workers died in this epoch, and when that is too often."""

    def __init__(self, budget: int, num_workers: int) -> None:
        self._budget = budget
        self._starts = TRIES * num_workers  # all of them may be struck at once while they start
        self._deaths = 0
        self._unready = 0
        self._by_batch: Counter[tuple[int, int]] = Counter()
        self._oom_kills = oom_kills()
        self.restarts = 0
        self.retries = 0  # tickets that ran again

    def begin(self) -> None:
        """Begin a new epoch's budget."""
        self._deaths = 0
        self._by_batch.clear()

    def count(
        self,
        exitcode: int | None,
        held: list[tuple[int, int, list[int]]],
        *,
        was_ready: bool,
    ) -> WorkerDied | None:
        """Count a death; return the error if it is one too many."""
        self._deaths += 1
        self._unready = 0 if was_ready else self._unready + 1
        epoch, batch, indices = held[0] if held else (None, None, [])
        if held:
            self._by_batch[held[0][:2]] += 1
        reason = self._too_many(held)
        if reason is None:
            self.restarts += 1
            self.retries += len(held)
            return None
        place = f" while making {failure.where(*held[0])}" if held else ""
        message = (
            f"a worker process {describe_exit(exitcode)}{self._oom(exitcode)}{place}; {reason}"
        )
        return WorkerDied(message, epoch=epoch, batch=batch, indices=indices, exitcode=exitcode)

    def _too_many(self, held: list[tuple[int, int, list[int]]]) -> str | None:
        """Say why this death is one too many, if it is."""
        if held and self._by_batch[held[0][:2]] >= TRIES:
            return f"this batch has ended {TRIES} workers: look at what it does with these indices"
        if self._unready >= self._starts:
            return (
                f"{self._unready} workers in a row died before they were ready: look at how they "
                "start"
            )
        if self._deaths > self._budget:
            return (
                f"{self._deaths} workers died in this epoch, max_restarts={self._budget} allows "
                "no more replacements"
            )
        return None

    def _oom(self, exitcode: int | None) -> str:
        """Say whether the system counted a kill for want of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        if exitcode != -9 or before is None or self._oom_kills is None:
            return ""
        killed = self._oom_kills - before
        return f" (out-of-memory kills counted by the cgroup meanwhile: {killed})"


def oom_kills() -> int | None:
    """Return how many processes this cgroup has lost for want of memory; None if it is not told."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as lines:
            path = next(line[3:].strip() for line in lines if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{path}/memory.events", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration):
        return None
