"""The trainer's iterator over a loader's batches, of workers or made here."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

import torch

from cseq.adapters.torch import names, worker
from cseq.adapters.torch.options import start_method_of
from cseq.adapters.torch.order import Keys, leaves_no_trace
from cseq.adapters.torch.pinning import Pinner
from cseq.adapters.torch.ranks import divisions, place_of
from cseq.adapters.torch.state import LoaderProgress
from cseq.adapters.torch.stateful import is_stateful
from cseq.encoding import failure
from cseq.encoding.pickling import dumps
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.indexing.leaving import indices_of, note_batch, note_samples
from cseq.stream import ItemFailure, Naming, Streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from cseq.adapters.torch.stateful import Stateful
    from cseq.measure.stats import Stats
    from cseq.processes.launcher import Child
    from cseq.runs import Run

__all__ = ["LoaderIterator", "LoaderTimeout"]

DRAWN_AGAIN = (
    "; with rng='worker', its random generators restart from the worker's seed, so earlier numbers "
    "repeat; rng='batch' draws the same as without the death, max_restarts=0 forbids replacements"
)
INTERRUPTED = (
    "this iterator's epoch is over: its workers were closed, or they belong to the process that "
    "forked this one; call iter() of the DataLoader again"
)
LEFT_OUT = Exception()  # is not raised


def _stateful(dataset: Any) -> Stateful:
    """Return a data set whose state was asked for: its class in torch has none."""
    return cast("Stateful", dataset)


class LoaderTimeout(WorkerTimeout, RuntimeError):
    """No batch came within the loader's `timeout`; the message shows where its worker is.

    The iterator goes on: the batch comes later, in its place.
    """


class LoaderIterator(names.Workers):
    """Batches, one by one.

    It is an instance of torch's class of iterators with workers, with the attributes and methods
    that others use. All that moves batches is cseq's.

    Parameters
    ----------
    rng, on_error, max_restarts, worker_method
        See `DataLoader`.
    resume : dict, optional
        Where the epoch is to go on; see `state.read`.
    snapshot_every : int, optional
        See `FetcherEpoch`; None: no state is asked for.

    Attributes
    ----------
    progress : LoaderProgress
        The same object in all epochs of persistent workers.
    """

    _num_yielded: int
    _base_seed: Any
    _sampler_iter: Any
    _taker: int  # the thread that is in `__next__`

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rng: str,
        on_error: str,
        resume: dict[str, Any] | None = None,
        snapshot_every: int | None = None,
        max_restarts: int,
        worker_method: str = "multiprocessing",
    ) -> None:
        self._shutdown = True
        self._taker = 0
        self._options: dict[str, Any] = {
            "rng": rng,
            "on_error": on_error,
            "snapshot_every": snapshot_every,
            "max_restarts": max_restarts,
            "worker_method": worker_method,
        }
        self._in_threads = worker_method == "thread" and loader.num_workers > 0
        self._kind = f"DataLoader worker {'thread' if self._in_threads else 'process'}"
        self._rng, self._skips_errors = rng, on_error == "skip"
        self._is_iterable = loader._dataset_kind == names.ITERABLE
        if resume is not None and resume["base_seed"] is None and loader.num_workers == 0:
            # The data set is as it was left, before anything is drawn for the next epoch.
            for state in filter(None, resume["workers"]):
                if state["dataset"] is not None:
                    _stateful(loader.dataset).load_state_dict(state["dataset"])
            resume = {**resume, "workers": [None]}
        keeps_state = snapshot_every is not None and not self._is_iterable
        self._shares_state = self._in_threads and snapshot_every and is_stateful(loader.dataset)
        if self._in_threads and self._is_iterable and loader.num_workers > 1:
            raise ValueError(
                f"dataset={type(loader.dataset).__name__} is an IterableDataset, and threads do "
                "not divide one: get_worker_info() is None in them; give num_workers=1, or "
                "worker_method='multiprocessing'"
            )
        if self._shares_state and loader.num_workers > 1:
            raise ValueError(
                f"dataset={type(loader.dataset).__name__} has a state, and threads share the data "
                "set: its state is not that of one worker; give num_workers=1, "
                "worker_method='multiprocessing', or snapshot_every_n_steps=0"
            )
        order = Keys(loader, keeps_state=keeps_state, resume=resume)
        self.progress = LoaderProgress(loader, order, rng=rng)
        goes_on = resume is not None and resume["base_seed"] is not None
        trainers = torch.get_rng_state() if goes_on and loader.generator is None else None
        names.Base.__init__(self, loader)
        if trainers is not None:  # the epoch has drawn its seed, where it began
            torch.set_rng_state(trainers)
        torchs = names.Workers if self._num_workers else names.Inline
        self._profile_name = f"enumerate(DataLoader)#{torchs.__name__}.__next__"
        self._in_order = bool(not self._num_workers or getattr(loader, "in_order", True))
        every = snapshot_every or 0
        # Batches of keys are not made again for a state: it has to be that of the last one.
        self._snapshot_every = every if self._is_iterable else min(1, every)
        self._keeps_state = keeps_state
        self._maker = 0  # the worker of the latest batch of an IterableDataset, or with a state
        self._after: bytes | None = None  # and the state after it
        self._error: BaseException | None = None  # what is raised instead of the next batch
        self._pinner = Pinner(self._pin_memory_device)
        self._streams = self._open(loader, max_restarts)
        self._shutdown = False
        self._items: Any
        self._ended = False
        try:
            self._reset(loader, first_iter=True, resume=resume)
        except BaseException:
            self._shutdown_workers()
            raise

    def _open(self, loader: DataLoader[Any], max_restarts: int) -> Any:
        self._prefetch_factor = loader.prefetch_factor
        in_threads = self._in_threads
        method = start_method_of(loader) if self._num_workers and not in_threads else None
        is_forked = method == "fork"
        is_seeded = self._rng == "batch"
        setup: Any = worker.Fetching(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
            self._skips_errors,
            is_seeded,
            loader.worker_init_fn,
            worker.modes_here() if is_forked else [],
            in_threads,
            self._pinner.in_threads() if in_threads and self._pin_memory else None,
        )
        if self._num_workers == 0:
            if self._timeout != 0:
                raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
            return worker.FetcherHere(setup)
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        keys_first = is_forked and (self._is_iterable or leaves_no_trace(self._index_sampler))
        streams = Streams(
            setup,
            self._num_workers,
            prefetch=self._prefetch_factor,
            start_method=method,
            max_restarts=max_restarts,
            timeout=float(self._timeout) or None,
            errors="return",
            naming=Naming(
                "batch",
                lost="" if is_seeded else DRAWN_AGAIN,
                samples=worker.count if self._auto_collation else None,
                interrupted=INTERRUPTED,
            ),
            lethal="return" if self._skips_errors and not self._is_iterable else "raise",
            launch="begin" if keys_first else "now",
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
        """Begin an epoch; what is left of the one before is dropped.

        In a process that was forked off, persistent workers are its parent's: it has its own.
        """
        if not first_iter and self._num_workers and not self._run.is_ours:
            LoaderIterator.__init__(self, loader, **self._options)
            vars(loader)["_progress"] = self.progress
            return
        self._pinner.forget()
        order, is_seeded = self.progress.order, self._rng == "batch"
        if first_iter:
            if self._num_workers and not is_seeded:  # torch asks a sampler for two iterators first
                order.look_again(resume if self._persistent_workers else None)
                names.Base._reset(self, loader, first_iter)
        else:
            if not is_seeded and not self._ended:
                # As torch's: what was asked for is made, since it draws numbers.
                self._streams.ask("get_ready", behind=True)
            order = Keys(loader, keeps_state=self._keeps_state)
            names.Base._reset(self, loader, first_iter)
            if is_seeded:  # as a new iterator does it
                drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                self._base_seed = drawn.item()
        if is_seeded and (known := order.seed()) is not None:
            self._base_seed = known
        if resume is not None:
            self._num_yielded = resume["_num_yielded"]
            if resume["base_seed"] is not None:
                self._base_seed = resume["base_seed"]
        self._ended = False
        self.progress.begin(order, self._base_seed, resume)
        self._begin(resume)

    def _begin(self, resume: dict[str, Any] | None) -> None:
        progress, keys = self.progress, None
        if not self._is_iterable:
            state = resume["sampler"] if resume else {}
            keys = progress.order.draw(self._sampler_iter, progress.yielded, state)
        index = next(iter(self._index_sampler)) if self._is_iterable else None  # always the same
        parts = divisions(self._index_sampler)
        rank = place_of(parts) if self._rng == "batch" else (0, 1)
        epochs = [
            worker.FetcherEpoch(
                self._base_seed,
                index=index,
                first=progress.counts[number] if keys is None else progress.yielded,
                state=progress.states[number],
                snapshot_every=self._snapshot_every,
                is_over=progress.ended[number],
                rank=rank,
            )
            for number in range(len(progress.counts))
        ]
        if self._shares_state and resume is None:  # the data set is as the last epoch left it
            progress.states = [dumps({"dataset": _stateful(self._dataset).state_dict(), "made": 0})]
        if self._num_workers == 0:
            progress.inline = self._streams.begin_with(epochs[0], keys)
        else:
            free = self._rng == "batch" and not is_stateful(self._dataset)
            self._streams.begin(
                epochs,
                keys,
                ordered=self._in_order,
                assign="free" if free else "turn",
                first=progress.turn,
            )
        if self._shares_state and resume:  # the data set gets its state even if no batch is left
            self._streams.ask("get_ready")
        self._items = iter(self._streams)

    # -- the next batch

    def __next__(self) -> Any:
        """Return the next batch, or raise what was raised instead of it.

        It is counted last, without a call: if a signal handler raises (Ctrl-C), a state does not
        have the batch, which this iterator may have lost, as torch's. For one thread at a time.
        """
        me = get_ident()
        if self._taker not in (0, me):
            raise RuntimeError("another thread is in next() of this iterator; take turns")
        self._taker = me
        try:
            while True:
                count = self._num_yielded
                if self._IterableDataset_len_called is not None or names.profiler_enabled():
                    batch = names.Base.__next__(self)  # with warnings, and named in a profile
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
            failed = None  # its traceback has this frame: the cycle would keep the workers alive

    def _next_data(self) -> Any:
        """Return the batch that `__next__` counts; or None, and there is an `_error`."""
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
            self._ended = True  # as a generator ends after an exception
            # It begins in torch's words, which people search for.
            told = f"DataLoader worker (pid(s) {died.pid}) exited unexpectedly: {died}"
            died.args = (told,)
            raise
        progress = self.progress
        if type(item) is ItemFailure:  # the batch could not be sent
            error = item.error
            indices = error.indices if isinstance(error, WorkerDied) else []
            return self._fail(error, f"batch {progress.yielded}", indices)
        if type(item) is worker.Item:
            self._after = item.state
            if (raised := item.error) is not None:
                if isinstance(raised, bytes):
                    error = failure.unpack(raised, self._maker, self._kind)
                    raised = failure.show_traceback(failure.named(error, item.place))
                place = None if item.is_setup else item.place
                return self._fail(raised, place, indices_of(item.key))
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

    def _fail(self, error: BaseException, place: str | None = None, indices: Any = ()) -> None:
        """Have an exception raised in place of the next batch; or that, of a `place`, left out."""
        self._num_yielded -= 1  # torch's `__next__` counts it, and warns of too many
        self._error = error
        if self._skips_errors and place is not None and isinstance(error, Exception):
            progress = self.progress
            progress.skipped.append(note_batch(place, None, progress.yielded, error, indices))
            self._error = LEFT_OUT

    def _pin_next(self) -> None:
        """Have the batch after the one that is received pinned beside the loop, if it is ready.

        It stays in the engine, and is taken as any other: no key is drawn for it.
        """
        following = self._streams.glance()
        batch = following.batch if type(following) is worker.Item else following
        self._pinner.forget()
        if batch is not None and type(batch) is not ItemFailure:
            self._pinner.begin(following, batch)

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
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]
        """The worker processes; another one once one has died. None are threads."""
        processes = self._streams.processes(wait=True) if self._num_workers else {}
        return [WorkerHandle(processes[number]) for number in sorted(processes)]

    def _shutdown_workers(self) -> None:
        """End the worker processes; twice is fine."""
        if self._shutdown:
            return
        self._ended = True
        self._pinner.close()
        if self._num_workers:
            if self.progress.stats is None:  # if `close` was interrupted, they are there already
                self.progress.stats = self.stats()
            self._streams.close()
        self._shutdown = True  # not before: if `close` is interrupted, it is called again

    def __del__(self, sys: Any = sys) -> None:  # at the end of the program, names are gone
        """Leave the counts to the loader. `Streams` end when they are dropped, nothing waits."""
        if self._shutdown or not self._num_workers or sys.is_finalizing():
            return
        if self._run.is_ours:
            self.progress.stats = self.stats()

    @property
    def _run(self) -> Run[Any]:
        run: Run[Any] = self._streams._run
        return run

    def stats(self) -> Stats:
        """Count what was done so far, and where time went; see `cseq.Stats`."""
        stats: Stats = self._streams.stats()
        return stats


class WorkerHandle:
    """A worker process, with the names of `multiprocessing.Process`."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self.kill = self.terminate = child.kill  # workers ignore SIGTERM

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal's number; None: it lives."""
        return self._child.code

    def is_alive(self) -> bool:
        """Whether it lives."""
        return not self._child.ended.wait(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        self._child.ended.wait(-1.0 if timeout is None else timeout)
