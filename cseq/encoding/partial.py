"""A batch of which samples were left out, as it travels."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Partial"]


class Partial(NamedTuple):
    """A batch without the samples that have raised, and these: index, and type and text."""

    batch: Any
    left: tuple[tuple[Any, str], ...]
