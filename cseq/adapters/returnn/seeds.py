"""Seeds of the generators that augmentation draws from, for each sequence."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from returnn.datasets.basic import Dataset

from cseq._core import derive
from cseq.indexing.context import PURPOSE_ITEM, Numbers
from cseq.indexing.seeding import Seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cseq.indexing.context import BatchContext

__all__ = ["SequenceSeeds"]

MOST_PARTS = 1000  # of a list in which datasets are looked for


class SequenceSeeds:
    """The generators that augmentation draws from, seeded for each sequence.

    RETURNN seeds them, if at all, once an epoch and alike in every worker.
    """

    def __init__(self, batch_context: BatchContext) -> None:
        self._batch_context = batch_context  # of `cseq.rng`
        self._epoch = 0
        self._key = 0  # of the epoch
        self._word = 0  # of the sequence, for all but the global generators
        self._seeds = Seeds(batch_context)
        self._setters: list[Callable[[int], object]] = []  # seed the dataset's own generators
        self._passed: list[Any] = []  # generators passed to the user's functions in this epoch
        self.in_order = False  # whether user functions must get all sequences, in order

    def wrapped(self, plan: Any) -> Any:
        """Copy a dataset's configuration, its user functions wrapped so as to seed their `rng`."""
        if type(plan) is not dict:
            return plan
        copy = {key: self.wrapped(value) for key, value in plan.items()}
        kind = copy.get("class")
        if getattr(kind, "__name__", kind) == "PostprocessingDataset" and not copy.get(
            "num_workers"
        ):
            for key in ("map_seq", "map_seq_stream"):
                if copy.get(key) is not None:
                    copy[key] = _Seeded(copy[key], self)
                    self.in_order = True
        return copy

    def find(self, dataset: Any) -> None:
        """Find generators in a dataset and in those within it."""
        for inner in _datasets_in(dataset):
            audio = getattr(inner, "_audio_random", None)
            if isinstance(audio, np.random.RandomState):
                self._setters.append(audio.seed)
            for name in ("targets", "orth_vocab", "bpe"):
                seed = getattr(vars(inner).get(name), "set_random_seed", None)
                if seed is not None:
                    self._setters.append(seed)

    def begin(self, dataset: Any, epoch: int | None) -> None:
        """Begin an epoch."""
        fixed = dataset.fixed_random_seed
        seed, epoch = (dataset.random_seed_offset, epoch or 0) if fixed is None else (fixed, 0)
        [self._key] = derive(seed % 2**64, epoch, PURPOSE_ITEM, 1)
        self._epoch = epoch
        self._passed = []
        self._batch_context.clear()

    def seed(self, number: int, place: int) -> None:
        """Seed all generators for a sequence: the worker's `number`-th, at `place` in the epoch."""
        self._batch_context.set(Numbers(self._key, self._epoch, number, place))
        [self._word] = derive(self._key, place, PURPOSE_ITEM, 1)
        self._seeds.seed(self._key, place)
        for set_seed in (*self._setters, *(generator.seed for generator in self._passed)):
            set_seed(self._word % 2**32)

    def add(self, generator: Any) -> None:
        """Seed a generator that a user function gets, now and for each later sequence."""
        if not any(generator is known for known in self._passed):
            self._passed.append(generator)
            generator.seed(self._word % 2**32)


class _Seeded:
    """A function of the user's whose generator is seeded for each sequence."""

    def __init__(self, function: Callable[..., Any], seeds: SequenceSeeds) -> None:
        self._function = function
        self._seeds = seeds
        self.preserves_num_seqs = getattr(function, "preserves_num_seqs", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("rng"), np.random.RandomState):
            self._seeds.add(kwargs["rng"])
        return self._function(*args, **kwargs)


def _datasets_in(dataset: Any) -> Iterator[Any]:
    """Find a dataset and all datasets in it, also in its lists, tuples and dictionaries."""
    seen, left = set(), [dataset]
    while left:
        inner = left.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        for value in vars(inner).values():
            parts: Iterable[Any] = value.values() if isinstance(value, dict) else [value]
            if isinstance(value, (list, tuple)):
                parts = value
            left += (part for part in islice(parts, MOST_PARTS) if isinstance(part, Dataset))
