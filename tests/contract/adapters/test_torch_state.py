"""`cseq.DataLoader`'s state: the position in an epoch, and the continuation from there."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
from conftest import complaints

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Augmented, Plain, Sharded, same, seed_all, without_told  # noqa: E402
from torch_loaders import quick_processes  # noqa: E402
from torch_states import Tally, left_and_resumed, loader, taken  # noqa: E402

import cseq  # noqa: E402
from cseq import testing  # noqa: E402

pytestmark = quick_processes


def with_workers(*values):
    """Return a case of two workers; the nightly tests run it, since other cases cover its parts."""
    return pytest.param(2, *values, marks=pytest.mark.nightly)


@pytest.mark.parametrize("taken", ["worker", "batch"])
def test_a_state_of_another_rng(taken, caplog):
    """The state counts the same batches, but the data set draws others; the log says so."""
    state = loader(Plain(2), 0, rng=taken).state_dict()
    other = {"worker": "batch", "batch": "worker"}[taken]
    loader(Plain(2), 0, rng=taken).load_state_dict(state)
    assert complaints(caplog.messages) == []
    loader(Plain(2), 0, rng=other).load_state_dict(state)
    assert f"saved with rng={taken!r}, but this loader has rng={other!r}" in caplog.text


class Shuffler(data.Sampler[Any]):
    """Draws its order from a generator: all at once, in `iter` or later, or key by key."""

    generator: Any = None

    def __init__(self, module, when, size=0):
        self.module, self.when, self.size = module, when, size

    def _draw(self, count):
        if self.module == "random":
            return [random.randrange(1000) for _ in range(count)]
        if self.module == "numpy":
            return [int(np.random.random() * 1000) for _ in range(count)]
        return torch.randint(1000, (count,), generator=self.generator).tolist()

    def __iter__(self):
        if self.when == "each":
            return (self._draw(1)[0] for _ in range(24))
        if self.when == "first":
            return (key for _ in range(1) for key in self._all())
        return iter(self._all())

    def _all(self):
        drawn, size = self._draw(24), self.size
        return [drawn[k : k + size] for k in range(0, 24, size)] if size else drawn


@pytest.mark.parametrize(
    ("num_workers", "count"), [(0, 0), (0, 1), (0, 4), (2, 1), with_workers(0), with_workers(4)]
)
@pytest.mark.parametrize("module", ["random", "numpy", "torch"])
@pytest.mark.parametrize("when", ["iter", "first"])
@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_that_draws_from_a_global_generator(num_workers, count, module, when, batches):
    def make():
        sampler = Shuffler(module, when, 3 if batches else 0)
        options = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": 3}
        return loader(Plain(1000), num_workers, **options)

    rest, resumed, state = left_and_resumed(make, count)
    assert len(rest) == 8 - count
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in resumed]

    if batches and when == "iter":
        # torch first asks the sampler for iterators, which draw.
        return
    seed_all(5)
    made = make()
    made.load_state_dict(state)
    next(iter(made))
    theirs = random.random(), np.random.random()
    seed_all(5)
    # The trainer's generators continue.
    assert theirs == (random.random(), np.random.random())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_sampler_that_is_told_the_epoch(num_workers, batch_size):
    """Lightning tells a new process the epoch after `iter`, when keys have already been drawn."""

    def make():
        sampler = data.DistributedSampler(range(12), 1, 0, seed=3)
        return loader(Plain(12), num_workers, batch_size=batch_size, sampler=sampler)

    made = make()
    assert made.state_dict()["sampler"] == ({},)
    made.sampler.set_epoch(5)
    iterator = iter(made)
    taken(iterator, 2)
    state = made.state_dict()
    assert state["sampler"][0]["generators"]["first"] == {"epoch": 5}
    rest = list(iterator)
    again = make()
    again.load_state_dict(state)
    iterator = iter(again)
    again.sampler.set_epoch(5)
    assert same(list(iterator), rest)
    again.sampler.set_epoch(6)
    made.sampler.set_epoch(6)
    assert same(list(again), list(made))


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("sampling", [{"shuffle": True}, {"shuffle": False}], ids=str)
@pytest.mark.parametrize("count", [0, 3, 6])
def test_the_epochs_behind_a_resume(num_workers, sampling, count, persistent):
    """With a generator of the loader's own, they equal the uninterrupted run's.

    The new generator's state does not matter, and the epoch may be finished (count 6 of 6).
    """

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        options = {**sampling, "persistent_workers": persistent}
        return loader(
            Augmented(12), num_workers, batch_size=2, rng="batch", generator=generator, **options
        )

    made = make(7)
    list(made)
    iterator = iter(made)
    taken(iterator, count)
    if count == 6:
        assert list(iterator) == []
    state = pickle.loads(pickle.dumps(made.state_dict()))
    rest = [*iterator, *made, *made]
    again = make(8)
    again.load_state_dict(state)
    if count < 6:
        assert same(again.state_dict(), state)
    resumed = [batch for _ in range(3 if count < 6 else 2) for batch in again]
    assert same(without_told(resumed), without_told(rest))


def test_a_state_without_the_generator_that_a_sampler_has():
    """The order of its epoch cannot be drawn again."""
    made = loader(Plain(12), 0, batch_size=2, shuffle=True)
    iterator = iter(made)
    taken(iterator, 3)
    again = loader(
        Plain(12), 0, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    again.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="the state was saved without a generator"):
        iter(again)


def test_the_state_is_small_and_of_one_size():
    made = loader(Plain(10_000), batch_size=10, shuffle=True)
    iterator = iter(made)
    sizes = set()
    for _ in range(20):
        next(iterator)
        state = made.state_dict()
        sizes.add(len(json.dumps({**state, "_num_yielded": 0, "_sampler_iter_yielded": 0})))
    assert len(sizes) == 1
    assert sizes.pop() < 8000
    assert state is not made.state_dict()


@pytest.mark.parametrize("num_workers", [0, with_workers()])
def test_the_state_before_the_next_epoch(num_workers):
    """A loop that abandons its epochs can save the start of the next one, with its draws."""

    def make():
        generator = torch.Generator().manual_seed(1)
        options = {"batch_size": 2, "shuffle": True, "rng": "batch", "generator": generator}
        return loader(Augmented(40), num_workers, **options)

    made, other = make(), make()
    other.load_state_dict(made.state_dict(next_epoch=True))
    assert other.epoch == 0
    for _ in range(2):
        taken(iter(made), 3)
        left = made.state_dict()
        state = made.state_dict(next_epoch=True)
    other.load_state_dict(state)
    assert other.epoch == 2
    assert other.state_dict(next_epoch=True) == state
    assert same(without_told(list(other)), without_told(list(made)))
    other.load_state_dict(left)
    assert other.state_dict(next_epoch=True) == left


# ── states that do not fit ─────────────────────────────────────────────────────────────────


def test_states_that_do_not_fit():
    """With another number of workers, each would have another part of the data."""
    iterable, stateful = (loader(dataset, batch_size=2) for dataset in (Sharded(9, 4), Tally(12)))
    for made in (iterable, stateful):
        taken(iter(made), 2)
        with pytest.raises(ValueError, match=r"num_workers=2, .* num_workers=1"):
            loader(made.dataset, 1, batch_size=2).load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="iterable-style"):
        loader(Plain()).load_state_dict(iterable.state_dict())


def shared(seed=0):
    """Return a sampler for all of 19 samples."""
    return data.DistributedSampler(range(19), 1, 0, seed=seed)


@pytest.mark.parametrize(
    ("sampler", "options", "text"),
    [
        (None, {"shuffle": True}, "sampler_type='SequentialSampler', but .*'RandomSampler'"),
        (None, {"sampler": shared()}, "SequentialSampler"),
        (None, {"dataset": Plain(20)}, r"samples=19, but .* samples=20, .* strict=False"),
        (shared(3), {"sampler": shared(4)}, "seed=3, but this loader has seed=4"),
    ],
    ids=["shuffled", "shared", "grown", "seed"],
)
def test_states_of_another_order(sampler, options, text):
    """They are refused in mid-epoch, as samples would be lost. A finished epoch loses none."""
    made = loader(Plain(19), 0, batch_size=2, sampler=sampler)
    iterator = iter(made)
    taken(iterator, 3)
    options = {"dataset": Plain(19), "batch_size": 2, "num_workers": 0} | options
    other = loader(**options)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(made.state_dict())
    other.load_state_dict(made.state_dict(), strict=False)
    assert len(list(other)) == len(other) - 3
    assert len(list(iterator)) == 7
    other.load_state_dict(made.state_dict())
    assert len(list(other)) == len(other)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        *((state, TypeError, "pass the dict that state_dict") for state in (None, 3, [1])),
        ({"_snapshot": {}}, ValueError, "torchdata's StatefulDataLoader, .* finish the epoch"),
        ({"fetcher_state": None}, ValueError, "torchdata's StatefulDataLoader, "),
        (
            cseq.MTSequence(np.arange(9), 3, seed=1).state_dict(),
            ValueError,
            "the state was saved by a manager",
        ),
        ({"epoch": 3}, ValueError, "version None"),
        ({"version": 9}, ValueError, "version 9"),
    ],
    ids=str,
)
def test_what_is_no_state(state, error, text):
    with pytest.raises(error, match=text):
        loader(Plain()).load_state_dict(state)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_empty_state_begins_anew(persistent):
    """It holds even if another state was loaded before."""
    made = loader(Plain(6), batch_size=None, persistent_workers=persistent)
    iterator = iter(made)
    assert taken(iterator, 2) == [0, 1]
    made.load_state_dict(made.state_dict())
    made.load_state_dict({})
    assert list(made) == list(range(6))
    made.load_state_dict({})
    assert iter(made) is not iterator


def test_a_refused_state_changes_nothing():
    made = loader(Plain(4), batch_size=2)
    with pytest.raises(ValueError, match="version"):
        made.load_state_dict({"epoch": 3})
    assert made.state_dict()["base_seed"] is None
    iterator = iter(made)
    next(iterator)
    state = made.state_dict()
    assert len(list(iterator)) == 1
    made.load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        made.load_state_dict({"epoch": 3})
    assert made.state_dict() == state
    assert len(list(made)) == 1


class Drawn(data.Sampler[int]):
    """Draws its order with its first key, or in chunks; counts how often it is asked."""

    asked = 0

    def __init__(self, length, chunk):
        self.length, self.chunk = length, chunk
        self.at, self.order, self.goes_on = 0, [0] * length, False

    def __len__(self):
        return self.length

    def __iter__(self):
        if not self.goes_on:
            self.at, self.order = 0, []
        self.goes_on = False
        while self.at < self.length:
            if self.at == len(self.order):
                self.order += (self.at + torch.randperm(self.chunk)).tolist()
            self.at += 1
            yield self.order[self.at - 1]

    def state_dict(self):
        self.asked += 1
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order, self.goes_on = state["at"], state["order"], True


@pytest.mark.parametrize(
    ("num_workers", "batch_size"),
    [(0, None), (0, 4), (0, 40), (2, 4), with_workers(None), with_workers(40)],
)
@pytest.mark.parametrize("kind", [cseq.DataLoader, cseq.StatefulDataLoader])
def test_a_sampler_is_asked_for_its_state_where_the_epoch_begins(num_workers, kind, batch_size):
    """It is not asked with each key, for any number of batches, and may draw with its first key."""

    def make():
        context = QUICKEST.start_method if num_workers else None
        options = {"multiprocessing_context": context, "batch_size": batch_size}
        return kind(Plain(30), sampler=Drawn(30, 30), num_workers=num_workers, **options)

    for count in (0, 1, 5, 30):
        made = make()
        iterator = iter(made)
        first = taken(iterator, min(count, len(made)))
        assert made.sampler.asked <= 2
        states = [pickle.loads(pickle.dumps(made.state_dict())) for _ in range(2)]
        assert same(*states)
        rest = list(iterator)
        # Each `state_dict` before the first key asks once.
        assert made.sampler.asked <= (3 if count else 4)
        torch.manual_seed(99)
        made = make()
        made.load_state_dict(states[0])
        if not count:
            # The sampler draws with its first key, so its order differs.
            assert len(list(made)) == len(rest)
            continue
        iterator = iter(made)
        resumed = taken(iterator, min(1, len(rest)))
        made.load_state_dict(made.state_dict())
        resumed += made
        assert same(resumed, rest)
        flat = torch.as_tensor(first + rest) if batch_size is None else torch.cat(first + rest)
        assert sorted(flat.tolist()) == list(range(30))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "options", "generator"),
    [(Shuffler, ("numpy", "each"), "numpy"), (Drawn, (24, 3), "torch")],
)
def test_a_sampler_that_draws_on_is_told(num_workers, kind, options, generator, caplog):
    """The log says that its later keys are drawn again, and differ."""
    made = loader(Plain(1000), num_workers, sampler=kind(*options), batch_size=3)
    taken(iter(made), 3)
    made.load_state_dict(made.state_dict())
    iterator = iter(made)
    assert num_workers or not complaints(caplog.messages)
    assert len(list(iterator)) == 5
    told = f"{kind.__name__} draws from a global generator ({generator}) even after its first key"
    assert told in caplog.text


class Shuffling(data.IterableDataset[int]):
    """Draws its order in `__iter__`, which is not a generator function."""

    def __iter__(self):
        order = list(range(8))
        random.shuffle(order)
        return iter(order)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_what_is_drawn_when_iteration_begins(num_workers, persistent):
    """With rng="batch", the draws are the same after a resume."""

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        options = {"persistent_workers": persistent, "generator": generator}
        return loader(Shuffling(), num_workers, batch_size=None, rng="batch", **options)

    made = make(3)
    first = list(made)
    assert sorted(first) == list(range(8))
    iterator = iter(made)
    before = taken(iterator, 3)
    again = make(4)
    again.load_state_dict(made.state_dict())
    rest = list(iterator)
    assert list(again) == rest
    assert sorted(before + rest) == list(range(8))
    assert before + rest != first


def test_a_state_in_no_order_says_what_it_is(caplog):
    made = loader(Plain(9), 2, in_order=False)
    iterator = iter(made)
    made.state_dict()
    assert not complaints(caplog.messages)
    taken(iterator, 3)
    made.state_dict()
    assert "only counts batches" in caplog.text


class Asking(data.Sampler[Any]):
    """A sampler or data set whose state serves callers that name their step."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))

    def __getitem__(self, index):
        return index

    def state_dict(self, step):
        return {"step": step}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_that_needs_arguments_is_not_asked_for(num_workers):
    made = loader(Asking(), num_workers, sampler=Asking())
    assert [batch.tolist() for batch in made] == [[0], [1], [2]]
    assert made.state_dict()["workers"] == (None,) * max(1, num_workers)


class Recounted:
    """Batches that are drawn again whenever they are counted."""

    def __len__(self):
        return len(list(self))

    def __iter__(self):
        yield from torch.randperm(6).reshape(3, 2).tolist()


def test_a_state_does_not_count_a_samplers_batches():
    made = loader(Plain(6), 0, batch_sampler=Recounted())
    iterator = iter(made)
    next(iterator)
    before = torch.get_rng_state()
    made.load_state_dict(made.state_dict())
    assert torch.equal(torch.get_rng_state(), before)


def test_between_epochs_with_persistent_workers():
    """The next epoch has the uninterrupted run's order, though the sampler is asked twice."""

    def make():
        generator = torch.Generator().manual_seed(1)
        options = {"shuffle": True, "persistent_workers": True, "generator": generator}
        return loader(Plain(6), batch_size=None, **options)

    made = make()
    assert len(list(made)) == 6
    other = make()
    other.load_state_dict(made.state_dict())
    assert list(other) == list(made)


# ── data sets with states ──────────────────────────────────────────────────────────────────


def test_the_replacement_of_a_persistent_worker_has_the_state_of_the_epoch_before():
    """The data set continues where the previous epoch left it."""
    made = loader(Tally(4), 1, batch_size=None, persistent_workers=True)
    assert list(made) == [1, 2, 3, 4]
    testing.kill(made, 0)
    assert list(made) == [5, 6, 7, 8]


def test_iterable_generators_go_on_with_seeds_for_each_batch():
    rest, resumed, _ = left_and_resumed(lambda: loader(Sharded(9, 4), batch_size=2, rng="batch"), 3)
    assert same(rest, resumed)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_is_kept_or_given_stays_as_it_is(num_workers):
    """Later changes by a data set or a sampler do not reach the state."""
    made, again = (loader(Packing(), num_workers, batch_size=None) for _ in range(2))
    iterator = iter(made)
    taken(iterator, 2)
    state = made.state_dict()
    before = pickle.dumps(state)
    rest = list(iterator)
    assert pickle.dumps(state) == before
    again.load_state_dict(state)
    assert list(again) == rest == [3, 4, 5, 6, 7, 8]
    assert num_workers or again.dataset.made == 6
    assert pickle.dumps(state) == before
    again.load_state_dict(state)
    again.state_dict()["workers"][0].clear()
    state["workers"][0].clear()
    assert list(again) == rest


class Packing(data.IterableDataset[int]):
    """Its state includes its buffer, as in data sets that pack or shuffle."""

    made = 0

    def __init__(self):
        self.buffer: list[int] = []

    def __iter__(self):
        return self

    def __next__(self):
        if len(self.buffer) == 8:
            raise StopIteration
        self.made += 1
        self.buffer.append(len(self.buffer) + 1)
        return self.buffer[-1]

    def state_dict(self):
        return {"buffer": self.buffer}

    def load_state_dict(self, state):
        self.buffer = state["buffer"]


class Asked(data.IterableDataset[int]):
    """Counts the requests for its state where the tests can read it."""

    def __init__(self, path):
        self.path = path
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        with self.path.open("a") as file:
            file.write(f"{self.at}\n")
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def asked(self):
        return [int(line) for line in self.path.read_text().split()]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_data_loader_asks_no_data_set_for_a_state(num_workers, persistent, tmp_path, caplog):
    """A resume makes the epoch's batches again; the first state logs what would avoid that."""
    context = QUICKEST.start_method if num_workers else None
    options = {"num_workers": num_workers, "batch_size": 2, "multiprocessing_context": context}
    options["persistent_workers"] = persistent
    dataset = Asked(tmp_path / "asked")
    dataset.path.touch()
    made = cseq.DataLoader(dataset, **options)
    iterator = iter(made)
    taken(iterator, 13)
    assert not complaints(caplog.messages)
    states = [made.state_dict() for _ in range(2)]
    assert states[0]["workers"] == (None,)
    [told] = complaints(caplog.messages)
    assert told.startswith("dataset=Asked has a state_dict(), which a DataLoader does")
    assert "StatefulDataLoader" in told
    rest = [batch.tolist() for batch in iterator]
    assert len(rest) == 7
    dataset = Asked(dataset.path)
    again = cseq.DataLoader(dataset, **options)
    again.load_state_dict(states[0])
    assert [batch.tolist() for batch in again] == rest
    assert dataset.asked() == []
    made._iterator = again._iterator = None
    caplog.clear()
    cseq.DataLoader(dataset, snapshot_every_n_steps=0, **options).state_dict()
    for kind, every in (
        (cseq.StatefulDataLoader, {}),
        (cseq.DataLoader, {"snapshot_every_n_steps": 1}),
    ):
        dataset = Asked(dataset.path)
        dataset.path.write_text("")
        asks = kind(dataset, **every, **options)
        taken(iter(asks), 1)
        asks.state_dict()
        assert 2 in dataset.asked()
        asks._iterator = None
    assert not complaints(caplog.messages)


ODD = [None, -1, 10**30, 1.5, "x", [], ["x"], {}, {"a": 1}, object(), torch.zeros(3)]
FREE = {"rng", "base_seed", "generator", "epoch", "sampler_type", "shuffle", "seed", "samples"}
FREE |= {"batch_size", "batches", "step", "world_size", "rank"}


@pytest.mark.parametrize("kind", ["map", "iterable", "order"])
def test_a_malformed_state(kind):
    """Loading the state raises an error that names it, and the loader starts as if without it."""

    def make():
        if kind == "order":
            return cseq.DataLoader(Plain(8), 2, sampler=cseq.Shuffled(8))
        dataset = Sharded(8) if kind == "iterable" else Plain(8)
        return loader(dataset, 0, shuffle=True if kind == "map" else None)

    made = make()
    taken(iter(made), 2)
    state = made.state_dict()
    for name in state:
        for value in ODD:
            again = make()
            try:
                again.load_state_dict({**state, name: value})
            except (ValueError, TypeError):
                again.load_state_dict({})
            else:
                assert name in FREE
            list(again)


@pytest.mark.parametrize(
    "sampler",
    [{"generators": {}}, {"generator": 3}, {"generators": {"iter": {}, "first": {"torch": None}}},
     {"generators": {"iter": {}, "first": {"epoch": [1]}}},
     {"generators": {"iter": {}, "first": {"random": (3, (1,), None)}}}],
)  # fmt: skip
def test_a_malformed_state_of_a_sampler(sampler):
    made = loader(Plain(8), 0, shuffle=True)
    taken(iter(made), 2)
    with pytest.raises(ValueError, match="the state is malformed: sampler="):
        made.load_state_dict({**made.state_dict(), "sampler": (sampler,)})
