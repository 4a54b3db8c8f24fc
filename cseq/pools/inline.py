"""The inline pool: the caller makes each batch itself, when it asks for it. This is test mode."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cseq import context, failure, indexer
from cseq.converter import Converter

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
        self.batch = -1  # the one in hand
        self._batches = 0
        self.delivered = 0
        self.skipped: list[tuple[int, int, str]] = []

    def begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch; the first time, make the indexer."""
        if self._indexer is None:
            left = context.enter(self._desk)
            try:
                self._indexer = indexer.build(self._job.worker)
            finally:
                context.leave(left)
        self._sampler.begin(epoch, consumed)
        self.epoch, self.batch, self._batches = epoch, -1, len(self._sampler)

    def next(self) -> Any:
        """Make the next batch."""
        while True:
            self.batch += 1
            if self.batch >= self._batches:
                raise StopIteration
            indices = self._sampler.indices(self.batch)
            desk = self._desk
            desk.sit(self)
            left = context.enter(desk)
            try:
                batch = self._indexer[indices]  # type: ignore[index]
                if self._convert is not None:
                    batch = self._convert(batch)
            except Exception as error:
                self._raised(error)
                continue
            finally:
                context.leave(left)
            self.delivered += 1
            return batch

    def _raised(self, error: Exception) -> None:
        """Raise, or note down, what the indexer raised."""
        indices = self._sampler.indices(self.batch)
        place = failure.where(self.epoch, self.batch, indices.tolist())
        if self._job.on_error == "raise":
            failure.annotate(error, f"cseq: while making {place}")
            raise error
        self.skipped.append((self.epoch, self.batch, repr(error)))
        log.error("skipped %s: %r", place, error)

    def close(self) -> None:
        """Close the indexer, if this pool made it."""
        made, self._indexer = self._indexer, None
        self._batches = 0
        indexer.dispose(self._job.worker, made, copied=False)
