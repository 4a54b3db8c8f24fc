"""Statistics on a run."""

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
# The caches that are open in this process.
CACHES: weakref.WeakSet[Cache] = weakref.WeakSet()
# The meters of a loop that has not started and has no runners.
NOTHING = Meters([bytes(METER.itemsize)], 0)


class Cache(Protocol):
    """A cache, as created by `cseq.cached`."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def counts(self) -> tuple[int, int, int]:
        """Return how many samples were read, were made and kept, and were made but not kept."""


def _counted(cache: Cache) -> tuple[int, int, int]:
    hits, made, refused = cache.counts()
    return hits, made + refused, cache.nbytes


class WorkerStats(NamedTuple):
    """Statistics on a worker.

    Attributes
    ----------
    number : int
        The worker's number, starting from 0.
    pid : int
        The id of the worker's process or thread, or 0 if it is unknown.
    batches : int
        The number of batches that the worker has made.
    busy : float
        The fraction of the time that the worker has spent on batches.
    cpu : float or None
        The CPU time as a fraction of `busy`, or None if it is unknown. With several threads, it may
        be larger than 1.
    p50, p99 : float
        The median and the 99th percentile of the time per batch in seconds.
    """

    number: int
    pid: int
    batches: int
    busy: float
    cpu: float | None
    p50: float
    p99: float


class SlowBatch(NamedTuple):
    """A slow batch. Call `manager.remake(epoch, batch)` to make it again.

    Attributes
    ----------
    epoch, batch : int
        The epoch, and the number of the batch (for a stream, the item) within it.
    seconds : float
        The time to make the batch, in seconds.
    worker : int
        The number of the worker that made the batch.
    """

    epoch: int
    batch: int
    seconds: float
    worker: int


@dataclass(frozen=True)
class Stats:
    """Statistics on a manager since its start, over all epochs.

    Times are counted from the first batch of the run, and from the start of each later epoch. They
    do not include the startup or pauses between epochs.

    Attributes
    ----------
    batches, samples : int
        The number of batches and samples that the loop has received. In test mode, only batches and
        skips are counted.
    nbytes : int
        How many bytes of shared memory the batches have used.
    restarts : int
        The number of worker processes that were replaced.
    retries : int
        The number of batches that were made again because a worker died.
    skips : int
        The number of batches skipped because the indexer raised an exception (``on_error='skip'``).
    copies : int
        The number of batches that were copied because the loop held too many others.
    depths : (int, int, int)
        How many tickets are waiting for an indexer, for a converter, and for the loop.
    loop_waited : float
        How many seconds the loop has waited for batches.
    elapsed : float
        The duration of the epochs in seconds, including `loop_waited`.
    start_waited : float
        How many seconds the loop waited for its first batch.
    num_workers, num_converters : int
        The number of workers and converters. With a fleet, a worker is a local thread that requests
        batches from a remote worker.
    buffer : int
        The maximum number of batches ahead of the loop, or 0 for streams.
    gpu_waits, gpu_dry : int
        How often the loop has waited for a batch while using CUDA, and how often the GPU was idle
        when the batch arrived.
    cache_hits, cache_misses : int
        How many samples all processes together have read from the caches (`cseq.cached`) that this
        process has open, and how many they had to make.
    cache_nbytes : int
        The total size of the caches that are open in this process, in bytes.
    source_tokens : dict of str to int
        With `cseq.tokens.Rows`, the number of tokens per source that all ranks have received. The
        counts continue when a run is resumed.
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
    # Whether the workers are threads that share the GIL.
    threads: bool = field(default=False, repr=False)
    meters: Meters = field(default=NOTHING, repr=False, compare=False)
    past: Sequence[Row] = field(default=(), repr=False, compare=False)

    @classmethod
    def read(cls, rings: Sequence[Ring], **counted: Any) -> Stats:
        """Read the meters of a pool. Thread-safe."""
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
        """The mean fraction of the time that workers waited."""
        return self._waiting(self.meters.busy[self._indexers], self.num_workers)

    @property
    def index_seconds(self) -> Histogram:
        """How long workers took per batch."""
        return self.meters.histogram("work", self.meters.runners[self._indexers])

    @property
    def step_seconds(self) -> Histogram:
        """How long the loop took per batch, excluding waits."""
        return self.meters.histogram("work", self.meters.loop)

    @property
    def wait_seconds(self) -> Histogram:
        """How long the loop waited for batches that were not ready."""
        return self.meters.histogram("wait", self.meters.loop)

    @property
    def workers(self) -> tuple[WorkerStats, ...]:
        """Statistics on each worker, including former workers."""
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
        """The history of the run, as a structured array with at most 512 rows.

        Rows are 0.1 s apart at first, and further apart later. The fields are `seconds` since the
        loop asked for its first batch, the number of `batches`, the seconds that the loop spent
        waiting (`waited`) and on its steps (`stepped`), the seconds that each worker was `busy`,
        with shape (workers,), and the number of `ready` batches.
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
        """The cause that `advice` names, such as 'workers' or 'loop'."""
        return self.advice().cause

    def advice(self) -> Advice:
        """Return why the loop is waiting and what would help. See docs/how-to/slow.md."""
        from cseq.measure.advice import advise

        return advise(self.window())

    def since(self, earlier: Stats) -> Stats:
        """Return the statistics since `earlier`, which must be from the same run.

        Examples
        --------
        >>> before = manager.stats()  # doctest: +SKIP
        >>> manager.stats().since(before).loop_waiting  # doctest: +SKIP
        0.07
        """
        if earlier.batches > self.batches or earlier._first not in (0, self._first):
            raise ValueError("earlier= is from a different run; pass a stats() result of this run")
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in ADDED}
        before, now = earlier.source_tokens, self.source_tokens
        grown["source_tokens"] = {name: now[name] - before.get(name, 0) for name in now}
        return replace(self, meters=self.meters.since(earlier.meters), **grown)

    def as_dict(self, prefix: str = "cseq/") -> dict[str, float]:
        """Return a flat dict of figures for a logger. The keys are always the same."""
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
        """Return an object that reports figures every `n` steps for a loop that starts now.

        Parameters
        ----------
        n : int
            The number of steps between reports.
        manager : manager or DataLoader
            The manager or DataLoader that the loop iterates over.

        Returns
        -------
        Every
            An object whose method `at(step)` returns `as_dict` for the last `n` steps if `step` is
            a multiple of `n`, or otherwise {}. Steps are counted from 1.

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
        # If steps are uneven, leave out the longest 5%, which include pauses.
        even = step.quantile(0.99) <= 3 * step.quantile(0.5)
        busy = float(meters.busy[self._indexers].sum())
        queued = total(runners, "queued") / 1e9
        gil = meters.histogram("gil", meters.runners)
        early = total(loop, "early") / 1e9
        # Workers start one after another. If there is only one epoch, waiting for their first
        # batches counts as startup.
        first = 0.0 if total(loop, "epochs") else min(early, self.loop_waited)
        waited = self.loop_waited - first
        computed = total(meters.runners, "cpu") + total(loop, "cpu") if self.threads else 0
        # `behind` does not yet include the current wait.
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
        """The slice that holds the indexers' records. The converters' records follow it."""
        return slice(0, max(0, len(self.meters.runners) - self.num_converters))

    @property
    def _converters(self) -> slice:
        return slice(self._indexers.stop, None)

    @property
    def _first(self) -> int:
        """The time (`now_ns`) of the first batch, or 0. It identifies the run."""
        return total(self.meters.loop, "first")

    def _waiting(self, busy: NDArray[np.float64], count: int) -> float:
        of = self.elapsed * count
        return _part(of - float(busy.sum()), of)


class Counting(Protocol):
    """Any object with a `stats` method."""

    def stats(self) -> Stats:
        """Return the statistics so far."""


def counting(manager: object) -> Counting:
    """Return `manager`. Raise TypeError if it has no `stats` method."""
    if not hasattr(manager, "stats"):
        raise TypeError(
            f"manager={manager!r} has no stats(); pass a cseq manager or a cseq.DataLoader"
        )
    counts: Counting = manager
    return counts


def read_stats(manager: Counting) -> Stats | None:
    """Return the statistics, or None for a DataLoader without workers."""
    try:
        return manager.stats()
    except RuntimeError:
        return None


def added(now: Stats, earlier: Stats | None) -> Stats:
    """Return the statistics since `earlier`, or all of them if it is from another run."""
    try:
        return now if earlier is None else now.since(earlier)
    except ValueError:
        return now


class Every:
    """Reports figures on a loader every `n` steps.

    Parameters
    ----------
    manager : manager or DataLoader
        The manager or DataLoader to measure.
    n : int
        The number of steps between reports.
    """

    def __init__(self, manager: object, n: int) -> None:
        self._manager, self._n, self._has_warned = counting(manager), integer("n", n), False
        self._before = read_stats(self._manager)

    def at(self, step: int) -> dict[str, float]:
        """Return figures for the last `n` steps. Return {} if `step` is not a multiple of `n`."""
        if step % self._n:
            return {}
        before, self._before = self._before, read_stats(self._manager)
        if self._before is None:
            if not self._has_warned:
                log.warning("there are no figures to log, because this loader has no cseq workers")
            self._has_warned = True
            return {}
        return added(self._before, before).as_dict()


def _part(seconds: float, of: float, most: float = 1.0) -> float:
    """Return `seconds / of`, limited to [0, most], or 0 if `of` is 0."""
    return max(0.0, min(seconds / of, most)) if of > 0 else 0.0


def _cpu(computed: float, worked: float) -> float | None:
    return computed / worked if computed > 0 and worked > 0 else None
