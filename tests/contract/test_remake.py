"""A batch made again: bit for bit what the loop got, no matter who made it."""

import random

import numpy as np
import pytest
from kinds import FEW, INLINE, THREAD, assert_same, by_name

import cseq


class Augmented:
    """Draws from the batch's generator, and returns the number of the batch."""

    def __getitem__(self, indices):
        info = cseq.worker_info()
        assert info is not None
        return {
            "indices": indices,
            "drawn": cseq.rng().random(len(indices)),
            "batch": (info.epoch, info.batch),
        }


class Globals(Augmented):
    """Draws from the global generators, which processes seed for each batch."""

    def __getitem__(self, indices):
        noise = np.random.random(3)  # noqa: NPY002 - the global one is meant
        return super().__getitem__(indices) | {"noise": noise, "one": random.random()}


class Odd(Augmented):
    def __getitem__(self, indices):
        if 5 in indices:
            raise LookupError("five is odd")
        return super().__getitem__(indices)


def manager(kind, worker=Augmented, n=23, **options):
    """Make a manager of a few samples."""
    return kind.make(worker, n, **{"batch_size": 4, "seed": 1, **options})


@pytest.mark.parametrize("kind", FEW, ids=by_name)
@pytest.mark.parametrize(
    "options",
    [{}, {"shard": (1, 2), "batch_size": 3}, {"shuffle": "feistel", "repeat": 2}, {"pad": False}],
    ids=str,
)
def test_it_is_what_the_loop_got(kind, options):
    """It holds during the run and afterwards, for each batch of two epochs."""
    worker = Augmented if kind is THREAD else Globals
    one = manager(kind, worker, **options)
    got = []
    state = random.getstate()
    with kind.begin(one) as batches:
        for _ in range(2 // options.get("repeat", 1)):
            for batch in batches:
                got.append(batch)
                epoch, number = batch["batch"]
                assert_same(one.remake(epoch, number).batch, batch)
    for batch in got:
        made = one.remake(*batch["batch"])
        assert_same(made.batch, batch)
        assert made.indices.tolist() == one.indices(*batch["batch"]).tolist()
        assert made.indices.tolist() == batch["indices"].tolist()
        assert made.seconds > 0
    assert random.getstate() == state


def test_after_a_resume():
    """In an epoch that resumed with other batches, numbers count the batches that came."""
    first = manager(THREAD)
    with first.start() as batches:
        iterator = iter(batches)
        for _ in range(3):
            next(iterator)
        state = first.state_dict()
    second = manager(THREAD, batch_size=5)
    second.load_state_dict(state)
    with second.start() as batches:
        for batch in batches:
            assert_same(second.remake(*batch["batch"]).batch, batch)
    with pytest.raises(IndexError, match=r"batch=1 is not in \[2, 5\) of epoch 0"):
        second.remake(0, 1)
    assert second.indices(1, 0).tolist() == manager(INLINE, batch_size=5).indices(1, 0).tolist()


def test_a_batch_that_was_left_out():
    """It raises here, too."""
    one = manager(THREAD, Odd, on_error="skip")
    with one.start() as batches:
        list(batches)
    [(epoch, batch, *_)] = one.skipped
    with pytest.raises(LookupError, match="five is odd"):
        one.remake(epoch, batch)
    assert 5 in one.indices(epoch, batch)


@pytest.mark.parametrize("batch", [-1, 6])
def test_a_batch_that_there_is_not(batch):
    """The error names the existing batches."""
    for ask in (manager(INLINE).remake, manager(INLINE).indices):
        with pytest.raises(IndexError, match=rf"batch={batch} is not in \[0, 6\) of epoch 0"):
            ask(0, batch)


def test_nothing_is_left():
    """The new indexer is closed, even after an exception."""
    closed = []

    class Closing(Odd):
        def close(self):
            closed.append(True)

    one = manager(THREAD, Closing)
    for batch in range(6):
        try:
            one.remake(0, batch)
        except LookupError:
            closed.append(False)
    assert sorted(closed) == [False] + [True] * 6
