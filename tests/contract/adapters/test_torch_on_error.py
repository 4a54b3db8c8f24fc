"""`on_error="skip"`: batches that raise are left out, logged, counted, and not made again."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from killing import kill  # noqa: E402
from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import defaults, installed  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

QUICK = QUICKEST.start_method

BROKEN = (2, 3, 7)


class Broken(Plain):
    """Some of its samples raise."""

    def __getitem__(self, index: int) -> int:
        if index in BROKEN:
            raise LookupError(f"no sample {index}")
        return index


class BrokenItems(data.IterableDataset[Any]):
    """Some of its samples raise; it goes on behind them."""

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return Items(first, step)


class Items:
    """An iterator that goes on behind an error."""

    def __init__(self, first: int, step: int) -> None:
        self.next, self.step = first, step

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> int:
        index, self.next = self.next, self.next + self.step
        if index >= 10:
            raise StopIteration
        if index in BROKEN:
            raise LookupError(f"no sample {index}")
        return index


def loader(dataset: Any, num_workers: int, **options: Any) -> Any:
    """Make a loader that leaves batches out."""
    if num_workers:
        options = {"multiprocessing_context": QUICK, **options}
    return cseq.DataLoader(
        dataset, num_workers=num_workers, **{"batch_size": None, "on_error": "skip", **options}
    )


@pytest.mark.parametrize("rng", ["worker", "batch"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_broken_samples(num_workers: int, rng: str, caplog: pytest.LogCaptureFixture) -> None:
    """In each of two epochs the same ones are left out."""
    persistent = num_workers > 0
    made = loader(Broken(), num_workers, rng=rng, persistent_workers=persistent)
    assert made.skipped == []
    for _ in range(2):
        caplog.clear()
        assert list(made) == [0, 1, 4, 5, 6, 8, 9]
        assert made.skipped == [(k, f"LookupError: no sample {k}") for k in BROKEN]
        errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        assert [text.split(":", 1)[1] for text in errors] == [
            f" LookupError: no sample {k}" for k in BROKEN
        ]
        assert all("the batch of" in text for text in errors)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_broken_items_of_an_iterable_data_set(num_workers: int) -> None:
    made = loader(BrokenItems(), num_workers)
    assert sorted(made) == [0, 1, 4, 5, 6, 8, 9]
    assert sorted(error for _, error in made.skipped) == [
        f"LookupError: no sample {k}" for k in BROKEN
    ]


def test_a_whole_batch_is_left_out() -> None:
    """Also one whose collate function raises."""

    def collate(samples: list[int]) -> Any:
        if sum(samples) == 9:
            raise ValueError("nine")
        return samples

    made = loader(Broken(), 2, batch_size=2, collate_fn=collate, in_order=False)
    assert sorted(made) == [[0, 1], [8, 9]]
    assert sorted(error for _, error in made.skipped) == [
        "LookupError: no sample 2", "LookupError: no sample 7", "ValueError: nine"
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", [(0, 0), (2, 0), (0, 2), (2, 3)], ids=str)
def test_a_resume(numbers: tuple[int, int]) -> None:
    """What was left out before is not tried again, and batches are where they were."""
    first, second = numbers
    made = loader(Broken(), first)
    iterator = iter(made)
    assert [next(iterator) for _ in range(3)] == [0, 1, 4]
    assert made.state_dict()["_num_yielded"] == 5
    again = loader(Broken(), second)
    again.load_state_dict(made.state_dict())
    assert list(again) == list(iterator) == [5, 6, 8, 9]
    assert [number for number, _ in again.skipped] == [7]


def not_ready(number: int) -> None:
    """Raise."""
    raise LookupError("not ready")


def test_what_is_not_of_a_batch_is_raised() -> None:
    """A worker that cannot be set up would have nothing but errors; nor are a sampler's skipped."""

    def sampler() -> Iterator[int]:
        yield 0
        raise LookupError("not ready")

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return sampler()

    with pytest.raises(LookupError, match="not ready"):
        list(loader(Broken(), 2, worker_init_fn=not_ready))
    for num_workers in (0, 2):
        with pytest.raises(LookupError, match="not ready"):
            list(loader(Broken(), num_workers, sampler=Sampler()))


class Unsendable(Plain):
    """Some of its samples cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return threading.Lock() if index in BROKEN else index


@pytest.mark.parametrize("in_order", [False, True])
def test_a_batch_that_cannot_be_pickled(in_order: bool) -> None:
    """It is left out; a resume begins behind it."""
    made = loader(Unsendable(), 2, in_order=in_order)
    assert sorted(made) == [0, 1, 4, 5, 6, 8, 9]
    assert len(made.skipped) == len(BROKEN)
    assert all("lock" in error for _, error in made.skipped)
    if in_order:
        assert [number for number, _ in made.skipped] == [*BROKEN]
        iterator = iter(made)
        assert [next(iterator) for _ in range(3)] == [0, 1, 4]
        made.load_state_dict(made.state_dict())
        assert list(made) == [5, 6, 8, 9]


class UnsendableItems(data.IterableDataset[Any]):
    """Some of its samples cannot be pickled."""

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        assert info is not None
        for index in range(info.id, 10, info.num_workers):
            yield threading.Lock() if index in BROKEN else index


@pytest.mark.parametrize("snapshot_every", [1, 3])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_batch_of_an_iterable_data_set_that_cannot_be_pickled(
    in_order: bool, snapshot_every: int
) -> None:
    """It ends nothing: it is raised in its place, or left out; a resume begins behind it."""
    options = {"in_order": in_order, "snapshot_every_n_steps": snapshot_every}
    made = loader(UnsendableItems(), 2, **options)
    assert sorted(made) == [0, 1, 4, 5, 6, 8, 9]
    assert len(made.skipped) == len(BROKEN)
    if in_order:
        iterator = iter(made)
        assert [next(iterator) for _ in range(3)] == [0, 1, 4]
        made.load_state_dict(made.state_dict())
        assert list(made) == [5, 6, 8, 9]
    iterator = iter(loader(UnsendableItems(), 2, in_order=in_order, on_error="raise"))
    got = []
    while True:
        try:
            got.append(next(iterator))
        except TypeError as error:
            assert "lock" in str(error)  # noqa: PT017
            got.append(-1)
        except StopIteration:
            break
    assert (got if in_order else sorted(got)) == (
        [0, 1, -1, -1, 4, 5, 6, -1, 8, 9] if in_order else [-1, -1, -1, 0, 1, 4, 5, 6, 8, 9]
    )


def test_a_worker_that_dies_of_a_batch_is_no_error_of_it() -> None:
    class Deadly(Plain):
        def __getitem__(self, index: int) -> int:
            if index == 4:
                kill(os.getpid())
            return index

    with pytest.raises(cseq.WorkerDied):
        list(loader(Deadly(), 2))


def test_the_default_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is for loaders that frameworks make, with and without workers."""
    with pytest.raises(ValueError, match="on_error='skipp'"):
        defaults.on_error = "skipp"
    monkeypatch.setattr(defaults, "on_error", "skip")
    workers = {"num_workers": 2, "multiprocessing_context": QUICK}
    with installed():
        assert list(data.DataLoader(Broken(), batch_size=None)) == [0, 1, 4, 5, 6, 8, 9]
        assert list(data.DataLoader(Broken(), batch_size=None, **workers)) == [0, 1, 4, 5, 6, 8, 9]
        made = data.DataLoader(data.datapipes.map.SequenceWrapper([1]), batch_size=None)
        assert list(made) == [1]
    assert "it cannot do on_error='skip'" in caplog.text
    made = cseq.DataLoader(Broken(), batch_size=None, on_error="raise")
    with pytest.raises(LookupError, match="no sample 2"):
        list(made)


def test_an_argument_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="on_error='ignore'"):
        cseq.DataLoader(Broken(), on_error="ignore")
