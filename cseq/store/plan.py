"""Predicts which shards an order will use."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cseq.order.blocks import UnequalWindows

if TYPE_CHECKING:
    from cseq.order.base import Ints

__all__ = ["Plan"]

# Maximum number of windows by which a trainer may lag behind or run ahead of its workers.
BACK, FORTH = 2, 3


class Plan:
    """Tracks the windows of shards in an order, and which one is current.

    Windows are numbered consecutively across epochs, from epoch 0.

    Parameters
    ----------
    sizes : array of int
        The number of samples in each shard.
    window : int
        The number of shards in a window.
    seed, epoch, shard : int
        The trainer's position in the order.

    Attributes
    ----------
    front : int
        The latest window in use.
    """

    def __init__(self, sizes: Ints, window: int, seed: int, epoch: int, shard: int) -> None:
        self.window, self.seed, self._sizes = window, seed, sizes
        self.count = -(-len(sizes) // window)
        self._smallest = len(sizes) // self.count
        self._turns = lru_cache(4)(self._turns_of)
        self._next = lru_cache(1)(self._next_of)
        self.front = int(self._turns(epoch)[shard])
        # The window of each reader's latest batch, without those before `front` - BACK.
        self._latest: dict[int, int] = {}

    def _turns_of(self, epoch: int) -> Ints:
        """Return the window number of each shard in an epoch."""
        windows = UnequalWindows(self._sizes, self.window, self.seed, epoch)
        first = int(windows.starts.searchsorted(windows.epoch_start, "right")) - 1
        numbers = np.repeat(np.arange(self.count), np.diff(windows.cuts))
        turns = np.empty(len(windows.order), np.int64)
        turns[windows.order] = epoch * self.count + (numbers - first) % self.count
        return turns

    def has(self, window: int, seed: int, epoch: int, shard: int) -> bool:
        """Return True if a trainer uses the same order and is close to the current window."""
        if (window, seed) != (self.window, self.seed):
            return False
        return bool(-BACK <= self._turns(epoch)[shard] - self.front <= FORTH)

    def advance(self, shards: list[int], reader: int) -> None:
        """Advance to the window of a reader's batch, if its shards come from this order.

        The shards may be close to each other in several epochs. Readers do not go back, so the
        first match that is not before the reader's previous window is used.
        """
        least = max(self._latest.get(reader, 0), self.front - BACK)
        # Windows between a batch's first and last one are complete.
        most = (len(shards) - 2) // self._smallest + 1
        for epoch in range(least // self.count, least // self.count + 3):
            turns = self._turns(epoch)[shards]
            low, span = int(turns.min()), int(np.ptp(turns))
            if span <= most and least <= low <= self.front + FORTH + span:
                self.front = max(self.front, low)
                kept = {one: turn for one, turn in self._latest.items() if turn > self.front - BACK}
                self._latest = {**kept, reader: low}
                return

    def uses(self) -> Ints:
        """Return the next window that uses each shard.

        The window before the current one counts as current, as slower ranks may still be using it.
        """
        return self._next(self.front)[0]

    def coming(self, more: int) -> list[int]:
        """Return the shards in the current and the next window, and `more` later ones."""
        _, uses, shards = self._next(self.front)
        near = int(np.searchsorted(uses[shards], self.front + 1, "right"))
        coming: list[int] = shards[: near + more].tolist()
        return coming

    def _next_of(self, front: int) -> tuple[Ints, Ints, Ints]:
        """Return `uses()`, each shard's next window, and the shards sorted by next window."""
        epoch = front // self.count
        turns = self._turns(epoch)
        uses = np.where(turns >= front, turns, self._turns(epoch + 1))
        return np.where(turns == front - 1, front, uses), uses, uses.argsort(kind="stable")
