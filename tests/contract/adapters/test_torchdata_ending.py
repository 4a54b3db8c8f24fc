"""Ends, exceptions, deaths and Ctrl-C in the processes of `cseq.adapters.torchdata`."""

import functools
import itertools
import threading
import time

import pytest
from interrupting import first_hits, in_shares, interrupted
from killing import kill
from streaming import STEPS

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402
from torchdata_graphs import (  # noqa: E402
    MULTI,
    Stays,
    dispatched,
    double,
    loader,
    numbers,
    random_graph,
    service,
    with_pid,
)

import cseq  # noqa: E402

# Many loaders start here, and their processes import torch: spawned, they would take minutes.
pytestmark = pytest.mark.needs("quick processes")


class Oops(Exception):
    """The exception of a test's pipe."""


class Raising(IterDataPipe):
    """A pipe that raises instead of returning an item."""

    def __init__(self, source, place, error):
        self.source, self.place, self.error = source, place, error

    def __iter__(self):
        for place, item in enumerate(self.source):
            if place == self.place:
                raise self.error
            yield item


def slowly(seconds, item):
    time.sleep(seconds)
    return item


@pytest.mark.parametrize("make", [numbers, dispatched])
@pytest.mark.parametrize(("worker", "main"), [(0, 0), (0, 10), (10, 0), (10, 10)])
def test_shutdown_after_some_items(make, worker, main):
    """`shutdown` may come before the start, with items on their way, and twice."""
    service().finalize()
    for taken in (None, 0, 1, 10):
        options = {"worker_prefetch_cnt": worker, "main_prefetch_cnt": main}
        loaded = loader(make(1000).map(double).batch(4), **options)
        if taken is not None:
            assert len(list(itertools.islice(iter(loaded), taken))) == taken
        loaded.shutdown()
        loaded.shutdown()
        with pytest.raises(RuntimeError, match="already been shut down"):
            iter(loaded)


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


ADAPTER = tuple(f"adapters/torchdata/{name}.py" for name in ("__init__", "ends", "relay"))


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
            with interrupted(countdown, *ADAPTER, *STEPS) as struck:
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
            with interrupted(countdown, *ADAPTER, "adapters/torchdata/graph.py") as struck:
                iter(loaded)
            assert list(loaded) == list(range(0, 24, 2))
        return struck.is_set()

    assert first_hits(step, 11, share) > 5


def test_ctrl_c_in_shutdown():
    """After an interrupted shutdown, dropping the loader ends its processes."""

    def step(countdown):
        loaded = loader(in_three_parts())
        assert next(iter(loaded)) == 0
        with interrupted(countdown, *ADAPTER) as struck:
            loaded.shutdown()
        # `nothing_left_behind` checks the rest.
        return struck.is_set()

    assert first_hits(step) > 1


def test_a_graph_that_could_not_be_started_is_whole():
    """After a failed start (here, an object cannot be pickled), another start works."""
    pipe = dispatched(6).map(double)
    reading = service(context="spawn")
    pipe.of_the_user = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        reading.initialize(pipe)
    del pipe.of_the_user
    with loader(pipe) as loaded:
        assert list(loaded) == list(range(0, 12, 2))


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize("place", ["worker process 0", "dispatching process"])
def test_exception_in_a_process(num_workers, ahead, place):
    """It comes instead of its item, with its type, and its text names the process."""
    if place == "dispatching process":
        pipe, count = Raising(IterableWrapper(range(100)), 7, Oops("it happened")), 7
        pipe = pipe.sharding_round_robin_dispatch(MULTI)
    else:
        pipe, count = Raising(numbers(100), 4, Oops("it happened")), 4 * num_workers
    with loader(pipe.map(double), num_workers, worker_prefetch_cnt=ahead) as loaded:
        items = iter(loaded)
        assert list(itertools.islice(items, count)) == list(range(0, 2 * count, 2))
        with pytest.raises(Oops) as caught:
            next(items)
        text = str(caught.value)
        assert text.startswith(f"Caught Oops in {place}.\nOriginal Traceback (most recent")
        assert text.count("Caught") == 1
        assert "Oops: it happened" in text
        assert "in __iter__" in text
        with pytest.raises(RuntimeError, match="already been shut down"):
            iter(loaded)


def raise_in_one(pipe, info, *more):
    if info.worker_id == 1:
        raise Oops("it happened")
    return pipe


def forget(pipe, *more):
    """Lack a return statement."""


def doubled():
    """Return a graph whose workers do more than pass on what is dispatched."""
    return dispatched().map(double)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (raise_in_one, Oops, r"Caught Oops in worker process 1\.\nOriginal Trace"),
        (forget, TypeError, "{} returned None, not a datapipe"),
    ],
)
@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
@pytest.mark.parametrize("make", [numbers, doubled])
def test_exception_in_a_worker_function(name, make, function, error, said):
    """`iter()` raises the exceptions of the worker functions, each time."""
    with loader(make(), **{name: function}) as loaded:
        for _ in range(2):
            with pytest.raises(error, match=said.format(name)):
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


@pytest.mark.needs("POSIX")
@pytest.mark.usefixtures("impatient")
def test_timeout_of_the_dispatching_process():
    """The error names the dispatching process that hangs, or the worker that waits for it."""
    pipe = IterableWrapper(range(9)).map(functools.partial(slowly, 1e6))
    with loader(pipe.sharding_round_robin_dispatch(MULTI), timeout=1.0) as loaded:
        items = iter(loaded)
        with pytest.raises(cseq.WorkerTimeout, match=r"the dispatching process: |in _ask"):
            next(items)
