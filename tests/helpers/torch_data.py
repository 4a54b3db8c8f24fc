"""Data sets, samplers and functions for the tests of `cseq.DataLoader`; and comparison."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_all(seed: int = 3) -> None:
    """Seed the trainer's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drawn() -> tuple[float, float, float]:
    """Draw from each of them."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def same(one: Any, other: Any) -> bool:
    """Whether two batches, or lists of them, are of the same types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Augmented(Dataset[Any]):
    """Draws from all generators, and tells what a worker can know."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        told = (0, 0) if info is None else (info.id, info.num_workers)
        return {
            "index": index,
            "drawn": drawn(),
            "tensor": torch.rand(3),
            "array": np.random.rand(2).astype(np.float32),
            "told": told,
            "text": f"sample {index}",
        }


def without_told(batches: Any) -> Any:
    """Drop what depends on the worker, which is any that is free where rng="batch"."""
    return [{**batch, "told": None} for batch in batches]


class Plain(Dataset[Any]):
    """Returns indices."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index


class Sharded(IterableDataset[Any]):
    """As many samples in each worker as it is told."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, size = (0, sum(self.sizes)) if info is None else (info.id, self.sizes[info.id])
        for sample in range(size):
            yield number, sample, torch.rand(2), random.random()


class Counting(Sampler[Any]):
    """Counts the keys that were drawn."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        for key in self.keys:
            self.count += 1
            yield key


def as_is(samples: Any) -> Any:
    """A collate_fn that changes nothing."""
    return samples
