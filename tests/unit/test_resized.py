"""`Resized`: the epochs of another order, in sequence, in pieces of any size."""

from itertools import chain

import numpy as np
import pytest
from fair import epochs, labels_of, scores, worst
from ranked import Rows, units

import cseq

ORDERS = {
    "shuffled": cseq.Shuffled(10), "weighted": cseq.Weighted([1, 2, 3], 7), "rows": Rows(20),
    "resized": cseq.Resized(cseq.Shuffled(10), 7),
    "mixture": cseq.Mixture({"a": cseq.Shuffled(9)}, {"a": 1}, block=4),
    "blocks": cseq.Blocks(3, 2, samples=10),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 10, 23])
@pytest.mark.parametrize("name", ORDERS)
def test_goes_through_the_epochs(name, size):
    """Epochs of any size are, in sequence, the order's own."""
    order = ORDERS[name]
    expected = list(chain.from_iterable(units(order, 5, epoch) for epoch in range(24)))
    resized = cseq.Resized(order, size)
    got = chain.from_iterable(units(resized, 5, epoch) for epoch in range(4))
    assert list(got) == expected[: 4 * size]
    assert (resized.units, resized.room) == (size, order.room)


@pytest.mark.parametrize("size", [700, 1024, 4000, 5003])
def test_a_part_of_the_data_is_a_fair_one(size):
    """An epoch has random classes of periodic or sorted data; samples come in turn."""
    often = np.zeros(5000, int)
    order = cseq.Resized(cseq.Shuffled(5000), size)
    for epoch in epochs(order, 30, 1):
        often += np.bincount(epoch, minlength=5000)
        assert often.max() - often.min() <= 1
    labels, rows = labels_of(5000), []
    for seed in range(40):
        part = order.reader(seed).samples(seed % 9, size // 2, 300)[0]
        rows.append(np.concatenate([scores(label, np.unique(part)) for label in labels]))
    assert worst(rows) < 5


def test_of_the_data():
    """An order without samples has the data's."""
    resized = cseq.Resized(cseq.Shuffled(), 4)
    assert (resized.units, resized.samples) == (0, None)
    assert (resized.over(9).units, resized.over(9).samples) == (4, 9)
    assert cseq.Resized(cseq.Shuffled(9), 4).over(9).samples == 9
    assert len(set(chain.from_iterable(resized.over(9).batches(2, seed=1)))) == 4


def test_states():
    """A state of another size, or of another order, is refused, with both values."""
    order = cseq.Resized(cseq.Shuffled(9), 4)
    assert order.resumed(order.facts(), 1, 3, 2) is order
    with pytest.raises(ValueError, match="units=4, but the current order has units=5"):
        cseq.Resized(cseq.Shuffled(9), 5).resumed(order.facts(), 1, 0, 0)
    with pytest.raises(ValueError, match="samples=9, but the current order has samples=8"):
        cseq.Resized(cseq.Shuffled(8), 4).resumed(order.facts(), 1, 0, 0)


def test_a_mixture_inside_goes_on_with_other_weights():
    """The inner mixture resumes where it was."""
    sources = {"a": cseq.Shuffled(90), "b": cseq.Shuffled(80)}

    def resized(weights):
        return cseq.Resized(cseq.Mixture(sources, weights, block=8, epoch_size=40), 30)

    before, after = resized({"a": 1, "b": 1}), resized({"a": 3, "b": 1})
    again = after.resumed(before.facts(), 1, 1, 15)
    had = units(before, 1, 0) + units(before, 1, 1)[:15]
    went_on = units(again, 1, 1)[15:] + units(again, 1, 2)
    assert sum(sample < 90 for (sample,) in went_on[:40]) == 30
    drawn = [sample for (sample,) in had + went_on if sample < 90]
    assert len(set(drawn)) == len(drawn)
    third = after.resumed(again.facts(), 1, 2, 3)
    assert units(third, 1, 2) == units(again, 1, 2)


def test_ranks_without_a_seed():
    """They need one if the inner order does."""

    def rank(order):
        worker = lambda: range(10)  # noqa: E731 - never made
        return cseq.MTSequence(worker, 10, order=cseq.Resized(order, 4), shard=(1, 2))

    assert rank(cseq.Sequential(10)).epoch == 0
    assert rank(cseq.Resized(cseq.Sequential(10), 3)).epoch == 0
    with pytest.raises(ValueError, match="needs a seed"):
        rank(cseq.Shuffled(10))
