"""For tests of training scripts: kill workers, wait for them, check an order.

::

    with manager.start() as batches:
        for number, batch in enumerate(batches):
            if number == 3:
                cseq.testing.kill(manager, 0)  # training goes on, with the same batches
            train(batch)

`running` is an object with worker processes: an `MPSequence` between `start` and `finish`, a
`cseq.stream.Streams`, a `cseq.DataLoader` or its iterator, RETURNN's ``MultiProcDataset`` or
torchdata's ``MultiProcessingReadingService`` of `cseq.adapters`. Workers are numbered as in
`worker_info`; converter processes have the numbers above these. The functions raise

TypeError
    `running` has no workers at all.
RuntimeError
    `running` is not running, belongs to the process that forked this one, or makes its batches in
    this process: by threads, or in test mode.
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

# Seconds between two checks of a state that nothing signals.
PAUSE = 0.001


def kill(running: Any, worker: int, number: int = KILL) -> int | None:
    """Send a worker process a signal.

    Parameters
    ----------
    running : MPSequence, Streams or an adapter
    worker : int
        As ``worker_info().number``.
    number : int
        The signal's number.

    Returns
    -------
    int or None
        The process id that got the signal; None while the worker is started or replaced.

    Raises
    ------
    ValueError
        There is no such worker.
    """
    supervisor = supervisor_of(running)
    owners = supervisor.shared.owners
    if not 0 <= worker < owners:
        raise ValueError(f"worker={worker} does not exist; give a number from 0 to {owners - 1}")
    child = supervisor.processes.get(worker)
    if child is None or child.ended.wait(0):
        return None
    child.send_signal(number)
    return child.pid


def pids(running: Any) -> list[int | None]:
    """Return the process ids of the workers, with None for a worker that has yet to start.

    A dead forked worker is replaced while the loop waits for a batch, or in `await_workers`.
    """
    return supervisor_of(running).pids()


def await_workers(running: Any, timeout: float = 60.0) -> None:
    """Wait until all workers are ready: their indexers are made.

    Raises
    ------
    TimeoutError
        Some are not ready after `timeout` seconds.
    Exception
        What the loop would raise: a worker cannot be made, or has died too often.
    """
    supervisor = supervisor_of(running)
    deadline = time.monotonic() + (seconds("timeout", timeout) or 0.0)
    while late := [
        worker
        for worker, runner_number in enumerate(supervisor.wanted())
        if not supervisor.is_ready(runner_number)
    ]:
        supervisor.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"workers {late} are not ready after {timeout:g} s")
        time.sleep(PAUSE)


def supervisor_of(running: Any) -> Supervisor:
    """Find the worker processes."""
    try:
        run: Run[Any] | None = running._run
    except AttributeError:
        raise TypeError(
            f"{type(running).__name__} has no workers; give an MPSequence, Streams, or the loader, "
            "dataset or reading service of an adapter"
        ) from None
    if run is None:
        raise RuntimeError(
            f"{type(running).__name__} is not running: call start(), or iter() of a loader"
        )
    if not run.is_ours:
        raise RuntimeError("the workers belong to the process that forked this one")
    supervisor: Supervisor | None = run.pool.supervisor
    if supervisor is None:
        raise RuntimeError(
            "the batches are made in this process, by threads or in test mode, so no worker can be "
            "killed; use MPSequence and start()"
        )
    if supervisor.closed:
        raise RuntimeError(f"{type(running).__name__} is not running: it was closed")
    return supervisor
