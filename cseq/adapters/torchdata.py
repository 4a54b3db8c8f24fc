"""torchdata's MultiProcessingReadingService for DataLoader2, on cseq's engine.

The graph of datapipes is cut into at most three parts::

    dispatching process            worker processes 0 … N-1              main process

    source ─► … ─► dispatcher ──►  (sharded) ─► map, batch, … ──► round robin ─► tail ─► outlet
    if there is a                  all that is replicable         0, 1, …, N-1   what is not
    sharding_round_robin_dispatch                                 by turns       replicable

Workers are the streams of one `Streams`, the dispatching process is the only stream of another.
What a worker makes of its own accord goes to the main process through slots of shared memory; what
it needs from the dispatching process it asks of the main process (`_Relay`), because the main
process is there for as long as anybody asks: either end may die, be replaced and begin again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from functools import partial
from multiprocessing import get_all_start_methods
from multiprocessing.connection import Connection, wait
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import failure, payload
from cseq.check import count, flag, seconds
from cseq.errors import WorkerDied
from cseq.stream import Streams

try:
    import torch
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
    from torch.utils.data.graph import traverse_dps
    from torch.utils.data.graph_settings import apply_sharding

    with warnings.catch_warnings():
        # That it is deprecated would be said again by every process.
        warnings.filterwarnings("ignore", r"[\s#]*WARNING!\s+The 'datapipes'", UserWarning)
        from torchdata.dataloader2.graph import (
            list_dps,
            replace_dp,
            set_datapipes_seed,
            set_graph_random_seed,
        )
        from torchdata.dataloader2.random import SeedGenerator
        from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
        from torchdata.dataloader2.utils import WorkerInfo
        from torchdata.datapipes.iter import (
            IterDataPipe,
            PinMemory,
            Prefetcher,
            ShardingRoundRobinDispatcher,
        )
        from torchdata.datapipes.map import MapDataPipe
except ImportError as error:
    raise ImportError(
        "cseq.adapters.torchdata needs torch and torchdata 0.9, the last release with DataLoader2; "
        "install them with: pip install 'cseq[torchdata]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from cseq.stats import Stats

    DataPipe: TypeAlias = Any  # an IterDataPipe or a MapDataPipe
    InitFn: TypeAlias = Callable[[DataPipe, Any], DataPipe]
    ResetFn: TypeAlias = Callable[[DataPipe, Any, Any], DataPipe]
    GraphFn: TypeAlias = Callable[[DataPipe], DataPipe]
    LimitFn: TypeAlias = Callable[[DataPipe, int | None], Any]

__all__ = ["MultiProcessingReadingService"]

STATE_VERSION = 1
QUICK = 0.0005  # seconds in which a relay looks for more items to send along
MOST_FOLDER = 72  # characters: macOS takes 103 for the name of a socket
MOST_TOGETHER = 64  # items that a relay sends in one message
DISPATCHING = "in dispatching process"


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
        if self.num_workers:
            self._end_datapipe = self._start(datapipe)
        else:
            self._end_datapipe = _shard_and_init(datapipe, WorkerInfo(1, 0), self.worker_init_fn)
        self._outlet = _Outlet(self._end_datapipe)
        return self._outlet

    def _start(self, datapipe: DataPipe) -> DataPipe:
        """Start the processes; return the end of what is left of the graph."""
        datapipe, dispatched = _cut_dispatched(datapipe)
        root = _replicable_root(datapipe)
        self._engine = _Engine(self, root, dispatched)
        return _replaced(datapipe, root, _Reader(self._engine))

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
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _stop(self) -> None:
        """Let nobody here read on: the tail may have threads that do."""
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
        _pause_all(self._end_datapipe)
        engine.ask("pause", pause_fn)

    def _resume(self, resume_fn: GraphFn | None = None) -> None:
        """Go on after `_pause`."""
        engine = self._needs_workers("resume")
        engine.ask("resume", resume_fn, first_dispatched=True)
        _resume_all(self._end_datapipe)

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


# ── the graph ──────────────────────────────────────────────────────────────────────────────


class _Graph:
    """The datapipes that one of them is made from, itself included."""

    def __init__(self, end: DataPipe) -> None:
        self.end = id(end)
        self.pipes: dict[int, DataPipe] = {}
        self.sources: dict[int, list[int]] = {}
        self._add(traverse_dps(end))

    def _add(self, graph: dict[int, Any]) -> None:
        """Flatten what `traverse_dps` returns, a tree in which shared datapipes are repeated."""
        for number, (pipe, below) in graph.items():
            self.pipes[number] = pipe
            known = self.sources.setdefault(number, [])
            known += [source for source in below if source not in known]
            self._add(below)

    def above(self, start: int, *, without: int | None = None) -> set[int]:
        """All that a datapipe is made from, itself included; the paths through one left out."""
        found: set[int] = set()
        todo = [start]
        while todo:
            number = todo.pop()
            if number != without and number not in found:
                found.add(number)
                todo += self.sources[number]
        return found

    def having(self, test: Callable[[DataPipe], bool]) -> set[int]:
        """Those datapipes of which something is true."""
        return {number for number, pipe in self.pipes.items() if test(pipe)}

    def tops(self, good: set[int]) -> list[DataPipe]:
        """Of the datapipes with only good ones above them, those that nobody such reads."""
        pure = {number for number in self.pipes if self.above(number) <= good}
        read = {source for number in pure for source in self.sources[number]}
        return [self.pipes[number] for number in self.pipes if number in pure - read]


def _is_dispatcher(pipe: DataPipe) -> bool:
    """Whether everything up to this datapipe belongs into the dispatching process."""
    return type(pipe) is ShardingRoundRobinDispatcher


def _is_replicable(pipe: DataPipe) -> bool:
    """Whether each worker may have a copy of this datapipe; most do not say, and may."""
    asked = getattr(pipe, "is_replicable", None)
    return asked is None or bool(asked())


def _cut_dispatched(end: DataPipe) -> tuple[DataPipe, DataPipe]:
    """Cut off what belongs into the dispatching process.

    It ends where all paths to a dispatcher meet. Returns the new end of the graph, with a
    `_Dispatched` at the cut, and what was cut off; that is None if there is no dispatcher.
    """
    graph = _Graph(end)
    dispatchers = graph.having(_is_dispatcher)
    if not dispatchers:
        return end, None
    gates = [n for n in graph.pipes if not graph.above(graph.end, without=n) & dispatchers]
    cut = graph.pipes[min(gates, key=lambda n: len(graph.above(n)))]
    return _replaced(end, cut, _Dispatched()), cut


def _replicable_root(end: DataPipe) -> DataPipe:
    """Find the end of that part of the graph that every worker gets a copy of."""
    graph = _Graph(end)
    roots = graph.tops(graph.having(_is_replicable))
    if len(roots) != 1:
        raise AssertionError(
            "MultiProcessingReadingService only supports single replicable branch currently; "
            f"this graph has {len(roots)}"
        )
    return roots[0]


def _replaced(end: DataPipe, old: DataPipe, new: DataPipe) -> DataPipe:
    """Put one datapipe in the place of another; return the end of the graph."""
    if old is end:
        return new
    replace_dp(traverse_dps(end), old, new)
    return end


def _shard_and_init(pipe: DataPipe, info: Any, init_fn: InitFn | None) -> DataPipe:
    """Give a worker's copy of the graph its shard, where it is not fed by the dispatcher."""
    graph = _Graph(pipe)
    for branch in graph.tops(graph.having(lambda each: not isinstance(each, _Dispatched))):
        apply_sharding(
            branch, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING
        )
    return pipe if init_fn is None else _as_pipe(init_fn(pipe, info), "worker_init_fn")


def _as_pipe(value: Any, origin: str) -> DataPipe:
    """Check that a function of the user's has returned a datapipe."""
    if not isinstance(value, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"{origin} returned {value!r}, which is no datapipe; return its argument")
    return value


def _pause_all(end: DataPipe) -> None:
    """Have all datapipes that can pause do so, from the end on."""
    for pipe in list_dps(traverse_dps(end)):
        if isinstance(pipe, Prefetcher):
            _hold(pipe)
        elif callable(getattr(pipe, "pause", None)):
            pipe.pause()


def _hold(pipe: DataPipe) -> None:
    """Pause a prefetching datapipe.

    Its own method waits for ever if its thread is just about to end, which happens in the last
    items of an epoch; that of `PinMemory` does so always.
    """
    thread, shared = pipe.thread, pipe.prefetch_data
    if thread is None or shared is None:
        return
    shared.run_prefetcher = False
    while thread.is_alive() and not shared.paused and not isinstance(pipe, PinMemory):
        thread.join(0.001)


def _resume_all(end: DataPipe) -> None:
    """Have all datapipes that can resume do so, from the source on."""
    for pipe in reversed(list_dps(traverse_dps(end))):
        if callable(getattr(pipe, "resume", None)):
            pipe.resume()


# ── in the workers ─────────────────────────────────────────────────────────────────────────


class _Epoch(NamedTuple):
    """What a process is told as an epoch begins."""

    number: int
    seeds: SeedGenerator
    reset_fn: GraphFn | None


class _Pipeline:
    """One process's part of the graph: a producer of `Streams`."""

    where = ""

    def __init__(self, pipe: DataPipe) -> None:
        torch.set_num_threads(1)
        _forget_traversal()
        self._pipe = pipe
        self._running: DataPipe = None  # as this epoch's reset functions left it
        self._iterator: Iterator[Any] | None = None

    def begin(self, epoch: _Epoch) -> None:
        """Begin an epoch."""
        self.close()  # before anything is seeded: it may have threads that draw
        with _named(self.where):
            self._running = self._reset(epoch)

    def _reset(self, epoch: _Epoch) -> DataPipe:
        """Seed everything, and call the functions that want to be called; return the graph."""
        raise NotImplementedError

    def items(self, start: int) -> Iterator[Any]:
        """Make this epoch's items; the first `start` were delivered before."""
        with _named(self.where):
            self._iterator = iterator = iter(self._running)
            yield from itertools.islice(iterator, start, None)

    def pause(self, function: GraphFn | None) -> None:
        """Hold the threads of the graph."""
        with _named(self.where):
            _pause_all(self._graph)
            self._apply(function)

    def resume(self, function: GraphFn | None) -> None:
        """Let them go on."""
        with _named(self.where):
            self._apply(function)
            _resume_all(self._graph)

    def limit(self, function: LimitFn, share: int | None) -> None:
        """Limit the graph to this worker's share."""
        with _named(self.where):
            function(self._graph, share)

    @property
    def _graph(self) -> DataPipe:
        """The graph as it runs; between init and the first epoch, as it is."""
        return self._pipe if self._running is None else self._running

    def _apply(self, function: GraphFn | None) -> None:
        """Call another reading service's function with the graph."""
        if function is not None:
            self._running = _as_pipe(function(self._graph), "the function")

    def close(self) -> None:
        """End the epoch: a graph's threads end as its iterators are closed."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _forget_traversal() -> None:
    """End a traversal of a graph in which the main process was when it forked this one off."""
    for kind in (IterDataPipe, MapDataPipe):
        kind.set_reduce_ex_hook(None)
        kind.set_getstate_hook(None)


class _Worker(_Pipeline):
    """A worker's part of the graph."""

    def __init__(
        self,
        pipe: DataPipe,
        init_fn: InitFn | None,
        reset_fn: ResetFn | None,
        address: str | None,
        number: int,
        num_workers: int,
    ) -> None:
        super().__init__(pipe)
        self.where = f"in worker process {number}"
        self._init_fn = init_fn
        self._reset_fn = reset_fn
        self._address = address
        self._info = WorkerInfo(num_workers, number)
        self._source: _Dispatched | None = None
        self._is_ready = False

    def _reset(self, epoch: _Epoch) -> DataPipe:
        if not self._is_ready:
            self._make_ready()
        if self._source is not None:
            self._source.epoch = epoch.number
        _seed_globals(epoch.seeds.generate_seed)
        pipe = set_graph_random_seed(self._pipe, epoch.seeds)
        if epoch.reset_fn is not None:
            pipe = _as_pipe(epoch.reset_fn(pipe), "iter_reset_fn")
        if self._reset_fn is not None:
            pipe = _as_pipe(self._reset_fn(pipe, self._info, epoch.seeds), "worker_reset_fn")
        return pipe

    def _make_ready(self) -> None:
        """Shard, connect, call the user's function: once, and where it can be reported."""
        if self._address is not None:
            (self._source,) = (
                p for p in _Graph(self._pipe).pipes.values() if type(p) is _Dispatched
            )
            self._source.connect(self._address, self._info.worker_id)
        self._pipe = _shard_and_init(self._pipe, self._info, self._init_fn)
        self._is_ready = True


class _Dispatcher(_Pipeline):
    """The dispatching process's part of the graph; its items go on as they are, pickled."""

    where = DISPATCHING

    def __init__(self, pipe: DataPipe, number: int, num_workers: int) -> None:  # noqa: ARG002
        super().__init__(pipe)

    def _reset(self, epoch: _Epoch) -> DataPipe:
        _seed_globals(epoch.seeds.generate_shared_seed)
        set_datapipes_seed(list_dps(traverse_dps(self._pipe)), epoch.seeds, distributed_shared=True)
        return self._pipe if epoch.reset_fn is None else _as_pipe(epoch.reset_fn(self._pipe), "…")

    def items(self, start: int) -> Iterator[Any]:
        return map(payload.dumps, super().items(start))


def _seed_globals(draw: Callable[[], int]) -> None:
    """Seed the generators that user code may draw from without a word."""
    random.seed(draw())
    torch.manual_seed(draw())
    np.random.seed(draw() >> 32)  # noqa: NPY002 - it is the one that others draw from


# ── exceptions ─────────────────────────────────────────────────────────────────────────────


class _Verbatim(str):
    """A text that a `KeyError` shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Let an exception say in its text where it was raised, as users of torch know it."""
    try:
        yield
    except Exception as error:
        if getattr(error, "_cseq_where", None) is None:
            error = _described(error, where)
        raise error from None


def _described(error: Exception, where: str) -> Exception:
    """Make an exception of the same type, or a RuntimeError, whose text tells all."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    text = f"Caught {type(error).__name__} {where}.\nOriginal {''.join(lines)}"
    made: Exception
    try:
        made = type(error)(_Verbatim(text) if isinstance(error, KeyError) else text)
    except Exception:  # noqa: BLE001 - a constructor that wants something else
        made = RuntimeError(text)
    made._cseq_where = where  # type: ignore[attr-defined]
    return made


# ── from the dispatching process to the workers ────────────────────────────────────────────


class _Dispatched(IterDataPipe):  # type: ignore[misc]
    """In a worker: what the dispatching process makes for it."""

    def __init__(self) -> None:
        self.epoch = 0
        self._connection: Connection[Any, Any] | None = None
        self._turn: threading.Lock | None = None

    def connect(self, address: str, worker: int) -> None:
        """Call the relay in the main process."""
        self._turn = threading.Lock()
        self._connection = _call(address)
        self._connection.send(worker)

    def _ask(self, epoch: int, position: int) -> tuple[list[bytes], bytes | None]:
        """Ask for the items from a position on; a thread of a given-up epoch may do so, too."""
        assert self._turn is not None
        assert self._connection is not None
        with self._turn:
            self._connection.send((epoch, position))
            answer: tuple[list[bytes], bytes | None] = pickle.loads(self._connection.recv_bytes())
        return answer

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.epoch, 0
        while True:
            items, error = self._ask(epoch, position)
            for item in items:
                position += 1
                yield payload.loads(item)
            if error is not None:
                raise failure.unpack(error)
            if not items:
                return


class _Relay:
    """In the main process: hands the dispatching process's item i to worker i mod N, when asked.

    A thread for each worker sleeps on its connection. Whoever is asked for an item takes as many
    from the stream as it needs to come to one for this worker; the others' wait for them to ask,
    however many they are. A worker that asks for what was sent before has taken a dead one's
    place: then the stream is begun again.
    """

    def __init__(self, streams: Streams, num_workers: int) -> None:
        self._streams = streams
        self._num_workers = num_workers
        self._turn = threading.Lock()  # around the stream and all that is below
        self._epoch: _Epoch | None = None
        self._sent = [0] * num_workers
        self._together = 0  # items that the next asking may look for beyond its first
        self._next = 0  # the item that the stream comes to next
        self._over = False
        self._error: bytes | None = None
        self._waiting: list[deque[bytes]] = []  # of each worker: from what was sent on
        self._rewind()
        self._folder: str | None = None
        self.address = self._make_address()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(num_workers)
        self._hangup, self._hung_up = socket.socketpair()
        self._callers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _make_address(self) -> str:
        """Find a name for a socket: on Linux one that is in no folder, so that nothing is left."""
        if sys.platform == "linux":
            return f"\0cseq-{os.urandom(16).hex()}"
        self._folder = tempfile.mkdtemp(prefix="cseq-", dir=_short_folder())  # for us alone
        return os.path.join(self._folder, "relay")

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        """Start a thread."""
        thread = threading.Thread(target=target, args=args, name="cseq-relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        """Wait for workers to call."""
        while self._hung_up not in wait([self._listener, self._hung_up]):
            caller, _ = self._listener.accept()
            if not _is_ours(caller):
                caller.close()
                continue
            self._callers.append(caller)
            self._run(self._serve, caller)

    def _serve(self, caller: socket.socket) -> None:
        """Answer one worker until it is gone."""
        connection = Connection(os.dup(caller.fileno()))
        with connection, contextlib.suppress(EOFError, ConnectionError):
            worker = connection.recv()
            while True:
                epoch, position = connection.recv()
                answer = self._answer(worker, epoch, position)
                connection.send_bytes(pickle.dumps(answer, protocol=5))

    def _answer(self, worker: int, epoch: int, position: int) -> tuple[list[bytes], bytes | None]:
        """Return items of a worker from a position on, and what was raised behind them.

        No items: there are no more, or the epoch is over.
        """
        with self._turn, contextlib.suppress(InterruptedError):
            if self._epoch is not None and self._epoch.number == epoch:
                if position < self._sent[worker]:
                    self._replay()
                self._sent[worker] = position
                return self._collect(worker), self._error
        return [], None

    def _collect(self, worker: int) -> list[bytes]:
        """Take all that there is for a worker, one item at least; more if that is quick."""
        waiting = self._waiting[worker]
        if not waiting:
            begun = time.perf_counter()
            while not waiting and self._pull():
                pass
            for _ in range(self._together * self._num_workers):
                if time.perf_counter() - begun > QUICK or not self._pull():
                    break
            was_quick = time.perf_counter() - begun <= QUICK
            self._together = min(2 * self._together + 1, MOST_TOGETHER) if was_quick else 0
        items = list(waiting)
        waiting.clear()
        self._sent[worker] += len(items)
        return items

    def _pull(self) -> bool:
        """Take an item from the stream and put it where its worker will ask; False: no more."""
        if self._over:
            return False
        try:
            item = self._streams.next(0)
        except StopIteration:
            self._over = True
            return False
        except InterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where the item is asked for
            self._over = True
            self._error = failure.pack(_of_dispatching(error))
            return False
        owner, place = self._next % self._num_workers, self._next // self._num_workers
        self._next += 1
        if place >= self._sent[owner]:
            self._waiting[owner].append(item)
        return True

    def _rewind(self) -> None:
        """Be at the beginning of the stream."""
        self._next = 0
        self._over = False
        self._error = None
        self._waiting = [deque() for _ in range(self._num_workers)]

    def _replay(self) -> None:
        """Go through the epoch again; what others were sent is left out."""
        self._rewind()
        self._streams.begin([self._epoch])

    def begin(self, epoch: _Epoch) -> None:
        """Begin an epoch in the dispatching process."""
        self.stop()
        with self._turn:
            self._rewind()
            self._sent = [0] * self._num_workers
            self._streams.begin([epoch])
            self._epoch = epoch

    def ask(self, verb: str, function: GraphFn | None) -> None:
        """Have the dispatching process pause or resume."""
        with self._turn:
            self._streams.ask(verb, function, behind=True)

    def stop(self) -> None:
        """End the epoch: whoever waits or asks for an item of it is told that there are no more."""
        self._epoch = None
        self._streams.interrupt()

    def close(self) -> None:
        """End the dispatching process and the threads; the workers are gone already."""
        self.stop()
        self._hangup.send(b"!")  # closing it is no sign while forked processes have copies of it
        _join(self._threads[:1])  # then nobody calls any more
        for caller in self._callers:
            with contextlib.suppress(OSError):  # it has hung up
                caller.shutdown(socket.SHUT_RDWR)
        _join(self._threads[1:])
        for each in (self._listener, self._hangup, self._hung_up, *self._callers):
            each.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._streams.close()


def _join(threads: list[threading.Thread]) -> None:
    """Wait for threads to end; garbage collection can strike in one of them."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _short_folder() -> str | None:
    """Where to put a socket: the usual folder, unless a socket's name would be too long there."""
    return None if len(tempfile.gettempdir()) < MOST_FOLDER else "/tmp"


def _is_ours(caller: socket.socket) -> bool:
    """Whether the same user calls: a name that is in no folder is open to all."""
    if sys.platform != "linux":
        return True
    format_ = struct.Struct("3i")  # process, user, group
    _, user, _ = format_.unpack(
        caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, format_.size)
    )
    return bool(user == os.getuid())


def _call(address: str) -> Connection[Any, Any]:
    """Connect to a relay."""
    caller = socket.socket(socket.AF_UNIX)
    try:
        caller.connect(address)
    except BaseException:
        caller.close()
        raise
    return Connection(caller.detach())


def _of_dispatching(error: Exception) -> Exception:
    """Let the death of the dispatching process not look like that of a worker."""
    if isinstance(error, WorkerDied):
        error = WorkerDied(f"the dispatching process: {error}", exitcode=error.exitcode)
        error._cseq_where = DISPATCHING  # type: ignore[attr-defined]
    return error


# ── in the main process ────────────────────────────────────────────────────────────────────


class _Engine:
    """The processes behind one reading service."""

    def __init__(
        self, service: MultiProcessingReadingService, root: DataPipe, dispatched: DataPipe
    ) -> None:
        self._pid = os.getpid()
        self._number = 0
        workers = service.num_workers
        ahead = 1 + service.worker_prefetch_cnt
        options: dict[str, Any] = {
            "start_method": service.multiprocessing_context,
            "max_restarts": service.max_restarts,
            "timeout": service.timeout,
            "preload": [__name__],
        }
        self._relay: _Relay | None = None
        if dispatched is not None:
            dispatcher = partial(_Dispatcher, dispatched)
            streams = Streams(dispatcher, 1, prefetch=workers * ahead, **options)
            self._relay = _Relay(streams, workers)
        address = None if self._relay is None else self._relay.address
        worker = partial(_Worker, root, service.worker_init_fn, service.worker_reset_fn, address)
        ahead += -(-service.main_prefetch_cnt // workers)
        try:
            self.streams = Streams(worker, workers, prefetch=ahead, **options)
        except BaseException:
            if self._relay is not None:
                self._relay.close()
            raise

    def begin(self, seeds: SeedGenerator, reset_fn: GraphFn | None) -> None:
        """Begin an epoch in all processes."""
        self._number += 1
        if self._relay is not None:
            self._relay.begin(_Epoch(self._number, seeds.spawn(0), reset_fn))
        self.streams.begin(
            [
                _Epoch(self._number, seeds.spawn(worker), reset_fn)
                for worker in range(self.streams.num_workers)
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
        """End the epoch: nobody gets an item of it, and nobody waits for one."""
        if os.getpid() == self._pid:
            if self._relay is not None:
                self._relay.stop()
            self.streams.interrupt()

    def close(self) -> None:
        """End all processes; one that was forked off this process has none to end."""
        if os.getpid() != self._pid:
            return
        self.stop()
        self.streams.close()
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
