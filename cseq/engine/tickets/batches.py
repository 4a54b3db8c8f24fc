"""Batches of an order: the tickets of an `MSequence`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from cseq.engine.tickets.base import Awaited, Working
    from cseq.measure.stats import Stats
    from cseq.order.place import Place
    from cseq.order.sampler import Sampler

__all__ = ["Batches", "wake_at"]

ADVICE = "look at what the indexer does with these indices"


def wake_at(buffer: int, num_workers: int) -> int:
    """Return how many tickets are posted before sleeping workers are woken for them.

    To wake a worker for each ticket costs more than a small batch does. Workers sleep when nothing
    can be claimed; then up to `buffer` minus this many batches are ready or being made. The loop
    uses these until the woken workers have made the next, so there must be one for each worker.
    """
    return max(1, min(buffer // 2, buffer - num_workers))


class Batches(Tickets):
    """One ring, whose tickets ask for batches of samples in an order."""

    pool: Pool[Batches]
    rings = 1
    interrupted = (
        "this iterator was interrupted: the manager was started or finished, or a newer iterator "
        "of it began; a manager has one iterator at a time: make two managers for two loops at once"
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
        """Of the present epochs."""
        return self._job.sampler

    @property
    def _ring(self) -> Ring:
        return self.pool.rings[0]

    def task(self, runner_number: int, *, forks: bool) -> BatchTask:
        """Return what a worker is to do."""
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
            output=job.output._replace(function=None),  # the trainer applies the function
        )

    def deaths(self) -> Deaths:
        """Make what decides on workers that die."""
        job, fails = self._job, self.errors == "skip"
        return Deaths(job.options.max_restarts, job.num_workers, "batch", ADVICE, fails=fails)

    def open(self) -> None:
        """Start as many runners as there are to be at first."""
        job, crew = self._job, self.pool.crew
        self.resize(*job.start)
        if any(job.auto):
            from cseq.engine.tuning import Controller

            self.pool.controller = Controller(self, job.auto)
        crew.prepare(job.worker)
        crew.launch()

    def close(self) -> None:
        """Forget the user's object: a pool is part of a cycle."""
        self._job = self._job.without_worker()

    @property
    def size(self) -> Size:
        """How many workers, and the most batches that are being made or wait, at present."""
        if self.pool.crew.is_inline:  # what it would be with workers
            return self._job.start
        return Size(self.pool.num_workers, self._ring.limit)

    @property
    def is_staffed(self) -> bool:
        """Whether all these workers have made their indexers."""
        return all(map(self.pool.crew.is_ready, range(1, self.pool.num_workers + 1)))

    def stats(self) -> Stats:
        """Return the pool's counts and times."""
        return self.pool.stats()

    def most(self, stats: Stats) -> Size:
        """Return the most of both that there is memory for, as far as `stats` tell."""
        size, job = self.size, self._job
        nbytes = stats.nbytes / max(stats.batches, 1)
        limit = memory_limit_of(job.options.memory_limit)
        buffer = min(job.buffer, int(limit / nbytes)) if nbytes and limit else job.buffer
        workers = self.pool.crew.room_for(job.num_workers, size.num_workers)
        return Size(workers, max(size.buffer, buffer))

    def resize(self, num_workers: int, buffer: int) -> None:
        """Go on with another number of workers, and of batches ahead of the loop.

        For the thread that takes batches. No result depends on either. Workers that are too many
        finish the ticket in hand, and leave; tickets of those that die meanwhile go to others. At
        most as many as the pool was made for (`Job`), at least one.
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
        """Samples and batches that were left out for an error."""
        return list(self.pool.feed.skipped)

    def begin_epoch(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch after `consumed` samples; nothing of an earlier one is delivered.

        In one step of C, `place` becomes that of this epoch, and the feed its progress. If the same
        epoch was begun at the same place, and the loop has had nothing of it yet, the batches that
        were made are kept. `generation`: that of the iterator that is to have the batches.
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
        """Go on with another sampler at this position of the epoch, unless that is over.

        The iterator stays, and what was made ahead for it is dropped. With the run's lock.
        """
        epoch = place.now(sampler).epoch
        self._job = self._job._replace(sampler=sampler)
        if is_over:
            return
        self.pool.crew.begin_epoch()
        feed = self.pool.feed
        feed.begin_epoch(sampler.source(epoch, position), ordered=self._job.ordered, place=place)
        feed.refill()

    def held(self, number: int, cell: int, most: int = failure.MOST) -> Held:  # noqa: ARG002
        """Describe the batch in a cell; on any thread."""
        epoch, batch, count = self._ring.ticket(cell)
        indices: list[int] = self._ring.indices(cell)[:count].tolist()
        return Held(epoch, batch, indices, failure.location_of(epoch, batch, indices, most))

    def describe(self, number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Name the batch in an exception; log it if the batch is left out."""
        epoch, batch, indices, location, _ = self.held(number, cell, failure.SHOWN)
        error, entry = failure.ordinary(error), None
        if self._job.on_error == "skip" and isinstance(error, Exception):
            entry = note_batch(location, epoch, batch, error, indices)
        return failure.named(error, location), entry

    def list_left(self, number: int, cell: int, left: tuple[tuple[Any, str], ...]) -> list[Any]:
        """Log the samples that a batch lacks."""
        epoch, batch, *_ = self.held(number, cell)
        return note_samples(epoch, batch, left)

    def working(self, _: Awaited | None) -> Working:
        """List the awaited tickets in work: runner number, since when (ns), batch."""
        held = [(*self._ring.holder(cell), cell) for _, cell in self.pool.feed.awaited()]
        # `since` is 0 for an instant after the claim.
        return [
            (runner_number, since, self.held(0, cell, failure.SHOWN).location)
            for runner_number, since, cell in held
            if since and 0 < runner_number <= self.pool.crew.timed
        ]
