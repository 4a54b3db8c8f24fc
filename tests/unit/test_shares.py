"""`Shares`: whole units of every share, exact over any number of blocks."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_mixture import counts

from cseq.order.shares import Shares

weight = st.one_of(
    st.integers(0, 9), st.integers(0, 2**80), st.floats(0, 1e300), st.floats(0, 1),
    st.sampled_from([5e-324, 1e-9, 0.5, 1.0]),
)  # fmt: skip
weights = st.lists(weight, min_size=1, max_size=12).filter(any)
blocks = st.one_of(st.integers(1, 9), st.integers(1, 2**16 - 1))


def errors(given_weights, block, number):
    """Return the errors before a block: of sources with a unit or more in a block, and others."""
    ratios = [weight.as_integer_ratio() for weight in given_weights]
    scale = math.lcm(*(below for _, below in ratios))
    exact = [above * scale // below for above, below in ratios]
    total = sum(exact)
    found = ([], [])
    before = Shares(given_weights, block).before(number).tolist()
    assert sum(before) == number * block
    for weight, count in zip(exact, before, strict=True):
        assert weight or not count
        off = abs(count * total - number * block * weight)
        found[weight * block < total].append(off / total)
    return found


@given(weights, blocks, st.integers(0, 2**48))
# 64 bits round a factor just below 1/2 up to it; the exact count is one less.
@example([2**63 - 1, 2**63], 1, 1)
@example([2**63 - 1, 2**63], 1, 2**47 + 1)
def test_counts(given_weights, block, number):
    """They match the page's, never decrease, and are off by less than the page says."""
    shares = Shares(given_weights, block)
    before, after = (shares.before(number + k).tolist() for k in (0, 1))
    assert before == counts(given_weights, block, number)
    assert all(there <= then for there, then in zip(before, after, strict=True))
    whole, less = errors(given_weights, block, number)
    assert max(whole, default=0) < 1
    assert max(less, default=0) < 1.68


FAMILIES = {
    "zipf": [1 / (k + 1) for k in range(1000)], "steep": [(k + 1) ** -2 for k in range(300)],
    "geometric": [0.7**k for k in range(60)], "equal": [1] * 700, "two": [0.9999, 0.0001],
    "fibonacci": [0.01, 1, 1, 1.97, 3.03, 4.98, 8.02, 12.9, 21.1, 33.9, 55.2, 88.6, 144.7, 233],
    "one of many": [1] * 2000 + [10**9],
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("block", [1, 8, 1024, 65535])
def test_families(name, block):
    """Many sources, in blocks of any size, stay within the bounds at any time."""
    rng = random.Random(block)
    for number in (1, 2, 3, *(rng.randrange(2 ** rng.randint(2, 40)) for _ in range(5))):
        whole, less = errors(FAMILIES[name], block, number)
        assert max(whole, default=0) < 1
        assert max(less, default=0) < 1.68


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), st.integers(1, 5))
def test_whole_shares(quotas, times):
    """If each share of a block is a whole number, every block has it."""
    shares = Shares([quota * 0.125 for quota in quotas], sum(quotas) * times)
    for number in (0, 1, 2, 10**9):
        more = shares.before(number + 1) - shares.before(number)
        assert more.tolist() == [quota * times for quota in quotas]


@pytest.mark.parametrize("block", [1, 10, 1024])
def test_a_rare_source_comes_in_even_steps(block):
    """Its units are 1 / share apart, to a block."""
    shares = Shares([1, 9999], block)
    comes = [j for j in range(200_000 // block) if shares.before(j + 1)[0] > shares.before(j)[0]]
    assert len(comes) == 20
    gaps = {(b - a) * block for a, b in pairwise(comes)}
    assert all(abs(gap - 10_000) <= block for gap in gaps)


def test_counts_beyond_64_bits():
    """They are exact, modulo 2**64."""
    given_weights = [1, 2, math.pi, 1e-30]
    for number in (2**64 // 7 - 1, 2**64 // 7, 2**64 // 7 + 1, 2**70 + 3):
        expected = [count % 2**64 for count in counts(given_weights, 7, number)]
        assert Shares(given_weights, 7).before(number).tolist() == expected
