"""The loop that every runner executes: claim, work, publish.

A runner is a thread or a process that uses a `Runner` to access the ring. Its *work* processes a
ticket and publishes the batch. Processes publish batches in shared-memory slots. Threads pass the
objects themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cseq._core import now_ns
from cseq.system import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cseq._work import Runner

__all__ = [
    "BATCH",
    "CONVERTER",
    "ENDED",
    "HURRY",
    "INDEXER",
    "RAISED",
    "overdue",
    "run",
    "spin_ns",
]

# The stages of a ticket.
INDEXER, CONVERTER = 0, 1
# The status of a published ticket: a batch, or flags for an exception and for the end of the queue.
BATCH, RAISED, ENDED = 0, 1, 2

# An idle runner wakes up once a second.
IDLE_NS = 1_000_000_000
# Sleeping and waking up takes about SPIN_NS. Two GIL handovers and a sleep take about GIL_SPIN_NS.
# LONG_SPIN_NS is used if the core would be idle otherwise.
SPIN_NS = 20_000
GIL_SPIN_NS = 50_000
LONG_SPIN_NS = 200_000

# The number of seconds that a busy runner can continue when its batch is no longer needed.
HURRY = 0.5
# A worker can take this many times `timeout` to start.
START_SHARE = 10


def overdue(
    working: Iterable[tuple[int, int, str]], starting: Iterable[tuple[int, int]], timeout: float
) -> Iterator[tuple[int, str]]:
    """Yield the number of each runner that exceeds a time limit, and a description of the delay.

    Parameters
    ----------
    working : iterable
        The number, start time (ns of `now_ns`) and task of each busy runner.
    starting : iterable
        The number and start time of each runner for which user code is still creating the worker.
    timeout : float
        The limit in seconds.
    """
    for runner_number, since, task in working:
        seconds = (now_ns() - since) / 1e9
        if seconds > timeout:
            yield runner_number, f"{task} has taken {seconds:.1f} s (timeout={timeout} s)"
    for runner_number, since in starting:
        seconds = (now_ns() - since) / 1e9
        if seconds > START_SHARE * timeout:
            took = (
                f"worker {runner_number - 1} has been starting for {seconds:.1f} s, which is more"
            )
            yield runner_number, f"{took} than {START_SHARE} times timeout={timeout} s"


def spin_ns(runners: int, *, turns: bool = False) -> int:
    """Return the time in nanoseconds that runners and the trainer spin before they sleep.

    If the runners and the trainer outnumber the cores, the time is short, because spinning would
    occupy a core that another runner needs. On a single core, the time is 0.
    """
    if cores() == 1:
        return 0
    return GIL_SPIN_NS if turns else SPIN_NS if runners >= cores() else LONG_SPIN_NS


def run(
    runner: Runner, work: Callable[[Runner], object], *, idle: Callable[[], None] | None = None
) -> None:
    """Call `work` for every claimed ticket until the ring is closed.

    `work` publishes the ticket even if user code raises an exception. An exception in `work` itself
    is a bug in cseq and ends the runner. `idle` is called each time the runner has waited
    ``runner.park`` nanoseconds without a ticket.
    """
    if idle is None:
        runner.park = IDLE_NS
    for claimed in runner:
        if claimed:
            work(runner)
        elif idle is not None:
            idle()
