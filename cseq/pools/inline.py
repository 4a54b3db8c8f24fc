"""The inline pool: the caller makes each batch itself. This is test mode.

A ring of one cell, whose runner works on the trainer's own thread when the loop wants a batch.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import Ring, is_deep, ring_bytes
from cseq._memory import Block
from cseq._work import Runner
from cseq.converter.host import Converter
from cseq.encoding import failure
from cseq.encoding.transport import Objects
from cseq.indexing import context, indexer
from cseq.indexing.context import here
from cseq.indexing.seeding import Seeds, call_here
from cseq.measure.lanes import Lanes
from cseq.measure.meters import Meters
from cseq.measure.stats import Stats
from cseq.pools.base import BatchPool
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from cseq.arguments import Job
    from cseq.options import Size
    from cseq.order.place import Place

__all__ = ["InlinePool"]

log = logging.getLogger("cseq")


class InlineIndexing(indexer.Indexing):
    """The work of the first stage, on the trainer's own thread."""

    # A process that the user's code forks has its copy of the loop, and goes on with it.
    end_copy = staticmethod(lambda _: None)

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Publish the present ticket with an exception; raise what is not the indexer's own."""
        if failure.ends_program(error):
            raise error
        if isinstance(error, RecursionError) and is_deep():
            raise error
        super().fail(runner, error)


class InlinePool(BatchPool):
    """Same order, same results, no process and no thread."""

    def __init__(self, job: Job) -> None:
        self._made: Any = None  # the indexer
        words = job.sampler.words
        ring = Ring(Block(ring_bytes(1, words, 1), zero=True), 1, words, 1)
        objects = Objects(1)
        self._batch_context = context.BatchContext(0, 1, job.sampler.seed)
        self._seeds = Seeds(self._batch_context) if job.seed_globals else None
        convert = None if job.output.kind == "null" else Converter(job.output).convert
        self._indexing = InlineIndexing(objects, None, self._batch_context, convert, self._seeds)
        super().__init__(
            job,
            ring,
            objects,
            make=partial(self._indexing.make_here, Runner(ring, INDEXER, 1, last=True), here),
            lanes=Lanes(1, "inline"),
        )

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch; the first time, make the indexer."""
        if self._indexing.indexer is None:
            self._build()
        super().begin(place, epoch, consumed, generation)

    def _build(self) -> None:
        """Make the indexer, as a worker process does: with the global generators seeded."""
        build = partial(indexer.build_seeded, self._job.worker, self._seeds, copied=False)
        try:
            made = call_here(build, self._batch_context, self._seeds)
        except (StopIteration, SystemExit) as error:
            if failure.ends_program(error):
                raise
            raise failure.ordinary(error) from error
        self._made = made
        self._indexing.indexer = indexer.leaving(made, self._batch_context, self._job.on_error)
        indexer.FirstBatch(self._indexing, self._job.output, log.warning)

    @property
    def size(self) -> Size:
        """What it would be with workers."""
        return self._job.start

    def stats(self) -> Stats:
        """Count what was delivered."""
        return Stats(batches=Meters.read(self.rings).counts()["batches"], skips=self.feed.skips)

    def close(self) -> None:
        """Close the indexer, if this pool made it."""
        made, self._made, self._indexing.indexer = self._made, None, None
        self.lanes.end()
        self.feed.end()
        self._batch_context.clear()
        call_here(
            partial(indexer.dispose, self._job.worker, made, copied=False), self._batch_context
        )
        self._job = self._job.without_worker()
