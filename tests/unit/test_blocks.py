"""`Blocks`: with windows and lanes, few blocks are in use, and all batches are equally mixed."""

import numpy as np
import pytest
from fair import chi, epochs, labels_of, scores, worst
from hypothesis import example, given
from hypothesis import strategies as st
from ranked import united
from reference_draws import blocks, derive, stream, unequal_blocks

import cseq


def made(n, rows, window, lanes):
    """Make an order."""
    return cseq.Blocks(rows, window, lanes, samples=n)


def drawn(order, seed, epoch=0):
    """Read an epoch."""
    return order.reader(seed).samples(epoch, 0, order.units)[0]


@st.composite
def shapes(draw):
    """Draw samples, rows, window, lanes."""
    lanes = draw(st.integers(1, 6))
    window = lanes * draw(st.integers(1, 4))
    return draw(st.integers(1, 400)), draw(st.integers(1, 12)), window, lanes


def check(order, seed, epoch, expected):
    """Compare an epoch with the reference, as a whole and sample by sample."""
    assert drawn(order, seed, epoch).tolist() == expected
    reader = order.reader(seed)
    for place in np.random.default_rng(0).permutation(order.units)[:20].tolist():
        assert reader.samples(epoch, place, 1)[0].tolist() == expected[place : place + 1]


@given(shapes(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@example((5, 9, 6, 3), 1, 0)
@example((28, 4, 2, 1), 1, 0)
def test_reference(shape, seed, epoch):
    """An epoch equals the reference, and can be read in any pieces."""
    check(made(*shape), seed, epoch, blocks(*shape, seed, epoch))


@given(shapes(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 12), st.integers(0, 40))
def test_ranks_have_lanes(shape, ranks, size, start):
    """Of a whole global batch, wherever it begins, a rank may have its lanes."""
    lanes, together, start = shape[3], size * ranks, start % shape[0]
    order = made(*shape)
    whole, turn = drawn(order, 1, 2), derive(stream(1, 2, 7, 1), 2)[1] * lanes >> 64
    seen = []
    for number, got in enumerate(united(order, size, ranks, 2, start)):
        seen += [sample for samples, _ in got for sample in samples]
        batch = np.arange(together) + start + number * together
        whose = np.arange(together) // size
        if lanes % ranks == 0 and together % lanes == 0:
            whose = (batch + turn) % lanes * ranks // lanes
        if batch[-1] < len(whole):
            parts = [whole[batch[whose == rank]].tolist() for rank in range(ranks)]
            assert [samples for samples, _ in got] == parts
    assert sorted(seen) == sorted(whole[start:])


def check_window(order, block_of, window):
    """Fail unless, at each position, at most `window` blocks have begun, not ended."""
    block_of = block_of[drawn(order, 1, 2)]
    _, begun = np.unique(block_of, return_index=True)
    _, over = np.unique(block_of[::-1], return_index=True)
    count = np.bincount(begun, minlength=order.units + 1)
    count -= np.bincount(order.units - over, minlength=order.units + 1)
    assert count.cumsum().max() <= window


@given(shapes())
def test_few_blocks_are_in_use(shape):
    """A block begins only when there are fewer than `window` that have not ended."""
    samples, rows, window, _ = shape
    check_window(made(*shape), np.arange(samples) // rows, window)


@pytest.mark.parametrize("short", [0, 1, 39])
@pytest.mark.parametrize(("window", "lanes"), [(2, 1), (64, 1), (64, 2), (48, 6), (8, 8), (32, 32)])
def test_all_batches_are_mixed_alike(window, lanes, short):
    """No whole batch has samples from fewer than half the median number of blocks."""
    for blocks_there in [*range(3, 20), *range(20, 300, 7), 1025]:
        order = made(blocks_there * 40 - short, 40, window, lanes)
        batches = drawn(order, 5)[: order.units // 64 * 64].reshape(-1, 64) // 40
        batches.sort(axis=1)
        blocks_in = 1 + (np.diff(batches, axis=1) > 0).sum(axis=1)
        assert 2 * blocks_in.min() >= np.median(blocks_in)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_short_block_comes_anywhere(lanes):
    """The last samples come equally often in every window, and at every lane's turn."""
    n = 3 * 8 * 40 + 3
    counts = np.zeros((5, lanes))
    for epoch in epochs(made(n, 8, 28, lanes), 1500, 10):
        position = int(np.flatnonzero(epoch == n - 1)[0])
        counts[position * 5 // n, position % lanes] += 1
    assert abs(chi(counts, 1500 / counts.size)) < 5


@pytest.mark.parametrize("lanes", [1, 8])
def test_blocks_come_by_chance(lanes):
    """Classes of whole blocks are random in each window, and a window's samples in its batches."""
    rows = []
    order, blocks_there = made(1200 * 25, 25, 400, lanes), 1200
    labels, inside = labels_of(blocks_there)[::2], labels_of(400 * 25)[::2]
    for epoch in epochs(order, 25):
        windows = epoch.reshape(3, -1)
        found = [scores(label, np.unique(w // 25)) for label in labels for w in windows]
        where = np.argsort(np.argsort(windows[1]))
        found += [scores(label, where[:2000]) for label in inside] if lanes == 1 else []
        rows.append(np.concatenate(found))
    assert worst(rows) < 5


def test_neighbours_are_strangers():
    """In a window, neighbours stay neighbours by chance, and no sample predicts the next one."""
    rows = []
    order, kept = made(7 * 640, 64, 10, 1), 0
    for epoch in epochs(order, 200):
        kept += int((np.diff(epoch) == 1).sum())
        window = epoch[640:1280] % 64
        rows.append(np.array([np.corrcoef(window[1:], window[:-1])[0, 1] * np.sqrt(638)]))
    # Pairs within blocks, and of neighbouring blocks in a window, on average.
    pairs = 7 * 10 * 63 + 9
    assert abs(kept - 200 * pairs / 640) < 5 * np.sqrt(200 * pairs / 640)
    assert worst(rows) < 5


def test_epochs_have_other_windows():
    """Blocks of one epoch's window meet in the next one by chance."""
    rows = []
    before = np.arange(600)
    for epoch in epochs(made(600 * 4, 4, 200, 4), 100, 1):
        now = np.empty(600, np.int64)
        now[epoch // 4] = np.arange(2400) // 800
        rows.append(np.concatenate([scores(before, np.flatnonzero(now == k)) for k in range(3)]))
        before = now
    assert worst(rows[1:]) < 5


def test_many_samples():
    """There may be more than 2**32 samples, and any position is read at once."""
    order = made(2**40 + 5, 512, 64, 4)
    reader = order.reader(1)
    there = [reader.samples(3, place, 500)[0] for place in (0, 2**33, 2**40 - 495)]
    assert len(np.unique(np.concatenate(there))) == 1500
    assert max(samples.max() for samples in there) < 2**40 + 5
    for samples in there[:2]:
        assert len(np.unique(samples // 512)) <= 64


def test_of_the_data():
    """Without a number of samples, the order has as many as the data."""
    assert cseq.Blocks(4, 2).units == 0
    order = cseq.Blocks(4, 2).over(10)
    assert sorted(drawn(order, 1).tolist()) == list(range(10))
    assert "3 blocks" in order.describe()
    assert order.facts() == made(10, 4, 2, 1).facts()
    with pytest.raises(ValueError, match="window=3"):
        made(10, 4, 3, 1).resumed(order.facts(), 0, 0, 0)


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@given(SIZES, st.integers(1, 9), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_unequal_blocks_are_the_references(sizes, window, seed, epoch):
    """An epoch equals the reference, and can be read in any pieces."""
    expected = unequal_blocks(sizes, window, seed, epoch)
    check(cseq.Blocks(sizes, window), seed, epoch, expected)


@given(SIZES, st.integers(1, 9))
def test_few_unequal_blocks_are_in_use(sizes, window):
    """Blocks of other sizes come by windows, too."""
    check_window(cseq.Blocks(sizes, window), np.repeat(np.arange(len(sizes)), sizes), window)


def test_samples_of_unequal_blocks_are_anywhere_as_often():
    """A window's position does not depend on its blocks' sizes, which are sorted."""
    sizes = [2, 3, 4, 6, 8, 10, 12, 15, 18, 20, 25, 30]
    counts = np.zeros((len(sizes), 4))
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    for epoch in epochs(cseq.Blocks(sizes, 3), 1500):
        _, begun = np.unique(block_of[epoch], return_index=True)
        turns = np.argsort(np.argsort(begun)) // 3
        counts[np.arange(len(sizes)), turns] += 1
    assert abs(chi(counts, 1500 / 4, (len(sizes) - 1) * 3)) < 5


def test_samples_of_a_window_are_strangers():
    """A window of unequal blocks spreads the classes of its samples by chance."""
    sizes = np.random.default_rng(3).integers(1, 60, 300)
    order, rows = cseq.Blocks(sizes, 300), []
    for epoch in epochs(order, 25):
        where = np.argsort(epoch)
        rows.append(
            np.concatenate([scores(label, where[:2000]) for label in labels_of(order.units)[::2]])
        )
    assert worst(rows) < 5
