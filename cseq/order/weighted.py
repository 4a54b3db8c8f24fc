"""Samples drawn by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._draws import WeightedReader, integers_of
from cseq._orders import fingerprint
from cseq.check import count, flag
from cseq.order.base import MOST_SAMPLES, Order

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Self

    from cseq._core import Reader

__all__ = ["Weighted"]

MOST_WEIGHTS = 2**32 - 1


class Weighted(Order):
    """Samples as often as their weights say, in random order.

    In an epoch of N draws, a sample of weight w comes N * w / (sum of all weights) times, rounded
    up or down: equal weights and `size` None are a plain shuffle.

    Parameters
    ----------
    weights : array of real numbers
        Of each sample, at least 0. Only their ratios count.
    size : int, optional
        Draws of an epoch. None: as many as there are samples.
    replacement : bool
        The draws do not depend on each other, as those of torch's ``WeightedRandomSampler``: how
        often a sample comes varies by chance, and more samples are left out.

    Examples
    --------
    >>> order = cseq.Weighted([1, 0, 3], size=8)
    >>> sorted(order.batches(8, seed=1)[0])
    [0, 0, 2, 2, 2, 2, 2, 2]
    """

    name = "weighted-v1"

    def __init__(
        self, weights: ArrayLike, size: int | None = None, *, replacement: bool = False
    ) -> None:
        array = _weights(weights)
        self.samples = len(array)
        self.units = count("size", self.samples if size is None else size, 1, MOST_SAMPLES)
        self.replacement = flag("replacement", replacement)
        self._fingerprint = fingerprint(array)
        self._integers = integers_of(array)

    @classmethod
    def balanced(
        cls, labels: ArrayLike, size: int | None = None, *, replacement: bool = False
    ) -> Self:
        """Return an order in which every class comes equally often.

        Parameters
        ----------
        labels : array
            The class of each sample: integers or strings.
        size, replacement :
            See `Weighted`.
        """
        array = np.asarray(labels)
        if array.ndim != 1 or not len(array):
            raise ValueError(
                f"labels has shape {array.shape}; give the class of each sample, one at least"
            )
        if array.dtype.kind not in "iubUS":
            raise TypeError(f"labels has dtype {array.dtype}; give integers or strings")
        _, classes, sizes = np.unique(array, return_inverse=True, return_counts=True)
        return cls((1 / sizes)[classes], size, replacement=replacement)

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {
            "name": self.name,
            "samples": self.samples,
            "size": self.units,
            "replacement": self.replacement,
            "weights": self._fingerprint,
        }

    def describe(self) -> str:
        """Say what an epoch consists of."""
        sums = self._integers[0]
        most = int(max(sums[0], np.diff(sums).max(initial=0))) * self.units / int(sums[-1])
        way = "independent draws" if self.replacement else "draws"
        there = f"{self.samples:,} samples, one at most {most:.3g} times"
        return f"{self.units:,} {way} by weight from {there}"

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        return WeightedReader(self._integers, self.units, seed, self.replacement)


def _weights(weights: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return weights as a contiguous array of float64; one that is such is not copied."""
    try:
        array = np.asarray(weights)
    except ValueError as error:  # of lists of unequal length, for one
        raise TypeError(f"weights is no array of numbers: {error}") from error
    if array.dtype.kind not in "iufb":
        raise TypeError(f"weights has dtype {array.dtype}; give real numbers")
    if array.ndim != 1:
        raise ValueError(f"weights has shape {array.shape}; give one number for each sample")
    if not 1 <= len(array) <= MOST_WEIGHTS:
        raise ValueError(f"weights has {len(array)} numbers; give 1 to {MOST_WEIGHTS}")
    return np.ascontiguousarray(array, dtype=np.float64)
