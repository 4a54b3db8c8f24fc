"""`DataLoader.remake`: a batch of the latest epoch once more, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import cseq
from cseq import DataLoader

torch = pytest.importorskip("torch")
data = torch.utils.data

SAMPLES = 53


class Augmented:
    """Draws from all generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == 40 and random.random() < 2:
            raise KeyError("the 40th sample")
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), cseq.rng().random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def lists(samples: list[Any]) -> Any:
    """Collate."""
    return torch.stack(samples)


ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "generator": {"batch_size": 4, "shuffle": True, "generator": 3},
    "weighted": {"batch_size": 4, "sampler": data.WeightedRandomSampler([1.0] * SAMPLES, 90)},
    "list": {"batch_size": 4, "sampler": list(range(SAMPLES))[::-1]},
    "order": {"batch_size": 4, "sampler": cseq.Shuffled()},
    "buckets": {"batch_sampler": cseq.Buckets(np.arange(SAMPLES) % 13 + 1, budget=40)},
}


def make(order: str, **more: Any) -> DataLoader[Any]:
    """Make a loader that leaves out what cannot be made."""
    options = {"rng": "batch", "on_error": "skip"} | ORDERS[order] | more
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    return DataLoader(Augmented(), collate_fn=lists, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_as_the_loop_got_it(order: str, num_workers: int) -> None:
    """Each batch of the latest epoch, in its middle and after it; the loop draws the same."""
    torch.manual_seed(1)
    undisturbed = make(order, num_workers=num_workers)
    expected = [list(undisturbed) for _ in range(2)]
    torch.manual_seed(1)
    loader = make(order, num_workers=num_workers)
    for epoch in range(2):
        got: list[Any] = []
        for batch in loader:
            got.append(batch)
            if len(got) == 5 and not loader.skipped:
                assert torch.equal(loader.remake(3).batch, got[3])
        assert len(got) == len(expected[epoch])
        assert all(map(torch.equal, got, expected[epoch]))
        lacking = {one.batch for one in loader.skipped}
        for number, as_got in enumerate(got):
            if number in lacking:
                with pytest.raises(KeyError, match="the 40th sample"):
                    loader.remake(number)
                continue
            made = loader.remake(number, samples=True)
            assert torch.equal(made.batch, as_got)
            assert made.indices.tolist() == made.batch[:, 0].tolist()
            assert made.sample_seconds is not None
            assert len(made.sample_seconds) == len(made.indices)
            assert made.seconds >= made.sample_seconds.sum() > 0
        with pytest.raises(IndexError, match="it has fewer"):
            loader.remake(len(got))


@pytest.mark.parametrize("order", ["shuffled", "generator", "buckets"])
def test_after_a_resume(order: str) -> None:
    """Batches are numbered from the epoch's begin, also those of before the resume."""
    torch.manual_seed(2)
    first = make(order, on_error="raise", num_workers=1)
    iterator = iter(first)
    got = [next(iterator) for _ in range(3)]
    state = first.state_dict()
    del iterator
    loader = make(order, on_error="raise", num_workers=2)
    loader.load_state_dict(state)
    iterator = iter(loader)
    got.append(next(iterator))
    for number, batch in enumerate(got):
        assert torch.equal(loader.remake(number).batch, batch)


def test_what_cannot_be_made_again() -> None:
    """A clear error says why."""
    with pytest.raises(RuntimeError, match="no epoch has begun"):
        make("shuffled").remake(0)
    by_worker = DataLoader(list(range(8)), shuffle=True)
    next(iter(by_worker))
    with pytest.raises(ValueError, match="give rng='batch'"):
        by_worker.remake(0)
    with pytest.raises(ValueError, match="batch=-1"):
        by_worker.remake(-1)

    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return iter(range(4))

    stream = DataLoader(Stream(), rng="batch")
    list(stream)
    with pytest.raises(ValueError, match="one after another"):
        stream.remake(0)

    class Whole(Augmented):
        def __getitems__(self, indices: list[int]) -> Any:
            return [self[index] for index in indices]

    whole = DataLoader(Whole(), rng="batch")
    next(iter(whole))
    with pytest.raises(ValueError, match="__getitems__"):
        whole.remake(0, samples=True)
    assert whole.remake(0).indices.tolist() == [0]
