"""The trainer's end of a ring: posts an epoch's tickets, takes its batches.

The pools derive from `Feed`, which is the part of `Consumer` that is written in Python. One thread
calls it. Other threads report errors (a worker that cannot be made, or that died too often) through
`check`, which raises them in that thread, and wake it with the ring's `notify_all`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cseq import failure
from cseq._core import Consumer
from cseq._lock import RunState
from cseq.stage import RAISED
from cseq.stats import Clock, Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.place import Place
    from cseq.sampler import Indices, Sampler
    from cseq.transport import BatchReader

__all__ = ["Feed", "apart", "wake_at"]

log = logging.getLogger("cseq")


def wake_at(buffer: int, num_workers: int) -> int:
    """Return how many tickets are posted before sleeping workers are woken for them.

    To wake a worker for each ticket costs more than a small batch does. Workers sleep when nothing
    can be claimed; then up to `buffer` minus this many batches are ready or being made. The loop
    uses these until the woken workers have made the next, so there must be one for each worker.
    """
    return max(1, min(buffer // 2, buffer - num_workers))


def apart(buffer: int) -> int:
    """Return how many batches the loop and the workers keep apart while both work.

    Half of the buffer: each side then has one half for itself. Both in the same batches would wait
    for memory that the other core has just written.
    """
    return max(1, buffer // 2)


class Feed:
    """One epoch after the other over a ring.

    Parameters
    ----------
    batch_reader : BatchReader
        Where finished batches come out.
    ordered : bool
        In ticket order, not in that of completion.
    skip_errors : bool
        Log and leave out a batch whose indexer raised, instead of raising.
    check : callable
        Called before every sleep; raises errors of workers and of other threads.
    convert : callable, optional
        Applied to every batch on its way out.
    leaf_for : callable, optional
        Does the same to a batch's leaves: `Converter.leaf_for`.
    num_workers, num_converters : int
        How many owners of the ring run the indexers, and, after these, the converters.
    threads : bool
        Whether they share a GIL with the loop.
    make : callable, optional
        Makes the next batch on the caller's thread, instead of waiting for one.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler,
        batch_reader: BatchReader,
        *,
        ordered: bool,
        skip_errors: bool,
        check: Callable[[], None],
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
        num_workers: int = 1,
        num_converters: int = 0,
        threads: bool = False,
        make: Callable[[], None] | None = None,
    ) -> None:
        self._ring = ring
        self._sampler = sampler
        self._batch_reader = batch_reader
        self._ordered = ordered
        self._skip_errors = skip_errors
        self._check = check
        self._convert = convert
        self._num_workers, self._num_converters = num_workers, num_converters
        self._threads = threads
        self._make_batch = make
        self._rooms = [ring.indices(cell) for cell in range(ring.capacity)]
        self.run = RunState()
        self.consumer = Consumer(
            self.run,
            ring,
            sampler.order,
            self._fill,
            self._read,
            self._describe,
            ordered=ordered,
            skip_errors=skip_errors,
            wait=make or self._await,
            convert=convert,
            leaf_for=leaf_for,
            **batch_reader.ends,
        )
        self._clock = Clock(ring, computing=threads)

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have had, or left out for an error."""
        return self._sampler.position(self.consumer.done)

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that were left out for an error: epoch, batch, what was raised."""
        return list(self.consumer.skipped)

    @property
    def ended(self) -> bool:
        """Whether the loop was told that this epoch is over."""
        return self.consumer.ended

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything of this epoch: a batch, an exception, or its end."""
        return self.consumer.ended or self.consumer.taken > 0

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch, as `Pool` has it.

        If the epoch was begun at this place and the loop has had nothing of it, its tickets stay.
        """
        consumer, before = self.consumer, self.consumer.place
        consumer.generation = generation
        if before is not None and not self.begun and before.is_at(epoch, consumed):
            consumer.place, place.progress = place, self
            return
        consumer.begin(epoch, self._sampler.cut_at(consumed), place, self)
        consumer.refill()
        self._clock.run()

    def notify_all(self) -> None:
        """Have a call that waits look at the run's generation."""
        self._ring.notify_all()

    def _fill(self, batch: int, room: Indices) -> tuple[int, int]:
        """Write a batch's indices; return how many, and where in the order they begin."""
        return self._sampler.fill(batch, room), self._sampler.start(batch)

    def _read(self) -> tuple[int, Any, BaseException | None]:
        """Wait for the next batch and decode it; the ticket stays in the ring."""
        cell, status, slot, capacity, record = self.consumer.peek() or self._await()
        batch_reader = self._batch_reader
        if status == RAISED:
            return cell, None, batch_reader.error(cell, slot, capacity, record)
        try:
            batch = batch_reader.decode(cell, slot, capacity, record)
            if self._convert is not None:
                batch = self._convert(batch)
        except MemoryError:
            raise  # the next attempt may find more memory
        except Exception as error:  # noqa: BLE001 - raised in the loop, with its batch named
            return cell, None, error
        return cell, batch, None

    def named(self, cell: int) -> tuple[int, int, list[int], str]:
        """Return epoch, number and indices of the batch in a cell, and its name; on any thread."""
        epoch, batch, count = self._ring.ticket(cell)
        indices: list[int] = self._rooms[cell][:count].tolist()
        return epoch, batch, indices, failure.where(epoch, batch, indices)

    def _describe(
        self, cell: int, error: BaseException
    ) -> tuple[BaseException, tuple[int, int, str]]:
        """Name the batch in an exception, and log the exception if the batch is left out."""
        epoch, batch, _, place = self.named(cell)
        error = failure.ordinary(error)
        entry = epoch, batch, failure.line_of(error)
        if self._skip_errors and isinstance(error, Exception):
            # As text: a log record that keeps the exception keeps its traceback, and the ring.
            log.error("skipped %s: %s", place, entry[2])
        return failure.named(error, place), entry

    def _await(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """Sleep until a ticket is finished, and peek at it."""
        ring, consumer = self._ring, self.consumer
        while True:
            seen = ring.notices()
            if self.run.generation != consumer.generation:
                raise InterruptedError
            self._check()
            consumer.refill()
            if consumer.over:
                consumer.ended = True
                self._clock.stop()
                raise StopIteration
            found = consumer.peek()
            if found is not None:
                if self._clock.starting:
                    self._clock.started()
                    consumer.prompt = True
                return found
            if self._make_batch is None:
                ring.wait(seen, self._ordered)
            else:
                self._make_batch()

    def in_work(self) -> list[tuple[int, int, str]]:
        """List the tickets that are waited for: owner, since when (ns of `now_ns`), batch."""
        ring = self._ring
        found = []
        for cell in ring.awaited(self._ordered):
            owner, since = ring.holder(cell)
            if owner and since:  # since is 0 for an instant after the claim
                found.append((owner, since, self.named(cell)[3]))
        return found

    def stats(self) -> Stats:
        """Return counts and times of what went through the ring so far."""
        ring, num_workers, num_converters = self._ring, self._num_workers, self._num_converters
        times = self._clock.read()
        workers, converters = times.idle[:num_workers], times.idle[num_workers:]
        return Stats(
            batches=ring.taken_batches,
            samples=ring.taken_samples,
            nbytes=ring.taken_bytes,
            skips=self.consumer.skips,
            depths=ring.depths(),
            start_waited=self._clock.start_waited,
            elapsed=times.elapsed,
            loop_waited=times.waited,
            workers_waited=sum(workers),
            converters_waited=sum(converters[:num_converters]),
            num_workers=num_workers,
            num_converters=num_converters,
            computed=times.computed if self._threads else None,
        )
