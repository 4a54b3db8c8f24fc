"""The iterator over the batches of a DataLoader."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from cseq.adapters.torch import names, worker
from cseq.adapters.torch.options import start_method_of
from cseq.adapters.torch.order import Keys
from cseq.adapters.torch.pinning import Pinner
from cseq.adapters.torch.ranks import divisions, rank_of
from cseq.adapters.torch.state import LoaderProgress
from cseq.adapters.torch.stateful import is_stateful
from cseq.encoding import failure
from cseq.encoding.pickling import dumps
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.indexing.leaving import indices_of, note_batch, note_samples
from cseq.stream import ItemFailure, Naming, Streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from cseq.adapters.torch.options import Options
    from cseq.measure.stats import Stats
    from cseq.processes.launcher import Child
    from cseq.runs import Run

__all__ = ["LoaderIterator", "LoaderTimeout"]

DRAWN_AGAIN = (
    "; with rng='worker', the replacement's random generators restart from the worker's seed and "
    "repeat earlier numbers; pass rng='batch' to draw the same numbers as if no worker had "
    "died, or max_restarts=0 to forbid replacements"
)
INTERRUPTED = (
    "this iterator has ended: its workers were closed, or they belong to the process that forked "
    "this one; call iter() on the DataLoader again"
)
# A placeholder for `_error` that marks a skipped batch.
LEFT_OUT = Exception()


class LoaderTimeout(WorkerTimeout, RuntimeError):
    """Raised if no batch arrives within `timeout`. The message shows where the worker is stuck.

    The iterator can still be used, and the late batch is not lost.
    """


class LoaderIterator(names.Workers):
    """An iterator over the batches of a DataLoader.

    It has all attributes and methods of torch's multiprocessing iterator that other libraries use.
    With persistent workers, all epochs share `progress`.
    """

    _num_yielded: int
    _base_seed: Any
    _sampler_iter: Any
    # The thread that is executing `__next__`, or 0.
    _taker = 0
    _shutdown = True

    def __init__(
        self, loader: DataLoader[Any], options: Options, resume: dict[str, Any] | None = None
    ) -> None:
        self._options, every = options, options.snapshot_every or 0
        self._in_threads = options.worker_method == "thread" and loader.num_workers > 0
        self._is_seeded, self._skips_errors = options.rng == "batch", options.on_error == "skip"
        self._is_iterable = loader._dataset_kind == names.ITERABLE
        if resume is not None and resume["base_seed"] is None and loader.num_workers == 0:
            # Restore the data set before the next epoch draws any numbers.
            dataset: Any = loader.dataset
            for state in filter(None, resume["workers"]):
                if state["dataset"] is not None:
                    dataset.load_state_dict(state["dataset"])
            resume = {**resume, "workers": [None]}
        self._keeps_state = options.snapshot_every is not None and not self._is_iterable
        self._shares_state = self._in_threads and every > 0 and is_stateful(loader.dataset)
        if loader.num_workers > 1:
            self._check_threads(type(loader.dataset).__name__)
        keys = Keys(loader, keeps_state=self._keeps_state, resume=resume)
        self.progress = LoaderProgress(loader, keys, rng=options.rng)
        # torch draws a seed here. A resumed epoch already has one, so undo this draw below.
        goes_on = resume is not None and resume["base_seed"] is not None
        trainers = torch.get_rng_state() if goes_on and loader.generator is None else None
        names.Base.__init__(self, loader)
        if trainers is not None:
            torch.set_rng_state(trainers)
        torchs = names.Workers if self._num_workers else names.Inline
        self._profile_name = f"enumerate(DataLoader)#{torchs.__name__}.__next__"
        self._in_order = bool(not self._num_workers or getattr(loader, "in_order", True))
        # Map-style epochs resume without making batches again, so save the state after each one.
        self._snapshot_every = every if self._is_iterable else min(1, every)
        # `_maker`: the worker that made the latest batch (kept up to date only where it matters).
        # `_after`: the data set's state after that batch. `_error`: the exception to raise, if any.
        self._maker = 0
        self._after: bytes | None = None
        self._error: BaseException | None = None
        self._pinner = Pinner(self._pin_memory_device)
        self._streams = self._open(loader)
        self._shutdown = self._ended = False
        self._items: Any
        try:
            self._reset(loader, first_iter=True, resume=resume)
        except BaseException:
            self._shutdown_workers()
            raise

    def _check_threads(self, dataset: str) -> None:
        """Reject data sets that threads cannot share."""
        if self._in_threads and self._is_iterable:
            raise ValueError(
                f"dataset={dataset} is an IterableDataset, which several threads cannot divide, "
                "because get_worker_info() is None in threads; pass num_workers=1, or "
                "worker_method='multiprocessing'"
            )
        if self._shares_state:
            raise ValueError(
                f"dataset={dataset} has a state, which cannot be saved for each worker, because "
                "threads share the data set; pass num_workers=1, worker_method='multiprocessing', "
                "or snapshot_every_n_steps=0"
            )

    def _open(self, loader: DataLoader[Any]) -> Any:
        prefetch = loader.prefetch_factor or 0
        self._prefetch_factor, in_threads = prefetch, self._in_threads
        method = start_method_of(loader) if self._num_workers and not in_threads else None
        setup: Any = worker.Fetching(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
            self._skips_errors,
            self._is_seeded,
            loader.worker_init_fn,
            worker.modes_here() if method == "fork" else [],
            in_threads,
            self._pinner.in_threads() if in_threads and self._pin_memory else None,
        )
        if self._num_workers == 0:
            if self._timeout != 0:
                raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
            return worker.FetcherHere(setup)
        if prefetch <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        leaves_no_trace = self._is_iterable or self.progress.keys.layers.leaves_no_trace
        streams = Streams(
            setup,
            self._num_workers,
            prefetch=prefetch,
            start_method=method,
            max_restarts=self._options.max_restarts,
            timeout=float(self._timeout) or None,
            errors="return",
            naming=Naming(
                "batch",
                lost="" if self._is_seeded else DRAWN_AGAIN,
                samples=worker.samples_of if self._auto_collation else None,
                interrupted=INTERRUPTED,
            ),
            lethal="return" if self._skips_errors and not self._is_iterable else "raise",
            launch="begin" if method == "fork" and leaves_no_trace else "now",
            kind="threads" if in_threads else "processes",
        )
        run = streams._run
        run.pool.logged_causes = vars(loader).setdefault("_cseq_logged_causes", set())
        kind, size = type(loader.dataset).__name__, loader.batch_size
        run.about = f"{kind}, batch_size={size}, num_workers={self._num_workers}"
        self.progress.iterator = weakref.ref(self)
        return streams

    def _reset(
        self,
        loader: DataLoader[Any],
        first_iter: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        resume: dict[str, Any] | None = None,
    ) -> None:
        """Start an epoch and drop unread batches of the previous one.

        A forked process cannot share the parent's workers, so it starts new ones.
        """
        if not first_iter and self._num_workers and not self._run.is_ours:
            LoaderIterator.__init__(self, loader, self._options)
            vars(loader)["_progress"] = self.progress
            return
        self._pinner.forget()
        keys, is_seeded = self.progress.keys, self._is_seeded
        if first_iter:
            # For the first epoch, torch creates two iterators over the sampler.
            if self._num_workers and not is_seeded:
                keys.look_again(resume if self._persistent_workers else None)
                names.Base._reset(self, loader, first_iter)
        else:
            # As in torch, first make the requested batches, because this draws random numbers.
            if not is_seeded and not self._ended:
                self._streams.ask("get_ready", behind=True)
            keys = Keys(loader, keeps_state=self._keeps_state)
            names.Base._reset(self, loader, first_iter)
            # Draw a base seed, as a new iterator would.
            if is_seeded:
                drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                self._base_seed = drawn.item()
        if is_seeded and (known := keys.seed()) is not None:
            self._base_seed = known
        if resume is not None:
            self._num_yielded = resume["_num_yielded"]
            if resume["base_seed"] is not None:
                self._base_seed = resume["base_seed"]
        self._ended = False
        self.progress.begin_epoch(keys, self._base_seed, resume)
        self._begin_epoch(resume)

    def _begin_epoch(self, resume: dict[str, Any] | None) -> None:
        progress, keys, index = self.progress, None, None
        if self._is_iterable:
            # All batches of an IterableDataset have the same index.
            index = next(iter(self._index_sampler))
        else:
            state = resume["sampler"] if resume else {}
            keys = progress.keys.draw(self._sampler_iter, progress.yielded, state)
        parts = divisions(self._index_sampler)
        rank = rank_of(parts) if self._is_seeded else (0, 1)
        epochs = [
            worker.FetcherEpoch(
                self._base_seed,
                index,
                progress.counts[number] if keys is None else progress.yielded,
                progress.states[number],
                self._snapshot_every,
                progress.ended[number],
                rank,
            )
            for number in range(len(progress.counts))
        ]
        # The previous epoch may have changed the data set, so save its state again.
        if self._shares_state and resume is None:
            dataset: Any = self._dataset
            progress.states = [dumps({"dataset": dataset.state_dict(), "made": 0})]
        if self._num_workers == 0:
            progress.inline = self._streams.begin_with(epochs[0], keys)
        else:
            self._streams.begin(
                epochs,
                keys,
                ordered=self._in_order,
                assign="free" if self._is_seeded and not is_stateful(self._dataset) else "turn",
                first=progress.turn,
            )
        # Restore the data set even if no batches remain.
        if self._shares_state and resume:
            self._streams.ask("get_ready")
        self._items = iter(self._streams)

    # -- the next batch

    def __next__(self) -> Any:
        """Return the next batch or raise its exception.

        The batch is counted at the very end, where no signal handler can run. If a handler raises
        earlier (Ctrl-C), the iterator may lose the batch, as in torch, but saved states do not
        count it. This method is not thread-safe.
        """
        me = get_ident()
        if self._taker not in (0, me):
            raise RuntimeError("another thread is calling next() on this iterator; use a lock")
        self._taker = me
        try:
            while True:
                count = self._num_yielded
                # torch's method warns about excess batches, and labels batches in profiles.
                if self._IterableDataset_len_called is not None or names.profiler_enabled():
                    batch = names.Base.__next__(self)
                else:
                    batch = self._next_data()
                progress, failed = self.progress, self._error
                self._num_yielded = count + (failed is None)
                progress.yielded += 1
                if self._after is not None:
                    progress.states[self._maker] = self._after
                if self._is_iterable:
                    progress.counts[self._maker] += 1
                if failed is None:
                    return batch
                self._error = None
                if failed is not LEFT_OUT:
                    raise failed
        finally:
            self._taker = 0
            # The exception's traceback refers to this frame, which would keep the workers alive.
            failed = None

    def _next_data(self) -> Any:
        """Return the next batch, or set `_error`. `__next__` counts the batch."""
        self._error = None
        if self._ended:
            raise StopIteration
        try:
            received = item = self._next_item()
        except StopIteration:
            self._ended = self.progress.finished = True
            self._look_back()
            if not self._persistent_workers:
                self._shutdown_workers()
            raise
        except WorkerTimeout as late:
            raise LoaderTimeout(
                f"DataLoader timed out after {self._timeout} seconds: {late}"
            ) from None
        except WorkerDied as died:
            # Stop like an exhausted generator, with the same message as torch.
            self._ended = True
            text = f"DataLoader worker (pid(s) {died.pid}) exited unexpectedly: {died}"
            died.args = (text,)
            raise
        progress = self.progress
        # The worker could not send the batch.
        if type(item) is ItemFailure:
            error = item.error
            indices = error.indices if isinstance(error, WorkerDied) else []
            return self._fail(error, f"batch {progress.yielded}", indices)
        if type(item) is worker.Item:
            self._after = item.state
            if item.error is not None:
                name = None if item.is_setup else item.name
                return self._fail(self._raised_by(item), name, indices_of(item.key))
            if item.left:
                progress.skipped.extend(note_samples(None, progress.yielded, item.left))
            item = item.batch
        if self._pin_memory and not self._in_threads:
            try:
                item = self._pinner.pin(received, item)
            except Exception as error:  # noqa: BLE001 - of any type
                return self._fail(error)
            if self._num_workers:
                self._pin_next()
        return item

    def _look_back(self) -> None:
        progress = self.progress
        if not progress.yielded or (self._is_iterable and self._num_workers > 1):
            from cseq.adapters.torch.hints import look_at

            counts = progress.counts if self._is_iterable else [progress.yielded]
            look_at(self._dataset, self._index_sampler, counts)

    def _raised_by(self, item: worker.Item) -> BaseException:
        error = item.error
        assert error is not None
        if isinstance(error, BaseException):
            return error
        kind = "thread" if self._in_threads else "process"
        error = failure.unpack(error, self._maker, f"DataLoader worker {kind}")
        return failure.show_traceback(failure.named(error, item.name))

    def _fail(self, error: BaseException, name: str | None = None, indices: Any = ()) -> None:
        """Record an exception for `__next__`, or skip a named batch with on_error='skip'.

        torch's `__next__` increments `_num_yielded`, so it is decremented here.
        """
        self._num_yielded -= 1
        self._error = error
        if self._skips_errors and name is not None and isinstance(error, Exception):
            progress = self.progress
            progress.skipped.append(note_batch(name, None, progress.yielded, error, indices))
            self._error = LEFT_OUT

    def _pin_next(self) -> None:
        """Start pinning the next batch in the background if it is ready.

        The batch stays in the engine, and the next call to `__next__` fetches it as usual.
        """
        following = self._streams.glance()
        batch = following.batch if type(following) is worker.Item else following
        self._pinner.forget()
        if batch is not None and type(batch) is not ItemFailure:
            self._pinner.pin_ahead(following, batch)

    def _next_item(self) -> Any:
        progress, self._after = self.progress, None
        while True:
            item = next(self._items)
            is_item = type(item) is worker.Item
            if is_item or self._is_iterable:
                self._maker = self._streams.latest
            if not (is_item and item.is_over):
                return item
            progress.states[self._maker] = item.state
            progress.ended[self._maker] = True

    # -- the workers

    @property
    def _workers(self) -> list[_WorkerHandle]:  # type: ignore[override]
        """The current worker processes. Threads are not included."""
        processes = self._streams.processes(wait=True) if self._num_workers else {}
        return [_WorkerHandle(processes[number]) for number in sorted(processes)]

    def _shutdown_workers(self) -> None:
        """Stop the workers. Calling this again has no effect."""
        if self._shutdown:
            return
        self._ended = True
        self._pinner.close()
        if self._num_workers:
            # An earlier, interrupted call may already have saved the statistics.
            if self.progress.stats is None:
                self.progress.stats = self.stats()
            self._streams.close()
        # Set this last, so that another call can complete an interrupted one.
        self._shutdown = True

    # Module globals may be gone when the interpreter exits.
    def __del__(self, sys: Any = sys) -> None:
        """Save the statistics. The `Streams` object stops without blocking."""
        if self._shutdown or not self._num_workers or sys.is_finalizing():
            return
        if self._run.is_ours:
            self.progress.stats = self.stats()

    @property
    def _run(self) -> Run[Any]:
        run: Run[Any] = self._streams._run
        return run

    def stats(self) -> Stats:
        """Return the statistics so far; see `cseq.Stats`."""
        stats: Stats = self._streams.stats()
        return stats


class _WorkerHandle:
    """A worker process with the interface of `multiprocessing.Process`.

    `terminate` kills it, because workers ignore SIGTERM.
    """

    def __init__(self, child: Child) -> None:
        self._child, self.pid = child, child.pid
        self.kill = self.terminate = child.kill

    @property
    def exitcode(self) -> int | None:
        return self._child.code

    def is_alive(self) -> bool:
        return not self._child.ended.wait(0)

    def join(self, timeout: float | None = None) -> None:
        self._child.ended.wait(-1.0 if timeout is None else timeout)
