"""Helpers for tests of training scripts: kill and await workers, check an order.

::

    with manager.start() as batches:
        for number, batch in enumerate(batches):
            if number == 3:
                cseq.testing.kill(manager, 0)  # training continues with the same batches
            train(batch)

The `running` argument is an object that has worker processes: an `MPSequence` between `start` and
`finish`, a `cseq.stream.Streams`, a `cseq.DataLoader` or its iterator, or one of the classes in
`cseq.adapters` for RETURNN (``MultiProcDataset``) or torchdata (``MultiProcessingReadingService``).
Workers have the same numbers as in `worker_info`. Converter processes have higher numbers. These
functions raise

TypeError
    If `running` has no workers.
RuntimeError
    If `running` is not running, belongs to a parent process that forked this one, or makes batches
    in this process (with threads or in test mode).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cseq.check import seconds
from cseq.order.checking import check_order
from cseq.processes.launcher.base import KILL

if TYPE_CHECKING:
    from cseq.processes.supervisor import Supervisor
    from cseq.runs import Run

__all__ = ["await_workers", "check_order", "kill", "pids"]

# Polling interval in seconds.
PAUSE = 0.001


def kill(running: Any, worker: int, number: int = KILL) -> int | None:
    """Send a signal to a worker process.

    Parameters
    ----------
    running : MPSequence, Streams or an adapter
    worker : int
        The number of the worker, as in ``worker_info().number``.
    number : int
        The signal number.

    Returns
    -------
    int or None
        The id of the process that received the signal, or None if the worker is being started or
        replaced.

    Raises
    ------
    ValueError
        If no worker has this number.
    """
    supervisor = supervisor_of(running)
    owners = supervisor.shared.owners
    if not 0 <= worker < owners:
        raise ValueError(f"worker={worker} does not exist; pass a number from 0 to {owners - 1}")
    child = supervisor.processes.get(worker)
    if child is None or child.ended.wait(0):
        return None
    child.send_signal(number)
    return child.pid


def pids(running: Any) -> list[int | None]:
    """Return the process ids of the workers, with None for a worker that has not started yet.

    Dead forked workers are replaced while the loop is waiting, or by `await_workers`.
    """
    return supervisor_of(running).pids()


def await_workers(running: Any, timeout: float | None = 60.0) -> None:
    """Wait until all workers are ready and have created their indexers.

    Raises
    ------
    TimeoutError
        If some workers are not ready after `timeout` seconds. With None, there is no limit.
    Exception
        If a worker cannot be created or has died too often. The loop would raise the same
        exception.
    """
    supervisor = supervisor_of(running)
    limit = seconds("timeout", timeout)
    start = time.monotonic()
    while late := [
        worker
        for worker, runner_number in enumerate(supervisor.wanted())
        if not supervisor.is_ready(runner_number)
    ]:
        supervisor.check()
        if limit is not None and time.monotonic() > start + limit:
            raise TimeoutError(f"workers {late} are not ready after {limit:g} s")
        time.sleep(PAUSE)


def supervisor_of(running: Any) -> Supervisor:
    """Return the supervisor of the worker processes."""
    try:
        run: Run[Any] | None = running._run
    except AttributeError:
        raise TypeError(
            f"{type(running).__name__} has no workers; pass an MPSequence, Streams, or an "
            "adapter's loader, dataset or reading service"
        ) from None
    if run is None:
        raise RuntimeError(
            f"{type(running).__name__} is not running; call start(), or iter() on a loader"
        )
    if not run.is_ours:
        raise RuntimeError("the workers belong to the process that forked this one")
    supervisor: Supervisor | None = run.pool.supervisor
    if supervisor is None:
        raise RuntimeError(
            "the batches are made in this process, by threads or in test mode, so there are no "
            "worker processes; use MPSequence and start()"
        )
    if supervisor.closed:
        raise RuntimeError(f"{type(running).__name__} is not running: it was closed")
    return supervisor
