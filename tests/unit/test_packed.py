"""`Packed`: rows within the budget, nearly full, and random otherwise."""

import numpy as np
import pytest
from fair import LENGTHS
from ranked import units

import cseq


def test_a_rounded_length_may_exceed_the_budget():
    """A sample that is no longer than the budget has a row."""
    order = cseq.Packed([100, 99, 97, 1], 100, quantum=8)
    assert sorted(units(order, 7, 0)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("name", LENGTHS)
def test_samples_of_equal_length_stand_in_for_each_other(name):
    """Samples of one or two lengths meet in a row as often as any others of these lengths."""
    lengths = LENGTHS[name]
    order, pairs = cseq.Packed(lengths, 64), np.zeros((len(lengths), len(lengths)))
    for number in range(600):
        for row in units(order, 7, number):
            pairs[np.ix_(row, row)] += 1
    pairs[np.diag_indices_from(pairs)] = 0
    for one in np.unique(lengths):
        for other in np.unique(lengths):
            block = pairs[np.ix_(lengths == one, lengths == other)]
            choices = block.size - len(block) * (one == other)
            share = block.sum() / max(1, choices) / 600
            if 0 < share < 1:
                off = np.abs(block / 600 - share)[block > 0].max()
                assert off < 5 * np.sqrt(share * (1 - share) / 600)
                assert (block > 0).sum() == choices


def test_lengths_that_are_rounded_mix_more():
    """Samples of a unique length have the same row in every epoch, unless lengths are rounded."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 201))
    for quantum, most in ((1, 1.0), (20, 0.1)):
        order = cseq.Packed(lengths, 400, quantum=quantum)
        epochs = [{tuple(sorted(row)) for row in units(order, 7, number)} for number in range(2)]
        again = len(epochs[0] & epochs[1]) / len(epochs[0])
        assert again == most if quantum == 1 else again < most
