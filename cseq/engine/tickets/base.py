"""The base class for tickets, which describe the work of a pool."""

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

    # Pairs of samples and error texts.
    Left = tuple[tuple[object, str], ...]
    # The ring number and the cell of each ticket.
    Awaited = list[tuple[int, int]]
    # The runner number, the start time (`now_ns`) and a description of each ticket in progress.
    Working = list[tuple[int, int, str]]

__all__ = ["Tickets"]


class Tickets:
    """The tickets of a pool. They determine the layout of rings and are described in messages.

    Attributes
    ----------
    pool : Pool
        The pool, which sets this attribute.
    num_workers, num_converters : int
        The maximum number of workers and converters.
    rings, runners, cells, words, limit, calls : int
        The number of rings, the number of runners per ring, and arguments of `Ring`.
    ahead : int
        The number of slots that workers may fill before the loop consumes a batch or item.
    errors, interrupted : str
        See `Feed`.
    instead : str
        What to do if a thread causes a WorkerTimeout, for the message.
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
        """Return the task of a runner, which is a process if `forks` is set. Thread-safe."""
        raise NotImplementedError

    def deaths(self) -> Deaths:
        """Create a counter for deaths, which decides whether to replace a worker."""
        raise NotImplementedError

    def held(self, ring_number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the ticket in a cell, with at most `most` indices. Thread-safe."""
        raise NotImplementedError

    def describe(self, ring_number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Add a description of the ticket to an exception; see `Feed`."""
        raise NotImplementedError

    def list_left(self, ring_number: int, cell: int, left: Left) -> list[Skipped]:
        """Record the samples that are missing from a batch; see `Feed`."""
        raise NotImplementedError

    def working(self, awaited: Awaited | None) -> Working:
        """List the work on awaited tickets. `awaited` defaults to the tickets in the feed."""
        raise NotImplementedError

    def note_wait(self) -> None:
        """Record that the loop starts waiting."""

    def open(self) -> None:
        """Start the crew. If this is interrupted, `Pool.close` stops the crew."""

    def close(self) -> None:
        """Drop the reference to the user's object, because the pool is in a reference cycle."""
