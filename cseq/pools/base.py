"""The pools' base classes: a feed over rings, and the Python that it calls.

One thread calls a pool. Other threads report errors (a worker that cannot be made, or that died too
often) through `_check`, which raises them in that thread, and wake it with `notify_all`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cseq._core import RunState, now_ns
from cseq._feed import Feed
from cseq._memory import HAS_GIL
from cseq.encoding import failure
from cseq.indexing.leaving import Partial, Skipped, note_batch, note_samples
from cseq.measure.meters import History
from cseq.measure.stats import Stats
from cseq.options import Size
from cseq.processes.deaths import Held
from cseq.stage import RAISED, spin_ns
from cseq.system import gpu_is_idle, memory_limit_of, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.arguments import Job
    from cseq.encoding.transport import BatchReader
    from cseq.measure.lanes import Lanes
    from cseq.options import WorkerOptions
    from cseq.order.place import Place
    from cseq.order.sampler import Sampler
    from cseq.pools.tuning import Controller
    from cseq.processes.supervisor import Supervisor

    Awaited = list[tuple[int, int]]  # ring and cell of tickets
    Working = list[tuple[int, int, str]]  # owner, since when (ns of `now_ns`), on what

__all__ = [
    "RUN",
    "BatchPool",
    "Pool",
    "file_name",
    "wake_at",
]

T = TypeVar("T")

log = logging.getLogger("cseq")

LONG = 20.0  # seconds that are looked at for a line in the log, at least: at an epoch's end
OFTEN = 600.0  # and in the middle of one
RUN = "cseq-run"  # how files of rings are called
TOLD, WARNED = 0.05, 0.2  # parts of it that the loop waits, for a line and for a warning


def wake_at(buffer: int, num_workers: int) -> int:
    """Return how many tickets are posted before sleeping workers are woken for them.

    To wake a worker for each ticket costs more than a small batch does. Workers sleep when nothing
    can be claimed; then up to `buffer` minus this many batches are ready or being made. The loop
    uses these until the woken workers have made the next, so there must be one for each worker.
    """
    return max(1, min(buffer // 2, buffer - num_workers))


def file_name(
    workers: int,
    converters: int = 0,
    *,
    rings: int = 1,
    threads: bool = False,
    sampler: Sampler | None = None,
) -> str:
    """Return what `/proc` calls the file of a pool's rings: with what `top` shows of the run."""
    told: dict[str, object] = {
        "pid": os.getpid(),
        "rings": rings,
        "workers": workers,
        "converters": converters,
        "threads": int(threads),
        "gil": int(HAS_GIL),
        "cores": share(),
        "rank": os.environ.get("RANK", "0")[:9],
        "world_size": os.environ.get("WORLD_SIZE", "1")[:9],
    }
    if sampler is not None:
        shown = ["dset_size", "batch_size", "length", "seed"]
        shown += ["rank", "world_size"] if sampler.world_size > 1 else []
        told.update({name: getattr(sampler, name) for name in shown})
    return " ".join([RUN, *(f"{name}={value}" for name, value in told.items())])


class Pool:
    """Runners, the rings that they share with the loop, and the feed: the loop's end of these.

    The constructor starts nothing: an exception of a signal handler may drop the pool before there
    is a `Run` to close it.

    Parameters
    ----------
    rings : list of Ring
        See `Feed`.
    batch_reader : BatchReader
        Where finished batches come out.
    options : WorkerOptions
    errors, on_cancel, make, interrupted
        See `Feed`.
    convert, leaf_for : callable, optional
        See `Decoder`.
    lanes : Lanes
        The runners, for traces: their kind, and how many owners of the rings run the indexers.
    num_converters : int
        How many, after these, run the converters.

    Attributes
    ----------
    run : RunState
        The generation of what is under way, and the lock for the calls of this pool.
    supervisor : Supervisor or None
        The worker processes, if there are any.
    told : set of str
        Causes that were logged; its owner has the same set for each of its pools.
    is_hurried : bool
        `close` waits no longer than `HURRY` seconds for a runner that is busy with a batch.
    """

    supervisor: Supervisor | None = None
    _crews: tuple[Any, ...] = ()  # the `Supervisor`, or `ThreadGroup`, of the first stage; the next
    is_hurried = False
    _controller: Controller | None = None  # of 'auto'

    def __init__(
        self,
        rings: list[Ring],
        batch_reader: BatchReader,
        *,
        options: WorkerOptions,
        errors: Literal["raise", "skip", "return"] = "raise",
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
        on_cancel: Callable[[int], None] | None = None,
        make: Callable[[], None] | None = None,
        num_converters: int = 0,
        lanes: Lanes,
        interrupted: str = "",
    ) -> None:
        self.rings = rings
        self._batch_reader = batch_reader
        self._convert = convert
        self._options = options
        self.num_workers, self._num_converters = lanes.num_workers, num_converters
        self._takes_turns = lanes.kind == "thread" and HAS_GIL
        self.run = RunState()
        self._seen, self._looked = Stats(), now_ns()  # when a line was last considered
        self.told: set[str] = set()
        self._waited = False  # for the first batch
        self._gpu_waits = self._gpu_dry = 0
        self.feed = Feed(
            self.run,
            rings,
            batch_reader.decoder(convert=convert, leaf_for=leaf_for),
            self._wait,
            self._decode,
            self._describe,
            errors=errors,
            make=make,
            on_cancel=on_cancel,
            interrupted=interrupted,
        )
        self.lanes = lanes
        self.feed.number = lanes.number
        self._history, self._skips = History(rings), errors == "skip"
        self.feed.watch = self._look
        lanes.begin()

    def notify_all(self) -> None:
        """Have a call that waits in another thread look at the run's generation."""
        self.rings[0].notify_all()

    def close(self) -> None:
        """End all that was started; returns within a bounded time. Calling it twice is fine."""
        raise NotImplementedError

    def _check(self, awaited: Awaited | None) -> None:
        """Raise errors of workers and of other threads, also for tickets that take too long.

        `awaited`: the tickets that are waited for; None: those that the feed waits for. With
        on_timeout='restart', a worker is restarted instead.
        """
        for crew in self._crews:
            crew.check()
        options = self._options
        if self._crews and options.timeout is not None:
            is_restarted, working = options.on_timeout == "restart", self._working(awaited)
            self._crews[0].check_time(working, options.timeout, restart=is_restarted)

    def _working(self, awaited: Awaited | None) -> Working:
        """List what runners of the first crew work on, of the tickets that are waited for."""
        raise NotImplementedError

    def held(self, number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the ticket in a cell of a ring, with so many indices; on any thread."""
        raise NotImplementedError

    def _describe(self, number: int, cell: int, what: Any) -> tuple[Any, Any]:
        """Name the ticket in an exception, or take a `Partial` batch apart; see `Feed`."""
        raise NotImplementedError

    # -- for the feed

    def _decode(
        self, number: int, cell: int, status: int, slot: int, capacity: int, record: tuple[int, ...]
    ) -> tuple[Any, BaseException | None]:
        """Decode what C does not; see `Feed`."""
        batch_reader = self._batch_reader
        place = cell + self.rings[number].first
        if status & RAISED:
            died = None if self.supervisor is None else self.supervisor.died_of(number, cell)
            return None, died or batch_reader.error(place, slot, capacity, record)
        batch = batch_reader.decode(place, slot, capacity, record)
        return batch if self._convert is None else self._convert(batch), None

    def _wait(self) -> None:
        """Sleep until the next ticket is ready; StopIteration: no more come."""
        self._await(self.feed.generation, self._advance)
        if not self._waited:
            self._waited = True
        elif (idle := gpu_is_idle()) is not None:
            self._gpu_waits += 1
            self._gpu_dry += idle

    def _look(self) -> None:
        """Note and tell how the run goes, and change its size, some ten times a second."""
        self._history.note()
        if self._controller is not None:
            self._controller()
        self._advise(OFTEN)

    def _advance(self) -> bool | None:
        """Post what can be posted; return whether the next ticket is ready."""
        ready = self.feed.advance()
        if ready is None:
            self._advise(LONG)
            raise StopIteration
        return ready or None

    def _advise(self, seconds: float) -> None:
        """Log why the loop has waited, if it has and the last look is so long ago, once a cause."""
        if now_ns() - self._looked < seconds * 1e9 or os.environ.get("CSEQ_ADVICE") == "0":
            return
        before, self._seen, self._looked = self._seen, self.stats(), now_ns()
        seen = self._seen.since(before)
        if seen.elapsed < LONG or seen.loop_waiting < TOLD:
            return
        advice = seen.advice()
        if advice.cause not in {"unknown", *self.told}:
            self.told.add(advice.cause)
            level = logging.WARNING if seen.loop_waiting >= WARNED else logging.INFO
            log.log(level, "%s (CSEQ_ADVICE=0 switches this off)", advice)

    def _await(
        self, generation: int, look: Callable[[], T | None], awaited: Awaited | None = None
    ) -> T:
        """Sleep until `look` finds something.

        `awaited`: the tickets that are waited for, if not the feed's.
        """
        feed, began = self.feed, now_ns()
        while True:
            seen = feed.notices()
            if self.run.generation != generation:
                raise InterruptedError
            self._check(awaited)
            if not self._waited and self.supervisor is not None:
                self.supervisor.check_start(began)
            found = look()
            if found is not None:
                return found
            feed.wait(seen, awaited)

    def stats(self) -> Stats:
        """Return counts and times of this pool so far; also when its feed was dropped."""
        supervised: dict[str, Any] = {}
        if self.supervisor is not None:
            deaths, arena = self.supervisor.deaths, self.supervisor.shared
            supervised = {
                "restarts": deaths.restarts,
                "retries": deaths.retries,
                "copies": arena.copies,
            }
        return Stats.read(
            self.rings,
            past=self._history.rows,
            **supervised,
            skips=self.feed.skips if self._skips else 0,
            num_workers=self.num_workers,
            num_converters=self._num_converters,
            threads=self._takes_turns,
            gpu_waits=self._gpu_waits,
            gpu_dry=self._gpu_dry,
        )


class BatchPool(Pool):
    """A pool of `MSequence`: one ring, for batches of samples in an order."""

    of = "MPSequence"  # as a report names what has it

    def __init__(self, job: Job, ring: Ring, batch_reader: BatchReader, **options: Any) -> None:
        super().__init__(
            [ring],
            batch_reader,
            options=job.options,
            errors=job.on_error,  # type: ignore[arg-type]
            interrupted="this iterator was interrupted: the manager was started or finished, or a "
            "newer iterator of it began; a manager has one iterator at a time: "
            "make two managers for two loops at once",
            **options,
        )
        self._job = job
        self._ring = ring

    def open(self) -> None:
        """Start the runners. If this raises, or a signal handler does, `close` ends them."""

    @property
    def sampler(self) -> Sampler:
        """The epochs, with a reader of its own."""
        return self._job.sampler.changed()

    @property
    def size(self) -> Size:
        """How many workers, and the most batches that are being made or wait, at present."""
        return Size(self.num_workers, self._ring.limit)

    @property
    def is_staffed(self) -> bool:
        """Whether all these workers have made their indexers."""
        return all(map(self._crews[0].is_ready, range(1, self.num_workers + 1)))

    def most(self, stats: Stats) -> Size:
        """Return the most of both that there is memory for, as far as `stats` tell."""
        size, job = self.size, self._job
        nbytes = stats.nbytes / max(stats.batches, 1)
        limit = memory_limit_of(job.options.memory_limit)
        buffer = min(job.buffer, int(limit / nbytes)) if nbytes and limit else job.buffer
        return Size(job.num_workers, max(size.buffer, buffer))

    def _fit(self) -> None:
        """Have the size to begin with; the first step of `open`."""
        job = self._job
        self.resize(*job.start)
        if any(job.auto):
            from cseq.pools.tuning import Controller

            self._controller = Controller(self, job.auto)

    def resize(self, num_workers: int, buffer: int) -> None:
        """Go on with another number of workers, and of batches ahead of the loop.

        For the thread that takes batches. No result depends on either. Workers that are too many
        finish the ticket in hand, and leave; tickets of those that die meanwhile go to others. At
        most as many as the pool was made for (`Job`), at least one.
        """
        self.num_workers = num_workers
        runners = num_workers + self._num_converters
        self._ring.fit(buffer, num_workers)
        turns = self._takes_turns
        self._ring.set_spin(spin_ns(runners, turns=turns), runners if turns else 0)
        self._ring.wake_at = wake_at(buffer, num_workers)
        self.feed.refill()

    @property
    def skipped(self) -> list[Skipped]:
        """Samples and batches that were left out for an error."""
        return list(self.feed.skipped)

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch after `consumed` samples; nothing of an earlier one is delivered.

        In one step of C, `place` becomes that of this epoch, and the feed its progress. If the same
        epoch was begun at the same place, and the loop has had nothing of it yet, the batches that
        were made are kept. `generation`: that of the iterator that is to have the batches.
        """
        feed, before, job = self.feed, self.feed.place, self._job
        if self.supervisor is not None:
            self.supervisor.begin()
        feed.generation = generation
        if before is not None and not before.begun and before.is_at(epoch, consumed):
            feed.place, place.progress = place, feed
            return
        feed.begin(job.sampler.source(epoch, consumed), ordered=job.ordered, place=place)
        feed.refill()
        feed.run_clock()

    def replan(self, sampler: Sampler, place: Place, *, is_over: bool, position: int) -> None:
        """Go on with another sampler at this position of the epoch, unless that is over.

        The iterator stays, and what was made ahead for it is dropped. With the run's lock.
        """
        epoch = place.now(sampler).epoch
        self._job = self._job._replace(sampler=sampler)
        if is_over:
            return
        if self.supervisor is not None:
            self.supervisor.begin()
        self.feed.begin(sampler.source(epoch, position), ordered=self._job.ordered, place=place)
        self.feed.refill()

    def held(self, number: int, cell: int, most: int = failure.MOST) -> Held:  # noqa: ARG002
        """Describe the batch in a cell; on any thread."""
        epoch, batch, count = self._ring.ticket(cell)
        indices: list[int] = self._ring.indices(cell)[:count].tolist()
        return Held(epoch, batch, indices, failure.where(epoch, batch, indices, most))

    def _describe(self, number: int, cell: int, what: Any) -> tuple[Any, Any]:
        """Name the batch in an exception; log what is left out: this batch, or samples of it."""
        epoch, batch, indices, place, _ = self.held(number, cell, failure.SHOWN)
        if type(what) is Partial:
            return what.batch, note_samples(epoch, batch, what.left)
        error, entry = failure.ordinary(what), None
        if self._job.on_error == "skip" and isinstance(error, Exception):
            entry = note_batch(place, epoch, batch, error, indices)
        return failure.named(error, place), entry

    def _working(self, _: Awaited | None) -> Working:
        """List the tickets that are waited for and in work: owner, since when (ns), batch."""
        held = [(*self._ring.holder(cell), cell) for _, cell in self.feed.awaited()]
        # `since` is 0 for an instant after the claim.
        return [
            (owner, since, self.held(0, cell, failure.SHOWN).place)
            for owner, since, cell in held
            if owner and since
        ]
