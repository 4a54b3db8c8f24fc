"""`Groups`: distinct classes in a batch, all of them in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cseq


def epoch(order: cseq.Order, number: int = 0) -> np.ndarray[Any, Any]:
    """Return the batches of an epoch."""
    samples, sizes = order.reader(7).samples(number, 0, order.units)
    assert (sizes == order.room).all()
    return samples.reshape(order.units, -1)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=20),
    chosen=st.integers(1, 5),
    each=st.integers(1, 6),
)
def test_a_batch_has_distinct_classes(sizes: list[int], chosen: int, each: int) -> None:
    """As many as asked for, and as many samples of each: other ones, if it has enough."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chosen = min(chosen, len(sizes))
    order = cseq.Groups(labels, chosen, each, epoch_size=40, repeat_small=True)
    for batch in epoch(order, 3).reshape(40, chosen, each):
        classes = labels[batch]
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0])) == chosen
        for number, members in zip(classes[:, 0], batch, strict=True):
            assert len(set(members)) == min(each, sizes[number])


def test_classes_and_samples_come_in_turn() -> None:
    """Each class once in a round, each sample once before any comes again, over epochs."""
    labels = np.repeat(np.arange(12), 8)
    order = cseq.Groups(labels, 4, 2, epoch_size=2)  # rounds of 3 batches, passes of 4 rounds
    batches = np.concatenate([epoch(order, number) for number in range(12)])
    for one_round in batches.reshape(8, -1):
        assert sorted(labels[one_round[::2]]) == list(range(12))
    for one_pass in batches.reshape(2, -1):
        assert sorted(one_pass) == list(range(96))


def test_classes_that_are_left_over_change() -> None:
    """Of 5 classes, 2 in a batch, one is left out of each round, and another one of the next."""
    order = cseq.Groups([0, 1, 2, 3, 4], 2, 1, epoch_size=2)
    left = [{0, 1, 2, 3, 4} - set(epoch(order, number).ravel()) for number in range(40)]
    assert all(len(each) == 1 for each in left)
    assert set.union(*left) == {0, 1, 2, 3, 4}


def test_an_epoch_is_as_long_as_the_data() -> None:
    """Unless it was said."""
    labels = ["a", "b", "c"] * 9
    order = cseq.Groups(labels, classes=2, samples=5)
    assert order.units == 3
    assert repr(order) == "<Groups: 3 batches of 2 classes with 5 samples of each, of 3 classes>"
    assert cseq.Groups(labels, 2, 5, epoch_size=100).units == 100


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"labels": []}, ValueError, "labels is empty"),
        ({"labels": [0.0, 1.0]}, TypeError, "labels has values of type float64"),
        ({"labels": [[0], [1]]}, ValueError, r"labels has shape \(2, 1\)"),
        ({"classes": 3}, ValueError, "classes=3 exceeds the 2 classes"),
        ({"classes": 0}, ValueError, "classes=0"),
        ({"samples": 3}, ValueError, "labels has 2 samples of class 'b', fewer than samples=3"),
        ({"samples": 1.5}, TypeError, "samples=1.5"),
        ({"samples": 2**32}, ValueError, "samples=4294967296 is above"),
        ({"epoch_size": 0}, ValueError, "epoch_size=0"),
        ({"repeat_small": 1}, TypeError, "repeat_small=1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """Argument, value and remedy."""
    with pytest.raises(error, match=said):
        cseq.Groups(**{"labels": list("aabaab"), "classes": 2, "samples": 2, **options})
