"""`Packed` with split documents: each token once, full rows, and chance otherwise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cseq
from cseq.order._readers import keyed
from cseq.order.pieces import fewest_rows


def test_a_document_is_cut_into_rows_and_a_rest():
    """No piece is cut that could be whole."""
    order = cseq.Packed([25, 10, 0, 9], 10, too_long="split")
    assert sorted(map(sorted, order.batches(seed=1))) == [[0], [10], [20], [25], [35]]
    assert str(order) == "<Packed: 5 rows, filled to 88 %, 1–1 pieces a row>"


@pytest.mark.parametrize("too_long", ["error", "split"])
def test_rows_of_one_piece_are_rows(too_long):
    """A source of long documents can be mixed with others, and its batches have sizes."""
    order = cseq.Packed([9, 10, 8], 10, too_long=too_long)
    assert (order.room, " 1–1 " in order.describe()) == (2, True)
    parts = {"long": order, "short": cseq.Packed([3, 4, 2], 10, too_long=too_long)}
    assert cseq.Mixture(parts, {"long": 3, "short": 1}, block=4).units == 4
    assert order.reader(1).samples(0, 0, 3)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("sigma", [0.8, 1.2, 1.5])
def test_rows_are_full(sigma):
    """From 10^4 documents on, at most 1 % of rows are surplus; for 10^5, 99.98 % are full."""
    for count, most in ((10**4, 1.01), (10**5, 1.0002)):
        drawn = np.random.default_rng(0).lognormal(6.5 - sigma**2 / 2, sigma, count)
        lengths = drawn.astype(np.int32).clip(max=60_000)
        order = cseq.Packed(lengths, 8192, too_long="split")
        assert order.units <= math.ceil(most * math.ceil(lengths.sum() / 8192))
        assert "at most" not in order.describe()


AWKWARD = {
    "cannot meet": (range(4097, 4098), 50.01), "two at most": (range(3000, 5001), 97.63),
    "large and small": (range(2731, 8193), 88.9), "three at most": (range(2100, 2101), 73.24),
}  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_how_full_rows_can_be(name):
    """If no packing of whole pieces can fill the rows, `describe` says so."""
    lengths, most = AWKWARD[name]
    order = cseq.Packed(np.repeat(lengths, 40), 8192, too_long="split")
    share = float(order.describe().partition("(")[2].partition(" % at most")[0])
    assert share == pytest.approx(most, abs=0.1)
    full = float(order.describe().partition("filled to ")[2].partition(" %")[0])
    assert share - 0.2 <= full <= share


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_no_packing_needs_fewer_rows_than_the_bound(pieces):
    """It never exceeds the best packing of rows of 12."""

    def best(left, rooms):
        if not left:
            return len(rooms)
        first, *others = left
        ways = [
            tuple(sorted((*rooms[:k], room - first, *rooms[k + 1 :])))
            for k, room in enumerate(rooms)
            if room >= first
        ]
        return min(best(tuple(others), way) for way in {*ways, (*rooms, 12 - first)})

    lengths, counts = np.unique(pieces, return_counts=True)
    bound = fewest_rows(lengths, counts, 12)
    assert math.ceil(sum(pieces) / 12) <= bound
    assert bound <= best(tuple(sorted(pieces, reverse=True)), ())


def test_many_documents_are_sorted_in_parts():
    """There are more than one sort handles, and remainders of more lengths than 16 bits have."""
    lengths = np.arange(2**20 + 1000) % 5
    lengths[::50_000] = 100_001
    for row in (100_000, 7):
        order = cseq.Packed(lengths, row, too_long="split")
        starts = np.sort(order.reader(1).samples(2, 0, order.units)[0])
        cut = -(-lengths // row)
        first = np.repeat(lengths.cumsum() - lengths, cut)
        inside = np.arange(len(first)) - np.repeat(cut.cumsum() - cut, cut)
        assert (starts == first + inside * row).all()


@pytest.mark.parametrize("size", [2, 3, 5, 127, 128, 400])
def test_members_come_anywhere(size):
    """Each of few elements, or of many, comes equally often at each place, for all keys."""
    keys = 60_000 // size
    places = np.tile(np.arange(size), keys)
    drawn = keyed(np.full(len(places), size), np.repeat(np.arange(keys), size), places, 1, 2, 3)
    assert (np.sort(drawn.reshape(keys, size), 1) == np.arange(size)).all()
    counts = np.zeros((size, size))
    np.add.at(counts, (places, drawn), 1)
    free = (size - 1) ** 2
    deviation = ((counts - keys / size) ** 2).sum() / (keys / size)
    assert abs(deviation - free) < 5 * math.sqrt(2 * free)


def test_a_place_beyond_the_elements_is_refused():
    """Such an element does not exist."""
    ones = np.ones(1, np.int64)
    with pytest.raises(IndexError, match="not all below"):
        keyed(ones, ones, ones, 1, 2, 3)
