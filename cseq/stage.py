"""A runner's loop: claim a ticket, work, publish.

Processes publish batches in shared-memory slots. Threads pass the objects themselves.
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
# A ticket's status: 0 for a batch, or flags if an exception was raised or the items ended.
BATCH, RAISED, ENDED = 0, 1, 2

# How long an idle runner sleeps before it wakes up to check the ring.
IDLE_NS = 1_000_000_000
# How long to spin. SPIN_NS is roughly the cost of a sleep, and GIL_SPIN_NS adds two GIL handovers.
# LONG_SPIN_NS is used if there are cores to spare.
SPIN_NS = 20_000
GIL_SPIN_NS = 50_000
LONG_SPIN_NS = 200_000

# How long a busy runner may continue after its batch is no longer needed, in seconds.
HURRY = 0.5
# The time limit for starting a worker, as a multiple of `timeout`.
START_SHARE = 10


def overdue(
    working: Iterable[tuple[int, int, str]], starting: Iterable[tuple[int, int]], timeout: float
) -> Iterator[tuple[int, str]]:
    """Yield the number of each overdue runner, with text for the error message.

    Parameters
    ----------
    working : iterable
        The number, start time (ns of `now_ns`) and task of each busy runner.
    starting : iterable
        The number and start time of each runner that is still starting.
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
    """Return how long to spin, in ns: briefly if cores are scarce, not at all on a single core."""
    if cores() == 1:
        return 0
    return GIL_SPIN_NS if turns else SPIN_NS if runners >= cores() else LONG_SPIN_NS


def run(
    runner: Runner, work: Callable[[Runner], object], *, idle: Callable[[], None] | None = None
) -> None:
    """Call `work` for every claimed ticket until the ring is closed.

    `work` must publish exceptions from user code. Any exception that it raises is a bug in cseq and
    ends the runner. `idle` is called whenever no ticket arrives for ``runner.park`` nanoseconds.
    """
    if idle is None:
        runner.park = IDLE_NS
    for claimed in runner:
        if claimed:
            work(runner)
        elif idle is not None:
            idle()
