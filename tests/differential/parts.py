"""Parts of the loaders: data sets, samplers and collate functions, all of them picklable.

Everything depends only on its arguments and on the three global generators, so two correct loaders
give the same.
"""

import multiprocessing
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

ERRORS = {
    "ValueError": lambda: ValueError("no such sample"),
    "KeyError": lambda: KeyError("no such key"),
    "OSError": lambda: OSError(2, "no such file"),
    "IndexError": lambda: IndexError("out of range"),
    "lines": lambda: RuntimeError("first line\nsecond line"),
    "empty": ValueError,
}


class Pair(NamedTuple):
    image: Any
    label: Any


def drawn(generators):
    draw = {"torch": lambda: torch.rand(()).item()}
    draw |= {"numpy": np.random.random, "random": random.random}
    return [draw[name]() for name in generators]


class Items:
    """Samples of a kind, with their draws, and the place where they were made."""

    def __init__(self, kind="tuple", draws=(), info=False, error=None):
        self.kind, self.draws, self.info = kind, list(draws), info
        self.error, self.calls = error or {}, 0

    def item(self, number, key=None):
        if self.error.get("where") == "sample" and number == self.error["at"]:
            raise ERRORS[self.error["type"]]()
        value = self.plain(number)
        if self.draws:
            value = (value, *drawn(self.draws))
        if self.info:
            worker, about = get_worker_info(), (-1, -1, -1)
            if worker is not None:
                about = (worker.id, worker.num_workers, worker.seed)
            self.calls += 1
            seed = torch.initial_seed() % 2**62
            value = (value, *about, torch.get_num_threads(), seed, self.calls)
        if key is not None:
            value = (value, f"{type(key).__module__}.{type(key).__name__}")
        return value

    def plain(self, number):
        tensor = torch.arange(3, dtype=torch.float32) + number
        made = {
            "tuple": lambda: (tensor, number),
            "tensor": tensor.clone,
            "double": lambda: tensor.double() / 3,
            "bool": lambda: tensor > 2,
            "array": lambda: np.arange(4, dtype=np.int16) + number,
            "numpy scalar": lambda: np.float32(number / 3),
            "int": lambda: number,
            "float": lambda: number / 3,
            "str": lambda: f"sample {number}",
            "bytes": lambda: b"%d" % number,
            "dict": lambda: {"image": tensor, "name": f"{number}", "label": number},
            "named": lambda: Pair(tensor, number),
            "nested": lambda: [{"a": (tensor, [number, "x"])}, np.float64(number)],
            "ragged": lambda: torch.zeros(number % 3),
            "none": lambda: None,
            "empty": lambda: torch.zeros(0, 2),
            "half": tensor.half,
            "mixed": lambda: tensor if number % 2 else tensor.long(),
        }
        return made[self.kind]()


def number_of(key):
    if isinstance(key, str):
        return int(key.removeprefix("key "))
    return int(key[0]) if isinstance(key, tuple) else int(key)


class Map(Dataset):
    def __init__(self, length, items, keyed):
        self.length, self.items, self.keyed = length, items, keyed

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        if isinstance(key, list):
            # In bulk loading, the sampler gives batches, and batch_size is None.
            return [self[each] for each in key]
        number = number_of(key)
        if not 0 <= number < self.length:
            raise IndexError("no such number")
        return self.items.item(number, key if self.keyed else None)


class Bulk(Map):
    """Returns several samples at once, each with the type of the keys' collection."""

    def __getitems__(self, keys):
        return [(self[key], type(keys).__name__) for key in keys]


class Stream(IterableDataset):
    """Samples in unequal shares for the workers; a generator, which an error ends."""

    def __init__(self, length, items):
        self.length, self.items = length, items

    def numbers(self):
        if self.items.error.get("where") == "iter":
            raise ERRORS[self.items.error["type"]]()
        worker = get_worker_info()
        every = list(range(self.length))
        if worker is None:
            return every
        return [number for number in every if number * number % worker.num_workers == worker.id]

    def __iter__(self):
        for number in self.numbers():
            yield self.items.item(number)


class Counted(Stream):
    """A stream with a length, which is one too small."""

    def __len__(self):
        return max(0, self.length - 1)


class Steps(Stream):
    """A stream whose iterator continues after an error, and draws when it is made."""

    def __iter__(self):
        return Step(self.items, self.numbers(), drawn(self.items.draws))


class Step:
    def __init__(self, items, numbers, start=()):
        self.items, self.left, self.start = items, numbers, start

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        item = self.items.item(self.left.pop(0))
        return (item, *self.start) if self.start else item


class Stateful(Stream):
    """A stream whose iterator's state is a list that it later changes."""

    def __iter__(self):
        return Place(self.items, self.numbers())


class Place(Step):
    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def pipe(length, items):
    """Return a datapipe, for which any loader uses torch's own iterator."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    return IterableWrapper([items.item(number) for number in range(length)])


class Sampler:
    """Keys of a kind, counted when taken; `eager` draws their order in `__iter__` itself."""

    def __init__(self, length, key="int", eager=False, error=None, group=""):
        self.length, self.key, self.eager = length, key, eager
        # The kind of the batches, or none for single keys.
        self.group = group
        self.error, self.taken = error or {}, 0

    def __len__(self):
        return -(-self.length // 3) if self.group else self.length

    def __iter__(self):
        return self.counted(self.keys(self.order()))

    def order(self):
        return torch.randperm(self.length).tolist() if self.eager else list(range(self.length))

    def keys(self, order):
        keys = [keyed(self.key, number) for number in order]
        starts = range(0, self.length, 3)
        return [grouped(self.group, keys[k : k + 3]) for k in starts] if self.group else keys

    def counted(self, keys):
        for place, key in enumerate(keys):
            if self.error and place == self.error["at"]:
                raise ERRORS[self.error["type"]]()
            self.taken += 1
            yield key


class StatefulSampler(Sampler):
    """Its state is its order, drawn with the first key, and a list of the keys it gave."""

    asked = 0
    goes_on = False

    def __iter__(self):
        if not self.goes_on:
            self.drawn, self.given = self.order(), []
        self.goes_on = False
        keys = self.keys(self.drawn)
        for key in self.counted(keys[len(self.given) :]):
            self.given.append(len(self.given))
            yield key

    def state_dict(self):
        self.asked += 1
        return {"drawn": getattr(self, "drawn", []), "given": getattr(self, "given", [])}

    def load_state_dict(self, state):
        self.drawn, self.given, self.goes_on = state["drawn"], state["given"], bool(state["given"])


class Context(type(multiprocessing.get_context("fork"))):
    """A context other than multiprocessing's."""


def keyed(kind, number):
    return {
        "int": lambda: number,
        "str": lambda: f"key {number}",
        "tuple": lambda: (number, "and more"),
        "numpy": lambda: np.int32(number),
        "tensor": lambda: torch.tensor(number),
        "bool": lambda: bool(number % 2),
    }[kind]()


def grouped(kind, keys):
    return {
        "list": list,
        "tuple": tuple,
        "dict": dict.fromkeys,
        "array": np.array,
        "tensor": lambda some: torch.tensor([number_of(key) for key in some]),
        "generator": lambda some: range(number_of(some[0]), number_of(some[-1]) + 1),
    }[kind](keys)


class Collate:
    """A collate function of a kind, which may fail at its n-th call in a process."""

    def __init__(self, kind, draws=(), error=None, layout=None):
        self.kind, self.draws, self.layout = kind, list(draws), layout
        self.error, self.calls = error or {}, 0

    def __call__(self, samples):
        batch = self.collated(samples)
        return batch if self.layout is None else laid(self.layout, batch)

    def collated(self, samples):
        self.calls += 1
        if self.error and self.calls - 1 == self.error["at"]:
            raise ERRORS[self.error["type"]]()
        if self.kind == "same":
            return samples
        if self.kind == "count":
            return self.calls, repr(samples)
        if self.kind == "set":
            return {"text": {repr(samples)}, "none": None, "whole": 2**70, "class": Pair}
        batch = default_collate(samples) if isinstance(samples, list) else samples
        return {"batch": batch, "drawn": drawn(self.draws)}


def laid(layout, batch):
    """Return a batch with each tensor in a layout; `large` adds more to each."""
    if isinstance(batch, (tuple, list)):
        return [laid(layout, each) for each in batch]
    if isinstance(batch, dict):
        return {key: laid(layout, each) for key, each in batch.items()}
    if not isinstance(batch, torch.Tensor) or not batch.numel():
        return batch
    first = batch.reshape(-1)[0]
    if layout == "channels last":
        zeros = torch.zeros(2, 3, 4, 5, dtype=batch.dtype)
        return zeros.to(memory_format=torch.channels_last) + first
    if layout == "transposed":
        return batch.permute(*reversed(range(batch.dim())))
    return [batch, torch.arange(40_000, dtype=torch.int32) + first, batch + first]


class Init:
    """A worker_init_fn: draws, seeds again, sets the data set's kind, or fails in one worker."""

    def __init__(self, kind, error=None):
        self.kind, self.error = kind, error or {}

    def __call__(self, worker):
        if self.error and worker == self.error["at"]:
            raise ERRORS[self.error["type"]]()
        if self.kind == "draw":
            drawn(["torch", "numpy", "random"])
        elif self.kind == "seed":
            np.random.seed(worker)  # noqa: NPY002
            random.seed(worker)
        elif self.kind == "dataset":
            get_worker_info().dataset.length -= worker
