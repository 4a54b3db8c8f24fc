"""`on_error="skip"`: samples and batches that raise are skipped, logged, and not retried."""

import logging
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402
from torch_loaders import BROKEN, FORK, Broken, BrokenItems, Deadly, few_processors  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import defaults, installed  # noqa: E402

pytestmark = few_processors


def loader(dataset, num_workers, **options):
    """Make a loader that skips batches."""
    given = {"batch_size": None, "on_error": "skip"}
    if num_workers and options.get("worker_method") != "thread":
        given |= FORK
    return cseq.DataLoader(dataset, **(given | options | {"num_workers": num_workers}))


@pytest.mark.parametrize("rng", ["worker", "batch"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_broken_samples(num_workers, rng, caplog):
    made = loader(Broken(), num_workers, rng=rng, persistent_workers=num_workers > 0)
    assert made.skipped == []
    for _ in range(2):
        caplog.clear()
        assert list(made) == [0, 1, 4, 5, 6, 8, 9]
        assert made.skipped == [(None, k, None, f"LookupError: no sample {k}", [k]) for k in BROKEN]
        errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        for text, k in zip(errors, BROKEN, strict=True):
            assert f": LookupError: no sample {k} (the whole batch" in text
        assert all("the batch of" in text for text in errors)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_broken_items_of_an_iterable_data_set(num_workers):
    made = loader(BrokenItems(), num_workers)
    assert sorted(made) == [0, 1, 4, 5, 6, 8, 9]
    assert sorted(one.error for one in made.skipped) == [
        f"LookupError: no sample {k}" for k in BROKEN
    ]


class Announced(BrokenItems):
    """Tells how many items come before the first one that raises."""

    def __len__(self):
        return BROKEN[0]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("error:Length of IterableDataset")
def test_an_item_that_raises_is_none_of_a_length(num_workers):
    """An item that raises does not count: torch warns of more items than were announced."""
    made = loader(Announced(), num_workers, on_error="raise")
    assert len(made) == 2
    items = iter(made)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(LookupError, match="no sample 2"):
        next(items)
    assert items._num_yielded == 2


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_whole_batch_is_left_out(method):
    """A batch is skipped if its collate function raises, or if it has no sample left."""

    def collate(samples):
        if sum(samples) == 9:
            raise ValueError("nine")
        return samples

    made = loader(Broken(), 2, batch_size=2, collate_fn=collate, worker_method=method)
    assert list(made) == [[0, 1], [6], [8, 9]]
    assert made.skipped == [
        (None, 1, None, "LookupError: no sample 2", [2, 3]),
        (None, 2, None, "ValueError: nine", [4, 5]),
        (None, 3, 7, "LookupError: no sample 7", [7]),
    ]


@pytest.mark.parametrize("numbers", [(0, 0), (2, 0), (0, 2), (2, 3)], ids=str)
def test_a_resume(numbers):
    """Earlier skipped samples are not retried, and batches keep their positions."""
    first, second = numbers
    made = loader(Broken(), first)
    iterator = iter(made)
    assert [next(iterator) for _ in range(3)] == [0, 1, 4]
    assert made.state_dict()["_num_yielded"] == 5
    again = loader(Broken(), second)
    again.load_state_dict(made.state_dict())
    assert list(again) == list(iterator) == [5, 6, 8, 9]
    assert [one.batch for one in again.skipped] == [7]


def not_ready(number):
    raise LookupError("not ready")


def test_what_is_not_of_a_batch_is_raised():
    """Errors of a worker's setup are raised, as all its batches would fail; so are a sampler's."""

    def sampler():
        yield 0
        raise LookupError("not ready")

    with pytest.raises(LookupError, match="not ready"):
        list(loader(Broken(), 2, worker_init_fn=not_ready))
    for num_workers in (0, 2):
        with pytest.raises(LookupError, match="not ready"):
            list(loader(Broken(), num_workers, sampler=sampler()))


class Unsendable(Plain):
    def __getitem__(self, index):
        return threading.Lock() if index in BROKEN else index


class UnsendableItems(data.IterableDataset[Any]):
    def __iter__(self):
        info = data.get_worker_info()
        assert info is not None
        return map(Unsendable().__getitem__, range(info.id, 10, info.num_workers))


def answers(iterator):
    """Yield an epoch's batches, and -1 for each that raises."""
    while True:
        try:
            yield next(iterator)
        except TypeError as error:
            assert "lock" in str(error)  # noqa: PT017
            yield -1
        except StopIteration:
            return


@pytest.mark.parametrize("snapshot_every", [1, 3])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", [Unsendable, UnsendableItems])
def test_a_batch_that_cannot_be_pickled(kind, in_order, snapshot_every):
    """It raises or is skipped, and the epoch and a resume continue after it."""
    options = {"in_order": in_order, "snapshot_every_n_steps": snapshot_every}
    made = loader(kind(), 2, **options)
    assert sorted(made) == [0, 1, 4, 5, 6, 8, 9]
    assert len(made.skipped) == len(BROKEN)
    assert all("lock" in one.error for one in made.skipped)
    if in_order:
        assert [one.batch for one in made.skipped] == [*BROKEN]
        iterator = iter(made)
        assert [next(iterator) for _ in range(3)] == [0, 1, 4]
        made.load_state_dict(made.state_dict())
        assert list(made) == [5, 6, 8, 9]
    got = [*answers(iter(loader(kind(), 2, in_order=in_order, on_error="raise")))]
    assert (got if in_order else sorted(got)) == (
        [0, 1, -1, -1, 4, 5, 6, -1, 8, 9] if in_order else [-1, -1, -1, 0, 1, 4, 5, 6, 8, 9]
    )


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_a_batch_that_ends_three_workers(rng):
    """Each epoch skips it, with all its indices; a resume continues after it."""
    made = loader(Deadly(10, 4), 2, batch_size=3, rng=rng)
    for _ in range(2):
        iterator = iter(made)
        first = [next(iterator).tolist() for _ in range(2)]
        assert first == [[0, 1, 2], [6, 7, 8]]
        [entry] = made.skipped
        assert (entry.batch, entry.sample, entry.indices) == (1, None, [3, 4, 5])
        assert entry.error.startswith("WorkerDied: worker ")
        again = loader(Deadly(10, 4), 2, batch_size=3, rng=rng)
        again.load_state_dict(made.state_dict())
        assert [batch.tolist() for batch in again] == [[9]]
        assert [batch.tolist() for batch in iterator] == [[9]]


def test_too_many_deaths_are_no_error_of_a_batch():
    with pytest.raises(cseq.WorkerDied, match="max_restarts=2"):
        list(loader(Deadly(10, 4), 2, max_restarts=2))


# -- samples


class Drawing(Broken):
    """Samples that draw, even before they raise; optionally with `__getitems__` and None."""

    def __init__(self, *, together=False):
        super().__init__(10)
        if together:
            self.__getitems__ = self._together

    def _together(self, indices):
        return [self[index] for index in indices]

    def __getitem__(self, index):
        drawn = torch.rand(()).item()
        return super().__getitem__(index), drawn


def samples_of(made):
    """Return the samples of an epoch, batch by batch."""
    return [list(zip(*(part.tolist() for part in batch), strict=True)) for batch in made]


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_a_sample_is_left_out(together, caplog):
    """The batch is smaller; the stream is the same for any number of workers."""
    streams = []
    for num_workers in (0, 1, 3):
        torch.manual_seed(5)
        caplog.clear()
        made = loader(Drawing(together=together), num_workers, batch_size=4, rng="batch")
        streams.append(samples_of(made))
        assert len(streams[-1]) == len(made) == 3
        assert [[k for k, _ in batch] for batch in streams[-1]] == [[0, 1], [4, 5, 6], [8, 9]]
        assert made.skipped == [
            (None, k // 4, k, f"LookupError: no sample {k}", [k]) for k in BROKEN
        ]
        assert "skipped sample 7 of batch 1: LookupError: no sample 7" in caplog.text
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("kind", [cseq.DataLoader, cseq.StatefulDataLoader])
@pytest.mark.parametrize("numbers", [(0, 2), (2, 0), (3, 1)], ids=str)
def test_a_resume_behind_a_sample(kind, numbers):
    """A batch with missing samples counts as one."""

    def make(number):
        more = (FORK if number else {}) | {"num_workers": number}
        return kind(Drawing(), 2, rng="batch", on_error="skip", **more)

    torch.manual_seed(5)
    made = make(numbers[0])
    iterator = iter(made)
    [first], second = (samples_of([next(iterator)]) for _ in range(2))
    assert [k for k, _ in first] == [0, 1]
    again = make(numbers[1])
    again.load_state_dict(made.state_dict())
    assert second
    assert samples_of(again) == samples_of(iterator)


class Forgetful(Plain):
    def __getitem__(self, index):
        return None if index == 4 else index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_is_none(num_workers):
    """The error names it, or it is skipped; a user's collate function may accept it."""
    told = "sample 4 of Forgetful is None; is a `return` missing?"
    with pytest.raises(RuntimeError, match="NoneType") as caught:
        list(loader(Forgetful(), num_workers, batch_size=5, on_error="raise"))
    assert told in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    made = loader(Forgetful(), num_workers, batch_size=5)
    assert [batch.tolist() for batch in made] == [[0, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert made.skipped == [(None, 0, 4, f"TypeError: {told}", [4])]
    made = loader(Forgetful(), num_workers, batch_size=5, collate_fn=list)
    assert list(made) == [[0, 1, 2, 3, None], [5, 6, 7, 8, 9]]


def test_the_default_of_the_process(monkeypatch, caplog):
    """It serves loaders that frameworks make, with and without workers."""
    with pytest.raises(ValueError, match="on_error='skipp'"):
        defaults.on_error = "skipp"
    monkeypatch.setattr(defaults, "on_error", "skip")
    with installed():
        assert list(data.DataLoader(Broken(), batch_size=None)) == [0, 1, 4, 5, 6, 8, 9]
        assert list(data.DataLoader(Broken(), batch_size=None, **FORK)) == [0, 1, 4, 5, 6, 8, 9]
        made = data.DataLoader(data.datapipes.map.SequenceWrapper([1]), batch_size=None)
        assert list(made) == [1]
    assert "it ignores on_error='skip'" in caplog.text
    made = cseq.DataLoader(Broken(), batch_size=None, on_error="raise")
    with pytest.raises(LookupError, match="no sample 2"):
        list(made)
