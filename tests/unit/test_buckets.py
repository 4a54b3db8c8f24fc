"""`Buckets`: the budget, similar lengths in a step, chance elsewhere, and refused arguments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_draws import batches

import cseq


def spread(n, longest=2048):
    """Return lengths like sentences'."""
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, n)
    return np.clip(drawn, 16, longest).astype(np.int64)


def epoch(order, number=0):
    """Return the batches of an epoch."""
    samples, sizes = order.reader(7).samples(number, 0, order.units)
    return np.split(samples, np.cumsum(sizes)[:-1])


def test_bounds_are_given_or_grow_by_the_ratio():
    """They go from the least length to the greatest; some given ones are not used."""
    order = cseq.Buckets([100, 4, 9, 31], 100, ratio=1.5)
    assert order.bounds.tolist() == [4, 6, 9, 13, 19, 28, 42, 63, 94, 100]
    assert cseq.Buckets([3, 1, 5], 9, ratio=1).bounds.tolist() == [1, 2, 3, 4, 5]
    assert cseq.Buckets([3, 1, 5], 9, ratio=1e300).bounds.tolist() == [1, 5]
    lengths = [5, 10, 11, 20, 35]
    assert cseq.Buckets(lengths, 60, boundaries=[10, 20, 30]).bounds.tolist() == [10, 20, 30, 35]
    order = cseq.Buckets(lengths, 60, boundaries=[10, 40, 50, 900])
    assert order.bounds.tolist() == [10, 40]
    assert {tuple(sorted(batch)) for batch in epoch(order)} >= {(0, 1)}
    assert {len(batch) for batch in epoch(order)} == {1, 2}


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90), st.floats(1, 2),
    st.integers(1, 9), st.booleans(), st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_reference(lengths, budget, ratio, together, longest, seed):
    """An epoch equals the reference in plain Python."""
    order = cseq.Buckets(lengths, budget, ratio=ratio, together=together, longest_first=longest)
    bounds = order.bounds.tolist()
    of = np.searchsorted(bounds, lengths)
    classes = [np.flatnonzero(of == c).tolist() for c in range(len(bounds))]
    sizes = [budget // bound for bound in bounds]
    expected = batches(classes, sizes, together, seed, 3, longest_first=longest)
    assert order.batches(seed=seed, epoch=3) == expected


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(("n", "together"), [(300, 8), (301, 1), (310, 3), (60, 16)])
def test_batches_that_come_together_are_alike(n, together, longest_first):
    """They are neighbours by length, except for one group that supplies the last batches."""
    lengths = spread(n, 300)
    order = cseq.Buckets(lengths, 600, together=together, longest_first=longest_first)
    bounds = order.bounds[np.searchsorted(order.bounds, lengths)]
    for number in range(20):
        longest = np.array([bounds[batch].max() for batch in epoch(order, number)])
        groups = len(longest) // together * together
        assert not longest_first or max(longest[:together]) == max(bounds)
        steps = np.sort(longest[:groups].reshape(-1, together), axis=1)
        longest.sort()
        between = np.searchsorted(longest, steps[:, -1])
        between -= np.searchsorted(longest, steps[:, 0], "right")
        assert between.max() <= together + len(longest) % together - 2


@pytest.mark.parametrize("count", [40, 37, 46])
def test_any_samples_of_a_bucket_meet_as_often(count):
    """All pairs meet equally often in a batch, and so do all samples in the short batch."""
    order = cseq.Buckets(np.repeat([10, 30], count), 50, together=2)
    pairs, short = np.zeros((2 * count, 2 * count)), np.zeros(2 * count)
    for number in range(500):
        for batch in epoch(order, number):
            pairs[np.ix_(batch, batch)] += 1
            short[batch] += len(batch) == count % 5
    upper = np.triu_indices(count, 1)
    rest = count % 5
    share = (count // 5 * 10 + rest * (rest - 1) / 2) / len(upper[0])
    scores = (pairs[:count, :count][upper] / 500 - share) / np.sqrt(share * (1 - share) / 500)
    assert np.abs(scores).max() < 5
    assert abs(np.square(scores).mean() - 1) < 5 * np.sqrt(2 / len(scores))
    assert not pairs[:count, count:].any()
    if rest > 1:
        share = rest / count
        off = np.abs(short[:count] / 500 - share).max()
        assert off < 5 * np.sqrt(share * (1 - share) / 500)


def test_it_says_what_an_epoch_has():
    """It has buckets, batches, the maximum padding, and the smallest and largest batch."""
    lengths = spread(20_000)
    order = cseq.Buckets(lengths, 16384, most=512)
    batches = epoch(order)
    bounds = order.bounds[np.searchsorted(order.bounds, lengths)]
    assert order.describe() == (
        f"56 buckets, {len(batches)} batches, at most "
        f"{100 - 100 * lengths.sum() / bounds.sum():.3g} % padding, "
        f"{min(map(len, batches))}–{max(map(len, batches))} samples a batch"
    )
    assert lengths.sum() / bounds.sum() > 0.95


@pytest.mark.parametrize("kind", [cseq.Buckets, cseq.Packed])
def test_samples_that_are_too_long_can_be_left_out(kind):
    """They are in no batch; a warning has their number and their tokens."""
    lengths = spread(100_000)
    kept = lengths <= 500
    with pytest.warns(UserWarning, match=r"'drop' and budget=500, .*; truncate") as told:
        order = kind(lengths, 500, too_long="drop")
    (warning,) = told
    assert warning.filename == __file__
    assert sorted(np.concatenate(epoch(order))) == np.flatnonzero(kept).tolist()
    assert order.samples == 100_000
    share = 100 * lengths[~kept].sum() / lengths.sum()
    said = (
        f"{100_000 - kept.sum():,} of 100,000 samples ({share:.4g} % of all tokens) are left out "
        "because they are too long"
    )
    assert said in str(warning.message)
    mixed = cseq.Mixture({"a": cseq.Resized(order, 9), "b": kind([3, 2], 5)}, {"a": 1, "b": 1})
    manager = cseq.MTSequence(np.arange(100_000), order=order, out_type="null")
    assert all(f"; {said}" in repr(each) for each in (order, manager))
    assert repr(mixed).endswith(f"; in a, {said}>")


@pytest.mark.parametrize("kind", [cseq.Buckets, cseq.Packed])
def test_a_warning_is_for_more_than_a_little(kind):
    """Up to 1 % of the samples and tokens are only reported; none are not."""
    few = kind(np.repeat([20, 50], [9_997, 3]), 20, too_long="drop")
    assert "3 of 10,000 samples (0.07497 % of all tokens)" in few.describe()
    assert "left out" not in kind(np.repeat([20, 50], [9_997, 3]), 50, too_long="drop").describe()
    for lengths in (np.repeat([20, 20_000], [9_997, 3]), np.repeat([20, 21], [98, 2])):
        with pytest.warns(UserWarning, match="are left out"):
            kind(lengths, 20, too_long="drop")


@pytest.mark.filterwarnings("ignore:with too_long='drop'")
def test_huge_lengths():
    """They are exact beyond the integers of a double, in any type; so is what is too long."""
    lengths = np.array([2**61, 2**61 + 1, 5, 2**62 - 1, 2**62 + 7], np.uint64)
    for values in (lengths, lengths.astype(np.int64)):
        order = cseq.Buckets(values, 2**62, boundaries=[5, 2**61], most=10**30, too_long="drop")
        assert sorted(map(sorted, epoch(order))) == [[0], [1], [2], [3]]
        order = cseq.Buckets(values, 2**62, ratio=2, too_long="drop")
        assert sorted(np.concatenate(epoch(order))) == [0, 1, 2, 3]
    assert cseq.Buckets(np.array([5, 2**64 - 1], np.uint64), 9, too_long="drop").units == 1
