"""Signals at any time, and the trainer's end: nothing is lost, and nothing remains."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import held
import numpy as np
import pytest
from adverse import GUARD
from checkout import import_path
from conftest import SHM, is_my_file, shm_names
from indexers import Large, Raising
from interrupting import SHARES, first_hits, handled, in_shares, interrupted, places
from killing import await_death

import cseq
from cseq.engine.worker import ENTRY
from cseq.processes.launcher import make_launcher

pytestmark = pytest.mark.needs("fork")


START = [("MPSequence", "fork", 3), ("MPSequence", "forkserver", 17), ("MTSequence", None, 1)]


# An interrupted start may leave a new pair of sockets unclosed.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore:iterating a manager that was not started")
@in_shares
@pytest.mark.parametrize("verb", ["start", "finish", "__exit__"])
@pytest.mark.parametrize(("kind", "method", "step"), START)
def test_ctrl_c_anywhere_in_start_and_finish(verb, kind, method, step, share):
    """If a handler raises anywhere in one, nothing remains, and all work again."""
    options = {"start_method": method} if method else {}
    hits = 0
    for countdown in places(share, step):
        m = getattr(cseq, kind)(np.arange(8), 8, out_type="null", num_workers=2, **options)
        if verb != "start":
            m.start()
        leave = verb == "__exit__"
        arguments = (None, None, None) if leave and m.__enter__() else ()
        with interrupted(countdown, anywhere=True) as struck:
            getattr(m, verb)(*arguments)
        hits += struck.is_set()
        if struck.is_set() and countdown % 2:
            m.finish()
        elif not struck.is_set():
            break
        else:
            assert len(list(m)) == 1
    assert len(list(m.start())) == 1
    m.finish()
    assert hits * step * SHARES > 20


class Paced:
    """Makes the loop wait, since C code alone takes ready batches, between no two lines."""

    def __getitem__(self, indices):
        time.sleep(0.002)
        return indices


TAKING = (
    "engine/pool.py", "engine/tickets/batches.py", "encoding/transport.py", "memory/arena.py",
    "encoding/codec.py", "engine/crews/processes.py", "engine/crews/threads.py",
)  # fmt: skip


@in_shares
@pytest.mark.parametrize("kind", ["proc", "thread"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("ahead", [1, 4])
def test_ctrl_c_anywhere_in_the_taking_of_a_batch(kind, ordered, ahead, share):
    """Wherever a signal handler raises in it, no batch is lost or doubled."""
    # With four batches ahead, this is the end of an epoch, where no more tickets are posted.
    worker = Large if kind == "proc" else Paced
    m = cseq.MSequence(
        worker, 60, batch_size=10, shuffle=False, out_type="null", thread_type=kind, buffer=3,
        num_workers=1, ordered=ordered, **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    hits = 0
    with m.start():
        for countdown in range(1 + share, 80, SHARES):
            iterator = iter(m)
            got = [next(iterator)[0] for _ in range(ahead)]
            with interrupted(countdown, *TAKING) as struck:
                got.append(next(iterator)[0])
            hits += struck.is_set()
            assert len(got) == ahead + (not struck.is_set())
            if ordered:
                assert m.state_dict()["consumed"] // 10 == len(got)
            got += [batch[0] for batch in iterator]
            assert sorted(int(np.ravel(first)[0]) for first in got) == list(range(0, 60, 10))
        assert hits >= 1
        if kind == "proc":
            assert held.slots(m).total <= 16


def refused(verb, *arguments):
    """Try an invalid call in the middle of a call; return whether it was refused."""
    try:
        verb(*arguments)
    except RuntimeError as error:
        assert "in the middle of another call" in str(error)  # noqa: PT017
        return True
    return False


@in_shares
@pytest.mark.parametrize("verb", ["take", "finish"])
def test_a_signal_handler_in_the_taking_of_a_batch(verb, share):
    """It may inspect and finish, but not take or begin anything, even in the middle of a decode."""
    m = cseq.MPSequence(
        Large, 60, batch_size=10, shuffle=False, out_type="null", buffer=3, num_workers=1,
        start_method="fork",
    )  # fmt: skip

    def step(countdown):
        m.start()
        iterator = iter(m)
        got = [next(iterator)]

        def handler():
            state = m.state_dict()
            assert state["consumed"] in (10, 20)
            assert m.stats().batches in (1, 2)
            if verb == "finish":
                m.finish()
                return
            for call in (m.start, m.start_test, partial(next, iterator), partial(iter, m)):
                assert refused(call)
            assert refused(m.set_epoch, 5)
            assert refused(m.load_state_dict, state)

        ends = (InterruptedError,) if verb == "finish" else ()
        with handled(countdown, *TAKING, by=handler) as struck, contextlib.suppress(*ends):
            got.append(next(iterator))
        if verb == "take" or not struck.is_set():
            assert [int(batch[0, 0]) for batch in (*got, *iterator)] == list(range(0, 60, 10))
        m.finish()
        return struck.is_set()

    assert first_hits(step, share=share) > 5


MAKING = (
    "engine/crews/inline.py", "engine/pool.py", "engine/tickets/batches.py", "indexing/indexer.py",
    "encoding/failure.py",
)  # fmt: skip


@pytest.mark.parametrize("bad", [True, False])
def test_ctrl_c_anywhere_in_test_mode(bad):
    """Wherever a signal handler raises while a batch is made, none is lost, or skipped twice."""
    worker = Raising(KeyError, 10) if bad else np.arange(60)
    m = cseq.MTSequence(worker, 60, batch_size=10, shuffle=False, out_type="null", on_error="skip")
    with m.start_test():
        for countdown in range(1, 30):
            iterator = iter(m)
            got = [next(iterator)[0]]
            with interrupted(countdown, *MAKING):
                got.append(next(iterator)[0])
            skipped = len(m.skipped) - bad * (countdown - 1)
            assert m.state_dict()["consumed"] // 10 == len(got) + skipped
            got += [batch[0] for batch in iterator]
            assert got == [0, *range(20 if bad else 10, 60, 10)]
            assert len(m.skipped) == bad * countdown


BEGINNING = (
    "sequence.py", "engine/pool.py", "engine/tickets/batches.py", "order/place.py", "manager.py",
    "runs.py", "order/sampler.py", "engine/crews/inline.py",
)  # fmt: skip


class Epochs:
    """A manager, and the epochs of its iterators."""

    def __init__(self, kind):
        self.m = cseq.MTSequence(
            np.arange(60), 60, batch_size=10, seed=5, out_type="null", num_workers=1
        )
        self.start = self.m.start if kind == "thread" else self.m.start_test
        self.orders = [cseq.permutation(60, 5, epoch).reshape(6, 10).tolist() for epoch in range(9)]
        self.iterators: list[tuple[Any, list[list[int]], list[int]]] = []

    def begin(self, taken):
        self.iterators.append((iter(self.m), [], []))
        for _ in range(taken):
            self.take(-1)

    def take(self, at):
        """Take a batch; record the manager's epoch at the first one."""
        iterator, got, named = self.iterators[at]
        got.append(next(iterator).tolist())
        if len(got) == 1:
            named.append(self.m.epoch)

    def do(self, verb):
        """Do an operation that a loop or a signal handler may do."""
        if verb == "set_epoch":
            self.m.set_epoch(5)
        elif verb == "load":
            self.m.load_state_dict(self.m.state_dict() | {"epoch": 7, "consumed": 20})
        elif verb == "finish":
            self.m.finish()
        else:
            self.begin(1 if verb == "take" else 0)

    def drain(self, at):
        """Take the rest of an iterator's batches; return whether the iterator was valid."""
        _, got, named = self.iterators[at]
        try:
            while True:
                self.take(at)
        except InterruptedError:
            return False
        except StopIteration:
            [epoch] = named
            order = self.orders[epoch]
            assert got == (order[2:] if epoch == 7 else order)
            assert self.m.epoch in (epoch, 5)
            return True


# The handler has finished the manager before.
@pytest.mark.filterwarnings("ignore:iterating a manager")
@pytest.mark.parametrize("kind", ["thread", "test"])
@pytest.mark.parametrize("by", ["take", "iterate", "set_epoch", "load", "finish"])
@pytest.mark.parametrize("verb", ["iterate", "set_epoch", "load"])
@in_shares
def test_a_signal_handler_in_the_beginning_of_an_epoch(kind, verb, by, share):
    """It may finish; an iterator gives the whole epoch that the manager names, or is invalid."""
    epochs = Epochs(kind)
    # The call must first take its lock.
    refusals = []

    def step(countdown):
        epochs.start()
        epochs.m.set_epoch(0)
        epochs.iterators.clear()
        epochs.begin(6 if verb == "iterate" else 0)
        ends = (InterruptedError,) if by == "finish" else ()
        strike = handled(countdown, *BEGINNING, by=lambda: refusals.append(refused(epochs.do, by)))
        with strike as struck, contextlib.suppress(*ends):
            epochs.do(verb)
        if not struck.is_set():
            return False
        alive = [at for at in range(verb == "iterate", len(epochs.iterators)) if epochs.drain(at)]
        assert len(alive) <= 1
        if by == "finish":
            epochs.start()
        elif "load" not in (verb, by):
            assert alive
        assert len(list(epochs.m)) in (4, 6)
        return True

    assert first_hits(step, share=share) > 5
    assert any(refusals) == (by != "finish")
    epochs.m.finish()


def test_a_signal_handler_in_the_indexer_of_test_mode():
    """Like the indexer, it can take and begin nothing. The loop's generators are unchanged."""
    refusals = []

    class Acts:
        def __getitem__(self, indices):
            np.random.random()  # noqa: NPY002 - the global one
            refusals.extend([refused(next, iterator), refused(iter, m), refused(m.set_epoch, 5)])
            return indices

    m = cseq.MTSequence(Acts, 60, batch_size=10, shuffle=False, out_type="null")
    with m.start_test():
        iterator = iter(m)
        before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
        assert [int(batch[0]) for batch in iterator] == list(range(0, 60, 10))
        assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002
        assert refusals == [True] * 18


@pytest.mark.parametrize("kind", ["thread", "test"])
@pytest.mark.parametrize("by", ["finish", "start"])
def test_a_signal_handler_in_a_start(kind, by):
    """It may end the start, but not start the manager itself: nothing remains of the start."""
    epochs = Epochs(kind)

    def step(countdown):
        epochs.m.finish()
        before = threading.active_count()
        handler = partial(refused, epochs.start) if by == "start" else epochs.m.finish
        strike = handled(
            countdown, "sequence.py", "manager.py", "runs.py", "engine/crews/threads.py", by=handler
        )
        with strike as struck, contextlib.suppress(InterruptedError):
            epochs.start()
        if struck.is_set() and by == "start":
            assert len(list(epochs.m)) == 6
        elif struck.is_set():
            epochs.m.finish()
            assert kind == "test" or threading.active_count() == before
        return struck.is_set()

    assert first_hits(step) > 5
    epochs.m.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cseq-w")]


def in_a_group(folder, source, *args):
    """Start a script in its own process group, which it may signal."""
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        env=os.environ | {"PYTHONPATH": import_path()},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
import cseq

class Worker:
    def __getitem__(self, indices):
        if indices[0] > 40:
            threading.Event().wait(3600)
        return indices

m = cseq.MPSequence(Worker, 1000, batch_size=8, out_type="null", shuffle=False, num_workers=2)
m.start()
how = sys.argv[1]
for number, batch in enumerate(m):
    if number == 2:
        if how == "thread":  # the kernel may hand the signal to any thread
            other = threading.Thread(target=threading.Event().wait, args=(3600,), daemon=True)
            other.start()
            threading.Timer(0.3, signal.pthread_kill, (other.ident, signal.SIGINT)).start()
        else:
            threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
"""


@pytest.mark.parametrize("how", ["group", "thread"])
def test_ctrl_c_gives_one_traceback(tmp_path, how):
    """The waiting loop raises KeyboardInterrupt; busy workers are killed silently."""
    with in_a_group(tmp_path, INTERRUPTED, how) as trainer:
        _, errors = trainer.communicate(timeout=GUARD)
    assert errors.count("Traceback") == 1
    assert errors.endswith("\nKeyboardInterrupt\n")


PREEMPTED = """
import os, signal, sys, threading
import numpy as np
import cseq

stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
m = cseq.MPSequence(np.arange(10**6), batch_size=8, out_type="null", num_workers=2)
with m.start():
    iterator = iter(m)
    next(iterator)
    os.killpg(0, signal.SIGTERM)
    while not stop:
        next(iterator)
    for _ in range(100):  # while the trainer writes its checkpoint, workers go on
        next(iterator)
    print("checkpoint", m.stats().restarts)
"""


def test_sigterm_leaves_the_workers_to_the_trainer(tmp_path):
    """A signal to the process group ends no worker: the trainer finishes its work."""
    with in_a_group(tmp_path, PREEMPTED) as trainer:
        printed = trainer.communicate(timeout=GUARD)
    assert (trainer.returncode, printed) == (0, ("checkpoint 0\n", ""))


ORPHANED = """
import ctypes, os, sys, threading
import cseq

class Worker:
    def __getitem__(self, indices):
        if sys.argv[1] == "gil" and indices[0] > 100:
            ctypes.PyDLL(None).sleep(3600)  # holds the GIL
        return indices * 0 + os.getpid()

m = cseq.MPSequence(Worker, 10**6, batch_size=8, out_type="null", num_workers=3, shuffle=False)
m.start()
pids = set()
for batch in m:
    pids.add(int(batch[0]))
    if len(pids) >= 2 or batch[0] > 0 and len(pids) and sys.argv[1] == "gil":
        break
children = os.popen("pgrep -g 0").read().split()
print(*{*map(int, children)} - {os.getpid()}, flush=True)
threading.Event().wait(3600)
"""


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep finds the workers")
@pytest.mark.parametrize("state", ["idle", "gil"])
def test_workers_go_with_a_killed_trainer(tmp_path, state):
    """SIGKILL of the trainer leaves no process, no name in /dev/shm and no message."""
    names = shm_names()
    with in_a_group(tmp_path, ORPHANED, state) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) >= 3
        trainer.kill()
        for pid in pids:
            await_death(pid)
        _, errors = trainer.communicate(timeout=GUARD)
    assert errors == ""
    assert not [name for name in shm_names() - names if is_my_file(SHM / name)]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_start_go_silently(capfd, method):
    """Workers end silently even if the trainer has not yet told them what they are."""
    launcher = make_launcher(method, entry=ENTRY)
    child = launcher.launch(0)
    child.sock.close()
    assert child.status(GUARD) == 1
    assert launcher.close(time.monotonic() + GUARD)
    assert capfd.readouterr() == ("", "")
