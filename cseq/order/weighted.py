"""An order that draws samples by weight."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cseq.check import flag, integer, one_dimensional
from cseq.order._readers import (
    CHUNK,
    WEIGHTS,
    ArrayReader,
    Permutation,
    Tree,
    drawn,
    fingerprint,
    laid,
)
from cseq.order.base import MOST_SAMPLES, Order
from cseq.order.classes import Labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from cseq._core import Reader
    from cseq.order.base import Ints, Read

# The sum of all integer weights is below this.
MOST_TOTAL = 2**62
# Number of linear search steps before a binary search.
STEPS = 8
# Bits per digit in `spread`. With a 48-bit size, intermediate values still fit in 64 bits.
DIGIT = 15


class Weighted(Order):
    """Samples in random order, with frequencies proportional to their weights.

    In an epoch of N draws, a sample with weight w appears N * w / (sum of all weights) times,
    rounded up or down at random, without bias. With equal weights and without `size`, every sample
    appears once, as in a plain shuffle.

    Parameters
    ----------
    weights : array of real numbers
        The sample weights (at least 0). Only the ratios matter.
    size : int, optional
        The number of draws in an epoch. Defaults to the number of samples.
    replacement : bool
        Whether to draw samples independently, like torch's ``WeightedRandomSampler``, which
        leaves more samples out of an epoch.

    Examples
    --------
    >>> order = cseq.Weighted([1, 0, 3], size=8)
    >>> sorted(order.batches(8, seed=1)[0])
    [0, 0, 2, 2, 2, 2, 2, 2]
    """

    name = "weighted-v2"
    replaced: ClassVar[dict[str, str]] = {
        "weighted-v1": "samples were taken at equal intervals and are now drawn at random"
    }

    def __init__(
        self, weights: ArrayLike, size: int | None = None, *, replacement: bool = False
    ) -> None:
        array = one_dimensional("weights", weights)
        if array.dtype.kind not in "iufb":
            raise TypeError(
                f"weights has values of type {array.dtype}, such as {array[0]!r}; pass real numbers"
            )
        array = array.astype(np.float64, copy=False)
        self.samples = len(array)
        self.units = integer("size", self.samples if size is None else size, 1, MOST_SAMPLES)
        self.replacement = flag("replacement", replacement)
        self._facts = {
            "size": self.units,
            "replacement": self.replacement,
            "weights": fingerprint(array),
        }
        masses = integers_of(array, np.copy if self.replacement else laid)
        self._most = int(masses.max())
        if self.replacement:
            self._guide = Guide(np.cumsum(masses, out=masses))
            self._total = int(masses[-1])
        else:
            self._tree = Tree(masses, self.samples)
            self._total = int(self._tree.levels[-1].sum())

    @classmethod
    def balanced(
        cls, labels: ArrayLike, size: int | None = None, *, replacement: bool = False
    ) -> Self:
        """Return an order in which all classes appear about equally often.

        Parameters
        ----------
        labels : array of int or of str
            The class of each sample.
        size, replacement :
            See `Weighted`.
        """
        checked = Labels(labels)
        shares = 1 / checked.classes.sizes
        return cls(shares[checked.numbers], size, replacement=replacement)

    def describe(self) -> str:
        most = self._most * self.units / self._total
        way = "independent draws" if self.replacement else "draws"
        samples = f"{self.samples:,} samples, one at most {most:.3g} times"
        return f"{self.units:,} {way} by weight from {samples}"

    def reader(self, seed: int) -> Reader:
        size, total = self.units, self._total

        @lru_cache(1)
        def draw_epoch(epoch: int) -> tuple[Permutation, int]:
            offset = drawn(np.array([16], np.int64), total, seed, epoch, WEIGHTS)
            return Permutation(size, seed, epoch, WEIGHTS), int(offset[0])

        def read(epoch: int, units: Ints) -> Read:
            if self.replacement:
                numbers = drawn(units, total, seed, epoch, WEIGHTS, 1)
                return self._guide.first_above(numbers), None
            positions, offset = draw_epoch(epoch)
            numbers = spread(positions.at(units).astype(np.uint64), total, offset, size)
            return self._tree.samples_at(numbers, seed, epoch), None

        return ArrayReader(self, seed, read)


class Guide:
    """A lookup table for the first sample in each range of 2**shift numbers.

    Due to memory latency, `numpy.searchsorted` would take three times as long.
    """

    def __init__(self, sums: NDArray[np.uint64]) -> None:
        self.sums, last = sums, int(sums[-1]) - 1
        self.shift = np.uint64(max(0, last.bit_length() - (len(sums) // 4).bit_length()))
        self.first = np.empty((last >> int(self.shift)) + 1, np.uint32)
        for start in range(0, len(self.first), CHUNK):
            marks = (
                np.arange(start, min(start + CHUNK, len(self.first)), dtype=np.uint64) << self.shift
            )
            self.first[start : start + CHUNK] = np.searchsorted(sums, marks, "right")

    def first_above(self, numbers: NDArray[np.uint64]) -> Ints:
        """For each number, return the first sample whose cumulative sum exceeds the number."""
        samples: Ints = self.first.take((numbers >> self.shift).view(np.int64)).astype(np.int64)
        left = np.flatnonzero(self.sums.take(samples) <= numbers)
        for _ in range(STEPS):
            samples[left] += 1
            left = left[self.sums.take(samples[left]) <= numbers[left]]
        samples[left] = np.searchsorted(self.sums, numbers[left], "right")
        return samples


def spread(positions: NDArray[np.uint64], total: int, offset: int, size: int) -> NDArray[np.uint64]:
    """Return exactly ``(position * total + offset) // size`` for positions below `size`.

    With total = size * a + b and offset = size * c + d, this equals position * a + c + (position *
    b + d) // size. The last term is computed by long division.
    """
    (a, b), (c, d) = divmod(total, size), divmod(offset, size)
    quotient, rest = np.zeros((2, len(positions)), np.uint64)
    for shift in reversed(range(0, size.bit_length(), DIGIT)):
        digit = positions >> np.uint64(shift) & np.uint64(2**DIGIT - 1)
        rest = (rest << np.uint64(DIGIT)) + digit * np.uint64(b)
        if not shift:
            rest += np.uint64(d)
        more, rest = np.divmod(rest, np.uint64(size))
        quotient = (quotient << np.uint64(DIGIT)) + more
    quotient += positions * np.uint64(a) + np.uint64(c)
    return quotient


@np.errstate(under="ignore")
def integers_of(
    weights: NDArray[np.float64],
    arrange: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.copy,
) -> NDArray[np.uint64]:
    """Convert weights to integers, in a new array with the layout that `arrange` creates.

    Each integer is ``weight * 2**k``, rounded half to even, and at least 1 unless the weight is 0.
    The exponent k is the largest for which the total is below 2**62.
    """
    most = 0.0
    pieces = [(start, weights[start : start + CHUNK]) for start in range(0, len(weights), CHUNK)]
    for start, piece in pieces:
        bad = np.flatnonzero(~((piece >= 0) & (piece < math.inf)))
        if len(bad):
            raise ValueError(
                f"weights[{start + bad[0]}] is {piece[bad[0]]}; pass finite, non-negative numbers"
            )
        most = max(most, float(piece.max()))
    if not most:
        raise ValueError(f"all {len(weights)} weights are 0; pass at least one above 0")
    # Scale the largest weight to [0.5, 1). The total has an error of up to about 10**-6.
    scale = -math.frexp(most)[1]
    total = sum(float(np.ldexp(piece, scale).sum()) for _, piece in pieces)
    mantissa, exponent = math.frexp(total)
    k = scale + 63 - exponent - (mantissa > 0.5001)
    while True:
        arranged = arrange(weights)
        values, masses = arranged.reshape(-1), arranged.view(np.uint64)
        for start in range(0, len(values), CHUNK):
            piece = values[start : start + CHUNK]
            whole = np.rint(np.ldexp(piece, k)).astype(np.uint64)
            np.maximum(whole, piece > 0, out=masses.reshape(-1)[start : start + CHUNK])
        if int(masses.sum()) < MOST_TOTAL:
            return masses
        k -= 1
