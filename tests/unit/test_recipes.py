"""The shared parts of `Buckets` and `Packed`: random units, fingerprints and tables."""

import signal

import numpy as np
import pytest
from fair import LENGTHS
from hypothesis import given
from hypothesis import strategies as st
from reference import IV, WORD, mix

import cseq
from cseq.order._readers import fingerprint as core_fingerprint


def fingerprint(values):
    """Compute the fingerprint as the page of the orders defines it."""
    z = mix(IV ^ len(values))
    for value in values:
        z = mix(z ^ value & WORD)
    return z


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_fingerprint(values):
    """It matches the definition, for values of any type and layout."""
    expected = fingerprint(values)
    array = np.array(values, np.int64)
    assert core_fingerprint(array) == expected
    assert core_fingerprint(np.repeat(array, 3)[::3]) == expected
    assert core_fingerprint(array.astype(">i8")) == expected
    assert core_fingerprint(np.array([], np.int32)) == fingerprint([])


def test_fingerprint_of_other_types_and_of_pieces():
    """Equal integers have one fingerprint, equal floats another; long arrays go in pieces."""
    values = np.arange(200_000) % 251
    expected = fingerprint(values.tolist())
    assert all(core_fingerprint(values.astype(kind)) == expected for kind in ("u1", "i4", "u8"))
    floats = values.astype(np.float32)
    bits = values.astype(np.float64).view(np.int64)
    assert core_fingerprint(floats) == fingerprint(bits.tolist()) != expected
    values[-1] += 1
    assert core_fingerprint(values) != expected


MIXED = np.random.default_rng(0).integers(5, 40, 60)
DOCUMENTS = [40, 7, 0, 3, 16, 5, 5, 9, 33, 12]
EACH_ANYWHERE = {
    **{f"buckets, {k} together": cseq.Buckets(MIXED, 120, together=k) for k in (1, 2, 3, 7, 8, 21)},
    **{f"packed, {name}": cseq.Packed(lengths, 64) for name, lengths in LENGTHS.items()},
    "packed, split": cseq.Packed(DOCUMENTS, 16, too_long="split"),
}


@pytest.mark.parametrize("name", EACH_ANYWHERE)
def test_a_unit_comes_anywhere(name):
    """Every sample, or piece, comes equally often at every position of an epoch, even its end."""
    order = EACH_ANYWHERE[name]
    reader, counts = order.reader(3), np.zeros((order.samples, order.units))
    for number in range(2000):
        samples, sizes = reader.samples(number, 0, order.units)
        counts[samples, np.repeat(np.arange(order.units), sizes)] += 1
    there, share = counts[counts.any(1)], 1 / order.units
    expected = sum(-(-k // 16) for k in DOCUMENTS) if "split" in name else order.samples
    assert len(there) == expected
    assert np.abs(there / 2000 - share).max() < 5 * np.sqrt(share * (1 - share) / 2000)


def test_large_classes_need_no_table():
    """Classes of 65536 samples and more are computed; each sample still comes once."""
    order = cseq.Buckets(np.repeat([5, 9], [65_535, 70_000]), 1000, together=8)
    reader = order.reader(1)
    samples, sizes = reader.samples(4, 0, order.units)
    assert (np.sort(samples) == np.arange(order.samples)).all()
    assert sizes.sum() == order.samples
    middle = reader.samples(4, order.units // 2, 5)[0]
    start = sizes[: order.units // 2].sum()
    assert (middle == samples[start : start + len(middle)]).all()


@pytest.mark.needs("POSIX")
def test_a_signal_handler_runs_while_tables_are_made():
    """A long read is interrupted, here by a read of another epoch, and can be repeated."""
    order = cseq.Buckets(np.repeat(np.arange(1, 101), 60_000), 2000, ratio=1)
    reader = order.reader(3)
    expected = [order.reader(3).samples(epoch, 0, 40)[0] for epoch in (0, 1)]

    def ring(_number, _frame):
        assert (reader.samples(1, 0, 40)[0] == expected[1]).all()
        raise InterruptedError

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            reader.samples(0, 0, order.units)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    samples, sizes = reader.samples(0, 0, order.units)
    assert (samples[: sizes[:40].sum()] == expected[0]).all()
    assert (np.bincount(samples) == 1).all()
