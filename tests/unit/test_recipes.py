"""What `Buckets`, `Packed` and `Groups` have in common: any unit at once, any ranks."""

import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import IV, WORD, mix

import cseq
from cseq.order._readers import fingerprint as core_fingerprint


def fingerprint(values):
    """Compute it as the page of the orders says."""
    z = mix(IV ^ len(values))
    for value in values:
        z = mix(z ^ value & WORD)
    return z


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_fingerprint(values):
    """It is that of the definition, whatever type and layout the values have."""
    expected = fingerprint(values)
    array = np.array(values, np.int64)
    assert core_fingerprint(array) == expected
    assert core_fingerprint(np.repeat(array, 3)[::3]) == expected
    assert core_fingerprint(array.astype(">i8")) == expected
    assert core_fingerprint(np.array([], np.int32)) == fingerprint([])


def test_fingerprint_of_other_types_and_of_pieces():
    """Equal integers have one fingerprint, equal floats another one; long arrays go in pieces."""
    values = np.arange(200_000) % 251
    expected = fingerprint(values.tolist())
    assert all(core_fingerprint(values.astype(kind)) == expected for kind in ("u1", "i4", "u8"))
    floats = values.astype(np.float32)
    bits = values.astype(np.float64).view(np.int64)
    assert core_fingerprint(floats) == fingerprint(bits.tolist()) != expected
    values[-1] += 1
    assert core_fingerprint(values) != expected


# ── large ones ────────────────────────────────────────────────────────────────────────────────


def test_large_classes_need_no_table():
    """Classes of 65536 samples and more are computed; each sample comes once all the same."""
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
    """A long read is interrupted, here by a read of another epoch, and can be taken up again."""
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
