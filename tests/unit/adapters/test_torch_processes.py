"""The worker processes of a loader's iterator, as seen from outside: `iterator._workers`."""

import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402
from cseq.processes.launcher import processes  # noqa: E402
from cseq.processes.launcher.base import KILLED  # noqa: E402

# torch warns of this on machines with few processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _started_slowly(monkeypatch):
    """Start spawned workers later than the iterator, on any machine."""
    start = processes.SpawnLauncher._launch

    def start_late(*args):
        time.sleep(0.3)
        return start(*args)

    monkeypatch.setattr(processes.SpawnLauncher, "_launch", start_late)


def spawned(count=2):
    """Return an iterator whose workers are being spawned."""
    return iter(cseq.DataLoader(Plain(), num_workers=count, multiprocessing_context="spawn"))


def test_a_process_is_there_as_soon_as_it_is_asked_for():
    """The same holds for torch, though `iter` does not wait for spawned workers."""
    iterator = spawned()
    pids = [process.pid for process in iterator._workers]
    assert all(isinstance(pid, int) for pid in pids)
    assert len({*pids, os.getpid()}) == 3
    iterator._shutdown_workers()
    assert [process.pid for process in iterator._workers] == pids


@pytest.mark.parametrize("first", ["is_alive", "exitcode"])
def test_it_is_alive_from_the_beginning(first):
    iterator = spawned(1)
    (process,) = iterator._workers
    assert process.is_alive() if first == "is_alive" else process.exitcode is None
    process.kill()
    process.join(100)
    assert not process.is_alive()
    assert process.exitcode not in (0, None)
    iterator._shutdown_workers()


def test_a_process_that_will_not_be_started_is_not_waited_for():
    """A thread asks for a process that will not start, as another thread ends the loader."""
    iterator = spawned(2)
    asked = []
    asking = threading.Thread(target=lambda: asked.append(iterator._workers))
    asking.start()
    iterator._shutdown_workers()
    asking.join(100)
    assert len(asked) == 1


def test_the_process_of_an_iterator_that_was_dropped_before_it_was_asked_for():
    iterator = spawned(1)
    assert next(iterator) == 0
    (process,) = iterator._workers
    del iterator
    process.join(100)
    assert process.exitcode in (0, KILLED)
    assert process.pid not in (None, os.getpid())


def test_a_process_that_has_ended():
    made = cseq.DataLoader(Plain(4), num_workers=1, multiprocessing_context=QUICKEST.start_method)
    iterator = iter(made)
    assert len(list(iterator)) == 4
    (process,) = iterator._workers
    process.join()
    assert process.exitcode == 0
