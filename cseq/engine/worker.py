"""The life cycle of a worker in a process or thread.

::

    trainer                                        worker process
      Feed ── tickets, indices ──► ring ─────────►  Runner ── indices ──► indexer
      SlotReader ◄── views ── slots (arena) ◄─── TicketWriter ◄── batch
      Supervisor ◄── EOF ────────── socket ──────►  `main`; exits when its socket closes
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._work import Runner
from cseq.indexing import context
from cseq.indexing.indexer import BatchTask, dispose
from cseq.processes.launcher.forks import in_forked_children
from cseq.stage import CONVERTER, run

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from cseq._work import BatchWriter
    from cseq.encoding.transport import Source
    from cseq.indexing.producer import ItemTask
    from cseq.processes.worker import Entered

__all__ = ["ENTRY", "convert", "main", "serve"]

ENTRY = "cseq.engine.worker:main"


def main(sock: socket.socket, local: object = None) -> None:
    """Run one worker process, which exits when the trainer closes the socket.

    `local` is the user's object if it was inherited by fork.
    """
    # Worker threads do not need these imports.
    from cseq.processes.worker import NOTED, enter, send_state

    entered = enter(sock)
    setup = entered.setup
    task: BatchTask | ItemTask = setup.task
    runner = Runner(entered.ring, task.stage, setup.owner, last=task.last)
    if isinstance(task, BatchTask) and task.stage == CONVERTER:
        _convert(task, runner, entered)
        return
    serve(
        task,
        runner,
        context.BatchContext(setup.worker, task.num_workers, task.seed),
        entered.writer,
        partial(entered.read_object, local),
        entered.starting(),
        lambda note: send_state(sock, NOTED, note.encode()),
        copied=True,
    )


def serve(
    task: BatchTask | ItemTask,
    runner: Runner,
    batch_context: context.BatchContext,
    writer: BatchWriter,
    read_object: Callable[[], Any],
    starting: AbstractContextManager[object],
    tell: Callable[[str], object],
    *,
    copied: bool,
    convert: Callable[[Any], object] | None = None,
) -> None:
    """Work on the tickets in a ring until the ring is closed for this worker.

    The indexer or producer is created in the context `starting`. `tell` is called with warnings,
    and `convert` with batches. If `copied`, this process has its own copy of the user's object
    and writes batches to slots.
    """
    context.enter(batch_context)
    with starting:
        worker, made = task.make(read_object, batch_context, copied=copied)
    if writer.room is not None:
        writer.room.allocate_in_slots()
        # In forked children, `cseq.empty` must fall back to `numpy.empty`.
        in_forked_children(partial(setattr, batch_context, "allocator", None))
    work = task.work(made, runner.ring, batch_context, writer, tell, convert)
    try:
        run(runner, work.work)
    finally:
        batch_context.clear_ticket()
        dispose(worker, made, copied=copied)


def _convert(task: BatchTask, runner: Runner, entered: Entered) -> None:
    with entered.starting():
        from cseq.converter.cuda import CudaConverter

        converter = CudaConverter(task.output)
    work = partial(convert, entered.writer, converter.export, entered.writer)
    run(runner, work, idle=converter.reap)
    converter.close()


def convert(
    source: Source, function: Callable[[Any], object], batch_writer: BatchWriter, runner: Runner
) -> None:
    """Apply `function` to a converter's batch and publish the result."""
    try:
        record = batch_writer.write(runner, function(source.fetch(runner)))
        batch_writer.publish(runner, record)
    except BaseException as error:  # noqa: BLE001 - it is raised in the loop
        batch_writer.fail(runner, error)
