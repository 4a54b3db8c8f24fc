"""Remakes a batch from any epoch, for `MSequence.remake`."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from cseq.converter import output as outputs
from cseq.engine._feed import FeedIterator
from cseq.engine.crews.inline import InlineCrew
from cseq.engine.pool import Pool
from cseq.engine.tickets.batches import Batches
from cseq.order.place import Place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cseq.arguments import Job
    from cseq.order._source import OrderSource
    from cseq.order.sampler import Sampler

__all__ = ["Remade", "locate", "remake"]


class Remade(NamedTuple):
    """A remade batch.

    Attributes
    ----------
    batch : object
        The batch as the loop would receive it.
    indices : numpy.ndarray
        The indices of the samples, as int64.
    seconds : float
        The time that indexing and conversion took.
    """

    batch: object
    indices: NDArray[np.int64]
    seconds: float


def locate(sampler: Sampler, epoch: int, batch: int, consumed: int) -> tuple[OrderSource, int]:
    """Return a source that starts at `batch`, and the number of units before that batch.

    `consumed` is the number of units after which the epoch was resumed.
    """
    cut = sampler.cut_at(consumed)
    number = batch - cut.first
    if not 0 <= number < cut.batches:
        raise IndexError(
            f"batch={batch} is not in [{cut.first}, {cut.first + cut.batches}) of epoch {epoch}"
        )
    before = consumed + number * cut.stride
    return sampler.source(epoch, before, own=True), before


def remake(job: Job, epoch: int, batch: int, consumed: int) -> Remade:
    """Remake a batch in this thread; see `MSequence.remake`."""
    sampler = job.sampler.changed()
    source, before = locate(sampler, epoch, batch, consumed)
    job = job._replace(sampler=sampler, output=outputs.resolve(job.output), on_error="raise")
    tickets = Batches(job)
    pool = Pool(InlineCrew(tickets), tickets)
    with closing(pool):
        pool.open()
        tickets.begin_epoch(Place(epoch, before), epoch, before, pool.run.interrupt())
        start = time.perf_counter()
        made = next(FeedIterator(pool.feed, pool.feed.generation))
        seconds = time.perf_counter() - start
    return Remade(made, source.samples(0)[0], seconds)
