"""`cseq.adapters.torchdata`: DataLoader2 with cseq's workers, beside torchdata's own service."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import first_hits, interrupted
from killing import CODE, WORDS, await_closings, is_alive, kill
from kinds import QUICKEST

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES  # noqa: E402
from torchdata import dataloader2  # noqa: E402
from torchdata.dataloader2 import DataLoader2, SequentialReadingService  # noqa: E402
from torchdata.dataloader2.graph import list_dps, set_datapipes_seed, traverse_dps  # noqa: E402
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402

import cseq  # noqa: E402
from cseq import testing  # noqa: E402
from cseq.adapters.torchdata import MultiProcessingReadingService, engine, relay  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import RunScript

MULTI = SHARDING_PRIORITIES.MULTIPROCESSING
# Many loaders are started here, whose processes import torch: for minutes where they are spawned.
pytestmark = pytest.mark.needs("quick processes")

QUICK = QUICKEST.start_method


def service(num_workers: int = 2, context: str | None = QUICK, **options: Any) -> Any:
    """Make a reading service that starts its processes fast."""
    return MultiProcessingReadingService(num_workers, context, **options)


def loader(pipe: Any, num_workers: int = 2, context: str | None = QUICK, **options: Any) -> Any:
    """Make a DataLoader2 with it."""
    return DataLoader2(pipe, reading_service=service(num_workers, context, **options))


def numbers(count: int = 10) -> Any:
    """A pipe of numbers, of which every worker gets its share."""
    return IterableWrapper(range(count)).sharding_filter()


def shuffled(count: int = 20) -> Any:
    """The same, in random order."""
    return IterableWrapper(range(count)).shuffle().sharding_filter()


def dispatched(count: int = 10) -> Any:
    """A pipe of numbers, made in the dispatching process."""
    return IterableWrapper(range(count)).sharding_round_robin_dispatch(MULTI)


class Stays(IterDataPipe):
    """A pipe that must not be copied to workers."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def is_replicable(self) -> bool:
        return False


class Uneven(IterDataPipe):
    """A pipe that has as many items as its worker's number says."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        number = cseq.worker_info().number
        yield from ((number, item) for item in range(self.counts[number]))


class Oops(Exception):
    """What a test's pipe raises."""


class Odd(Exception):
    """One whose constructor wants two things."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


class Raising(IterDataPipe):
    """A pipe that raises in the place of an item."""

    def __init__(self, source: Any, place: int, error: Exception) -> None:
        self.source, self.place, self.error = source, place, error

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(self.source):
            if place == self.place:
                raise self.error
            yield item


def with_pid(item: Any) -> tuple[Any, int]:
    return item, os.getpid()


def double(item: Any) -> Any:
    return 2 * item


def draw(item: Any) -> Any:
    """Draw from all generators that a reading service seeds."""
    numpy = int(np.random.randint(2**31))
    return item, random.random(), numpy, int(torch.randint(2**31, ()))


def slowly(seconds: float, item: Any) -> Any:
    time.sleep(seconds)
    return item


def noted(path: str, item: Any) -> Any:
    """Leave a trace of each item that is made."""
    with open(path, "a") as file:
        file.write(f"{item}\n")
    return item


def made(path: Path) -> int:
    """Count those traces."""
    return len(path.read_text().splitlines())


def rests(item: int) -> bool:
    """Of the first items, none is for worker 0."""
    return item % 2 == 1 or item >= 2600


# -- C.2 1, 2, 3: construction, lifecycle, start methods


def test_arguments_and_defaults() -> None:
    """The arguments and their defaults are those of torchdata's, under the same names."""
    names = ["num_workers", "multiprocessing_context", "worker_prefetch_cnt", "main_prefetch_cnt"]
    names += ["worker_init_fn", "worker_reset_fn"]
    made = MultiProcessingReadingService(3)
    assert [getattr(made, name) for name in names] == [3, None, 10, 10, None, None]
    made = MultiProcessingReadingService(1, "spawn", 2, 3, double, draw)
    assert [getattr(made, name) for name in names] == [1, "spawn", 2, 3, double, draw]
    copy = pickle.loads(pickle.dumps(made))
    assert [getattr(copy, name) for name in names] == [1, "spawn", 2, 3, double, draw]


def test_wrong_arguments() -> None:
    """A wrong argument is refused at once, a start method with torchdata's AssertionError."""
    with pytest.raises(AssertionError, match="Please choose one available multiprocessing context"):
        MultiProcessingReadingService(2, "teleport")
    with pytest.raises(ValueError, match="num_workers"):
        MultiProcessingReadingService(-1)
    with pytest.raises(TypeError, match="worker_prefetch_cnt"):
        service(worker_prefetch_cnt=1.5)
    with pytest.raises(ValueError, match="timeout"):
        service(timeout=0)


def test_one_service_for_several_loaders() -> None:
    """Each DataLoader2 has its own copy of the service it is given."""
    shared = service()
    first, second = (DataLoader2(numbers(n), reading_service=shared) for n in (4, 6))
    with first, second:
        one, two = iter(first), iter(second)
        assert [next(one), next(two), next(one), next(two)] == [0, 0, 1, 1]
        assert [*one, *two] == [2, 3, 2, 3, 4, 5]


# -- 4, 5, 6: which part of the graph runs where


def test_without_sharding_every_worker_makes_everything() -> None:
    """A graph that has no sharding is run as a whole by every worker."""
    with loader(IterableWrapper(range(3))) as loaded:
        assert list(loaded) == [0, 0, 1, 1, 2, 2]


def add_sharding(pipe: Any, info: Any) -> Any:
    pipe = pipe.sharding_filter()
    torch.utils.data.graph_settings.apply_sharding(pipe, info.num_workers, info.worker_id, MULTI)
    return pipe


def reset_seeds(pipe: Any, info: Any, seeds: Any) -> Any:
    assert (info.num_workers, info.worker_id) == (2, cseq.worker_info().number)
    seeds.seed(123)
    set_datapipes_seed(list_dps(traverse_dps(pipe)), seeds, distributed_shared=True)
    return pipe


def test_worker_functions() -> None:
    """`worker_init_fn` may shard, and `worker_reset_fn` has the last word on the seeds."""
    pipe = IterableWrapper(range(20)).batch(2).shuffle()
    with loader(pipe, worker_init_fn=add_sharding, worker_reset_fn=reset_seeds) as loaded:
        first, second = list(loaded), list(loaded)
    assert first == second
    assert sorted(itertools.chain(*first)) == list(range(20))


def test_reset_function_may_return_another_pipe() -> None:
    """The pipe that `worker_reset_fn` returns is that of the epoch, and of no later one."""
    with loader(numbers(4), worker_reset_fn=doubled) as loaded:
        assert [list(loaded), list(loaded)] == [[0, 2, 4, 6]] * 2


def doubled(pipe: Any, info: Any, seeds: Any) -> Any:
    return pipe.map(double)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_dispatched_items_go_round(num_workers: int) -> None:
    """One process makes what is dispatched, and its item i goes to worker i mod N."""
    pipe = IterableWrapper(range(9)).map(with_pid).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(with_pid), num_workers) as loaded:
        items = list(loaded)
    assert [item for (item, _), _ in items] == list(range(9))
    assert len({pid for (_, pid), _ in items}) == 1
    workers = [pid for _, pid in items]
    assert workers == (workers[:num_workers] * 9)[:9]
    assert len({os.getpid(), items[0][0][1], *workers}) == num_workers + 2


def test_dispatchers_on_two_branches() -> None:
    """What two dispatchers have in common is made by one process as a whole."""
    left, right = dispatched(6).map(with_pid), dispatched(6).map(with_pid)
    with loader(left.zip(right)) as loaded:
        items = list(loaded)
    assert [(a, b) for (a, _), (b, _) in items] == [(n, n) for n in range(6)]
    assert len({pid for pair in items for _, pid in pair}) == 1


def test_branches_that_are_not_dispatched_are_sharded() -> None:
    """Beside a dispatcher, a `sharding_filter` on another branch shards; in front of it, not."""
    left = numbers(6).sharding_round_robin_dispatch(MULTI)
    with loader(left.zip(numbers(6).map(with_pid))) as loaded:
        items = list(loaded)
    assert [(a, b) for a, (b, _) in items] == [(n, n) for n in range(6)]
    assert len({pid for _, (_, pid) in items}) == 2


def test_one_worker_far_ahead_of_the_other() -> None:
    """However many dispatched items wait for one worker, the other one is served."""
    with loader(dispatched(3000).filter(rests)) as loaded:
        assert sorted(loaded) == [item for item in range(3000) if rests(item)]


def of_some_size(item: int) -> tuple[int, Any, Any]:
    """A small thing and two that are large, now and then."""
    size = 40_000 if item % 3 else 5
    return item, torch.full((size,), item), np.full(size, -item)


def summed(item: tuple[int, Any, Any]) -> tuple[int, int, int, bool]:
    """What is in it, and whether it is this process's own."""
    number, tensor, array = item
    tensor += 1
    array += 1
    return number, int(tensor.sum()), int(array.sum()), tensor.dtype == torch.int64


def test_dispatched_tensors_lie_in_slots(caplog: pytest.LogCaptureFixture) -> None:
    """Large tensors and arrays go to their worker without leaving the slot they were laid in."""
    pipe = IterableWrapper(range(60)).map(of_some_size).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(summed)) as loaded:
        for _ in range(2):
            got = list(loaded)
            sizes = [40_000 if item % 3 else 5 for item in range(60)]
            expected = [(k, n * (k + 1), n * (1 - k), True) for k, n in enumerate(sizes)]
            assert got == expected
        assert "copied" not in caplog.text  # the first copy would be in the log


class Passed:
    """Tells where it was unpickled."""

    def __init__(self, pids: tuple[int, ...] = ()) -> None:
        self.pids = pids

    def __reduce__(self) -> Any:
        return opened_by, (self.pids,)


def opened_by(pids: tuple[int, ...]) -> Passed:
    return Passed((*pids, os.getpid()))


def passed(item: int) -> Passed:
    del item
    return Passed()


def pids_of(item: Passed) -> tuple[tuple[int, ...], int]:
    return item.pids, os.getpid()


def test_nobody_opens_dispatched_items_on_their_way() -> None:
    """What is dispatched is unpickled by its worker, and nowhere else."""
    pipe = IterableWrapper(range(100)).map(passed).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(pids_of)) as loaded:
        items = list(loaded)
    assert len(items) == 100
    assert all(pids == (worker,) for pids, worker in items)


def test_what_is_not_replicable_stays_here() -> None:
    """Pipes that may not be copied, and those behind them, run in the main process."""
    pipe = Stays(numbers(6).map(with_pid)).map(with_pid)
    with loader(pipe) as loaded:
        items = list(loaded)
        assert type(loaded.reading_service._end_datapipe) is type(pipe)
    assert [item for (item, _), _ in items] == list(range(6))
    assert {pid for _, pid in items} == {os.getpid()}
    assert os.getpid() not in {pid for (_, pid), _ in items}


def test_several_replicable_branches_are_refused() -> None:
    """A graph whose replicable part is not in one piece is refused as torchdata refuses it."""
    with (
        loader(Stays(numbers()).zip(numbers())) as loaded,
        pytest.raises(AssertionError, match="single replicable branch"),
    ):
        iter(loaded)


# -- 7: order and epochs


def test_order_does_not_depend_on_the_workers() -> None:
    """With sharding, the order is that of the unsharded graph for any number of workers."""
    orders = []
    for num_workers in (1, 2, 3):
        with loader(shuffled().map(double), num_workers) as loaded:
            loaded.seed(7)
            orders.append(list(loaded))
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])
    assert sorted(orders[0]) == list(range(0, 40, 2))


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_leaving_an_epoch_early(make: Any) -> None:
    """A new iterator begins a new and whole epoch, and the old one is invalid."""
    with loader(make(30)) as loaded:
        old = iter(loaded)
        assert list(itertools.islice(old, 5)) == list(range(5))
        new = iter(loaded)
        assert next(new) == 0
        with pytest.raises(RuntimeError, match="invalidated"):
            next(old)
        assert list(new) == list(range(1, 30))
        assert list(loaded) == list(range(30))


@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (0, 3), (3, 0), (4, 2, 4), (2, 4, 4), (0, 0)])
def test_uneven_workers(counts: tuple[int, ...]) -> None:
    """Workers that have no more items are left out, and the others go on by turns."""
    expected = [(w, r) for r in range(max(counts)) for w in range(len(counts)) if r < counts[w]]
    with loader(Uneven(counts), len(counts)) as loaded:
        assert list(loaded) == expected
        assert list(loaded) == expected


def test_nothing_at_all() -> None:
    """An empty source is an empty epoch, with more workers than items, too."""
    for pipe in (numbers(0), dispatched(0), dispatched(1).filter(rests)):
        with loader(pipe, 3) as loaded:
            assert list(loaded) == []


# -- 8, D 5: seeds


def random_graph() -> Any:
    return IterableWrapper(range(6)).shuffle().map(draw).sharding_filter().map(draw)


def random_dispatched_graph() -> Any:
    pipe = IterableWrapper(range(6)).shuffle().map(draw).sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).shuffle()


def random_tail() -> Any:
    return Stays(shuffled(6)).shuffle()


def epochs_of_theirs(make: Any) -> list[list[Any]]:
    """Return two epochs of torchdata's own service under the seed 5."""
    theirs = DataLoader2(make(), reading_service=dataloader2.MultiProcessingReadingService(2))
    theirs.seed(5)
    epochs = [list(theirs), list(theirs)]
    # Its own shutdown hangs now and then, and leaves a process: there is nothing left to end.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    service = theirs.reading_service
    service._worker_processes, service._dispatch_process = [], None
    theirs.shutdown()
    return epochs


@pytest.mark.parametrize("make", [random_graph, random_dispatched_graph, random_tail])
def test_the_seeds_are_those_of_torchdata(make: Any) -> None:
    """Under one seed, order and random numbers are those that torchdata's service gives."""
    expected = epochs_of_theirs(make)
    with loader(make(), repeat_epochs=True) as repeating, loader(make()) as ours:
        for loaded in (repeating, ours):
            loaded.seed(5)
        assert [list(repeating), list(repeating)] == expected
        assert list(ours) == expected[0]


@pytest.mark.parametrize("make", [random_graph, random_dispatched_graph, random_tail])
def test_epochs_differ(make: Any) -> None:
    """After one seed every epoch has an order of its own, and the same seed gives the same ones."""
    with loader(make()) as loaded:
        loaded.seed(5)
        first = [list(loaded) for _ in range(3)]
        loaded.seed(5)
        assert [list(loaded) for _ in range(3)] == first
    assert len({repr(items) for items in first}) == 3


def test_without_a_seed_torch_decides() -> None:
    """Without `seed`, torch's own generator decides, so that `manual_seed` repeats an epoch."""
    with loader(random_graph()) as loaded:
        torch.manual_seed(3)
        first = list(loaded)
        torch.manual_seed(4)
        assert list(loaded) != first
        torch.manual_seed(3)
        assert list(loaded) == first


# -- 9: prefetching


@pytest.mark.parametrize(("worker", "main", "ahead"), [(0, 0, 1), (3, 0, 4), (0, 4, 3), (3, 4, 6)])
def test_how_far_ahead_workers_go(worker: int, main: int, ahead: int, tmp_path: Path) -> None:
    """A worker is one item ahead, and as many more as the two counts say; 0 is none."""
    path = tmp_path / "made"
    pipe = numbers(200).map(functools.partial(noted, str(path)))
    with loader(pipe, worker_prefetch_cnt=worker, main_prefetch_cnt=main) as loaded:
        items = iter(loaded)
        loaded._pause()
        assert made(path) == 2 * ahead
        loaded._resume()
        for taken in range(1, 20):
            next(items)
            loaded._pause()
            assert taken < made(path) <= taken + 2 * ahead
            loaded._resume()


# -- 10: pause, resume, limit


@pytest.mark.parametrize("make", [shuffled, dispatched])
@pytest.mark.parametrize("counts", [(0, 0), (2, 2)])
def test_pause_and_resume_lose_nothing(make: Any, counts: tuple[int, int]) -> None:
    """Pausing ends the loop, resuming goes on with the next item; prefetching pipes, too."""
    pipe = make(20).prefetch(3).prefetch(2)
    with loader(pipe, worker_prefetch_cnt=counts[0], main_prefetch_cnt=counts[1]) as loaded:
        items = iter(loaded)
        got = []
        while len(got) < 20:
            for item in items:
                got.append(item)
                if len(got) in (3, 4, 18):
                    loaded._pause()
            loaded._resume() if len(got) < 20 else None
        assert sorted(got) == list(range(20))


def test_pause_and_resume_in_the_tail() -> None:
    """Threads of the main process's pipes are held and go on."""
    with loader(Stays(numbers(20)).prefetch(4)) as loaded:
        items = iter(loaded)
        got = [next(items), next(items)]
        loaded._pause()
        assert list(items) == []
        loaded._resume()
        assert got + list(items) == list(range(20))


def test_limit() -> None:
    """A limit ends the loop after so many items, again after each `resume`, until it is lifted."""
    with loader(shuffled(10)) as loaded:
        items = iter(loaded)
        items.limit(3)
        parts = [list(items)]
        with pytest.raises(StopIteration):
            next(items)
        items.resume()
        parts.append(list(items))
        items.limit(None)
        items.resume()
        parts.append(list(items))
    assert [len(part) for part in parts] == [3, 3, 4]
    assert sorted(itertools.chain(*parts)) == list(range(10))


def test_pausing_as_the_source_ends() -> None:
    """A pause comes to an end, also where threads of prefetching pipes are about to."""
    with loader(shuffled(10).prefetch().prefetch(), 1, worker_prefetch_cnt=0) as loaded:
        for _ in range(20):
            items = iter(loaded)
            got = []
            for limit in (3, 4, 2, None):
                items.limit(limit)
                got += items
                loaded._resume() if limit else None
            assert sorted(got) == list(range(10))


def add_share(pipe: Any, share: int | None) -> None:
    pipe.share = share


def shares(pipe: Any) -> Any:
    pipe.share = (pipe.share, cseq.worker_info().number)
    return pipe


class Shown(IterDataPipe):
    """A pipe whose items show what was set on it."""

    def __init__(self) -> None:
        self.share: Any = "unset"

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.share


def test_functions_of_other_services_reach_the_workers() -> None:
    """`_pause`, `_resume` and `_limit` call another service's function on each worker's graph."""
    with loader(Shown(), worker_prefetch_cnt=0, main_prefetch_cnt=0) as loaded:
        items = iter(loaded)
        assert next(items) == "unset"
        loaded.reading_service._limit(5, add_share)
        loaded.reading_service._pause(shares)
        loaded.reading_service._resume()
        assert list(itertools.islice(items, 7))[-2:] in ([(3, 0), (2, 1)], [(2, 1), (3, 0)])


# -- 11, D 2, 3: ending


@pytest.mark.parametrize("make", [numbers, dispatched])
@pytest.mark.parametrize(("worker", "main"), [(0, 0), (0, 10), (10, 0), (10, 10)])
def test_shutdown_after_some_items(make: Any, worker: int, main: int) -> None:
    """`shutdown` returns whatever is on its way, and twice is fine."""
    for taken in (0, 1, 10):
        options = {"worker_prefetch_cnt": worker, "main_prefetch_cnt": main}
        loaded = loader(make(1000).map(double).batch(4), **options)
        assert len(list(itertools.islice(iter(loaded), taken))) == taken
        loaded.shutdown()
        loaded.shutdown()
        with pytest.raises(RuntimeError, match="already been shut down"):
            iter(loaded)


def test_shutdown_before_anything() -> None:
    """A loader that was never iterated can be shut down, and so can a service."""
    loader(numbers()).shutdown()
    service().finalize()


def test_a_loader_that_is_dropped() -> None:
    """A loader that nobody holds any more ends its processes, in the middle of an epoch, too."""
    items = iter(loader(dispatched(1000)))
    assert next(items) == 0
    del items  # `nothing_left_behind` looks


def test_shutdown_with_a_thread_that_reads() -> None:
    """Threads of pipes in the main process that wait for an item are no obstacle."""
    pipe = Stays(numbers(100).map(functools.partial(slowly, 0.05))).prefetch(3)
    loaded = loader(pipe, worker_prefetch_cnt=0, main_prefetch_cnt=0)
    items = iter(loaded)
    assert next(items) == 0
    items = iter(loaded)
    assert [next(items), next(items)] == [0, 1]
    loaded.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that hang be killed soon."""
    monkeypatch.setattr("cseq.supervisor.GRACE", 0.1)


@pytest.mark.usefixtures("impatient")
def test_shutdown_while_workers_hang() -> None:
    """Workers that hang in the user's code are ended by force."""
    loaded = loader(numbers().map(functools.partial(slowly, 1e6)))
    iter(loaded)
    loaded.shutdown()


@pytest.mark.usefixtures("impatient")
def test_shutdown_from_another_thread() -> None:
    """A loop that waits for an item gets an InterruptedError when another thread ends it all."""
    loaded = loader(dispatched().map(functools.partial(slowly, 1e6)))
    items = iter(loaded)
    thread = threading.Timer(0.3, loaded.reading_service.finalize)
    thread.start()
    with pytest.raises(InterruptedError):
        next(items)
    thread.join()


# -- 11: Ctrl-C

STEPS = tuple(f"adapters/torchdata/{name}.py" for name in ("__init__", "engine", "ends", "relay"))
STARTING = (*STEPS, "adapters/torchdata/graph.py")


def in_three_parts() -> Any:
    """A graph for the dispatching process, the workers and the main process."""
    return Stays(dispatched(12).map(double))


@pytest.mark.parametrize("verb", ["iter", "_pause", "_resume"])
def test_ctrl_c_in_an_epoch(verb: str) -> None:
    """Wherever in a loader's calls a signal handler raises: doing it again goes well."""
    with loader(in_three_parts()) as loaded:

        def step(countdown: int) -> bool:
            items = iter(loaded)
            got = list(itertools.islice(items, 3))
            if verb == "_resume":
                loaded._pause()
            with interrupted(countdown, *STEPS, "stream.py") as struck:
                iter(loaded) if verb == "iter" else getattr(loaded, verb)()
            if verb == "iter":
                items, got = iter(loaded), []
            elif loaded._is_paused:
                loaded._resume()
            assert got + list(items) == list(range(0, 24, 2))
            return struck.is_set()

        assert first_hits(step) > 30


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of sockets that were just made
def test_ctrl_c_in_the_first_iter() -> None:
    """Where the start was interrupted, the graph is whole and can be started."""

    def step(countdown: int) -> bool:
        with loader(in_three_parts()) as loaded:
            with interrupted(countdown, *STARTING) as struck:
                iter(loaded)
            assert list(loaded) == list(range(0, 24, 2))
        return struck.is_set()

    assert first_hits(step, 11) > 20


def test_ctrl_c_in_shutdown() -> None:
    """Where the end was interrupted, dropping the loader ends its processes."""

    def step(countdown: int) -> bool:
        loaded = loader(in_three_parts())
        assert next(iter(loaded)) == 0
        with interrupted(countdown, *STEPS) as struck:
            loaded.shutdown()
        return struck.is_set()  # `nothing_left_behind` looks

    assert first_hits(step, 5) > 8


def test_a_graph_that_could_not_be_started_is_whole() -> None:
    """A start that fails (here: something cannot be pickled) is no obstacle to another one."""
    lock = threading.Lock()
    pipe = dispatched(6).map(double)
    reading = service(context="spawn")
    pipe.of_the_user = lock
    with pytest.raises(TypeError, match="lock"):
        reading.initialize(pipe)
    del pipe.of_the_user
    with loader(pipe) as loaded:
        assert list(loaded) == list(range(0, 12, 2))


# -- 12, D 9: exceptions


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("ahead", [0, 5])
def test_exception_in_a_worker(num_workers: int, ahead: int) -> None:
    """An exception comes in the place of its item, as its type, with place and traceback in it."""
    pipe = Raising(numbers(100), 4, Oops("it happened"))
    with loader(pipe, num_workers, worker_prefetch_cnt=ahead) as loaded:
        items = iter(loaded)
        assert list(itertools.islice(items, 4 * num_workers)) == list(range(4 * num_workers))
        with pytest.raises(Oops) as caught:
            next(items)
        text = str(caught.value)
        assert text.startswith("Caught Oops in worker process 0.\nOriginal Traceback (most recent")
        assert text.count("Caught") == 1
        assert "Oops: it happened" in text
        assert "in __iter__" in text
        with pytest.raises(RuntimeError, match="already been shut down"):
            iter(loaded)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_exception_in_the_dispatching_process(num_workers: int) -> None:
    """It comes in the place of its item, and says that it was there."""
    pipe = Raising(IterableWrapper(range(100)), 7, Oops("it happened"))
    pipe = pipe.sharding_round_robin_dispatch(MULTI).map(double)
    with loader(pipe, num_workers) as loaded:
        items = iter(loaded)
        assert list(itertools.islice(items, 7)) == list(range(0, 14, 2))
        with pytest.raises(Oops) as caught:
            next(items)
    text = str(caught.value)
    assert text.startswith("Caught Oops in dispatching process.\nOriginal Traceback (most recent")
    assert text.count("Caught") == 1


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_exceptions_that_are_made_otherwise(make: Any) -> None:
    """KeyError shows its text in full; one that cannot be made from a text is a RuntimeError."""
    for error, expected in ((KeyError("lost"), KeyError), (Odd(1, 2), RuntimeError)):
        with loader(Raising(make(), 0, error)) as loaded, pytest.raises(expected) as caught:
            list(loaded)
        assert f"Caught {type(error).__name__} in worker process 0.\n" in str(caught.value)


def raise_in_one(pipe: Any, info: Any, *more: Any) -> Any:
    if info.worker_id == 1:
        raise Oops("it happened")
    return pipe


def forget(pipe: Any, *more: Any) -> None:
    """Return nothing, as a function does whose return was forgotten."""


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("make", [numbers, dispatched])
def test_exception_in_a_worker_function(name: str, make: Any) -> None:
    """What the worker functions raise comes out of `iter()`, again each time."""
    with loader(make(), **{name: raise_in_one}) as loaded:
        for _ in range(2):
            with pytest.raises(Oops, match=r"Caught Oops in worker process 1\.\nOriginal Trace"):
                iter(loaded)


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_worker_functions_have_to_return_a_pipe(name: str) -> None:
    """A function that returns no datapipe is told so."""
    with (
        loader(numbers(), **{name: forget}) as loaded,
        pytest.raises(TypeError, match=f"{name} returned None, which is no datapipe"),
    ):
        iter(loaded)


class Unpausable(IterDataPipe):
    """A pipe that cannot be paused."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def pause(self) -> None:
        raise Oops("not now")


def test_exception_in_pause() -> None:
    """What a pipe raises when it is paused comes out of the pause."""
    with loader(Unpausable()) as loaded:
        iter(loaded)
        with pytest.raises(Oops, match="Caught Oops in worker process 0"):
            loaded._pause()


# -- D 2: death


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_killed_worker(make: Any) -> None:
    """Without `max_restarts`, the death of a worker is an error that says so."""
    with loader(make(1000).map(with_pid)) as loaded:
        items = iter(loaded)
        kill(next(items)[1])
        with pytest.raises(cseq.WorkerDied, match=WORDS):
            list(items)


def test_killed_worker_that_was_idle() -> None:
    """A worker that dies between two epochs is an error as the next one begins."""
    with loader(numbers(4).map(with_pid)) as loaded:
        (_, pid), *_ = list(loaded)
        kill(pid)
        with pytest.raises(cseq.WorkerDied):
            list(loaded)


@pytest.mark.parametrize("make", [random_graph, random_dispatched_graph])
def test_replaced_workers(make: Any) -> None:
    """With `max_restarts`, workers and dispatcher are replaced, and the items are the same."""
    first, second = make().map(with_pid), make().map(with_pid)
    with loader(first) as calm, loader(second, max_restarts=10) as shaken:
        for loaded in (calm, shaken):
            loaded.seed(11)
        for _ in range(2):
            expected = [item for item, _ in calm]
            got = []
            for item, pid in shaken:
                got.append(item)
                if len(got) in (1, 2, 5):
                    kill(pid)  # it may have been killed before the item was taken
            assert got == expected
        assert shaken.reading_service.stats().restarts > 0


def test_replaced_dispatching_process() -> None:
    """A dispatching process that is replaced goes on where the dead one was."""
    pipe = IterableWrapper(range(300)).map(with_pid).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(double), max_restarts=3, worker_prefetch_cnt=0) as loaded:
        items = iter(loaded)
        got = [next(items)]
        kill(got[0][1])
        got += items
    assert [item[0] for item in got] == list(range(300))
    assert len({item[1] for item in got}) == 2


@pytest.mark.needs("POSIX")
@pytest.mark.usefixtures("impatient")
def test_timeout() -> None:
    """An item that takes longer than `timeout` is an error that shows where its worker is."""
    pipe = numbers().map(functools.partial(slowly, 1e6))
    with loader(pipe, timeout=0.2) as loaded, pytest.raises(cseq.WorkerTimeout, match="slowly"):
        list(loaded)


@pytest.mark.needs("POSIX")
def test_timeout_of_the_dispatching_process() -> None:
    """Where it hangs, the error names it, or shows the worker that waits for it."""
    pipe = IterableWrapper(range(9)).map(functools.partial(slowly, 1e6))
    with loader(pipe.sharding_round_robin_dispatch(MULTI), timeout=0.3) as loaded:
        items = iter(loaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cseq.supervisor.GRACE", 0.1)
            with pytest.raises(cseq.WorkerTimeout, match=r"the dispatching process: |in _ask"):
                next(items)


ORPHANS = """
import os
from cseq.launcher import start_methods
from cseq.launcher.base import KILL
from cseq.adapters.torchdata import MultiProcessingReadingService
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

def forever(item):
    while True:
        pass

multi = SHARDING_PRIORITIES.MULTIPROCESSING
pipe = IterableWrapper(range(100)).sharding_round_robin_dispatch(multi)
service = MultiProcessingReadingService(2, start_methods()[-1])
loader = DataLoader2(pipe.map(forever), reading_service=service)
iter(loader)
os.kill(os.getpid(), KILL)
"""


def test_no_orphans(run_script: RunScript, tmp_path: Path) -> None:
    """When the main process is killed, all others go, even if they are busy; no file is left."""
    done = run_script(ORPHANS, TMPDIR=str(tmp_path))
    assert done.returncode == CODE  # and no process holds its output
    if sys.platform == "linux":
        assert not [name for name in os.listdir(tmp_path) if name.startswith("cseq-")]


def in_a_process(item: int) -> int:
    """Have another process compute."""
    with multiprocessing.get_context(QUICK).Pool(1) as pool:
        return pool.apply(double, (item,))


def test_workers_may_have_children() -> None:
    """A worker may start processes itself."""
    with loader(numbers(2).map(in_a_process)) as loaded:
        assert list(loaded) == [0, 2]


# -- 13, D 6: state


def restored(state: dict[str, Any], num_workers: int = 2, **options: Any) -> Any:
    return DataLoader2.from_state(state, service(num_workers, **options))


def long_graph() -> Any:
    return shuffled(40).map(draw)


def long_dispatched_graph() -> Any:
    pipe = IterableWrapper(range(40)).shuffle().sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).batch(2)


def long_tail() -> Any:
    return Stays(shuffled(40)).shuffle(buffer_size=7)


GRAPHS = [long_graph, long_dispatched_graph, long_tail]


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("taken", [0, 1, 13])
def test_state_within_an_epoch(make: Any, taken: int) -> None:
    """A restored loader goes on with the next item, and with the same epochs after that."""
    with loader(make()) as loaded:
        loaded.seed(1)
        list(loaded)
        items = iter(loaded)
        list(itertools.islice(items, taken))
        state = pickle.loads(pickle.dumps(loaded.state_dict()))
        expected = [list(items), list(loaded)]
    with restored(state) as loaded:
        assert [list(loaded), list(loaded)] == expected


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("taken", [None, 0, 5])
def test_state_replayed_from_the_start(make: Any, taken: int | None) -> None:
    """`_restore_checkpoint_beginning_of_epoch` goes back to the start, as with torchdata."""
    with loader(make()) as loaded:
        loaded.seed(1)
        if taken is None:
            state = loaded.state_dict()
            got, items = [], loaded
        else:
            items = iter(loaded)
            got = list(itertools.islice(items, taken))
            state = loaded.state_dict()
        got += items
    with restored(state) as loaded:
        loaded._restore_checkpoint_beginning_of_epoch()
        assert list(loaded) == got


def test_state_of_a_loader_without_seed() -> None:
    """The rest of an epoch comes back even if nobody has chosen its seed."""
    with loader(long_graph()) as loaded:
        items = iter(loaded)
        list(itertools.islice(items, 9))
        state = loaded.state_dict()
        expected = list(items)
    with restored(state) as loaded:
        assert list(loaded) == expected
        assert len(list(loaded)) == 40


def test_state_between_epochs() -> None:
    """A state from after the end of an epoch begins the next one."""
    with loader(long_graph()) as loaded:
        loaded.seed(1)
        list(loaded)
        state = loaded.state_dict()
        expected = list(loaded)
    with restored(state) as loaded:
        assert list(loaded) == expected


def test_state_of_a_restored_loader() -> None:
    """A loader that was restored can be left off again, at once or later."""
    with loader(long_graph()) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        list(itertools.islice(items, 4))
        state = loaded.state_dict()
        expected = list(items)
    with restored(state) as loaded:
        items = iter(loaded)
        state = loaded.state_dict()
    with restored(state) as loaded:
        items = iter(loaded)
        assert list(itertools.islice(items, 6)) == expected[:6]
        state = loaded.state_dict()
    with restored(state) as loaded:
        assert list(loaded) == expected[6:]


def test_state_for_another_number_of_workers() -> None:
    """A position within an epoch means nothing to another number of workers, which is said."""
    with loader(numbers()) as loaded:
        next(iter(loaded))
        state = loaded.state_dict()
    with restored(state, 3) as loaded, pytest.raises(ValueError, match="num_workers=2, not 3"):
        iter(loaded)


def test_state_of_a_graph_that_has_changed() -> None:
    """Where a graph no longer has as many items as were taken, the loop is told."""
    with loader(Uneven((5, 5))) as loaded:
        list(itertools.islice(iter(loaded), 8))
        state = loaded.state_dict()
    state["serialized_datapipe"] = pickle.dumps(Uneven((2, 2)))
    with (
        restored(state) as loaded,
        pytest.raises(RuntimeError, match=r"after 8 items .* only 4"),
    ):
        list(loaded)


def test_state_when_epochs_repeat() -> None:
    """With `repeat_epochs` a state has no position, as with torchdata."""
    with loader(long_graph(), repeat_epochs=True) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        first = [next(items)]
        state = loaded.state_dict()
        first += items
    with restored(state, repeat_epochs=True) as loaded:
        assert list(loaded) == first


# -- 14, 15, 16: other services, no workers, tensors

DISTRIBUTED = """
import torch.distributed as dist
from cseq.adapters.torchdata import MultiProcessingReadingService
from cseq.launcher import start_methods
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for dispatch in (False, True):
    pipe = IterableWrapper(range(21)).shuffle().sharding_filter()
    if dispatch:
        pipe = pipe.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    multi = MultiProcessingReadingService(2, start_methods()[-1])
    services = DistributedReadingService(), multi
    loader = DataLoader2(pipe, reading_service=SequentialReadingService(*services))
    loader.seed(3)
    epochs = [list(loader), list(loader)]
    loader.seed(3)
    assert [list(loader), list(loader)] == epochs
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(21))
    items = iter(loader)
    items.limit(4)
    assert len(list(items)) == 4
    items.limit(None)
    items.resume()
    assert len(list(items)) == 17
    loader.shutdown()
dist.destroy_process_group()
print("done")
"""


def test_with_distributed_reading(run_script: RunScript) -> None:
    """It works behind a DistributedReadingService: seeds, pause and limit go through both."""
    done = run_script(DISTRIBUTED)
    assert done.stdout == "done\n", done.stderr


def test_state_in_a_sequence_of_services() -> None:
    """In a SequentialReadingService the position within an epoch is part of its state."""
    with DataLoader2(long_graph(), reading_service=SequentialReadingService(service())) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        list(itertools.islice(items, 9))
        state = loaded.state_dict()
        expected = list(items)
    with DataLoader2.from_state(state, SequentialReadingService(service())) as loaded:
        assert list(loaded) == expected


def test_no_workers() -> None:
    """Without workers everything runs here, after a warning, and cannot be paused."""
    with pytest.warns(UserWarning, match="Please use `InProcessReadingService` for num_workers=0"):
        alone = MultiProcessingReadingService(worker_init_fn=add_sharding)
    with DataLoader2(IterableWrapper(range(5)).map(with_pid), reading_service=alone) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        assert next(items) == (0, os.getpid())
        with pytest.raises(RuntimeError, match="cannot pause"):
            loaded._pause()
    with pytest.warns(UserWarning, match="num_workers=0"):
        alone = MultiProcessingReadingService()
    with DataLoader2(shuffled(), reading_service=alone) as loaded:
        loaded.seed(1)
        assert list(loaded) != list(loaded)


def arrays(item: int) -> dict[str, Any]:
    return {
        "array": np.full((100, 100), item, dtype="float32"),
        "tensor": torch.full((1000,), item, dtype=torch.int16),
        "name": f"item {item}",
    }


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_arrays_and_tensors(make: Any) -> None:
    """Arrays and tensors arrive as they are, through shared memory, and stay intact."""
    with loader(make(30).map(arrays)) as loaded:
        items = list(loaded)
        assert loaded.reading_service.stats().nbytes > 30 * 42_000
    for number, item in enumerate(items):
        assert (item["array"].dtype, item["array"].shape) == (np.float32, (100, 100))
        assert (item["array"] == number).all()
        assert item["tensor"].dtype is torch.int16
        assert (item["tensor"] == number).all()
        assert item["name"] == f"item {number}"


def test_arrays_from_the_dispatching_process() -> None:
    """They arrive in the workers as they are, too."""
    pipe = IterableWrapper(range(6)).map(arrays).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(total)) as loaded:
        assert list(loaded) == [(10_000.0 * n, 1000 * n) for n in range(6)]


def total(item: dict[str, Any]) -> tuple[float, int]:
    return float(item["array"].sum()), int(item["tensor"].sum())


def threads(item: Any) -> int:
    return torch.get_num_threads()


def test_cseq_testing_knows_its_workers() -> None:
    """They can be killed by their numbers, once they run."""
    with loader(numbers(20), max_restarts=5) as loaded:
        service = loaded.reading_service
        with pytest.raises(RuntimeError, match="not running"):
            testing.pids(service)
        items = iter(loaded)
        got = [next(items)]
        testing.kill(service, 0)
        got += items
        assert got == list(range(20))
        while not service.stats().restarts:
            time.sleep(0.001)
        assert len(testing.pids(service)) == 2
    with pytest.raises(RuntimeError, match="not running"):
        testing.pids(service)


def test_workers_use_one_thread() -> None:
    """In a worker torch uses one thread, so that many workers do not get in each other's way."""
    with loader(numbers(2).map(threads)) as loaded:
        assert list(loaded) == [1, 1]


@pytest.mark.needs("Linux")  # elsewhere the socket lies in a folder of ours
def test_nobody_else_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user that finds the relay's name is turned away."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert relay.is_ours(ours)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert not relay.is_ours(ours)


def test_a_loader_that_is_dropped_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are ended on another thread; `shutdown` waits for them."""
    ended = []
    end = engine.Engine.close

    def close(engine: Any) -> None:
        ended.append(threading.current_thread().name)
        end(engine)

    monkeypatch.setattr(engine.Engine, "close", close)
    made = loader(numbers())
    assert next(iter(made)) == 0
    pids = [pid for pid in testing.pids(made.reading_service) if pid]
    circle = [made]
    circle.append(circle)  # type: ignore[arg-type]
    del made, circle
    gc.collect()
    await_closings(60)
    assert set(ended) == {"cseq-close"}
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
    ended.clear()
    with loader(numbers()) as made:
        assert next(iter(made)) == 0
    assert ended == [threading.current_thread().name]
