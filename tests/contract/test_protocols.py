"""Epochs as frameworks ask for them; tests/frameworks has the frameworks themselves.

They throw an `iter` away, call `set_epoch` before or after the `iter` that it is meant for, do not
look at StopIteration, and make no call at the end.
"""

from itertools import islice

import pytest
from indexers import Indices1
from interrupting import interrupted
from kinds import QUICK, QUICKEST, THREAD, by_name

import cseq

N, BATCH = 22, 4
STEPS = 6  # batches of an epoch

# Epochs are counted in the trainer: how its processes are started is nothing to that.
every_kind = pytest.mark.parametrize("kind", QUICK, ids=by_name)


def make(kind, **options):
    """Make a manager of 22 samples in 6 batches."""
    return kind.make(Indices1, N, batch_size=BATCH, **options)


def epoch_batches(epoch):
    """Cut the order of an epoch into batches."""
    order = cseq.permutation(N, 42, epoch).tolist()
    return [order[k : k + BATCH] for k in range(0, N, BATCH)]


def take(batches, count):
    """Take some batches, and do not look for the end."""
    return [batch.tolist() for batch in islice(batches, count)]


@every_kind
def test_an_iterator_that_is_thrown_away(kind):
    """It costs no epoch, and `state_dict` is what it was; so it is before a first batch."""
    with kind.begin(make(kind)) as manager:
        before = manager.state_dict()
        for _ in range(3):
            batches = iter(manager)
            assert (manager.epoch, manager.state_dict()) == (0, before)
        assert take(batches, STEPS) == epoch_batches(0)
        iter(manager)
        assert (manager.epoch, manager.state_dict()["consumed"]) == (1, 0)
        assert manager.state_dict()["epoch"] == 1
        assert take(iter(manager), 2) == epoch_batches(1)[:2]
        assert manager.state_dict()["consumed"] == 2 * BATCH
    iter(kind.begin(manager))
    manager.finish()
    with kind.begin(manager):  # neither does one that ended with its pool
        assert manager.epoch == 2
        assert take(iter(manager), 1) == epoch_batches(2)[:1]


@pytest.mark.parametrize("kind", [THREAD, QUICKEST], ids=by_name)
def test_a_second_iterator_goes_on_with_the_work(kind):
    """What the workers have made for an iterator that was thrown away is not made again."""
    with kind.begin(make(kind, buffer=2)) as manager:
        batches = iter(manager)
        ring = manager._run.pool.feed
        tickets = ring.ticket
        for _ in range(5):
            old, batches = batches, iter(manager)
            with pytest.raises(InterruptedError):
                next(old)
        manager.set_epoch(0)
        assert ring.ticket == tickets  # none was posted again
        assert take(batches, STEPS) == epoch_batches(0)


@every_kind
def test_set_epoch_after_iter(kind):
    """An iterator that has given nothing takes another epoch over, also back and forth."""
    with kind.begin(make(kind)) as manager:
        batches = iter(manager)
        for epoch in (7, 0, 3):
            manager.set_epoch(epoch)
            assert manager.epoch == epoch
        assert take(batches, STEPS) == epoch_batches(3)
        assert manager.state_dict()["epoch"] == 4
        batches = iter(manager)
        assert take(batches, 1) == epoch_batches(4)[:1]
        manager.set_epoch(9)  # too late for this one
        assert take(batches, 1) == epoch_batches(4)[1:2]
        assert take(iter(manager), 1) == epoch_batches(9)[:1]
        batches = iter(manager)
        manager.set_epoch(10)  # its own, and nothing was taken
        assert take(batches, 1) == epoch_batches(10)[:1]
        assert take(iter(manager), 1) == epoch_batches(11)[:1]


@every_kind
def test_set_epoch_of_a_loaded_epoch_keeps_the_place(kind):
    """Before and after the `iter`; another epoch begins at its beginning."""
    manager = make(kind)
    state = manager.state_dict() | {"epoch": 5, "consumed": 2 * BATCH}
    with kind.begin(manager):
        manager.load_state_dict(state)
        manager.set_epoch(5)
        batches = iter(manager)
        manager.set_epoch(5)
        assert manager.state_dict() == state
        assert take(batches, STEPS) == epoch_batches(5)[2:]
        manager.load_state_dict(state)
        manager.set_epoch(6)
        assert take(iter(manager), 1) == epoch_batches(6)[:1]
        manager.load_state_dict(state | {"consumed": 0})  # the epoch from its start
        assert take(iter(manager), 1) == epoch_batches(5)[:1]


@every_kind
def test_set_epoch_of_the_epoch_under_way(kind):
    """The loop and its state stay where they are; the next `iter` begins the epoch again."""
    with kind.begin(make(kind)) as manager:
        batches = iter(manager)
        got = take(batches, 2)
        state = manager.state_dict()
        manager.set_epoch(0)
        assert manager.state_dict() == state
        got += take(batches, 1)
        assert manager.state_dict()["consumed"] == 3 * BATCH
        assert got == epoch_batches(0)[:3]
        batches = iter(manager)
        assert take(batches, 1) == epoch_batches(0)[:1]
        manager.set_epoch(0)
        take(batches, STEPS)
        assert take(iter(manager), 1) == epoch_batches(1)[:1]  # 0 was over by then
        manager.set_epoch(1)
        take(iter(manager), STEPS)
        manager.set_epoch(1)  # of an epoch that is over: again
        assert (manager.state_dict()["epoch"], manager.state_dict()["consumed"]) == (1, 0)
        assert take(iter(manager), STEPS) == epoch_batches(1)


@every_kind
def test_the_sampler(kind):
    """`sampler` has torch's two methods: `set_epoch`, and this rank's samples as its length."""
    lengths = [len(make(kind, shard=(rank, 4)).sampler) for rank in range(4)]
    assert lengths == [6, 6, 6, 6]  # 16 in a global batch, and 6 in parts of 2
    assert len(make(kind, shard=(1, 4), drop_last=True).sampler) == 4
    with kind.begin(make(kind)) as manager:
        manager.sampler.set_epoch(2)
        assert (len(manager.sampler), manager.epoch) == (N, 2)
        batches = iter(manager)
        manager.sampler.set_epoch(4)
        assert take(batches, 1) == epoch_batches(4)[:1]
        with pytest.raises(TypeError, match="epoch"):
            manager.sampler.set_epoch("4")


class BrokenFirst:
    """Fails on sample 0."""

    def __getitem__(self, indices):
        if 0 in indices:
            raise OSError("unreadable")
        return indices


@every_kind
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_exception_begins_an_epoch(kind, on_error):
    """A first batch that raises, or is skipped, is not tried for ever."""
    manager = kind.make(BrokenFirst, 4, batch_size=4, shuffle=False, on_error=on_error)
    with kind.begin(manager):
        for epoch in range(3):
            if on_error == "raise":
                with pytest.raises(OSError, match="unreadable"):
                    next(iter(manager))
                assert manager.state_dict()["consumed"] == 0
                assert manager.state_dict()["epoch"] == epoch
            else:
                assert list(manager) == []
            assert manager.epoch == epoch


@every_kind
def test_interrupted_set_epoch(kind):
    """Ctrl-C anywhere in `set_epoch`: the iterator gives the one epoch, or the other, or raises."""
    ends = set()
    for countdown in range(1, 200, 7 if kind.processes else 1):
        with kind.begin(make(kind)) as manager:
            batches = iter(manager)
            with interrupted(
                countdown,
                "sequence.py",
                "order/place.py",
                "engine/pool.py",
                "tickets/batches.py",
                "order/sampler.py",
            ) as struck:
                manager.set_epoch(3)
            epoch = manager.epoch
            assert epoch in {0, 3}
            try:
                assert take(batches, STEPS) == epoch_batches(epoch)
                assert manager.state_dict()["epoch"] == epoch + 1
                ends.add("whole")
            except InterruptedError:
                assert take(manager, STEPS) == epoch_batches(epoch)
                ends.add("interrupted")
        if not struck.is_set():
            break
    assert countdown > 5
    assert "whole" in ends
