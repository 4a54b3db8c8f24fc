"""The process pool: stages in worker processes, which are replaced when they die.

::

    trainer                                        worker process
      Feed ── tickets, indices ──► ring ─────────►  Runner ── indices ──► indexer
      SlotReader ◄── views ── slots (arena) ◄───────── Writer ◄── batch
      Supervisor ◄── end of file ── socket ──────►  `main`; ends when its socket does
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq._work import Runner
from cseq.converter.host import Converter
from cseq.converter.output import Output, cast_dtype
from cseq.encoding.transport import Objects, SlotReader
from cseq.indexing import context, indexer
from cseq.indexing.seeding import Seeds
from cseq.measure.lanes import Lanes
from cseq.memory.arena import Arena
from cseq.pools.base import BatchPool, file_name
from cseq.pools.thread import ThreadGroup, add_converters, convert
from cseq.processes.deaths import Deaths
from cseq.processes.launcher import make_launcher
from cseq.processes.launcher.forks import in_forked_children
from cseq.processes.supervisor import Supervisor
from cseq.processes.worker import NOTED, enter, send_state
from cseq.stage import CONVERTER, INDEXER, run
from cseq.system import available_memory, neighbours, private_memory

if TYPE_CHECKING:
    import socket

    import numpy as np

    from cseq._core import Ring
    from cseq.arguments import Job
    from cseq.converter.export import Imports
    from cseq.converter.page_locks import PageLocks
    from cseq.measure.stats import Stats
    from cseq.options import Size
    from cseq.pools.base import Awaited, Working
    from cseq.processes.worker import Entered

__all__ = ["ProcessPool", "main"]

ENTRY = "cseq.pools.process:main"  # what worker processes run
ADVICE = "look at what the indexer does with these indices"


class Task(NamedTuple):
    """What a worker process has to do."""

    stage: int
    num_workers: int
    last: bool
    seed: int
    seed_globals: bool
    on_error: str
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
        The user's worker, if it was inherited by `os.fork` and is in no file.
    """
    entered = enter(sock)
    task = entered.setup.task
    runner = Runner(entered.ring, task.stage, entered.setup.owner, last=task.last)
    if task.stage == CONVERTER:
        _convert(task, runner, entered)
    else:
        _index(sock, task, runner, entered, local)


def _index(sock: socket.socket, task: Task, runner: Runner, entered: Entered, local: Any) -> None:
    """Make the indexer and index until the ring is closed to it."""
    batch_context = context.BatchContext(entered.setup.number, task.num_workers, task.seed)
    context.enter(batch_context)
    seeds = Seeds(batch_context) if task.seed_globals else None
    with entered.starting():
        if seeds is not None:
            seeds.seed_present()
        worker = entered.read(local)  # which may draw, and import
        made = indexer.build_seeded(worker, seeds, copied=True)
    batch_context.allocator = entered.writer
    entered.writer.place_arrays()
    # In a process that the indexer forks, `cseq.empty` is numpy's.
    in_forked_children(partial(setattr, batch_context, "allocator", None))
    entered.writer.cast = task.cast
    working = indexer.leaving(made, batch_context, task.on_error)
    indexing = indexer.Indexing(entered.writer, working, batch_context, seeds=seeds)

    indexer.FirstBatch(indexing, task.output, lambda note: send_state(sock, NOTED, note.encode()))
    run(runner, indexing.work)
    batch_context.clear()
    indexer.dispose(worker, made, copied=True)


def _convert(task: Task, runner: Runner, entered: Entered) -> None:
    with entered.starting():
        from cseq.converter.cuda import CudaConverter

        converter = CudaConverter(task.output)
    work = partial(convert, entered.writer, converter.export, entered.writer)
    run(runner, work, idle=converter.reap)
    converter.close()


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


class ProcessPool(BatchPool):
    """Worker processes, a ring and slots in shared memory."""

    supervisor: Supervisor
    _imports: Imports | None = None  # if converters are processes

    def __init__(self, job: Job) -> None:
        self._job = job
        options = job.options
        in_processes = job.num_converters > 0 and job.compat is False
        self._locks: PageLocks | None = None
        # Converter threads copy to the device from where a batch lies.
        if job.output.use_cuda and not in_processes:
            from cseq.converter.page_locks import PageLocks

            self._locks = PageLocks(job.output.device)
        self._arena = Arena(options.memory_limit, self._locks, tickets=job.buffer)
        self._arena.add_rings(
            job.buffer,
            job.sampler.words,
            job.num_workers + job.num_converters,
            owners=job.num_workers + (job.num_converters if in_processes else 0),
            limit=job.start.buffer,
            name=file_name(job.num_workers, job.num_converters, sampler=job.sampler),
        )
        (ring,) = self._arena.rings
        lanes = Lanes(job.num_workers, "process")
        fails = job.on_error == "skip"
        self.supervisor = Supervisor(
            make_launcher(options.start_method, entry=ENTRY, threads=options.threads),
            self._arena,
            readers=job.num_workers,
            task=self._task,
            describe=self.held,
            deaths=Deaths(options.max_restarts, job.num_workers, "batch", ADVICE, fails=fails),
            lanes=lanes,
        )
        self._group = ThreadGroup(ring)
        self._crews = self.supervisor, self._group
        self._reader = SlotReader(self._arena)
        way_out = self._import(ring) if in_processes else self._way_out()
        super().__init__(job, ring, num_converters=job.num_converters, lanes=lanes, **way_out)

    def _import(self, ring: Ring) -> dict[str, Any]:
        """Take batches from converter processes; see `BatchPool`."""
        from cseq.converter.export import Imports

        output = self._job.output
        self._imports = Imports(self._arena, ring, output, Converter(output).convert)
        return {"batch_reader": self._imports, "on_cancel": self._imports.cancel}

    def _way_out(self) -> dict[str, Any]:
        """Take them from converter threads, or convert them in the loop's thread, or not at all."""
        job, reader = self._job, self._reader
        if job.num_converters:
            from cseq.converter.cuda import receive

            return {"batch_reader": Objects(job.buffer, reader), "convert": receive}
        if job.output.kind == "null":
            return {"batch_reader": reader}
        converter = Converter(job.output)
        convert, leaf_for = converter.convert, converter.leaf_for
        return {"batch_reader": reader, "convert": convert, "leaf_for": leaf_for}

    def open(self) -> None:
        """Start the processes, and converter threads if converters are threads."""
        job = self._job
        self._fit()
        if isinstance(self._batch_reader, Objects):
            add_converters(job, self._ring, self._reader, self._batch_reader, self._group)
            self._group.start()
        self.supervisor.prepare(
            job.worker,
            preload=self._options.preload,
            needs=[] if self._imports is None else ["torch"],
            timeout=self._options.timeout,
        )
        self.supervisor.launch()

    def resize(self, num_workers: int, buffer: int) -> None:
        """Go on with another number of workers, and of batches; see `BatchPool`."""
        super().resize(num_workers, buffer)
        self.supervisor.resize(num_workers)

    def most(self, stats: Stats) -> Size:
        """Return the most that there is memory for: half of what is left may go to processes."""
        most, free = super().most(stats), available_memory()
        each = max(private_memory(pid) for pid in self.supervisor.pids())
        if free is None or not each:
            return most
        more = free // (2 * neighbours() * each)
        return most._replace(num_workers=min(most.num_workers, self.num_workers + more))

    def _task(self, owner: int) -> Task:
        """Return what a worker is to do; called on the supervisor's thread."""
        job = self._job
        stage = INDEXER if owner <= job.num_workers else CONVERTER
        return Task(
            stage=stage,
            num_workers=job.num_workers,
            last=stage == CONVERTER or not job.num_converters,
            seed=job.sampler.seed,
            seed_globals=job.seed_globals,
            on_error=job.on_error,
            cast=cast_dtype(job.output),
            output=job.output._replace(function=None),  # the trainer applies the function
        )

    def _working(self, awaited: Awaited | None) -> Working:
        """List what processes work on; converters may be threads."""
        return [w for w in super()._working(awaited) if w[0] <= self._arena.owners]

    def stats(self) -> Stats:
        """Return counts and times; a batch that is converted again is made again, too."""
        stats = super().stats()
        lost = 0 if self._imports is None else self._imports.lost
        return replace(stats, retries=stats.retries + lost)

    def close(self) -> None:
        """End the workers, and then free what they used."""
        self.supervisor.closed = True
        if self._imports is not None:  # it may still read the converter processes' memory
            self._imports.close()
        self.supervisor.close(hurried=self.is_hurried)
        self._group.join(1.0)
        if self._locks is not None:
            self._locks.close()
        self._arena.close()
        self._job = self._job.without_worker()
