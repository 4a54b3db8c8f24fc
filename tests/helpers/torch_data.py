"""Data sets, samplers, functions and comparisons for the tests of `cseq.DataLoader`."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def seed_all(seed=3):
    """Seed the trainer's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drawn():
    """Draw from each generator."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def same(one, other):
    """Return whether two batches, or lists of batches, have the same types and bits."""
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
    """Draws from all generators, and reports what a worker can know."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
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


def without_told(batches):
    """Drop what depends on the worker: where rng="batch", any free worker may make a batch."""
    return [{**batch, "told": None} for batch in batches]


class Plain(Dataset[Any]):
    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Sharded(IterableDataset[Any]):
    """Each worker has the number of samples that the data set names for it."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        number, size = (0, sum(self.sizes)) if info is None else (info.id, self.sizes[info.id])
        for sample in range(size):
            yield number, sample, torch.rand(2), random.random()


class Counting(Sampler[Any]):
    def __init__(self, keys):
        self.keys, self.count = keys, 0

    def __iter__(self):
        for key in self.keys:
            self.count += 1
            yield key


def as_is(samples):
    """A collate_fn that changes nothing."""
    return samples
