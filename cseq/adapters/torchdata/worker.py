"""The parts of the graph that run in worker and dispatching processes."""

from __future__ import annotations

import itertools
import random
from types import GeneratorType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.data.graph import traverse_dps
from torchdata.dataloader2.graph import (
    find_dps,
    list_dps,
    set_datapipes_seed,
    set_graph_random_seed,
)
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import _DummyIterDataPipe
from torchdata.datapipes.iter import IterDataPipe
from torchdata.datapipes.map import MapDataPipe

from cseq.adapters.torchdata.graph import (
    as_pipe,
    initialized,
    pause_all,
    replaced,
    resume_all,
    shard,
)
from cseq.adapters.torchdata.relay import Dispatched
from cseq.encoding.pickling import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdata.dataloader2.random import SeedGenerator

    from cseq.adapters.torchdata.graph import DataPipe, GraphFn, InitFn, ResetFn
    from cseq.adapters.torchdata.relay import Address


class PipeEpoch(NamedTuple):
    """A process's parameters for an epoch; see `Streams.begin`."""

    number: int
    seeds: SeedGenerator
    reset_fn: GraphFn | None


class _Pipeline:
    """A producer for `Streams` that runs part of the graph."""

    def __init__(self, pipe: DataPipe) -> None:
        # If this process was forked while the graph was being traversed, hooks are still set.
        for kind in (IterDataPipe, MapDataPipe):
            kind.set_reduce_ex_hook(None)
            kind.set_getstate_hook(None)
        self._pipe = pipe
        # The graph that the reset functions returned for this epoch.
        self._running = pipe
        self._iterator: Iterator[object] | None = None

    def begin(self, epoch: PipeEpoch) -> None:
        """Start an epoch."""
        # The graph's threads may draw random numbers, so stop them before seeding.
        self.close()
        self._running = self._reset(epoch)

    def _reset(self, epoch: PipeEpoch) -> DataPipe:
        """Seed the generators and call the reset functions."""
        raise NotImplementedError

    def items(self, start: int) -> Iterator[object]:
        """Yield this epoch's items after the first `start`."""
        self._iterator = iter(self._running)
        return itertools.islice(self._iterator, start, None)

    def pause(self, function: GraphFn | None) -> None:
        """Pause the graph's threads."""
        pause_all(self._running)
        self._apply(function)

    def resume(self, function: GraphFn | None) -> None:
        """Resume the graph's threads."""
        self._apply(function)
        resume_all(self._running)

    def _apply(self, function: GraphFn | None) -> None:
        if function is not None:
            self._running = as_pipe(function(self._running), "the pause or resume function")

    def close(self) -> None:
        """Stop the epoch. Closing the iterator also stops the graph's threads."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, GeneratorType):
            iterator.close()


class Worker(_Pipeline):
    """The part of the graph that runs in a worker."""

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
        self._info = WorkerInfo(num_workers, number)
        self._init_fn = init_fn
        self._reset_fn = reset_fn
        self._is_ready = False
        self._source: Dispatched | None = None
        shard(pipe, self._info)
        if address is not None:
            (stand_in,) = find_dps(traverse_dps(pipe), _DummyIterDataPipe)
            self._source = Dispatched(address, number)
            self._pipe = self._running = replaced(pipe, stand_in, self._source)

    def _reset(self, epoch: PipeEpoch) -> DataPipe:
        if not self._is_ready:
            self._pipe = initialized(self._pipe, self._info, self._init_fn)
            self._is_ready = True
        if self._source is not None:
            self._source.epoch = epoch.number
        _seed_globals(epoch.seeds.generate_seed)
        pipe = set_graph_random_seed(self._pipe, epoch.seeds)
        if epoch.reset_fn is not None:
            pipe = as_pipe(epoch.reset_fn(pipe), "iter_reset_fn")
        if self._reset_fn is not None:
            pipe = as_pipe(self._reset_fn(pipe, self._info, epoch.seeds), "worker_reset_fn")
        return pipe


class Dispatcher(_Pipeline):
    """The part of the graph that runs in the dispatching process. It yields pickled items."""

    def __init__(self, pipe: DataPipe, number: int, num_workers: int) -> None:  # noqa: ARG002
        super().__init__(pipe)

    def items(self, start: int) -> Iterator[bytes]:
        """Yield this epoch's items, pickled."""
        return map(dumps, super().items(start))

    def _reset(self, epoch: PipeEpoch) -> DataPipe:
        _seed_globals(epoch.seeds.generate_shared_seed)
        set_datapipes_seed(list_dps(traverse_dps(self._pipe)), epoch.seeds, distributed_shared=True)
        if epoch.reset_fn is None:
            return self._pipe
        return as_pipe(epoch.reset_fn(self._pipe), "iter_reset_fn")


def _seed_globals(draw: Callable[[], int]) -> None:
    random.seed(draw())
    torch.manual_seed(draw())
    np.random.seed(draw() >> 32)  # noqa: NPY002 - user code draws from it
