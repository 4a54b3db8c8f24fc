"""The loop that every runner runs: claim, work, publish.

A runner is a thread or a process; its end of the ring is a `Runner`. Its *work* is what it does
with a ticket, up to publishing the batch: in a slot of shared memory between processes, or as the
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

INDEXER, CONVERTER = 0, 1  # the stages
# What a published ticket holds: a batch; or bits: an exception; no more follow in this queue.
BATCH, RAISED, ENDED = 0, 1, 2

IDLE_NS = 1_000_000_000  # an idle runner wakes up once a second
SPIN_NS = 20_000  # about the cost of a sleep and its wake-up
GIL_SPIN_NS = 50_000  # what two handovers of the GIL by sleeping cost
LONG_SPIN_NS = 200_000  # where a core would be idle meanwhile

HURRY = 0.5  # seconds that a busy runner gets where nothing waits for its batch any more
START_SHARE = 10  # times `timeout` that a worker may take to get ready


def overdue(
    working: Iterable[tuple[int, int, str]], starting: Iterable[tuple[int, int]], timeout: float
) -> Iterator[tuple[int, str]]:
    """Find the runners that take too long: the owner, and a text that says how long and for what.

    Parameters
    ----------
    working : iterable
        Owners, since when they work (ns of `now_ns`), and on what.
    starting : iterable
        Owners in which the user's code makes the worker ready, and since when.
    timeout : float
        Seconds.
    """
    for owner, since, place in working:
        seconds = (now_ns() - since) / 1e9
        if seconds > timeout:
            yield owner, f"{place} has taken {seconds:.1f} s, timeout={timeout} s"
    for owner, since in starting:
        seconds = (now_ns() - since) / 1e9
        if seconds > START_SHARE * timeout:
            took = f"worker {owner - 1} has been starting for {seconds:.1f} s"
            yield owner, f"{took}, which is more than {START_SHARE} times timeout={timeout} s"


def spin_ns(runners: int, *, turns: bool = False) -> int:
    """Return for how many ns runners and trainer spin before they sleep.

    Where they are more than there are cores, no longer than the shortest time that is of use: one
    that spins would keep another one from its work. On one core, not at all.
    """
    if cores() == 1:
        return 0
    return GIL_SPIN_NS if turns else SPIN_NS if runners >= cores() else LONG_SPIN_NS


def run(
    runner: Runner, work: Callable[[Runner], object], *, idle: Callable[[], None] | None = None
) -> None:
    """Do `work` on every ticket that can be claimed, until the ring is closed.

    `work` publishes the ticket, also after an exception of the user's code; an exception of `work`
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
