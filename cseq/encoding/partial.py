"""A batch without the samples that were left out, as it travels."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Partial"]


class Partial(NamedTuple):
    """A batch without the samples that raised; `left` has their index, and error type and text."""

    batch: object
    left: tuple[tuple[object, str], ...]
