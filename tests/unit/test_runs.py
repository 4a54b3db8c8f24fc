"""One start and its end: a dropped manager is closed, and no caller waits for that."""

import os
import sys
import threading
import weakref

import numpy as np
import pytest
from refusing import NO_THREAD, refusing
from waiting import until

import cseq
from cseq import runs
from cseq.processes.launcher import start_methods

pytestmark = pytest.mark.needs("Linux")

# For any request, this indexer hangs for longer than the wait for workers.
HANGING = """
import contextlib, gc, os, sys, threading, time
import cseq, cseq.processes.supervisor
from cseq.stream import Streams
cseq.processes.supervisor.GRACE = 2.0
method, what = sys.argv[1:]
def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found
class Hangs:
    def __getitem__(self, indices):
        with open("begun", "w"):
            time.sleep(100)
class Producer:
    def __init__(self, number, num_workers): pass
    def begin(self, assignment): pass
    def items(self, start): yield Hangs()[start]
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
cseq.processes.supervisor.GRACE = 3600
if what == "manager":  # one is being closed, another one runs
    del dropped, circle
    gc.collect()
    other = cseq.MPSequence(Hangs, 10, 2, out_type="null", start_method=method).start()
    iter(other)
print(len(children()) > 0, flush=True)
"""


class Slow:
    """An indexer of test mode whose batch runs a test's function."""

    def __init__(self, act, seen):
        self.act, self.seen = act, seen

    def __getitem__(self, indices):
        self.act()
        self.seen.append("made")
        return indices

    def close(self):
        self.seen.append("closed")


def in_another_thread(call):
    """Make another thread call a function."""
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def await_generation(generation):
    """Wait until another thread's call has interrupted the run, and holds the manager's lock."""
    until(lambda: all(one.pool.run.generation != generation for one in runs.present()))


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_finish_on_another_thread(seconds, monkeypatch):
    """It waits for a current call; after a time, the call ends the run."""
    monkeypatch.setattr(runs, "LOCK_SECONDS", seconds)
    seen = []

    def act():
        finishing = in_another_thread(finish)
        await_generation(1)
        if not seconds:
            finishing.join()
        threads.append(finishing)

    def finish():
        m.finish()
        seen.append("finished")

    threads = []
    m = cseq.MTSequence(lambda: Slow(act, seen), 100, batch_size=10, out_type="null")
    with pytest.raises(InterruptedError, match="interrupted"):
        list(m.start_test())
    threads[0].join()
    assert seen == (["made", "closed", "finished"] if seconds else ["finished", "made", "closed"])
    m.finish()


def test_a_look_waits_for_no_thread_that_waits_for_this_one():
    """A batch may look while another thread's `iter` waits for that batch's end."""
    looks = []

    def act():
        if not looks:
            iterating.append(in_another_thread(lambda: looks.append(len(list(m)))))
            await_generation(1)
            looks.extend([m.stats().batches, m.state_dict()["consumed"], repr(m), m.skipped])

    iterating = []
    m = cseq.MTSequence(lambda: Slow(act, []), 100, batch_size=10, out_type="null")
    with pytest.raises(InterruptedError):
        list(m.start_test())
    iterating[0].join()
    assert looks[:2] == [0, 0]
    assert looks[-1] == 10
    m.finish()


@pytest.mark.parametrize("what", ["manager", "streams"])
@pytest.mark.parametrize("method", start_methods())
def test_a_garbage_collection_waits_for_no_worker(run_script, method, what):
    """It returns at once even if a worker hangs; soon afterwards, all processes are gone."""
    done = run_script(DROPPED, method, what)
    assert done.stdout == "True\nTrue\n", done.stderr


@pytest.mark.parametrize("what", ["manager", "streams"])
def test_the_interpreters_end_waits_for_all(run_script, what):
    """All that runs or is closing ends with the program: busy workers, too, soon."""
    done = run_script(AT_EXIT, start_methods()[0], what)
    assert done.stdout == "True\n", done.stderr
    assert done.returncode == 0
    # The program did not wait for the grace period, whose end logs a warning.
    assert done.stderr == ""


def test_what_is_dropped_is_closed_on_a_thread_that_is_known():
    """`threading` knows the thread while it closes, and adds no dummy thread that stays."""
    before = set(threading.enumerate())
    names = []
    runs.close_elsewhere(lambda: names.append(threading.current_thread().name), os.getpid())
    runs.await_closings(60)
    assert names == ["cseq-close"]
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"cseq-close"}


@pytest.mark.parametrize("starts", ["_thread.start_new_thread", "threading.Thread.start"])
def test_no_more_threads(starts, monkeypatch):
    """If the system has no more threads, a dropped run is still closed, and once."""
    closed = []
    monkeypatch.setattr(starts, NO_THREAD)
    runs.close_elsewhere(lambda: closed.append(1), os.getpid())
    runs.await_closings(60)
    assert closed == [1]


def test_what_is_closed_is_kept_by_nothing(monkeypatch):
    """The thread that started another one drops it, too, even while it is still busy."""
    first = []
    monkeypatch.setattr("_thread.start_new_thread", lambda begin, _args: first.append(begin))
    monkeypatch.setattr("threading.Thread.start", lambda thread: thread.run())
    closing = Slow(None, [])
    kept = weakref.ref(closing)
    runs.close_elsewhere(closing.close, os.getpid())
    del closing
    assert kept() is not None
    first[0]()
    assert kept() is None
    runs.await_closings(60)


def test_what_looks_at_its_end_may_raise(monkeypatch):
    """The run is still closed."""
    monkeypatch.setattr(runs, "on_close", [refusing(ZeroDivisionError)])
    manager = cseq.MTSequence(np.arange(8), 8, 1, out_type="null").start()
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        manager.finish()
    assert not runs.present()
    assert threading.active_count() < threads


BUSY = """
import sys, threading, time
import cseq, cseq.runs, cseq.engine.crews.threads
cseq.engine.crews.threads.HURRY = 0.01
cseq.runs.EXIT_SECONDS = float(sys.argv[1])
begun, ends = threading.Event(), sys.argv[2] == "ends"
class Indexer:
    def __getitem__(self, indices):
        begun.set()
        time.sleep(0.3 if ends else 1000)
        open("made", "w").close()
        return indices
manager = cseq.MTSequence(Indexer, 10, 1, out_type="null").start()
batches = iter(manager)
begun.wait()
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there, no thread is unwound at the end")
@pytest.mark.parametrize(("seconds", "ends"), [(60.0, True), (0.01, False)])
def test_the_end_of_the_program_waits_for_threads_in_a_batch(run_script, tmp_path, seconds, ends):
    """Otherwise Python would unwind their stacks, which aborts C++; a hanging one is named."""
    done = run_script(BUSY, str(seconds), "ends" if ends else "hangs")
    assert (done.stdout, done.returncode) == ("", 0)
    assert (tmp_path / "made").exists() == ends
    said = "" if ends else f"threads ['cseq-w0'] are still busy {seconds:g} s after the program"
    assert done.stderr.startswith(said)
    assert bool(done.stderr) != ends
