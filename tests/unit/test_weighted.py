"""`Weighted`: as often as weights say, as fair as a random draw, and invalid weights."""

import math
import random
from fractions import Fraction
from functools import lru_cache

import golden
import numpy as np
import pytest
from fair import epochs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_draws import weighted

import cseq
from cseq.order.weighted import integers_of, spread
from cseq.testing import check_order

weight = st.floats(0, allow_infinity=False, allow_nan=False) | st.floats(0, 10)
lists = st.lists(weight, min_size=1, max_size=60).filter(any)


def integers(weights):
    """Compute the integers of weights as the page of the orders defines them."""
    ratios = [weight.as_integer_ratio() for weight in weights]
    # All weights are multiples of 1 / unit, a power of two.
    unit = max(below for _, below in ratios)
    exact = [above * (unit // below) for above, below in ratios]
    k = 63 - sum(exact).bit_length()
    # The loop ends at the largest k with a total below 2**62.
    while True:
        whole = [max(round(weight * Fraction(2) ** k), weight > 0) for weight in exact]
        if sum(whole) < 2**62:
            return whole
        k -= 1


def drawn(order, seed, epoch=0):
    """Read an epoch."""
    return order.reader(seed).samples(epoch, 0, order.units)[0]


@pytest.mark.parametrize("record", golden.records("orders_weighted"))
def test_reference(record):
    """An order without replacement equals the reference in plain Python."""
    if record["replacement"] or record["size"] > 1000:
        return
    masses = integers([float(weight) for weight in golden.weights(record["weights"])])
    where = record["seed"], record["epoch"]
    expected = weighted(masses, record["size"], *where)
    assert drawn(golden.made("weighted-v2", record), *where).tolist() == expected


@pytest.mark.parametrize("samples", [1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097, 65537])
def test_equal_weights_are_a_shuffle(samples):
    """Each sample comes once, in another order in each epoch, from any position."""
    order = cseq.Weighted(np.full(samples, 0.1))
    first, second = drawn(order, 3), drawn(order, 3, 1)
    assert (np.sort(first) == np.arange(samples)).all()
    assert (np.sort(second) == np.arange(samples)).all()
    assert samples < 15 or (first != second).any()
    check_order(order, most=1000)


@given(lists)
# Some are denormal, or have a sum that is infinite in float64.
@example([1e300, 1.0, 0.0])
@example([5e-324])
@example([5e-324, 1e-310])
@example([1.7e308] * 9)
@example([2.0**-1000, 2.0**1000])
@example([3.0, 0.0])
def test_integers(weights):
    """Weights become the largest integers with a total below 2**62, and 0 alone becomes 0."""
    masses = integers_of(np.array(weights))
    assert masses.tolist() == integers(weights)
    assert int(masses.sum()) < 2**62


@settings(max_examples=200)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=100).filter(any),
    st.integers(1, 3000),
    st.integers(0, 2**64 - 1),
)
def test_numbers_are_exact(weights, size, seed):
    """A sample comes as often as its share, rounded up or down."""
    counts = np.bincount(drawn(cseq.Weighted(weights, size), seed), minlength=len(weights))
    whole = integers(weights)
    for count, weight in zip(counts.tolist(), whole, strict=True):
        share, rest = divmod(size * weight, sum(whole))
        assert count in (share, share + bool(rest))


def test_numbers_of_great_sizes():
    """Places times the total have up to 110 bits."""
    rng = random.Random(2)
    for _ in range(2000):
        size, total = rng.randint(1, 2 ** rng.randint(1, 48)), rng.randint(1, 2**62 - 1)
        offset, places = rng.randrange(total), [0, size - 1, rng.randrange(size)]
        numbers = spread(np.array(places, np.uint64), total, offset, size)
        assert numbers.tolist() == [(place * total + offset) // size for place in places]


def counts_of(order, count):
    """Return how often each sample comes in each epoch: (epochs, samples)."""
    counts = [np.bincount(each, minlength=order.samples) for each in epochs(order, count, 1)]
    return np.array(counts, np.float32)


def check(values, expected, variance):
    """Check that each value is within five standard deviations of its expectation."""
    off = np.abs(np.asarray(values, float) - expected)
    assert (off <= 5 * np.sqrt(variance) + 1e-6).all(), off.max()


EPOCHS = 100
SIZES = {
    "a half": (1000, 500), "a tenth": (2000, 200), "a tenth and three": (2000, 203),
    "a hundredth": (5000, 50), "a prime number": (1009, 331), "more than all": (1000, 1300),
    "twice and a half": (720, 1800),
}  # fmt: skip
of_each_size = pytest.mark.parametrize("name", SIZES)


@lru_cache
def equal(name):
    """Return samples of equal weight, how many of them come again in an epoch, and which do."""
    samples, size = SIZES[name]
    whole, rest = divmod(size, samples)
    more = counts_of(cseq.Weighted(np.ones(samples), size), EPOCHS) - whole
    return samples, rest, more


@of_each_size
def test_classes_come_as_in_a_random_draw(name):
    """Their counts vary hypergeometrically, for labels of any period, and for sorted labels."""
    samples, rest, more = equal(name)
    assert set(np.unique(more)) == {0, 1}
    numbers = np.arange(samples)
    for labels in (*(numbers % period for period in range(2, 61)), numbers * 5 // samples):
        share = np.bincount(labels) / samples
        found = more @ np.eye(len(share), dtype=np.float32)[labels]
        variance = rest * share * (1 - share) * (samples - rest) / (samples - 1)
        check(found.mean(0), rest * share, variance / EPOCHS)
        if rest * share.min() > 50:
            check(found, rest * share, variance)
        ratio = ((found - rest * share) ** 2 / variance).mean()
        assert abs(ratio - 1) < 0.15 + 5 * math.sqrt(2 / EPOCHS / (len(share) - 1))


@of_each_size
def test_pairs_come_together_as_in_a_random_draw(name):
    """The pairs are neighbours in the data, samples at other distances, and random ones."""
    samples, rest, more = equal(name)
    distances = (1, 2, 3, 5, 10, 64, 100, samples // 2)
    together = [(more[:, d:] * more[:, :-d]).mean() for d in distances]
    pairs = [samples - d for d in distances]
    a, b = np.random.default_rng(1).integers(0, samples, (2, 10 * samples))
    a, b = a[a != b], b[a != b]
    both = rest * (rest - 1) / (samples * (samples - 1))
    check(
        [*together, (more[:, a] * more[:, b]).mean()],
        both,
        both / EPOCHS / np.array([*pairs, len(a)]),
    )


@of_each_size
def test_epochs_are_drawn_independently(name):
    """Two epochs share as many samples as two random draws."""
    samples, rest, more = equal(name)
    common, expected = more @ more.T, rest * rest / samples
    variance = expected * (1 - rest / samples) ** 2 * samples / (samples - 1)
    for later in (1, 2, 10):
        shared = np.diagonal(common, later)
        check(shared, expected, variance)
        check(shared.mean(), expected, variance / len(shared))
    assert np.triu(common, 1).max() < rest


WEIGHTS = {
    "few": np.arange(1.0, 13), "zeros": np.arange(300) % 3 / 7, "falling": 1 / np.arange(1.0, 401),
    "one has half": np.r_[np.ones(150), 299.0, np.ones(149)],
    "huge and tiny": np.r_[1e6, np.ones(300), 1e-3, 1e6],
    "random": np.random.default_rng(3).pareto(1.5, 500),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_samples_come_as_their_weights_say(name, size):
    """Each epoch has the share rounded up or down; the mean over epochs is the share itself."""
    weights, count = WEIGHTS[name], 500
    counts = counts_of(cseq.Weighted(weights, size), count)
    share = size * weights / weights.sum()
    down = np.floor(share + 1e-9)
    rest = np.maximum(share - down, 0)
    assert ((counts == down) | (counts == down + 1) & (rest > 1e-9)).all()
    variance, mean = rest * (1 - rest) / count, counts.mean(0, dtype=float)
    often = variance * count**2 > 25
    check(mean[often], share[often], variance[often])
    check(mean[~often].sum(), share[~often].sum(), variance[~often].sum())


@pytest.mark.parametrize("labels", ["in turn", "sorted", "rare in turn", "rare at random"])
@pytest.mark.parametrize("size", [None, 300, 1000, 5000])
def test_balanced_classes(labels, size):
    """Each class comes equally often in each epoch, apart from a random draw's variation."""
    numbers = np.arange(2400)
    of = {
        "in turn": numbers % 10,
        "sorted": numbers // 600,
        "rare in turn": np.where(numbers % 48 == 0, 1, numbers % 2 * 2),
        "rare at random": np.random.default_rng(2).choice(4, 2400, p=[0.9, 0.07, 0.02, 0.01]),
    }[labels]
    order, members = cseq.Weighted.balanced(of, size), np.bincount(of)
    found = counts_of(order, EPOCHS) @ np.eye(len(members), dtype=np.float32)[of]
    share = order.units / len(members)
    rest = share / members % 1
    check(found, share, members * rest * (1 - rest))
    check(found.mean(0, dtype=float), share, members * rest * (1 - rest) / EPOCHS)


def test_facts():
    """A state identifies the weights by their fingerprint, for any type."""
    facts = cseq.Weighted([1, 2]).facts()
    assert facts == cseq.Weighted(np.array([1, 2], np.float32)).facts()
    assert facts != cseq.Weighted([2, 1]).facts()
    assert "2 samples" in cseq.Weighted([1, 2]).describe()
    with pytest.raises(ValueError, match="weights="):
        cseq.Weighted([2, 1]).resumed(facts, 0, 0, 0)
    said = r"'weighted-v1', but .*'weighted-v2': samples were taken at equal intervals"
    with pytest.raises(ValueError, match=said):
        cseq.Weighted([1, 2]).resumed(facts | {"name": "weighted-v1"}, 0, 0, 0)
