"""The training loop's position: an epoch and the number of consumed units."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from cseq.order.tally import Tally

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler


class Progress(Protocol):
    """The training loop's progress in an epoch, as reported by a `Feed`."""

    @property
    def taken(self) -> int:
        """The number of batches and exceptions that the loop has received."""

    @property
    def ended(self) -> bool:
        """Whether the loop has reached the end of the iterator."""

    @property
    def position(self) -> int:
        """The number of units that all ranks consumed or skipped since the first epoch started."""


class Last(NamedTuple):
    """The final progress of a closed feed. The defaults mean no progress."""

    taken: int = 0
    ended: bool = False
    position: int = 0


class Now(NamedTuple):
    """The epoch, the number of units that all ranks have consumed in it, and whether it is over."""

    epoch: int
    position: int
    is_over: bool


class Place:
    """Where an iterator started, and the training loop's progress since then.

    Attributes
    ----------
    first : int
        The epoch in which the iterator starts.
    consumed : int
        The number of units in this epoch that all ranks consumed before the iterator started.
    progress : Progress
        The feed's progress, or `Last()` until the feed starts the epoch.
    again : bool
        Whether the next iterator restarts an unfinished epoch.
    tally : Tally
        The number of tokens that the run has consumed from each source.
    """

    __slots__ = ("again", "consumed", "first", "progress", "tally")

    def __init__(self, epoch: int = 0, consumed: int = 0, tally: Tally | None = None) -> None:
        self.first = epoch
        self.consumed = consumed
        self.progress: Progress = Last()
        self.again = False
        self.tally = tally or Tally()

    def is_at(self, epoch: int, consumed: int) -> bool:
        return (self.first, self.consumed) == (epoch, consumed)

    @property
    def begun(self) -> bool:
        """Whether the loop has received anything or reached the end."""
        return self.progress.ended or self.progress.taken > 0

    def now(self, sampler: Sampler) -> Now:
        """Return the current position. Other threads may consume batches during this call."""
        if not self.begun:
            return Now(self.first, self.consumed, is_over=False)
        ended, position = self.progress.ended, self.progress.position
        epoch, last = self.first, sampler.end(self.consumed)
        if position > last:
            later, position = divmod(position - last - 1, sampler.end())
            epoch, position, last = epoch + 1 + later, position + 1, sampler.end()
        return Now(epoch, position, ended or position == last)

    def keep(self) -> None:
        """Save the progress before the pool closes."""
        last = self.progress
        self.progress = Last(last.taken, last.ended, last.position)

    def next(self, sampler: Sampler) -> Place:
        if not self.begun:
            return Place(self.first, self.consumed, self.tally)
        epoch, _, is_over = self.now(sampler)
        return self.moved(sampler, epoch if self.again and not is_over else epoch + 1)

    def moved(self, sampler: Sampler, epoch: int) -> Place:
        return Place(
            epoch, 0, self.tally.leave(sampler, (self.first, self.consumed), self.now(sampler)[:2])
        )

    def count_tokens(self, sampler: Sampler, now: Now) -> dict[str, int]:
        """Return the number of tokens consumed from each source, or {} if unknown."""
        if sampler.data is not None:
            self.tally = self.tally.counted(sampler, (self.first, self.consumed), now[:2])
        return dict(self.tally.counts)
