"""The supervisor: starts worker processes, replaces dead ones, and ends all."""

import atexit
import contextlib
import errno
import logging
import os
import re
import threading
import time

import numpy as np
import pytest
from checkout import import_path
from kinds import QUICKEST
from refusing import NO_THREAD, refusing
from ringing import Trainer
from waiting import until

from cseq._core import now_ns
from cseq._work import Runner
from cseq.errors import WorkerError, WorkerTimeout
from cseq.measure.lanes import Lanes
from cseq.memory import descriptors
from cseq.memory.arena import Arena
from cseq.processes import deaths as deaths_module
from cseq.processes import supervisor as supervisor_module
from cseq.processes.deaths import TRIES, Deaths, Held
from cseq.processes.launcher import make_launcher, start_methods
from cseq.processes.launcher.base import KILLED
from cseq.processes.supervisor import Supervisor
from cseq.processes.worker import FAILED, NO_STACK, NOTED, READY, enter, send_state
from cseq.stage import INDEXER


def obey(sock, local=None):
    """Act as a worker: follow the task, byte by byte, and stay until the ring is closed."""
    entered = enter(sock)
    runner = Runner(entered.ring, INDEXER, entered.setup.owner, last=True)
    for order in entered.setup.task:
        if order == ord("L"):
            entered.read_object(local)
        elif order == ord("N"):
            send_state(sock, NOTED, b"noted")
        elif order == ord("R"):
            send_state(sock, READY)
        elif order == ord("F"):
            send_state(sock, FAILED, b"why " * 50_000)
        elif order == ord("S"):
            threading.Event().wait()
        elif order == ord("C"):
            # It takes no ticket meanwhile.
            while not entered.ring.closed:
                time.sleep(0.001)
        elif order == ord("T"):
            runner.claim()
        elif order == ord("P"):
            time.sleep(0.3)
        elif order == ord("3"):
            os._exit(3)
        elif order == ord("E"):
            atexit.register(threading.Event().wait)
    # The ring's end ends this.
    while runner.claim() is not None:
        pass


class Counted(Deaths):
    """Records deaths; all dead workers are replaced."""

    def __init__(self, events):
        super().__init__(10, 1, "ticket", "look")
        self.events = events

    def count_death(self, worker, exitcode, held, **details):
        assert not held
        self.events.append(("died", worker + 1, exitcode, details["was_ready"]))


class Pool:
    """A supervisor, its workers' tasks in the order of their starts, and its events."""

    def __init__(self, *tasks, owners=1, method=QUICKEST.start_method, task=None):
        self.tasks = list(tasks)
        self.events = []
        self.launcher = make_launcher(method, entry=f"{__name__}:obey")
        self.shared = Arena(1 << 20, tickets=2)
        self.shared.add_rings(2, 1, owners, owners=owners)
        self.supervisor = Supervisor(
            self.launcher, self.shared, readers=owners, task=task or self.task,
            describe=lambda number, cell: Held(0, cell, [], f"{number}"),
            deaths=Counted(self.events), lanes=Lanes(owners, "process"),
        )  # fmt: skip

    def task(self, owner):
        self.events.append(("task", owner))
        return self.tasks.pop(0) if self.tasks else b""

    def start(self):
        self.supervisor.prepare(None)
        self.supervisor.launch()
        return self.supervisor

    def await_ready(self, owner):
        until(lambda: self.supervisor.is_ready(owner))

    def await_failure(self):
        until(lambda: self.supervisor.failure)

    def close(self):
        self.supervisor.close()
        self.shared.close()


@pytest.fixture
def pool():
    """Make pools that are closed after the test."""
    made = []

    def make(*tasks, **options):
        made.append(Pool(*tasks, **options))
        return made[-1]

    yield make
    # The test's arguments still refer to this list.
    while made:
        made.pop().close()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_of_logging_keeps_no_worker_from_being_replaced(pool, *, waits):
    """One raises, and one waits meanwhile; all messages come, in order."""
    release, got = threading.Event(), []

    def emit(record):
        if waits:
            release.wait()
        got.append(record.getMessage())
        if not waits:
            raise OSError("the log server does not answer")

    handler, log = logging.Handler(), logging.getLogger("cseq")
    handler.emit = emit
    log.addHandler(handler)
    try:
        one = pool(b"RN3", b"R")
        supervisor = one.start()
        # Dead workers are forked again only in `check`.
        until(lambda: supervisor.check() or len(one.events) == 3)
        one.await_ready(1)
        supervisor.check()
        if waits:
            assert got == []
            release.set()
        one.close()
        assert got == ["noted", "worker 0 exited with code 3 and is being replaced"]
    finally:
        log.removeHandler(handler)


def test_a_slow_start_is_a_line_and_the_next_ones_are_not(pool, monkeypatch, caplog):
    """The log has it again only if a start in this process takes twice as long."""
    monkeypatch.setattr(supervisor_module, "slowest", 0.0)
    for waited in (9.0, 15.0, 25.0, 40.0):
        one = pool(b"R")
        supervisor = one.start()
        one.await_ready(1)
        supervisor.check_start(now_ns() - int(waited * 1e9))
        one.close()
    first, second = caplog.messages
    assert re.fullmatch("nothing has arrived from the workers after 15 s: worker 0 .*", first)
    assert re.fullmatch("nothing has arrived from the workers after 40 s: worker 0 .*", second)


def test_one_that_cannot_get_ready(pool, monkeypatch):
    """The reason arrives in full, at any length, and its worker's death does not count."""
    read = []

    def unpack(packed, worker=0):
        read.append(len(packed))
        return WorkerError(f"worker {worker}")

    monkeypatch.setattr("cseq.processes.supervisor.failure.unpack", unpack)
    one = pool(b"F3")
    supervisor = one.start()
    one.await_failure()
    with pytest.raises(WorkerError, match="worker 0"):
        supervisor.check()
    assert read[0] == 200_000
    supervisor.close()
    assert one.events == [("task", 1)]


def test_a_supervisor_that_breaks(pool, monkeypatch):
    """An error in the supervisor's own thread is raised; `close` still ends everything."""

    def task(owner):
        if owner == 2:
            raise LookupError("clumsy")
        return b"S"

    two = pool(owners=2, task=task)
    launch, children = two.launcher.launch, []

    def note(*args, **options):
        children.append(launch(*args, **options))
        return children[-1]

    monkeypatch.setattr(two.launcher, "launch", note)
    supervisor = two.supervisor
    # `start` raises where it waits for forked workers.
    with contextlib.suppress(LookupError):
        two.start()
    two.await_failure()
    with pytest.raises(LookupError, match="clumsy"):
        supervisor.check()
    supervisor.close()
    assert [(child.gone, child.sock.fileno()) for child in children] == [(True, -1)] * 2


def test_close_asks_again(pool, monkeypatch):
    """If processes have survived, the next `close` may find that they have ended."""
    one = pool(b"R")
    supervisor = one.start()
    one.await_ready(1)
    # A thread asks first, then each call.
    close, ends = one.launcher.close, [False] * 3

    def linger(deadline):
        return close(deadline) and (ends.pop() if ends else True)

    monkeypatch.setattr(one.launcher, "close", linger)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="are still running"):
            supervisor.close()
    supervisor.close()


def test_a_hurried_close(pool, monkeypatch, caplog):
    """A worker in a batch, or not ready, is killed soon and silently; one that closes has time."""
    monkeypatch.setattr(supervisor_module, "HURRY", 0.05)
    monkeypatch.setattr(supervisor_module, "GRACE", 3600.0)
    three = pool(b"RTS", b"LNS", b"RCP", owners=3)
    (ring,) = three.shared.rings
    Trainer(ring, 1)
    supervisor = three.start()
    for owner in (1, 3):
        three.await_ready(owner)
    until(lambda: three.shared.held(1) and "noted" in caplog.text)
    caplog.clear()
    supervisor.close(hurried=True)
    assert [supervisor.processes[number].code for number in range(3)] == [KILLED, KILLED, 0]
    assert caplog.messages == []


def test_a_system_without_more_threads(monkeypatch):
    """The error says so, and the end has nothing to wait for."""
    monkeypatch.setattr(supervisor_module, "GRACE", 3600.0)
    one = Pool(b"R")
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", NO_THREAD)
        with pytest.raises(RuntimeError, match="new thread: the system cannot start more threads"):
            one.start()
    one.close()


def test_a_system_without_more_processes(pool, monkeypatch):
    """The error names the limits; the system's own has only its number."""
    one = pool(b"R")
    refuse = refusing(BlockingIOError, errno.EAGAIN, "try later")
    monkeypatch.setattr(one.launcher, "launch", refuse)
    # `start` raises where it waits for forked workers.
    with contextlib.suppress(BlockingIOError):
        one.start()
    one.await_failure()
    with pytest.raises(BlockingIOError, match="try later: the system cannot start more threads"):
        one.supervisor.check()


@pytest.mark.parametrize("method", start_methods())
def test_close_waits_for_what_is_made(method, monkeypatch, caplog):
    """A worker gets time while it makes something from the user's object."""
    monkeypatch.setattr(supervisor_module, "GRACE", 0.05)
    one = Pool(b"LNS", method=method)
    one.start()
    # Earlier messages have then come, too.
    until(lambda: "noted" in caplog.text)
    one.close()
    assert "worker 0 was still busy after" in caplog.text


def test_a_worker_that_does_not_come_to_its_end(pool, monkeypatch, caplog):
    """A worker that has left its last batch is not called busy."""
    monkeypatch.setattr(supervisor_module, "GRACE", 0.05)
    one = pool(b"ER")
    one.start()
    one.await_ready(1)
    one.close()
    assert caplog.messages == ["worker 0 was still exiting after 0.05 s and was killed"]


# An interpreter that imports this does not reach the import's end.
SLOW_START = """
import sys, time
if sys.orig_argv[-1].startswith("cseq-w"):
    open(sys.orig_argv[-1], "w").close()
    time.sleep(1000)
"""

UNUSED = """
import os, sys, time
import cseq
from users import Indexer
if __name__ == "__main__":
    manager = cseq.MPSequence(Indexer, 10, 2, out_type="null", start_method="spawn").start()
    while not (os.path.exists("cseq-w0") and os.path.exists("cseq-w1")):
        time.sleep(0.01)
    if sys.argv[1] == "finish":
        manager.finish()
    if sys.argv[1] == "drop":
        del manager
    print("over")
"""


@pytest.mark.parametrize("module", ["sitecustomize", "users"])
@pytest.mark.parametrize("what", ["finish", "drop", "end"])
def test_the_end_waits_for_no_import(run_script, tmp_path, what, module):
    """Workers in their own start, or in a user's import, are killed at once, without a warning."""
    source = "class Indexer:\n    def __getitem__(self, indices): return indices\n"
    (tmp_path / "users.py").write_text(source, encoding="ascii")
    with open(tmp_path / f"{module}.py", "a", encoding="ascii") as file:
        file.write(SLOW_START)
    path = os.pathsep.join([str(tmp_path), import_path()])
    done = run_script(UNUSED, what, PYTHONPATH=path)
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0)


def test_what_takes_too_long_while_its_worker_is_replaced(pool):
    """A missing worker has no stack."""
    supervisor = pool().supervisor
    with pytest.raises(WorkerTimeout) as caught:
        supervisor.check_time([(1, now_ns() - 10**10, "a ticket")], 1.0, restart=False)
    assert str(caught.value).endswith(NO_STACK)


@pytest.mark.parametrize(("count", "nbytes"), [(0, 0), (1, 1), (64, 16300), (3, 1 << 20)])
def test_the_objects_file_is_as_wide_as_it_needs(pool, monkeypatch, count, nbytes):
    """Slots may be too narrow for it: on Windows, wider slots mean fewer slots."""
    supervisor = pool(method="spawn").supervisor
    made = []
    monkeypatch.setattr(
        "cseq.processes.supervisor.sparse_file",
        lambda width: made.append(width) or descriptors.sparse_file(width),
    )
    supervisor.prepare([np.full(nbytes + k, k, np.uint8) for k in range(count)])
    # The write shows that the width was enough.
    [width] = made
    assert count * nbytes < width <= count * (nbytes + 512) + (1 << 17)


def test_no_room_for_the_object(pool, monkeypatch):
    """The write of the object detects it, not a worker that reads the object."""
    one = pool(method="spawn")
    monkeypatch.setattr("cseq.encoding._room.commit", refusing(MemoryError, "full"))
    with pytest.raises(MemoryError, match=r"copy of the indexer \(8\d\d\d bytes\): full"):
        one.supervisor.prepare(np.zeros(1000), name="indexer")
    assert one.events == []


FIRST = Held(1, 2, [4, 5], "epoch 1, batch 2, indices [4, 5]")


def test_the_budget_of_an_epoch():
    """One death more than `max_restarts` is too many; the next epoch has its own budget."""
    deaths = Deaths(2, 1, "batch", "look")
    for _ in range(2):
        deaths.begin_epoch()
        for k in (10, 11):
            held = Held(1, k, [k], f"batch {k}")
            assert deaths.count_death(0, -9, [held], was_ready=True) is None
    error = deaths.count_death(0, -9, [FIRST], was_ready=True)
    assert "max_restarts=2 allows no more" in str(error)
    assert (error.epoch, error.batch, error.indices) == (1, 2, [4, 5])
    assert (error.worker, error.exitcode, deaths.restarts) == (0, -9, 4)


def test_a_batch_that_fails():
    """Its workers are replaced within the budget; other failures still end the run."""
    deaths = Deaths(TRIES, 1, "batch", "look at it", fails=True)
    call = FIRST._replace(location="a call", is_batch=False)
    for held, fails in ((FIRST, True), (call, False)):
        deaths.begin_epoch()
        for _ in range(TRIES - 1):
            assert deaths.count_death(0, -11, [held], was_ready=True) is None
        assert deaths.count_death(0, -11, [held], was_ready=True) is not None
        assert deaths.has_failed == fails
    assert deaths.restarts == TRIES + TRIES - 1
    deaths.begin_epoch()
    deaths.count_death(0, -11, [], was_ready=True)
    for _ in range(TRIES):
        error = deaths.count_death(0, -11, [FIRST], was_ready=True)
    assert "max_restarts=3 allows no more" in str(error)
    assert not deaths.has_failed


def test_a_batch_that_takes_too_long_again_and_again():
    """The error says that the timeout has ended the worker, unlike a kill."""
    deaths = Deaths(0, 1, "batch", "look")
    error = deaths.count_death(3, -9, [FIRST], was_ready=True, is_overdue=True)
    assert str(error).startswith(
        f"worker 3 exceeded its timeout and was killed while making {FIRST.location}. "
    )


def test_workers_that_never_get_ready():
    """Several in a row mean that none can start; one that gets ready resets the count."""
    deaths = Deaths(100, 2, "batch", "look")
    in_a_row = [False] * (2 * TRIES - 1)
    for was_ready in (*in_a_row, True, *in_a_row):
        assert deaths.count_death(0, 1, [], was_ready=was_ready) is None
    error = deaths.count_death(0, 1, [], was_ready=False)
    assert "died before they were ready" in str(error)


@pytest.mark.parametrize(("exitcode", "named"), [(-9, True), (-11, False)])
def test_kills_for_lack_of_memory(monkeypatch, exitcode, named):
    """If the system counts them, a death by SIGKILL has their number."""
    counts = iter([3, 5])
    monkeypatch.setattr(deaths_module, "oom_kills", lambda: next(counts))
    error = Deaths(0, 1, "batch", "look").count_death(0, exitcode, [], was_ready=True)
    assert error is not None
    assert ("out-of-memory kills in its cgroup: 2" in str(error)) == named
    assert ("fewer workers or smaller batches" in str(error)) == named
