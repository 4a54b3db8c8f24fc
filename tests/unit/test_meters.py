"""The meters: records, histograms, what lies between two readings."""

from __future__ import annotations

import bisect
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ringing
from hypothesis import given
from hypothesis import strategies as st
from ringing import claim, make_ring

import cseq
from cseq._core import Ring, now_ns
from cseq.measure.meters import Histogram, Meters

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cseq._work import Runner


def make(ring: Ring, owner: int, batch: int) -> Runner:
    """Post, claim and publish a ticket."""
    cell = ringing.vacant(ring)
    ring.indices(cell)[0] = batch
    ringing.post(ring, cell, batch, 5, batch, 1, start=batch)
    runner = claim(ring, owner)
    runner.publish()
    ringing.take(ring)
    return runner


def test_what_a_runner_has_done() -> None:
    """Each ticket is in the histogram of its runner, with its own time."""
    ring, took = make_ring(), []
    for batch in range(20):
        make(ring, 2, batch)
        (started, published), _ = ring.stamps(0)
        took.append(published - started)
    meters = Meters.read([ring])
    work = meters.histogram("work", meters.runners[1])
    assert meters.runners["batches"].tolist() == [0, 20, 0]
    assert (work.count, work.total) == (20, sum(took) / 1e9)
    assert ring.published(2) == 20
    slow = [tuple(one) for one in meters.runners[1]["slowest"].tolist()]
    assert [ns for ns, _, _ in slow] == sorted(took, reverse=True)[:8]
    assert {(epoch, took[batch]) for _, epoch, batch in slow} == {(5, ns) for ns, _, _ in slow}
    assert meters.histogram("work", meters.runners).count == 20
    for owner in (0, 4):
        with pytest.raises(IndexError):
            ring.published(owner)


def test_a_ticket_in_hand_counts() -> None:
    """A runner works from its claim on, until its ticket is published, or posted again."""
    ring = make_ring()
    runner = make(ring, 1, 0)
    before = Meters.read([ring])
    ringing.post(ring, 0, 1, 5, 1, 1)
    assert runner.claim()
    begun, worked = now_ns(), before.busy[0]
    while now_ns() < begun + 1_000_000:
        pass
    assert Meters.read([ring]).busy[0] > worked + 0.0009
    ring.repost(1)
    assert Meters.read([ring]).busy[0] == worked


def buckets_of(times: list[int]) -> Histogram:
    """Count times as a ring does: in C, by waits of a runner."""
    edges = [round(low * 1e9) for low, _, _ in Histogram(np.ones(144), 0.0).buckets()]
    counts: Any = np.zeros(144, int)
    for ns in times:
        counts[max(0, bisect.bisect_right(edges, ns) - 1)] += 1
    return Histogram(counts, sum(times) / 1e9)


@given(
    st.lists(st.integers(64, 2**41), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles(times: list[int], p: float) -> None:
    """They are off by a bucket at most: a quarter of its beginning; the mean is exact."""
    histogram = buckets_of(times)
    exact = np.quantile(np.array(times, float), p, method="inverted_cdf") / 1e9
    assert exact / 1.2501 <= histogram.quantile(p) <= exact * 1.2501
    assert histogram.mean == pytest.approx(np.mean(times) / 1e9)
    assert sum(count for _, _, count in histogram.buckets()) == histogram.count == len(times)
    assert 0 <= histogram.mean_below(0.95) <= 1.13 * max(times) / 1e9


def test_the_edges_are_those_of_the_ring() -> None:
    """The bucket that C counts a time in is the one whose edges are around it."""
    ring, took = make_ring(), []
    for batch in range(200):
        make(ring, 1, batch)
        (started, published), _ = ring.stamps(0)
        took.append(published - started)
    meters = Meters.read([ring])
    found = meters.histogram("work", meters.runners[0])
    assert found.buckets() == buckets_of(took).buckets()


def test_no_histogram() -> None:
    """Of nothing, all is 0."""
    nothing = Histogram([0], 0.0)
    assert (nothing.count, nothing.mean, nothing.quantile(0.5), nothing.buckets()) == (0, 0, 0, [])
    assert nothing.mean_below(0.95) == 0
    assert "count=0" in repr(nothing)
    with pytest.raises(ValueError, match=r"p=99 is not in \[0, 1\]"):
        nothing.quantile(99)


class Paced:
    """Takes 20 ms."""

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        time.sleep(0.02)
        return indices


@pytest.mark.parametrize("kind", [cseq.MPSequence, cseq.MTSequence])
def test_how_a_run_went(kind: type[cseq.MTSequence[Any]]) -> None:
    """Rows of the history grow, and end at most a tenth of a second, or a wait, before the end."""
    manager = kind(Paced, 60, batch_size=1, out_type="null", num_workers=2)
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
    for name in ("seconds", "batches"):
        assert (np.diff(rows[name]) > 0).all()
    for name in ("waited", "stepped"):
        assert (np.diff(rows[name]) >= 0).all()
    assert rows["batches"][-1] <= 60
    assert rows["waited"][-1] <= stats.start_waited + stats.loop_waited + 1e-6  # floats
    assert (rows["busy"][-1] <= rows["seconds"][-1] + 0.001).all()
    assert rows["busy"][-1].sum() > 0.5 * 0.02 * rows["batches"][-1]
    assert 0 < len(later) < len(rows)
    assert later["batches"][0] > 29
    assert len(manager.stats().history) == len(rows), "kept after the end"
    other, early = pickle.loads(pickle.dumps(stats)), pickle.loads(pickle.dumps(middle))
    assert np.array_equal(other.history, rows)
    assert np.array_equal(other.since(early).history, later)
    assert str(other.advice()) == str(stats.advice())


def test_a_run_of_short_epochs() -> None:
    """Epochs of less than a tenth of a second have a history, too."""
    with cseq.MTSequence(np.arange(4), 4, batch_size=1, out_type="null").start() as batches:
        for _ in range(40):
            for _ in batches:
                time.sleep(0.002)
        rows = batches.stats().history
    assert len(rows) >= 3
    assert (np.diff(rows["batches"]) > 0).all()
