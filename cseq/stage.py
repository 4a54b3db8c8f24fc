"""The loop that every runner executes: claim, work, publish.

A runner is a thread or a process, and a `Runner` is its side of the ring. Its *work* processes a
ticket and publishes the batch. Processes publish in a shared-memory slot. Threads pass the object
itself.
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
# The contents of a published ticket: a batch, or flags for an exception and for the last ticket of
# this queue.
BATCH, RAISED, ENDED = 0, 1, 2

# An idle runner wakes up once a second.
IDLE_NS = 1_000_000_000
# A sleep and its wake-up cost about SPIN_NS. Two GIL handovers with a sleep cost GIL_SPIN_NS.
# LONG_SPIN_NS is for a core that would otherwise be idle.
SPIN_NS = 20_000
GIL_SPIN_NS = 50_000
LONG_SPIN_NS = 200_000

# The number of seconds that a busy runner may continue once its batch is no longer needed.
HURRY = 0.5
# A worker may take this many times `timeout` to start.
START_SHARE = 10


def overdue(
    working: Iterable[tuple[int, int, str]], starting: Iterable[tuple[int, int]], timeout: float
) -> Iterator[tuple[int, str]]:
    """Yield the number of each runner that takes too long, and a description of the delay.

    Parameters
    ----------
    working : iterable
        Each busy runner's number, start time (ns of `now_ns`) and task.
    starting : iterable
        The number and start time of each runner whose worker is still being created by user code.
    timeout : float
        The limit in seconds.
    """
    for runner_number, since, task in working:
        seconds = (now_ns() - since) / 1e9
        if seconds > timeout:
            yield runner_number, f"{task} has taken {seconds:.1f} s, timeout={timeout} s"
    for runner_number, since in starting:
        seconds = (now_ns() - since) / 1e9
        if seconds > START_SHARE * timeout:
            took = (
                f"worker {runner_number - 1} has been starting for {seconds:.1f} s, which is more"
            )
            yield runner_number, f"{took} than {START_SHARE} times timeout={timeout} s"


def spin_ns(runners: int, *, turns: bool = False) -> int:
    """Return how long runners and the trainer spin before they sleep, in nanoseconds.

    If the runners and the trainer outnumber the cores, the time is as short as is useful, because
    spinning would occupy a core that another runner needs. On a single core, the time is 0.
    """
    if cores() == 1:
        return 0
    return GIL_SPIN_NS if turns else SPIN_NS if runners >= cores() else LONG_SPIN_NS


def run(
    runner: Runner, work: Callable[[Runner], object], *, idle: Callable[[], None] | None = None
) -> None:
    """Run `work` on every claimed ticket until the ring is closed.

    `work` publishes the ticket even after an exception in user code. An exception in `work` itself
    is a bug in cseq and ends the runner. `idle` is called whenever no ticket has arrived for
    ``runner.park`` nanoseconds.
    """
    if idle is None:
        runner.park = IDLE_NS
    for claimed in runner:
        if claimed:
            work(runner)
        elif idle is not None:
            idle()
