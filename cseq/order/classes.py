"""Samples by class: those of a class can stand in for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._core import FEISTEL_LEAST
from cseq._orders import CHUNK, fingerprint
from cseq._recipes import sort_classes
from cseq.check import choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

__all__ = ["MOST_BUDGET", "MOST_SAMPLES", "Classes", "Labels", "Lengths"]

MOST_SAMPLES = 2**32  # a sample takes 4 bytes of the table
MOST_BUDGET = 2**62
DENSE = (
    2**16
)  # a range of values that is this much longer than their number is looked up in a table


class Classes:
    """A table of samples, class after class.

    Parameters
    ----------
    of : numpy.ndarray of uint32
        The class of each sample; `count` of one that is left out.
    count : int
        Classes.

    Attributes
    ----------
    table : numpy.ndarray of uint32
        The samples.
    offsets, sizes : numpy.ndarray of int64
        Where each class begins in the table, and where the last one ends; the samples of each.
    places : numpy.ndarray of int64
        Where a reader keeps the order of each: that of a small class among `tabled` samples, that
        of a large one is one of `computed`.
    """

    def __init__(self, of: NDArray[np.uint32], count: int) -> None:
        table, offsets = sort_classes(of, count + 1)
        self.count = count
        self.table, self.offsets = table[: offsets[count]], offsets[: count + 1]
        self.sizes = np.diff(self.offsets)
        large = self.sizes >= FEISTEL_LEAST
        small = np.where(large, 0, self.sizes)
        self.places = np.where(large, np.cumsum(large) - 1, np.cumsum(small) - small)
        self.tabled, self.computed = int(small.sum()), int(large.sum())
        for array in (self.table, self.offsets, self.sizes, self.places):
            array.flags.writeable = False


class Lengths:
    """The lengths of samples, checked. They are read in pieces, and not written to.

    Parameters
    ----------
    lengths : array of int
    budget : int
        What is longer is left out if `too_long` is 'drop', and refused if it is 'error'.

    Attributes
    ----------
    count, dropped : int
        Samples, and how many of them are left out.
    shortest, longest, total : int, int, float
        The least, the greatest and the sum of the others' lengths.
    fingerprint : int
        Of all lengths.
    """

    def __init__(self, lengths: ArrayLike, budget: int, too_long: str) -> None:
        self.values = _one_dimensional("lengths", lengths)
        self.count = len(self.values)
        drop = choice("too_long", too_long, ("error", "drop")) == "drop"
        if self.values.dtype.kind not in "iu":
            raise TypeError(
                f"lengths has values of type {self.values.dtype}, such as {self.values[0]!r}; give "
                "integers of at least 1, such as numpy.ceil(lengths).astype(int)"
            )
        self.shortest, self.longest, self.total, self.dropped = budget, 0, 0.0, 0
        for start, chunk in _chunks(self.values):
            low, high, kept = int(chunk.min()), int(chunk.max()), chunk
            if low < 1:
                raise ValueError(
                    f"lengths[{start + int(chunk.argmin())}]={low} is below 1; leave this sample "
                    "out, or give it a length of 1"
                )
            if high > budget:
                if not drop:
                    raise ValueError(
                        f"lengths[{start + int(chunk.argmax())}]={high} exceeds budget={budget}; "
                        "cut this sample, give a larger budget, or leave such samples out with "
                        "too_long='drop'"
                    )
                kept = chunk[chunk <= budget]
                self.dropped += len(chunk) - len(kept)
                high = int(kept.max(initial=0))
            self.shortest, self.longest = min(self.shortest, low), max(self.longest, high)
            self.total += float(kept.sum(dtype=np.float64))
        if self.dropped == self.count:
            raise ValueError(f"all {self.count} lengths exceed budget={budget}; give a larger one")
        self.fingerprint = fingerprint(self.values)

    def distinct(self) -> NDArray[np.int64]:
        """Return each length once, ascending, without those that are left out."""
        return _distinct(self.values, self.shortest, self.longest)

    def classes(self, bounds: NDArray[np.int64]) -> Classes:
        """Sort the samples by class, that of the first bound that is not below their length."""
        found = _search(self.values, bounds, self.shortest, self.longest)
        return Classes(found, len(bounds))


class Labels:
    """The labels of samples, checked; they become numbers of classes, in the order of the labels.

    Parameters
    ----------
    labels : array of int or of str

    Attributes
    ----------
    values : numpy.ndarray
        Each label once, ascending.
    classes : Classes
    fingerprint : int
        Of the numbers of the samples' classes.
    """

    def __init__(self, labels: ArrayLike) -> None:
        given = _one_dimensional("labels", labels)
        if given.dtype.kind in "iu" and given.max() < 2**63:
            low, high = int(given.min()), int(given.max())
            self.values: NDArray[Any] = _distinct(given, low, high)
            numbers = _search(given, self.values, low, high)
        elif given.dtype.kind in "bUS":
            self.values, inverse = np.unique(given, return_inverse=True)
            numbers = inverse.astype(np.uint32)
        else:
            raise TypeError(
                f"labels has values of type {given.dtype}, such as {given[0]!r}; give integers "
                "below 2**63, or strings"
            )
        self.classes = Classes(numbers, len(self.values))
        self.fingerprint = fingerprint(numbers)


def _one_dimensional(name: str, given: ArrayLike) -> NDArray[Any]:
    """Return an argument as an array, with one value at least."""
    try:
        values = np.asarray(given)
    except (TypeError, ValueError) as error:  # of lists of unequal length, for one
        raise TypeError(f"{name} is no array: {error}") from error
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}; give one dimension, a value a sample")
    if not len(values):
        raise ValueError(f"{name} is empty; give a value for each sample, one at least")
    if len(values) > MOST_SAMPLES:
        raise ValueError(f"{name} has {len(values)} values; give at most {MOST_SAMPLES}")
    return values


def _chunks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Go through an array, which may be a memory map, in pieces."""
    for start in range(0, len(values), CHUNK):
        yield start, values[start : start + CHUNK]


def _is_dense(values: NDArray[Any], low: int, high: int) -> bool:
    """Tell whether a table of the numbers from `low` to `high` is small beside the samples'."""
    return high - low <= len(values) + DENSE


def _distinct(values: NDArray[Any], low: int, high: int) -> NDArray[np.int64]:
    """Return each integer of an array once, ascending, from `low`, the least, to `high`."""
    if not _is_dense(values, low, high):
        return np.unique(values[values <= high]).astype(np.int64)
    seen = np.zeros(high - low + 1, np.bool_)
    for _, chunk in _chunks(values):
        seen[chunk[chunk <= high].astype(np.int64) - low] = True
    return np.flatnonzero(seen) + low


def _search(
    values: NDArray[Any], bounds: NDArray[np.int64], low: int, high: int
) -> NDArray[np.uint32]:
    """Return the number of the first bound that is not below each integer of an array.

    `low` is the least of them; those above `high` get the number of bounds.
    """
    found = np.empty(len(values), np.uint32)
    if not _is_dense(values, low, high):
        for start, chunk in _chunks(values):
            inside = chunk <= high
            places = np.searchsorted(bounds, np.where(inside, chunk, low).astype(np.int64))
            found[start : start + CHUNK] = np.where(inside, places, len(bounds))
        return found
    table = np.append(np.searchsorted(bounds, np.arange(low, high + 1)), len(bounds))
    table = table.astype(np.uint32)
    for start, chunk in _chunks(values):
        inside = chunk <= high
        places = chunk.astype(np.int64) - low
        if not inside.all():
            places[~inside] = len(table) - 1
        np.take(table, places, out=found[start : start + CHUNK])
    return found
