"""Rows of samples, whose lengths sum to a budget nearly or exactly."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cseq.check import count
from cseq.order.classes import MOST_BUDGET, Lengths, Recipes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from cseq.order.base import Ints

__all__ = ["Packed"]

MOST_ROOMS = 2**27

Contents: TypeAlias = "tuple[int, int, Contents] | None"  # class, samples of it, what there was


class Packed(Recipes):
    """Rows of whole samples, with at most `budget` tokens. Nearly every row is full.

    Every sample comes once per epoch, and none is cut. Each epoch draws which samples of equal
    length are in which row, and which row comes when. The combinations of lengths are the same in
    every epoch. A batch has `batch_size` rows. In the indexer, `cseq.parts` says how many samples
    each row has.

    Parameters
    ----------
    lengths : array of int
        The length of each sample in tokens, at least 1. May be a memory map.
    budget : int
        The most tokens in a row.
    quantum : int
        Lengths are rounded up to a multiple of it. More samples can then replace each other, and
        rows are less full.
    too_long : 'error' or 'drop'
        What to do with samples that are longer than the budget. `describe` says how many tokens
        are dropped; a warning, if they are more than 1 % of all, or of the samples.

    Examples
    --------
    >>> order = cseq.Packed([3, 5, 4, 9, 10, 3], budget=12)
    >>> order
    <Packed: 3 rows, filled to 94.44 %, 1–3 samples a row>
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
        self.left_out = checked.left_out()
        self._facts = {
            "lengths": checked.fingerprint,
            "budget": budget,
            "quantum": quantum,
            "too_long": too_long,
        }

    def describe(self) -> str:
        """Describe an epoch."""
        said = (
            f"{self.units:,} rows, filled to {100 * self._used:.4g} %, "
            f"{self.fewest:,}–{self.room:,} samples a row"
        )
        return f"{said}; {self.left_out}" if self.left_out else said


def best_fit(lengths: Ints, counts: Ints, budget: int) -> tuple[Ints, Ints, Ints]:
    """Return recipes of rows that samples are packed into, by best fit decreasing.

    Each class has a length, ascending and in [1, `budget`], and so many samples. Returns `copies`,
    `first` and `parts` of `Recipes`.
    """
    rooms: list[int] = []  # ascending, those that rows have left
    kinds: dict[int, deque[tuple[int, Contents]]] = {}  # with each room: rows, what is in each

    def add(room: int, rows: int, contents: Contents) -> None:
        if room not in kinds:
            insort(rooms, room)
            kinds[room] = deque()
        kinds[room].append((rows, contents))

    for c in reversed(range(len(lengths))):
        length, left = int(lengths[c]), int(counts[c])
        while left:
            k = bisect_left(rooms, length)
            if k == len(rooms):
                many = budget // length
                for rows, size in ((left // many, many), (1, left % many)):
                    if rows and size:
                        add(budget - size * length, rows, (c, size, None))
                break
            room = rooms[k]
            there, before = kinds[room].popleft()
            many = min(room // length, left)
            rows = min(there, left // many)
            if rows < there:
                kinds[room].appendleft((there - rows, before))
            elif not kinds[room]:
                del kinds[room], rooms[k]
            add(room - many * length, rows, (c, many, before))
            left -= rows * many
    copies, first, ranks = [], [0], [0] * len(lengths)
    parts: list[tuple[int, int, int]] = []
    for rows, left_in in (kind for room in rooms for kind in kinds[room]):
        unit, contents = [], left_in
        while contents is not None:
            c, many, contents = contents
            unit.append((c, many, ranks[c]))
            ranks[c] += rows * many
        copies.append(rows)
        parts += reversed(unit)
        first.append(len(parts))
    return np.array(copies, np.int64), np.array(first, np.int64), np.array(parts, np.int64)
