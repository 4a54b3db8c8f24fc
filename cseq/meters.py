"""The meters of a run as numbers: what `include/cseq_meter.h` writes, read."""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._core import now_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cseq._core import Ring

__all__ = ["METER", "Histogram", "History", "Meters"]

BUCKETS, SLOWEST = 144, 8
HISTOGRAM = np.dtype([("sum", "u8"), ("bucket", "u4", BUCKETS), ("pad", "V56")])
SLOW = np.dtype([("ns", "u8"), ("epoch", "u8"), ("batch", "u8")])
COUNTS = ["batches", "samples", "nbytes", "since", "waited", "asleep", "start", "first"]
COUNTS += ["behind", "early", "cpu", "polled", "cpu_seen", "thread"]
METER = np.dtype(
    [(name, "u8") for name in COUNTS]
    + [(name, HISTOGRAM) for name in ("work", "wait", "gil")]
    + [("slowest", SLOW, SLOWEST), ("pad", "V80")]
)
POINTS, EVERY = 512, 100_000_000  # rows of a history; ns between two at first
KEPT = {"_now", "_from", "waits", "begun"}  # by a difference
HEAD = struct.Struct(f"={len(COUNTS)}Q")
SUMS = [struct.Struct("=Q").size * len(COUNTS) + k * HISTOGRAM.itemsize for k in (0, 1)]
# Seconds from which a bucket counts; the last one is the end of the last bucket.
EDGES = np.array([(4 + k % 4) * 2.0 ** (k // 4 + 4) for k in range(BUCKETS + 1)]) / 1e9


class Histogram:
    """How long something took each time: four buckets an octave, so within 12 %.

    Attributes
    ----------
    count : int
    total : float
        Seconds, of all together.
    """

    def __init__(self, buckets: Any, total: float) -> None:
        self._buckets = np.asarray(buckets, np.int64)
        self.total = float(total)
        self.count = int(self._buckets.sum())

    @property
    def mean(self) -> float:
        """Seconds; 0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, p: float) -> float:
        """Seconds that a part `p` in [0, 1] of all took at most; 0 of nothing."""
        if not 0 <= p <= 1:
            raise ValueError(f"p={p!r} is not in [0, 1]; give 0.99 for the 99th percentile")
        if not self.count:
            return 0.0
        below, rank = self._buckets.cumsum(), p * self.count
        k = int(np.searchsorted(below, max(rank, 1)))
        part = min(max((rank - below[k]) / self._buckets[k] + 1, 0), 1)
        return float(EDGES[k] + (EDGES[k + 1] - EDGES[k]) * part)

    def mean_below(self, p: float) -> float:
        """Mean of the part `p` that took least, within 12 %; 0 of nothing."""
        left = np.clip(p * self.count - np.cumsum(self._buckets) + self._buckets, 0, self._buckets)
        middles = (EDGES[:-1] + EDGES[1:]) / 2
        return float((left * middles).sum() / left.sum()) if self.count else 0.0

    def buckets(self) -> list[tuple[float, float, int]]:
        """From, to (seconds) and count of each bucket that is not empty."""
        return [
            (float(EDGES[k]), float(EDGES[k + 1]), int(self._buckets[k]))
            for k in np.flatnonzero(self._buckets)
        ]

    def __repr__(self) -> str:
        return (
            f"Histogram(count={self.count}, mean={self.mean:.3g} s, "
            f"p50={self.quantile(0.5):.3g} s, p99={self.quantile(0.99):.3g} s)"
        )


class Meters:
    """The records of a run at one moment, or what was added between two.

    Attributes
    ----------
    batches, samples, nbytes : int
        Taken by the loop.
    elapsed, waited, start : float
        Seconds: of all epochs from the first batch on; that the loop waited then, and before.
    begun : bool
        The loop has had its first batch.
    """

    def __init__(self, copies: Sequence[bytes], now: int) -> None:
        self._copies, self._now = copies, now
        self._from = 0
        (work,), (wait,) = (struct.unpack_from("=Q", copies[0], at) for at in SUMS)
        counts = dict(zip(COUNTS, HEAD.unpack_from(copies[0]), strict=True))
        self.batches, self.samples = counts["batches"], counts["samples"]
        self.nbytes, self.start = counts["nbytes"], counts["start"] / 1e9
        self.begun = counts["first"] > 0
        since, asleep = counts["since"], counts["asleep"]
        # What is under way counts; a word that was just changed may make it a little less than 0.
        took = max(now - since, 0) if since and counts["first"] else 0
        slept = counts["waited"] + (max(now - asleep, 0) if asleep else 0) if took else 0
        self.elapsed = (work + wait + took) / 1e9 if counts["first"] else 0.0
        self.waited = (wait + min(slept, took)) / 1e9 if counts["first"] else 0.0
        self.waits = min(slept, took) / 1e9  # the present wait, so far

    @classmethod
    def read(cls, rings: Sequence[Ring]) -> Meters:
        """Read those of all rings of a pool; on any thread."""
        return cls([ring.meters() for ring in rings], now_ns())

    def has(self, at: int) -> bool:
        """Whether a time of the system's clock, in ns, is within what was measured."""
        return self._from < at <= self._now

    @cached_property
    def loop(self) -> Any:
        """The trainer's record: a structured array."""
        return np.frombuffer(self._copies[0], METER, 1).reshape(())

    @cached_property
    def runners(self) -> Any:
        """The runners' records: a structured array."""
        return np.concatenate([np.frombuffer(copy, METER)[1:] for copy in self._copies])

    @cached_property
    def busy(self) -> Any:
        """Seconds that each runner worked since the first batch, with the ticket in hand."""
        now, since = np.uint64(self._now), self.runners["since"]
        began = np.where(since > 0, np.minimum(since, now), now)
        return (self._ended + (now - began).astype(np.int64)) / 1e9

    @property
    def _ended(self) -> Any:
        """The same without the ticket in hand, in ns."""
        return (self.runners["work"]["sum"] - self.runners["first"]).astype(np.int64)

    def histogram(self, name: str, *records: Any) -> Histogram:
        """Sum up the histograms of some records: 'work', 'wait' or 'gil'."""
        found = [record[name] for record in records]
        total = sum(int(one["sum"].sum()) for one in found) / 1e9
        return Histogram(
            sum(one["bucket"].reshape(-1, BUCKETS).sum(axis=0) for one in found), total
        )

    def since(self, earlier: Meters) -> Meters:
        """Return what was added since `earlier`, which is of the same run, or of none."""
        if not len(earlier.runners):
            return self
        added = object.__new__(Meters)
        vars(added).update(
            {
                name: value - vars(earlier)[name]
                for name, value in vars(self).items()
                if isinstance(value, (int, float)) and name not in KEPT
            }
        )
        added.waits, added.begun = self.waits, self.begun
        added._from, added._now = earlier._now, self._now
        # A ticket that was under way then: of a worker that was replaced since, it never ended.
        stays = self.runners["thread"] == earlier.runners["thread"]
        begun = np.where(stays, earlier.busy, earlier._ended / 1e9)
        added.busy = np.maximum(self.busy - begun, 0)
        for name in ("loop", "runners"):
            now, then = getattr(self, name), getattr(earlier, name)
            records = now.copy()
            for count in ("batches", "behind", "early", "cpu"):
                records[count] = now[count] - then[count]
            for histogram in ("work", "wait", "gil"):
                for part in ("sum", "bucket"):
                    records[histogram][part] = now[histogram][part] - then[histogram][part]
            seen = then["slowest"]["ns"]
            records["slowest"]["ns"][np.isin(records["slowest"]["ns"], seen)] = 0
            vars(added)[name] = records
        return added


class History:
    """How a run went: a row now and then, at most 512, which cover all of it.

    When there are so many, every second one goes, and from then they come half as often.

    Attributes
    ----------
    rows : list of tuple
        When, in ns of the system's clock; then the fields of `Stats.history`.
    """

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._rings, self.rows = rings, list[Any]()
        self._every, self._due = EVERY, 0

    def note(self) -> None:
        """Add a row, if it is time for one."""
        now = now_ns()
        if now < self._due:
            return
        if len(self.rows) == POINTS:
            del self.rows[1::2]
            self._every *= 2
        self._due = now + self._every
        at, ready = Meters.read(self._rings), sum(ring.depths()[2] for ring in self._rings)
        waited, stepped = at.start + at.waited, at.elapsed - at.waited
        self.rows.append((now, at.batches, waited, stepped, ready, at.busy))
