"""A batch of any epoch once more, in the calling thread: `MSequence.remake`."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq._feed import FeedIterator
from cseq.converter import output as outputs
from cseq.indexing.dataset import DatasetIndexer
from cseq.order.place import Place
from cseq.pools.inline import InlinePool
from cseq.run import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cseq._core import OrderSource
    from cseq.arguments import Job
    from cseq.order.sampler import Sampler

__all__ = ["Remade", "locate", "remake"]


class Remade(NamedTuple):
    """A batch that was made once more.

    Attributes
    ----------
    batch : object
        What the loop gets.
    indices : numpy.ndarray
        Its samples, int64, shape (samples,).
    seconds : float
        What it took: the indexer, and the conversion.
    sample_seconds : numpy.ndarray or None
        What each sample took, float64, shape (samples,), if that was asked for.
    """

    batch: Any
    indices: NDArray[np.int64]
    seconds: float
    sample_seconds: NDArray[np.float64] | None


class Timed:
    """A data set whose samples are timed, in the order in which they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        start = time.perf_counter()
        sample = self._dataset[index]
        self.seconds.append(time.perf_counter() - start)
        return sample


def locate(sampler: Sampler, epoch: int, batch: int, consumed: int) -> tuple[OrderSource, int]:
    """Return the batches of an epoch from one on, and how many units came before.

    Parameters
    ----------
    batch : int
        Its number in the epoch, as messages name it.
    consumed : int
        Units of the epoch before its first batch here, if it was resumed.

    Raises
    ------
    IndexError
        There is no such batch.
    """
    cut = sampler.cut_at(consumed)
    number = batch - cut.first
    if not 0 <= number < cut.batches:
        raise IndexError(
            f"batch={batch} is not in [{cut.first}, {cut.first + cut.batches}) of epoch {epoch}"
        )
    before = consumed + number * cut.stride
    return sampler.source(epoch, before, own=True), before


def remake(job: Job, epoch: int, batch: int, consumed: int, *, samples: bool) -> Remade:
    """Make a batch of a manager's job, in this thread; see `MSequence.remake`."""
    sampler = job.sampler.changed()  # with a reader of its own
    source, before = locate(sampler, epoch, batch, consumed)
    worker, timed = job.worker, None
    if samples:
        if not isinstance(worker, DatasetIndexer) or hasattr(worker.dataset, "__getitems__"):
            raise ValueError(
                "samples=True times what cseq.from_dataset(dataset) asks the data set for one by "
                f"one, and this manager's worker is {worker!r}; leave it out"
            )
        timed = Timed(worker.dataset)
        worker = DatasetIndexer(timed, worker.collate)
    job = job._replace(
        worker=worker, sampler=sampler, output=outputs.resolve(job.output), on_error="raise"
    )
    run = Run(InlinePool(job))
    with closing(run):
        run.pool.begin(Place(epoch, before), epoch, before, run.interrupt())
        if timed is not None:
            timed.seconds.clear()  # of what was asked while it was made
        start = time.perf_counter()
        made = next(FeedIterator(run.pool.feed, run.pool.feed.generation))
        seconds = time.perf_counter() - start
    each = None if timed is None else np.array(timed.seconds)
    return Remade(made, source.samples(0)[0], seconds, each)
