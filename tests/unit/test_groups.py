"""`Groups`: distinct classes in a batch, all of them in turn."""

from __future__ import annotations

from typing import Any

import pytest

import cseq


def test_an_epoch_is_as_long_as_the_data() -> None:
    """Unless it was said."""
    labels = ["a", "b", "c"] * 9
    order = cseq.Groups(labels, classes=2, samples=5)
    assert order.units == 3
    assert cseq.Groups(labels, 2, 5, epoch_size=100).units == 100


def test_it_says_what_comes_more_often_than_once() -> None:
    """How often a sample comes on average, and how many classes do not fill a batch."""
    order = cseq.Groups(list("abcabcabd"), 2, 3, epoch_size=4, repeat_small=True)
    assert repr(order) == (
        "<Groups: 4 batches of 2 of 4 classes, 3 samples of each; on average, samples come "
        "2–6× an epoch>"
    )
    assert cseq.Groups(list("abc") * 4, 2, 2, epoch_size=3).describe() == (
        "3 batches of 2 of 3 classes, 2 samples of each; on average, samples come 1× an epoch; "
        "each round leaves out 1 classes"
    )


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
