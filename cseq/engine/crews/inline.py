"""Test mode: the training thread makes all batches."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import Ring, ring_bytes
from cseq._lock import is_deep
from cseq._memory import Block
from cseq._work import Runner
from cseq.encoding import failure
from cseq.encoding._codec import Objects
from cseq.engine.crews.base import Crew
from cseq.indexing import context, indexer
from cseq.indexing.context import here
from cseq.indexing.seeding import Seeds, call_here
from cseq.measure.lanes import Lanes
from cseq.measure.meters import Meters
from cseq.measure.stats import Stats
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from cseq.engine.tickets.base import Tickets
    from cseq.indexing.indexer import Indexer

__all__ = ["InlineCrew"]

log = logging.getLogger("cseq")


class InlineIndexing(indexer.Indexing):
    """The indexing stage in the training thread."""

    # Do not exit a forked child, because it continues with a copy of the loop.
    end_copy = staticmethod(lambda _: None)

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Publish an exception, or raise it if it must end the program."""
        if failure.ends_program(error):
            raise error
        if isinstance(error, RecursionError) and is_deep():
            raise error
        super().fail(runner, error)


class InlineCrew(Crew):
    """Makes the batches on demand, without processes or threads."""

    of = "MSequence"
    is_inline = True

    def __init__(self, tickets: Tickets) -> None:
        super().__init__(tickets)
        self._made: Indexer[object] | None = None
        self._worker: object = None
        task = tickets.task(1, forks=True)
        assert isinstance(task, indexer.BatchTask)
        self._task = task
        ring = Ring(Block(ring_bytes(1, tickets.words, 1), zero=True), 1, tickets.words, 1)
        self.rings, self.lanes, self.reader = [ring], Lanes(1, "inline"), Objects(1)
        self._batch_context = context.BatchContext(0, 1, task.seed)
        self._seeds = Seeds(self._batch_context) if task.seed_globals else None
        converter = self._converter()
        convert = None if converter is None else converter.convert
        self._indexing = InlineIndexing(
            self.reader, None, self._batch_context, convert, self._seeds
        )
        self.make_next = partial(
            self._indexing.make_here, Runner(ring, INDEXER, 1, last=True), here
        )

    def prepare(self, worker: object, name: str = "worker") -> None:  # noqa: ARG002
        """Set the user's worker object."""
        self._worker = worker

    def begin_epoch(self) -> None:
        """Create the indexer before the first epoch."""
        if self._indexing.indexer is None:
            self._build()

    def _build(self) -> None:
        """Seed the global generators and create the indexer, as in a worker."""
        build = partial(indexer.build_seeded, self._worker, self._seeds, copied=False)
        try:
            made = call_here(build, self._batch_context, self._seeds)
        except (StopIteration, SystemExit) as error:
            if failure.ends_program(error):
                raise
            raise failure.ordinary(error) from error
        self._made = made
        self._indexing.indexer = indexer.leaving(made, self._batch_context, self._task.on_error)
        indexer.FirstBatch(self._indexing, self._task.output, log.warning)

    def stats(self, **counted: Any) -> Stats:
        """Return statistics: only the numbers of batches and skips."""
        batches = Meters.read_rings(self.rings).counts()["batches"]
        return Stats(batches=batches, skips=counted["skips"])

    def close(self, *, hurried: bool) -> None:  # noqa: ARG002
        """Close the indexer, if this crew created it."""
        made, self._made, self._indexing.indexer = self._made, None, None
        self._batch_context.clear_ticket()
        call_here(partial(indexer.dispose, self._worker, made, copied=False), self._batch_context)
        self._worker = None
