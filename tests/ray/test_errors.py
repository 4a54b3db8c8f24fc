"""Errors of indexers, and of agents that cannot start: each keeps its type in the loop."""

import importlib
import logging
import os
import sys

import cloudpickle
import numpy as np
import pytest
import ray
from drawing import (
    BATCHES,
    OPTIONS,
    SMALL,
    Draws,
    assert_is_test_mode,
    await_agents,
    in_test_mode,
    pids,
    sequence,
)
from kinds import assert_same
from local_cluster import until

import cseq
from cseq.fleet import ray as fleets

pytestmark = pytest.mark.usefixtures("cluster")


class OwnError(LookupError):
    """No other process can import it."""

    def __init__(self, sample):
        super().__init__(f"sample {sample}")
        self.sample = sample


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("it holds a file")
        self.file = sys.stdout


class Fails(Draws):
    """Raises another object for each of some samples."""

    def __getitem__(self, indices):
        if 100 in indices:
            raise OwnError(100)
        if 200 in indices:
            raise Unpicklable
        if 300 in indices:
            raise SystemExit(3)
        return super().__getitem__(indices)


def without(samples):
    """Return test mode's batches that have none of these samples."""
    return [one for one in in_test_mode() if not np.isin(one[0], samples).any()]


def outcomes(fleet, **options):
    """Return the batches of an epoch, and the errors of those that fail."""
    errors, got = [], []
    with sequence(fleet, **options).start() as batches:
        iterator = iter(batches)
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                return got, errors
            except Exception as error:  # noqa: BLE001
                errors.append(error)


def test_exceptions_of_indexers_arrive_as_themselves():
    """User classes that pickle accepts are the loop's own; notes name batch, node and process."""
    with cseq.RayFleet(Fails, 2, 1) as fleet:
        got, errors = outcomes(fleet)
        there = pids(fleet)
    assert_same(got, without([100, 200, 300]))
    own = next(error for error in errors if isinstance(error, OwnError))
    assert own.sample == 100
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["OwnError", "RuntimeError", "WorkerError"]
    for error in errors:
        assert isinstance(error.__cause__, cseq.RemoteTraceback)
        assert "epoch 0, batch" in "".join(error.__notes__)
        notes = "".join(error.__notes__)
        assert any(f"the agent with pid {pid} on node 127.0.0.2" in notes for pid in there)


def test_failing_batches_are_left_out():
    """The fleet has on_error='skip'."""
    with cseq.RayFleet(Fails, 2, 1) as fleet:
        manager = sequence(fleet, on_error="skip")
        with manager.start() as batches:
            got = list(batches)
        assert batches.stats().skips == BATCHES - len(got)
    assert_same(got, without([100, 200, 300]))


def test_an_indexer_fails_at_one_agent_alone(tmp_path):
    """Its batches are errors, and are not tried elsewhere; the other agent's are not."""

    class FailsWithoutFile(Draws):
        def __getitem__(self, indices):
            if not (tmp_path / str(os.getpid())).exists():
                raise OSError("this node has no data")
            return super().__getitem__(indices)

    with cseq.RayFleet(FailsWithoutFile, 2, 1) as fleet:
        bad, good = await_agents(fleet)
        (tmp_path / str(good)).touch()
        made, errors = outcomes(fleet, **SMALL)
    assert made
    assert {type(error) for error in errors} == {OSError}
    failed = {"".join(error.__notes__).split(" pid ")[1].split()[0] for error in errors}
    assert failed == {str(bad)}


def refuses(fleet, kind, match):
    """Fail unless the first batch raises this error; return the error and its notes."""
    with fleet, sequence(fleet).start() as batches:
        iterator = iter(batches)
        with pytest.raises(kind, match=match) as caught:
            next(iterator)
    return caught.value, "".join(getattr(caught.value, "__notes__", ()))


class Refuses:
    def __init__(self):
        raise FileNotFoundError(2, "no such file", "data.bin")


def test_the_constructor_of_an_indexer_raises_in_the_loop():
    """The first batch raises it, with its type; no other agent is asked."""
    error, notes = refuses(cseq.RayFleet(Refuses, 2, 1), FileNotFoundError, "no such file")
    assert error.filename == "data.bin"
    assert "raised by the agent with pid" in notes


def test_an_agent_whose_environment_cannot_be_made_is_an_error():
    """The error has Ray's text."""
    fleet = cseq.RayFleet(Draws, 1, 1, runtime_env={"working_dir": "file:///no/such.zip"})
    refuses(fleet, ray.exceptions.RayError, r"working_dir|no/such")


def test_what_cannot_be_scheduled_is_logged(caplog):
    """The log says so once; the loop can be left."""
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "cseq"):
        patch.setattr(fleets, "SHORT", 0.2)
        with cseq.RayFleet(Draws, 1, 1, resources={"unobtainable": 1}) as fleet:
            manager = sequence(fleet)
            with manager.start() as batches:
                iter(batches)
                until(lambda: "no agent is ready" in caplog.text, "nothing is logged")
    assert caplog.text.count("no agent is ready yet; an agent: TimeoutError: Ray has not") == 1


OTHERS = (
    r"has cseq 0\.[2-9].*, Python 3.* numpy 2, but the training process has cseq 0\.0\.1.* numpy 1"
)


def test_another_version_is_refused(monkeypatch):
    """The error has both versions: of cseq, of Python, and of the numpy that pickles arrays."""
    with cseq.RayFleet(Draws, 1, 1) as fleet:
        await_agents(fleet, 1)
        monkeypatch.setattr(cseq, "__version__", "0.0.1")
        monkeypatch.setattr(np, "__version__", "1.26.0")
        refuses(fleet, ImportError, OTHERS)


SOURCE = """
import cseq, numpy, written_more

class Own:
    def __getitem__(self, indices):
        return indices * written_more.twice(1) + cseq.rng().integers(10, size=len(indices))
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write two modules to a folder that only this process has on its path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "written.py").write_text(SOURCE)
    (tmp_path / "written_more.py").write_text("def twice(x):\n    return 2 * x\n")
    importlib.invalidate_caches()
    yield importlib.import_module("written")
    for name in ("written", "written_more"):
        sys.modules.pop(name, None)


def test_modules_of_the_user_go_by_value_if_cloudpickle_is_told(written):
    """Closures do, too."""
    offset = 5

    class Closure(written.Own):
        def __getitem__(self, indices):
            return super().__getitem__(indices) + offset

    modules = [written, sys.modules["written_more"]]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        for worker in (written.Own, Closure):
            with cseq.RayFleet(worker, 2, 1) as fleet, sequence(fleet).start() as batches:
                got = list(batches)
            assert_is_test_mode(got, worker)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def test_a_module_that_agents_lack_is_named(written):
    """The error has two remedies."""
    _, notes = refuses(cseq.RayFleet(written.Own, 1, 1), ModuleNotFoundError, "written")
    assert "install the module on all nodes" in notes
    assert "py_modules" in notes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1"),
        ({"threads": 3}, "3"),
        ({"threads": 3, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}}, "2"),
    ],
)
def test_threads_of_libraries(monkeypatch, options, expected):
    """Their number is `threads`, unless the runtime_env has another one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    class Threads:
        def __getitem__(self, indices):
            return os.environ.get("OMP_NUM_THREADS")

    with cseq.RayFleet(Threads, 1, 1, **options) as fleet, sequence(fleet).start() as batches:
        assert next(iter(batches)) == expected


def test_a_cluster_that_encrypts_carries_the_batches(monkeypatch):
    """No agent is connected to: Ray's calls carry the same stream, writable, and errors."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delattr(fleets, "Connection")
    with cseq.RayFleet(Draws, 2, 1) as fleet, sequence(fleet).start() as batches:
        assert_is_test_mode(list(batches))
    fleet = cseq.RayFleet(Fails, 2, 1)
    with fleet, sequence(fleet, on_error="skip").start() as batches:
        assert_same(list(batches), without([100, 200, 300]))


class Keeps:
    """Fills one array with each batch."""

    def __init__(self):
        self.kept = np.zeros(1 << 18, np.uint8)

    def __getitem__(self, indices):
        self.kept[:] = indices[0] % 251
        return indices, self.kept, {"a view": self.kept[1:]}


def test_what_an_indexer_keeps_is_copied():
    """The next batch is made while this one is sent; nothing writes to what the loop keeps."""
    kept = []
    with cseq.RayFleet(Keeps, 1, 1) as fleet, sequence(fleet).start() as batches:
        for indices, array, views in batches:
            kept.append((array, indices[0] % 251))
            assert (array == indices[0] % 251).all()
            assert (views["a view"] == indices[0] % 251).all()
    assert all((array == value).all() for array, value in kept)


def test_what_concerns_workers_is_given_to_the_fleet():
    """The same holds for a fleet of a sequence of fleets."""
    with cseq.RayFleet(Draws, 1, 1) as fleet:
        for options in ({"timeout": 3.0}, {"threads": 2}, {"seed_globals": False}):
            with pytest.raises(TypeError, match="pass it to the fleet"):
                cseq.RaySequence(fleet, 8, **options)
        with pytest.raises(TypeError, match="is a fleet; pass it to a RaySequence"):
            cseq.MPSequence(fleet, 8)
        manager = cseq.RaySequence(fleet, 8, **OPTIONS)
    with pytest.raises(RuntimeError, match="this fleet is closed; create a new one"):
        manager.start()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 0}, "nodes=0 is below 1"),
        ({"num_workers": "many"}, "num_workers='many' is not an integer"),
        ({"timeout": -1}, "timeout=-1"),
        ({"threads": 0}, "threads=0 is below 1"),
        ({"preload": False}, "preload"),
    ],
)
def test_wrong_arguments_are_named(options, text):
    """The error comes at once; Ray refuses unknown ones."""
    with pytest.raises((TypeError, ValueError), match=text):
        cseq.RayFleet(Draws, **options)
