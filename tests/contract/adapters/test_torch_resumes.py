"""Random resumes of `cseq.DataLoader`: the rest, and the next epochs, are the uninterrupted run's.

A seed chooses the case: the samples, the loader's arguments, where the state is taken, and where it
is taken again before it is used. For seeds other than the test's, in processes and with threads:
``python tests/contract/adapters/test_torch_resumes.py FIRST COUNT``.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain, Sharded  # noqa: E402
from torch_loaders import few_processors  # noqa: E402
from torch_states import Tally, failures  # noqa: E402

import cseq  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

# The cases of `make test`, and those that `make check-nightly` adds.
CASES, NIGHTLY = 40, 60
# Epochs of a case.
LONG = 3

pytestmark = [
    pytest.mark.needs("fork"),
    few_processors,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:Neither dataset nor"),
]


class Turning(data.Sampler[int]):
    """Its state has the number of epochs, which turns the order, and the position."""

    def __init__(self, length):
        self.length, self.at, self.epochs = length, 0, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield (self.at - 1 + self.epochs) % self.length
        self.at, self.epochs = 0, self.epochs + 1

    def state_dict(self):
        return {"at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.at, self.epochs = state["at"], state["epochs"]


class Pairs(Turning):
    def __len__(self):
        return (self.length + 1) // 2

    def __iter__(self):
        while self.at < self.length:
            batch = [(k + self.epochs) % self.length for k in range(self.at, self.at + 2)]
            self.at += 2
            yield batch
        self.at, self.epochs = 0, self.epochs + 1


class Derived(data.RandomSampler):
    """A sampler of another type that draws like torch's."""


class Ordered:
    """A sampler whose only content is an order, drawn from its generator."""

    def __init__(self, length, generator):
        self.length, self.generator = length, generator

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


class Walk:
    def __init__(self, numbers):
        self.numbers, self.at = numbers, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def share(length):
    """Return the numbers of this worker; workers have unequal shares."""
    info = data.get_worker_info()
    if info is None:
        return range(length)
    return range(info.id, length + 3 * info.id, info.num_workers)


class Walked(data.IterableDataset[int]):
    """Its iterator has a state, or nothing has one."""

    def __init__(self, length, has_state):
        self.length, self.has_state = length, has_state

    def __iter__(self):
        numbers = share(self.length)
        return Walk(numbers) if self.has_state else iter(numbers)


class Counted(data.IterableDataset[Any]):
    """Has a state that counts the epochs; it may be its own iterator."""

    def __init__(self, length, is_own):
        self.length, self.is_own, self.epoch, self.at = length, is_own, 0, 0

    def __iter__(self):
        if not self.is_own:
            return iter(self.__next__, None)
        self.at = 0
        return self

    def __next__(self):
        numbers = share(self.length)
        if self.at >= len(numbers):
            self.at, self.epoch = 0, self.epoch + 1
            raise StopIteration
        self.at += 1
        return 100 * self.epoch + numbers[self.at - 1]

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class Noting(Tally):
    """Its samples show their number as well."""

    def __getitem__(self, index):
        return 1000 * super().__getitem__(index) + index


MAKERS: dict[str, Callable[[int, Any], dict[str, Any]]] = {
    "sequential": lambda n, g: {},
    "loader's": lambda n, g: {"shuffle": True, "generator": g},
    "global": lambda n, g: {"shuffle": True},
    "random": lambda n, g: {"sampler": data.RandomSampler(range(n), generator=g)},
    "shared": lambda n, g: {
        "sampler": data.SubsetRandomSampler(range(n), generator=g),
        "generator": g,
    },
    "replacement": lambda n, g: {
        "sampler": data.RandomSampler(range(n), replacement=True, num_samples=40, generator=g)
    },
    "subset": lambda n, g: {"sampler": data.SubsetRandomSampler(range(n), generator=g)},
    "subset, global": lambda n, g: {"sampler": data.SubsetRandomSampler(range(n))},
    "weighted": lambda n, g: {"sampler": data.WeightedRandomSampler([1.0] * n, n, generator=g)},
    "derived": lambda n, g: {"sampler": Derived(range(n), generator=g)},
    "ordered": lambda n, g: {"sampler": Ordered(n, g)},
    "turning": lambda n, g: {"sampler": Turning(n)},
    "pairs": lambda n, g: {"batch_sampler": Pairs(n)},
}
# torch's generator draws the later epochs.
GLOBAL = ("global", "subset, global")
ITERABLE: dict[str, Callable[[int], Any]] = {
    "walk": lambda n: Walked(n, True),
    "no state": lambda n: Walked(n, False),
    "counted": lambda n: Counted(n, False),
    "own iterator": lambda n: Counted(n, True),
}


@dataclass
class Case:
    """The choices of one seed."""

    seed: int
    # The methods before and after a state.
    methods: tuple[str, str] = ("multiprocessing", "multiprocessing")
    kind: str = field(init=False)

    def __post_init__(self):
        chosen = random.Random(self.seed)
        self.kind = chosen.choice([*MAKERS, *ITERABLE])
        self.length = chosen.choice([5, 6, 7, 8])
        self.num_workers = chosen.choice([0, 0, 1, 2])
        self.batch_size = None if self.kind == "pairs" else chosen.choice([None, 2])
        # These samplers draw when an iterator is made, before the case can record anything.
        if self.kind in ("derived", "ordered"):
            self.batch_size = 2
        self.has_state = self.kind not in ITERABLE and chosen.random() < 0.2
        self.every = chosen.choice([0, 1, 3, 100])
        keeps_state = self.has_state or self.kind in ("counted", "own iterator")
        # An epoch leaves counts behind.
        if keeps_state:
            self.every = self.every or 1
        self.rng = chosen.choice(["worker", "batch"])
        self.is_kept = self.num_workers > 0 and chosen.random() < 0.4
        self.drop_last = self.batch_size is not None and chosen.random() < 0.2
        may_differ = self.kind not in ITERABLE and not self.has_state
        # In later epochs, persistent workers draw no seeds from a generator that may be shared.
        others = [1, 2] if self.is_kept else [0, 1, 2]
        self.second = chosen.choice(others) if may_differ else self.num_workers
        self.epochs = chosen.choice([0, 0, 1, 2])
        self.place = chosen.choice(["idle", "begun", "middle", "middle", "end", "end"])
        self.again = chosen.choice([None, None, "idle", "begun", "middle", "end"])
        self.takes = chosen.randint(1, 6), chosen.randint(1, 4)
        if keeps_state and "thread" in self.methods:
            # Only a single thread can have the data set's state, and keeps it in the next epoch.
            self.methods = "thread", "thread"
        if "thread" in self.methods and (keeps_state or self.kind in ITERABLE):
            self.num_workers = self.second = min(1, self.num_workers)

    def __str__(self):
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())

    def make(self, num_workers, method):
        options = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.kind in ITERABLE:
            dataset = ITERABLE[self.kind](self.length)
        else:
            dataset = Noting(self.length) if self.has_state else Plain(self.length)
            chosen = MAKERS[self.kind](self.length, torch.Generator().manual_seed(self.seed))
            options = chosen if "batch_sampler" in chosen else {**options, **chosen}
        return cseq.DataLoader(
            dataset,
            rng=self.rng,
            num_workers=num_workers,
            worker_method=method,
            multiprocessing_context="fork" if num_workers and method != "thread" else None,
            persistent_workers=self.is_kept and num_workers > 0,
            snapshot_every_n_steps=self.every,
            **options,
        )

    def run(self):
        """Compare what follows a state with the original loader's continuation."""
        torch.manual_seed(self.seed)
        made = self.make(self.num_workers, self.methods[0])
        for _ in range(self.epochs):
            numbers(made)
        place = Place(made, self.place, self.takes[0])
        torch.manual_seed(self.seed + 1)
        again = self.make(self.second, self.methods[1])
        again.load_state_dict(place.state)
        if self.again is not None:
            other = Place(again, self.again, self.takes[1])
            self.compare(other.whole(), place.rest, place.is_within)
            other.is_within |= place.is_within and self.again == "idle"
            place = other
            again = self.make(self.second, self.methods[1])
            again.load_state_dict(place.state)
        self.compare([numbers(again) for _ in place.rest], place.rest, place.is_within)

    def compare(self, epochs, expected, is_within):
        """Compare epochs; if later ones depend on torch's generator, compare their sets of samples.

        `is_within` says that the first epoch had begun.
        """
        exact = len(epochs)
        if self.kind in GLOBAL:
            exact = int(is_within)
        epochs = epochs[: len(expected)]
        expected = expected[: len(epochs)]
        assert epochs[:exact] == expected[:exact], f"{epochs} for {expected}: {self}"
        for epoch in epochs[exact:]:
            samples = [sample % 1000 for batch in epoch for sample in batch]
            assert len(set(samples)) == len(samples) == sum(map(len, expected[-1])), f"{self}"


class Place:
    """A place in a run: the state, the part of its epoch taken before, and what follows."""

    def __init__(self, made, name, takes):
        self.before: list[Any] = []
        self.rest: list[Any] = []
        self.has_begun = self.is_within = name != "idle"
        if name == "idle":
            self.state = copied(made)
        else:
            iterator = iter(made)
            count = {"begun": 0, "middle": takes, "end": sys.maxsize}[name]
            self.before = [listed(batch) for batch in islice(iterator, count)]
            self.is_within = len(self.before) == count
            self.state = copied(made)
            if self.is_within:
                self.rest = [[listed(batch) for batch in iterator]]
        self.rest += [numbers(made) for _ in range(LONG - len(self.rest))]

    def whole(self):
        """Return the epoch that was current at first, and those after it."""
        if self.is_within:
            return [self.before + self.rest[0], *self.rest[1:]]
        return [self.before, *self.rest] if self.has_begun else self.rest


def copied(made):
    """Return the state as a file would store it."""
    return pickle.loads(pickle.dumps(made.state_dict()))


def numbers(made):
    """Return the numbers of an epoch."""
    return [listed(batch) for batch in made]


def listed(batch):
    found = batch.tolist() if isinstance(batch, torch.Tensor) else batch
    return found if isinstance(found, list) else [found]


def with_threads(seed):
    """Return a seed's case with threads before the state, after it, or both."""
    kinds = ("thread", "multiprocessing"), ("multiprocessing", "thread"), ("thread", "thread")
    return Case(seed, kinds[seed % 3])


@pytest.mark.parametrize(
    "seed",
    [
        *range(CASES),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(CASES, CASES + NIGHTLY)),
    ],
)
@pytest.mark.parametrize("case", [Case, with_threads])
def test_a_resume(case, seed):
    case(seed).run()


@pytest.mark.parametrize("lengths", [(0, 2, 1), (1, 4, 2), (2, 0, 4), (4, 1, 0)])
def test_workers_of_unequal_lengths_keep_their_turns(lengths):
    """Wherever a state is taken, the next batch comes from the worker whose turn it is."""

    def samples(batches, number=None):
        return [(worker, sample) for worker, sample, *_ in islice(batches, number)]

    options = {"dataset": Sharded(*lengths), "batch_size": None, "num_workers": 3}
    expected = samples(data.DataLoader(**options))
    for taken in range(len(expected)):
        loader = cseq.DataLoader(**options)
        assert samples(loader, taken) == expected[:taken]
        other = cseq.DataLoader(**options)
        other.load_state_dict(loader.state_dict())
        assert samples(other) == expected[taken:]


if __name__ == "__main__":
    sys.exit(failures([Case, with_threads], *map(int, sys.argv[1:])) > 0)
