"""Consecutive epochs: `repeat` gives what as many loops would, from any position."""

import itertools
import time

import numpy as np
import pytest

import cseq

POOLS = {
    "processes": (cseq.MPSequence, 2),
    "threads": (cseq.MTSequence, 2),
    "none": (cseq.MPSequence, 0),
}


def manager(pool="threads", n=23, **options):
    """Make a manager of a few samples."""
    kind, workers = POOLS[pool]
    usual = {"batch_size": 4, "seed": 1, "out_type": "null", "buffer": 3}
    return kind(np.arange(n), num_workers=workers, **{**usual, **options})


def epochs(number, **options):
    """Return the batches of the given number of epochs, taken one by one."""
    one = manager("none", **options)
    with one.start() as batches:
        return [batch.tolist() for _ in range(number) for batch in batches]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": "feistel"}], ids=str)
def test_it_is_as_many_epochs(pool, options):
    """One loop has all of them, and the next loop continues after them."""
    one = manager(pool, repeat=3, **options)
    with one.start() as batches:
        first = [(one.epoch, batch.tolist()) for batch in batches]
        second = [batch.tolist() for batch in batches]
    length = len(one)
    assert [batch for _, batch in first] + second == epochs(6, **options)
    assert [epoch for epoch, _ in first] == [k // length for k in range(3 * length)]


def test_without_end():
    """The loop may take any number; `break` abandons the current epoch."""
    one = manager(repeat=True)
    whole = epochs(6)
    with one.start() as batches:
        assert [batch.tolist() for batch in itertools.islice(batches, 20)] == whole[:20]
        assert one.epoch == 3
        assert next(iter(batches)).tolist() == whole[4 * len(one)]


def test_a_resume_after_every_batch():
    """The resume has the same batches or others, in any epoch of a loop."""
    one = manager(repeat=3)
    whole = [sample for batch in epochs(3) for sample in batch]
    with one.start() as batches:
        states = [one.state_dict() for _ in batches]
    assert [(state["epoch"], state["consumed"]) for state in states[:7]] == [
        *((0, k) for k in (4, 8, 12, 16, 20)), (1, 0), (1, 4),
    ]  # fmt: skip
    for state in states:
        for size in (4, 7):
            other = manager("none", batch_size=size, repeat=3)
            other.load_state_dict(state)
            with other.start() as batches:
                rest = [sample for batch in batches for sample in batch.tolist()]
            left = (3 - state["epoch"]) * 23 - state["consumed"]
            assert rest[:left] == whole[len(whole) - left :]


def test_a_resume_of_ranks_that_have_lanes():
    """Each rank has its part of a global batch in the epochs after the resumed one, too."""
    order = cseq.Blocks(2, window=8, lanes=4)
    options = {"n": 80, "order": order, "repeat": 2}
    for rank in range(2):
        one = manager("none", shard=(rank, 2), **options)
        with one.start() as batches:
            whole = [(batch.tolist(), one.state_dict()) for batch in batches]
        other = manager("none", shard=(rank, 2), **options)
        other.load_state_dict(whole[2][1])
        with other.start() as batches:
            rest = [batch.tolist() for batch in batches]
        assert rest[: len(whole) - 3] == [batch for batch, _ in whole[3:]]


def test_ranks_keep_step():
    """Each rank has its part of every global batch, in every epoch."""
    parts = []
    for rank in range(3):
        one = manager(shard=(rank, 3), batch_size=2, repeat=2)
        with one.start() as batches:
            parts.append([batch.tolist() for batch in batches])
    together = [[*itertools.chain(*batches)] for batches in zip(*parts, strict=True)]
    alone = epochs(2, batch_size=6)
    assert [batch[: len(one)] for batch, one in zip(together, alone, strict=True)] == alone


def test_the_next_epoch_is_made_ahead():
    """Its first batches are ready before the last batch of the previous epoch is taken."""
    one = manager(n=8, repeat=2)
    with one.start() as batches:
        iterator = iter(batches)
        next(iterator)
        deadline = time.monotonic() + 60
        while one.stats().depths != (0, 0, 3):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert one.epoch == 0
        assert [batch.tolist() for batch in iterator] == epochs(2, n=8)[1:]


def test_an_epoch_without_batches():
    """`repeat` has nothing to repeat."""
    one = manager(n=3, drop_last=True, repeat=True)
    with one.start() as batches:
        assert list(batches) == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"repeat": 0}, ValueError, "repeat=0"),
        ({"repeat": False}, TypeError, "repeat=False"),
        ({"repeat": 1.5}, TypeError, "repeat=1.5"),
        ({"repeat": 2, "ordered": False}, ValueError, "repeat=2 cannot .* ordered=False"),
        ({"repeat": True, "pad": False}, ValueError, "repeat=True cannot .* pad=False"),
    ],
)
def test_what_is_refused(options, error, text):
    """The error has the argument, its value and the remedy."""
    with pytest.raises(error, match=text):
        manager(**options)
