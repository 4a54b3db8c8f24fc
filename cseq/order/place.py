"""Where the loop is: an epoch, and how many of its samples all ranks have had."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Place", "Progress"]


class Progress(Protocol):
    """How far the loop is in an epoch, as a `Feed` reports it."""

    @property
    def taken(self) -> int:
        """Batches, and exceptions in place of batches, that the loop has had of the epoch."""

    @property
    def ended(self) -> bool:
        """Whether the loop was told that the epoch is over."""

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have had, or left out for an error."""


class Last(NamedTuple):
    """The last progress of a feed whose pool was closed; at first, none."""

    taken: int = 0
    ended: bool = False
    position: int = 0


class Place:
    """An epoch, where an iterator over it begins, and how far the loop is in it.

    Attributes
    ----------
    consumed : int
        Samples that all ranks together have had before the iterator's first.
    progress : Progress
        The feed, once it has begun this epoch.
    again : bool
        The next iterator begins this epoch again, unless it is over by then.
    """

    __slots__ = ("again", "consumed", "epoch", "progress")

    def __init__(self, epoch: int = 0, consumed: int = 0) -> None:
        self.epoch = epoch
        self.consumed = consumed
        self.progress: Progress = Last()
        self.again = False

    def is_at(self, epoch: int, consumed: int) -> bool:
        """Tell whether an iterator over this epoch begins here."""
        return (self.epoch, self.consumed) == (epoch, consumed)

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything of the epoch: a batch, an exception, or its end."""
        return self.progress.ended or self.progress.taken > 0

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have had."""
        return self.progress.position if self.begun else self.consumed

    def is_over(self, end: int) -> bool:
        """Whether the loop has had the last of the epoch's `end` samples."""
        return self.begun and (self.progress.ended or self.position == end)

    def keep(self) -> None:
        """Remember the progress: the pool is about to be closed."""
        last = self.progress
        self.progress = Last(last.taken, last.ended, last.position)

    def next(self, end: int) -> Place:
        """Return where the next iterator begins, if the epoch has `end` samples."""
        if not self.begun:
            return Place(self.epoch, self.consumed)
        if self.again and not self.is_over(end):
            return Place(self.epoch)
        return Place(self.epoch + 1)
