"""The inline pool: the caller makes each batch itself. This is test mode."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cseq import context, failure, indexer
from cseq.context import here
from cseq.converter import Converter
from cseq.stats import Stats

if TYPE_CHECKING:
    from cseq.pools import Job

__all__ = ["InlinePool"]

log = logging.getLogger("cseq")


class InlinePool:
    """Same order, same results, no process and no thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sampler = job.sampler
        self._desk = context.Desk(0, 1, job.seed)
        self._convert = None if job.output.kind == "null" else Converter(job.output).convert
        self._indexer: indexer.Indexer | None = None
        self.epoch = 0
        self._at = 0  # which batch of this epoch is in hand
        self._batches = 0
        self.done = 0  # batches delivered or skipped; one that raised, when the loop went on
        self._count = 0  # batches delivered, over all epochs
        self.skipped: list[tuple[int, int, str]] = []

    def open(self) -> None:
        """Nothing runs here but the caller."""

    @property
    def batch(self) -> int:
        """The batch in hand: its number within the epoch."""
        return self._sampler.first + self._at

    @property
    def start(self) -> int:
        """Position of its first sample in the order of the epoch."""
        return self._sampler.start(self._at)

    def begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch; the first time, make the indexer."""
        if self._indexer is None:
            left = context.enter(self._desk)
            try:
                self._indexer = indexer.build(self._job.worker)
            finally:
                context.leave(left)
        self._sampler.begin(epoch, consumed)
        self.epoch, self._batches = epoch, len(self._sampler)
        self._at = self.done = 0

    def interrupt(self) -> None:
        """Nothing waits here: the batch in hand is finished."""

    def next(self) -> Any:
        """Make the next batch."""
        desk = self._desk
        while self._at < self._batches:
            desk.sit(self)
            left, here.desk = here.desk, desk
            try:
                batch = self._indexer[self._sampler.indices(self._at)]  # type: ignore[index]
                if self._convert is not None:
                    batch = self._convert(batch)
            except Exception as error:  # noqa: BLE001 - the user's, and raised again
                self._raised(error)
                continue
            finally:
                here.desk = left
            self.done = self._at = self._at + 1
            self._count += 1
            return batch
        raise StopIteration

    def _raised(self, error: Exception) -> None:
        """Raise, or note down, what the indexer raised."""
        indices = self._sampler.indices(self._at)
        place = failure.where(self.epoch, self.batch, indices.tolist())
        self._at += 1
        if self._job.on_error == "raise":
            try:
                failure.deliver(error, place)
            finally:
                del error
        self.done = self._at
        self.skipped.append((self.epoch, self.batch - 1, repr(error)))
        log.error("skipped %s: %s", place, repr(error))

    def stats(self) -> Stats:
        """Count what was delivered."""
        return Stats(batches=self._count, skips=len(self.skipped))

    def close(self) -> None:
        """Close the indexer, if this pool made it."""
        made, self._indexer = self._indexer, None
        self._batches = 0
        self._desk.rise()
        left = context.enter(self._desk)
        try:
            indexer.dispose(self._job.worker, made, copied=False)
        finally:
            context.leave(left)
