"""The base class for the tickets that a pool and its crew process."""

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

    # Samples and their error texts.
    Left = tuple[tuple[object, str], ...]
    # The ring number and cell of each ticket.
    Awaited = list[tuple[int, int]]
    # The runner number, start time (`now_ns`) and ticket location of each piece of work.
    Working = list[tuple[int, int, str]]

__all__ = ["Tickets"]


class Tickets:
    """A pool's tickets, which define the ring layout and name themselves in messages.

    Attributes
    ----------
    pool : Pool
        Set by the pool.
    num_workers, num_converters : int
        The maximum numbers of workers and converters.
    rings, runners, cells, words, limit, calls : int
        The numbers of rings and of runners per ring. For the other attributes, see `Ring`.
    ahead : int
        The number of slots that workers may fill before the loop consumes one.
    errors, interrupted : str
        See `Feed`.
    instead : str
        The remedy shown when a thread causes a WorkerTimeout.
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
        """The batch sampler, or None."""
        return None

    def task(self, runner_number: int, *, forks: bool) -> BatchTask | ItemTask:
        """Return a worker's task, for a process if `forks`. Thread-safe."""
        raise NotImplementedError

    def deaths(self) -> Deaths:
        """Create the death counter, which decides whether a worker is replaced."""
        raise NotImplementedError

    def held(self, ring_number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the ticket in a cell, listing up to `most` indices. Thread-safe."""
        raise NotImplementedError

    def describe(self, ring_number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Name the ticket in an exception; see `Feed`."""
        raise NotImplementedError

    def list_left(self, ring_number: int, cell: int, left: Left) -> list[Skipped]:
        """Record the samples missing from a batch; see `Feed`."""
        raise NotImplementedError

    def working(self, awaited: Awaited | None) -> Working:
        """List the work on `awaited` tickets, or by default on those the feed waits for."""
        raise NotImplementedError

    def note_wait(self) -> None:
        """Record that the loop has started waiting."""

    def open(self) -> None:
        """Start the crew. If this call is interrupted, `Pool.close` stops the crew."""

    def close(self) -> None:
        """Drop the user's object, because the pool is part of a reference cycle."""
