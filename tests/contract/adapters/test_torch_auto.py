"""A DataLoader with ``num_workers='auto'``: another number next time, the same batches."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import same, seed_all  # noqa: E402
from torch_loaders import QUICK  # noqa: E402

import cseq  # noqa: E402

AUTO: dict[str, Any] = {"num_workers": "auto", "rng": "batch", "multiprocessing_context": QUICK}
PATIENCE = 60.0  # seconds


class Slow(data.Dataset[Any]):
    """Takes its time, and draws."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return index, torch.rand(2)


class Stream(data.IterableDataset[Any]):
    """Has no indices."""

    def __iter__(self) -> Any:
        return iter(range(4))


class Stateful(Slow):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def epochs(loader: Any, count: int) -> list[Any]:
    """Give the batches of some epochs."""
    seed_all()
    return [list(loader) for _ in range(count)]


def test_the_next_epoch_has_more_workers_and_the_batches_are_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line says why; a loop that takes no time wants all there may be."""
    caplog.set_level(logging.INFO, "cseq")
    options = {"batch_size": 2, "shuffle": True}
    loader = cseq.DataLoader(Slow(), **options, **AUTO)
    first = loader.num_workers
    assert first >= 1
    assert loader.prefetch_factor == 2
    deadline = time.monotonic() + PATIENCE
    seed_all()
    got = []
    while loader.num_workers == first:  # on a busy machine the cores may be the cause at first
        got.append(list(loader))
        assert time.monotonic() < deadline
    line = next(text for text in caplog.messages if text.startswith("num_workers"))
    assert line.startswith(f"num_workers {first} → {loader.num_workers}: the loop waits")
    assert loader.num_workers > first
    fixed = cseq.DataLoader(Slow(), **options, **(AUTO | {"num_workers": 2}))
    assert same(got, epochs(fixed, len(got)))


def test_a_state_goes_on_with_another_number() -> None:
    """In the middle of an epoch."""
    options = {"batch_size": 2, "shuffle": True}
    seed_all()
    loader = cseq.DataLoader(Slow(), **options, **AUTO)
    batches = iter(loader)
    taken = [next(batches) for _ in range(9)]
    state, rest = loader.state_dict(), list(batches)
    assert len(taken) + len(rest) == len(loader)
    loader.load_state_dict(state)
    assert same(list(loader), rest)
    again = cseq.DataLoader(Slow(), **options, **AUTO)
    again.load_state_dict(state)
    assert same(list(again), rest)


def test_an_epoch_that_was_left_tells_nothing() -> None:
    """The number stays."""
    loader = cseq.DataLoader(Slow(), batch_size=2, **AUTO)
    first = loader.num_workers
    next(iter(loader))
    assert len(list(loader)) == 20
    assert loader.num_workers == first


def test_by_position_in_copies_and_pickles() -> None:
    """As any other number."""
    loader = cseq.DataLoader(Slow(), 2, False, None, None, "auto", rng="batch")
    for each in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert each.num_workers == loader.num_workers >= 1


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Slow, {"rng": "worker"}, "with rng='worker'.*give rng='batch', or a number"),
        (Slow, {"rng": None}, "with rng='worker'.*give rng='batch', or a number"),
        (Stream, {}, "beside the IterableDataset dataset=.*give a number"),
        (
            Stateful,
            {"snapshot_every_n_steps": 1},
            "beside dataset=.*give a number, or snapshot_every_n_steps=0",
        ),
        (
            Slow,
            {"persistent_workers": True},
            "with persistent_workers=True.*leave it out",
        ),
    ],
)
def test_where_the_number_would_be_seen(dataset: Any, options: dict[str, Any], said: str) -> None:
    """An error names the argument, its value and the remedy."""
    with pytest.raises(ValueError, match=f"num_workers='auto' {said}"):
        cseq.DataLoader(dataset(), **(AUTO | options))


def test_another_word_is_an_error() -> None:
    """It names the argument, its value and what to give."""
    with pytest.raises(
        TypeError, match="num_workers='fast' is not an integer; give one, or 'auto'"
    ):
        cseq.DataLoader(Slow(), **(AUTO | {"num_workers": "fast"}))


def test_beside_an_order() -> None:
    """Where all arguments are given by position, the number counts, too."""
    order = cseq.Shuffled()
    first = cseq.DataLoader(Slow(), **AUTO).num_workers
    for number, expected in (("auto", first), (2, 2)):
        loader = cseq.DataLoader(Slow(), 2, None, order, None, number, rng="batch")
        assert loader.num_workers == expected
