"""`Packed`: rows within the budget, and nearly full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cseq


def rows(order: cseq.Order, number: int = 0) -> list[np.ndarray[Any, Any]]:
    """Return the rows of an epoch."""
    samples, sizes = order.reader(7).samples(number, 0, order.units)
    return np.split(samples, np.cumsum(sizes)[:-1])


def test_a_rounded_length_may_exceed_the_budget() -> None:
    """What is no longer than the budget has a row of its own."""
    order = cseq.Packed([100, 99, 97, 1], 100, quantum=8)
    assert sorted(map(sorted, rows(order))) == [[0], [1], [2], [3]]


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
