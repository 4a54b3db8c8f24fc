"""The training loop's position in an epoch, counted in units that ranks consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from cseq.order.tally import Tally

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler


class Progress(Protocol):
    """The training loop's progress in an epoch, as reported by a `Feed`."""

    @property
    def taken(self) -> int:
        """The number of batches, or exceptions raised instead, that the loop has received."""

    @property
    def ended(self) -> bool:
        """Whether the loop has been notified that no more batches follow."""

    @property
    def position(self) -> int:
        """The number of units that all ranks consumed or skipped since the first epoch's start."""


class Last(NamedTuple):
    """The final progress of a feed whose pool was closed. The default values mean no progress."""

    taken: int = 0
    ended: bool = False
    position: int = 0


class Now(NamedTuple):
    """The current epoch, how many of its units all ranks have consumed, and whether it is over."""

    epoch: int
    position: int
    is_over: bool


class Place:
    """An iterator's starting point and the training loop's progress from there.

    An iterator covers one epoch or several consecutive ones.

    Attributes
    ----------
    first : int
        The epoch in which the iterator starts.
    consumed : int
        The number of units in the first epoch that all ranks consumed before the iterator started.
    progress : Progress
        The progress of the feed, once the feed has started this epoch.
    again : bool
        Whether the next iterator restarts the current epoch if the epoch is not over by then.
    tally : Tally
        The number of tokens that the run has consumed.
    """

    __slots__ = ("again", "consumed", "first", "progress", "tally")

    def __init__(self, epoch: int = 0, consumed: int = 0, tally: Tally | None = None) -> None:
        self.first = epoch
        self.consumed = consumed
        self.progress: Progress = Last()
        self.again = False
        self.tally = tally or Tally()

    def is_at(self, epoch: int, consumed: int) -> bool:
        """Return True if the iterator starts at this position."""
        return (self.first, self.consumed) == (epoch, consumed)

    @property
    def begun(self) -> bool:
        """Whether the loop has received a batch or an exception, or has reached the end."""
        return self.progress.ended or self.progress.taken > 0

    def now(self, sampler: Sampler) -> Now:
        """Return the current epoch and progress. Other threads may consume batches concurrently."""
        if not self.begun:
            return Now(self.first, self.consumed, is_over=False)
        ended, position = self.progress.ended, self.progress.position
        epoch, last = self.first, sampler.end(self.consumed)
        if position > last:
            later, position = divmod(position - last - 1, sampler.end())
            epoch, position, last = epoch + 1 + later, position + 1, sampler.end()
        return Now(epoch, position, ended or position == last)

    def keep(self) -> None:
        """Save the progress before the pool is closed."""
        last = self.progress
        self.progress = Last(last.taken, last.ended, last.position)

    def next(self, sampler: Sampler) -> Place:
        """Return the place where the next iterator starts."""
        if not self.begun:
            return Place(self.first, self.consumed, self.tally)
        epoch, _, is_over = self.now(sampler)
        return self.moved(sampler, epoch if self.again and not is_over else epoch + 1)

    def moved(self, sampler: Sampler, epoch: int) -> Place:
        """Return the place at the start of another epoch."""
        return Place(
            epoch, 0, self.tally.leave(sampler, (self.first, self.consumed), self.now(sampler)[:2])
        )

    def count_tokens(self, sampler: Sampler, now: Now) -> dict[str, int]:
        """Return the tokens that the run has consumed from each source, or {} if unknown."""
        if sampler.data is not None:
            self.tally = self.tally.counted(sampler, (self.first, self.consumed), now[:2])
        return dict(self.tally.counts)
