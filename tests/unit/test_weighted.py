"""`Weighted`: golden, as often as weights say, in any order of reads, and bad weights."""

from __future__ import annotations

import hashlib
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cseq
from cseq.order.weighted import integers_of, spread

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parents[1]
FILE = json.loads((HERE / "golden" / "orders_weighted.json").read_text(encoding="ascii"))

finite = st.floats(0, allow_infinity=False, allow_nan=False)
lists = st.lists(st.one_of(finite, st.floats(0, 10)), min_size=1, max_size=60).filter(any)
WEIGHT: dict[str, Callable[[int], float]] = {  # of a sample, in golden records
    "equal": lambda i: 0.1,
    "falling": lambda i: 1 / (i + 2),
    "some": lambda i: (i + 1) % 7 / 3,
    "steep": lambda i: (1e300, 0.0, 1.0, 5e-324)[(i + 1) % 4],
    "tiny": lambda i: 5e-324 * ((i + 1) % 3),
}


def integers(weights: list[float]) -> list[int]:
    """Compute the integers of weights as the page of the orders says."""
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max(below for _, below in ratios)  # all are multiples of 1 / unit, a power of two
    exact = [above * (unit // below) for above, below in ratios]
    k = 63 - sum(exact).bit_length()
    while True:  # down to the largest k with a total below 2**62
        whole = [max(round(weight * Fraction(2) ** k), weight > 0) for weight in exact]
        if sum(whole) < 2**62:
            return whole
        k -= 1


def drawn(order: cseq.Order, seed: int, epoch: int = 0) -> np.ndarray[Any, Any]:
    """Read an epoch."""
    return order.reader(seed).samples(epoch, 0, order.units)[0]


@pytest.mark.parametrize("record", FILE["orders"])
def test_golden(record: dict[str, Any]) -> None:
    """An order is the same for ever: its first draws in clear, and the hash of them all."""
    options = {"size": record["size"], "replacement": record["replacement"]}
    weights = record["weights"]
    if isinstance(weights[0], str):
        weights = [WEIGHT[weights[0]](i) for i in range(weights[1])]
    order = cseq.Weighted(weights, **options)
    samples = drawn(order, record["seed"], record["epoch"])
    digest = hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest()
    assert (samples[:10].tolist(), samples[-1]) == (record["first"], record["last"])
    assert digest == record["sha256"]


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
        ([], r"weights is empty; give at least one value"),
        ([[1]], r"weights has shape \(1, 1\); give a list of one value"),
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
