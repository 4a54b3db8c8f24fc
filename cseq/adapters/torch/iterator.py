"""The trainer's iterator over the batches of worker processes."""

from __future__ import annotations

import multiprocessing
import weakref
from typing import TYPE_CHECKING, Any

import torch

from cseq.adapters.torch import names, worker
from cseq.adapters.torch.order import Keys, leaves_no_trace
from cseq.adapters.torch.pinning import Pinner
from cseq.adapters.torch.processes import WorkerProcess
from cseq.adapters.torch.stateful import is_stateful
from cseq.adapters.torch.taking import Taking
from cseq.encoding import failure
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.indexing.leaving import indices_of
from cseq.processes.launcher import direct  # noqa: F401 - the first `iter` would import it, for a fork
from cseq.stream import ItemFailure, Streams

if TYPE_CHECKING:
    from cseq.adapters.torch.state import Resume
    from cseq.run import Run
    from cseq.stats import Stats

__all__ = ["LoaderTimeout", "WorkersIterator", "start_method_of"]

DRAWN_AGAIN = (
    ", and with rng='worker' its generators begin from its seed: numbers are drawn that were drawn "
    "before; rng='batch' draws the same as without the death, max_restarts=0 forbids replacements"
)
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


class WorkersIterator(Taking, names.Workers):  # type: ignore[misc]
    """Batches from worker processes.

    It is an instance of torch's class of such iterators, with those of its attributes and methods
    that others use. All that moves batches is cseq's.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    rng, on_error : str
        See `DataLoader`.
    resume : Resume, optional
        Where the epoch is to go on.
    snapshot_every : int, optional
        See `Epoch`; None: no state is asked for.
    max_restarts : int
        See `DataLoader`.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rng: str,
        on_error: str,
        resume: Resume | None = None,
        snapshot_every: int | None = None,
        max_restarts: int,
    ) -> None:
        self._shutdown = True
        keeps_state = snapshot_every is not None
        Taking.__init__(
            self, loader, names.Workers, rng=rng, on_error=on_error, keeps_state=keeps_state
        )
        self._pinner = Pinner(self._pin_memory_device)
        self._in_order = bool(getattr(loader, "in_order", True))  # before torch 2.6 there is none
        every = snapshot_every or 0
        # Batches of keys are not made again for a state: it has to be that of the last one.
        self._snapshot_every = every if self._is_iterable else min(1, every)
        self.progress.iterator = weakref.ref(self)
        self._streams = self._open(loader, max_restarts)
        kind, size = type(loader.dataset).__name__, loader.batch_size
        self._run.about = f"{kind}, batch_size={size}, num_workers={self._num_workers}"
        self._shutdown = False
        self._items: Any
        self._ended = False
        try:
            self._reset(loader, first_iter=True, resume=resume)
        except BaseException:
            self._shutdown_workers()
            raise

    def _open(self, loader: Any, max_restarts: int) -> Any:
        """Start the worker processes."""
        self._prefetch_factor = loader.prefetch_factor
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        method = start_method_of(loader)
        is_forked = method == "fork"
        rng = self._rng
        producer: Any = worker.Worker(
            worker.Fetching.of(self),
            loader.worker_init_fn,
            rng == "batch",
            worker.Modes.here() if is_forked else None,
        )
        counting = worker.count_numbered if rng == "batch" else worker.count
        keys_first = is_forked and (self._is_iterable or leaves_no_trace(self._index_sampler))
        streams = Streams(
            producer,
            self._num_workers,
            prefetch=self._prefetch_factor,
            key_size=min(1 + (loader.batch_size or 512), LONGEST),
            start_method=method,
            max_restarts=max_restarts,
            timeout=float(self._timeout) or None,
            timed_from="wait",
            errors="return",
            unit="batch",
            show=worker.unnumbered if rng == "batch" else None,
            samples=counting if self._auto_collation else None,
            lethal="return" if self._skips_errors and not self._is_iterable else "raise",
            lost="" if rng == "batch" else DRAWN_AGAIN,
            launch="begin" if keys_first else "now",
        )
        streams._run.pool.told = vars(loader).setdefault("_cseq_told", set())
        self._workers = [WorkerProcess(streams, n) for n in range(self._num_workers)]
        return streams

    def _reset(
        self,
        loader: Any,
        first_iter: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        resume: Resume | None = None,
    ) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._pinner.forget()
        if not first_iter:
            if self._rng == "worker" and not self._ended:
                # As torch's: what was asked for is made, since it draws numbers.
                self._streams.ask("get_ready", behind=True)
            generator = loader.generator
            self.progress.watch(generator, None if generator is None else generator.get_state())
        if self._rng == "worker" or not first_iter:  # torch asks a sampler for two iterators first
            self._order = Keys(loader._index_sampler, keeps_state=self._keeps_state)
            names.Base._reset(self, loader, first_iter)
        if self._rng == "batch" and not first_iter:  # as a new iterator does it
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._base_seed = drawn.item()
        self._ended = False
        self._begin(resume)
        if self._is_iterable:
            self._streams.begin(self._epochs(), ordered=self._in_order)
            if not self._in_order:
                self._items = iter(self._streams)
            return
        self._begin_keys(resume)
        self._items = iter(self._streams)

    def _begin_keys(self, resume: Resume | None) -> None:
        """Begin an epoch of map-style data."""
        progress = self.progress
        keys = self._keys(resume)
        if self._rng == "batch":
            keys = worker.numbered(keys, progress.yielded)
        free = self._rng == "batch" and not is_stateful(self._dataset)
        first = progress.yielded % self._num_workers  # batch k is made by worker k mod N
        self._streams.begin(
            self._epochs(),
            keys,
            ordered=self._in_order,
            assign="free" if free else "turn",
            first=first,
        )

    def _epochs(self) -> list[worker.Epoch]:
        """Tell each worker what it has to know of the epoch."""
        progress = self.progress
        index = next(iter(self._index_sampler)) if self._is_iterable else None  # always the same
        return [
            worker.Epoch(
                self._base_seed,
                index=index,
                made=progress.counts[number],
                state=progress.states[number],
                snapshot_every=self._snapshot_every,
                tagged=self._is_iterable and not self._in_order,
            )
            for number in range(self._num_workers)
        ]

    # -- the next batch

    def _next_data(self) -> Any:
        """Return the batch that `__next__` takes out, or raise `_error`, which it takes out too."""
        if self._ended:
            raise StopIteration
        try:
            received = item = self._next_item()
        except StopIteration:
            self._end()
            raise
        except WorkerTimeout as late:
            raise LoaderTimeout(
                f"DataLoader timed out after {self._timeout} seconds: {late}"
            ) from None
        except WorkerDied as died:
            self._ended = True  # as a generator ends after an exception
            died.args = (self._told(died),)
            raise
        number, state, self._left = self.progress.turn, None, ()
        kind = type(item)
        if kind is worker.Stated:
            number, state, self._left, item = item.worker, item.state, item.left, item.batch
        elif kind is worker.Raised or kind is ItemFailure:
            number, self._indices = item.worker, []
            if kind is ItemFailure:  # the batch could not be sent
                error, self._place = item.error, f"batch {self.progress.yielded}"
                self._indices = error.indices if isinstance(error, WorkerDied) else []
            else:
                error, self._place = self._error_of(item), None if item.is_setup else item.place
                self._indices = indices_of(item.key)
            self._error, self._after = error, (number, state)
            try:
                raise error
            finally:
                del error
        self._after = number, state
        if self._pin_memory:
            try:
                item = self._pinner.pin(received, item)
            except Exception as error:
                self._error, self._place = error, None
                raise
            self._pin_next()
        return item

    def _pin_next(self) -> None:
        """Have the batch after the one that is received pinned beside the loop, if it is ready.

        It stays in the engine, and is taken as any other: no key is drawn for it.
        """
        following = self._streams.glance()
        batch = following.batch if type(following) is worker.Stated else following
        self._pinner.forget()
        if type(batch) not in (type(None), worker.Raised, ItemFailure):
            self._pinner.begin(following, batch)

    def _next_item(self) -> Any:
        """Receive the next item; see `worker`."""
        progress = self.progress
        while True:
            item = self._receive()
            if type(item) is not worker.Stated or not item.is_over:
                return item
            progress.states[item.worker] = item.state
            progress.ended[item.worker] = True

    def _receive(self) -> Any:
        """Receive what comes next, also the end of a worker's data set."""
        progress = self.progress
        if not self._is_iterable or not self._in_order:
            return next(self._items)
        while not all(progress.ended):  # of those that have more, the worker whose turn it is
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

    def _error_of(self, raised: worker.Raised) -> BaseException:
        """Make the exception that a worker has raised."""
        error = failure.unpack(raised.packed, raised.worker, "DataLoader worker process")
        return failure.told(failure.named(error, raised.place))

    def _told(self, died: WorkerDied) -> str:
        """Return what to say of a death: it begins in torch's words, which people search for."""
        return f"DataLoader worker (pid(s) {died.pid}) exited unexpectedly: {died}"

    # -- the end

    def _shutdown_workers(self) -> None:
        """End the worker processes; twice is fine."""
        if self._shutdown:
            return
        self._ended = True
        self._pinner.close()
        if self.progress.stats is None:  # if `close` was interrupted, they are there already
            self.progress.stats = self.stats()
        self._streams.close()
        self._shutdown = True  # not before: if `close` is interrupted, it is called again

    def __del__(self) -> None:
        """Do nothing: `Streams` end when they are dropped, and nothing waits for that."""

    @property
    def _run(self) -> Run[Any]:
        """For `cseq.testing`."""
        run: Run[Any] = self._streams._run
        return run

    def stats(self) -> Stats:
        """Count what was done so far, and where time went; see `cseq.Stats`."""
        stats: Stats = self._streams.stats()
        return stats
