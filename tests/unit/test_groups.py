"""`Groups`: distinct classes in a batch, each class in its turn, and chance otherwise."""

import numpy as np
import pytest

import cseq


def test_it_says_what_comes_more_often_than_once():
    """It has the mean number of times, and how many classes do not fill a batch."""
    assert cseq.Groups(["a", "b", "c"] * 9, classes=2, samples=5).units == 3
    order = cseq.Groups(list("abcabcabd"), 2, 3, epoch_size=4, repeat_small=True)
    assert repr(order) == (
        "<Groups: 4 batches of 2 of 4 classes, 3 samples of each; a sample appears about "
        "2–6× per epoch>"
    )
    assert cseq.Groups(list("abc") * 4, 2, 2, epoch_size=3).describe() == (
        "3 batches of 2 of 3 classes, 2 samples of each; a sample appears about 1× per epoch; "
        "each round leaves out 1 class"
    )


# The sizes of the classes, the classes of a batch, and the samples of each.
SHAPES = [
    ([5] * 6, 2, 2),
    ([4, 5, 6, 7, 8, 9, 10], 3, 2),
    ([3, 4, 5, 9, 200], 4, 3),
    ([60] * 10, 3, 4),
    ([1] * 6 + [50] * 7, 4, 1),
    ([2, 40], 1, 3),
]


@pytest.mark.parametrize(("sizes", "chosen", "each"), SHAPES)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_classes_and_samples_come_by_chance(sizes, chosen, each, is_sorted):
    """All classes, all pairs of classes, and all samples of a class come equally often."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    labels = labels if is_sorted else np.random.default_rng(0).permutation(labels)
    count, rest = len(sizes), len(sizes) % chosen
    order = cseq.Groups(labels, chosen, each, epoch_size=400 * (count // chosen), repeat_small=True)
    classes, often = np.zeros((count, chosen)), np.zeros(len(labels))
    met = np.zeros((count, count))
    for seed in range(3):
        batches = order.reader(seed).samples(5, 0, order.units)[0].reshape(-1, chosen, each)
        assert (labels[batches] == labels[batches[:, :, :1]]).all()
        assert (np.diff(np.sort(labels[batches[:, :, 0]], axis=1), axis=1) > 0).all()
        for place in range(chosen):
            classes[:, place] += np.bincount(labels[batches[:, place, 0]], minlength=count)
        shown = np.zeros((len(batches), count))
        np.put_along_axis(shown, labels[batches[:, :, 0]], 1, axis=1)
        met += shown.T @ shown
        often += np.bincount(batches.ravel(), minlength=len(labels))
    rounds, left = 1200, rest / count
    assert np.abs(classes.sum(1) - rounds * (1 - left)).max() <= 5 * np.sqrt(rounds * left)
    mean = rounds * (count // chosen) / count
    assert np.abs(classes - mean).max() < 5 * np.sqrt(mean)
    pairs = met[np.triu_indices(count, 1)]
    share = chosen * (chosen - 1) / (count * (count - 1)) * (count // chosen)
    assert np.abs(pairs - rounds * share).max() <= 5 * np.sqrt(rounds * share)
    for c, size in enumerate(sizes):
        mean = classes[c].sum() * each / size
        # The probability that a pass, or a round, omits a sample.
        rare = size % each / size + left
        assert np.abs(often[labels == c] - mean).max() <= 1 + 5 * np.sqrt(mean * rare)
