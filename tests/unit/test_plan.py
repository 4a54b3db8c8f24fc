"""`Plan`: the shards that an order uses next."""

import numpy as np
import pytest

import cseq
from cseq.store.plan import Plan


def shards_of(sizes, window, seed, epoch, start, stop):
    """Return the shards of samples [start, stop) of an epoch, from the order itself."""
    order = cseq.Blocks(sizes, window)
    [samples] = order.batches(order.units, seed=seed, epoch=epoch)
    return np.cumsum(sizes).searchsorted(samples[start:stop], "right")


def plan_at(sizes, window, seed, epoch=0, unit=0):
    """Make the plan of a reader at a sample of an epoch."""
    return Plan(
        sizes, window, seed, epoch, int(shards_of(sizes, window, seed, epoch, unit, None)[0])
    )


@pytest.mark.parametrize("window", [1, 3, 4, 20])
@pytest.mark.parametrize(("seed", "least"), [(0, 1), (5, 1), (6, 0)])
def test_it_follows_the_order(window, seed, least):
    """For each batch, the plan's window has the batch's shards, and the next ones come next."""
    sizes = np.random.default_rng(seed).integers(least, 9, 17)
    total = int(sizes.sum())
    plan = plan_at(sizes, window, seed)
    for epoch in range(3):
        ahead = shards_of(sizes, window, seed, epoch, 0, total)
        for start in range(0, total, 2):
            used = {*ahead[start : start + 2].tolist()}
            plan.advance([*used], 0)
            left = [*dict.fromkeys(ahead[start:].tolist())]
            assert used <= {*plan.coming(0)}
            assert not least or {*left[: plan.window]} <= {*plan.coming(0)}
        assert plan.count == 1 or plan.front // plan.count == epoch


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batch", [1, 5, 40, 90])
@pytest.mark.parametrize(("shards", "window"), [(16, 2), (24, 4), (36, 3)])
def test_slow_readers_do_not_move_it(shards, window, batch, seed):
    """Among readers that are up to two windows apart, the plan is that of the first, or near it."""
    rng, sizes, plan = np.random.default_rng(seed), np.full(shards, 10), None
    batches = []
    for epoch in range(4):
        order = shards_of(sizes, window, seed, epoch, None, None)
        plan = plan or plan_at(sizes, window, seed)
        for start in range(0, len(order), batch):
            turn = epoch * plan.count + start // (10 * window)
            batches.append((turn, np.unique(order[start : start + batch]).tolist()))
    coming = iter(batches)
    reading, first = [next(coming) for _ in range(4)], 0
    while None not in reading:
        latest = min(turn for turn, _ in reading) + 2
        reader = int(rng.choice([k for k, (turn, _) in enumerate(reading) if turn <= latest]))
        turn, used = reading[reader]
        first = max(first, turn)
        plan.advance(used, reader)
        assert first - (1 if batch < 10 else 4) <= plan.front <= first
        reading[reader] = next(coming, None)


def test_shards_come_in_the_order_of_their_windows():
    """`coming` has the current window, then the next one, and any requested number after that."""
    sizes = np.full(30, 5)
    plan = plan_at(sizes, 3, 1)
    expected = [*dict.fromkeys(shards_of(sizes, 3, 1, 0, 0, 150).tolist())]
    assert {*plan.coming(0)[:3]} == {*expected[:3]}
    assert {*plan.coming(0)} == {*expected[:6]}
    assert {*plan.coming(3)} == {*expected[:9]}
    # This is too far ahead to be true.
    plan.advance(expected[18:20], 0)
    assert plan.front == 0
    plan.advance(expected[3:5], 0)
    assert {*plan.coming(0)} == {*expected[3:9]}


def test_a_batch_of_another_order_moves_nothing():
    """Shards of many windows at once belong to another order."""
    plan = plan_at(np.full(40, 5), 2, 1)
    plan.advance([*range(0, 40, 7)], 0)
    plan.advance([plan.coming(0)[0], int(np.argmax(plan.uses()))], 0)
    assert plan.front == 0


def test_a_place_is_near_or_far():
    """A trainer that reads some windows ahead has the same plan; another seed or epoch does not."""
    plan = plan_at(np.full(12, 5), 3, 1, 4, 31)
    shard = plan.coming(0)[0]
    assert plan.has(3, 1, 4, shard)
    assert not plan.has(3, 2, 4, shard)
    assert not plan.has(3, 1, 9, shard)
