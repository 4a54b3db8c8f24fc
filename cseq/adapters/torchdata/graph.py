"""The graph of datapipes: found, cut, paused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.adapters.torchdata.library import (
    SHARDING_PRIORITIES,
    IterDataPipe,
    MapDataPipe,
    PinMemory,
    Prefetcher,
    ShardingRoundRobinDispatcher,
    apply_sharding,
    list_dps,
    replace_dp,
    traverse_dps,
)
from cseq.adapters.torchdata.relay import Dispatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.adapters.torchdata.library import DataPipe, InitFn


class Graph:
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
        """All datapipes that one is made from, itself included; not by paths through `without`."""
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
        """Of the datapipes made from good ones alone, those that no other of them reads."""
        pure = {number for number in self.pipes if self.above(number) <= good}
        read = {source for number in pure for source in self.sources[number]}
        return [self.pipes[number] for number in self.pipes if number in pure - read]


def _is_dispatcher(pipe: DataPipe) -> bool:
    """Whether everything up to this datapipe belongs in the dispatching process."""
    return type(pipe) is ShardingRoundRobinDispatcher


def _is_replicable(pipe: DataPipe) -> bool:
    """Whether each worker may have a copy of this datapipe: by default, yes."""
    asked = getattr(pipe, "is_replicable", None)
    return asked is None or bool(asked())


def dispatched_root(end: DataPipe) -> DataPipe:
    """Find the end of the dispatching process's part of the graph; None if there is none.

    It is where all paths to a dispatcher meet.
    """
    graph = Graph(end)
    dispatchers = graph.having(_is_dispatcher)
    if not dispatchers:
        return None
    gates = [n for n in graph.pipes if not graph.above(graph.end, without=n) & dispatchers]
    return graph.pipes[min(gates, key=lambda n: len(graph.above(n)))]


def replicable_root(end: DataPipe) -> DataPipe:
    """Find the end of that part of the graph that every worker gets a copy of."""
    graph = Graph(end)
    roots = graph.tops(graph.having(_is_replicable))
    if len(roots) != 1:
        raise AssertionError(
            "MultiProcessingReadingService only supports single replicable branch currently; "
            f"this graph has {len(roots)}"
        )
    return roots[0]


def replaced(end: DataPipe, old: DataPipe, new: DataPipe) -> DataPipe:
    """Put one datapipe in the place of another, if that is there; return the end of the graph."""
    if old is end:
        return new
    replace_dp(traverse_dps(end), old, new)
    return end


def shard_and_init(pipe: DataPipe, info: Any, init_fn: InitFn | None) -> DataPipe:
    """Shard a worker's copy of the graph, but for what the dispatcher feeds, and initialise it."""
    graph = Graph(pipe)
    for branch in graph.tops(graph.having(lambda each: not isinstance(each, Dispatched))):
        apply_sharding(
            branch, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING
        )
    return pipe if init_fn is None else as_pipe(init_fn(pipe, info), "worker_init_fn")


def as_pipe(value: Any, origin: str) -> DataPipe:
    """Check that a function of the user's has returned a datapipe."""
    if not isinstance(value, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"{origin} returned {value!r}, which is no datapipe; return its argument")
    return value


def pause_all(end: DataPipe) -> None:
    """Pause all datapipes that can pause, from the end on."""
    for pipe in list_dps(traverse_dps(end)):
        if isinstance(pipe, Prefetcher):
            _hold(pipe)
        elif callable(getattr(pipe, "pause", None)):
            pipe.pause()


def _hold(pipe: DataPipe) -> None:
    """Pause a prefetching datapipe.

    Its own method waits for ever if its thread is about to end, which happens in the last items of
    an epoch; that of `PinMemory` always waits for ever.
    """
    thread, shared = pipe.thread, pipe.prefetch_data
    if thread is None or shared is None:
        return
    shared.run_prefetcher = False
    while thread.is_alive() and not shared.paused and not isinstance(pipe, PinMemory):
        thread.join(0.001)


def resume_all(end: DataPipe) -> None:
    """Resume all datapipes that can resume, from the source on."""
    for pipe in reversed(list_dps(traverse_dps(end))):
        if callable(getattr(pipe, "resume", None)):
            pipe.resume()
