"""Which shards an order uses next."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.order.blocks import UnequalWindows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cseq.order.base import Ints

__all__ = ["Plan"]

# Windows by which what a trainer reads may differ from where its workers are.
BACK, FORTH = 2, 3


class Plan:
    """The windows of shards of a seed's epochs, and the one in use.

    Windows are counted from the first one of epoch 0 on.

    Parameters
    ----------
    sizes : array of int
        Samples of each shard.
    window : int
        Shards of a window.
    seed, epoch, unit : int
        Where the order is read.

    Attributes
    ----------
    front : int
        The farthest window that is in use.
    """

    def __init__(self, sizes: Ints, window: int, seed: int, epoch: int, unit: int) -> None:
        self.window, self.seed = window, seed
        self._windows = lru_cache(4)(lambda epoch: UnequalWindows(sizes, window, seed, epoch))
        self._turns = lru_cache(4)(self._turns_of)
        self.count = len(self._windows(epoch).cuts) - 1
        self.front = self._at(epoch, unit)
        self._known: tuple[int, Any] = -1, ()

    def _turns_of(self, epoch: int) -> Ints:
        """Return in which window of an epoch each shard is, counted from the epoch's first."""
        windows = self._windows(epoch)
        first = int(windows.starts.searchsorted(windows.epoch_start, "right")) - 1
        turns = np.empty(len(windows.order), np.int64)
        numbers = np.repeat(np.arange(self.count), np.diff(windows.cuts))
        turns[windows.order] = (numbers - first) % self.count
        return turns

    def _at(self, epoch: int, unit: int) -> int:
        """Return the window of a position."""
        windows = self._windows(epoch)
        at = (unit + windows.epoch_start) % int(windows.starts[-1])
        places = np.array([windows.epoch_start, at])
        first, now = (windows.starts.searchsorted(places, "right") - 1).tolist()
        return epoch * self.count + int(now - first) % self.count

    @property
    def place(self) -> list[int]:
        """The window's size, the seed, the epoch and the window in use, for `at`."""
        return [self.window, self.seed, *divmod(self.front, self.count)]

    @classmethod
    def at(cls, sizes: Ints, place: list[int]) -> Plan:
        """Return the plan that had such a place."""
        window, seed, epoch, turn = place
        plan = cls(sizes, window, seed, epoch, 0)
        plan.front += turn
        return plan

    def has(self, window: int, seed: int, epoch: int, unit: int) -> bool:
        """Whether a position that a trainer reads is about where this plan is."""
        if (window, seed) != (self.window, self.seed):
            return False
        return -BACK <= self._at(epoch, unit) - self.front <= FORTH

    def advance(self, shards: Iterable[int]) -> bool:
        """Note the shards of a batch, if they can be of this order; whether the window changed."""
        epoch, numbers = self.front // self.count, np.array([*shards])
        for each in (epoch, epoch + 1):
            found = each * self.count + self._turns(each)[numbers]
            low, span = int(found.min()), int(np.ptp(found))
            if span < len(numbers) and self.front <= low <= self.front + FORTH + span:
                is_later, self.front = low > self.front, low
                return is_later
        return False

    def uses(self) -> Ints:
        """Return the window in which each shard is used next."""
        return self._sorted()[0]

    def _sorted(self) -> tuple[Ints, Ints]:
        """Return the window in which each shard is used next, and the shards in this order."""
        if self._known[0] != self.front:
            uses = self._uses()
            self._known = self.front, (uses, np.argsort(uses, kind="stable"))
        known: tuple[Ints, Ints] = self._known[1]
        return known

    def _uses(self) -> Ints:
        epoch, turn = divmod(self.front, self.count)
        turns = self._turns(epoch)
        later = (epoch + 1) * self.count + self._turns(epoch + 1)
        return np.where(turns >= turn, epoch * self.count + turns, later)

    def coming(self, more: int) -> list[int]:
        """Return the shards of this window and the next one, and some after these."""
        uses, shards = self._sorted()
        near = int(np.searchsorted(uses[shards], self.front + 1, "right"))
        coming: list[int] = shards[: near + more].tolist()
        return coming
