"""Ends, exceptions, deaths and Ctrl-C in the processes of `cseq.adapters.torchdata`."""

import functools
import itertools
import threading

import pytest
from interrupting import first_hits, in_shares, interrupted
from killing import WORDS, kill

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402
from torchdata_graphs import (  # noqa: E402
    MULTI,
    Oops,
    Raising,
    Stays,
    dispatched,
    double,
    loader,
    numbers,
    random_graph,
    service,
    slowly,
    with_pid,
)

import cseq  # noqa: E402

# Many loaders start here, and their processes import torch: spawned, they would take minutes.
pytestmark = pytest.mark.needs("quick processes")

STREAMS = (
    "stream.py", "engine/pool.py", "tickets/items.py", "crews/processes.py", "crews/threads.py",
)  # fmt: skip


@pytest.mark.parametrize("make", [numbers, dispatched])
@pytest.mark.parametrize(("worker", "main"), [(0, 0), (0, 10), (10, 0), (10, 10)])
def test_shutdown_after_some_items(make, worker, main):
    """`shutdown` returns while items are on their way, and may be called twice."""
    for taken in (0, 1, 10):
        options = {"worker_prefetch_cnt": worker, "main_prefetch_cnt": main}
        loaded = loader(make(1000).map(double).batch(4), **options)
        assert len(list(itertools.islice(iter(loaded), taken))) == taken
        loaded.shutdown()
        loaded.shutdown()
        with pytest.raises(RuntimeError, match="already been shut down"):
            iter(loaded)


def test_shutdown_before_anything():
    loader(numbers()).shutdown()
    service().finalize()


def test_a_loader_that_is_dropped():
    """The processes of an unreferenced loader end, even in the middle of an epoch."""
    items = iter(loader(dispatched(1000)))
    assert next(items) == 0
    # `nothing_left_behind` checks the rest.
    del items


def test_shutdown_with_a_thread_that_reads():
    """Threads of pipes in the main process that wait for an item do not delay it."""
    pipe = Stays(numbers(100).map(functools.partial(slowly, 0.05))).prefetch(3)
    loaded = loader(pipe, worker_prefetch_cnt=0, main_prefetch_cnt=0)
    items = iter(loaded)
    assert next(items) == 0
    items = iter(loaded)
    assert [next(items), next(items)] == [0, 1]
    loaded.shutdown()


@pytest.fixture
def impatient(monkeypatch):
    """Make workers that hang be killed soon."""
    monkeypatch.setattr("cseq.processes.supervisor.GRACE", 0.1)


@pytest.mark.usefixtures("impatient")
def test_shutdown_while_workers_hang():
    """Workers that hang in the user's code are killed."""
    loaded = loader(numbers().map(functools.partial(slowly, 1e6)))
    iter(loaded)
    loaded.shutdown()


@pytest.mark.usefixtures("impatient")
def test_shutdown_from_another_thread():
    """A loop that waits for an item gets an InterruptedError when another thread shuts down."""
    loaded = loader(dispatched().map(functools.partial(slowly, 1e6)))
    items = iter(loaded)
    thread = threading.Timer(0.3, loaded.reading_service.finalize)
    thread.start()
    with pytest.raises(InterruptedError):
        next(items)
    thread.join()


STEPS = tuple(f"adapters/torchdata/{name}.py" for name in ("__init__", "ends", "relay"))
STARTING = (*STEPS, "adapters/torchdata/graph.py")


def in_three_parts():
    """Return a graph for the dispatching process, the workers and the main process."""
    return Stays(dispatched(12).map(double))


@in_shares
@pytest.mark.parametrize("verb", ["iter", "_pause", "_resume"])
def test_ctrl_c_in_an_epoch(verb, share):
    """Wherever a signal handler raises in a loader's calls, a second attempt succeeds."""
    with loader(in_three_parts()) as loaded:

        def step(countdown):
            items = iter(loaded)
            got = list(itertools.islice(items, 3))
            if verb == "_resume":
                loaded._pause()
            with interrupted(
                countdown,
                *STEPS,
                "stream.py",
                "engine/pool.py",
                "tickets/items.py",
                "crews/processes.py",
                "crews/threads.py",
            ) as struck:
                iter(loaded) if verb == "iter" else getattr(loaded, verb)()
            if verb == "iter":
                items, got = iter(loaded), []
            elif loaded._is_paused:
                loaded._resume()
            assert got + list(items) == list(range(0, 24, 2))
            return struck.is_set()

        assert first_hits(step, share=share) > 10


# An interrupted start may leave a new socket unclosed.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@in_shares
def test_ctrl_c_in_the_first_iter(share):
    """After an interrupted start, the graph is whole and can be started."""

    def step(countdown):
        with loader(in_three_parts()) as loaded:
            with interrupted(countdown, *STARTING) as struck:
                iter(loaded)
            assert list(loaded) == list(range(0, 24, 2))
        return struck.is_set()

    assert first_hits(step, 11, share) > 5


def test_ctrl_c_in_shutdown():
    """After an interrupted shutdown, dropping the loader ends its processes."""

    def step(countdown):
        loaded = loader(in_three_parts())
        assert next(iter(loaded)) == 0
        with interrupted(countdown, *STEPS) as struck:
            loaded.shutdown()
        # `nothing_left_behind` checks the rest.
        return struck.is_set()

    assert first_hits(step) > 1


def test_a_graph_that_could_not_be_started_is_whole():
    """After a failed start (here, an object cannot be pickled), another start works."""
    lock = threading.Lock()
    pipe = dispatched(6).map(double)
    reading = service(context="spawn")
    pipe.of_the_user = lock
    with pytest.raises(TypeError, match="lock"):
        reading.initialize(pipe)
    del pipe.of_the_user
    with loader(pipe) as loaded:
        assert list(loaded) == list(range(0, 12, 2))


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("ahead", [0, 5])
def test_exception_in_a_worker(num_workers, ahead):
    """An exception comes instead of its item, with its type, position and traceback."""
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
def test_exception_in_the_dispatching_process(num_workers):
    """It comes instead of its item, and names the dispatching process."""
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


def raise_in_one(pipe, info, *more):
    if info.worker_id == 1:
        raise Oops("it happened")
    return pipe


def forget(pipe, *more):
    """Lack a return statement."""


def doubled():
    """Return a graph whose workers do more than pass on what is dispatched."""
    return dispatched().map(double)


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("make", [numbers, doubled])
def test_exception_in_a_worker_function(name, make):
    """`iter()` raises the exceptions of the worker functions, each time."""
    with loader(make(), **{name: raise_in_one}) as loaded:
        for _ in range(2):
            with pytest.raises(Oops, match=r"Caught Oops in worker process 1\.\nOriginal Trace"):
                iter(loaded)


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_worker_functions_have_to_return_a_pipe(name):
    with (
        loader(numbers(), **{name: forget}) as loaded,
        pytest.raises(TypeError, match=f"{name} returned None, not a datapipe"),
    ):
        iter(loaded)


class Unpausable(IterDataPipe):
    def __iter__(self):
        return iter(range(10))

    def pause(self):
        raise Oops("not now")


def test_exception_in_pause():
    with loader(Unpausable()) as loaded:
        iter(loaded)
        with pytest.raises(Oops, match="Caught Oops in worker process 0"):
            loaded._pause()


@pytest.mark.parametrize("make", [numbers, dispatched])
def test_killed_worker(make):
    """Without `max_restarts`, a worker's death is an error that says so."""
    with loader(make(1000).map(with_pid)) as loaded:
        items = iter(loaded)
        kill(next(items)[1])
        with pytest.raises(cseq.WorkerDied, match=WORDS):
            list(items)


def test_replaced_workers():
    """With `max_restarts`, workers are replaced, and the items are the same."""
    first, second = random_graph().map(with_pid), random_graph().map(with_pid)
    with loader(first) as calm, loader(second, max_restarts=10) as shaken:
        for loaded in (calm, shaken):
            loaded.seed(11)
        for _ in range(2):
            expected = [item for item, _ in calm]
            got = []
            for item, pid in shaken:
                got.append(item)
                if len(got) in (1, 2, 5):
                    # The process may have been killed before the item was taken.
                    kill(pid)
            assert got == expected
        assert shaken.reading_service.stats().restarts > 0


def test_no_worker_is_replaced_beside_a_dispatching_process():
    with (
        loader(dispatched(), max_restarts=3) as loaded,
        pytest.raises(ValueError, match=r"max_restarts=3 .* with sharding_round_robin_dispatch"),
    ):
        iter(loaded)


@pytest.mark.needs("POSIX")
def test_timeout_of_the_dispatching_process():
    """The error names the dispatching process that hangs, or the worker that waits for it."""
    pipe = IterableWrapper(range(9)).map(functools.partial(slowly, 1e6))
    with loader(pipe.sharding_round_robin_dispatch(MULTI), timeout=1.0) as loaded:
        items = iter(loaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cseq.processes.supervisor.GRACE", 0.1)
            with pytest.raises(cseq.WorkerTimeout, match=r"the dispatching process: |in _ask"):
                next(items)
