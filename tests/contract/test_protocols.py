"""Epochs as frameworks iterate them; tests/frameworks has the frameworks themselves.

They discard an `iter`, call `set_epoch` before or after its `iter`, do not wait for StopIteration,
and make no call at the end.
"""

from functools import partial
from itertools import islice

import pytest
from indexers import Indices1, Raising
from interrupting import interrupted
from kinds import QUICK, QUICKEST, THREAD, by_name

import cseq

N, BATCH = 22, 4
# Batches of an epoch.
STEPS = 6

# The trainer counts epochs, so the start method of processes does not matter.
every_kind = pytest.mark.parametrize("kind", QUICK, ids=by_name)


def make(kind, **options):
    """Make a manager of 22 samples in 6 batches."""
    return kind.make(Indices1, N, batch_size=BATCH, **options)


def epoch_batches(epoch):
    """Cut the order of an epoch into batches."""
    order = cseq.permutation(N, 42, epoch).tolist()
    return [order[k : k + BATCH] for k in range(0, N, BATCH)]


def take(batches, count):
    """Take some batches, without waiting for the end."""
    return [batch.tolist() for batch in islice(batches, count)]


@every_kind
def test_an_iterator_that_is_thrown_away(kind):
    """It uses up no epoch, and leaves `state_dict` unchanged, even before a first batch."""
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
    # An iterator that ended with its pool uses up no epoch either.
    with kind.begin(manager):
        assert manager.epoch == 2
        assert take(iter(manager), 1) == epoch_batches(2)[:1]


@pytest.mark.parametrize("kind", [THREAD, QUICKEST], ids=by_name)
def test_a_second_iterator_goes_on_with_the_work(kind):
    """Work done for a discarded iterator is not repeated."""
    with kind.begin(make(kind, buffer=2)) as manager:
        batches = iter(manager)
        ring = manager._run.pool.feed
        tickets = ring.ticket
        for _ in range(5):
            old, batches = batches, iter(manager)
            with pytest.raises(InterruptedError):
                next(old)
        manager.set_epoch(0)
        assert ring.ticket == tickets
        assert take(batches, STEPS) == epoch_batches(0)


@every_kind
def test_set_epoch_after_iter(kind):
    """An iterator that has given no batch switches to another epoch, forwards or backwards.

    Otherwise, and before a start, `set_epoch` sets the epoch of the next `iter`.
    """
    manager = make(kind)
    for epoch in (2**64 - 1, 7):
        manager.set_epoch(epoch)
        assert manager.epoch == epoch
        with kind.begin(manager):
            assert take(iter(manager), 1) == epoch_batches(epoch)[:1]
    with kind.begin(manager):
        assert take(manager, STEPS) == epoch_batches(8)
        batches = iter(manager)
        for epoch in (7, 0, 3):
            manager.set_epoch(epoch)
            assert manager.epoch == epoch
        assert take(batches, STEPS) == epoch_batches(3)
        assert manager.state_dict()["epoch"] == 4
        batches = iter(manager)
        assert take(batches, 1) == epoch_batches(4)[:1]
        # The call is too late for this iterator.
        manager.set_epoch(9)
        assert take(batches, 1) == epoch_batches(4)[1:2]
        assert take(iter(manager), 1) == epoch_batches(9)[:1]
        batches = iter(manager)
        # The iterator has given no batch yet.
        manager.set_epoch(10)
        assert take(batches, 1) == epoch_batches(10)[:1]
        assert take(iter(manager), 1) == epoch_batches(11)[:1]


@every_kind
def test_set_epoch_of_a_loaded_epoch_keeps_the_place(kind):
    """It holds before and after the `iter`; another epoch starts at its beginning."""
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
        manager.load_state_dict(state | {"consumed": 0})
        assert take(iter(manager), 1) == epoch_batches(5)[:1]


@every_kind
def test_set_epoch_of_the_epoch_under_way(kind):
    """The loop and its state keep their position; the next `iter` begins the epoch again."""
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
        # Epoch 0 was over by then.
        assert take(iter(manager), 1) == epoch_batches(1)[:1]
        manager.set_epoch(1)
        take(iter(manager), STEPS)
        # Setting an epoch that is over begins it again.
        manager.set_epoch(1)
        assert (manager.state_dict()["epoch"], manager.state_dict()["consumed"]) == (1, 0)
        assert take(iter(manager), STEPS) == epoch_batches(1)


@every_kind
def test_the_sampler(kind):
    """`sampler` has torch's `set_epoch`, and its length is the number of this rank's samples."""
    lengths = [len(make(kind, shard=(rank, 4)).sampler) for rank in range(4)]
    # 16 samples are in a global batch, and 6 in parts of 2.
    assert lengths == [6, 6, 6, 6]
    assert len(make(kind, shard=(1, 4), drop_last=True).sampler) == 4
    with kind.begin(make(kind)) as manager:
        manager.sampler.set_epoch(2)
        assert (len(manager.sampler), manager.epoch) == (N, 2)
        batches = iter(manager)
        manager.sampler.set_epoch(4)
        assert take(batches, 1) == epoch_batches(4)[:1]
        with pytest.raises(TypeError, match="epoch"):
            manager.sampler.set_epoch("4")


@every_kind
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_exception_begins_an_epoch(kind, on_error):
    """A first batch that raises, or is skipped, is not retried forever."""
    worker = partial(Raising, partial(OSError, "unreadable"), 0)
    manager = kind.make(worker, 4, batch_size=4, shuffle=False, on_error=on_error)
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


FILES = [
    "sequence.py", "order/place.py", "engine/pool.py", "engine/tickets/batches.py",
    "order/sampler.py",
]  # fmt: skip


@every_kind
def test_interrupted_set_epoch(kind):
    """After Ctrl-C in `set_epoch`, the iterator gives the one epoch or the other, or raises."""
    ends = set()
    for countdown in range(1, 200, 7 if kind.processes else 1):
        with kind.begin(make(kind)) as manager:
            batches = iter(manager)
            with interrupted(countdown, *FILES) as struck:
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
