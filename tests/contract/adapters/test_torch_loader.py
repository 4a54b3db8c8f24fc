"""`cseq.DataLoader` against torch's own: the same batches, bit for bit, and the same contract."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import decimal
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import import_path  # noqa: E402
from interrupting import first_hits, interrupted  # noqa: E402
from killing import KILLED, kill  # noqa: E402
from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Augmented,
    Counting,
    Eager,
    Plain,
    Sharded,
    as_is,
    drawn,
    same,
    seed_all,
    without_told,
)

import cseq.testing  # noqa: E402
from cseq.adapters.torch import LoaderTimeout, names  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METHODS = multiprocessing.get_all_start_methods()

pytestmark = [
    pytest.mark.needs("quick processes"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on few processors
]

QUICK = QUICKEST.start_method  # forked, where the system can
FORK: Any = {"num_workers": 2, "multiprocessing_context": QUICK}

forked = pytest.mark.skipif(QUICK != "fork", reason="what a forked worker inherits")


def loader(dataset: Any, **options: Any) -> Any:
    """Make a loader of ours with two workers."""
    return cseq.DataLoader(dataset, **(FORK | options))


def run(kind: Any, dataset: Any, epochs: int, options: dict[str, Any]) -> Any:
    """Iterate from the same seeds; return the batches, and what the trainer draws next."""
    seed_all()
    made = kind(dataset, **options)
    batches = [list(made) for _ in range(epochs)]
    return batches, drawn()


def check(dataset: Any, epochs: int = 2, **options: Any) -> Any:
    """Compare ours with torch's; return the batches."""
    options = FORK | options
    if not options["num_workers"]:
        del options["multiprocessing_context"]
    ours = run(cseq.DataLoader, dataset, epochs, options)
    assert same(ours, run(data.DataLoader, dataset, epochs, options))
    return ours[0]


# ── the same batches ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "shuffle": True, "persistent_workers": True},
        {"batch_size": 5, "shuffle": True, "drop_last": True, "num_workers": 3},
        {"batch_size": None},
        {"batch_size": 3, "num_workers": 1, "prefetch_factor": 5},
        {"batch_size": 4, "shuffle": True, "num_workers": 0},
        {"batch_size": None, "num_workers": 0},
        {"batch_size": 30},
    ],
    ids=str,
)
def test_batches_are_torchs_bit_for_bit(options: Any) -> None:
    batches = check(Augmented(), **options)
    assert all(len(epoch) for epoch in batches)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_of_the_users_own(persistent: bool) -> None:
    def generated(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        options = FORK | {"shuffle": True, "generator": generator}
        ours = run(kind, Augmented(), 2, options | {"persistent_workers": persistent})
        return ours, generator.get_state()

    assert same(generated(cseq.DataLoader), generated(data.DataLoader))


def test_a_sampler_that_draws_at_once() -> None:
    def eager(kind: Any, **options: Any) -> Any:
        sampler = Eager(9)
        made = run(kind, Augmented(9), 2, {"sampler": sampler, "batch_size": None, **options})
        return made, sampler.calls

    assert same(eager(cseq.DataLoader, **FORK), eager(data.DataLoader, **FORK))
    assert same(eager(cseq.DataLoader), eager(data.DataLoader))
    assert eager(cseq.DataLoader, **FORK)[1] == 4


LEVEL = [0]


class Levelled(data.Dataset):  # type: ignore[type-arg]
    """Its samples show what the sampler has changed in this process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> tuple[int, int]:
        return key, LEVEL[0]


class Levelling(data.RandomSampler):
    """Changes it with each key."""

    def __iter__(self) -> Iterator[int]:
        for key in super().__iter__():
            LEVEL[0] += 1
            yield key


def test_a_sampler_that_changes_what_the_data_set_sees() -> None:
    """Workers are forked before any key is drawn."""

    def levelled(kind: Any) -> Any:
        LEVEL[0] = 0
        return run(kind, Levelled(), 2, FORK | {"sampler": Levelling(Levelled()), "batch_size": 2})

    assert same(levelled(cseq.DataLoader), levelled(data.DataLoader))


class Noisy(Levelled):
    """Draws from the loader's generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __getitem__(self, key: int) -> Any:
        return key, torch.rand((), generator=self.generator)


@forked  # torch's own loader cannot send a generator
def test_a_data_set_that_has_the_loaders_generator() -> None:
    def noisy(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        options = FORK | {"shuffle": True, "generator": generator, "batch_size": 2}
        return run(kind, Noisy(generator), 2, options)

    assert same(noisy(cseq.DataLoader), noisy(data.DataLoader))


@pytest.mark.parametrize("sizes", [(1, 4, 2), (3, 5), (0, 4, 9), (5, 1, 3, 0, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"batch_size": 2}, {"batch_size": 2, "drop_last": True}, {"batch_size": None}],
    ids=str,
)
def test_iterable_batches_are_torchs(sizes: Any, options: Any) -> None:
    check(Sharded(*sizes), num_workers=len(sizes), **options)


def test_iterable_with_persistent_workers_and_without_any() -> None:
    check(Sharded(3, 6), batch_size=2, persistent_workers=True)
    check(Sharded(3, 6), batch_size=2, num_workers=0)


@pytest.mark.parametrize("options", [{}, FORK, FORK | {"persistent_workers": True}], ids=str)
def test_a_batch_size_that_is_set_at_the_batch_sampler(options: Any) -> None:
    def sizes(kind: Any) -> Any:
        seed_all()
        made = kind(Sharded(7, 7), batch_size=2, **options)
        made.batch_sampler.batch_size = 3
        before = list(made)
        made.batch_sampler.batch_size = 4
        return before, list(made)

    ours = sizes(cseq.DataLoader)
    assert same(ours, sizes(data.DataLoader))
    assert [len(epoch[0][0]) for epoch in ours] == [3, 4]


class Point(NamedTuple):
    """A sample."""

    x: Any
    y: Any


class Structured(Plain):
    """Samples of many types."""

    def __getitem__(self, index: int) -> Any:
        return (
            Point(torch.full((2, 3), index), np.int16(index)),
            {"a": [1.5 * index, index % 2 == 0], "b": b"bytes"},
            np.full((100, 60), index, np.float32),
            torch.full((100, 60), index, dtype=torch.bfloat16),
            np.float64(index),
            torch.tensor(index),
            torch.zeros(0),
        )


def test_samples_of_many_types() -> None:
    [[*batches]] = check(Structured(), epochs=1, batch_size=4)
    assert isinstance(batches[0][0], Point)
    assert batches[0][2].shape == (4, 100, 60)


class Mixed(Plain):
    """Large arrays and tensors that cannot be stacked as they are."""

    def __getitem__(self, index: int) -> Any:
        kind = torch.int64 if index % 2 else torch.float64
        big = np.full((90, 90), index, np.float32 if index % 2 else np.float64)
        return torch.full((90, 90), index, dtype=kind), big


def test_types_are_promoted_as_torch_does() -> None:
    [[batch, *_]] = check(Mixed(), epochs=1, batch_size=4)
    assert [each.dtype for each in batch] == [torch.float64, torch.float64]


KEYS = [3, "text", (1, 2), {"a": 1}, True, np.int64(4), 2**70, None, 1.5, [5, 6], [True, 7]]


class Typed(data.Dataset[Any]):
    """Tells the type of a key."""

    def __getitem__(self, key: Any) -> Any:
        inner = [type(each).__name__ for each in key] if isinstance(key, list) else None
        return type(key).__name__, repr(key), inner


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_keys_reach_the_data_set_as_they_are(rng: str) -> None:
    expected = [Typed()[key] for key in KEYS]
    made = loader(Typed(), sampler=KEYS, batch_size=None, collate_fn=as_is, rng=rng)
    assert list(made) == expected
    made = loader(Typed(), batch_sampler=[KEYS, tuple(KEYS)], collate_fn=as_is, rng=rng)
    assert list(made) == [expected, expected]


class Together(Plain):
    """Gives a batch of samples at once."""

    def __getitems__(self, keys: list[int]) -> list[int]:
        assert type(keys) is list
        return [10 * key for key in keys]


def test_getitems_is_used() -> None:
    assert [b.tolist() for b in loader(Together(5), batch_size=2)] == [[0, 10], [20, 30], [40]]
    subset = data.Subset(Together(5), [4, 2])
    assert [b.tolist() for b in loader(subset, batch_size=2)] == [[40, 20]]


@pytest.mark.parametrize("method", [m for m in METHODS if m != QUICK])
def test_other_start_methods(method: str) -> None:
    options = FORK | {"batch_size": 2, "shuffle": True}
    expected = run(cseq.DataLoader, Augmented(9), 1, options)
    options["multiprocessing_context"] = method
    assert same(run(cseq.DataLoader, Augmented(9), 1, options), expected)


@forked
def test_what_cannot_be_pickled_is_inherited() -> None:
    lock = threading.Lock()

    class Local(Plain):
        def __getitem__(self, index: int) -> Any:
            with lock:
                return index

    assert [b.tolist() for b in loader(Local(3))] == [[0], [1], [2]]


# ── samplers and how far ahead they are asked ──────────────────────────────────────────────


def test_one_key_for_each_batch_delivered() -> None:
    sampler = Counting(range(100))
    iterator = iter(loader(Plain(100), sampler=sampler, batch_size=None))
    assert sampler.count == 4
    for taken in range(1, 6):
        next(iterator)
        assert sampler.count == 4 + taken


def failing() -> Iterator[int]:
    """A sampler that raises behind its sixth key."""
    yield from range(6)
    raise KeyError("sampler")


def test_a_sampler_that_raises_loses_no_batch() -> None:
    class Failing(Counting):
        def __iter__(self) -> Iterator[int]:
            return failing()

    taken = []
    iterator = iter(loader(Plain(100), sampler=Failing(()), batch_size=None))
    with pytest.raises(KeyError, match="sampler"):
        taken.extend(iterator)
    iterator = iter(loader(Plain(100), sampler=Failing(()), batch_size=None))
    taken = []
    with pytest.raises(KeyError):
        while True:
            taken.append(next(iterator))
    assert taken == list(range(6))


def test_the_worker_of_a_batch() -> None:
    batches = list(loader(Augmented(9), num_workers=3, batch_size=1))
    assert [int(b["told"][0]) for b in batches] == [0, 1, 2] * 3


def test_an_infinite_sampler() -> None:
    def forever() -> Iterator[int]:
        while True:
            yield 1

    class Forever(Counting):
        def __iter__(self) -> Iterator[int]:
            return forever()

    iterator = iter(loader(Plain(), sampler=Forever(()), batch_size=3))
    assert [next(iterator).tolist() for _ in range(20)] == [[1, 1, 1]] * 20


class Gated(Plain):
    """Index 2 waits until a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(10)
        self.path = path

    def __getitem__(self, index: int) -> int:
        while index == 2 and not self.path.exists():
            time.sleep(0.01)
        return index


@pytest.mark.parametrize("in_order", [1, 0])
def test_in_order_may_be_a_number(in_order: int) -> None:
    """As it may for torch's: from a command line, for example."""
    assert sorted(loader(Plain(5), batch_size=None, in_order=in_order)) == [0, 1, 2, 3, 4]


def test_out_of_order(tmp_path: Path) -> None:
    """One worker waits: of its batches, only one before that comes; those of the other all do."""
    gate = tmp_path / "gate"
    iterator = iter(loader(Gated(gate), batch_size=None, in_order=False))
    first = [next(iterator) for _ in range(8)]
    gate.touch()
    assert sorted([*first, *iterator]) == list(range(10))
    assert 2 not in first
    others = [index for index in first if index != 0]
    assert others == sorted(others)


@pytest.mark.parametrize("sizes", [(3, 30), (0, 4, 9)], ids=str)
def test_out_of_order_of_an_iterable_data_set(sizes: Any) -> None:
    made = loader(Sharded(*sizes), num_workers=len(sizes), batch_size=None, in_order=False)
    iterator = iter(made)
    assert {worker.pid for worker in iterator._workers}  # not torch's own
    samples = [(number, sample) for number, sample, *_ in iterator]
    assert sorted(samples) == [(n, k) for n, size in enumerate(sizes) for k in range(size)]
    for number in range(len(sizes)):  # a worker's own are in order
        assert [k for n, k in samples if n == number] == list(range(sizes[number]))
    state = made.state_dict()
    assert state["counts"] == list(sizes)


# ── lifetimes ──────────────────────────────────────────────────────────────────────────────


def test_two_iterators_at_once() -> None:
    made = loader(Plain(6), batch_size=None)
    one, other = iter(made), iter(made)
    assert one is not other
    pairs = [(next(one), next(other)) for _ in range(6)]
    assert pairs == [(k, k) for k in range(6)]
    assert {w.pid for w in one._workers}.isdisjoint({w.pid for w in other._workers})


def test_persistent_workers_stay() -> None:
    made = loader(Plain(6), batch_size=None, persistent_workers=True)
    assert made._iterator is None
    iterator = iter(made)
    pids = [w.pid for w in iterator._workers]
    assert list(iterator) == list(range(6))
    assert list(iterator) == []
    assert next(iter(made)) == 0
    assert iter(made) is iterator
    assert list(iterator) == list(range(6))
    assert [w.pid for w in iterator._workers] == pids
    assert made._iterator is iterator
    iterator._shutdown_workers()
    assert not any(w.is_alive() for w in iterator._workers)
    with pytest.raises(StopIteration):
        next(iterator)


class Slow(Plain):
    """Takes a time for index 1."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            time.sleep(1.0)
        return index


def test_an_epoch_that_is_left_is_not_waited_for() -> None:
    made = loader(Slow(8), batch_size=None, persistent_workers=True)
    iterator = iter(made)
    assert next(iterator) == 0
    begun = time.monotonic()
    iter(made)
    assert time.monotonic() - begun < 10.0
    assert list(iterator) == list(range(8))


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_generators_of_persistent_workers_after_a_break(taken: int) -> None:
    """What was made ahead has drawn from them, whether or not it is taken."""

    def left(kind: Any, dataset: Any, **more: Any) -> Any:
        seed_all()
        options = {"persistent_workers": True, "prefetch_factor": 3, **FORK, **more}
        made = kind(dataset, batch_size=2, **options)
        epochs = []
        for _ in range(3):
            iterator = iter(made)
            epochs.append([next(iterator) for _ in range(taken)])
        epochs.append(list(made))
        made._iterator = None
        return epochs

    for dataset in (Augmented(), Sharded(20, 30)):
        assert same(left(cseq.DataLoader, dataset), left(data.DataLoader, dataset))
    alone: Any = {"num_workers": 1, "in_order": False}  # which is in order all the same
    assert same(*(left(kind, Augmented(), **alone) for kind in (cseq.DataLoader, data.DataLoader)))


def test_data_set_and_workers_are_new_in_each_epoch() -> None:
    dataset = Plain(3)
    made = loader(dataset, batch_size=None)
    assert list(made) == [0, 1, 2]
    dataset.length = 5
    assert list(made) == [0, 1, 2, 3, 4]


def test_the_end_of_the_workers() -> None:
    iterator = iter(loader(Plain(4), batch_size=None))
    workers = iterator._workers
    assert all(w.is_alive() and w.exitcode is None for w in workers)
    assert list(iterator) == [0, 1, 2, 3]
    assert list(iterator) == []
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
        assert worker.exitcode == 0


@pytest.mark.parametrize("dataset", [Plain(100), Sharded(9, 9)], ids=["map", "iterable"])
@pytest.mark.parametrize(
    "options", [{}, {"in_order": False}, {"persistent_workers": True}, {"rng": "batch"}], ids=str
)
def test_the_workers_of_a_dropped_iterator_end(dataset: Any, options: Any) -> None:
    """At once: nothing is left for the garbage collector. One that has not begun is killed."""
    gc.disable()
    try:
        iterator = iter(loader(dataset, batch_size=None, **options))
        next(iterator)
        workers = iterator._workers
        del iterator
        for worker in workers:
            worker.join(10)
            assert worker.exitcode in (0, KILLED)
    finally:
        gc.enable()


def test_pickles_and_copies() -> None:
    made = loader(Plain(4), batch_size=2, multiprocessing_context=None)
    iterator = iter(made)
    next(iterator)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert type(other) is cseq.DataLoader
        assert [b.tolist() for b in other] == [[0, 1], [2, 3]]
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)
    held = loader(Plain(4), persistent_workers=True)
    iter(held)
    with pytest.raises(NotImplementedError):
        pickle.dumps(held)
    held._iterator = None


# ── attributes and classes ─────────────────────────────────────────────────────────────────


def test_attributes_are_torchs() -> None:
    ours, theirs = loader(Plain()), data.DataLoader(Plain(), **FORK)
    public = {name for name in vars(theirs) if not name.startswith("_")}
    added = {name for name in vars(ours) if not name.startswith("_")} - public
    assert added == {"rng", "on_error", "snapshot_every_n_steps", "max_restarts"}
    assert isinstance(ours, data.DataLoader)
    assert len(ours) == len(theirs)
    assert cseq.DataLoader[int]
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(ours, name, getattr(ours, name))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": None, "drop_last": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "shuffle": True},
        {"multiprocessing_context": QUICK},
        {"num_workers": 1, "multiprocessing_context": "other"},
        {"rng": "other"},
        {"snapshot_every_n_steps": -1},
    ],
    ids=str,
)
def test_wrong_arguments(options: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        cseq.DataLoader(Plain(), **options)


def test_wrong_at_iter() -> None:
    with pytest.raises(AssertionError):
        iter(loader(Plain(), prefetch_factor=0))
    with pytest.raises(AssertionError):
        iter(cseq.DataLoader(Plain(), timeout=1))


def test_what_may_be_set_counts_from_the_next_iter() -> None:
    made = cseq.DataLoader(Plain(4), batch_size=2)
    assert [b.tolist() for b in made] == [[0, 1], [2, 3]]
    made.num_workers, made.prefetch_factor = 2, 2
    made.multiprocessing_context = QUICK
    made.collate_fn = as_is
    assert list(made) == [[0, 1], [2, 3]]


def test_recreated_from_its_attributes() -> None:
    """As Lightning does it."""
    import inspect

    class Own(cseq.DataLoader[Any]):
        def __init__(self, extra: int, *args: Any, **kwargs: Any) -> None:
            self.extra = extra
            super().__init__(*args, **kwargs)

    made = Own(7, Plain(4), batch_size=2, rng="batch", **FORK)
    names = inspect.signature(cseq.DataLoader.__init__).parameters
    given = {name: getattr(made, name) for name in names if hasattr(made, name)}
    for name in ("batch_size", "shuffle", "drop_last", "batch_sampler"):
        given.pop(name, None)
    given["sampler"] = data.SequentialSampler(made.dataset)
    again = Own(made.extra, batch_size=2, **given)
    assert again.rng == "batch"
    assert [b.tolist() for b in again] == [[0, 1], [2, 3]]


class Remade(cseq.DataLoader[Any]):
    """A loader that is made of another one's attributes."""

    def __init__(self, other: Any) -> None:
        self.__dict__.update(vars(other))


def test_made_of_the_attributes_of_torchs() -> None:
    made = Remade(data.DataLoader(Plain(3), **FORK))
    assert [batch.tolist() for batch in made] == [[0], [1], [2]]
    assert made.state_dict()["_iterator_finished"]


def test_numbers_and_truth_of_other_types() -> None:
    check(Plain(5), num_workers=1, in_order=0, timeout=torch.tensor(60.0), pin_memory=0)
    check(Plain(5), in_order=np.bool_(True), timeout=True, persistent_workers=1)


def test_more_batches_than_len() -> None:
    class Wrong(Sharded):
        def __len__(self) -> int:
            return 2

    made = loader(Wrong(2, 2), batch_size=None)
    assert len(made) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(made)) == 4
    texts = [str(each.message) for each in caught]
    assert len([text for text in texts if "was reported to be 2" in text]) == 2


def test_more_workers_than_processors() -> None:
    many = 2 + max(os.cpu_count() or 1, 8)
    with pytest.warns(UserWarning, match="worker processes in total"):
        cseq.DataLoader(Plain(), num_workers=many)


# ── in a worker ────────────────────────────────────────────────────────────────────────────


class Informed(Plain):
    """Tells what a worker knows."""

    def __getitem__(self, index: int) -> Any:
        info = data.get_worker_info()
        assert info is not None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed, torch.initial_seed(), torch.get_num_threads()


def test_worker_info() -> None:
    torch.manual_seed(1)
    theirs = list(data.DataLoader(Informed(4), batch_size=None, **FORK))
    torch.manual_seed(1)
    assert list(loader(Informed(4), batch_size=None)) == theirs
    assert data.get_worker_info() is None


def test_worker_init_fn() -> None:
    def init(number: int) -> None:
        info = data.get_worker_info()
        assert info is not None
        assert info.id == number
        info.dataset.length = 100 + number  # type: ignore[attr-defined]

    class Told(Plain):
        def __getitem__(self, index: int) -> int:
            return self.length

    made = loader(Told(4), batch_size=None, worker_init_fn=init)
    assert list(made) == [100, 101, 100, 101]


class Nested(Plain):
    """Has a loader with a worker."""

    def __getitem__(self, index: int) -> Any:
        inner = cseq.DataLoader(Plain(3), batch_size=None, num_workers=1)
        return list(inner), multiprocessing.parent_process() is None


def test_a_loader_in_a_worker() -> None:
    made = loader(Nested(2), batch_size=None, num_workers=1)
    assert [numbers for numbers, _ in made] == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.12
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profile_has_torchs_name(num_workers: int) -> None:
    """Traces are searched for it."""

    def names_in(made: Any) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(made)
        return {each.name for each in profile.events() if each.name.startswith("enumerate")}

    options: Any = (FORK if num_workers else {}) | {"num_workers": num_workers}
    expected = names_in(data.DataLoader(Plain(2), **options))
    assert len(expected) == 1
    assert names_in(cseq.DataLoader(Plain(2), **options)) == expected


class Leaving(Plain):
    """Raises what ends a program."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(8)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_worker_that_would_leave(error: BaseException) -> None:
    """The trainer does not end as if all were well: torch's exception, in place of the batch."""
    iterator = iter(loader(Leaving(error), batch_size=None))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    name = type(error).__name__
    with pytest.raises(RuntimeError, match=rf"\(pid\(s\) \d+\) exited unexpectedly: {name}"):
        next(iterator)
    assert list(iterator) == [4, 5, 6, 7]
    left_out = loader(Leaving(error), batch_size=None, on_error="skip")
    assert list(left_out) == [0, 1, 2, 4, 5, 6, 7]


class Threads(Plain):
    """Tells the thread's name, which lines of logs have."""

    def __getitem__(self, index: int) -> str:
        return threading.current_thread().name


def test_the_thread_of_a_worker() -> None:
    assert list(loader(Threads(2), batch_size=None)) == ["MainThread"] * 2


class Related(Plain):
    """Tells what multiprocessing knows of its process, and of the trainer's."""

    def __getitem__(self, index: int) -> Any:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join(0.01)
        numbers = multiprocessing.current_process()._identity  # type: ignore[attr-defined]
        return parent.pid, parent.name, parent.is_alive(), numbers


def test_what_multiprocessing_knows_of_the_trainer() -> None:
    """And workers have different numbers, which users choose devices and files by."""
    told = os.getpid(), multiprocessing.current_process().name, True
    assert list(loader(Related(2), batch_size=None)) == [[*told, [1]], [*told, [2]]]


class Shared(Plain):
    """Uses what multiprocessing shares."""

    def __init__(self) -> None:
        super().__init__(6)
        context = multiprocessing.get_context(QUICK)
        self.queue = context.Queue()

    def __getitem__(self, index: int) -> int:
        self.queue.put(index)
        return index


def test_what_multiprocessing_shares() -> None:
    dataset = Shared()
    assert list(loader(dataset, batch_size=None)) == list(range(6))
    assert sorted(dataset.queue.get(timeout=10) for _ in range(6)) == list(range(6))
    dataset.queue.close()
    dataset.queue.join_thread()


OWN_VALUE = contextvars.ContextVar("OWN_VALUE", default=0)


class Inherited(Plain):
    """Its samples depend on what a thread has of its own."""

    def __getitem__(self, index: int) -> Any:
        with contextlib.suppress(FloatingPointError):
            np.float64(1) / np.float64(0)
            return "divided"
        third = str(decimal.Decimal(1) / 3)
        return OWN_VALUE.get(), third, torch.ones(1, 1) @ torch.ones(1, 1), index


@forked
def test_what_the_calling_thread_has_is_inherited() -> None:
    def told() -> None:
        OWN_VALUE.set(7)
        decimal.getcontext().prec = 9
        with np.errstate(all="raise"), torch.autocast("cpu", torch.bfloat16):
            [[[value, third, product, _]]] = check(Inherited(1), epochs=1)
        assert value.item() == 7
        assert third == ("0.333333333",)
        assert product.dtype == torch.bfloat16

    contextvars.copy_context().run(told)


@forked
def test_no_grad_is_inherited() -> None:
    class Graded(Plain):
        def __getitem__(self, index: int) -> bool:
            return torch.is_grad_enabled()

    with torch.no_grad():
        assert list(loader(Graded(2), batch_size=None)) == [False, False]
    assert list(loader(Graded(2), batch_size=None)) == [True, True]


# ── errors ─────────────────────────────────────────────────────────────────────────────────


class Odd(Exception):
    """Takes two arguments, and has an attribute."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


class Raising(Plain):
    """Raises for odd indices."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise Odd(index, 2)
        if index == 3:
            raise FileNotFoundError(2, "no such thing", "name")
        if index == 5:
            raise StopIteration
        return index


def test_exceptions_are_the_original_ones_and_end_nothing() -> None:
    iterator = iter(loader(Raising(7), batch_size=None))
    assert next(iterator) == 0
    with pytest.raises(Odd, match="1 and 2") as odd:
        next(iterator)
    assert odd.value.two == 2
    assert "in __getitem__" in str(odd.value)
    if hasattr(odd.value, "__notes__"):  # from Python 3.11 on
        assert str(odd.value).startswith("Caught Odd in DataLoader worker process 1.\nOriginal")
    assert next(iterator) == 2
    with pytest.raises(FileNotFoundError) as missing:
        next(iterator)
    assert missing.value.errno == 2
    assert missing.value.filename == "name"
    assert next(iterator) == 4
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert next(iterator) == 6
    assert list(iterator) == []


def test_exceptions_without_workers() -> None:
    iterator = iter(cseq.DataLoader(Raising(7), batch_size=None))
    assert next(iterator) == 0
    with pytest.raises(Odd):
        next(iterator)
    assert [next(iterator)] == [2]
    with pytest.raises(FileNotFoundError):
        next(iterator)
    assert next(iterator) == 4
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert list(iterator) == [6]


class Halting(data.IterableDataset[Any]):
    """An iterator that raises once and goes on."""

    def __iter__(self) -> Iterator[int]:
        self.at = -1
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 1:
            raise ValueError("once")
        if self.at == 4:
            raise StopIteration
        return self.at


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_that_raised_is_asked_again(num_workers: int) -> None:
    options = FORK | {"num_workers": num_workers} if num_workers else {}
    iterator = iter(cseq.DataLoader(Halting(), batch_size=None, **options))
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="once"):
        next(iterator)
    assert list(iterator) == [2, 3]


@pytest.mark.parametrize("iterable", [False, True])
def test_an_exception_of_worker_init_fn(iterable: bool) -> None:
    def init(number: int) -> None:
        raise OSError(5, "init")

    dataset: Any = Sharded(2, 2) if iterable else Plain(3)
    iterator = iter(loader(dataset, worker_init_fn=init, batch_size=None))
    with pytest.raises(OSError, match="init") as caught:
        next(iterator)
    assert caught.value.errno == 5


class Unsendable(Plain):
    """Its sample 1 cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return threading.Lock() if index == 1 else index


def test_a_batch_that_cannot_be_sent_is_an_error() -> None:
    iterator = iter(loader(Unsendable(4), batch_size=None))
    assert next(iterator) == 0
    with pytest.raises(TypeError, match="lock"):
        next(iterator)
    assert list(iterator) == [2, 3]


def test_a_batch_that_cannot_be_sent_counts() -> None:
    made = loader(Unsendable(6), batch_size=None)
    iterator = iter(made)
    assert next(iterator) == 0
    with pytest.raises(TypeError, match="lock") as caught:
        next(iterator)
    assert "making" in "".join(getattr(caught.value, "__notes__", ["making"]))
    assert made.state_dict()["_num_yielded"] == 2
    assert next(iterator) == 2
    made.load_state_dict(made.state_dict())
    assert list(made) == [3, 4, 5]


# ── Ctrl-C ─────────────────────────────────────────────────────────────────────────────────


class Failing(Sharded):
    """The second sample of each worker is missing."""

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        return Failures(self.sizes[0 if info is None else info.id])


class Failures:
    """An iterator that goes on behind an error."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > self.size:
            raise StopIteration
        if self.at == 2:
            raise LookupError("two is missing")
        return self.at


class Unsent(Plain):
    """Its sample 1 cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return Refusing() if index == 1 else index


class Refusing:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise LookupError("two is missing")


INTERRUPTED: dict[str, dict[str, Any]] = {
    "map": {},
    "profiled": {},
    "unordered": {"in_order": False},
    "seeded": {"rng": "batch"},
    "skipping": {"on_error": "skip"},
    "unsent": {"dataset": Unsent(9)},
    "unsent skipping": {"dataset": Unsent(9), "on_error": "skip", "in_order": False},
    "iterable": {"dataset": Failing(5, 2, 3)},
    "unordered iterable": {"dataset": Failing(5, 2, 3), "in_order": False},
}


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_ctrl_c_anywhere_in_next(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a signal handler raises: nothing is lost or doubled, nor in the state."""
    if kind == "profiled":
        monkeypatch.setattr(names, "profiler_enabled", lambda: True)
    options: dict[str, Any] = {"dataset": Missing(9), "num_workers": 3, **INTERRUPTED[kind]}
    made = loader(batch_size=None, persistent_workers=True, **options)
    interrupt_anywhere(made, "iterator.py", "taking.py")


@pytest.mark.parametrize("kind", ["map", "profiled", "seeded", "skipping", "iterable"])
def test_ctrl_c_anywhere_in_next_without_workers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same; and the trainer's generators are as they were."""
    if kind == "profiled":
        monkeypatch.setattr(names, "profiler_enabled", lambda: True)
    options: dict[str, Any] = {"dataset": Missing(9), **INTERRUPTED[kind]}
    made = cseq.DataLoader(batch_size=None, **options)
    interrupt_anywhere(made, "inline.py", "taking.py", "seeds.py", "../../seeding.py")


def interrupt_anywhere(made: Any, *files: str) -> None:
    """Interrupt each `next` of an epoch at each place in some files of the adapter."""
    files = tuple(os.path.normpath(f"adapters/torch/{name}").replace(os.sep, "/") for name in files)
    expected, ordered = everything(iter(made)), getattr(made, "in_order", True)
    hits = 0
    for behind in range(len(expected) + 1):

        def step(countdown: int, behind: int = behind) -> bool:
            iterator = iter(made)
            got = [take(iterator) for _ in range(behind)]
            seed_all()
            with interrupted(countdown, *files) as struck:
                got.append(take(iterator))
            own = drawn()
            seed_all()
            assert own == drawn()
            taken = made.state_dict()["_num_yielded"]
            left_out = sum(number < taken for number, _ in made.skipped)
            assert taken == len(got) - got.count("end") + left_out
            got += everything(iterator)
            got = [each for each in got if each != "end"]
            assert (got if ordered else sorted(map(str, got))) == (
                expected if ordered else sorted(map(str, expected))
            )
            returned = [each for each in got if each != "two is missing"]
            assert iterator._num_yielded == len(returned)
            return struck.is_set()

        hits += first_hits(step)
    assert hits > 3 * len(expected)


def test_ctrl_c_behind_a_key() -> None:
    """Of persistent workers, the keys of all batches that were not taken are known."""
    sampler = Counting([f"key {number}" for number in range(9)])  # written by Python code
    made = loader(Plain(9), sampler=sampler, batch_size=None, persistent_workers=True)
    for behind in range(3):

        def step(countdown: int, behind: int = behind) -> bool:
            sampler.count = 0
            iterator = iter(made)
            for _ in range(behind):
                next(iterator)
            with interrupted(countdown, "stream.py") as struck:
                next(iterator)
            taken = made.state_dict()["_num_yielded"]
            known = [number for number, _ in iterator._drawn if number >= taken]
            assert known == list(range(taken, sampler.count))
            return struck.is_set()

        assert first_hits(step) > 3


def test_ctrl_c_in_shutdown() -> None:
    """Wherever it strikes, a second call ends the workers."""
    files = "adapters/torch/iterator.py", "stream.py", "run.py"

    def step(countdown: int) -> bool:
        iterator = iter(loader(Plain(4), batch_size=None))
        assert next(iterator) == 0
        assert all(process.is_alive() for process in iterator._workers)
        with interrupted(countdown, *files) as struck:
            iterator._shutdown_workers()
        iterator._shutdown_workers()
        assert not any(process.is_alive() for process in iterator._workers)
        assert list(iterator) == []
        return struck.is_set()

    stride = 1 if QUICK == "fork" else 4  # each step starts two workers, which may import torch
    assert first_hits(step, stride) > 3


class Pressing(Plain):
    """Ctrl-C is pressed in the middle of its sample 4, once."""

    pressed = False

    def __getitem__(self, index: int) -> int:
        if index == 4 and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return index


def test_ctrl_c_in_a_data_set_without_workers() -> None:
    """Its batch is made again by the next call, and by a resume."""
    made = cseq.DataLoader(Pressing(8), batch_size=2)
    iterator = iter(made)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = made.state_dict()
    assert state["_num_yielded"] == 2
    assert [batch.tolist() for batch in iterator] == [[4, 5], [6, 7]]
    made.load_state_dict(state)
    assert [batch.tolist() for batch in made] == [[4, 5], [6, 7]]


class Pressed(Counting):
    """Ctrl-C is pressed while it draws its third key."""

    def __iter__(self) -> Iterator[int]:
        yield from (0, 1)
        raise KeyboardInterrupt


class Unpressed(Counting):
    """The same, of a sampler whose iterator goes on, and is nothing but an iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count == 3:
            raise KeyboardInterrupt
        if self.count == 6:
            raise StopIteration
        return self.count


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_in_a_sampler(num_workers: int) -> None:
    """A generator ends with it: what may be missing is not taken for the end of the epoch."""
    options: Any = {**FORK, "prefetch_factor": 1} if num_workers else {}
    made = cseq.DataLoader(Plain(9), sampler=Pressed(()), batch_size=None, **options)
    iterator = iter(made)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the rest of the epoch may be missing"):
            list(iterator)
    assert not made.state_dict()["_iterator_finished"]
    sampler = Unpressed(())
    made = cseq.DataLoader(Plain(9), sampler=sampler, batch_size=None, **options)
    iterator = iter(made)
    taken = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            taken.append(next(iterator))
    assert [*taken, *iterator] == [1, 2, 4, 5]
    assert made.state_dict()["_iterator_finished"]


class Missing(Plain):
    """Its sample 1 is missing."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise LookupError("two is missing")
        return index


def take(iterator: Any) -> Any:
    """Take a batch, or what was raised instead of it."""
    try:
        return next(iterator, "end")
    except (LookupError, TypeError) as error:
        return "two is missing" if "two is missing" in str(error) else repr(error)


def everything(iterator: Any) -> list[Any]:
    """Take all that is left."""
    return list(iter(lambda: take(iterator), "end"))


class Stuck(Plain):
    """Waits until a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(3)
        self.path = path

    def __getitem__(self, index: int) -> int:
        while not self.path.exists():
            a_place_to_be_found()
        return index


def a_place_to_be_found() -> None:
    """Its name is in the stack."""
    time.sleep(0.05)


@forked  # a worker that imports torch is not yet where this looks
def test_a_timeout_shows_where_the_worker_is(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    iterator = iter(loader(Stuck(path), batch_size=None, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds") as late:
        next(iterator)
    assert isinstance(late.value, TimeoutError)
    assert isinstance(late.value, LoaderTimeout)
    assert "a_place_to_be_found" in str(late.value)
    path.touch()
    assert next(iterator) == 0
    assert list(iterator) == [1, 2]


def test_a_killed_worker_is_replaced() -> None:
    iterator = iter(loader(Plain(200), batch_size=None))
    taken = [next(iterator) for _ in range(5)]
    kill(iterator._workers[1].pid)
    taken += iterator
    assert taken == list(range(200))


class Deadly(Plain):
    """Ends its process."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            kill(os.getpid())
        return index


def test_a_batch_that_kills_again_and_again_is_an_error() -> None:
    iterator = iter(loader(Deadly(4), batch_size=None))
    assert next(iterator) == 0
    told = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
    with pytest.raises(cseq.WorkerDied, match=told) as caught:
        next(iterator)
    died = caught.value
    if os.name == "posix":
        assert f"DataLoader worker (pid {died.pid}) is killed by signal" in str(died)
    assert died.indices == [1]
    assert list(iterator) == []


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_death_names_the_key(batch_size: int | None) -> None:
    """And not the number that batches have with generators seeded for each."""
    iterator = iter(loader(Deadly(4), batch_size=batch_size, rng="batch", num_workers=1))
    next(iterator)
    named = r"\(1\)" if batch_size is None else r"\(\[1\]\)"
    with pytest.raises(cseq.WorkerDied, match=f"batch 1 {named} of worker 0, epoch 0") as caught:
        next(iterator)
    assert caught.value.indices == [1]


class Told(Plain):
    """Returns which worker it is; one index ends that."""

    def __init__(self, length: int, deadly: int = -1) -> None:
        super().__init__(length)
        self.deadly = deadly

    def __getitem__(self, index: int) -> int:
        if index == self.deadly:
            kill(os.getpid())
        info = data.get_worker_info()
        assert info is not None
        return info.id


def test_who_makes_the_batches_behind_a_resume() -> None:
    """Worker k mod N makes batch k, of the epoch that is resumed, and of the next one."""
    options: Any = {"batch_size": None, "persistent_workers": True}
    made = loader(Told(8), num_workers=3, **options)
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    assert taken + list(iterator) == [0, 1, 2, 0, 1, 2, 0, 1]
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    again = loader(Told(8), num_workers=3, **options)
    again.load_state_dict(made.state_dict())
    assert list(again) == [1, 2, 0, 1]
    assert list(again) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_death_behind_a_resume_names_the_worker() -> None:
    made = loader(Told(8), num_workers=3, batch_size=None)
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    assert taken == [0, 1, 2, 0]
    again = loader(Told(8, deadly=5), num_workers=3, batch_size=None)
    again.load_state_dict(made.state_dict())
    iterator = iter(again)
    assert next(iterator) == 1
    pid = iterator._workers[2].pid
    with pytest.raises(cseq.WorkerDied, match="worker 2") as caught:
        next(iterator)
    assert (caught.value.worker, caught.value.batch) == (2, 1)
    assert pid


def test_death_in_an_iterable_data_set() -> None:
    made = loader(Sharded(60, 60), batch_size=2)
    seed_all()
    expected = list(made)
    seed_all()
    iterator = iter(made)
    taken = [next(iterator) for _ in range(3)]
    kill(iterator._workers[0].pid)
    taken += iterator
    assert same(taken, expected)


# ── generators seeded for each batch ───────────────────────────────────────────────────────


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_same_for_any_number_of_workers(persistent: bool) -> None:
    options: Any = {"batch_size": 3, "shuffle": True, "rng": "batch"}
    expected, after = run(cseq.DataLoader, Augmented(13), 2, options)
    expected = [without_told(epoch) for epoch in expected]
    assert not same(*expected)
    for num_workers in (1, 2, 5):
        forked = FORK | {"num_workers": num_workers, "persistent_workers": persistent}
        batches, drawn_after = run(cseq.DataLoader, Augmented(13), 2, options | forked)
        assert same([without_told(epoch) for epoch in batches], expected)
        assert drawn_after == after


def test_a_death_changes_no_batch() -> None:
    options: Any = FORK | {"batch_size": 3, "shuffle": True, "rng": "batch"}
    [expected], _ = run(cseq.DataLoader, Augmented(120), 1, options)
    seed_all()
    iterator = iter(cseq.DataLoader(Augmented(120), **options))
    taken = [next(iterator) for _ in range(4)]
    kill(iterator._workers[0].pid)
    taken += iterator
    assert same(without_told(taken), without_told(expected))


class Derived(Plain):
    """Draws from the batch's generator."""

    def __getitem__(self, index: int) -> float:
        return float(cseq.rng().random())


def test_cseqs_own_generator() -> None:
    made = [
        run(cseq.DataLoader, Derived(6), 1, {"batch_size": 2, "rng": "batch"} | more)[0]
        for more in ({}, FORK)
    ]
    assert same(*made)


def test_the_default_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from cseq.adapters.torch import defaults

    expected = run(cseq.DataLoader, Augmented(6), 1, {"rng": "batch"})
    monkeypatch.setattr(defaults, "rng", "batch")
    assert same(run(cseq.DataLoader, Augmented(6), 1, {}), expected)
    with pytest.raises(ValueError, match="rng"):
        defaults.rng = "other"


# ── memory ─────────────────────────────────────────────────────────────────────────────────


def test_batches_that_are_kept_stay_as_they_are() -> None:
    class Large(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.full((50, 100), index)

    batches = list(loader(Large(40), batch_size=2))
    assert all(
        bool((batch[k] == 2 * n + k).all()) for n, batch in enumerate(batches) for k in range(2)
    )
    batches[0] += 1
    assert int(batches[0][0, 0, 0]) == 1
    assert int(batches[1][0, 0, 0]) == 2


def test_large_samples_are_stacked_where_they_stay() -> None:
    """What the worker's default_collate made is the very memory that the trainer reads."""

    class Large(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.full((50, 100), index)

    iterator = iter(loader(Large(8), batch_size=4, num_workers=1))
    batch = next(iterator)
    assert batch.shape == (4, 50, 100)
    stats = iterator.stats()
    assert stats.copies == 0
    del batch
    with contextlib.suppress(StopIteration):
        next(iterator)


def damaged() -> Iterator[int]:
    """Give two keys, then an error."""
    yield from range(2)
    raise ValueError("damaged")


@pytest.mark.parametrize("method", METHODS)
def test_a_sampler_that_raises_at_once(method: str) -> None:
    """Its error is raised, however workers are started: that is no reason for torch's iterator."""
    made = loader(Plain(9), batch_size=None, sampler=damaged(), multiprocessing_context=method)
    with pytest.raises(ValueError, match="damaged"):
        list(made)


def test_workers_that_are_terminated_are_gone() -> None:
    """Who ends the processes of `_workers` can wait for them; others make their batches."""
    iterator = iter(loader(Plain(40), batch_size=None))
    assert next(iterator) == 0
    processes = list(iterator._workers)
    pids = [process.pid for process in processes]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
        assert not process.is_alive()
        assert process.exitcode == KILLED
    assert list(iterator) == list(range(1, 40))
    assert [process.pid for process in processes] == pids


def test_a_batch_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised once, in its place."""

    def pin(batch: Any, device: Any) -> Any:
        if batch == 1:
            raise RuntimeError("no page-locked memory")
        return batch

    monkeypatch.setattr(names, "pin", pin)
    iterator = iter(loader(Plain(4), batch_size=None))
    iterator._pin_memory = True
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="page-locked"):
        next(iterator)
    assert list(iterator) == [2, 3]


class Waiting(Plain):
    """The first sample that is asked for waits."""

    def __init__(self) -> None:
        super().__init__(4)
        self.entered, self.released = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> int:
        if not self.entered.is_set():
            self.entered.set()
            assert self.released.wait(60)
        return index


def test_two_threads_in_one_iterator() -> None:
    """None is given to both; where there are workers, torch's hangs."""
    dataset = Waiting()
    iterator = iter(cseq.DataLoader(dataset))
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(next(iterator)))
    thread.start()
    assert dataset.entered.wait(60)
    with pytest.raises(RuntimeError, match="another thread"):
        next(iterator)
    dataset.released.set()
    thread.join()
    assert [batch.item() for batch in (*first, *iterator)] == [0, 1, 2, 3]


# ── what a loader tells of its workers ─────────────────────────────────────────────────────


def test_its_workers_are_known_to_cseqs_testing_and_counted() -> None:
    made = loader(Plain(12), batch_size=2)
    with pytest.raises(RuntimeError, match="not running"):
        cseq.testing.pids(made)
    with pytest.raises(RuntimeError, match="no worker processes of cseq"):
        made.stats()
    iterator = iter(made)
    got = [next(iterator).tolist()]
    pids = [process.pid for process in iterator._workers]
    assert cseq.testing.pids(made) == cseq.testing.pids(iterator) == pids
    assert cseq.testing.kill(made, 1) == pids[1]
    got += [batch.tolist() for batch in iterator]
    assert got == [[k, k + 1] for k in range(0, 12, 2)]
    assert made.stats().batches == iterator.stats().batches == 6
    del iterator
    assert made.stats().batches == 6
    with pytest.raises(RuntimeError, match="not running"):
        cseq.testing.pids(made)
    pickle.loads(pickle.dumps(made))
    without = cseq.DataLoader(Plain(2))
    assert len(list(without)) == 2
    with pytest.raises(RuntimeError, match="no worker processes of cseq"):
        without.stats()


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_the_log_says_if_numbers_are_drawn_again(
    rng: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = loader(Augmented(12), num_workers=1, batch_size=1, prefetch_factor=1, rng=rng)
    iterator = iter(made)
    got = [next(iterator)]
    kill(iterator._workers[0].pid)
    got += iterator
    assert len(got) == 12
    again = len({str(batch["drawn"]) for batch in got}) < 12
    while not any(": replaced" in each.message for each in caplog.records):
        time.sleep(0.01)  # another thread writes the log
    [record] = [each for each in caplog.records if ": replaced" in each.message]
    assert again == ("numbers are drawn that were drawn before" in record.message)
    assert again == (rng == "worker")


def test_replacements_can_be_forbidden() -> None:
    iterator = iter(loader(Plain(12), num_workers=1, prefetch_factor=1, max_restarts=0))
    next(iterator)
    kill(iterator._workers[0].pid)
    with pytest.raises(cseq.WorkerDied, match="max_restarts=0"):
        list(iterator)
    with pytest.raises(ValueError, match="max_restarts"):
        loader(Plain(1), max_restarts=-1)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import cseq
print(hasattr(cseq, "DataLoader"), "DataLoader" in dir(cseq), hasattr(cseq, "rng"))
try:
    cseq.DataLoader
except AttributeError as error:
    print(error)
try:
    from cseq import StatefulDataLoader
except ImportError as error:
    print(error)
try:
    from cseq.adapters.torch import install
except ImportError as error:
    print(error)
"""


def test_without_torch_errors_say_what_to_install() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert printed[0] == "False False True"
    assert len(printed) == 4
    assert all("pip install 'cseq-loader[torch]'" in line for line in printed[1:])
    assert hasattr(cseq, "DataLoader")
    assert "DataLoader" in dir(cseq)
