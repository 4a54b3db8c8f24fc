"""`Shuffled`: the content of an epoch, which chance alone decides."""

import itertools

import numpy as np
import pytest
from fair import chi, epochs, labels_of, scores, worst

import cseq

ALGORITHMS = ["fisher-yates-v1", "feistel-v1"]
sizes = pytest.mark.parametrize(
    ("n", "algorithm"), [(500, ALGORITHMS[0]), (65_536, ALGORITHMS[1]), (70_001, ALGORITHMS[1])]
)


def shuffled(n, algorithm):
    """Make an order."""
    return cseq.Shuffled(n, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_permutation_is_as_likely(algorithm):
    """It covers four samples, over epochs and seeds."""
    where = {each: k for k, each in enumerate(itertools.permutations(range(4)))}
    made = [where[tuple(each.tolist())] for each in epochs(shuffled(4, algorithm), 6000, 20)]
    assert abs(chi(np.bincount(made, minlength=24), 250)) < 5
    pairs = np.bincount(np.array(made[:-1]) * 24 + made[1:], minlength=576)
    assert abs(chi(pairs, 5999 / 576)) < 5


# All blocks are whole here: a short last one comes at other positions.
ANYWHERE = [
    *(shuffled(n, algorithm) for n in (2, 7, 30, 61) for algorithm in ALGORITHMS),
    *(
        cseq.Blocks(rows, window, lanes, samples=n)
        for n, rows, window, lanes in ((30, 3, 4, 1), (30, 3, 4, 2), (48, 4, 6, 3), (42, 7, 6, 6))
    ),
]


@pytest.mark.parametrize("order", ANYWHERE, ids=repr)
def test_every_sample_is_at_every_position_as_often(order):
    """A sample's position does not depend on its place in the data."""
    n = order.units
    counts, positions = np.zeros((n, n)), np.arange(n)
    for epoch in epochs(order, 3000):
        counts[positions, epoch] += 1
    assert abs(chi(counts, 3000 / n, (n - 1) ** 2)) < 5


@sizes
def test_classes_come_by_chance(n, algorithm):
    """It holds in the first batches, a rank's and every hundredth, of periodic or sorted data."""
    rows = []
    labels = labels_of(n)
    for epoch in epochs(shuffled(n, algorithm), 25):
        parts = epoch[: n // 50], epoch[: n // 2], epoch[np.arange(n) // 4 % 8 == 3], epoch[::100]
        rows.append(np.concatenate([scores(label, part) for label in labels for part in parts]))
    assert worst(rows) < 5


@sizes
def test_neighbours_are_strangers(n, algorithm):
    """Neighbours stay neighbours by chance; no sample predicts the next one, or its place."""
    rows = []
    places, kept = np.arange(n), 0
    for epoch in epochs(shuffled(n, algorithm), 60):
        kept += int((np.abs(np.diff(epoch)) == 1).sum())
        of = [(epoch[1:], epoch[:-1]), (epoch[256:], epoch[:-256]), (places, epoch)]
        rows.append(np.array([np.corrcoef(a, b)[0, 1] * np.sqrt(len(a) - 1) for a, b in of]))
    assert abs(kept - 120) < 5 * np.sqrt(120)
    assert worst(rows) < 5


@sizes
def test_epochs_and_seeds_are_strangers(n, algorithm):
    """The first samples of an epoch are elsewhere in the next one, and with the next seed."""
    rows = []
    order = shuffled(n, algorithm)
    readers = [order.reader(seed) for seed in range(2)]
    for k in range(0, 80, 2):
        one = readers[0].samples(k, 0, n)[0]
        others = [readers[0].samples(k + 1, 0, n)[0], readers[1].samples(k, 0, n)[0]]
        first = np.zeros(n, np.int64)
        first[one[: n // 5]] = 1
        fixed = [(one == other).sum() - 1 for other in others]
        rows.append(np.array([*(scores(first, other[: n // 5])[1] for other in others), *fixed]))
    assert worst(rows) < 5
