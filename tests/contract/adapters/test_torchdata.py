"""`cseq.adapters.torchdata`: DataLoader2 with cseq's workers, and torchdata's own service."""

import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import threading

import pytest
from killing import await_closings, is_alive

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torchdata import dataloader2  # noqa: E402
from torchdata.dataloader2 import DataLoader2  # noqa: E402
from torchdata.dataloader2.graph import list_dps, set_datapipes_seed, traverse_dps  # noqa: E402
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402
from torchdata_graphs import (  # noqa: E402
    MULTI,
    Stays,
    dispatched,
    double,
    draw,
    loader,
    numbers,
    random_graph,
    service,
    shuffled,
    with_pid,
)

import cseq  # noqa: E402
from cseq import testing  # noqa: E402
from cseq.adapters.torchdata import MultiProcessingReadingService  # noqa: E402
from cseq.stream import Streams  # noqa: E402

# Many loaders start here, and their processes import torch: spawned, they would take minutes.
pytestmark = pytest.mark.needs("quick processes")


def noted(path, item):
    """Leave a byte for each item that is made."""
    with open(path, "a") as file:
        file.write(".")
    return item


def rests(item):
    """Of the first items, none is for worker 0."""
    return item % 2 == 1 or item >= 2600


def test_arguments_and_defaults():
    """The arguments and their defaults equal torchdata's, with the same names."""
    names = ["num_workers", "multiprocessing_context", "worker_prefetch_cnt", "main_prefetch_cnt"]
    names += ["worker_init_fn", "worker_reset_fn"]
    made = MultiProcessingReadingService(3)
    assert [getattr(made, name) for name in names] == [3, None, 10, 10, None, None]
    made = MultiProcessingReadingService(1, "spawn", 2, 3, double, draw)
    assert [getattr(made, name) for name in names] == [1, "spawn", 2, 3, double, draw]
    copy = pickle.loads(pickle.dumps(made))
    assert [getattr(copy, name) for name in names] == [1, "spawn", 2, 3, double, draw]


def test_wrong_arguments():
    """A wrong argument is refused at once; a start method raises torchdata's AssertionError."""
    with pytest.raises(AssertionError, match="Please choose one available multiprocessing context"):
        MultiProcessingReadingService(2, "teleport")
    with pytest.raises(ValueError, match="num_workers"):
        MultiProcessingReadingService(-1)
    with pytest.raises(TypeError, match="worker_prefetch_cnt"):
        service(worker_prefetch_cnt=1.5)
    with pytest.raises(ValueError, match="timeout"):
        service(timeout=0)


def test_one_service_for_several_loaders():
    """Each DataLoader2 copies the service it is given."""
    shared = service()
    first, second = (DataLoader2(numbers(n), reading_service=shared) for n in (4, 6))
    with first, second:
        one, two = iter(first), iter(second)
        assert [next(one), next(two), next(one), next(two)] == [0, 0, 1, 1]
        assert [*one, *two] == [2, 3, 2, 3, 4, 5]


def test_without_sharding_every_worker_makes_everything():
    with loader(IterableWrapper(range(3))) as loaded:
        assert list(loaded) == [0, 0, 1, 1, 2, 2]


def add_sharding(pipe, info):
    pipe = pipe.sharding_filter()
    torch.utils.data.graph_settings.apply_sharding(pipe, info.num_workers, info.worker_id, MULTI)
    return pipe


def reset_seeds(pipe, info, seeds):
    assert (info.num_workers, info.worker_id) == (2, cseq.worker_info().number)
    seeds.seed(123)
    set_datapipes_seed(list_dps(traverse_dps(pipe)), seeds, distributed_shared=True)
    return pipe.unbatch()


def test_worker_functions():
    """`worker_init_fn` may shard; `worker_reset_fn` has the last word on the seeds.

    The pipe that it returns serves that epoch only.
    """
    pipe = IterableWrapper(range(20)).batch(2).shuffle()
    with loader(pipe, worker_init_fn=add_sharding, worker_reset_fn=reset_seeds) as loaded:
        first, second = list(loaded), list(loaded)
    assert first == second
    assert sorted(first) == list(range(20))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_dispatched_items_go_round(num_workers):
    """One process makes the dispatched items; item i goes to worker i mod N."""
    pipe = IterableWrapper(range(9)).map(with_pid).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(with_pid), num_workers) as loaded:
        items = list(loaded)
    assert [item for (item, _), _ in items] == list(range(9))
    assert len({pid for (_, pid), _ in items}) == 1
    workers = [pid for _, pid in items]
    assert workers == (workers[:num_workers] * 9)[:9]
    assert len({os.getpid(), items[0][0][1], *workers}) == num_workers + 2


def test_dispatchers_on_two_branches():
    """One process makes the whole of the part that two dispatchers share."""
    left, right = dispatched(6).map(with_pid), dispatched(6).map(with_pid)
    with loader(left.zip(right)) as loaded:
        items = list(loaded)
    assert [(a, b) for (a, _), (b, _) in items] == [(n, n) for n in range(6)]
    assert len({pid for pair in items for _, pid in pair}) == 1


def test_branches_that_are_not_dispatched_are_sharded():
    """A `sharding_filter` shards on another branch than a dispatcher's, but not before one."""
    left = numbers(6).sharding_round_robin_dispatch(MULTI)
    with loader(left.zip(numbers(6).map(with_pid))) as loaded:
        items = list(loaded)
    assert [(a, b) for a, (b, _) in items] == [(n, n) for n in range(6)]
    assert len({pid for _, (_, pid) in items}) == 2


def test_one_worker_far_ahead_of_the_other():
    """Any number of dispatched items may wait for one worker; the other one is served."""
    with loader(dispatched(3000).filter(rests)) as loaded:
        assert sorted(loaded) == [item for item in range(3000) if rests(item)]


class Passed:
    """Knows where it was unpickled."""

    def __init__(self, *pids):
        self.pids = pids

    def __reduce__(self):
        return opened_by, self.pids


def opened_by(*pids):
    return Passed(*pids, os.getpid())


def pids_of(item):
    return item.pids


def test_nobody_opens_dispatched_items_on_their_way():
    """Only the worker of a dispatched item unpickles it."""
    pipe = IterableWrapper([0] * 100).map(Passed).sharding_round_robin_dispatch(MULTI)
    with loader(pipe.map(pids_of).map(with_pid)) as loaded:
        items = list(loaded)
    assert len(items) == 100
    assert all(pids == (0, worker) for pids, worker in items)


def test_what_is_not_replicable_stays_here():
    """Pipes that may not be copied, and those behind them, run in the main process."""
    pipe = Stays(numbers(6).map(with_pid)).map(with_pid)
    with loader(pipe) as loaded:
        items = list(loaded)
        assert type(loaded.reading_service._end_datapipe) is type(pipe)
    assert [item for (item, _), _ in items] == list(range(6))
    assert {pid for _, pid in items} == {os.getpid()}
    assert os.getpid() not in {pid for (_, pid), _ in items}


def test_graphs_that_are_refused():
    """Replicable parts must be connected; what was dispatched is not made again."""
    with (
        loader(Stays(numbers()).zip(numbers())) as loaded,
        pytest.raises(AssertionError, match="single replicable branch"),
    ):
        iter(loaded)
    with (
        loader(dispatched(), max_restarts=3) as loaded,
        pytest.raises(ValueError, match=r"max_restarts=3 .* with sharding_round_robin_dispatch"),
    ):
        iter(loaded)


def test_order_does_not_depend_on_the_workers():
    """With sharding, any number of workers gives the order of the unsharded graph."""
    orders = []
    for num_workers in (1, 2, 3):
        with loader(shuffled().map(double), num_workers) as loaded:
            loaded.seed(7)
            orders.append(list(loaded))
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])
    assert sorted(orders[0]) == list(range(0, 40, 2))


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_leaving_an_epoch_early(make):
    """A new iterator begins a new, whole epoch, and the old one becomes invalid."""
    with loader(make(30)) as loaded:
        old = iter(loaded)
        assert list(itertools.islice(old, 5)) == list(range(5))
        new = iter(loaded)
        assert next(new) == 0
        with pytest.raises(RuntimeError, match="invalidated"):
            next(old)
        assert list(new) == list(range(1, 30))
        assert list(loaded) == list(range(30))


def test_nothing_at_all():
    """An empty source gives an empty epoch, even with more workers than items."""
    for pipe in (numbers(0), dispatched(0), dispatched(1).filter(rests)):
        with loader(pipe, 3) as loaded:
            assert list(loaded) == []


def random_dispatched_graph():
    pipe = IterableWrapper(range(6)).shuffle().map(draw).sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).shuffle()


def random_tail():
    return Stays(shuffled(6)).shuffle()


def epochs_of_theirs(make):
    """Return two epochs of torchdata's own service with seed 5."""
    theirs = DataLoader2(make(), reading_service=dataloader2.MultiProcessingReadingService(2))
    theirs.seed(5)
    epochs = [list(theirs), list(theirs)]
    # torchdata's shutdown sometimes hangs, and leaves a process that would not end.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    service = theirs.reading_service
    service._worker_processes, service._dispatch_process = [], None
    theirs.shutdown()
    return epochs


@pytest.mark.parametrize("make", [random_graph, random_dispatched_graph, random_tail])
def test_the_seeds_are_those_of_torchdata(make):
    """With the same seed, order and random numbers equal torchdata's.

    Every epoch after a seed has its own order, and the same seed gives the same orders.
    """
    expected = epochs_of_theirs(make)
    with loader(make(), repeat_epochs=True) as repeating, loader(make()) as ours:
        repeating.seed(5)
        assert [list(repeating), list(repeating)] == expected
        ours.seed(5)
        epochs = [list(ours) for _ in range(3)]
        ours.seed(5)
        assert [list(ours) for _ in range(3)] == epochs
    assert epochs[0] == expected[0]
    assert len({repr(items) for items in epochs}) == 3


def test_without_a_seed_torch_decides():
    """Without `seed`, torch's generator decides, so `manual_seed` repeats an epoch."""
    with loader(random_graph()) as loaded:
        torch.manual_seed(3)
        first = list(loaded)
        torch.manual_seed(4)
        assert list(loaded) != first
        torch.manual_seed(3)
        assert list(loaded) == first


@pytest.mark.parametrize(("worker", "main", "ahead"), [(0, 0, 1), (3, 0, 4), (0, 4, 3), (3, 4, 6)])
def test_how_far_ahead_workers_go(worker, main, ahead, tmp_path):
    """A worker is one item ahead, plus the two counts, either of which may be 0."""
    path = tmp_path / "made"
    pipe = numbers(200).map(functools.partial(noted, str(path)))
    with loader(pipe, worker_prefetch_cnt=worker, main_prefetch_cnt=main) as loaded:
        items = iter(loaded)
        loaded._pause()
        assert path.stat().st_size == 2 * ahead
        loaded._resume()
        for taken in range(1, 20):
            next(items)
            loaded._pause()
            assert taken < path.stat().st_size <= taken + 2 * ahead
            loaded._resume()


@pytest.mark.parametrize("make", [shuffled, dispatched])
@pytest.mark.parametrize("counts", [(0, 0), (2, 2)])
def test_pause_and_resume_lose_nothing(make, counts):
    """Pausing ends the loop; resuming continues with the next item, even in prefetching pipes."""
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


def test_pause_and_resume_in_the_tail():
    """The threads of pipes in the main process pause and continue."""
    with loader(Stays(numbers(20)).prefetch(4)) as loaded:
        items = iter(loaded)
        got = [next(items), next(items)]
        loaded._pause()
        assert list(items) == []
        loaded._resume()
        assert got + list(items) == list(range(20))


def test_limit():
    """A limit ends the loop after that many items, and again after each `resume`, until lifted."""
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


def test_pausing_as_the_source_ends():
    """A pause ends even when threads of prefetching pipes are about to end."""
    with loader(shuffled(10).prefetch().prefetch(), 1, worker_prefetch_cnt=0) as loaded:
        for _ in range(20):
            items = iter(loaded)
            got = []
            for limit in (3, 4, 2, None):
                items.limit(limit)
                got += items
                loaded._resume() if limit else None
            assert sorted(got) == list(range(10))


def shares(pipe):
    pipe.share = (pipe.share, cseq.worker_info().number)
    return pipe


class Shown(IterDataPipe):
    """A pipe whose items show its settings."""

    def __init__(self):
        self.share = "unset"

    def __iter__(self):
        while True:
            yield self.share


def test_functions_of_other_services_reach_the_workers():
    """`_pause` and `_resume` call another service's function on each worker's graph."""
    with loader(Shown(), worker_prefetch_cnt=0, main_prefetch_cnt=0) as loaded:
        items = iter(loaded)
        assert next(items) == "unset"
        loaded.reading_service._pause(shares)
        loaded.reading_service._resume()
        assert sorted(list(itertools.islice(items, 7))[-2:]) == [("unset", 0), ("unset", 1)]


DISTRIBUTED = """
import torch.distributed as dist
from cseq.adapters.torchdata import MultiProcessingReadingService
from cseq.processes.launcher import start_methods
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


def test_with_distributed_reading(run_prepared):
    """The service works after a DistributedReadingService: both handle seeds, pause and limit."""
    done = run_prepared(DISTRIBUTED)
    assert done.stdout == "done\n", done.stderr


def test_no_workers():
    """Without workers, everything runs here, after a warning, and cannot be paused."""
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


def test_the_end_does_not_wait(monkeypatch):
    """Another thread ends all processes, after `shutdown` or when a loader is dropped.

    `cseq.testing` knows the workers until then.
    """
    ended = []
    end = Streams.close

    def close(streams):
        ended.append(threading.current_thread().name)
        end(streams)

    monkeypatch.setattr(Streams, "close", close)
    made = loader(dispatched(1000))
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
    with loader(dispatched(1000)) as made:
        with pytest.raises(RuntimeError, match="not running"):
            testing.pids(made.reading_service)
        assert next(iter(made)) == 0
    with pytest.raises(RuntimeError, match="not running"):
        testing.pids(made.reading_service)
    await_closings(60)
    # The dispatching process has its own streams.
    assert ended == ["cseq-close"] * 4
