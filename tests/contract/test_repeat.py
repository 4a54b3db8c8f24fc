"""Consecutive epochs: `repeat` gives what as many loops would, from any position."""

import itertools

import numpy as np
import pytest
from kinds import FEW, INLINE, THREAD, by_name
from waiting import until

import cseq


def manager(kind=THREAD, n=23, **options):
    """Make a manager of a few samples."""
    return kind.make(np.arange(n), None, **{"batch_size": 4, "seed": 1, "buffer": 3, **options})


def epochs(number, **options):
    """Return the batches of the given number of epochs, taken one by one."""
    with manager(INLINE, **options).start_test() as batches:
        return [batch.tolist() for _ in range(number) for batch in batches]


@pytest.mark.parametrize("kind", FEW, ids=by_name)
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": "feistel"}], ids=str)
def test_it_is_as_many_epochs(kind, options):
    """One loop has all of them, and the next loop continues after them."""
    one = manager(kind, repeat=3, **options)
    with kind.begin(one) as batches:
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
            other = manager(INLINE, batch_size=size, repeat=3)
            other.load_state_dict(state)
            with other.start_test() as batches:
                rest = [sample for batch in batches for sample in batch.tolist()]
            left = (3 - state["epoch"]) * 23 - state["consumed"]
            assert rest[:left] == whole[len(whole) - left :]


def test_a_resume_of_ranks_that_have_lanes():
    """Each rank has its part of a global batch in the epochs after the resumed one, too."""
    order = cseq.Blocks(2, window=8, lanes=4)
    options = {"n": 80, "order": order, "repeat": 2}
    for rank in range(2):
        one = manager(INLINE, shard=(rank, 2), **options)
        with one.start_test() as batches:
            whole = [(batch.tolist(), one.state_dict()) for batch in batches]
        other = manager(INLINE, shard=(rank, 2), **options)
        other.load_state_dict(whole[2][1])
        with other.start_test() as batches:
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
        until(lambda: one.stats().depths == (0, 0, 3))
        assert one.epoch == 0
        assert [batch.tolist() for batch in iterator] == epochs(2, n=8)[1:]


def test_an_epoch_without_batches():
    """`repeat` has nothing to repeat."""
    one = manager(n=3, drop_last=True, repeat=True)
    with one.start() as batches:
        assert list(batches) == []
