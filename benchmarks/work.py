"""The work that is the same for all: indexers, and the loop that takes the batches.

Workers import this file, so it imports nothing but numpy and cseq.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PAGE = 4096
IMAGES = 256  # enough that a batch comes from other places than the one before

# -- indexers


class Floats:
    """32 floats a batch: what an indexer costs at least."""

    def __init__(self, samples: int) -> None:
        self.table = np.arange(samples, dtype=np.float32)

    def __getitem__(self, indices):
        return self.table[indices]


class Images:
    """Images of 3 × 224 × 224, by fancy index: a fresh array for every batch."""

    def __init__(self, dtype: str) -> None:
        rows = np.arange(IMAGES, dtype=dtype).reshape(-1, 1, 1, 1)
        self.images = np.empty((IMAGES, 3, 224, 224), dtype)
        self.images[:] = rows

    def __getitem__(self, indices):
        return self.images[np.asarray(indices) % IMAGES]


class ImagesInPlace(Images):
    """The same, filled into an array from `cseq.empty`; outside a worker that is `numpy.empty`."""

    def __getitem__(self, indices):
        rows = np.asarray(indices) % IMAGES
        batch = cseq.empty((len(rows), *self.images.shape[1:]), self.images.dtype)
        return np.take(self.images, rows, axis=0, out=batch, mode="clip")


# -- the loop


@dataclass(frozen=True)
class Work:
    """An epoch, and how it is measured.

    Attributes
    ----------
    indexer : callable
        Makes the indexer, in every worker.
    batches : int
        In an epoch.
    figure : callable
        (seconds of an epoch, batches) → the figure.
    epochs : int
        In a round.
    touch : bool
        Whether the loop reads one byte of each page of a batch.
    """

    indexer: Callable[[], Any]
    batches: int
    figure: Callable[[float, int], float]
    epochs: int = 1
    touch: bool = False
    batch_size: int = 32
    num_workers: int = 2
    buffer: int = 10

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self.batches * self.batch_size

    def part(self, divisor: int) -> Work:
        """Return shorter epochs, for a contender that would take too long."""
        return replace(self, batches=max(1, self.batches // divisor))

    def measure(self, batches: Iterable[Any]) -> float:
        """Go through the epochs of a round and return the figure."""
        seconds = count = 0
        for _ in range(self.epochs):
            start = time.perf_counter()
            count += touch_all(batches) if self.touch else take_all(batches)
            seconds += time.perf_counter() - start
        if count != self.batches * self.epochs:
            raise RuntimeError(f"{count} batches instead of {self.batches * self.epochs}")
        return self.figure(seconds, count)


def take_all(batches: Iterable[Any]) -> int:
    """Take every batch."""
    count = 0
    for _batch in batches:
        count += 1
    return count


def touch_all(batches: Iterable[Any]) -> int:
    """Take every batch and read one byte of each of its pages."""
    count = 0
    for batch in batches:
        touch(batch)
        count += 1
    return count


def touch(batch: Any) -> None:
    """Read one byte of each page of a batch, and the first of every array."""
    if isinstance(batch, dict):
        for part in batch.values():
            touch(part)
    else:
        np.asarray(batch).reshape(-1).view(np.uint8)[::PAGE].sum()


def microseconds(seconds: float, batches: int) -> float:
    """Time of a batch."""
    return seconds / batches * 1e6


@dataclass(frozen=True)
class Rate:
    """Gigabytes a second, for batches of so many bytes."""

    nbytes: int

    def __call__(self, seconds: float, batches: int) -> float:
        return self.nbytes * batches / seconds / 1e9


# -- the order, for those who have none of their own


def shuffled(work: Work, epoch: int) -> np.ndarray:
    """Return the indices of an epoch, a row a batch."""
    order = np.random.default_rng((1, epoch)).permutation(work.samples)
    return order.reshape(work.batches, work.batch_size)


class Bare:
    """In process, with the indices at hand: the indexer's own time, the limit of every loader."""

    def __init__(self, work: Work) -> None:
        self.indexer = work.indexer()
        self.rows = list(shuffled(work, 0))

    def __iter__(self) -> Iterator[Any]:
        return map(self.indexer.__getitem__, self.rows)


class Rows:
    """The indices of one epoch after the other, a row a batch."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.epoch = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        rows = shuffled(self.work, self.epoch)
        self.epoch += 1
        return iter(rows)


class Batches(Rows):
    """The batches of one epoch after the other."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.indexer = work.indexer()

    def __iter__(self) -> Iterator[Any]:
        return map(self.indexer.__getitem__, super().__iter__())
