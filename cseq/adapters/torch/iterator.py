"""The trainer's iterator over the batches of worker processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from cseq import failure
from cseq.adapters.torch import names, worker
from cseq.adapters.torch.order import order_of
from cseq.adapters.torch.processes import WorkerProcess
from cseq.adapters.torch.state import Progress
from cseq.adapters.torch.stateful import is_stateful
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.adapters.torch.state import Resume
    from cseq.stats import Stats

__all__ = ["LoaderTimeout", "WorkersIterator", "start_method_of"]

LONGEST = 4096  # indices of a batch that travel in its ticket; more are sent in a slot


class LoaderTimeout(WorkerTimeout, RuntimeError):
    """No batch came within the loader's `timeout`; the message shows where its worker is.

    The iterator goes on: the batch comes later, in its place.
    """


def start_method_of(loader: Any) -> str:
    """Name the way in which a loader's worker processes are started."""
    chosen = loader.multiprocessing_context
    method: str = (multiprocessing if chosen is None else chosen).get_start_method()
    return method


class WorkersIterator(names.Workers):  # type: ignore[misc]
    """Batches from worker processes.

    It is one of torch's iterators to whom it may concern (`isinstance`), and has their attributes
    and methods that others use. All that moves batches is cseq's.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    rng : str
        See `DataLoader`.
    resume : Resume, optional
        Where the epoch is to go on.
    snapshot_every : int
        See `Epoch`.

    Attributes
    ----------
    progress : Progress
        The same object in all epochs of persistent workers.
    """

    def __init__(
        self, loader: Any, *, rng: str, resume: Resume | None = None, snapshot_every: int = 0
    ) -> None:
        self._shutdown = True
        names.Base.__init__(self, loader)
        self._base_seed: Any
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = getattr(loader, "in_order", True)  # before torch 2.6 there is none
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._is_iterable = loader._dataset_kind == names.ITERABLE
        # Batches of keys are not made again for a state: it has to be that of the last one.
        self._snapshot_every = snapshot_every if self._is_iterable else min(1, snapshot_every)
        # Batch k is made by worker k mod N, in an epoch that is resumed as well: its first key goes
        # to stream 0, which is of the worker of this number.
        self._offset = 0
        if resume is not None and not self._is_iterable:
            self._offset = resume.yielded % self._num_workers
        self._first = 0  # batches that were delivered before this epoch was resumed
        self._drawn: deque[tuple[int, Any]] = deque()  # keys, by their numbers
        self._number = 0  # of the epoch
        self._left: list[list[tuple[int, Any]]] = [[] for _ in range(self._num_workers)]
        self._rng = rng
        self.progress = Progress(iterable=self._is_iterable, num_workers=self._num_workers, rng=rng)
        method = start_method_of(loader)
        fetching = worker.Fetching(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
        )
        producer: Any = worker.Worker(
            fetching,
            loader.worker_init_fn,
            [None] * loader.batch_size if self._is_iterable and self._auto_collation else None,
            rng == "batch",
            torch.is_grad_enabled() if method == "fork" else True,
            self._offset,
        )
        self._streams = Streams(
            producer,
            self._num_workers,
            prefetch=self._prefetch_factor,
            key_size=min(1 + (loader.batch_size or 512), LONGEST),
            start_method=method,
            timeout=self._timeout or None,
            timed_from="wait",
        )
        self._shutdown = False
        several = self._num_workers
        streams = [(n - self._offset) % several for n in range(several)]
        self._workers = [WorkerProcess(self._streams, stream) for stream in streams]
        self._items: Iterator[Any]
        try:
            self._reset(loader, first_iter=True, resume=resume)
        except BaseException:
            self._shutdown_workers()
            raise

    def _reset(
        self,
        loader: Any,
        first_iter: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        resume: Resume | None = None,
    ) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        if not first_iter:
            self._note_left()
        if self._rng == "worker" or not first_iter:  # torch asks a sampler for two iterators first
            names.Base._reset(self, loader, first_iter)
        if self._rng == "batch" and not first_iter:  # as a new iterator does it
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._base_seed = drawn.item()
        if resume is not None:
            self._num_yielded = resume.yielded
            if resume.base_seed is not None:
                self._base_seed = resume.base_seed
        self._ended = False
        self._number += 1
        self.progress.begin(self._base_seed, resume)
        epochs = self._epochs()
        if self._is_iterable:
            self._begin(epochs, ordered=self._in_order)
            if not self._in_order:
                self._items = iter(self._streams)
            return
        progress = self.progress
        progress.order = order_of(self._index_sampler, self._sampler_iter)
        keys = progress.order.keys(progress.yielded, resume.sampler if resume else None)
        assign = "turn"
        self._first = progress.yielded
        if self._persistent_workers and self._in_order and self._rng == "worker":
            self._drawn = deque(maxlen=self._prefetch_factor * self._num_workers)
            keys = noted(keys, self._drawn)
        if self._rng == "batch":
            keys = worker.numbered(keys, progress.yielded)
            if not is_stateful(self._dataset):
                assign = "free"
        self._begin(epochs, keys, ordered=self._in_order, assign=assign)
        self._items = iter(self._streams)

    def _begin(self, *args: Any, **options: Any) -> None:
        """Begin an epoch in the workers, which are all there then."""
        self._streams.begin(*args, **options)
        for process in self._workers:
            process.keep()

    def _epochs(self) -> list[worker.Epoch]:
        """Tell each worker what it has to know of the epoch."""
        progress = self.progress
        return [
            worker.Epoch(
                self._base_seed,
                made=progress.counts[number],
                state=progress.states[(number + self._offset) % self._num_workers],
                snapshot_every=self._snapshot_every,
                tagged=self._is_iterable and not self._in_order,
                number=self._number,
                left=tuple(self._left[number]),
            )
            for number in range(self._num_workers)
        ]

    def _note_left(self) -> None:
        """Note what is left of the epoch that ends; see `Epoch`."""
        if self._rng == "batch":  # nothing is drawn from what was drawn before
            return
        progress = self.progress
        taken = progress.yielded - self._first
        left: list[Any] = [[] for _ in range(self._num_workers)]
        if self._is_iterable:
            left = [self._prefetch_factor + count for count in progress.counts]
        for at, key in self._drawn:
            if at >= taken:
                turn, chosen = divmod(at, self._num_workers)
                left[chosen].append((turn, key))
        for number, noted in enumerate(self._left):
            if progress.counts[number] if self._is_iterable else taken > number:
                noted.clear()  # it has begun this epoch, and so come to the end of those before
            noted.append((self._number, left[number]))

    # -- the next batch

    def __next__(self) -> Any:
        """Return the next batch."""
        if self._IterableDataset_len_called is not None or names.profiler_enabled():
            return names.Base.__next__(self)  # with warnings, and named in a profile
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        """Return the next batch, or raise what was raised instead of it."""
        if self._ended:
            raise StopIteration
        try:
            item = self._next_item()
        except StopIteration:
            self._end()
            raise
        except WorkerTimeout as late:
            raise LoaderTimeout(
                f"DataLoader timed out after {self._timeout:g} seconds: {late}"
            ) from None
        except WorkerDied as died:
            raise self._died(died) from None
        progress = self.progress
        progress.yielded += 1
        kind = type(item)
        if kind is worker.Stated:
            if item.state is not None:
                progress.states[item.worker] = item.state
            item = item.batch
        elif kind is worker.Raised:
            self._raise(item)
        if self._pin_memory:
            return names.pin(item, self._pin_memory_device)
        return item

    def _next_item(self) -> Any:
        """Return the next item of the workers; see `worker`."""
        if not self._is_iterable:
            return next(self._items)
        progress = self.progress
        while True:
            item = self._next_in_turn() if self._in_order else next(self._items)
            if type(item) is worker.Stated and item.is_over:
                progress.states[item.worker] = item.state
                progress.ended[item.worker] = True
                continue
            if self._in_order:
                progress.counts[progress.turn] += 1
                progress.turn = (progress.turn + 1) % self._num_workers
            else:
                progress.counts[item.worker] += 1
            return item

    def _next_in_turn(self) -> Any:
        """Return the next item of the worker whose turn it is, of those that have more."""
        progress = self.progress
        while not all(progress.ended):
            if not progress.ended[progress.turn]:
                try:
                    return self._streams.next(progress.turn)
                except StopIteration:
                    progress.ended[progress.turn] = True
            progress.turn = (progress.turn + 1) % self._num_workers
        raise StopIteration

    def _end(self) -> None:
        """Note that the epoch is over; workers that are not persistent end."""
        self._ended = self.progress.finished = True
        if not self._persistent_workers:
            self._shutdown_workers()

    # -- exceptions

    def _raise(self, raised: worker.Raised) -> None:
        """Raise what a worker has raised."""
        error = failure.unpack(raised.packed, raised.worker)
        name = type(error).__name__
        error = failure.named(error, raised.place)
        failure.annotate(error, f"Caught {name} in DataLoader worker process {raised.worker}.")
        try:
            raise error
        finally:
            del error  # its traceback has this frame: a circle, which would keep the workers alive

    def _died(self, died: WorkerDied) -> WorkerDied:
        """Say of a worker that has died what is searched for in such messages."""
        died.__traceback__ = None  # the streams keep it, and it has a frame that keeps the streams
        number = None
        if died.worker is not None:
            number = (died.worker + self._offset) % self._num_workers
        pid = None if number is None else self._workers[number].pid
        how = "exited unexpectedly"
        if died.exitcode is not None and died.exitcode < 0:
            how = f"is killed by signal: {signal.strsignal(-died.exitcode)}. "
        return WorkerDied(
            f"DataLoader worker (pid {pid}) {how}\n{died}",
            epoch=died.epoch,
            batch=died.batch,
            indices=died.indices,
            exitcode=died.exitcode,
            worker=number,
        )

    # -- the end

    def _shutdown_workers(self) -> None:
        """End the worker processes; twice is fine."""
        if self._shutdown:
            return
        self._shutdown = self._ended = True
        for process in self._workers:
            process.keep()
        self._streams.close()

    def __del__(self) -> None:
        """Do nothing: `Streams` end when they are dropped, and nothing waits for that."""

    def stats(self) -> Stats:
        """Count what was done so far, and where time went; see `cseq.Stats`."""
        return self._streams.stats()


def noted(keys: Iterator[Any], drawn: deque[tuple[int, Any]]) -> Iterator[Any]:
    """Yield keys, and note them with their numbers.

    Not a method: the streams have this generator, and would have the iterator that has them.
    """
    for numbered in enumerate(keys):
        drawn.append(numbered)
        yield numbered[1]
