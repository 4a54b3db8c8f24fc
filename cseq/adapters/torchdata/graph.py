"""Operations on the graph of datapipes: replace, shard, pause and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2.graph import list_dps, replace_dp
from torchdata.dataloader2.utils.dispatch import find_non_dispatching_branches
from torchdata.datapipes.iter import IterDataPipe, PinMemory, Prefetcher
from torchdata.datapipes.map import MapDataPipe

if TYPE_CHECKING:
    from collections.abc import Callable

# An IterDataPipe or a MapDataPipe.
DataPipe: TypeAlias = Any
InitFn: TypeAlias = "Callable[[DataPipe, Any], DataPipe]"
ResetFn: TypeAlias = "Callable[[DataPipe, Any, Any], DataPipe]"
GraphFn: TypeAlias = "Callable[[DataPipe], DataPipe]"


def replaced(end: DataPipe, old: DataPipe, new: DataPipe) -> DataPipe:
    """Replace datapipe `old` with `new` and return the end of the graph."""
    if old is end:
        return new
    replace_dp(traverse_dps(end), old, new)
    return end


def shard(pipe: DataPipe, info: Any) -> None:
    """Shard a worker's graph, except for branches that follow the dispatcher."""
    for branch in find_non_dispatching_branches(traverse_dps(pipe)):
        apply_sharding(
            branch, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING
        )


def as_pipe(value: Any, origin: str) -> DataPipe:
    """Return `value`. Raise TypeError if it is not a datapipe; `origin` is the user's function."""
    if not isinstance(value, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"{origin} returned {value!r}, not a datapipe; return the datapipe")
    return value


def initialized(pipe: DataPipe, info: Any, init_fn: InitFn | None) -> DataPipe:
    """Apply `worker_init_fn`, if there is one."""
    return pipe if init_fn is None else as_pipe(init_fn(pipe, info), "worker_init_fn")


def pause_all(end: DataPipe) -> None:
    """Pause all datapipes that support pausing, starting with the last one."""
    for pipe in list_dps(traverse_dps(end)):
        if isinstance(pipe, Prefetcher):
            _hold(pipe)
        elif callable(getattr(pipe, "pause", None)):
            pipe.pause()


def _hold(pipe: DataPipe) -> None:
    """Pause a datapipe that prefetches.

    Its own `pause` may hang near the end of an epoch, when its thread is about to exit.
    `PinMemory.pause` always hangs.
    """
    thread, shared = pipe.thread, pipe.prefetch_data
    if thread is None or shared is None:
        return
    shared.run_prefetcher = False
    while thread.is_alive() and not shared.paused and not isinstance(pipe, PinMemory):
        thread.join(0.001)


def resume_all(end: DataPipe) -> None:
    """Resume all datapipes that support resuming, starting with the source."""
    for pipe in reversed(list_dps(traverse_dps(end))):
        if callable(getattr(pipe, "resume", None)):
            pipe.resume()
