"""The meters: records, histograms, and differences between two readings."""

import bisect
import pickle
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexers import Slow
from ringing import Trainer, claim, make_ring, stamps

import cseq
from cseq._core import now_ns
from cseq.measure.meters import Histogram, Meters


def work(ring, owner, batches):
    """Make a runner publish tickets that take the given times (ns)."""
    trainer = Trainer(ring, batches, recorded=True)
    for _ in range(batches):
        claim(ring, owner).publish()
        trainer.take()
    return [published - started for started, published in stamps()]


def test_what_a_runner_has_done():
    """Each ticket is in its runner's histogram, with its own time, in the bucket around it."""
    ring = make_ring()
    took = work(ring, 2, 200)
    meters = Meters.read_rings([ring])
    found = meters.histogram("work", meters.runners[1])
    assert meters.runners["batches"].tolist() == [0, 200, 0]
    assert (found.count, found.total) == (200, sum(took) / 1e9)
    assert found.buckets() == buckets_of(took).buckets()
    assert ring.published(2) == 200
    slow = [tuple(one) for one in meters.runners[1]["slowest"].tolist()]
    assert [ns for ns, _, _ in slow] == sorted(took, reverse=True)[:8]
    assert {(epoch, took[batch]) for _, epoch, batch in slow} == {(9, ns) for ns, _, _ in slow}
    assert meters.histogram("work", meters.runners).count == 200
    for owner in (0, 4):
        with pytest.raises(IndexError):
            ring.published(owner)


def test_a_ticket_in_hand_counts():
    """A runner works from its claim until its ticket is published, or posted again."""
    ring = make_ring()
    Trainer(ring, 2)
    claim(ring).publish()
    before = Meters.read_rings([ring])
    claim(ring)
    begun, worked = now_ns(), before.busy[0]
    while now_ns() < begun + 1_000_000:
        pass
    assert Meters.read_rings([ring]).busy[0] > worked + 0.0009
    ring.repost(1)
    assert Meters.read_rings([ring]).busy[0] == worked


def buckets_of(times):
    """Count times as a ring does: in C, by a runner's waits."""
    edges = [round(low * 1e9) for low, _, _ in Histogram(np.ones(144), 0.0).buckets()]
    counts = np.zeros(144, int)
    for ns in times:
        counts[max(0, bisect.bisect_right(edges, ns) - 1)] += 1
    return Histogram(counts, sum(times) / 1e9)


@given(
    st.lists(st.integers(64, 2**41), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles(times, p):
    """They are off by at most a bucket, a quarter of its start; the mean is exact."""
    histogram = buckets_of(times)
    exact = np.quantile(np.array(times, float), p, method="inverted_cdf") / 1e9
    assert exact / 1.2501 <= histogram.quantile(p) <= exact * 1.2501
    assert histogram.mean == pytest.approx(np.mean(times) / 1e9)
    assert sum(count for _, _, count in histogram.buckets()) == histogram.count == len(times)
    assert 0 <= histogram.mean_below(0.95) <= 1.13 * max(times) / 1e9


def test_no_histogram():
    """Without data, all is 0."""
    nothing = Histogram([0], 0.0)
    assert (nothing.count, nothing.mean, nothing.quantile(0.5), nothing.buckets()) == (0, 0, 0, [])
    assert nothing.mean_below(0.95) == 0
    assert "count=0" in repr(nothing)
    with pytest.raises(ValueError, match=r"p=99 is not in \[0, 1\]"):
        nothing.quantile(99)


@pytest.mark.parametrize("kind", [cseq.MPSequence, cseq.MTSequence])
def test_how_a_run_went(kind):
    """The rows of the history grow, and end at most 0.1 s, or one wait, before the end."""
    manager = kind(partial(Slow, 0.02), 60, batch_size=1, out_type="null", num_workers=2)
    with manager.start() as batches:
        iterator = iter(batches)
        for _ in range(30):
            next(iterator)
        middle = manager.stats()
        for _ in iterator:
            pass
        stats = manager.stats()
    rows, later = stats.history, stats.since(middle).history
    assert rows.dtype["busy"].shape == (2,)
    assert rows["seconds"][0] >= stats.start_waited
    assert len(rows) >= 3
    for name, least in (("seconds", 1e-9), ("batches", 1), ("waited", 0), ("stepped", 0)):
        assert (np.diff(rows[name]) >= least).all()
    assert rows["batches"][-1] <= 60
    # This allows for the rounding of floats.
    assert rows["waited"][-1] <= stats.start_waited + stats.loop_waited + 1e-6
    assert (rows["busy"][-1] <= rows["seconds"][-1] + 0.001).all()
    assert rows["busy"][-1].sum() > 0.5 * 0.02 * rows["batches"][-1]
    assert 0 < len(later) < len(rows)
    assert later["batches"][0] > 29
    assert len(manager.stats().history) == len(rows), "kept after the end"
    other, early = pickle.loads(pickle.dumps(stats)), pickle.loads(pickle.dumps(middle))
    assert np.array_equal(other.history, rows)
    assert np.array_equal(other.since(early).history, later)
    assert str(other.advice()) == str(stats.advice())


def test_a_run_of_short_epochs():
    """Epochs shorter than a tenth of a second have a history, too."""
    with cseq.MTSequence(np.arange(4), 4, batch_size=1, out_type="null").start() as batches:
        for _ in range(40):
            for _ in batches:
                time.sleep(0.002)
        rows = batches.stats().history
    assert len(rows) >= 3
    assert (np.diff(rows["batches"]) > 0).all()
