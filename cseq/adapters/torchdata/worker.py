"""One process's part of the graph, and how its exceptions look."""

from __future__ import annotations

import contextlib
import itertools
import random
import traceback
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.adapters.torchdata.graph import (
    as_pipe,
    initialized,
    pause_all,
    replaced,
    resume_all,
    shard,
)
from cseq.adapters.torchdata.library import (
    Epoch,
    IterDataPipe,
    MapDataPipe,
    WorkerInfo,
    _DummyIterDataPipe,
    find_dps,
    list_dps,
    set_datapipes_seed,
    set_graph_random_seed,
    torch,
    traverse_dps,
)
from cseq.adapters.torchdata.relay import DISPATCHING, Dispatched
from cseq.encoding.pickling import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq.adapters.torchdata.library import DataPipe, GraphFn, InitFn, ResetFn
    from cseq.adapters.torchdata.relay import Address


class _Pipeline:
    """One process's part of the graph: a producer of `Streams`."""

    where = ""

    def __init__(self, pipe: DataPipe) -> None:
        _forget_traversal()
        self._pipe = pipe
        self._running: DataPipe = None  # as this epoch's reset functions left it
        self._iterator: Iterator[Any] | None = None

    def begin(self, epoch: Epoch) -> None:
        """Begin an epoch."""
        self.close()  # before anything is seeded: it may have threads that draw
        with _named(self.where):
            self._running = self._reset(epoch)

    def _reset(self, epoch: Epoch) -> DataPipe:
        """Seed everything, and call the reset functions; return the graph."""
        raise NotImplementedError

    def items(self, start: int) -> Iterator[Any]:
        """Make this epoch's items but for the first `start`, which were delivered before."""
        with _named(self.where):
            self._iterator = iterator = iter(self._running)
            yield from itertools.islice(iterator, start, None)

    def pause(self, function: GraphFn | None) -> None:
        """Pause the threads of the graph."""
        with _named(self.where):
            pause_all(self._graph)
            self._apply(function)

    def resume(self, function: GraphFn | None) -> None:
        """Resume the threads of the graph."""
        with _named(self.where):
            self._apply(function)
            resume_all(self._graph)

    @property
    def _graph(self) -> DataPipe:
        """The graph as it runs; between init and the first epoch, as it is."""
        return self._pipe if self._running is None else self._running

    def _apply(self, function: GraphFn | None) -> None:
        """Call another reading service's function with the graph."""
        if function is not None:
            self._running = as_pipe(function(self._graph), "the function")

    def close(self) -> None:
        """End the epoch: a graph's threads end as its iterators are closed."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _forget_traversal() -> None:
    """Reset the hooks of a graph traversal during which the main process forked this one."""
    for kind in (IterDataPipe, MapDataPipe):
        kind.set_reduce_ex_hook(None)
        kind.set_getstate_hook(None)


class Worker(_Pipeline):
    """A worker's part of the graph."""

    def __init__(
        self,
        pipe: DataPipe,
        init_fn: InitFn | None,
        reset_fn: ResetFn | None,
        address: Address | None,
        number: int,
        num_workers: int,
    ) -> None:
        super().__init__(pipe)
        self.where = f"in worker process {number}"
        self._init_fn = init_fn
        self._reset_fn = reset_fn
        self._address = address
        self._info = WorkerInfo(num_workers, number)
        self._source: Dispatched | None = None
        self._is_ready = False

    def _reset(self, epoch: Epoch) -> DataPipe:
        if not self._is_ready:
            self._make_ready()
        if self._source is not None:
            self._source.epoch = epoch.number
        _seed_globals(epoch.seeds.generate_seed)
        pipe = set_graph_random_seed(self._pipe, epoch.seeds)
        if epoch.reset_fn is not None:
            pipe = as_pipe(epoch.reset_fn(pipe), "iter_reset_fn")
        if self._reset_fn is not None:
            pipe = as_pipe(self._reset_fn(pipe, self._info, epoch.seeds), "worker_reset_fn")
        return pipe

    def _make_ready(self) -> None:
        """Shard, connect, call the user's function: once, where exceptions reach the loop."""
        pipe = self._pipe
        shard(pipe, self._info)
        if self._address is not None:
            (stand_in,) = find_dps(traverse_dps(pipe), _DummyIterDataPipe)
            self._source = Dispatched(self._address, self._info.worker_id)
            pipe = replaced(pipe, stand_in, self._source)
        self._pipe = initialized(pipe, self._info, self._init_fn)
        self._is_ready = True


class Dispatcher(_Pipeline):
    """The dispatching process's part of the graph; its items are unpickled by the workers."""

    where = DISPATCHING

    def __init__(self, pipe: DataPipe, number: int, num_workers: int) -> None:  # noqa: ARG002
        super().__init__(pipe)

    def items(self, start: int) -> Iterator[bytes]:
        """Make this epoch's items, pickled."""
        return map(dumps, super().items(start))

    def _reset(self, epoch: Epoch) -> DataPipe:
        _seed_globals(epoch.seeds.generate_shared_seed)
        set_datapipes_seed(list_dps(traverse_dps(self._pipe)), epoch.seeds, distributed_shared=True)
        return self._pipe if epoch.reset_fn is None else as_pipe(epoch.reset_fn(self._pipe), "…")


def _seed_globals(draw: Callable[[], int]) -> None:
    """Seed the global generators, which user code may draw from."""
    random.seed(draw())
    torch.manual_seed(draw())
    np.random.seed(draw() >> 32)  # noqa: NPY002 - it is the one that others draw from


class _Verbatim(str):
    """A text that a `KeyError` shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """In this context, make exceptions say in their text where they were raised, as torch does."""
    try:
        yield
    except Exception as error:
        if getattr(error, "_cseq_where", None) is None:
            error = _described(error, where)
        raise error from None


def _described(error: Exception, where: str) -> Exception:
    """Make an exception of the same type, or a RuntimeError, with the traceback in its text."""
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
