"""The base of the tickets that a pool and its crew serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from cseq.encoding import failure

if TYPE_CHECKING:
    from cseq.converter.output import Output
    from cseq.indexing.indexer import BatchTask
    from cseq.indexing.leaving import Skipped
    from cseq.indexing.producer import ItemTask
    from cseq.options import WorkerOptions
    from cseq.order.sampler import Sampler
    from cseq.processes.deaths import Deaths, Held

    # Samples, and the texts of their errors.
    Left = tuple[tuple[object, str], ...]
    # Ring number and cell of tickets.
    Awaited = list[tuple[int, int]]
    # Runner number, since when it works (ns of `now_ns`), and its ticket's location.
    Working = list[tuple[int, int, str]]

__all__ = ["Tickets"]


class Tickets:
    """The tickets of a pool: the shape of its rings, and how messages name a ticket.

    Attributes
    ----------
    pool : Pool
        Set by the pool.
    num_workers, num_converters : int
        The maximum of each.
    rings, runners, cells, words, limit, calls : int
        The number of rings, and of runners of each; for the others, see `Ring`.
    ahead : int
        Slots that workers may fill before the loop takes one.
    errors, interrupted : str
        See `Feed`.
    instead : str
        The remedy in a thread's WorkerTimeout.
    """

    pool: Any
    options: WorkerOptions
    num_workers: int
    num_converters = 0
    rings: int
    cells: int
    words: int
    limit = 0
    calls = 0
    runners: int
    ahead: int
    errors: Literal["raise", "skip", "return"]
    interrupted: str
    instead: str
    output: Output | None = None
    converts_in_processes = False

    @property
    def sampler(self) -> Sampler | None:
        """The sampler of batches, or None."""
        return None

    def task(self, runner_number: int, *, forks: bool) -> BatchTask | ItemTask:
        """Return a worker's task, for a process if `forks`. Thread-safe."""
        raise NotImplementedError

    def deaths(self) -> Deaths:
        """Make the counter of deaths, which decides whether a worker is replaced."""
        raise NotImplementedError

    def held(self, ring_number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe a cell's ticket, listing at most `most` indices. Thread-safe."""
        raise NotImplementedError

    def describe(self, ring_number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Name the ticket in an exception; see `Feed`."""
        raise NotImplementedError

    def list_left(self, ring_number: int, cell: int, left: Left) -> list[Skipped]:
        """Note the samples that a batch lacks; see `Feed`."""
        raise NotImplementedError

    def working(self, awaited: Awaited | None) -> Working:
        """List work on the awaited tickets, or on those that the feed waits for."""
        raise NotImplementedError

    def note_wait(self) -> None:
        """Note that the loop begins to wait."""

    def open(self) -> None:
        """Start the crew. If this is interrupted, `Pool.close` ends it."""

    def close(self) -> None:
        """Drop the user's object, because a pool is in a reference cycle."""
