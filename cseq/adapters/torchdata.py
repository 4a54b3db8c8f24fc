"""torchdata's MultiProcessingReadingService for DataLoader2, on cseq's engine.

The graph of datapipes is cut into at most three parts::

    dispatching process            worker processes 0 … N-1              main process

    source ─► … ─► dispatcher ──►  (sharded) ─► map, batch, … ──► round robin ─► tail ─► outlet
    if there is a                  all that is replicable         0, 1, …, N-1   what is not
    sharding_round_robin_dispatch                                 by turns       replicable

Workers are the streams of one `Streams`, the dispatching process is the only stream of another.
What a worker makes of its own accord goes to the main process through slots of shared memory; what
it needs from the dispatching process it asks of the main process (`Relay`), because the main
process is there for as long as it is asked: either end may die, be replaced and begin again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import warnings
from functools import partial
from multiprocessing import get_all_start_methods
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from cseq.adapters._torchdata_graph import (
    dispatched_root,
    pause_all,
    replaced,
    replicable_root,
    resume_all,
    shard_and_init,
)
from cseq.adapters._torchdata_library import (
    CheckpointableReadingServiceInterface,
    Epoch,
    IterDataPipe,
    SeedGenerator,
    WorkerInfo,
    set_graph_random_seed,
)
from cseq.adapters._torchdata_relay import Dispatched, Relay
from cseq.adapters._torchdata_worker import Dispatcher, Worker
from cseq.check import count, flag, seconds
from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.adapters._torchdata_library import DataPipe, GraphFn, InitFn, LimitFn, ResetFn
    from cseq.run import Run
    from cseq.stats import Stats
    from cseq.stream import StreamPool

__all__ = ["MultiProcessingReadingService"]

STATE_VERSION = 1


class MultiProcessingReadingService(CheckpointableReadingServiceInterface):  # type: ignore[misc]
    """Run the graph of a ``DataLoader2`` in worker processes.

    Takes the place of ``torchdata.dataloader2.MultiProcessingReadingService``: same arguments,
    same sharding, same order, same seeds. `docs/from-torchdata.md` says what differs.

    Parameters
    ----------
    num_workers : int
        Worker processes; 0 runs the graph in this process.
    multiprocessing_context : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started; None: forkserver where it exists.
    worker_prefetch_cnt : int
        Items that each worker may make ahead of what was asked for.
    main_prefetch_cnt : int
        Items that all workers together may make ahead on top of that.
    worker_init_fn : callable, optional
        ``worker_init_fn(datapipe, WorkerInfo) -> datapipe``, called once in each worker.
    worker_reset_fn : callable, optional
        ``worker_reset_fn(datapipe, WorkerInfo, SeedGenerator) -> datapipe``, called in each
        worker as each epoch begins, after everything has been seeded.
    max_restarts : int
        Processes that may die and be replaced in an epoch. A replacement repeats the epoch of the
        one that died and leaves out what that one had delivered, so above 0 is for graphs that
        repeat themselves under the same seeds. 0: the first death raises `cseq.WorkerDied`.
    timeout : float, optional
        Seconds that an item may take before `cseq.WorkerTimeout` is raised.
    repeat_epochs : bool
        As in the original, all epochs after one ``DataLoader2.seed(s)`` have the same shuffle and
        the same random numbers; and `checkpoint` does not keep the position within an epoch.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong: which one, its value, and what to do.
    AssertionError
        `multiprocessing_context` is not a start method of this system.
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: str | None = None,
        worker_prefetch_cnt: int = 10,
        main_prefetch_cnt: int = 10,
        worker_init_fn: InitFn | None = None,
        worker_reset_fn: ResetFn | None = None,
        *,
        max_restarts: int = 0,
        timeout: float | None = None,
        repeat_epochs: bool = False,
    ) -> None:
        self._engine: _Engine | None = None
        self.num_workers = count("num_workers", num_workers, least=0)
        if not num_workers:
            warnings.warn(
                "Please use `InProcessReadingService` for num_workers=0", UserWarning, stacklevel=2
            )
        methods = get_all_start_methods()
        if multiprocessing_context is not None and multiprocessing_context not in methods:
            raise AssertionError(
                f"Please choose one available multiprocessing context from {methods}"
            )
        self.multiprocessing_context = multiprocessing_context
        self.worker_prefetch_cnt = count("worker_prefetch_cnt", worker_prefetch_cnt, least=0)
        self.main_prefetch_cnt = count("main_prefetch_cnt", main_prefetch_cnt, least=0)
        self.worker_init_fn = worker_init_fn
        self.worker_reset_fn = worker_reset_fn
        self.max_restarts = count("max_restarts", max_restarts, least=0)
        self.timeout = seconds("timeout", timeout)
        self.repeat_epochs = flag("repeat_epochs", repeat_epochs)
        self._end_datapipe: DataPipe = None  # the last datapipe of the user's that is here
        self._outlet: _Outlet | None = None
        self._cuts: list[tuple[DataPipe, DataPipe]] = []  # what is in the graph in whose place
        self._epoch: dict[str, Any] = {}  # what a state has to say of it, beside the position
        self._restored: dict[str, Any] | None = None

    # -- what DataLoader2 calls

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Cut the graph, start the processes, and return what is left for this process.

        Parameters
        ----------
        datapipe : DataPipe
            The end of the graph, which is changed in place.
        """
        self.finalize()
        datapipe = self._mended(datapipe)
        if self.num_workers:
            self._end_datapipe = self._start(datapipe)
        else:
            self._end_datapipe = shard_and_init(datapipe, WorkerInfo(1, 0), self.worker_init_fn)
        self._outlet = _Outlet(self._end_datapipe)
        return self._outlet

    def _start(self, datapipe: DataPipe) -> DataPipe:
        """Start the processes; return the end of what is left of the graph."""
        try:
            dispatched = dispatched_root(datapipe)
            if dispatched is not None:
                datapipe = self._cut(datapipe, dispatched, Dispatched())
            root = replicable_root(datapipe)
            self._engine = _Engine(self.num_workers)
            self._engine.open(self, root, dispatched)
            return self._cut(datapipe, root, _Reader(self._engine))
        except BaseException:
            self._mended(datapipe)
            self.finalize()
            raise

    def _cut(self, end: DataPipe, old: DataPipe, new: DataPipe) -> DataPipe:
        """Put a datapipe in the place of a part of the graph; return the end of the graph."""
        self._cuts.append((new, old))
        return replaced(end, old, new)

    def _mended(self, end: DataPipe) -> DataPipe:
        """Undo the cuts of an attempt that has failed, or was interrupted."""
        while self._cuts:
            end = replaced(end, *self._cuts[-1])
            del self._cuts[-1]
        return end

    def initialize_iteration(
        self, seed_generator: SeedGenerator, iter_reset_fn: GraphFn | None = None
    ) -> GraphFn | None:
        """Begin an epoch, wherever the last one stands.

        Parameters
        ----------
        seed_generator : SeedGenerator
            Where all seeds of the epoch come from. It is then moved on, so that the next epoch
            has others (unless `repeat_epochs`).
        iter_reset_fn : callable, optional
            Of another reading service; called with the graph in every worker.
        """
        if self._outlet is None:
            raise RuntimeError("initialize_iteration() comes after initialize()")
        self._stop()
        seeds, skip = self._where_to_begin(seed_generator)
        self._epoch = {"seeds": _copied(seeds), "seeded": _is_seeded(seeds)}
        set_graph_random_seed(self._end_datapipe, seeds)
        if self._engine is not None:
            self._engine.begin(seeds, iter_reset_fn)
            if not self.repeat_epochs:
                seeds.seed(seeds.generate_shared_seed())
        self._outlet.begin(skip)
        return None

    def _where_to_begin(self, given: SeedGenerator) -> tuple[SeedGenerator, int]:
        """Choose the epoch's seeds, and how many of its items to leave out at the beginning."""
        state, self._restored = self._restored, None
        if state is None or state["position"] is None:
            return given, 0
        before = state["seeds"]
        if state["seeded"] and _peeked(given) == _peeked(before):
            return given, 0  # `_restore_checkpoint_beginning_of_epoch` was called
        return before, state["position"]

    def finalize_iteration(self) -> None:
        """Do nothing: a finished epoch has nothing left, and a stale iterator may call this."""

    def finalize(self) -> None:
        """Stop everything, from any state; twice is fine."""
        self._stop()
        if self._engine is not None:
            self._engine.close()  # if this is interrupted, it can be done again
            self._engine = None

    def _stop(self) -> None:
        """End reading in this process, also by threads of the tail."""
        if self._engine is not None:
            self._engine.stop()
        if self._outlet is not None:
            self._outlet.close()

    # -- the state of a DataLoader2

    def checkpoint(self) -> bytes:
        """Describe where the epoch is: the items that were handed out, and its seeds."""
        position = None if self._outlet is None else self._outlet.position
        if self.repeat_epochs or position is None:
            return pickle.dumps({"version": STATE_VERSION, "position": None})
        state = {
            "version": STATE_VERSION,
            "num_workers": self.num_workers,
            "position": position,
            **self._epoch,
        }
        return pickle.dumps(state)

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Initialize, and let the next epoch be the one described, from where it was.

        It is made again from its start and what was handed out is left out.

        Raises
        ------
        ValueError
            The state is of another version or number of workers.
        """
        state = pickle.loads(serialized_state) if serialized_state else None
        if state is not None:
            _check_state(state, self.num_workers)
        adapted = self.initialize(datapipe)
        self._restored = state
        return adapted

    # -- pause, resume, limit

    def _pause(self, pause_fn: GraphFn | None = None) -> None:
        """Hold every thread in every process; what was made ahead is kept."""
        engine = self._needs_workers("pause")
        pause_all(self._end_datapipe)
        engine.ask("pause", pause_fn)

    def _resume(self, resume_fn: GraphFn | None = None) -> None:
        """Go on after `_pause`."""
        engine = self._needs_workers("resume")
        engine.ask("resume", resume_fn, first_dispatched=True)
        resume_all(self._end_datapipe)

    def _limit(self, num_batches: int | None, limit_fn: LimitFn | None = None) -> None:
        """Pass a limit on to the workers, if another reading service says how."""
        if limit_fn is None or self._engine is None:
            return
        for worker in range(self.num_workers):
            share = None
            if num_batches is not None:
                share = num_batches // self.num_workers + (worker < num_batches % self.num_workers)
            self._engine.streams.ask("limit", limit_fn, share, worker=worker)

    def _needs_workers(self, verb: str) -> _Engine:
        """Return the engine; there is none without workers."""
        if self._engine is None:
            raise RuntimeError(
                f"cannot {verb}: there are no worker processes (num_workers={self.num_workers}); "
                "use `InProcessReadingService`, or call this after the first iter()"
            )
        return self._engine

    # -- ours

    def stats(self) -> Stats:
        """Count what the workers have done so far; see `cseq.Stats`."""
        return self._needs_workers("count").streams.stats()

    @property
    def _run(self) -> Run[StreamPool] | None:
        """The running workers, for `cseq.testing`."""
        return self._engine.streams._run if self._engine is not None else None


def _check_state(state: dict[str, Any], num_workers: int) -> None:
    """Raise if a state does not belong here."""
    if state["version"] != STATE_VERSION:
        raise ValueError(f"this state is of version {state['version']}, not {STATE_VERSION}")
    if state["position"] is not None and state["num_workers"] != num_workers:
        raise ValueError(
            f"this state is within an epoch of num_workers={state['num_workers']}, not "
            f"{num_workers}, and the order of items depends on it; give the same number"
        )


def _copied(seeds: SeedGenerator) -> SeedGenerator:
    """Copy a seed generator."""
    copy: SeedGenerator = pickle.loads(pickle.dumps(seeds))
    return copy


def _peeked(seeds: SeedGenerator) -> tuple[int, int]:
    """Tell what a seed generator would draw, which says whether two are alike."""
    copy = _copied(seeds)
    return copy.generate_shared_seed(), copy.generate_seed()


def _is_seeded(seeds: SeedGenerator) -> bool:
    """Whether `DataLoader2.seed` was called; otherwise seeds are what torch would draw now."""
    return _peeked(seeds) != _peeked(SeedGenerator())


# ── in the main process ────────────────────────────────────────────────────────────────────


class _Engine:
    """The processes behind one reading service."""

    def __init__(self, num_workers: int) -> None:
        self._pid = os.getpid()
        self._num_workers = num_workers
        self._number = 0  # of the epoch
        self._relay: Relay | None = None
        self._streams: Streams | None = None

    def open(
        self, service: MultiProcessingReadingService, root: DataPipe, dispatched: DataPipe
    ) -> None:
        """Start the processes. Whatever is raised, also by a signal handler: `close` ends them."""
        ahead = 1 + service.worker_prefetch_cnt
        options: dict[str, Any] = {
            "start_method": service.multiprocessing_context,
            "max_restarts": service.max_restarts,
            "timeout": service.timeout,
        }
        address = None
        if dispatched is not None:
            make = partial(Dispatcher, dispatched)
            room = self._num_workers * ahead
            streams = Streams(make, 1, prefetch=room, encoded=True, **options)
            self._relay = Relay(streams, self._num_workers)
            address = self._relay.open()
        worker = partial(Worker, root, service.worker_init_fn, service.worker_reset_fn, address)
        ahead += -(-service.main_prefetch_cnt // self._num_workers)
        self._streams = Streams(worker, self._num_workers, prefetch=ahead, **options)

    @property
    def streams(self) -> Streams:
        """The workers."""
        assert self._streams is not None, "open() comes first"
        return self._streams

    def begin(self, seeds: SeedGenerator, reset_fn: GraphFn | None) -> None:
        """Begin an epoch in all processes."""
        self._number += 1
        if self._relay is not None:
            self._relay.begin(Epoch(self._number, seeds.spawn(0), reset_fn))
        self.streams.begin(
            [
                Epoch(self._number, seeds.spawn(worker), reset_fn)
                for worker in range(self._num_workers)
            ]
        )

    def ask(self, verb: str, function: GraphFn | None, *, first_dispatched: bool = False) -> None:
        """Have all processes pause or resume, when they have made what they were asked for."""
        if self._relay is not None and first_dispatched:
            self._relay.ask(verb, function)
        self.streams.ask(verb, function, behind=True)
        if self._relay is not None and not first_dispatched:
            self._relay.ask(verb, function)

    def stop(self) -> None:
        """End the epoch: what waits for an item of it raises InterruptedError."""
        if os.getpid() == self._pid:
            if self._relay is not None:
                self._relay.stop()
            if self._streams is not None:
                self._streams.interrupt()

    def close(self) -> None:
        """End all processes; one that was forked off this process has none to end.

        Twice is fine, also if the first time was interrupted.
        """
        if os.getpid() != self._pid:
            return
        self.stop()
        if self._streams is not None:
            self._streams.close()
        if self._relay is not None:
            self._relay.close()


class _Unhooked:
    """An ``__iter__`` for datapipes, without what torch does around each item of one's own."""

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError


class _Reader(_Unhooked, IterDataPipe):  # type: ignore[misc]
    """Where the workers' items come out; the source of what is left of the graph here."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    def _iterate(self) -> Iterator[Any]:
        return iter(self._engine.streams)


class _Outlet(_Unhooked, IterDataPipe):  # type: ignore[misc]
    """The end of the graph: counts what is handed out, and can be closed.

    Attributes
    ----------
    position : int or None
        Items of this epoch that were handed out; None if no epoch is under way.
    """

    def __init__(self, pipe: DataPipe) -> None:
        self.source_datapipe = pipe
        self.position: int | None = None
        self._skip = 0
        self._running: Iterator[Any] | None = None

    def begin(self, skip: int) -> None:
        """Begin an epoch; its first items were handed out before."""
        self.position = self._skip = skip

    def _iterate(self) -> Iterator[Any]:
        self._running = self._items(self._skip)
        return self._running

    def _items(self, skip: int) -> Iterator[Any]:
        """Hand out the items of an epoch."""
        items = iter(self.source_datapipe)
        found = sum(1 for _ in itertools.islice(items, skip))
        if found < skip:
            raise RuntimeError(
                f"the epoch was left off after {skip} items, but now has {found} only: this graph "
                "does not repeat itself under the same seeds, or its data has changed"
            )
        for place, item in enumerate(items, skip + 1):
            self.position = place
            yield item
        self.position = None

    def close(self) -> None:
        """End the epoch: threads of the graph end as its iterators are closed."""
        running, self._running = self._running, None
        self.position = None
        if isinstance(running, GeneratorType):
            with contextlib.suppress(ValueError):  # another thread is in it, and was interrupted
                running.close()
