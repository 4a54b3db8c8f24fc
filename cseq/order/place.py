"""Where the loop is: an epoch, and how many of its units all ranks have had."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from cseq.order.tally import Tally

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler


class Progress(Protocol):
    """How far the loop is in an epoch, as a `Feed` reports it."""

    @property
    def taken(self) -> int:
        """Batches, and exceptions instead of batches, that the loop has had."""

    @property
    def ended(self) -> bool:
        """Whether the loop knows that no more come."""

    @property
    def position(self) -> int:
        """Units since the first epoch's beginning that all ranks have had, or left out."""


class Last(NamedTuple):
    """The last progress of a feed whose pool was closed; at first, none."""

    taken: int = 0
    ended: bool = False
    position: int = 0


class Now(NamedTuple):
    """Where the loop is: the epoch, its units that all ranks have had, whether these are all."""

    epoch: int
    position: int
    is_over: bool


class Place:
    """Where an iterator begins, and how far the loop is from there.

    An iterator goes over one epoch, or some in a row.

    Attributes
    ----------
    first : int
        The epoch that it begins in.
    consumed : int
        Units of that one that all ranks together have had before the iterator's first.
    progress : Progress
        The feed, once it has begun this epoch.
    again : bool
        The next iterator begins the present epoch again, unless it is over by then.
    tally : Tally
        The tokens that the run has had.
    """

    __slots__ = ("again", "consumed", "first", "progress", "tally")

    def __init__(self, epoch: int = 0, consumed: int = 0, tally: Tally | None = None) -> None:
        self.first = epoch
        self.consumed = consumed
        self.progress: Progress = Last()
        self.again = False
        self.tally = tally or Tally()

    def is_at(self, epoch: int, consumed: int) -> bool:
        """Tell whether an iterator begins here."""
        return (self.first, self.consumed) == (epoch, consumed)

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything: a batch, an exception, or the end."""
        return self.progress.ended or self.progress.taken > 0

    def now(self, sampler: Sampler) -> Now:
        """Return the present epoch, and how far the loop is in it; any thread may take batches."""
        if not self.begun:
            return Now(self.first, self.consumed, is_over=False)
        ended, position = self.progress.ended, self.progress.position
        epoch, last = self.first, sampler.end(self.consumed)
        if position > last:
            later, position = divmod(position - last - 1, sampler.end())
            epoch, position, last = epoch + 1 + later, position + 1, sampler.end()
        return Now(epoch, position, ended or position == last)

    def keep(self) -> None:
        """Remember the progress: the pool is about to be closed."""
        last = self.progress
        self.progress = Last(last.taken, last.ended, last.position)

    def next(self, sampler: Sampler) -> Place:
        """Return where the next iterator begins."""
        if not self.begun:
            return Place(self.first, self.consumed, self.tally)
        epoch, _, is_over = self.now(sampler)
        return self.moved(sampler, epoch if self.again and not is_over else epoch + 1)

    def moved(self, sampler: Sampler, epoch: int) -> Place:
        """Return the beginning of another epoch."""
        return Place(
            epoch, 0, self.tally.leave(sampler, (self.first, self.consumed), self.now(sampler)[:2])
        )

    def count_tokens(self, sampler: Sampler, now: Now) -> dict[str, int]:
        """Return the tokens of each source that the run has had, or {} if they are not known."""
        if sampler.data is not None:
            self.tally = self.tally.counted(sampler, (self.first, self.consumed), now[:2])
        return dict(self.tally.counts)
