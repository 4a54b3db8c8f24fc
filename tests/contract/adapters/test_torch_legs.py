"""One state for all ranks: an epoch in legs, each with other ranks, batch sizes and workers.

For other seeds than the test's: ``python tests/contract/adapters/test_torch_legs.py FIRST COUNT``.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402
from torch_loaders import few_processors  # noqa: E402
from torch_states import failures  # noqa: E402

import cseq  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.needs("fork"),
    few_processors,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


ALONE = ["sequential", "shuffle", "subset", "replacement"]
SHARED = ["distributed", "not shuffled"]


def options_of(kind, n, seed, rank, ranks):
    """Return the arguments of a rank's loader of n samples."""
    samples, generator = range(n), torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {
        "sequential": {},
        "shuffle": {"shuffle": True, "generator": generator},
        "subset": {"sampler": data.SubsetRandomSampler(samples[::2], generator=generator)},
        "replacement": {"sampler": data.RandomSampler(samples, True, 3 * n, generator=generator)},
        "distributed": {"sampler": data.DistributedSampler(samples, ranks, rank, seed=seed)},
        "not shuffled": {"sampler": data.DistributedSampler(samples, ranks, rank, shuffle=False)},
    }
    return made[kind]


@dataclass
class Epoch:
    """An epoch that a seed chooses."""

    seed: int
    kind: str = field(init=False)

    def __post_init__(self):
        chosen = random.Random(self.seed)
        self.kind = chosen.choice(ALONE + SHARED)
        self.length = chosen.randint(1, 200)
        self.epoch = chosen.choice([0, 1, 5])
        self.legs = [
            (
                chosen.randint(1, 8) if self.kind in SHARED else 1,
                chosen.choice([None, 1, 2, 3, 7, 16]),
                chosen.choice([0, 0, 0, 0, 1, 2, 3]) if self.seed % 8 == 0 else 0,
                chosen.randint(0, 6),
            )
            for _ in range(4)
        ]

    def make(self, kind=cseq.DataLoader, rank=0, ranks=1, size=None, workers=0):
        """Return a rank's loader of this epoch."""
        loader = kind(
            Plain(self.length),
            size,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            **options_of(self.kind, self.length, self.seed, rank, ranks),
        )
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(self.epoch)
        return loader

    def run(self):
        """Take batches of all ranks in turn, leg by leg; the last leg ends the epoch."""
        expected, state, seen = list(self.make(data.DataLoader)), None, []
        for leg, (ranks, size, workers, batches) in enumerate(self.legs):
            states, parts = [], []
            for rank in range(ranks):
                loader = self.make(cseq.DataLoader, rank, ranks, size, workers)
                if state is not None:
                    loader.load_state_dict(state)
                taken = islice(loader, None if leg == len(self.legs) - 1 else batches)
                parts.append([torch.as_tensor(batch).reshape(-1).tolist() for batch in taken])
                states.append(json.loads(json.dumps(loader.state_dict())))
            assert len({len(part) for part in parts}) == 1, self
            # The order of the epoch: one sample of each rank at a time.
            mine = [[sample for batch in part for sample in batch] for part in parts]
            together = [sample for samples in zip(*mine, strict=True) for sample in samples]
            seen += together
            state = random.Random(self.seed + leg).choice(states)
            if size is not None:
                assert all(len(batch) == size for part in parts for batch in part[:-1]), self
            if state["_iterator_finished"]:
                break
        assert seen[: len(expected)] == expected, self
        padding = seen[len(expected) :]
        assert len(padding) < sum(ranks for ranks, *_ in self.legs), self
        assert set(padding) <= set(expected), self


@pytest.mark.parametrize("seed", range(60))
def test_an_epoch_in_legs(seed):
    """Each sample comes once, in the order of the epoch, no matter which rank's state is loaded."""
    Epoch(seed).run()


def rest_of(loader):
    """Return the remaining batches."""
    return [batch.tolist() for batch in loader]


def shuffled(**options):
    """Make a loader of 64 samples with a generator."""
    generator = torch.Generator().manual_seed(1)
    return cseq.DataLoader(Plain(64), 4, shuffle=True, generator=generator, **options)


def divided(rank, ranks, **options):
    """Make a loader of one rank's samples."""
    sampler = data.DistributedSampler(range(64), ranks, rank)
    return cseq.DataLoader(Plain(64), 4, sampler=sampler, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "generator": shuffled,
    "global": lambda: cseq.DataLoader(Plain(64), 4, shuffle=True),
    "order": lambda: cseq.DataLoader(Plain(64), 4, sampler=cseq.Shuffled(64), generator=None),
    "workers": lambda: shuffled(num_workers=2, multiprocessing_context="fork"),
    "distributed": lambda: divided(0, 1),
    "a data set with a state": lambda: cseq.StatefulDataLoader(Counting(64), 4),
}


class Counting(Plain):
    """Has a state, which is empty at first."""

    made: tuple[int, ...] = ()

    def __getitem__(self, index):
        self.made = (*self.made, index)
        return index

    def state_dict(self):
        return {str(number): {"made": number} for number in self.made}

    def load_state_dict(self, state):
        self.made = tuple(each["made"] for each in state.values())


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("count", [0, 5])
def test_distributed_checkpoints_restore_a_new_loader(kind, count, tmp_path):
    """All states have the same keys, since torch asks a new loader for them."""
    made = LOADERS[kind]()
    iterator = iter(made)
    for _ in range(count):
        next(iterator)
    dcp.save({"data": made}, checkpoint_id=tmp_path, no_dist=True)
    rest = rest_of(iterator)
    torch.manual_seed(99)
    again = LOADERS[kind]()
    dcp.load({"data": again}, checkpoint_id=tmp_path, no_dist=True)
    if kind == "global" and not count:
        # No key was drawn, so the order is the new process's.
        assert len(rest_of(again)) == len(rest)
    else:
        assert rest_of(again) == rest


def test_an_epoch_has_a_number():
    """The number is counted, and is in the state: in mid-epoch, at the end, and after it."""
    made = shuffled()
    assert made.epoch == made.state_dict()["epoch"] == 0
    for number in range(2):
        for _ in made:
            assert made.epoch == number
        assert made.epoch == number + 1
    iterator = iter(made)
    next(iterator)
    assert made.epoch == 2
    # This abandons the first iterator.
    iterator = iter(made)
    assert made.epoch == 3
    next(iterator)
    again = shuffled()
    again.load_state_dict(made.state_dict())
    assert again.epoch == 3
    rest = rest_of(again)
    assert (len(rest), again.epoch) == (15, 4)
    assert rest == rest_of(iterator)
    again.load_state_dict(made.state_dict())
    assert again.epoch == made.epoch == 4
    assert (len(rest_of(again)), again.epoch) == (16, 5)
    next(iter(made))
    # accelerate sets this key.
    again.load_state_dict({**made.state_dict(), "_iterator_finished": True})
    assert (again.epoch, len(rest_of(again)), again.epoch) == (5, 16, 6)


class Told(data.Sampler[int]):
    """The order depends on the epoch, which the sampler may count itself."""

    epoch = 0

    def __init__(self, counts):
        self.counts = counts

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ((index + self.epoch) % 9 for index in range(9))
        if self.counts:
            self.set_epoch(self.epoch + 1)

    def __len__(self):
        return 9


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("taken", [0, 2, 9])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_epochs_that_are_told_from_0_again(first, taken, counts):
    """After a resume, the order is the uninterrupted run's, no matter which numbers are told."""
    made = cseq.DataLoader(Plain(9), None, sampler=Told(counts))
    expected = [[(index + epoch) % 9 for index in range(9)] for epoch in range(first + 3)]
    for epoch in range(first):
        made.sampler.set_epoch(epoch)
        assert list(made) == expected[epoch]
    made.sampler.set_epoch(first)
    iterator = iter(made)
    for _ in range(taken):
        next(iterator)
    if taken == 9:
        assert list(iterator) == []
        if not counts:
            # Nothing tells that the next epoch has another number.
            return
    for told in (0, first + (taken == 9)):
        again = cseq.DataLoader(Plain(9), None, sampler=Told(counts))
        again.load_state_dict(made.state_dict())
        got = []
        for number in range(told, told + 2):
            again.sampler.set_epoch(number)
            got.append(list(again))
        if taken == 9:
            assert got == [expected[first + 1], expected[first + 2]]
        else:
            assert got == [expected[first][taken:], expected[first + 1]]


def test_workers_of_ranks_that_have_one_state_draw_apart():
    """With rng='worker', a rank that resumes from another rank's state has other seeds."""
    made = divided(0, 2, generator=torch.Generator().manual_seed(1))
    next(iter(made))
    seeds = []
    for rank in (0, 1):
        again = divided(rank, 2, generator=torch.Generator().manual_seed(1))
        again.load_state_dict(made.state_dict())
        iterator = iter(again)
        next(iterator)
        seeds.append(again.state_dict()["base_seed"])
    assert seeds[0] == made.state_dict()["base_seed"] != seeds[1]


if __name__ == "__main__":
    sys.exit(failures([Epoch], *map(int, sys.argv[1:])) > 0)
