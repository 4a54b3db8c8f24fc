"""The inline pool: the caller makes each batch itself. This is test mode."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cseq import context, failure, indexer
from cseq._core import InlineRunner
from cseq.context import here
from cseq.converter.host import Converter
from cseq.seeding import Seeds
from cseq.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.pools import Job

__all__ = ["InlinePool"]

log = logging.getLogger("cseq")


class InlinePool:
    """Same order, same results, no process and no thread."""

    consumer = None  # there is no ring
    supervisor = None  # and there are no processes

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sampler = job.sampler
        self._batch_context = context.BatchContext(0, 1, job.sampler.seed)
        convert = None if job.output.kind == "null" else Converter(job.output).convert
        self._runner = InlineRunner(
            job.sampler, self._batch_context, here, self, convert, self._raised
        )
        if job.seed_globals:
            self._runner.seeds = Seeds(self._batch_context)
        self._made: Any = None  # the indexer
        self._hint = indexer.LabelHint(job.output, log.warning)

    def open(self) -> None:
        """Nothing runs here but the caller."""

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that were left out for an error: epoch, batch, what was raised."""
        return list(self._runner.skipped)

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._runner.epoch

    @property
    def batch(self) -> int:
        """The present batch: its number within the epoch."""
        return self._sampler.cut.first + self._runner.at

    @property
    def start(self) -> int:
        """Position of its first sample in the order of the epoch."""
        return self._sampler.start(self._runner.at)

    @property
    def position(self) -> int:
        """Samples delivered or skipped; a batch that raised counts once the loop has gone on."""
        return self._sampler.position(self._runner.done)

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything of this epoch: a batch, an exception, or its end."""
        return self._runner.at > 0 or self._runner.ended

    @property
    def ended(self) -> bool:
        """Whether the loop was told that this epoch is over."""
        return self._runner.ended

    @property
    def begins(self) -> int:
        """How often an epoch was begun."""
        return self._runner.begins

    def begin(self, epoch: int, consumed: int, since: int | None = None) -> bool:
        """Begin an epoch; the first time, make the indexer."""
        if self._runner.indexer is None:
            left = context.enter(self._batch_context)
            try:
                try:
                    made = self._build()
                except (StopIteration, SystemExit) as error:
                    if failure.ends_program(error):
                        raise
                    raise failure.ordinary(error) from error
                if self._runner.indexer is None:
                    self._runner.indexer = self._made = made
                    self._hint.watch(self._runner)
                else:  # a signal handler has made one meanwhile
                    indexer.dispose(self._job.worker, made, copied=False)
            finally:
                context.leave(left)
        return self._runner.begin(epoch, self._sampler.cut_at(consumed), since)

    def _build(self) -> Any:
        """Make the indexer, as a worker process does: with the global generators seeded."""
        seeds = self._runner.seeds
        if seeds is None:
            return indexer.build(self._job.worker)
        try:
            seeds.begin()
            made = indexer.build(self._job.worker)
            if seeds.has_drawn():
                indexer.dispose(self._job.worker, made, copied=False)
                seeds.restore()
                seeds.begin()
                made = indexer.build(self._job.worker)
            return made
        finally:
            seeds.restore()

    def interrupt(self) -> None:
        """Nothing waits here: the present batch is finished."""

    @property
    def next(self) -> Callable[[], Any]:
        """Make the next batch."""
        return self._runner.next

    def _raised(self, error: BaseException, begins: int, at: int) -> None:
        """Raise, or log and leave out, what the indexer raised for batch `at`."""
        if failure.ends_program(error):
            raise error  # as a handler of SIGTERM ends the program
        runner = self._runner
        epoch, batch = runner.epoch, self._sampler.cut.first + at
        place = failure.where(epoch, batch, self._sampler.indices(at).tolist())
        if not runner.made:
            indexer.advised(runner.indexer, error)
        error = failure.named(error, place)
        if self._job.on_error == "raise":
            if runner.pass_over(begins, at):
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame: a reference cycle
            return
        left_out = epoch, batch, failure.line_of(error)
        if runner.pass_over(begins, at, left_out):
            log.error("skipped %s: %s", place, left_out[2])

    def stats(self) -> Stats:
        """Count what was delivered."""
        return Stats(batches=self._runner.made, skips=self._runner.skips)

    def close(self) -> None:
        """Close the indexer, if this pool made it."""
        made, self._made, self._runner.indexer = self._made, None, None
        self._runner.batches = 0
        self._batch_context.clear()
        left = context.enter(self._batch_context)
        try:
            indexer.dispose(self._job.worker, made, copied=False)
        finally:
            context.leave(left)
        self._job = self._job.without_worker()
