"""Some batches come again and again."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cseq


class Rows:
    """Batches of numbers."""

    def __getitem__(self, indices: Any) -> Any:
        return np.asarray(indices)


def test_as_many_batches_as_the_loader_has() -> None:
    """The first ones are the loader's; then those that were kept come in turn, held and intact."""
    with cseq.MPSequence(Rows, 3200, 2, out_type="null", seed=1, buffer=4).start() as batches:
        assert len(batches) == 100
        wanted = [batches.indices(0, k) for k in range(8)]
        got = list(cseq.recycled(batches, keep=3, after=8))
        assert len(got) == 100
        for number, batch in enumerate(got):
            assert (batch == wanted[number if number < 8 else 5 + (number - 8) % 3]).all()


@pytest.mark.parametrize(("length", "after"), [(0, 3), (2, 3), (3, 3)])
def test_short_loaders(length: int, after: int) -> None:
    """A loader that ends before is given as it is."""
    assert list(cseq.recycled(range(length), after=after)) == list(range(length))
    assert list(cseq.recycled(iter(()), after=after)) == []


def test_loaders_without_a_length() -> None:
    """What has no length has no end."""
    endless = cseq.recycled(iter(range(5)), keep=2, after=3)
    assert list(itertools.islice(endless, 8)) == [0, 1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("name", ["keep", "after"])
def test_wrong_counts(name: str) -> None:
    """Both are whole numbers from 1."""
    with pytest.raises(ValueError, match=f"{name}=0"):
        next(cseq.recycled(range(3), **{name: 0}))
