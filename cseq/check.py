"""Checks of arguments; each error names the argument, its value and the remedy."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["choice", "count", "dimensions", "flag", "seconds"]


def count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Check a whole number from `least` to `most`; numpy's integers are fine, bool is none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not an integer; give one of at least {least}"
        ) from None
    if number < least:
        raise ValueError(f"{name}={number} is below {least}; give an integer of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} is above {most}; give an integer of at most {most}")
    return number


def flag(name: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is neither True nor False")
    return bool(value)


def choice(name: str, value: Any, options: Sequence[Any]) -> Any:
    """Check one of a few values."""
    if value not in options:
        listed = ", ".join(map(repr, options))
        raise ValueError(f"{name}={value!r} is unknown; give one of {listed}")
    return value


def seconds(name: str, value: Any) -> float | None:
    """Check a time span above 0, or None for no bound."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}={value!r} is not a number of seconds; give one above 0, or None")
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{name}={value!r} is not above 0; give seconds, or None for no bound")
    return float(value)


def dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Check the shape of an array, as numpy does."""
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
    dims = tuple(map(operator.index, sizes))
    if min(dims, default=0) < 0:
        raise ValueError(f"shape={shape!r} has a negative dimension; give integers of at least 0")
    return dims
