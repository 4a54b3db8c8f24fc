"""One start and its end: a manager that is dropped is closed without anything waiting for that."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cseq
from cseq import run
from cseq.processes.launcher import start_methods

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.needs("Linux")

PROCESSES = """
import contextlib, os
def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found
"""

# An indexer that hangs for longer than workers are waited for, whatever they are asked to do.
HANGING = f"""
{PROCESSES}
import gc, sys, threading, time
import cseq, cseq.processes.supervisor
from cseq.stream import Streams

cseq.processes.supervisor.GRACE = 2.0
method, what = sys.argv[1:]

class Hangs:
    def __getitem__(self, indices):
        with open("begun", "w"):
            time.sleep(100)

class Producer:
    def __init__(self, number, num_workers): pass
    def begin(self, assignment): pass
    def items(self, start):
        with open("begun", "w"):
            time.sleep(100)
        yield 1

if what == "manager":
    dropped = cseq.MPSequence(Hangs, 10, 2, out_type="null", start_method=method).start()
    iter(dropped)
else:
    dropped = Streams(Producer, 2, start_method=method)
    dropped.begin([None, None])
while not os.path.exists("begun"):
    time.sleep(0.01)
circle = [dropped]
circle.append(circle)
"""

DROPPED = f"""
{HANGING}
begun = time.monotonic()
del dropped, circle
gc.collect()
print(time.monotonic() - begun < cseq.processes.supervisor.GRACE / 2)
while children():  # the hang guard of the test ends this
    time.sleep(0.01)
print(time.monotonic() - begun >= cseq.processes.supervisor.GRACE)
"""

AT_EXIT = f"""
{HANGING}
if what == "manager":  # one is being closed, another one runs
    del dropped, circle
    gc.collect()
    other = cseq.MPSequence(Hangs, 10, 2, out_type="null", start_method=method).start()
    iter(other)
import atexit
print(len(children()) > 0, flush=True)
pids = children()
"""


@pytest.mark.parametrize("what", ["manager", "streams"])
@pytest.mark.parametrize("method", start_methods())
def test_a_garbage_collection_waits_for_no_worker(
    run_script: RunScript, method: str, what: str
) -> None:
    """It returns at once though a worker hangs; soon after that, all processes are gone."""
    done = run_script(DROPPED, method, what)
    assert done.stdout == "True\nTrue\n", done.stderr


@pytest.mark.parametrize("what", ["manager", "streams"])
def test_the_interpreters_end_waits_for_all(run_script: RunScript, what: str) -> None:
    """What is being closed, and what runs, is gone when the program is."""
    done = run_script(AT_EXIT, start_methods()[0], what)
    assert done.stdout == "True\n", done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_what_is_dropped_is_closed_on_a_thread_that_is_known() -> None:
    """`threading` knows the thread while it closes, and makes up none that stays in its list."""
    before = set(threading.enumerate())
    names = []
    run.close_elsewhere(lambda: names.append(threading.current_thread().name))
    run.await_closings(60)
    assert names == ["cseq-close"]
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"cseq-close"}


@pytest.mark.parametrize("starts", ["_thread.start_new_thread", "threading.Thread.start"])
def test_no_more_threads(starts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no more threads, what is dropped is closed all the same, and once."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    closed = []
    monkeypatch.setattr(starts, refuse)
    run.close_elsewhere(lambda: closed.append(1))
    run.await_closings(60)
    assert closed == [1]


class Closing:
    """Something to be closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_what_is_closed_is_kept_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the thread that has begun the other one, either, which may still be at that."""
    first: list[Any] = []
    monkeypatch.setattr("_thread.start_new_thread", lambda begin, _args: first.append(begin))
    monkeypatch.setattr("threading.Thread.start", lambda thread: thread.run())
    closing = Closing()
    kept = weakref.ref(closing)
    run.close_elsewhere(closing.close)
    del closing
    assert kept() is not None
    first[0]()
    assert kept() is None
    run.await_closings(60)


def test_what_looks_at_its_end_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is closed all the same."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "on_close", [fail])
    manager = cseq.MTSequence(np.arange(8), 8, 1, out_type="null").start()
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        manager.finish()
    assert not run.present()
    assert threading.active_count() < threads
