"""One state for all ranks: an epoch in legs, each with other ranks, batch sizes and workers.

For other seeds than the test's: ``python tests/contract/adapters/test_torch_legs.py FIRST COUNT``.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.needs("fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def sampler_of(n, ranks, rank, **options):
    samples = range(n)
    return data.DistributedSampler(samples, ranks, rank, **options)


def drawn(n, seed):
    return {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}


# The arguments of each rank's loader, from the samples, a seed, a rank and the number of ranks.
ALONE: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "sequential": lambda n, seed: {},
    "shuffle": drawn,
    "subset": lambda n, seed: {
        "sampler": data.SubsetRandomSampler(
            range(0, n, 2), generator=torch.Generator().manual_seed(seed)
        )
    },
    "replacement": lambda n, seed: {
        "sampler": data.RandomSampler(
            range(n), True, 3 * n, generator=torch.Generator().manual_seed(seed)
        )
    },
}
SHARED: dict[str, Callable[[int, int, int, int], dict[str, Any]]] = {
    "distributed": lambda n, seed, rank, ranks: {"sampler": sampler_of(n, ranks, rank, seed=seed)},
    "not shuffled": lambda n, seed, rank, ranks: {
        "sampler": sampler_of(n, ranks, rank, shuffle=False)
    },
}


@dataclass
class Epoch:
    """An epoch that a seed chooses."""

    seed: int
    kind: str = field(init=False)

    def __post_init__(self):
        chosen = random.Random(self.seed)
        self.kind = chosen.choice([*ALONE, *SHARED])
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

    def make(self, leg, rank):
        ranks, size, workers, _ = self.legs[leg]
        of_rank = (rank, ranks) if self.kind in SHARED else ()
        options = {**ALONE, **SHARED}[self.kind](self.length, self.seed, *of_rank)
        loader = cseq.DataLoader(
            Plain(self.length),
            batch_size=size,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            **options,
        )
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(self.epoch)
        return loader

    def oracle(self):
        """Return the samples of the epoch that torch's own loader gives to one rank."""
        of_rank = (0, 1) if self.kind in SHARED else ()
        options = {**ALONE, **SHARED}[self.kind](self.length, self.seed, *of_rank)
        if self.kind in SHARED:
            options["sampler"].set_epoch(self.epoch)
        return list(data.DataLoader(Plain(self.length), batch_size=None, **options))

    def run(self):
        """Take batches of all ranks in turn, leg by leg; the last leg ends the epoch."""
        expected, state, seen = self.oracle(), None, []
        for leg, (ranks, size, _, batches) in enumerate(self.legs):
            loaders = [self.make(leg, rank) for rank in range(ranks)]
            states = []
            parts = []
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
                iterator = iter(loader)
                rest = [
                    batch.reshape(-1).tolist() if torch.is_tensor(batch) else [batch]
                    for batch in (
                        iterator
                        if leg == len(self.legs) - 1
                        else (batch for _, batch in zip(range(batches), iterator, strict=False))
                    )
                ]
                parts.append(rest)
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
    return cseq.DataLoader(Plain(64), 4, **drawn(64, 1), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "generator": shuffled,
    "global": lambda: cseq.DataLoader(Plain(64), 4, shuffle=True),
    "order": lambda: cseq.DataLoader(Plain(64), 4, sampler=cseq.Shuffled(64), generator=None),
    "workers": lambda: shuffled(num_workers=2, multiprocessing_context="fork"),
    "distributed": lambda: cseq.DataLoader(Plain(64), 4, sampler=sampler_of(64, 1, 0)),
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

    def make(rank):
        sampler = sampler_of(64, 2, rank)
        return cseq.DataLoader(
            Plain(64), 4, sampler=sampler, generator=torch.Generator().manual_seed(1)
        )

    made = make(0)
    next(iter(made))
    seeds = []
    for rank in (0, 1):
        again = make(rank)
        again.load_state_dict(made.state_dict())
        iterator = iter(again)
        next(iterator)
        seeds.append(again.state_dict()["base_seed"])
    assert seeds[0] == made.state_dict()["base_seed"] != seeds[1]


def test_a_sampler_with_another_seed_is_refused():
    """Its order differs, so samples would come twice."""
    made, other = (
        cseq.DataLoader(Plain(9), sampler=sampler_of(9, 1, 0, seed=seed)) for seed in (3, 4)
    )
    next(iter(made))
    with pytest.raises(ValueError, match="seed=3, but this loader has seed=4"):
        other.load_state_dict(made.state_dict())


def main(first, count):
    """Try other seeds; return how many fail."""
    failed = 0
    for seed in range(first, first + count):
        try:
            Epoch(seed).run()
        except Exception as error:  # noqa: BLE001 - the next one is tried
            failed += 1
            print(f"{seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{count} epochs of 4 legs, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
