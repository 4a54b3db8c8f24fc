"""The loop that every runner runs: claim, work, publish.

A runner is a thread or a process; its end of the ring is a `Runner`. Its *work* is what it does
with a ticket, up to publishing the batch: in a slot of shared memory between processes, as the
object itself between threads.
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
# What a published ticket holds: a batch, or bits that say that there is an exception, and that no
# more follow in this queue.
BATCH, RAISED, ENDED = 0, 1, 2

# An idle runner wakes up once a second.
IDLE_NS = 1_000_000_000
# A sleep and its wake-up cost about SPIN_NS, two handovers of the GIL by sleeping GIL_SPIN_NS.
# LONG_SPIN_NS are for a core that would be idle otherwise.
SPIN_NS = 20_000
GIL_SPIN_NS = 50_000
LONG_SPIN_NS = 200_000

# Seconds that a busy runner gets once nothing waits for its batch.
HURRY = 0.5
# A worker may take this many times `timeout` to get ready.
START_SHARE = 10


def overdue(
    working: Iterable[tuple[int, int, str]], starting: Iterable[tuple[int, int]], timeout: float
) -> Iterator[tuple[int, str]]:
    """Find the runners that take too long; yield their numbers, with what took how long.

    Parameters
    ----------
    working : iterable
        Runners' numbers, since when they work (ns of `now_ns`), and on what.
    starting : iterable
        Numbers of runners whose worker the user's code makes ready, and since when.
    timeout : float
        Seconds.
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
    """Return for how many ns runners and trainer spin before they sleep.

    If they outnumber the cores, this is the shortest time of any use: a spinning party would keep
    another one from its work. On one core, nobody spins.
    """
    if cores() == 1:
        return 0
    return GIL_SPIN_NS if turns else SPIN_NS if runners >= cores() else LONG_SPIN_NS


def run(
    runner: Runner, work: Callable[[Runner], object], *, idle: Callable[[], None] | None = None
) -> None:
    """Do `work` on every ticket that can be claimed, until the ring is closed.

    `work` publishes the ticket, even after an exception of the user's code; an exception of `work`
    itself is a bug of cseq and ends the runner. `idle` is called whenever no ticket has come for
    ``runner.park`` nanoseconds.
    """
    if idle is None:
        runner.park = IDLE_NS
    for claimed in runner:
        if claimed:
            work(runner)
        elif idle is not None:
            idle()
