"""`state_dict()` of `cseq.DataLoader` for data sets with and without states."""

from __future__ import annotations

import pickle

import pytest
from conftest import complaints

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Plain,
    Sharded,
    same,
)
from torch_states import left_and_resumed, loader, taken  # noqa: E402

import cseq  # noqa: E402
from cseq import testing  # noqa: E402

pytestmark = [
    pytest.mark.needs("quick processes"),
    # torch warns of this on machines with few processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Drawing(Plain):
    """Draws from torch's generator, whose state is its own."""

    def __getitem__(self, index):
        return int(torch.randint(1000, ()))

    def state_dict(self):
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("every", [1, 15])
def test_map_style_data_with_a_state(num_workers, every):
    made = loader(Drawing(12), num_workers, shuffle=True, snapshot_every_n_steps=every)
    iterator = iter(made)
    first = made.state_dict()
    batches = taken(iterator, 5)
    state = made.state_dict()
    made.load_state_dict(state)
    batches += made
    made.load_state_dict(first)
    assert same(list(made), batches)
    assert len(batches) == 12
    with pytest.raises(ValueError, match=rf"num_workers={num_workers}, .* num_workers=3"):
        loader(Drawing(12), 3, shuffle=True).load_state_dict(state)


class Tally(Plain):
    """Its state is the number of samples that it was asked for."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_replacement_of_a_persistent_worker_has_the_state_of_the_epoch_before():
    """The data set continues where the previous epoch left it."""
    made = loader(Tally(4), 1, batch_size=None, persistent_workers=True)
    assert list(made) == [1, 2, 3, 4]
    testing.kill(made, 0)
    assert list(made) == [5, 6, 7, 8]


def test_iterable_generators_go_on_with_seeds_for_each_batch():
    rest, resumed, _ = left_and_resumed(lambda: loader(Sharded(9, 4), batch_size=2, rng="batch"), 3)
    assert same(rest, resumed)


def test_a_state_that_is_kept_or_given_stays_as_it_is():
    """Later changes by a data set or a sampler do not reach the state."""
    for num_workers in (0, 1):

        def make(num_workers=num_workers):
            return loader(Packing(), num_workers, batch_size=None)

        made = make()
        iterator = iter(made)
        taken(iterator, 2)
        state = made.state_dict()
        before = pickle.dumps(state)
        rest = list(iterator)
        assert pickle.dumps(state) == before
        again = make()
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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loader_asks_no_data_set_for_a_state(num_workers, persistent, tmp_path, caplog):
    """A resume makes the epoch's batches again; the first state logs what would avoid that."""
    context = QUICKEST.start_method if num_workers else None
    options = {"num_workers": num_workers, "batch_size": 2, "multiprocessing_context": context}
    options["persistent_workers"] = persistent and num_workers > 0
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


class Going(data.IterableDataset[int]):
    """Its own iterator: an epoch continues where the previous one ended."""

    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at % 4 == 0:
            raise StopIteration
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_data_that_are_their_own_iterator():
    made = loader(Going(), 0, batch_size=None)
    iterator = iter(made)
    assert taken(iterator, 2) == [1, 2]
    within = made.state_dict()
    assert list(iterator) == [3]
    for state, rest in ((within, [3]), (made.state_dict(), [5, 6, 7])):
        other = loader(Going(), 0, batch_size=None)
        other.load_state_dict(state)
        assert list(other) == rest
