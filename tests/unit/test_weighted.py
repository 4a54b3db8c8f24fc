"""`Weighted`: golden, as often as weights say, in any order of reads, and bad weights."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import check
from reference_draws import WEIGHT, integers, weighted

import cseq
from cseq.order.weighted import Guide, integers_of, spread

HERE = Path(__file__).parents[1]
FILE = json.loads((HERE / "golden" / "orders_weighted.json").read_text(encoding="ascii"))

finite = st.floats(0, allow_infinity=False, allow_nan=False)
lists = st.lists(st.one_of(finite, st.floats(0, 10)), min_size=1, max_size=60).filter(any)


def weights_of(kind: str, n: int) -> list[float]:
    """Make the weights of a golden record."""
    return [WEIGHT[kind](i + (kind != "equal")) for i in range(n)]


def drawn(order: cseq.Order, seed: int, epoch: int = 0) -> np.ndarray[Any, Any]:
    """Read an epoch."""
    return order.reader(seed).samples(epoch, 0, order.units)[0]


@pytest.mark.parametrize("record", FILE["orders"])
def test_golden(record: dict[str, Any]) -> None:
    """An order is the same for ever: its first draws in clear, and the hash of them all."""
    options = {"size": record["size"], "replacement": record["replacement"]}
    order = cseq.Weighted(weights_of(*record["weights"]), **options)
    samples = drawn(order, record["seed"], record["epoch"])
    digest = hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest()
    assert (samples[:10].tolist(), samples[-1]) == (record["first"], record["last"])
    assert digest == record["sha256"]


@given(lists, st.integers(1, 200), st.integers(0, 2**64 - 1), st.booleans())
def test_reference(weights: list[float], size: int, seed: int, replacement: bool) -> None:
    """The draws are those of the reference, for any weights."""
    order = cseq.Weighted(weights, size, replacement=replacement)
    expected = weighted(weights, size, seed, 3, replacement=replacement)
    assert drawn(order, seed, 3).tolist() == expected


@given(lists)
def test_integers(weights: list[float]) -> None:
    """Weights become the largest integers with a total below 2**62, and 0 alone becomes 0."""
    sums = integers_of(np.array(weights))
    assert np.diff(sums, prepend=np.uint64(0)).tolist() == integers(weights)
    assert int(sums[-1]) < 2**62


@pytest.mark.parametrize(
    "weights",
    [[1e300, 1.0, 0.0], [5e-324], [5e-324, 1e-310], [1.7e308] * 9, [2.0**-1000, 2.0**1000], [3, 0]],
)
def test_extreme_weights(weights: list[float]) -> None:
    """Denormal weights and those whose sum is infinite in float64 are exact, too."""
    sums = integers_of(np.array(weights, float))
    assert np.diff(sums, prepend=np.uint64(0)).tolist() == integers([float(w) for w in weights])


@settings(max_examples=200)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=100).filter(any),
    st.integers(1, 3000),
    st.integers(0, 2**64 - 1),
)
def test_numbers_are_exact(weights: list[float], size: int, seed: int) -> None:
    """A sample comes as often as its share says, rounded up or down."""
    counts = np.bincount(drawn(cseq.Weighted(weights, size), seed), minlength=len(weights))
    whole = integers(weights)
    for count, weight in zip(counts.tolist(), whole, strict=True):
        share, rest = divmod(size * weight, sum(whole))
        assert count in (share, share + bool(rest))


def test_numbers_of_many_weights() -> None:
    """The same for 10 000 lists of weights of all magnitudes."""
    rng = np.random.default_rng(0)
    for seed in range(10_000):
        n, size = rng.integers(1, 9), int(rng.integers(1, 60))
        weights = np.exp(rng.normal(0, rng.choice([0.1, 3, 100]), n)) * (rng.random(n) < 0.8)
        if not weights.any():
            continue
        counts = np.bincount(drawn(cseq.Weighted(weights, size), seed), minlength=n).tolist()
        sums = [0, *integers_of(weights).tolist()]
        for k, count in enumerate(counts):
            share, rest = divmod(size * (sums[k + 1] - sums[k]), sums[-1])
            assert count in (share, share + bool(rest))


@pytest.mark.parametrize("n", [1, 7, 1000, 70_000])
def test_equal_weights_shuffle(n: int) -> None:
    """With equal weights, each sample comes once."""
    samples = drawn(cseq.Weighted(np.full(n, 0.3)), 5)
    assert sorted(samples.tolist()) == list(range(n))
    assert n == 1 or samples.tolist() != list(range(n))


def test_places_are_random() -> None:
    """The draws of a sample are spread over the epoch, and epochs do not depend on each other."""
    order, epochs = cseq.Weighted([1, 2, 3, 2], 8), 4000
    reader = order.reader(11)
    epochs_of = np.array([reader.samples(epoch, 0, 8)[0] for epoch in range(epochs)])
    for sample, weight in enumerate([1, 2, 3, 2]):
        there = (epochs_of == sample).sum(0)
        expected = epochs * weight / 8
        z = (there - expected) / math.sqrt(expected * (1 - weight / 8))
        assert (abs(z) < 4).all()
    last, first = epochs_of[:-1, -1], epochs_of[1:, 0]
    together = np.histogram2d(last, first, bins=4)[0]
    share = np.outer(np.bincount(last), np.bincount(first)) / (epochs - 1)
    chi = ((together - share) ** 2 / share).sum()
    assert abs(chi - 9) / math.sqrt(18) < 4


def test_replacement_is_fair() -> None:
    """Independent draws have the numbers that chance gives them."""
    weights = np.random.default_rng(0).pareto(2, 2000) + 0.1
    size = 50_000
    counts = np.bincount(drawn(cseq.Weighted(weights, size, replacement=True), 3), minlength=2000)
    expected = size * weights / weights.sum()
    often = expected > 5
    chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi - often.sum()) / math.sqrt(2 * often.sum()) < 4
    series = drawn(cseq.Weighted([1, 1], size, replacement=True), 3) * 2 - 1
    assert abs((series[1:] * series[:-1]).sum()) / math.sqrt(size) < 4


def test_more_than_torch_takes() -> None:
    """More than 2**24 samples; those that have no weight never come."""
    weights = np.zeros(2**24 + 5, np.float32)
    weights[[0, 2**23, 2**24 + 4]] = 1, 2, 1
    samples = drawn(cseq.Weighted(weights, 400), 1)
    assert dict(zip(*np.unique(samples, return_counts=True), strict=True)) == {
        0: 100,
        2**23: 200,
        2**24 + 4: 100,
    }


@pytest.mark.parametrize("replacement", [False, True])
def test_ranks_and_resumes(replacement: bool) -> None:
    """Any ranks have one stream, which goes on at any place."""
    check(cseq.Weighted([1, 5, 0, 2, 2, 9], 50, replacement=replacement))


def test_balanced() -> None:
    """Every class comes equally often."""
    labels = np.array(["cat"] * 90 + ["dog"] * 10)
    for given_labels in (labels, labels == "cat", (labels == "cat").astype(int)):
        samples = drawn(cseq.Weighted.balanced(given_labels), 1)
        assert (samples >= 90).sum() == 50
        assert (np.bincount(samples)[90:] == 5).all()
    order = cseq.Weighted.balanced([3, 3, 4], 10, replacement=True)
    assert order.facts()["replacement"] is True
    assert order.units == 10


def test_the_weights_are_not_written_to(tmp_path: Path) -> None:
    """A memory map for reading, and one that is not contiguous, are taken as they are."""
    np.arange(1.0, 9).tofile(tmp_path / "weights")
    weights = np.memmap(tmp_path / "weights", np.float64, "r")
    for given_weights, same in ((weights, range(1, 9)), (weights[::2], [1, 3, 5, 7])):
        expected = drawn(cseq.Weighted([*same]), 1).tolist()
        assert drawn(cseq.Weighted(given_weights), 1).tolist() == expected


def test_numbers_of_great_sizes() -> None:
    """Places times the total have up to 110 bits."""
    rng = random.Random(2)
    for _ in range(2000):
        size, total = rng.randint(1, 2 ** rng.randint(1, 48)), rng.randint(1, 2**62 - 1)
        offset, places = rng.randrange(total), [0, size - 1, rng.randrange(size)]
        numbers = spread(np.array(places, np.uint64), total, offset, size)
        assert numbers.tolist() == [(place * total + offset) // size for place in places]


def test_many_samples_between_two_numbers() -> None:
    """Tiny weights beside great ones: a sample is found wherever it is."""
    weights = np.random.default_rng(0).permutation([1.0] * 50 + [1e-12] * 5000)
    sums = integers_of(weights)
    numbers = np.concatenate([sums[:-1] - np.uint64(1), sums[:-1], sums[:-1] + np.uint64(1)])
    expected = np.searchsorted(sums, numbers, "right")
    assert (Guide(sums).first_above(numbers) == expected).all()


def test_facts() -> None:
    """A state knows the weights by their fingerprint, whatever their type."""
    facts = cseq.Weighted([1, 2]).facts()
    assert facts == cseq.Weighted(np.array([1, 2], np.float32)).facts()
    assert facts != cseq.Weighted([2, 1]).facts()
    assert "2 samples" in cseq.Weighted([1, 2]).describe()
    with pytest.raises(ValueError, match="weights="):
        cseq.Weighted([2, 1]).resumed(facts, 0, 0, 0)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, -2], r"weights has -2.0 for sample 1; give finite"),
        ([math.nan, 1], r"weights has nan for sample 0"),
        ([1, math.inf], r"weights has inf for sample 1"),
        ([0, 0.0], r"all of the 2 weights are 0; give one above 0"),
        ([], r"weights is empty; give a value for each"),
        ([[1]], r"weights has shape \(1, 1\); give one dimension"),
        (["1"], r"weights has dtype <U1; give real"),
        ([[1], [1, 2]], r"weights is not an array:"),
    ],
)
def test_bad_weights(weights: Any, says: str) -> None:
    """Weights of which no draws can be made are refused."""
    with pytest.raises((TypeError, ValueError), match=says):
        cseq.Weighted(weights)


def test_other_bad_arguments() -> None:
    """The message names the argument and its value."""
    with pytest.raises(ValueError, match="size=0"):
        cseq.Weighted([1], 0)
    with pytest.raises(TypeError, match="replacement=1"):
        cseq.Weighted([1], replacement=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="labels has values of type float64"):
        cseq.Weighted.balanced([0.5])
    with pytest.raises(ValueError, match="labels is empty"):
        cseq.Weighted.balanced([])
