"""Scores of an order's fairness, in standard deviations: five are too many."""

import numpy as np

# Fewer expected samples are not nearly normal.
ENOUGH = 20
# Sorted lengths, lengths of a period that divides nothing, one long sample, equal lengths.
LENGTHS = {
    "sorted": np.repeat([10, 20, 30, 45], [30, 15, 10, 5]),
    "periodic": np.arange(60) % 7 * 9 + 3,
    "one long": np.where(np.arange(60) == 13, 64, 9),
    "equal": np.full(61, 16),
}


def epochs(order, count, seeds=3):
    """Yield the samples of epochs of an order; the seeds alternate."""
    readers = [order.reader(seed) for seed in range(seeds)]
    for epoch in range(count):
        yield readers[epoch % seeds].samples(epoch, 0, order.units)[0]


def labels_of(n):
    """Label n samples: by periods of 2 to 60, sorted, with a tiny class, with a huge one."""
    samples = np.arange(n)
    periods = (2, 3, 4, 5, 7, 8, 10, 12, 16, 24, 25, 31, 32, 48, 60)
    sorted_ = [samples * parts // n for parts in (2, 3, 10)]
    rare = [samples % 100 == 7, samples >= n // 100, samples * samples % n < n // 50]
    return [*(samples % period for period in periods), *sorted_, *(np.int64(1) * x for x in rare)]


def scores(labels, picked):
    """Score each label's count among picked samples, as if they were drawn without replacement."""
    n, m, there = len(labels), len(picked), np.bincount(labels)
    mean = m * there / n
    enough = np.minimum(mean, m - mean) >= ENOUGH
    counts = np.bincount(labels[picked], minlength=len(there))
    variance = mean * (1 - there / n) * (n - m) / (n - 1)
    return ((counts - mean) / np.sqrt(variance))[enough]


def worst(rows):
    """Return how unlikely scores are, given one row for each epoch.

    The result is the larger deviation of two: a column's mean, which should be 0, and the mean
    square of all scores, which should be 1. Scores of one epoch may depend on each other.
    """
    z = np.array(rows)
    squares = np.square(z).mean(axis=1)
    bias = np.abs(z.mean(axis=0)).max() * np.sqrt(len(z))
    spread = abs(squares.mean() - 1) / squares.std(ddof=1) * np.sqrt(len(z))
    return float(max(bias, spread))


def chi(counts, expected, free=None):
    """Score the chi-square of independent counts that have the same expectation."""
    counts = np.asarray(counts, np.float64)
    free = counts.size - 1 if free is None else free
    return float((np.square(counts - expected).sum() / expected - free) / np.sqrt(2 * free))
