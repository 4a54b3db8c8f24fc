"""The checks of arguments: what they take, and that they name argument, value and remedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cseq import check


@pytest.mark.parametrize("value", [1, 7, 2**70, np.int8(5), np.uint64(2**64 - 1), np.array(3)])
def test_counts(value: Any) -> None:
    """Whole numbers of any kind are taken, as Python's."""
    got = check.count("n", value)
    assert (type(got), got) == (int, int(value))


BAD_COUNTS = [
    (True, TypeError), (np.True_, TypeError), (1.0, TypeError), ("1", TypeError), (None, TypeError),
    (np.array([1, 2]), TypeError), (0, ValueError), (-3, ValueError), (11, ValueError),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), BAD_COUNTS, ids=lambda v: repr(v)[:20])
def test_bad_counts(value: Any, kind: type[Exception]) -> None:
    """No booleans, no fractions, nothing out of bounds."""
    with pytest.raises(kind, match=rf"^size={re.escape(repr(value))} is .*; give"):
        check.count("size", value, most=10)


def test_bounds_are_included() -> None:
    """`least` and `most` are allowed themselves."""
    assert check.count("n", 0, least=0) == 0
    assert check.count("n", 9, most=9) == 9


def test_flags() -> None:
    """Only True and False are flags."""
    assert check.flag("f", np.bool_(True)) is True
    assert check.flag("f", False) is False
    for value in (0, 1, None, "yes", np.array(True)):
        with pytest.raises(TypeError, match=r"^f=.*True nor False"):
            check.flag("f", value)


def test_choices() -> None:
    """One of a few values; the message lists them."""
    assert check.choice("c", "a", ("a", None)) == "a"
    assert check.choice("c", None, ("a", None)) is None
    with pytest.raises(ValueError, match=r"^c='b' is unknown; give one of 'a', None$"):
        check.choice("c", "b", ("a", None))


@pytest.mark.parametrize("value", [1, 0.25, np.float32(3), np.int64(9)])
def test_seconds(value: Any) -> None:
    """Positive numbers of any kind are seconds, as float."""
    got = check.seconds("t", value)
    assert (type(got), got) == (float, float(value))


def test_no_seconds() -> None:
    """None is no bound."""
    assert check.seconds("t", None) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (-1.5, ValueError), (float("nan"), ValueError), (float("inf"), ValueError),
     (True, TypeError), ("5", TypeError), ([], TypeError)],
)  # fmt: skip
def test_bad_seconds(value: Any, kind: type[Exception]) -> None:
    """Nothing that is not above 0, and no infinity: that is None."""
    with pytest.raises(kind, match=rf"^t={re.escape(repr(value))} is not .*None"):
        check.seconds("t", value)
