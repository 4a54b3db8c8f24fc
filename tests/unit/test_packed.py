"""`Packed`: rows within the budget, and nearly full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cseq

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=200)


def spread(n: int) -> np.ndarray[Any, Any]:
    """Return lengths as those of documents."""
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, n)
    return np.clip(drawn, 16, 2048).astype(np.int64)


def rows(order: cseq.Order, number: int = 0) -> list[np.ndarray[Any, Any]]:
    """Return the rows of an epoch."""
    samples, sizes = order.reader(7).samples(number, 0, order.units)
    return np.split(samples, np.cumsum(sizes)[:-1])


@given(some_lengths, st.integers(300, 2000), st.integers(1, 50))
def test_each_sample_once_within_the_budget(lengths: list[int], budget: int, quantum: int) -> None:
    """Each sample comes once, and no row exceeds the budget; all epochs have as many rows."""
    order = cseq.Packed(lengths, budget, quantum=quantum)
    for number in range(2):
        found = rows(order, number)
        assert sorted(np.concatenate(found)) == list(range(len(lengths)))
        assert len(found) == order.units
        assert max(sum(lengths[sample] for sample in row) for row in found) <= budget


def test_rows_are_full() -> None:
    """Nearly as few rows as there are tokens for; a quantum leaves a little room."""
    lengths = spread(200_000)
    order = cseq.Packed(lengths, 2048)
    least = -(-lengths.sum() // 2048)
    assert order.units <= least + 5
    assert order.describe().startswith(f"{order.units:,} rows, 99.98 % of tokens used, 1–")
    assert cseq.Packed(lengths, 2048, quantum=8).units < least / 0.98
    assert cseq.Packed(lengths, 4096).units < least / 2 / 0.995


def test_lengths_go_together_and_samples_do_not() -> None:
    """The lengths of rows are the same in every epoch, the samples in them are others."""
    lengths = spread(3000) // 16
    order = cseq.Packed(lengths, 128)
    first, second = (rows(order, number) for number in (0, 1))
    alike = [sorted(tuple(lengths[row]) for row in found) for found in (first, second)]
    assert alike[0] == alike[1]
    same = {tuple(sorted(row)) for row in first} & {tuple(sorted(row)) for row in second}
    assert len(same) < len(first) / 4  # those with rare lengths


def test_a_rounded_length_may_exceed_the_budget() -> None:
    """What is no longer than the budget has a row of its own."""
    order = cseq.Packed([100, 99, 97, 1], 100, quantum=8)
    assert sorted(map(sorted, rows(order))) == [[0], [1], [2], [3]]


def test_equal_lengths_one_sample_and_many_lengths() -> None:
    """The ends: one class, one sample, a class for every sample."""
    assert {len(row) for row in rows(cseq.Packed([7] * 10, 25))} == {1, 3}
    assert rows(cseq.Packed([7], 7)) == [0]
    assert rows(cseq.Packed([7], 10**12, quantum=10**7)) == [0]
    many = np.random.default_rng(1).permutation(10**5) + 1
    order = cseq.Packed(many, 10**5)
    assert order.units <= 50_001
    assert (np.sort(order.reader(1).samples(0, 0, order.units)[0]) == np.arange(10**5)).all()


def test_samples_that_are_too_long_can_be_left_out() -> None:
    """They are in no row, and counted."""
    order = cseq.Packed([5, 50, 6, 99], 12, too_long="drop")
    assert sorted(np.concatenate(rows(order))) == [0, 2]
    assert order.describe().endswith("; 2 samples are too long")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": 0}, ValueError, "budget=0"),
        ({"quantum": 0}, ValueError, "quantum=0"),
        ({"quantum": 101}, ValueError, "quantum=101 is above 100"),
        ({"budget": 2**40}, ValueError, "give a quantum of at least 8192"),
        ({"too_long": None}, ValueError, "too_long=None"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """Argument and value."""
    with pytest.raises(error, match=said):
        cseq.Packed(**{"lengths": [3, 7, 8], "budget": 100, **options})
