"""The process pool: stages in worker processes, which are replaced when they die.

::

    trainer                                        worker process
      Feed ── tickets, indices ──► ring ─────────►  Seat ── indices ──► indexer
      SlotReader ◄── views ── slots (arena) ◄─────  SlotWriter ◄── batch
      Staff ◄── end of file ── socket ── setup ──►  `main`; ends when its socket does
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq import context, failure, indexer
from cseq._core import Seat
from cseq.arena import SPARES
from cseq.converter import (
    Converter,
    CudaConverter,
    Output,
    PageLocks,
    Receiver,
    cast_dtype,
    converter_kind,
    explain_cast,
    receive,
)
from cseq.edge import Imports, Objects, SlotReader, SlotSource, SlotWriter
from cseq.feed import Fed, Feed, wake_at
from cseq.keeper import FAILED, NOTED, READY, send_state
from cseq.launcher import ENTRY
from cseq.pools.thread import Crew, add_converters
from cseq.seeding import Seeds
from cseq.staff import Deaths, Held, Staff, enter
from cseq.stage import CONVERTER, INDEXER, run

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import numpy as np

    from cseq.edge import Outlet
    from cseq.pools import Job
    from cseq.staff import Entered
    from cseq.stats import Stats

__all__ = ["ProcessPool", "main"]

TIDY_NS = 500_000_000  # that a converter without a trainer has to remove its files


class Task(NamedTuple):
    """What a worker process is to do."""

    stage: int
    number: int
    num_workers: int
    last: bool
    seed: int
    seed_globals: bool
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
    entered = enter(sock, grace_ns=_grace_ns)
    task = entered.setup.task
    seat = Seat(entered.ring, task.stage, entered.setup.owner, last=task.last)
    if task.stage == CONVERTER:
        _convert(sock, task, seat, entered)
    else:
        _index(sock, task, seat, entered, local)


def _grace_ns(task: Task) -> int:
    """Tell how long a worker may live without a trainer: a converter tidies up before it goes."""
    return TIDY_NS if task.stage == CONVERTER else 0


def _index(sock: socket.socket, task: Task, seat: Seat, entered: Entered, local: Any) -> None:
    """Make the indexer and index until the ring is closed."""
    desk = context.Desk(task.number, task.num_workers, task.seed)
    context.enter(desk)
    seeds = Seeds(desk) if task.seed_globals else None
    try:
        if seeds is not None:
            seeds.open()
        worker = entered.read(local)
        made = indexer.build(worker)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        send_state(sock, FAILED, failure.pack(error))
        return
    send_state(sock, READY)
    desk.allocator = entered.writer
    entered.writer.place_arrays()
    # In a process that the indexer forks, `cseq.empty` is numpy's.
    os.register_at_fork(after_in_child=partial(setattr, desk, "allocator", None))
    inlet = SlotWriter(entered.writer, task.cast)
    indexing = indexer.Indexing(made, desk, inlet, seeds=seeds)

    def look(batch: Any) -> None:
        note = explain_cast(batch, task.output)
        if note is not None:
            send_state(sock, NOTED, note.encode())

    indexing.indexer = indexer.FirstBatch(indexing, look)
    run(seat, indexing)
    desk.rise()
    indexer.dispose(worker, made, copied=True)


def _convert(sock: socket.socket, task: Task, seat: Seat, entered: Entered) -> None:
    """Convert until the ring is closed."""
    try:
        converter = CudaConverter(task.output)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        send_state(sock, FAILED, failure.pack(error))
        return
    threading.Thread(target=_tidy_on_hangup, args=(sock, converter), daemon=True).start()
    send_state(sock, READY)
    source, inlet = SlotSource(entered.writer), SlotWriter(entered.writer, None)

    def work(seat: Seat) -> None:
        try:
            record = inlet.write(seat, converter.export(source.fetch(seat)))
            inlet.publish(seat, record)
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            inlet.fail(seat, error)

    run(seat, work, idle=converter.reap)
    converter.close()


def _tidy_on_hangup(sock: socket.socket, converter: CudaConverter) -> None:
    """Remove a converter's files, and end the process, when the trainer is gone."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # a hang-up is always told
    poll.poll()
    converter.clean()
    os._exit(1)


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


class ProcessPool(Fed):
    """Worker processes behind a ring and slots in shared memory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        in_processes = job.num_converters > 0 and converter_kind(job.compat, os.name) == "process"
        # Converter threads copy to the device from where a batch lies.
        on_cuda = job.output.use_cuda and job.output.device.startswith("cuda")
        self._locks = PageLocks(job.output.device) if on_cuda and not in_processes else None
        self._staff = staff = Staff(
            job.buffer,
            job.room,
            job.num_workers + job.num_converters,
            deaths=Deaths(
                job.max_restarts,
                job.num_workers,
                "batch",
                "look at what it does with these indices",
            ),
            memory_limit=job.memory_limit,
            locks=self._locks,
        )
        (self._ring,), self._arena = staff.rings, staff.arena
        self._ring.wake_at = wake_at(job.buffer, job.num_workers)
        self._crew = Crew(self._ring)
        self._reader = SlotReader(self._arena)
        self._receiver = Receiver(job.output) if in_processes else None
        self._imports: Imports | None = None
        convert, leaf_for = self._make_convert()
        self._outlet = self._make_outlet()
        self.feed = Feed(
            self._ring,
            job.sampler,
            self._outlet,
            ordered=job.ordered,
            skip_errors=job.on_error == "skip",
            check=self._check,
            convert=convert,
            leaf_for=leaf_for,
        )

    def open(self) -> None:
        """Start the processes, and converter threads if converters are threads."""
        job = self._job
        if isinstance(self._outlet, Objects):
            add_converters(job, self._ring, self._reader, self._outlet, self._crew)
            self._crew.start()
        in_processes = self._receiver is not None
        self._staff.start(
            job.worker,
            job.num_workers + (job.num_converters if in_processes else 0),
            readers=job.num_workers,
            task=self._task,
            describe=self._describe,
            method=job.start_method,
            entry=ENTRY,
            threads=job.threads,
            preload=job.preload,
            needs=["torch"] if in_processes else [],
            timeout=job.timeout,
            spares=SPARES,
        )

    def _make_convert(self) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
        """Return what the trainer does to a batch that came out of the ring, and to its leaves."""
        if self._receiver is not None or self._job.output.kind == "null":
            return None, None
        if self._job.num_converters:
            return receive, None
        converter = Converter(self._job.output)
        return converter.convert, converter.leaf_for

    def _make_outlet(self) -> Outlet:
        """Return where batches come out."""
        if self._receiver is not None:
            self._imports = Imports(
                self._arena, self._ring, self._receiver, Converter(self._job.output).convert
            )
            return self._imports
        if self._job.num_converters:
            return Objects(self._job.buffer, self._reader)
        return self._reader

    # -- the keeper's thread asks

    def _task(self, owner: int) -> Task:
        """Tell a worker what to do."""
        job = self._job
        stage = INDEXER if owner <= job.num_workers else CONVERTER
        return Task(
            stage=stage,
            number=owner - 1,
            num_workers=job.num_workers,
            last=stage == CONVERTER or not job.num_converters,
            seed=job.seed,
            seed_globals=job.seed_globals,
            cast=cast_dtype(job.output),
            output=job.output._replace(function=None),  # that is applied in the trainer
        )

    def _describe(self, _: int, cell: int) -> Held:
        """Name the batch in a cell."""
        epoch, batch, count = self._ring.ticket(cell)
        indices: list[int] = self._ring.indices(cell)[:count].tolist()
        return Held(epoch, batch, indices, failure.where(epoch, batch, indices))

    # -- the sequence asks (on the consumer's thread)

    def _check(self) -> None:
        """Raise what went wrong elsewhere, or deal with a batch that takes too long."""
        self._staff.check()
        if self._crew.failure is not None:
            raise self._crew.failure
        if self._job.timeout is not None:
            working = [w for w in self.feed.in_work() if w[0] <= self._staff.owners]
            restart = self._job.on_timeout == "restart"
            self._staff.check_time(working, self._job.timeout, restart=restart)

    def stats(self) -> Stats:
        """Count what this pool has done so far."""
        counted = self.feed.stats(self._job.num_workers, self._job.num_converters)
        return replace(
            counted,
            restarts=self._staff.deaths.restarts,
            retries=self._staff.deaths.retries + (self._imports.lost if self._imports else 0),
            copies=self._arena.copies,
        )

    def begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch."""
        self._staff.deaths.begin()
        self.feed.begin(epoch, consumed)

    def close(self) -> None:
        """Tell the workers to leave, and see to it that they have."""
        self._staff.closed = True
        if self._receiver is not None:  # before the processes go whose memory it may still read
            self._receiver.close()
        self._staff.close()
        if self._receiver is not None:
            self._receiver.clean()
        self._crew.join(time.monotonic() + 1.0)
        if self._locks is not None:
            self._locks.close()
        self._staff.free()
