"""The tickets that `MSequence` uses to request batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cseq.converter.output import cast_dtype
from cseq.encoding import failure
from cseq.engine.tickets.base import Tickets
from cseq.indexing.indexer import BatchTask
from cseq.indexing.leaving import Skipped, note_batch, note_samples
from cseq.options import Size
from cseq.processes.deaths import Deaths, Held
from cseq.stage import CONVERTER, INDEXER, spin_ns
from cseq.system import memory_limit_of

if TYPE_CHECKING:
    from cseq._core import Ring
    from cseq.arguments import Job
    from cseq.engine.pool import Pool
    from cseq.engine.tickets.base import Awaited, Left, Working
    from cseq.measure.stats import Stats
    from cseq.order.place import Place
    from cseq.order.sampler import Sampler

__all__ = ["Batches", "wake_at"]

ADVICE = "check what the indexer does with these indices"


def wake_at(buffer: int, num_workers: int) -> int:
    """Return how many tickets to post before waking up workers.

    Waking a worker for each ticket would cost more than making a small batch. Until workers wake
    up, the loop must still have one batch per worker to consume.
    """
    return max(1, min(buffer // 2, buffer - num_workers))


class Batches(Tickets):
    """Requests batches through a single ring, in the sampler's order."""

    pool: Pool[Batches]
    rings = 1
    interrupted = (
        "this iterator was interrupted: the manager was started or finished, or a newer iterator "
        "has replaced this one. A manager has one iterator at a time; for two loops, make two "
        "managers"
    )
    instead = "threads cannot be restarted; the processes of an MPSequence can"

    def __init__(self, job: Job) -> None:
        self._job = job
        self.options, self.output = job.options, job.output
        self.num_workers, self.num_converters = job.num_workers, job.num_converters
        self.converts_in_processes = job.num_converters > 0 and job.compat is False
        self.cells = self.ahead = job.buffer
        self.words, self.limit = job.sampler.words, job.start.buffer
        self.runners = job.num_workers + job.num_converters
        self.errors = job.on_error  # type: ignore[assignment]

    @property
    def sampler(self) -> Sampler:
        """The current sampler."""
        return self._job.sampler

    @property
    def _ring(self) -> Ring:
        return self.pool.rings[0]

    def task(self, runner_number: int, *, forks: bool) -> BatchTask:
        """Return a runner's task."""
        job = self._job
        stage = INDEXER if runner_number <= job.num_workers else CONVERTER
        return BatchTask(
            stage=stage,
            num_workers=job.num_workers,
            last=stage == CONVERTER or not job.num_converters,
            seed=job.sampler.seed,
            seed_globals=forks and job.seed_globals,
            on_error=job.on_error,
            cast=cast_dtype(job.output) if forks else None,
            output=job.output._replace(function=None),
        )

    def deaths(self) -> Deaths:
        """Create the `Deaths` that decides whether a dead worker is replaced."""
        job, fails = self._job, self.errors == "skip"
        return Deaths(job.options.max_restarts, job.num_workers, "batch", ADVICE, fails=fails)

    def open(self) -> None:
        """Start the crew with the initial number of workers."""
        job, crew = self._job, self.pool.crew
        self.resize(*job.start)
        if any(job.auto):
            from cseq.engine.tuning import Controller

            self.pool.controller = Controller(self, job.auto)
        crew.prepare(job.worker)
        crew.launch()

    def close(self) -> None:
        """Drop the reference to the user's object, because the pool is in a reference cycle."""
        self._job = self._job.without_worker()

    @property
    def size(self) -> Size:
        """The current number of workers and buffer size."""
        if self.pool.crew.is_inline:
            return self._job.start
        return Size(self.pool.num_workers, self._ring.limit)

    @property
    def is_staffed(self) -> bool:
        """Whether all workers have created their indexers."""
        return all(map(self.pool.crew.is_ready, range(1, self.pool.num_workers + 1)))

    def stats(self) -> Stats:
        """Return the statistics of the pool."""
        return self.pool.stats()

    def most(self, stats: Stats) -> Size:
        """Return the largest number of workers and the largest buffer that fit in memory."""
        size, job = self.size, self._job
        nbytes = stats.nbytes / max(stats.batches, 1)
        limit = memory_limit_of(job.options.memory_limit)
        buffer = min(job.buffer, int(limit / nbytes)) if nbytes and limit else job.buffer
        workers = self.pool.crew.room_for(job.num_workers, size.num_workers)
        return Size(workers, max(size.buffer, buffer))

    def resize(self, num_workers: int, buffer: int) -> None:
        """Change the buffer size and the number of workers (at most the job's `num_workers`).

        Call this in the thread that consumes batches. The batches stay the same. Workers that are
        no longer needed finish their tickets and exit.
        """
        pool, ring = self.pool, self._ring
        if pool.crew.is_inline:
            return
        pool.num_workers = num_workers
        runners = num_workers + self.num_converters
        ring.fit(buffer, num_workers)
        turns = pool.takes_turns
        ring.set_spin(spin_ns(runners, turns=turns), runners if turns else 0)
        ring.wake_at = wake_at(buffer, num_workers)
        pool.feed.refill()
        pool.crew.resize(num_workers)

    @property
    def skipped(self) -> list[Skipped]:
        """The samples and batches that were skipped because of errors."""
        return list(self.pool.feed.skipped)

    def begin_epoch(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Start an epoch after `consumed` units, for the iterator of the given generation.

        The epoch starts and `place` is set in one step of C code. If the epoch has already
        started at this place and no batch has been consumed, its finished batches are kept.
        """
        feed, job = self.pool.feed, self._job
        before = feed.place
        self.pool.crew.begin_epoch()
        feed.generation = generation
        if before is not None and not before.begun and before.is_at(epoch, consumed):
            feed.place, place.progress = place, feed
            return
        feed.begin_epoch(job.sampler.source(epoch, consumed), ordered=job.ordered, place=place)
        feed.refill()
        feed.run_clock()

    def replan(self, sampler: Sampler, place: Place, *, is_over: bool, position: int) -> None:
        """Continue the epoch at `position` with a new sampler, unless the epoch is over.

        The iterator stays valid. Batches made in advance are dropped. The caller must hold the
        run's lock.
        """
        epoch = place.now(sampler).epoch
        self._job = self._job._replace(sampler=sampler)
        if is_over:
            return
        self.pool.crew.begin_epoch()
        feed = self.pool.feed
        feed.begin_epoch(sampler.source(epoch, position), ordered=self._job.ordered, place=place)
        feed.refill()

    def held(self, ring_number: int, cell: int, most: int = failure.MOST) -> Held:  # noqa: ARG002
        """Describe the batch in a cell. Thread-safe."""
        epoch, batch, count = self._ring.ticket(cell)
        indices: list[int] = self._ring.indices(cell)[:count].tolist()
        return Held(epoch, batch, indices, failure.location_of(epoch, batch, indices, most))

    def describe(
        self, ring_number: int, cell: int, error: BaseException
    ) -> tuple[BaseException, object]:
        """Add the batch's details to an exception, and log a skipped batch."""
        epoch, batch, indices, location, _ = self.held(ring_number, cell, failure.SHOWN)
        error, entry = failure.ordinary(error), None
        if self._job.on_error == "skip" and isinstance(error, Exception):
            entry = note_batch(location, epoch, batch, error, indices)
        return failure.named(error, location), entry

    def list_left(self, ring_number: int, cell: int, left: Left) -> list[Skipped]:
        """Log the samples missing from a batch."""
        epoch, batch, *_ = self.held(ring_number, cell)
        return note_samples(epoch, batch, left)

    def working(self, _: Awaited | None) -> Working:
        """List (runner number, start time in ns, batch) for awaited tickets."""
        held = [(*self._ring.holder(cell), cell) for _, cell in self.pool.feed.awaited()]
        # Just after a ticket is claimed, `since` is still 0.
        return [
            (runner_number, since, self.held(0, cell, failure.SHOWN).location)
            for runner_number, since, cell in held
            if since and 0 < runner_number <= self.pool.crew.timed
        ]
