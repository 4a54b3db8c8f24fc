"""Rows of samples, whose lengths sum to a budget nearly or exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cseq._recipes import best_fit
from cseq.check import count
from cseq.order.classes import MOST_BUDGET, Lengths
from cseq.order.recipes import Recipes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Packed"]

MOST_ROOMS = 2**27


class Packed(Recipes):
    """Rows of samples whose lengths sum to a budget at most, and to all of it in nearly every row.

    Every sample comes once an epoch, and none is cut. Which samples of equal length lie in which
    row, and which row comes when, is drawn for each epoch; the lengths that go together are the
    same in every epoch. A batch has `batch_size` rows; inside the indexer, `cseq.parts` says how
    many samples each of them has.

    Parameters
    ----------
    lengths : array of int
        Of each sample: tokens, at least 1. May be a memory map.
    budget : int
        Tokens of a row at most.
    quantum : int
        Lengths are rounded up to a multiple of it: more samples can stand in for each other, and
        rows are less full.
    too_long : 'error' or 'drop'
        What becomes of samples that are longer than the budget.

    Examples
    --------
    >>> order = cseq.Packed([3, 5, 4, 9, 10, 3], budget=12)
    >>> order
    <Packed: 3 rows, 94.44 % of tokens used, 1–3 samples a row>
    >>> sorted(map(sorted, order.batches(seed=1)))
    [[0, 1, 2], [3, 5], [4]]
    """

    name = "packed-v1"

    def __init__(
        self, lengths: ArrayLike, budget: int, *, quantum: int = 1, too_long: str = "error"
    ) -> None:
        budget = count("budget", budget, 1, MOST_BUDGET)
        quantum = count("quantum", quantum, 1, budget)
        rooms = budget // quantum
        if rooms > MOST_ROOMS:
            raise ValueError(
                f"budget={budget} is {rooms} times quantum={quantum}; give a quantum of at least "
                f"{-(-budget // MOST_ROOMS)}"
            )
        checked = Lengths(lengths, budget, too_long)
        lengths_of = np.unique(np.minimum(-(-checked.distinct() // quantum), rooms))
        bounds = lengths_of * quantum
        bounds[-1] = max(bounds[-1], checked.longest)
        classes = checked.classes(bounds)
        copies, first, parts = best_fit(lengths_of, classes.sizes, rooms)
        super().__init__(checked.count, classes, copies, first, parts)
        self._used = checked.total / (self.units * budget)
        self._left_out = f"; {checked.dropped:,} samples are too long" if checked.dropped else ""
        self._facts = {
            "lengths": checked.fingerprint,
            "budget": budget,
            "quantum": quantum,
            "too_long": too_long,
        }

    def describe(self) -> str:
        """Say what an epoch consists of."""
        return (
            f"{self.units:,} rows, {100 * self._used:.4g} % of tokens used, "
            f"{self.fewest:,}–{self.room:,} samples a row{self._left_out}"
        )
