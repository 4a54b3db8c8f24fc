"""The work that all contenders share: indexers, and the loop that takes the batches.

Workers import this file, so it imports nothing large but numpy and cseq.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
from harness.case import Counter, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PAGE = 4096
# Enough images that each batch has different ones from the batch before.
IMAGES = scaled(256, 16)

# -- indexers


class Floats:
    """32 floats per batch: the minimum cost of an indexer."""

    def __init__(self, samples: int) -> None:
        self.table = np.arange(samples, dtype=np.float32)

    def __getitem__(self, indices):
        return self.table[indices]


class FloatsBesideTorch(Floats):
    """The same in a process that imports what most workers do: torch, random, numpy.random."""

    def __init__(self, samples: int) -> None:
        for name in ("random", "numpy.random", "torch"):
            importlib.import_module(name)
        super().__init__(samples)


class Images:
    """Images of 3 × 224 × 224 by fancy indexing: a new array for every batch."""

    def __init__(self, dtype: str) -> None:
        rows = np.arange(IMAGES, dtype=dtype).reshape(-1, 1, 1, 1)
        self.images = np.empty((IMAGES, 3, 224, 224), dtype)
        self.images[:] = rows

    def __getitem__(self, indices):
        return self.images[np.asarray(indices) % IMAGES]


class ImagesInPlace(Images):
    """The same, filled into an array from `cseq.empty`, which is `numpy.empty` outside a worker."""

    def __getitem__(self, indices):
        rows = np.asarray(indices) % IMAGES
        batch = cseq.empty((len(rows), *self.images.shape[1:]), self.images.dtype)
        return np.take(self.images, rows, axis=0, out=batch, mode="clip")


class Structured(Images):
    """A dict of images and 112 arrays of 32 floats."""

    NBYTES = 32 * 3 * 224 * 224 + 112 * 32 * 4
    NAMES = tuple(f"target {number}" for number in range(112))

    def __init__(self) -> None:
        super().__init__("uint8")
        self.targets = np.zeros((112, IMAGES), np.float32)

    def __getitem__(self, indices):
        rows = np.asarray(indices) % IMAGES
        targets = zip(self.NAMES, self.targets, strict=True)
        return {"images": self.images[rows]} | {name: one[rows] for name, one in targets}


class Features(Images):
    """19 MB of images and their labels, as tensors, in a dict or an object such as a UserDict."""

    def __init__(self, container: type) -> None:
        super().__init__("float32")
        self.container = container

    def __getitem__(self, indices):
        import torch

        images = torch.from_numpy(super().__getitem__(indices))
        return self.container({"images": images, "labels": torch.as_tensor(indices)})


class Parts:
    """A given number of prepared arrays of 32 floats: alone, a pair, or a dict."""

    def __init__(self, count: int) -> None:
        arrays = [np.full(32, number, np.float32) for number in range(count)]
        names = (f"part {number}" for number in range(count))
        self.batch = {1: arrays[0], 2: tuple(arrays)}.get(
            count, dict(zip(names, arrays, strict=True))
        )

    def __getitem__(self, indices):
        return self.batch


class Sleepy:
    """5 ms per batch without CPU work. Some batches take 20 times as long."""

    def __init__(self, batches: int, slow: float) -> None:
        self.seconds = np.full(batches, 0.005)
        chosen = np.random.default_rng(0).permutation(batches)[: round(batches * slow)]
        self.seconds[chosen] *= 20

    def __getitem__(self, indices):
        time.sleep(self.seconds[indices[0] // 32])
        return np.asarray(indices, np.float32)


class Interpreted:
    """About 1 ms per batch in the interpreter, which holds the GIL (if any) all the time."""

    def __getitem__(self, indices):
        total = 0
        for number in range(16_000):
            total += number & 7
        return np.full(len(indices), total, np.float32)


class Brief:
    """Some microseconds of CPU work per batch, and a prepared array."""

    def __init__(self, us: int) -> None:
        self.ns = 1000 * us
        self.array = np.arange(64, dtype=np.float32)

    def __getitem__(self, indices):
        end = time.perf_counter_ns() + self.ns
        while time.perf_counter_ns() < end:
            pass
        return self.array


class Rarely:
    """32 floats per batch. The batch with the first sample briefly takes much memory."""

    # In MB.
    SIZE = scaled(640, 160)

    def __getitem__(self, indices):
        if indices[0] == 0:
            np.ones(self.SIZE * 125_000).sum()
        return np.asarray(indices, np.float32)


class Echo:
    """No data: a batch is its first index."""

    def __getitem__(self, indices):
        return int(indices[0])


# -- the loop


@dataclass(frozen=True)
class Work:
    """Epochs of batches, and their figures.

    Attributes
    ----------
    indexer : callable
        Makes the indexer in every worker.
    batches : int
        The number of batches per epoch.
    figure : callable
        (work, loader) → the figure of a round: it goes through the loader's epochs.
    epochs : int
        The number of epochs per round.
    touch : bool
        Whether the loop reads one byte of each page of a batch.
    """

    indexer: Callable[[], Any]
    batches: int
    figure: Callable[[Work, Iterable[Any]], float]
    epochs: int = 1
    touch: bool = False
    shuffle: bool = True
    batch_size: int = 32
    num_workers: int = 2
    buffer: int = 10

    @property
    def samples(self) -> int:
        """The number of samples per epoch."""
        return self.batches * self.batch_size

    def part(self, divisor: int) -> Work:
        """Return shorter epochs for a contender that would take too long."""
        return replace(self, batches=max(1, self.batches // divisor))

    def measure(self, loader: Iterable[Any]) -> float:
        """Run a round."""
        return self.figure(self, loader)


def seconds_a_batch(work: Work, loader: Iterable[Any]) -> float:
    """Run the epochs of a round. Return the time per batch."""
    take = touch_all if work.touch else take_all
    start = time.perf_counter()
    count = sum(take(loader) for _ in range(work.epochs))
    seconds = time.perf_counter() - start
    if count != work.batches * work.epochs:
        expected = work.batches * work.epochs
        raise RuntimeError(f"the loader returned {count} batches instead of {expected}")
    Counter.batches += count
    return seconds / count


def milliseconds(work: Work, loader: Iterable[Any]) -> float:
    """Return the milliseconds per batch."""
    return seconds_a_batch(work, loader) * 1e3


def microseconds(work: Work, loader: Iterable[Any]) -> float:
    """Return the microseconds per batch."""
    return seconds_a_batch(work, loader) * 1e6


@dataclass(frozen=True)
class Rate:
    """Measures gigabytes per second for batches of a given size."""

    nbytes: int

    def __call__(self, work: Work, loader: Iterable[Any]) -> float:
        return self.nbytes / seconds_a_batch(work, loader) / 1e9


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


# -- the order, for contenders without their own


def shuffled(work: Work, epoch: int) -> np.ndarray:
    """Return the indices of an epoch, one row per batch."""
    order = np.arange(work.samples)
    if work.shuffle:
        np.random.default_rng((1, epoch)).shuffle(order)
    return order.reshape(work.batches, work.batch_size)


class Bare:
    """In process, with prepared indices: the indexer's own time, the limit for every loader."""

    def __init__(self, work: Work) -> None:
        self.indexer = work.indexer()
        self.rows = list(shuffled(work, 0))

    def __iter__(self) -> Iterator[Any]:
        return map(self.indexer.__getitem__, self.rows)


class Rows:
    """The indices of one epoch after another, one row per batch."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.epoch = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        rows = shuffled(self.work, self.epoch)
        self.epoch += 1
        return iter(rows)


class Batches(Rows):
    """The batches of one epoch after another."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.indexer = work.indexer()

    def __iter__(self) -> Iterator[Any]:
        return map(self.indexer.__getitem__, super().__iter__())
