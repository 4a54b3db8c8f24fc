"""`Buckets`: within the budget, alike within a step, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cseq


def spread(n: int, longest: int = 2048) -> np.ndarray[Any, Any]:
    """Return lengths as those of sentences."""
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, n)
    return np.clip(drawn, 16, longest).astype(np.int64)


def epoch(order: cseq.Order, number: int = 0) -> list[np.ndarray[Any, Any]]:
    """Return the batches of an epoch."""
    samples, sizes = order.reader(7).samples(number, 0, order.units)
    return np.split(samples, np.cumsum(sizes)[:-1])


# ── what an epoch has ─────────────────────────────────────────────────────────────────────────


def test_bounds_grow_by_the_ratio() -> None:
    """From the least length to the greatest."""
    order = cseq.Buckets([100, 4, 9, 31], 100, ratio=1.5)
    assert order.bounds.tolist() == [4, 6, 9, 13, 19, 28, 42, 63, 94, 100]
    assert cseq.Buckets([3, 1, 5], 9, ratio=1).bounds.tolist() == [1, 2, 3, 4, 5]
    assert cseq.Buckets([3, 1, 5], 9, ratio=1e300).bounds.tolist() == [1, 5]


def test_boundaries_are_the_buckets() -> None:
    """Given bounds are taken, as far as they are needed; the longest have one in any case."""
    lengths = [5, 10, 11, 20, 35]
    assert cseq.Buckets(lengths, 60, boundaries=[10, 20, 30]).bounds.tolist() == [10, 20, 30, 35]
    order = cseq.Buckets(lengths, 60, boundaries=[10, 40, 50, 900])
    assert order.bounds.tolist() == [10, 40]
    assert {tuple(sorted(batch)) for batch in epoch(order)} >= {(0, 1)}
    assert {len(batch) for batch in epoch(order)} == {1, 2}


# ── what it is told ───────────────────────────────────────────────────────────────────────────


def test_it_says_what_an_epoch_has() -> None:
    """Buckets, batches, the most padding, the smallest and the largest batch."""
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
def test_samples_that_are_too_long_can_be_left_out(kind: Any) -> None:
    """They are in no batch; how many there are, and their tokens, are said, and a warning."""
    lengths = spread(100_000)
    kept = lengths <= 500
    with pytest.warns(UserWarning, match=r"too_long='drop' leaves out .* budget=500; cut") as told:
        order = kind(lengths, 500, too_long="drop")
    (warning,) = told
    assert warning.filename == __file__
    assert sorted(np.concatenate(epoch(order))) == np.flatnonzero(kept).tolist()
    assert order.samples == 100_000
    said = (
        f"{100_000 - kept.sum():,} of 100,000 samples, with "
        f"{100 * lengths[~kept].sum() / lengths.sum():.4g} % of all tokens"
    )
    assert said in str(warning.message)
    manager = cseq.MTSequence(np.arange(100_000), order=order, out_type="null")
    assert all(f"; left out as too long: {said}" in repr(each) for each in (order, manager))


@pytest.mark.parametrize("kind", [cseq.Buckets, cseq.Packed])
def test_a_warning_is_for_more_than_a_little(kind: Any) -> None:
    """Up to 1 % of the samples, and of the tokens, are only said; none are not."""
    few = kind(np.repeat([20, 50], [9_997, 3]), 20, too_long="drop")
    assert "3 of 10,000 samples, with 0.07497 % of all tokens" in few.describe()
    assert "left out" not in kind(np.repeat([20, 50], [9_997, 3]), 50, too_long="drop").describe()
    for lengths in (np.repeat([20, 20_000], [9_997, 3]), np.repeat([20, 21], [98, 2])):
        with pytest.warns(UserWarning, match="leaves out"):
            kind(lengths, 20, too_long="drop")


@pytest.mark.filterwarnings("ignore:too_long='drop' leaves out")
def test_huge_lengths() -> None:
    """They are told apart beyond the integers of a double, in any type; so is what is too long."""
    lengths = np.array([2**61, 2**61 + 1, 5, 2**62 - 1, 2**62 + 7], np.uint64)
    for values in (lengths, lengths.astype(np.int64)):
        order = cseq.Buckets(values, 2**62, boundaries=[5, 2**61], most=10**30, too_long="drop")
        assert sorted(map(sorted, epoch(order))) == [[0], [1], [2], [3]]
        order = cseq.Buckets(values, 2**62, ratio=2, too_long="drop")
        assert sorted(np.concatenate(epoch(order))) == [0, 1, 2, 3]
    assert cseq.Buckets(np.array([5, 2**64 - 1], np.uint64), 9, too_long="drop").units == 1


# ── what is refused ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lengths", "error", "said"),
    [
        ([], ValueError, "lengths is empty"),
        (5, ValueError, r"lengths has shape \(\)"),
        ([[3, 4]], ValueError, r"lengths has shape \(1, 2\)"),
        ([[3], [4, 5]], TypeError, "lengths is not an array"),
        ([3, -4, 5], ValueError, r"lengths\[1\]=-4 is below 1"),
        ([3] * 70_000 + [0], ValueError, r"lengths\[70000\]=0 is below 1"),
        ([3.0, float("nan")], TypeError, "lengths has values of type float64"),
        ([True], TypeError, "lengths has values of type bool"),
        (["3"], TypeError, "lengths has values of type <U1"),
        ([None], TypeError, "lengths has values of type object"),
        ([3] * 70_000 + [101], ValueError, r"lengths\[70000\]=101 exceeds budget=100"),
        (np.array([2**64 - 1], np.uint64), ValueError, "exceeds budget=100"),
    ],
)
@pytest.mark.parametrize("kind", [cseq.Buckets, cseq.Packed])
def test_bad_lengths(kind: Any, lengths: Any, error: type[Exception], said: str) -> None:
    """Argument, value and remedy."""
    with pytest.raises(error, match=said) as raised:
        kind(lengths, 100)
    assert "give" in str(raised.value) or "not an array" in said


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": 0}, ValueError, "budget=0"),
        ({"budget": 2**70}, ValueError, "budget=1180591620717411303424 is above"),
        ({"together": 2**70}, ValueError, "together=1180591620717411303424 is above"),
        ({"budget": 1.5}, TypeError, "budget=1.5"),
        ({"ratio": 0.9}, ValueError, "ratio=0.9"),
        ({"ratio": float("nan")}, ValueError, "ratio=nan"),
        ({"ratio": "1"}, ValueError, "ratio='1'"),
        ({"boundaries": [3, 3]}, ValueError, r"boundaries\[1\]=3 is below 4"),
        ({"boundaries": [0]}, ValueError, r"boundaries\[0\]=0"),
        ({"boundaries": [2.5]}, TypeError, r"boundaries\[0\]=2.5"),
        ({"boundaries": [200]}, ValueError, "boundaries has 200.* above budget=100"),
        ({"most": 0}, ValueError, "most=0"),
        ({"together": 0}, ValueError, "together=0"),
        ({"together": True}, TypeError, "together=True"),
        ({"too_long": "cut"}, ValueError, "too_long='cut'"),
        ({"longest_first": 1}, TypeError, "longest_first=1"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """Argument and value."""
    with pytest.raises(error, match=said):
        cseq.Buckets(**{"lengths": [3, 7, 8], "budget": 100, **options})


def test_all_too_long() -> None:
    """An order of nothing is none."""
    with pytest.raises(ValueError, match="all 3 lengths exceed budget=2"):
        cseq.Buckets([3, 4, 5], 2, too_long="drop")


@pytest.mark.parametrize(
    ("labels", "sizes", "error", "said"),
    [
        ([], 3, ValueError, "labels is empty"),
        ([0.5], 3, TypeError, "labels has values of type float64"),
        ([0, 1], {0: 3}, ValueError, "sizes has no 1"),
        ([0, 1], {0: 3, 1: 0}, ValueError, r"sizes\[1\]=0"),
        (["a"], {"a": 1.5}, TypeError, r"sizes\['a'\]=1.5"),
        ([0, 1], 0, ValueError, "sizes=0"),
        ([0, 1], 2**70, ValueError, "sizes=1180591620717411303424 is above"),
        ([0, 1], [3, 4], TypeError, r"sizes=\[3, 4\]"),
    ],
)
def test_bad_labels(labels: Any, sizes: Any, error: type[Exception], said: str) -> None:
    """Argument and value."""
    with pytest.raises(error, match=said):
        cseq.Buckets.of(labels, sizes)
