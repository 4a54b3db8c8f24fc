"""What a pool and its crew ask of the tickets that they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from cseq.encoding import failure

if TYPE_CHECKING:
    from cseq.converter.output import Output
    from cseq.options import WorkerOptions
    from cseq.order.sampler import Sampler
    from cseq.processes.deaths import Deaths, Held

    Awaited = list[tuple[int, int]]  # ring and cell of tickets
    Working = list[tuple[int, int, str]]  # runner_number, since when (ns of `now_ns`), on what

__all__ = ["Tickets"]


class Tickets:
    """The tickets of a pool: the shape of its rings, and what messages say of them.

    Attributes
    ----------
    pool : Pool
        It sets this.
    options : WorkerOptions
    num_workers, num_converters : int
        The most there may be, of each.
    rings, cells, words, limit, calls : int
        How many rings, and see `Ring`.
    runners : int
        Of each ring.
    ahead : int
        Slots that workers may fill before the loop takes one.
    errors, interrupted : str
        See `Feed`.
    instead : str
        What a WorkerTimeout of a thread adds.
    output : Output or None
        What batches become.
    converts_in_processes : bool
        Converters are processes.
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
        """Of batches."""
        return None

    def task(self, runner_number: int, *, forks: bool) -> Any:
        """Return what a worker is to do; `forks`: in a process. On any thread."""
        raise NotImplementedError

    def deaths(self) -> Deaths:
        """Make what decides on workers that die."""
        raise NotImplementedError

    def held(self, number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the ticket in a cell of a ring, with at most so many indices; on any thread."""
        raise NotImplementedError

    def describe(self, number: int, cell: int, error: Any) -> tuple[Any, Any]:
        """Name the ticket in an exception; see `Feed`."""
        raise NotImplementedError

    def list_left(self, number: int, cell: int, left: tuple[tuple[Any, str], ...]) -> list[Any]:
        """Note the samples that a batch lacks; see `Feed`."""
        raise NotImplementedError

    def working(self, awaited: Awaited | None) -> Working:
        """List what workers work on, of these tickets, or of those that the feed waits for."""
        raise NotImplementedError

    def note_wait(self) -> None:
        """Note that the loop begins to wait."""

    def open(self) -> None:
        """Start the crew. If this raises, or a signal handler does, `Pool.close` ends it."""

    def close(self) -> None:
        """Forget the user's object: a pool is part of a cycle."""
