"""Workers of streams that die and hang: each item comes once, in order, or there is one error."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from counting import Numbers, in_process, plain, streams
from killing import CODE, WORDS, await_death, kill

import cseq


class Fatal(Numbers):
    """Dies at a given place, a given number of times, which files count."""

    def __init__(self, folder, where, times, number, num_workers):
        super().__init__(number, num_workers)
        self.folder, self.where, self.times = Path(folder), where, times
        self.reach("init")

    def reach(self, place):
        if place == self.where and self.number == 0:
            marks = len(list(self.folder.iterdir()))
            if marks < self.times:
                (self.folder / str(marks)).touch()
                self.act()

    def act(self):
        kill(os.getpid())

    def begin(self, length):
        self.reach("begin")
        return super().begin(length)

    def items(self, start):
        self.reach("items")
        yield from super().items(start)
        self.reach("end")

    def item(self, k):
        self.reach(k)
        return super().item(k)

    def call(self):
        self.reach("call")
        return self.length


def fatal(folder, where, times=1):
    """Make a producer that dies."""
    return partial(Fatal, str(folder), where, times)


@pytest.mark.parametrize("where", ["init", "begin", "items", 0, 1, 17, 39, "end"])
@pytest.mark.parametrize("prefetch", [1, 10, 100])
def test_a_dead_worker_is_replaced(tmp_path, where, prefetch):
    """Wherever it is killed, another worker replaces it, and the items are unchanged."""
    with streams(fatal(tmp_path, where, 2), prefetch=prefetch) as s:
        s.begin([40, 40])
        assert plain(s) == in_process([40, 40])
        assert s.stats().restarts == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_worker_that_dies_in_a_call(tmp_path):
    """The call runs again in the replacement, which first begins the epoch."""
    with streams(fatal(tmp_path, "call")) as s:
        s.begin([30, 20])
        assert next(iter(s))[1] == 0
        assert s.ask("call") == [30, 20]
        assert [item[:2] for item in s if item[0] == 0] == [(0, k) for k in range(1, 30)]


def test_idle_workers_may_die():
    """An idle worker that dies is replaced, and gets the assignment of `begin` again."""
    with streams() as s:
        for pid in s.ask("pid"):
            kill(pid)
            await_death(pid)
        s.begin([3, 3])
        assert plain(s) == in_process([3, 3])
        for pid in s.ask("pid"):
            kill(pid)
            await_death(pid)
        assert s.ask("count") == [0, 0]
        assert list(s) == []


@pytest.mark.parametrize("wait", ["next", "begin", "ask"])
def test_no_restarts_at_all(tmp_path, wait):
    """With max_restarts=0, any wait raises WorkerDied with the worker's name."""
    where = {"next": 5, "begin": "begin", "ask": "call"}[wait]
    with streams(fatal(tmp_path, where), max_restarts=0) as s:
        with pytest.raises(cseq.WorkerDied, match=f"worker 0 {WORDS}") as caught:
            s.begin([9, 9])
            s.ask("call")
            list(s)
        assert (caught.value.worker, caught.value.exitcode) == (0, CODE)
        for again in (lambda: s.begin([1, 1]), lambda: s.ask("pid")):
            with pytest.raises(cseq.WorkerDied):
                again()


def test_an_item_that_kills_again_and_again_is_named(tmp_path):
    """After three workers, the streams end, and WorkerDied names the item."""
    with streams(fatal(tmp_path, 2, 1000), prefetch=1) as s:
        s.begin([5, 5])
        with pytest.raises(cseq.WorkerDied, match="item 2 of worker 0, epoch 0") as caught:
            list(s)
    assert (caught.value.worker, caught.value.epoch, caught.value.indices) == (0, 0, [2])


class Hangs(Fatal):
    def act(self):
        a_place_to_be_found()


def a_place_to_be_found():
    """Never return."""
    while True:
        threading.Event().wait(1000)


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("where", [3, "begin", "call"])
def test_a_timeout_shows_where_the_worker_is(tmp_path, where):
    """WorkerTimeout has the stack of the hanging worker, and names its item."""
    with streams(partial(Hangs, str(tmp_path), where, 1), timeout=0.3) as s:
        with pytest.raises(cseq.WorkerTimeout, match="a_place_to_be_found") as caught:
            s.begin([9, 9])
            s.ask("call")
            list(s)
        assert "worker 0" in str(caught.value)
        # Without this, closing would wait for the hanging worker.
        for pid in filter(None, s.pids()):
            kill(pid)


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("on_timeout", ["raise", "restart"])
def test_a_worker_that_was_stopped(monkeypatch, on_timeout):
    """A worker that does not even claim its ticket meets the timeout, too."""
    monkeypatch.setattr("cseq.processes.worker.STACK_SECONDS", 0.1)
    with streams(timeout=0.3, on_timeout=on_timeout) as s:
        s.begin([3, 3])
        assert len(list(s)) == 6
        stopped = s.pids()[1]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        if on_timeout == "raise":
            with pytest.raises(cseq.WorkerTimeout, match=r"stack of worker 1:\n.*stopped"):
                s.begin([3, 3])
            kill(stopped)
        else:
            s.begin([3, 3])
            assert plain(s) == in_process([3, 3])
            assert s.stats().restarts == 1


class Held(Numbers):
    path = ""

    def item(self, k):
        while not os.path.exists(self.path):
            time.sleep(0.01)
        return super().item(k)


def test_the_timeout_of_a_call_that_waits(tmp_path):
    """The time before the wait does not count."""
    held = type("Held", (Held,), {"path": str(tmp_path / "gate")})
    with streams(held, 1, prefetch=1, timeout=1.0) as s:
        s.begin([2])
        begun = time.monotonic()
        # The second call waits just as long.
        for _ in range(2):
            with pytest.raises(cseq.WorkerTimeout, match="item 0 of worker 0"):
                next(iter(s))
            assert time.monotonic() - begun > 1.0
            begun = time.monotonic()
        Path(held.path).touch()
        assert len(list(s)) == 2
