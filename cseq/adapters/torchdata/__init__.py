"""torchdata's MultiProcessingReadingService for DataLoader2, on cseq's engine.

The graph of datapipes is split into up to three parts::

    dispatching process            worker processes 0 … N-1              main process

    source ─► … ─► dispatcher ──►  (sharded) ─► map, batch, … ──► round robin ─► tail ─► outlet
    only with                      all replicable datapipes       0, 1, …, N-1   all other
    sharding_round_robin_dispatch                                 in turn        datapipes

The worker processes and the dispatching process are two `Streams` objects. The main process passes
items from the dispatching process to the workers (`Relay`).
"""

from __future__ import annotations

import os
import pickle
import warnings
from functools import partial
from multiprocessing import get_all_start_methods
from typing import TYPE_CHECKING, Any

try:
    with warnings.catch_warnings():
        # Otherwise, every process prints a deprecation warning.
        warnings.filterwarnings("ignore", r"[\s#]*WARNING!\s+The 'datapipes'", UserWarning)
        from torch.utils.data.graph import traverse_dps
        from torchdata.dataloader2.graph import set_graph_random_seed
        from torchdata.dataloader2.graph._serialization import clone
        from torchdata.dataloader2.graph.utils import _find_replicable_branches
        from torchdata.dataloader2.random import SeedGenerator
        from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
        from torchdata.dataloader2.utils import WorkerInfo
        from torchdata.dataloader2.utils.dispatch import (
            _DummyIterDataPipe,
            find_lca_round_robin_sharding_dp,
        )
except ImportError as error:
    raise ImportError(
        "cseq.adapters.torchdata needs torch and torchdata 0.9, the last release with DataLoader2; "
        "install them with: pip install 'cseq-loader[torchdata]'"
    ) from error

from cseq.adapters.torchdata.ends import Outlet, PipeReader
from cseq.adapters.torchdata.graph import initialized, pause_all, replaced, resume_all, shard
from cseq.adapters.torchdata.relay import Relay, telling
from cseq.adapters.torchdata.worker import Dispatcher, PipeEpoch, Worker
from cseq.check import flag, integer, seconds
from cseq.runs import close_elsewhere
from cseq.stream import Streams

if TYPE_CHECKING:
    from cseq.adapters.torchdata.graph import DataPipe, GraphFn, InitFn, ResetFn
    from cseq.engine.tickets.items import Items
    from cseq.measure.stats import Stats
    from cseq.runs import Run

__all__ = ["MultiProcessingReadingService"]

STATE_VERSION = 1


class MultiProcessingReadingService(CheckpointableReadingServiceInterface):  # type: ignore[misc]
    """Runs the graph of a ``DataLoader2`` in worker processes.

    It replaces ``torchdata.dataloader2.MultiProcessingReadingService``, with the same arguments,
    sharding, order and seeds. `docs/how-to/from-torchdata.md` lists the differences.

    Parameters
    ----------
    num_workers : int
        The number of worker processes. With 0, the graph runs in this process.
    multiprocessing_context : {None, 'forkserver', 'spawn', 'fork'}
        How to start the processes. Defaults to a fork server where available.
    worker_prefetch_cnt : int
        The number of items to prefetch per worker.
    main_prefetch_cnt : int
        The number of additional items to prefetch, across all workers.
    worker_init_fn : callable, optional
        ``worker_init_fn(datapipe, WorkerInfo) -> datapipe``, called once in each worker.
    worker_reset_fn : callable, optional
        ``worker_reset_fn(datapipe, WorkerInfo, SeedGenerator) -> datapipe``, called in each worker
        at the start of every epoch.
    max_restarts : int
        The maximum number of dead processes to replace per epoch. The next death raises
        `cseq.WorkerDied`. A new process skips the items that were already delivered, so the graph
        must yield the same items for the same seeds. Must be 0 with a dispatching process.
    timeout : float, optional
        How many seconds to wait for an item before raising `cseq.WorkerTimeout`.
    repeat_epochs : bool
        If True, all epochs after ``DataLoader2.seed(s)`` have the same order and random numbers, as
        in torchdata, and `checkpoint` does not save the position in an epoch.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    AssertionError
        If `multiprocessing_context` is not an available start method.
    """

    # `__del__` runs even if `__init__` raises, so these are class attributes.
    _streams: Streams | None = None
    _relay: Relay | None = None
    _outlet: Outlet | None = None
    _pid = 0

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
        self.num_workers = integer("num_workers", num_workers, least=0)
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
        self.worker_prefetch_cnt = integer("worker_prefetch_cnt", worker_prefetch_cnt, least=0)
        self.main_prefetch_cnt = integer("main_prefetch_cnt", main_prefetch_cnt, least=0)
        self.worker_init_fn = worker_init_fn
        self.worker_reset_fn = worker_reset_fn
        self.max_restarts = integer("max_restarts", max_restarts, least=0)
        self.timeout = seconds("timeout", timeout)
        self.repeat_epochs = flag("repeat_epochs", repeat_epochs)
        # The last datapipe of the user's graph that runs in this process.
        self._end_datapipe: DataPipe = None
        # The number of the current epoch, and its state without the position.
        self._number = 0
        self._epoch: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    # -- the interface of DataLoader2

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Split the graph, start the processes, and return this process's part of the graph.

        Parameters
        ----------
        datapipe : DataPipe
            The last datapipe of the graph. The graph is copied before it is split.
        """
        self.finalize()
        self._pid = os.getpid()
        if self.num_workers:
            self._end_datapipe = self._start(datapipe)
        else:
            info = WorkerInfo(1, 0)
            shard(datapipe, info)
            self._end_datapipe = initialized(datapipe, info, self.worker_init_fn)
        self._outlet = Outlet(self._end_datapipe)
        return self._outlet

    def _start(self, datapipe: DataPipe) -> DataPipe:
        """Start the processes and return the main process's part of the graph."""
        options: dict[str, Any] = {
            "start_method": self.multiprocessing_context,
            "max_restarts": self.max_restarts,
            "timeout": self.timeout,
        }
        workers, ahead = self.num_workers, 1 + self.worker_prefetch_cnt
        datapipe, address = clone(datapipe), None
        try:
            dispatched = find_lca_round_robin_sharding_dp(traverse_dps(datapipe))
            if dispatched is not None:
                if self.max_restarts:
                    raise ValueError(
                        f"max_restarts={self.max_restarts} cannot be combined with "
                        "sharding_round_robin_dispatch, because items that were dispatched to a "
                        "dead worker are lost; pass 0"
                    )
                datapipe = replaced(datapipe, dispatched, _DummyIterDataPipe())
                make = partial(Dispatcher, dispatched)
                self._relay = Relay(Streams(make, 1, prefetch=workers * ahead, **options), workers)
                self._relay.open()
                address = self._relay.address
            roots = _find_replicable_branches(traverse_dps(datapipe))
            if len(roots) != 1:
                raise AssertionError(
                    "MultiProcessingReadingService only supports single replicable branch "
                    f"currently; this graph has {len(roots)}"
                )
            worker = partial(Worker, roots[0], self.worker_init_fn, self.worker_reset_fn, address)
            ahead -= -self.main_prefetch_cnt // workers
            self._streams = Streams(worker, workers, prefetch=ahead, **options)
            return replaced(datapipe, roots[0], PipeReader(self._streams, self._relay))
        except BaseException:
            self.finalize()
            raise

    def initialize_iteration(
        self, seed_generator: SeedGenerator, iter_reset_fn: GraphFn | None = None
    ) -> GraphFn | None:
        """Start an epoch, even if the previous one is unfinished.

        Parameters
        ----------
        seed_generator : SeedGenerator
            The source of all seeds for the epoch. It is advanced unless `repeat_epochs` is set.
        iter_reset_fn : callable, optional
            The reset function of another reading service, for workers and the dispatcher.
        """
        if self._outlet is None:
            raise RuntimeError("initialize_iteration() was called before initialize()")
        _stop(self._outlet, self._streams, self._relay)
        seeds, skip = seed_generator, 0
        state, self._restored = self._restored, None
        if (
            state is not None
            and state["position"] is not None
            # The seeds are equal after `_restore_checkpoint_beginning_of_epoch`.
            and not (state["seeded"] and _peeked(seeds) == _peeked(state["seeds"]))
        ):
            seeds, skip = state["seeds"], state["position"]
        # Without `DataLoader2.seed`, the seeds come from a new generator.
        is_seeded = _peeked(seeds) != _peeked(SeedGenerator())
        self._epoch = {"seeds": clone(seeds), "seeded": is_seeded}
        set_graph_random_seed(self._end_datapipe, seeds)
        if self._streams is not None:
            self._number += 1
            epochs = [
                PipeEpoch(self._number, seeds.spawn(worker), iter_reset_fn)
                for worker in range(self.num_workers)
            ]
            with telling(self._relay):
                if self._relay is not None:
                    self._relay.begin_epoch(epochs[0])
                self._streams.begin(epochs)
            if not self.repeat_epochs:
                seeds.seed(seeds.generate_shared_seed())
        self._outlet.begin_epoch(skip)
        return None

    def finalize(self) -> None:
        """Stop all processes in a background thread. Calling this again has no effect."""
        parts = self._outlet, self._streams, self._relay
        if parts != (None, None, None):
            close_elsewhere(partial(_close, *parts), self._pid)
        self._outlet = self._streams = self._relay = None

    __del__ = finalize

    # -- the state of a DataLoader2

    def checkpoint(self) -> bytes:
        """Return the position in the epoch and the epoch's seeds, pickled."""
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
        """Initialize the graph and make the next epoch resume from a saved position.

        The epoch skips the items that were already returned.

        Raises
        ------
        ValueError
            If the state has a different version or number of workers.
        """
        state = pickle.loads(serialized_state) if serialized_state else None
        if state is not None:
            _check_state(state, self.num_workers)
        adapted = self.initialize(datapipe)
        self._restored = state
        return adapted

    # -- pause, resume

    def _pause(self, pause_fn: GraphFn | None = None) -> None:
        """Pause the graph in all processes. Prefetched items are kept."""
        streams = self._needs_workers("pause")
        pause_all(self._end_datapipe)
        with telling(self._relay):
            streams.ask("pause", pause_fn, behind=True)
            if self._relay is not None:
                self._relay.ask("pause", pause_fn)

    def _resume(self, resume_fn: GraphFn | None = None) -> None:
        streams = self._needs_workers("resume")
        with telling(self._relay):
            if self._relay is not None:
                self._relay.ask("resume", resume_fn)
            streams.ask("resume", resume_fn, behind=True)
        resume_all(self._end_datapipe)

    def _limit(self, num_batches: int | None, limit_fn: object = None) -> None:
        """Do nothing. DataLoader2 counts the items itself, but warns if this method is missing."""

    def _needs_workers(self, verb: str) -> Streams:
        if self._streams is None:
            raise RuntimeError(
                f"cannot {verb}: there are no worker processes (num_workers={self.num_workers}); "
                "use `InProcessReadingService`, or call this after the first iter()"
            )
        return self._streams

    # -- additions to the original

    def stats(self) -> Stats:
        """Return the workers' statistics so far; see `cseq.Stats`."""
        return self._needs_workers("count items").stats()

    @property
    def _run(self) -> Run[Items] | None:
        """The workers' run, used by `cseq.testing`."""
        return self._streams._run if self._streams is not None else None


def _stop(outlet: Outlet | None, streams: Streams | None, relay: Relay | None) -> None:
    """Stop the epoch in all processes and wake up waiting threads."""
    if relay is not None:
        relay.stop()
    if streams is not None:
        streams.interrupt()
    if outlet is not None:
        outlet.close()


def _close(outlet: Outlet | None, streams: Streams | None, relay: Relay | None) -> None:
    _stop(outlet, streams, relay)
    if streams is not None:
        streams.close()
    if relay is not None:
        relay.close()


def _check_state(state: dict[str, Any], num_workers: int) -> None:
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"this state has version {state['version']}, but cseq reads version {STATE_VERSION}"
        )
    if state["position"] is not None and state["num_workers"] != num_workers:
        raise ValueError(
            f"this state was saved in an epoch with num_workers={state['num_workers']}, but here "
            f"num_workers={num_workers}, and the order of items depends on it; pass the same number"
        )


def _peeked(seeds: SeedGenerator) -> tuple[int, int]:
    """Return a generator's next seeds without advancing it."""
    copy = clone(seeds)
    return copy.generate_shared_seed(), copy.generate_seed()
