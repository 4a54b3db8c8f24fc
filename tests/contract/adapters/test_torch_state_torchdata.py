"""`cseq.StatefulDataLoader` beside torchdata's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Plain,
    same,
)
from torch_states import Counted, Counting, Cycle, Epochs, Rotated, Unequal, loader, taken  # noqa: E402

import cseq  # noqa: E402

pytestmark = [
    pytest.mark.needs("quick processes"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on few processors
]


# ── torchdata's format ─────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:Neither dataset nor iter")
class TestTorchdata:
    """States of torchdata's StatefulDataLoader."""

    @pytest.fixture(autouse=True)
    def theirs(self) -> None:
        pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)

    @staticmethod
    def left(num_workers: int, dataset: Any, count: int, **options: Any) -> tuple[Any, Any]:
        """Take some batches of theirs; return the state and the rest."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        context = QUICKEST.start_method if num_workers else None
        made = StatefulDataLoader(
            dataset, num_workers=num_workers, multiprocessing_context=context, **options
        )
        iterator = iter(made)
        taken(iterator, count)
        state = made.state_dict()
        return pickle.loads(pickle.dumps(state)), list(iterator)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"snapshot_every_n_steps": 3}])
    def test_map(self, num_workers: int, options: Any) -> None:
        state, rest = self.left(num_workers, Plain(20), 4, batch_size=2, **options)
        made = loader(Plain(20), 2, batch_size=2, shuffle=options.get("shuffle", False))
        made.load_state_dict(state)
        assert same(list(made), rest)
        assert len(rest) == 6

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_sampler_with_a_state(self, num_workers: int) -> None:
        state, rest = self.left(num_workers, Plain(20), 4, batch_size=2, sampler=Cycle(20))
        made = loader(Plain(20), 2, batch_size=2, sampler=Cycle(20))
        made.load_state_dict(state)
        assert same(list(made), rest)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("every", [1, 3])
    def test_iterable(self, num_workers: int, every: int) -> None:
        dataset = Counted(30, "iterator")
        state, rest = self.left(num_workers, dataset, 5, batch_size=2, snapshot_every_n_steps=every)
        made = loader(dataset, num_workers, batch_size=2)
        made.load_state_dict(state)
        assert [b[0].tolist() for b in made] == [b[0].tolist() for b in rest]

    @pytest.mark.parametrize("where", ["iterator", "dataset", ""])
    @pytest.mark.parametrize("every", [1, 3])
    @pytest.mark.parametrize("count", range(1, 8))
    def test_unequal_shards(self, where: str, every: int, count: int) -> None:
        """Which workers have ended is not in their states, nor how many batches each has made."""
        dataset = Unequal([7, 1, 4], where)
        options = {"batch_size": 2, "snapshot_every_n_steps": every}
        state, rest = self.left(3, dataset, count, **options)
        made = loader(dataset, 3, batch_size=2)
        made.load_state_dict(state)
        iterator = iter(made)
        begun = made.state_dict()
        batches = [b[0].tolist() for b in iterator]
        assert batches == [b[0].tolist() for b in rest]
        assert begun["_num_yielded"] == count
        made.load_state_dict(begun)  # of our own format now
        assert [b[0].tolist() for b in made] == batches

    def test_a_map_style_data_set_with_a_state(self) -> None:
        """Its states are older than the last batch, and so it is asked for the ones since again."""
        state, rest = self.left(2, Counting(20), 5, batch_size=2, snapshot_every_n_steps=4)
        made = loader(Counting(20), 2, batch_size=2)
        made.load_state_dict(state)
        assert same(list(made), rest)
        assert len(rest) == 5

    def epochs(self, made: Any, count: int = 2) -> list[Any]:
        """Take epochs."""
        found = [list(made) for _ in range(count)]
        made._iterator = None
        return found

    def over(self, num_workers: int, make: Any, count: int = 1, **options: Any) -> None:
        """Compare what comes behind epochs of theirs with what comes behind their state here."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        every = options.pop("snapshot_every_n_steps", 1)
        options["multiprocessing_context"] = "fork" if num_workers else None
        made = StatefulDataLoader(
            num_workers=num_workers, snapshot_every_n_steps=every, **make(), **options
        )
        for _ in range(count):
            assert list(made)
        state = pickle.loads(pickle.dumps(made.state_dict()))
        assert state["_iterator_finished"]
        expected = self.epochs(made)
        again = cseq.DataLoader(num_workers=num_workers, **make(), **options)
        again.load_state_dict(state)
        assert same(again.state_dict(), state)
        assert same(self.epochs(again), expected)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("count", [1, 3])
    def test_shuffling_without_batches(self, num_workers: int, count: int) -> None:
        options = {"batch_size": None, "shuffle": True}
        state, rest = self.left(num_workers, Plain(8), count, **options)
        made = loader(Plain(8), num_workers, **options)
        made.load_state_dict(state)
        assert list(made) == rest
        assert len(rest) == 8 - count

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("batch_size", [None, 2])
    @pytest.mark.parametrize("every", [1, 100])
    @pytest.mark.parametrize(("epochs", "count"), [(0, 2), (1, 0), (1, 2)])
    def test_a_generator_that_is_the_loaders_as_well(
        self, num_workers: int, batch_size: int | None, every: int, epochs: int, count: int
    ) -> None:
        """Their state of it is from before the epoch's seed was drawn, or of the epoch before."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        def make(cls: Any, seed: int) -> Any:
            return cls(
                Plain(8),
                batch_size=batch_size,
                shuffle=True,
                num_workers=num_workers,
                multiprocessing_context="fork" if num_workers else None,
                generator=torch.Generator().manual_seed(seed),
                snapshot_every_n_steps=every,
            )

        made = make(StatefulDataLoader, 5)
        for _ in range(epochs):
            list(made)
        iterator = iter(made)
        taken(iterator, count)
        state = pickle.loads(pickle.dumps(made.state_dict()))
        rest = [list(iterator), *self.epochs(made)]
        again = make(cseq.DataLoader, 6)
        again.load_state_dict(state)
        assert same(self.epochs(again, 3), rest)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_the_end_with_a_generator(
        self, num_workers: int, persistent: bool, batch_size: int | None
    ) -> None:
        def make() -> Any:
            generator = torch.Generator().manual_seed(5)
            return {"dataset": Plain(7), "shuffle": True, "generator": generator}

        kept = persistent and num_workers > 0
        for count in (1, 2):
            self.over(num_workers, make, count, batch_size=batch_size, persistent_workers=kept)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("every", [1, 3, 100])
    @pytest.mark.parametrize("length", [6, 7])
    def test_the_end_of_a_sampler_with_a_state(
        self, num_workers: int, every: int, length: int
    ) -> None:
        """With workers, their state is from before the sampler came to its end."""

        def make() -> Any:
            return {"dataset": Plain(length), "sampler": Rotated(length)}

        self.over(num_workers, make, batch_size=2, snapshot_every_n_steps=every)

    @pytest.mark.parametrize("every", [1, 2])
    def test_the_end_of_a_sampler_that_sees_it_early(self, every: int) -> None:
        """Its state with the last batch is that of the next epoch; a state before is refused."""

        class Early(Rotated):
            def __iter__(self) -> Any:
                while True:
                    batch = [(k + self.epochs) % 6 for k in (self.at, self.at + 1)]
                    self.at += 2
                    is_over = self.at == 6
                    if is_over:
                        self.at, self.epochs = 0, self.epochs + 1
                    yield batch
                    if is_over:
                        return

        def make() -> Any:
            return {"dataset": Plain(6), "batch_sampler": Early(6)}

        self.over(2, make, snapshot_every_n_steps=every)

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("every", [1, 3])
    @pytest.mark.parametrize("own", [False, True])
    def test_the_end_of_a_data_set_with_a_state(
        self, num_workers: int, every: int, own: bool
    ) -> None:
        """Workers that persist keep it: their state is from before its end."""
        self.over(
            num_workers,
            lambda: {"dataset": Epochs(own)},
            batch_size=2,
            persistent_workers=num_workers > 0,
            snapshot_every_n_steps=every,
        )

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("every", [1, 3])
    @pytest.mark.parametrize("count", [1, 2])
    def test_the_end_of_a_map_style_data_set_with_a_state(
        self, num_workers: int, every: int, count: int
    ) -> None:
        self.over(
            num_workers,
            lambda: {"dataset": Counting(6), "sampler": Rotated(6)},
            count,
            batch_size=2,
            persistent_workers=num_workers > 0,
            snapshot_every_n_steps=every,
        )

    def test_a_sampler_that_goes_on_where_its_epoch_was_over(self) -> None:
        """The data set has more samples now."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        options: Any = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": 2}
        made = StatefulDataLoader(Plain(6), sampler=Rotated(6), snapshot_every_n_steps=2, **options)
        list(made)
        again = cseq.DataLoader(Plain(9), sampler=Rotated(9), **options)
        again.load_state_dict(made.state_dict())
        with pytest.raises(ValueError, match="it goes on: the data set or the sampler"):
            iter(again)

    def test_a_data_set_that_begins_anew_at_its_end(self) -> None:
        """One of the workers' states is from behind the end, others from before it: refused."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        class Restarting(Epochs):
            def __next__(self) -> Any:
                info = data.get_worker_info()
                assert info is not None
                if self.at == 2 + info.id:
                    self.at, self.epoch = 0, self.epoch + 1
                    raise StopIteration
                self.at += 1
                return self.epoch, self.at

        options: Any = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": None}
        options["persistent_workers"] = True
        made = StatefulDataLoader(Restarting(True), **options)
        assert len(list(made)) == 5
        state = made.state_dict()
        made._iterator = None
        again = cseq.DataLoader(Restarting(True), **options)
        again.load_state_dict(state)
        with pytest.raises(ValueError, match="or begins anew by itself at its end"):
            iter(again)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_an_order_that_their_state_does_not_have(
        self, num_workers: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They keep what their own RandomSampler draws from: of others, the log says so."""

        def sampler() -> Any:
            generator = torch.Generator().manual_seed(3)
            return data.SubsetRandomSampler(range(8), generator=generator)

        state, rest = self.left(num_workers, Plain(8), 2, batch_size=2, sampler=sampler())
        made = loader(Plain(8), num_workers, batch_size=2, sampler=sampler())
        made.load_state_dict(state)
        assert same(list(made), rest)  # the first epoch, from the same seed
        assert "SubsetRandomSampler" in caplog.text
        state, rest = self.left(num_workers, Plain(8), 4, batch_size=2, sampler=sampler())
        assert rest == []
        caplog.clear()
        made.load_state_dict({**state, "_iterator_finished": True})
        assert len(list(made)) == 4
        assert "SubsetRandomSampler" in caplog.text

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_other_batches(self, num_workers: int) -> None:
        """As far as their states tell."""
        state, _ = self.left(num_workers, Plain(8), 2, batch_size=2, shuffle=True)
        with pytest.raises(ValueError, match="shuffle=True, and this loader has shuffle=False"):
            loader(Plain(8), num_workers, batch_size=2).load_state_dict(state)
        for size in (1, 3, 4):
            made = loader(Plain(8), num_workers, batch_size=size, shuffle=True)
            with pytest.raises(ValueError, match=f"2 batches of 4 samples, .* batch_size={size}"):
                made.load_state_dict(state)
