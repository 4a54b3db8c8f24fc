"""For tests of training scripts: kill workers, count what is held.

::

    with manager.start() as batches:
        for number, batch in enumerate(batches):
            if number == 3:
                cseq.testing.kill(manager, 0)  # training goes on, with the same batches
            train(batch)

`running` is an object with worker processes: an `MPSequence` between `start` and `finish`, a
`cseq.stream.Streams`, a `cseq.DataLoader` or its iterator, RETURNN's ``MultiProcDataset`` or
torchdata's ``MultiProcessingReadingService`` of `cseq.adapters`. Workers are numbered as in
`worker_info`; converter processes have the numbers from `num_workers` on. The functions raise

TypeError
    `running` has no workers at all.
RuntimeError
    `running` is not running, belongs to the process that forked this one, or makes its batches in
    this process: by threads, or in test mode.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq._memory import DEBUG, TRAINER
from cseq.check import count, seconds
from cseq.order.checking import check_order
from cseq.processes.launcher.base import KILL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.processes.supervisor import Supervisor
    from cseq.run import Run

__all__ = [
    "POINTS",
    "Slots",
    "await_workers",
    "check_order",
    "descriptors",
    "dying",
    "kill",
    "kill_agent",
    "pids",
    "ready",
    "resize",
    "slots",
]

POINTS = {
    "claim": "a ticket was claimed",
    "slice": "the indices of a ticket are about to be copied for the indexer",
    "index": "the indexer has returned",
    "encode": "a part of the batch is about to be copied into a slot",
    "taken": "the worker has taken a slot",
    "named": "the slot's number is in the batch's cell; the batch is not published",
    "publish": "the batch is about to be published",
    "published": "the batch is published; the trainer has not been woken",
    "notify": "a waiting process is about to be woken",
}
PAUSE = 0.001  # seconds between two checks of a state that nothing signals


class Slots(NamedTuple):
    """Slots of shared memory, at one moment.

    Attributes
    ----------
    total : int
        The sum of the next four.
    free : int
        Those that occupy memory.
    leased : int
        With data of batches that the loop holds (small batches are copied out), or that it held
        when a worker was forked which has not ended yet.
    taken : int
        With batches that wait for the loop, or with requests to workers.
    owned : int
        Of workers: with batches that are being made, and with arrays that an indexer keeps.
    committed : int
        Bytes of memory that all of them occupy, with their table.
    """

    total: int
    free: int
    leased: int
    taken: int
    owned: int
    committed: int


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
        The id of the process that it was sent to; None while the worker is started or replaced.

    Raises
    ------
    ValueError
        There is no such worker.
    """
    supervisor = _supervisor(running)
    owners = supervisor.shared.owners
    if not 0 <= worker < owners:
        raise ValueError(f"worker={worker} does not exist; give a number from 0 to {owners - 1}")
    return supervisor.kill(worker + 1, number)


def kill_agent(fleet: Any, agent: int, number: int | None = KILL) -> int:
    """Send an agent of a fleet, a worker process of Ray's, a signal.

    Parameters
    ----------
    fleet : RayFleet
    agent : int
        Its place in ``fleet.handles``.
    number : int or None
        The signal's number. None: end it as ``ray.kill`` does; Ray starts it again.

    Returns
    -------
    int
        The id of the process that it was sent to, on the agent's node.

    Raises
    ------
    IndexError
        There is no such agent.
    """
    import ray

    handle = fleet.handles[agent]
    pid: int = ray.get(fleet.ask(handle))[0]
    if number is None:
        ray.kill(handle, no_restart=False)
    else:
        handle.__ray_call__.remote(lambda _: os.kill(os.getpid(), number))
    return pid


def pids(running: Any) -> list[int | None]:
    """Return the process ids of the workers; None for one that is to be started.

    Where workers are forked, a dead one is replaced while the loop waits for a batch, or in
    `await_workers`.
    """
    return _supervisor(running).pids()


def ready(running: Any) -> list[bool]:
    """Tell which workers are ready: their indexers are made."""
    supervisor = _supervisor(running)
    return [supervisor.is_ready(owner) for owner in supervisor.wanted()]


def await_workers(running: Any, timeout: float = 60.0) -> None:
    """Wait until all workers are ready: their indexers are made.

    Raises
    ------
    TimeoutError
        Some are not ready after `timeout` seconds.
    Exception
        What the loop would raise: a worker cannot be made, or has died too often.
    """
    supervisor = _supervisor(running)
    deadline = time.monotonic() + (seconds("timeout", timeout) or 0.0)
    while not all(now := ready(running)):
        supervisor.check()
        if time.monotonic() > deadline:
            late = [worker for worker, is_ready in enumerate(now) if not is_ready]
            raise TimeoutError(f"workers {late} are not ready after {timeout:g} s")
        time.sleep(PAUSE)


def resize(manager: Any, num_workers: int | None = None, buffer: int | None = None) -> None:
    """Change how many workers a running `MPSequence` or `MTSequence` has, and its buffer.

    As 'auto' does, and at once: no result depends on either.

    Parameters
    ----------
    manager : MSequence
        In the thread that takes its batches.
    num_workers, buffer : int, optional
        At least 1, and at most what the manager was made with. None: as it is.
    """
    run: Run[Any] | None = manager._run
    if run is None or not run.is_ours:
        raise RuntimeError(f"{type(manager).__name__} is not running here: call start()")
    pool, job = run.pool, manager._job
    size = pool.size
    workers = size.num_workers if num_workers is None else num_workers
    ahead = size.buffer if buffer is None else buffer
    workers = count("num_workers", workers, most=job.num_workers)
    with run.lock.hold():
        pool.resize(workers, count("buffer", ahead, most=job.buffer))


def slots(running: Any) -> Slots:
    """Count the slots of shared memory."""
    shared = _supervisor(running).shared
    made = shared.arena.slots
    published = set().union(*(ring.slots() for ring in shared.rings))
    free = leased = taken = owned = committed = 0
    for slot, owner in enumerate(made.owners()):
        if slot == 0:  # that of the table
            continue
        nbytes = made.nbytes(slot)
        committed += nbytes
        if not owner:
            free += nbytes > 0
        elif made.is_leased(slot):
            leased += 1
        elif owner == TRAINER or slot in published:
            taken += 1
        else:
            owned += 1
    if os.name != "nt":  # no pages come back there
        committed = os.fstat(shared.arena.segment.fd).st_blocks * 512
    return Slots(free + leased + taken + owned, free, leased, taken, owned, committed)


def descriptors() -> int:
    """Count the open file descriptors of this process."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder)) - 1  # without the one that lists them
    raise OSError("this system does not list a process's file descriptors")


@contextlib.contextmanager
def dying(point: str, at: int, worker: int | None = None) -> Iterator[None]:
    """Make workers that are started in this context kill themselves, in a debug build.

    A worker dies as it passes `point` for the `at`-th time in its process, and so does its
    replacement: choose `at` larger than the passes of one batch (`WorkerDied` is raised for a batch
    that ends three workers), and a large `max_restarts`.

    Parameters
    ----------
    point : str
        One of `POINTS`.
    at : int
    worker : int, optional
        The number of the one that dies; None: every worker.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    RuntimeError
        This is no debug build (``CSEQ_DEBUG=1 pip install .`` makes one).
    """
    if point not in POINTS:
        raise ValueError(f"point={point!r} is unknown; give one of {', '.join(POINTS)}")
    fault = f"{point}:{count('at', at)}"
    if worker is not None:
        fault += f":{count('worker', worker, least=0)}"
    if not DEBUG:
        raise RuntimeError(
            "workers die at a point only in a debug build of cseq: CSEQ_DEBUG=1 pip install ."
        )
    before = os.environ.get("CSEQ_FAULT")
    os.environ["CSEQ_FAULT"] = fault
    try:
        yield
    finally:
        del os.environ["CSEQ_FAULT"]
        if before is not None:
            os.environ["CSEQ_FAULT"] = before


def _supervisor(running: Any) -> Supervisor:
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
