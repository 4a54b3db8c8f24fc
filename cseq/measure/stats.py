"""Counts and times for a run so far, and which side waits for the other."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from cseq.check import integer
from cseq.measure.meters import METER, Meters, total, words
from cseq.system import share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    from cseq._core import Ring
    from cseq.measure.advice import Advice, Window
    from cseq.measure.meters import Histogram, Row

__all__ = ["CACHES", "Every", "SlowBatch", "Stats", "WorkerStats"]
__all__ += ["added", "counting", "read_stats"]

log = logging.getLogger("cseq")

ADDED: tuple[str, ...] = ("batches", "samples", "nbytes", "restarts", "retries", "skips", "copies")
ADDED += ("loop_waited", "elapsed", "start_waited")
ADDED += ("gpu_waits", "gpu_dry", "cache_hits", "cache_misses")
# The caches currently open in this process.
CACHES: weakref.WeakSet[Cache] = weakref.WeakSet()
# The meters of a loop that has no runners and has not started.
NOTHING = Meters([bytes(METER.itemsize)], 0)


class Cache(Protocol):
    """A cache created by `cseq.cached`."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of samples that were read, made and kept, and made but not kept."""


def _counted(cache: Cache) -> tuple[int, int, int]:
    hits, made, refused = cache.counts()
    return hits, made + refused, cache.nbytes


class WorkerStats(NamedTuple):
    """Statistics for one worker.

    Attributes
    ----------
    number : int
        The worker number, starting at 0.
    pid : int
        The id of the worker's process or system thread, or 0 if unknown.
    batches : int
    busy : float
        The fraction of the time during which the worker worked.
    cpu : float or None
        The worker's CPU time as a fraction of `busy`, which can exceed 1 with several threads, or
        None if unknown.
    p50, p99 : float
        The median and the 99th percentile of the worker's seconds per batch.
    """

    number: int
    pid: int
    batches: int
    busy: float
    cpu: float | None
    p50: float
    p99: float


class SlowBatch(NamedTuple):
    """A slow batch, which `manager.remake(epoch, batch)` can make again.

    Attributes
    ----------
    epoch, batch : int
        In a stream, `batch` is the item number.
    seconds : float
    worker : int
    """

    epoch: int
    batch: int
    seconds: float
    worker: int


@dataclass(frozen=True)
class Stats:
    """A manager's counts and times since its start, over all epochs.

    Times are measured from the first batch of each epoch, excluding startup and any pauses between
    epochs. Processes, threads and streams are all timed the same way. Properties are computed on
    access.

    Attributes
    ----------
    batches, samples : int
        The numbers that the loop has received. Test mode counts only batches and skips.
    nbytes : int
        The bytes of shared memory used by the batches.
    restarts : int
        The number of worker processes that were replaced.
    retries : int
        The number of batches that were remade after their worker died.
    skips : int
        The number of batches left out because their indexer raised (``on_error='skip'``).
    copies : int
        The number of batches copied out of shared memory because too many were held.
    depths : (int, int, int)
        The numbers of tickets currently waiting for an indexer, a converter and the loop.
    loop_waited : float
        The seconds that the loop waited for batches.
    elapsed : float
        The duration of the epochs in seconds, including `loop_waited`.
    start_waited : float
        The seconds that the loop waited for its first batch, including imports and constructors.
    num_workers, num_converters : int
        With a fleet, each worker is a local thread that requests batches from a remote worker.
    buffer : int
        The maximum number of batches ahead of the loop, or 0 for streams.
    gpu_waits, gpu_dry : int
        The number of waits for a batch while the loop's thread used CUDA, and the number of those
        waits after which the GPU had no work left.
    cache_hits, cache_misses : int
        The numbers of samples that all processes have read from this process's caches
        (`cseq.cached`) and of samples that they have made.
    cache_nbytes : int
        The total size of this process's caches in bytes.
    source_tokens : dict of str to int
        With `cseq.tokens.Rows`, the number of tokens per source that all ranks have received, as in
        the manager's state. A resumed run continues the count.
    """

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    restarts: int = 0
    retries: int = 0
    skips: int = 0
    copies: int = 0
    depths: tuple[int, int, int] = (0, 0, 0)
    loop_waited: float = 0.0
    elapsed: float = 0.0
    start_waited: float = 0.0
    num_workers: int = 0
    num_converters: int = 0
    buffer: int = 0
    gpu_waits: int = 0
    gpu_dry: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_nbytes: int = 0
    source_tokens: dict[str, int] = field(default_factory=dict)
    # True if the workers are threads that share a GIL with the loop.
    threads: bool = field(default=False, repr=False)
    meters: Meters = field(default=NOTHING, repr=False, compare=False)
    past: Sequence[Row] = field(default=(), repr=False, compare=False)

    @classmethod
    def read(cls, rings: Sequence[Ring], **counted: Any) -> Stats:
        """Read the counts from a pool's rings. Thread-safe."""
        meters = Meters.read_rings(rings)
        hits, misses, held = (
            sum(column) for column in zip((0, 0, 0), *map(_counted, [*CACHES]), strict=True)
        )
        posted, middle, ready = zip(*(ring.depths() for ring in rings), strict=True)
        return cls(
            **meters.counts(),
            depths=(sum(posted), sum(middle), sum(ready)),
            buffer=rings[0].limit if rings[0].kept is None else 0,
            meters=meters,
            cache_hits=hits,
            cache_misses=misses,
            cache_nbytes=held,
            **counted,
        )

    @property
    def loop_waiting(self) -> float:
        """The fraction of the time that the loop waited."""
        return _part(self.loop_waited, self.elapsed)

    @property
    def workers_waiting(self) -> float:
        """The fraction of the time that workers waited, averaged over all workers."""
        return self._waiting(self.meters.busy[self._indexers], self.num_workers)

    @property
    def index_seconds(self) -> Histogram:
        """The workers' times per batch, from claim to delivery."""
        return self.meters.histogram("work", self.meters.runners[self._indexers])

    @property
    def step_seconds(self) -> Histogram:
        """The loop's own times per batch, excluding waits."""
        return self.meters.histogram("work", self.meters.loop)

    @property
    def wait_seconds(self) -> Histogram:
        """The loop's waits for batches that were not ready."""
        return self.meters.histogram("wait", self.meters.loop)

    @property
    def workers(self) -> tuple[WorkerStats, ...]:
        """The statistics of each worker, including former workers."""
        stats = []
        records = self.meters.runners[self._indexers]
        counted = np.flatnonzero(words(records, "batches"))
        count = max(self.num_workers, int(counted[-1]) + 1 if len(counted) else 0)
        for number in range(min(count, len(records))):
            record = records[number : number + 1]
            work = self.meters.histogram("work", record)
            busy, cpu = float(self.meters.busy[number]), total(record, "cpu") / 1e9
            stats.append(
                WorkerStats(
                    number,
                    total(record, "thread"),
                    total(record, "batches"),
                    _part(busy, self.elapsed),
                    _cpu(cpu, busy),
                    work.quantile(0.5),
                    work.quantile(0.99),
                )
            )
        return tuple(stats)

    @property
    def slowest(self) -> tuple[SlowBatch, ...]:
        """The eight slowest batches of each worker, slowest first."""
        slow: list[list[tuple[int, int, int]]]
        slow = words(self.meters.runners[self._indexers], "slowest").tolist()
        # Streams count epochs from 1.
        batches = [
            SlowBatch(epoch - (not self.buffer), batch, ns / 1e9, k)
            for k, rows in enumerate(slow)
            for ns, epoch, batch in rows
            if ns
        ]
        return tuple(sorted(batches, key=lambda slow: -slow.seconds))

    @property
    def history(self) -> NDArray[np.void]:
        """The run's history as a structured array of up to 512 rows since the first batch.

        Rows are initially 0.1 s apart. The interval grows, so the rows always cover the whole run.
        The fields are `seconds` since the start; the cumulative values `batches`, `waited` and
        `stepped` (the loop's seconds) and `busy` (each worker's seconds, shape (workers,)); and
        `ready`, the number of batches that were ready for the loop at that time.
        """
        workers = len(self.meters.runners[self._indexers])
        fields = [("seconds", "f8"), ("batches", "i8"), ("waited", "f8"), ("stepped", "f8")]
        row = np.dtype([*fields, ("ready", "i4"), ("busy", "f8", (workers,))])
        begun = self._first - total(self.meters.loop, "start")
        rows = [
            ((point.at - begun) / 1e9, *point[1:-1], point.busy[self._indexers])
            for point in list(self.past)
            if self.meters.has(point.at)
        ]
        return np.array(rows, row)

    @property
    def bottleneck(self) -> str:
        """The cause in `advice` that limits the batch rate, such as 'workers' or 'loop'."""
        return self.advice().cause

    def advice(self) -> Advice:
        """Return the reason that the loop waits, and the remedy. See docs/how-to/slow.md."""
        from cseq.measure.advice import advise

        return advise(self.window())

    def since(self, earlier: Stats) -> Stats:
        """Return the counts since `earlier`, which must be from the same run.

        Examples
        --------
        >>> before = manager.stats()  # doctest: +SKIP
        >>> manager.stats().since(before).loop_waiting  # doctest: +SKIP
        0.07
        """
        if earlier.batches > self.batches or earlier._first not in (0, self._first):
            raise ValueError("`earlier` is of another run: pass an earlier stats() of this run")
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in ADDED}
        before, now = earlier.source_tokens, self.source_tokens
        grown["source_tokens"] = {name: now[name] - before.get(name, 0) for name in now}
        return replace(self, meters=self.meters.since(earlier.meters), **grown)

    def as_dict(self, prefix: str = "cseq/") -> dict[str, float]:
        """Return a flat dict of figures for a logger. The keys never change."""
        index, waits, workers = self.index_seconds, self.wait_seconds, self.num_workers
        window = self.window()
        elapsed = self.elapsed or 1.0
        figures = {
            "batches_per_s": self.batches / elapsed,
            "samples_per_s": self.samples / elapsed,
            "bytes_per_s": self.nbytes / elapsed,
            "wait_fraction": self.loop_waiting,
            "step_ms": self.step_seconds.mean * 1e3,
            "wait_ms_p99": waits.quantile(0.99) * 1e3,
            "index_ms_mean": index.mean * 1e3,
            "index_ms_p50": index.quantile(0.5) * 1e3,
            "index_ms_p99": index.quantile(0.99) * 1e3,
            "worker_busy": 1 - self.workers_waiting if workers else 0.0,
            "worker_cpu": 0.0 if window.cpu is None else window.cpu,
            "ready_depth": self.depths[2],
            "first_batch_s": self.start_waited,
            "restarts": self.restarts,
            "retries": self.retries,
            "copies": self.copies,
            "skips": self.skips,
        }
        figures |= {f"tokens/{name}": count for name, count in self.source_tokens.items()}
        return {prefix + name: float(value) for name, value in figures.items()}

    @staticmethod
    def every(n: int, manager: Any) -> Every:
        """Return an object that reports figures for every `n` steps of a loop that starts now.

        Parameters
        ----------
        n : int
        manager : manager or DataLoader

        Returns
        -------
        Every
            Its method `at(step)`, with `step` starting at 1, returns `as_dict` for the last `n`
            steps if `step` is a multiple of `n`, and {} otherwise.

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(24), batch_size=2, out_type="null")
        >>> with manager.start_test() as batches:
        ...     every = cseq.Stats.every(5, batches)
        ...     for step, batch in enumerate(batches, 1):
        ...         if figures := every.at(step):
        ...             print(step, len(figures))
        5 17
        10 17
        """
        return Every(manager, n)

    def window(self) -> Window:
        """Return the figures for `advice`."""
        from cseq.measure.advice import GIL, Window, duration

        meters = self.meters
        runners, loop = meters.runners[self._indexers], meters.loop
        index, step = self.index_seconds, self.step_seconds
        # If steps are uneven, omit the longest 5%, which contain pauses.
        even = step.quantile(0.99) <= 3 * step.quantile(0.5)
        busy = float(meters.busy[self._indexers].sum())
        queued = total(runners, "queued") / 1e9
        gil = meters.histogram("gil", meters.runners)
        early = total(loop, "early") / 1e9
        # Workers start in sequence. In the only epoch, waits for first batches count as startup.
        first = 0.0 if total(loop, "epochs") else min(early, self.loop_waited)
        waited = self.loop_waited - first
        computed = total(meters.runners, "cpu") + total(loop, "cpu") if self.threads else 0
        # The recorded `behind` excludes the current wait, which is still in progress.
        ready, behind = self.depths[2], total(loop, "behind") / 1e9
        if meters.waits and ready and ready >= sum(self.depths[:2]):
            behind += meters.waits
        slowest = next(iter(self.slowest), None)
        return Window(
            batches=self.batches,
            size=self.samples / max(self.batches, 1),
            elapsed=self.elapsed - first,
            waited=waited,
            start=self.start_waited,
            first=first,
            step=step.mean if even else step.mean_below(0.95),
            step_p99=step.quantile(0.99),
            index=index.mean,
            index_p99=index.quantile(0.99),
            workers=self.num_workers,
            busy=1 - self.workers_waiting,
            cpu=_cpu(total(runners, "cpu") / 1e9, busy),
            queued=_part(queued, busy),
            loop_cpu=_part(total(loop, "cpu") / 1e9, self.elapsed) or 1.0,
            loop_queued=_part(total(loop, "queued") / 1e9, self.elapsed),
            cores=share(),
            threads=self.threads,
            gil=gil.quantile(0.8),
            gil_long=gil.part_above(GIL),
            computed=_part(computed / 1e9, self.elapsed, most=1e9),
            buffer=self.buffer,
            behind=_part(behind, self.loop_waited),
            early=_part(early - first, waited),
            converters=self.num_converters,
            converting=1 - self._waiting(meters.busy[self._converters], self.num_converters),
            copies=self.copies,
            dry=self.gpu_dry / self.gpu_waits if self.gpu_waits else None,
            slowest=""
            if slowest is None
            else f"epoch {slowest.epoch}, batch {slowest.batch}: {duration(slowest.seconds)}",
        )

    @property
    def _indexers(self) -> slice:
        """The slice of the indexers' records, which precede the converters' records."""
        return slice(0, max(0, len(self.meters.runners) - self.num_converters))

    @property
    def _converters(self) -> slice:
        return slice(self._indexers.stop, None)

    @property
    def _first(self) -> int:
        """The system clock time of the first batch, or 0. This time identifies the run."""
        return total(self.meters.loop, "first")

    def _waiting(self, busy: NDArray[np.float64], count: int) -> float:
        """Return the fraction of the time in which `count` runners did not work."""
        of = self.elapsed * count
        return _part(of - float(busy.sum()), of)


class Counting(Protocol):
    """An object with a `stats` method, such as a cseq manager or a loader."""

    def stats(self) -> Stats:
        """Return the counts so far."""


def counting(manager: object) -> Counting:
    """Return the manager after checking that it has `stats`."""
    if not hasattr(manager, "stats"):
        raise TypeError(
            f"manager={manager!r} has no stats(); pass a manager of cseq or a cseq.DataLoader"
        )
    counts: Counting = manager
    return counts


def read_stats(manager: Counting) -> Stats | None:
    """Return the stats, or None if a DataLoader currently has no workers."""
    try:
        return manager.stats()
    except RuntimeError:
        return None


def added(now: Stats, earlier: Stats | None) -> Stats:
    """Return the stats since `earlier`, or all stats if `earlier` is None or from another run."""
    try:
        return now if earlier is None else now.since(earlier)
    except ValueError:
        return now


class Every:
    """Reports a loader's figures every `n` steps, across restarts.

    Parameters
    ----------
    manager : manager or DataLoader
    n : int
    """

    def __init__(self, manager: object, n: int) -> None:
        self._manager, self._n, self._has_warned = counting(manager), integer("n", n), False
        self._before = read_stats(self._manager)

    def at(self, step: int) -> dict[str, float]:
        """Return figures for the last `n` steps, or {} if `step` is not a multiple of `n`."""
        if step % self._n:
            return {}
        before, self._before = self._before, read_stats(self._manager)
        if self._before is None:
            if not self._has_warned:
                log.warning("no figures to log: this loader has no worker processes of cseq")
            self._has_warned = True
            return {}
        return added(self._before, before).as_dict()


def _part(seconds: float, of: float, most: float = 1.0) -> float:
    """Return a fraction, clipped to [0, most], or 0 if `of` is 0."""
    return max(0.0, min(seconds / of, most)) if of > 0 else 0.0


def _cpu(computed: float, worked: float) -> float | None:
    """Return the fraction of work time spent computing, or None if unknown."""
    return computed / worked if computed > 0 and worked > 0 else None
