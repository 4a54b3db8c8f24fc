"""Reads the meters of a run (include/cseq_meter.h)."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np

from cseq._core import now_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cseq._core import Ring

__all__ = ["METER", "Counts", "Histogram", "History", "Meters", "Row", "total", "words"]

Records: TypeAlias = "NDArray[np.void]"

BUCKETS, SLOWEST = 144, 8
HISTOGRAM = np.dtype([("sum", "u8"), ("bucket", "u4", BUCKETS), ("pad", "V56")])
SLOW = np.dtype([("ns", "u8"), ("epoch", "u8"), ("batch", "u8")])
COUNTS = ["batches", "samples", "nbytes", "since", "waited", "asleep", "start", "first"]
COUNTS += ["behind", "early", "cpu", "queued", "polled", "read", "cpu_seen", "queued_seen"]
COUNTS += ["epochs", "thread"]
METER = np.dtype(
    [(name, "u8") for name in COUNTS]
    + [(name, HISTOGRAM) for name in ("work", "wait", "gil")]
    + [("slowest", SLOW, SLOWEST), ("pad", "V48")]
)
# Maximum number of rows in a `History`, and the initial interval between them in ns.
POINTS, EVERY = 512, 100_000_000
# Bucket bounds in seconds.
EDGES = np.array([(4 + k % 4) * 2.0 ** (k // 4 + 4) for k in range(BUCKETS + 1)]) / 1e9


class Counts(TypedDict):
    """The loop's counts since the start of a run, for `Stats`."""

    batches: int
    samples: int
    nbytes: int
    start_waited: float
    elapsed: float
    loop_waited: float


class Row(NamedTuple):
    """A row of a `History`. `at` is its time in ns."""

    at: int
    batches: int
    waited: float
    stepped: float
    ready: int
    busy: NDArray[np.float64]


def words(records: Records, *names: str) -> NDArray[np.uint64]:
    """Return a view of a field, which may be nested."""
    field: NDArray[Any] = records
    for name in names:
        field = field[name]
    return field


def total(records: Records, *names: str) -> int:
    """Return the sum of a field over all records."""
    return int(words(records, *names).sum())


class Histogram:
    """A histogram of times, with four buckets per octave (±12%).

    Attributes
    ----------
    count : int
        The number of times recorded.
    total : float
        The sum of the times in seconds.
    """

    def __init__(self, buckets: NDArray[np.int64], total: float) -> None:
        self._buckets = np.asarray(buckets, np.int64)
        self.total = float(total)
        self.count = int(self._buckets.sum())

    @property
    def mean(self) -> float:
        """The mean time in seconds, or 0 if empty."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, p: float) -> float:
        """Return the `p`-quantile in seconds, or 0 if empty."""
        if not 0 <= p <= 1:
            raise ValueError(f"p={p!r} is not in [0, 1]; pass 0.99 for the 99th percentile")
        if not self.count:
            return 0.0
        below, rank = self._buckets.cumsum(), p * self.count
        k = int(np.searchsorted(below, max(rank, 1)))
        part = min(max((rank - below[k]) / self._buckets[k] + 1, 0), 1)
        return float(EDGES[k] + (EDGES[k + 1] - EDGES[k]) * part)

    def part_above(self, seconds: float) -> float:
        """Return the fraction of times that are at least `seconds` (±12%), or 0 if empty."""
        return float(self._buckets[EDGES[:-1] >= seconds].sum()) / max(self.count, 1)

    def mean_below(self, p: float) -> float:
        """Return the mean of the shortest fraction `p` of the times (±12%), or 0 if empty."""
        left = np.clip(p * self.count - np.cumsum(self._buckets) + self._buckets, 0, self._buckets)
        middles = (EDGES[:-1] + EDGES[1:]) / 2
        return float((left * middles).sum() / left.sum()) if self.count else 0.0

    def buckets(self) -> list[tuple[float, float, int]]:
        """Return (start, end, count) for each nonempty bucket, in seconds."""
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
    """A run's records at one point in time, or the difference between two such points.

    Attributes
    ----------
    loop, runners : numpy.ndarray
        The records of the trainer and of the runners.
    busy : numpy.ndarray
        The seconds that each runner has worked, including the current ticket.
    waits : float
        The length of the loop's current wait in seconds.
    """

    def __init__(self, blocks: Sequence[bytes], now: int) -> None:
        records: list[Records] = [np.frombuffer(block, METER) for block in blocks]
        self.loop: Records = records[0][:1].reshape(())
        self.runners: Records = np.concatenate([block[1:] for block in records])
        self._now, self._from = now, 0
        begun = words(self.runners, "since")
        in_hand = np.where(begun > 0, now - np.minimum(begun, np.uint64(now)).astype(np.int64), 0)
        self.busy: NDArray[np.float64] = (self._ended + in_hand) / 1e9
        first, since, slept, asleep = (
            total(self.loop, name) for name in ("first", "since", "waited", "asleep")
        )
        # Include the current step and wait. Concurrent updates can make a difference negative.
        self._took = max(now - since, 0) / 1e9 if since and first else 0.0
        slept += max(now - asleep, 0) if asleep else 0
        self.waits = min(slept / 1e9, self._took)

    @classmethod
    def read_rings(cls, rings: Sequence[Ring]) -> Meters:
        """Read the meters of all rings of a pool. Thread-safe."""
        return cls([ring.meters() for ring in rings], now_ns())

    def counts(self) -> Counts:
        """Return the loop's counts since the start of the run, for `Stats`."""
        loop = self.loop
        waited, worked = (total(loop, name, "sum") / 1e9 for name in ("wait", "work"))
        is_begun = total(loop, "first") > 0
        return {
            "batches": total(loop, "batches"),
            "samples": total(loop, "samples"),
            "nbytes": total(loop, "nbytes"),
            "start_waited": total(loop, "start") / 1e9,
            "elapsed": waited + worked + self._took if is_begun else 0.0,
            "loop_waited": waited + self.waits if is_begun else 0.0,
        }

    def has(self, at: int) -> bool:
        """Return True if a time (`now_ns`) is in the interval that these meters cover."""
        return self._from < at <= self._now

    @property
    def _ended(self) -> NDArray[np.int64]:
        """The time in ns that each runner has worked, excluding the current ticket."""
        ended = words(self.runners, "work", "sum") - words(self.runners, "first")
        return ended.astype(np.int64)

    def histogram(self, name: str, records: Records) -> Histogram:
        """Return the combined 'work', 'wait' or 'gil' histogram of several records."""
        buckets = words(records, name, "bucket").reshape(-1, BUCKETS).sum(axis=0)
        return Histogram(buckets, total(records, name, "sum") / 1e9)

    def since(self, earlier: Meters) -> Meters:
        """Return the increase since `earlier`, which must be empty or from the same run."""
        if not len(earlier.runners):
            return self
        added = copy(self)
        added._from = earlier._now
        # If a worker was replaced, its ticket in `earlier` is unfinished and no longer counts.
        stays = words(self.runners, "thread") == words(earlier.runners, "thread")
        begun = np.where(stays, earlier.busy, earlier._ended / 1e9)
        added.busy = np.maximum(self.busy - begun, 0)
        added.loop = _grown(self.loop, earlier.loop)
        added.runners = _grown(self.runners, earlier.runners)
        return added


def _grown(now: Records, then: Records) -> Records:
    """Return the increase in each count since `then`, and the slowest batches in that time."""
    grown: Records = now.copy()
    names: list[tuple[str, ...]] = [
        (name,) for name in ("batches", "behind", "early", "cpu", "queued", "epochs")
    ]
    names += [(name, part) for name in ("work", "wait", "gil") for part in ("sum", "bucket")]
    for path in names:
        added = words(grown, *path)
        added -= words(then, *path)
    slowest = words(grown, "slowest", "ns")
    slowest[np.isin(slowest, words(then, "slowest", "ns"))] = 0
    return grown


class History:
    """The history of a run in at most 512 rows. When it is full, the interval doubles."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._rings, self.rows = rings, list[Row]()
        self._every, self._due = EVERY, 0

    def note(self) -> None:
        """Add a row if it is due."""
        now = now_ns()
        if now < self._due:
            return
        if len(self.rows) == POINTS:
            del self.rows[1::2]
            self._every *= 2
        self._due = now + self._every
        meters, ready = (
            Meters.read_rings(self._rings),
            sum(ring.depths()[2] for ring in self._rings),
        )
        counts = meters.counts()
        waited = counts["loop_waited"]
        stepped, waited = counts["elapsed"] - waited, waited + counts["start_waited"]
        self.rows.append(Row(now, counts["batches"], waited, stepped, ready, meters.busy))
