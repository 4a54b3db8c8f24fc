"""`cseq.DataLoader` on a fleet: the batches of rng='batch', whoever makes them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from fleets import LateFleet, LocalFleet  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Augmented,
    Counting,
    Plain,
    Sharded,
    as_is,
    drawn,
    same,
    seed_all,
    without_told,
)

import cseq  # noqa: E402
from cseq.adapters.torch import LoaderTimeout, names  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("quick processes")


@pytest.fixture
def fleet() -> Iterator[LateFleet]:
    """Two agents with a worker each."""
    with LateFleet() as fleet:
        yield fleet


def epochs(dataset: Any, count: int = 2, **options: Any) -> Any:
    """Iterate from the same seeds; return the batches, and what the trainer draws next."""
    seed_all()
    loader = cseq.DataLoader(dataset, **options)
    return [list(loader) for _ in range(count)], drawn()


def here(dataset: Any, count: int = 2, **options: Any) -> Any:
    """Iterate with the same seeds, but no worker."""
    return epochs(dataset, count, rng="batch", **options)


def test_batches_and_generators_are_those_without_workers(fleet: LateFleet) -> None:
    """What the data set draws, the order, what the trainer draws later."""
    dataset = Augmented()
    for options in (
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 5, "sampler": data.WeightedRandomSampler([1.0] * 9, 40)},
        {"batch_sampler": [[3, 1], [0], [22, 22, 5]]},
        {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    ):
        state = options["generator"].get_state() if "generator" in options else None
        made, after = epochs(dataset, fleet=fleet, **options)
        if state is not None:
            options["generator"].set_state(state)
        expected, then = here(dataset, **options)
        assert same([*map(without_told, made)], [*map(without_told, expected)])
        assert after == then


class Named(Plain):
    """Returns keys of any kind."""

    def __getitem__(self, index: Any) -> Any:
        return {"key": index}


LONG = list(range(200))
KEYS: list[Any] = [
    [0], [], LONG, 7, -(2**63), 2**70, "a", ("b", 3), 0, 1, 2.5, True, [True, 2], [2**64],
    [[1, 2], [3]], None, torch.tensor(5), ["c", "d"],
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None, "sampler": KEYS, "collate_fn": as_is},
        {"batch_sampler": [each for each in KEYS if isinstance(each, list)], "collate_fn": as_is},
    ],
    ids=["single", "batches"],
)
def test_keys_of_any_kind_keep_type_and_value(fleet: LateFleet, options: Any) -> None:
    """Lists of ints are the words of a ticket, others pickled."""
    assert same(epochs(Named(), fleet=fleet, **options)[0], here(Named(), **options)[0])


def test_a_key_that_is_too_long_is_named() -> None:
    """After the batches before; and what is to be done."""
    with LateFleet(1, batch_size=8) as fleet:
        loader = cseq.DataLoader(Plain(), batch_sampler=[[1, 2], [3] * 99], fleet=fleet)
        with pytest.raises(ValueError, match=r"key 1 of the sampler of 99 .* a larger batch_size"):
            list(loader)
        with pytest.raises(TypeError, match="cannot be pickled for a fleet"):
            list(cseq.DataLoader(loader.dataset, sampler=[threading.Lock()], fleet=fleet))


def test_batches_in_no_order_are_the_same(fleet: LateFleet) -> None:
    """Each once."""
    made, _ = epochs(Plain(40), 1, batch_size=2, in_order=False, fleet=fleet)
    assert sorted(batch.tolist() for batch in made[0]) == [[k, k + 1] for k in range(0, 40, 2)]


def test_agents_that_are_lost_change_nothing(fleet: LateFleet) -> None:
    """One in the middle of an epoch; another takes its place."""
    dataset = Augmented(300)
    seed_all()
    loader = cseq.DataLoader(dataset, batch_size=2, shuffle=True, fleet=fleet)
    made = []
    for k, batch in enumerate(loader):
        made.append(batch)
        if k == 5:
            fleet.agents[1].is_lost = True
            fleet.add()
            fleet.remove(1)
    expected, _ = here(dataset, 1, batch_size=2, shuffle=True)
    assert same(without_told(made), without_told(expected[0]))
    stats = loader.stats()
    assert stats.batches == len(made)
    assert stats.parcels > 0


class Failing(Plain):
    """One sample is missing."""

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise LookupError("three is missing")
        return index


def test_exceptions_have_torchs_form(fleet: LateFleet) -> None:
    """Type, text, place; the epoch goes on."""
    loader = cseq.DataLoader(Failing(), batch_size=2, fleet=fleet)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(LookupError) as caught:
        next(iterator)
    text = str(caught.value)
    assert text.startswith("Caught LookupError in DataLoader worker process 0.\nOriginal Traceback")
    assert "in __getitem__" in text
    for note in getattr(caught.value, "__notes__", []):  # from Python 3.11 on
        assert "the batch of [2, 3] in worker 0 on " in note
    assert [batch.tolist() for batch in iterator] == [[4, 5], [6, 7], [8, 9]]


def test_failing_samples_are_left_out(fleet: LateFleet) -> None:
    """And listed."""
    loader = cseq.DataLoader(Failing(), batch_size=2, fleet=fleet, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2], [4, 5], [6, 7], [8, 9]]
    [entry] = loader.skipped
    assert entry == (None, 1, 3, "LookupError: three is missing", [3])


class Unsent(Plain):
    """One sample cannot be pickled."""

    def __getitem__(self, index: Any) -> Any:
        return threading.Lock() if index == 3 else index


def test_a_batch_that_cannot_be_sent_is_an_error(fleet: LateFleet) -> None:
    """Of that batch."""
    loader = cseq.DataLoader(Unsent(6), batch_size=2, collate_fn=as_is, fleet=fleet)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    with pytest.raises(TypeError, match="lock"):
        next(iterator)
    assert list(iterator) == [[4, 5]]


class Deadly(Plain):
    """One sample ends the process."""

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            os._exit(5)
        return index


def test_a_batch_that_ends_its_workers_is_named(fleet: LateFleet) -> None:
    """In torch's words, too, with the samples."""
    with pytest.raises(cseq.WorkerDied, match="exited unexpectedly") as caught:
        list(cseq.DataLoader(Deadly(), batch_size=2, fleet=fleet))
    assert caught.value.indices == [2, 3]


@pytest.mark.parametrize("first", ["fleet", "here"])
def test_a_state_goes_on_with_and_without_a_fleet(fleet: LateFleet, first: str) -> None:
    """With the same numbers drawn."""
    dataset = Augmented()
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True}
    ways: list[Any] = [{"fleet": fleet}, {"rng": "batch"}]
    if first == "here":
        ways.reverse()
    seed_all()
    loader = cseq.DataLoader(dataset, **options, **ways[0])
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    assert len(rest) == 5
    resumed = cseq.DataLoader(dataset, **options, **ways[1])
    resumed.load_state_dict(state)
    assert same(without_told(list(resumed)), without_told(rest))


def test_an_epoch_that_is_left_is_not_delivered_later(fleet: LateFleet) -> None:
    """Two iterators of one loader, also at a time."""
    loader = cseq.DataLoader(Plain(60), batch_size=3, shuffle=True, fleet=fleet)
    for _ in loader:
        break
    one, other = iter(loader), iter(loader)
    pairs = list(zip(one, other, strict=True))
    for batches in zip(*pairs, strict=True):
        assert sorted(torch.cat(batches).tolist()) == list(range(60))


def test_a_timeout_leaves_the_batch_where_it_is() -> None:
    """The first batch has ten times as long."""
    with LateFleet(1, is_stopped=True) as fleet:
        loader = cseq.DataLoader(Plain(6), batch_size=2, timeout=0.02, fleet=fleet)
        iterator = iter(loader)
        with pytest.raises(LoaderTimeout, match=r"timed out after 0.02 .*indices \[0, 1\]"):
            next(iterator)
        fleet.agents[1].go()
        made = []
        while len(made) < 3:
            try:
                made.append(next(iterator).tolist())
            except LoaderTimeout:
                continue
    assert made == [[0, 1], [2, 3], [4, 5]]


def test_batches_are_pinned_beside_the_loop(
    fleet: LateFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, by torch's function, also where there is no accelerator."""
    pinned: list[Any] = []

    def pin(batch: Any, _: Any) -> Any:
        pinned.append(batch.tolist())
        return batch

    monkeypatch.setattr(names, "pin", pin)
    iterator: Any = iter(cseq.DataLoader(Plain(12), batch_size=2, fleet=fleet))
    iterator._pin_memory = True
    assert [batch.tolist() for batch in iterator] == pinned
    assert pinned == [[k, k + 1] for k in range(0, 12, 2)]


def test_keys_are_drawn_by_and_by(fleet: LateFleet) -> None:
    """64 at the beginning, two for each batch that is taken, and never more than 2048 ahead."""
    sampler = Counting(range(4000))
    iterator = iter(cseq.DataLoader(Plain(4000), sampler=sampler, fleet=fleet))
    for taken in range(4001):
        if taken in (0, 1, 10, 1983, 1984, 1985, 1990, 4000):
            assert sampler.count == min(64 + 2 * taken, 2048 + taken, 4000)
        next(iterator, None)


class Opened(Plain):
    """Has what `worker_init_fn` has set in its process."""

    value = "not opened"

    def __getitem__(self, index: Any) -> Any:
        info = data.get_worker_info()
        return index, self.value, info.id, info.num_workers, info.dataset is self


def open_worker(number: int) -> None:
    """Set it."""
    type(data.get_worker_info().dataset).value = f"opened {number}"


def refuse_worker(_: int) -> None:
    """Raise."""
    raise FileNotFoundError(2, "no such file", "data.bin")


def test_worker_init_fn_is_called_in_each_worker() -> None:
    """With its number at its agent; what it raises is raised in the loop."""
    with LateFleet(1, num_workers=2) as fleet:
        loader = cseq.DataLoader(
            Opened(40), batch_size=None, worker_init_fn=open_worker, fleet=fleet
        )
        for index, (got, value, number, workers, is_own) in enumerate(loader):
            assert (got, value, workers, is_own) == (index, f"opened {number}", 2, True)
    with LateFleet(1) as fleet:
        loader = cseq.DataLoader(Plain(), worker_init_fn=refuse_worker, fleet=fleet)
        with pytest.raises(FileNotFoundError) as caught:
            next(iter(loader))
    assert caught.value.filename == "data.bin"


def test_a_fleet_serves_one_data_set(fleet: LateFleet) -> None:
    """Loaders with another order and batch size, but not with other data or functions."""
    dataset = Plain(6)
    assert len(list(cseq.DataLoader(dataset, fleet=fleet))) == 6
    assert len(list(cseq.DataLoader(dataset, batch_size=3, shuffle=True, fleet=fleet))) == 2
    for loader in (
        cseq.DataLoader(Plain(6), fleet=fleet),
        cseq.DataLoader(dataset, collate_fn=as_is, fleet=fleet),
        cseq.DataLoader(dataset, worker_init_fn=open_worker, fleet=fleet),
    ):
        with pytest.raises(ValueError, match="has another worker: it serves one DataLoader"):
            iter(loader)
    with (
        LocalFleet(Plain, 0) as other,
        pytest.raises(ValueError, match="has another worker"),
    ):
        iter(cseq.DataLoader(dataset, fleet=other))


class Stateful(Plain):
    """Has a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("dataset", "options", "complaint"),
    [
        (Plain(), {"num_workers": 2}, r"num_workers=2 beside fleet=.*leave it out"),
        (Plain(), {"rng": "worker"}, r"rng='worker' beside fleet=.*give rng='batch'"),
        (Plain(), {"max_restarts": 3}, r"max_restarts=3 beside fleet=.*give it to RayFleet"),
        (Plain(), {"fleet": 7}, r"fleet=7 is no cseq.RayFleet; give one"),
        (Sharded(3), {}, r"IterableDataset.*use num_workers="),
        (
            Stateful(),
            {"snapshot_every_n_steps": 1},
            r"state_dict\(\).*give snapshot_every_n_steps=0",
        ),
    ],
    ids=["num_workers", "rng", "max_restarts", "fleet", "iterable", "stateful"],
)
def test_what_cannot_be_is_refused_at_once(dataset: Any, options: Any, complaint: str) -> None:
    """With the argument, its value, and what to do."""
    with pytest.raises((TypeError, ValueError), match=complaint):
        cseq.DataLoader(dataset, **({"fleet": LateFleet()} | options))


def test_a_data_set_with_a_state_is_left_out_of_states(fleet: LateFleet) -> None:
    """Nothing asks for it, as in any DataLoader."""
    loader = cseq.DataLoader(Stateful(6), fleet=fleet)
    assert len(list(loader)) == 6
    assert loader.state_dict()


def test_a_data_set_that_cannot_be_pickled_is_named(fleet: LateFleet) -> None:
    """It is not left to torch's own workers."""
    dataset = Plain()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^dataset.lock: .* or use no fleet: num_workers=0"):
        iter(cseq.DataLoader(dataset, fleet=fleet))
    assert len(list(cseq.DataLoader(Plain(), fleet=fleet))) == 10
