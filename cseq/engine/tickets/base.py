"""Base class for tickets."""

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

    # Pairs of a sample and an error text.
    Left = tuple[tuple[object, str], ...]
    # Ring number and cell.
    Awaited = list[tuple[int, int]]
    # Runner number, start time (`now_ns`) and description.
    Working = list[tuple[int, int, str]]

__all__ = ["Tickets"]


class Tickets:
    """The work requested from a pool's workers.

    Attributes
    ----------
    pool : Pool
        Set by the pool.
    num_workers, num_converters : int
        The maximum number of workers and converters.
    rings, runners, cells, words, limit, calls : int
        The number of rings, and arguments for each `Ring`, such as its number of runners.
    ahead : int
        The number of slots that workers may fill before the loop consumes anything.
    errors, interrupted : str
        See `Feed`.
    instead : str
        Text about slow threads for a WorkerTimeout message.
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
        """Return a runner's task. `forks` is False for worker threads. Thread-safe."""
        raise NotImplementedError

    def deaths(self) -> Deaths:
        """Create the `Deaths` that decides whether a dead worker is replaced."""
        raise NotImplementedError

    def held(self, ring_number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the ticket in a cell, with at most `most` indices. Thread-safe."""
        raise NotImplementedError

    def describe(self, ring_number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Add the ticket's details to an exception; see `Feed`."""
        raise NotImplementedError

    def list_left(self, ring_number: int, cell: int, left: Left) -> list[Skipped]:
        """Record the samples missing from a batch; see `Feed`."""
        raise NotImplementedError

    def working(self, awaited: Awaited | None) -> Working:
        """Describe the work in progress on the awaited tickets (by default, the feed's)."""
        raise NotImplementedError

    def note_wait(self) -> None:
        """Record that the loop has started to wait."""

    def open(self) -> None:
        """Start the crew. If this call is interrupted, `Pool.close` stops it."""

    def close(self) -> None:
        """Drop the reference to the user's object, because the pool is in a reference cycle."""
