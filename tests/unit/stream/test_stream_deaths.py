"""Workers of streams die and hang: each item comes once, in its order, or one error."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from counting import METHODS, Numbers, in_process, plain, streams
from killing import CODE, WORDS, await_death, kill
from kinds import QUICKEST

import cseq
import cseq.processes.deaths
from cseq.processes.launcher.base import KILLED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunScript
SPAWNED = QUICKEST.start_method == "spawn"  # to replace a worker then takes a second or two


# -- workers die


class Fatal(Numbers):
    """Dies where it is told, as often as it is told, counted by files."""

    def __init__(self, folder: str, where: Any, times: int, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.folder, self.where, self.times = Path(folder), where, times
        self.reach("init")

    def reach(self, place: Any) -> None:
        """Die here, perhaps."""
        if place == self.where and self.number == 0:
            marks = len(list(self.folder.iterdir()))
            if marks < self.times:
                (self.folder / str(marks)).touch()
                kill(os.getpid())

    def begin(self, length: int) -> Any:
        self.reach("begin")
        return super().begin(length)

    def items(self, start: int) -> Iterator[Any]:
        self.reach("items")
        yield from super().items(start)
        self.reach("end")

    def item(self, k: int) -> Any:
        self.reach(k)
        return super().item(k)

    def call(self) -> int:
        self.reach("call")
        return self.length


def fatal(folder: Path, where: Any, times: int = 1) -> Any:
    """Make a producer that dies."""
    return partial(Fatal, str(folder), where, times)


@pytest.mark.parametrize("where", ["init", "begin", "items", 0, 1, 17, 39, "end"])
@pytest.mark.parametrize("prefetch", [1, 10, 100])
def test_a_dead_worker_is_replaced(tmp_path: Path, where: Any, prefetch: int) -> None:
    """Wherever it is killed: another one takes its place, and no item shows it."""
    with streams(fatal(tmp_path, where, 2), prefetch=prefetch) as s:
        s.begin([40, 40])
        assert plain(s) == in_process([40, 40])
        assert s.stats().restarts == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_dead_worker_is_replaced_by_every_start_method(tmp_path: Path, method: str) -> None:
    """However the replacement is started, it goes on where the dead one was."""
    with streams(fatal(tmp_path, 11), start_method=method) as s:
        s.begin([40, 40])
        assert plain(s) == in_process([40, 40])


def test_a_worker_that_dies_in_a_call(tmp_path: Path) -> None:
    """The call runs again in its replacement, which has begun the epoch before."""
    with streams(fatal(tmp_path, "call")) as s:
        s.begin([30, 20])
        assert s.next(0)[1] == 0
        assert s.ask("call") == [30, 20]
        assert [item[:2] for item in s if item[0] == 0] == [(0, k) for k in range(1, 30)]


def test_workers_killed_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at random, one or all, again and again: the items are those of no deaths at all."""
    monkeypatch.setattr(
        cseq.processes.deaths, "TRIES", 10**9
    )  # chance may well strike one ticket three times
    rng = random.Random(5)
    with streams(num_workers=3, max_restarts=10_000, prefetch=6) as s:
        for epoch in range(1 if SPAWNED else 3):
            lengths = [rng.randrange(60 if SPAWNED else 200) for _ in range(3)]
            s.begin(lengths)
            got = []
            for item in s:
                got.append(item)
                if rng.random() < 0.04:
                    for pid in rng.sample(s.pids(), rng.randrange(1, 4)):
                        if pid:
                            kill(pid)
            assert plain(got) == in_process(lengths), epoch
        assert s.stats().restarts > 3


FAULTY = """
import os, sys, time
import numpy as np
from cseq import _memory
from cseq.stream import Streams

class Producer:
    seconds = 0
    def __init__(self, number, num_workers): self.number = number
    def begin(self, length): self.length = length
    def items(self, start):
        for k in range(start, self.length):
            time.sleep(self.seconds)
            yield self.number, k, np.full((3, 5000)[k % 9 == 8], k)

assert _memory.DEBUG
for point in sys.argv[2:]:
    # It notifies only where the trainer sleeps, which it does for an item that takes so long.
    Producer.seconds = 0.002 if point == "notify" else 0
    # A ticket passes some points several times.
    os.environ["CSEQ_FAULT"] = f"{point}:{5 if point == 'notify' else 23}"
    s = Streams(Producer, 2, max_restarts=1000, prefetch=int(sys.argv[1]))
    del os.environ["CSEQ_FAULT"]
    whole = []
    for length in (160, 100):
        s.begin([length, 100])
        got = [(n, k, bool((a == k).all())) for n, k, a in s]
        order = [(n, k) for k in range(length) for n in (0, 1)[: 1 + (k < 100)]]
        whole.append(got == [(n, k, True) for n, k in order])
    print(point, *whole, s.stats().restarts > 0)
    s.close()
"""


@pytest.mark.parametrize("prefetch", ["1", "6"])
def test_death_at_every_labelled_point(
    run_script: RunScript, debug_build: Path, prefetch: str
) -> None:
    """A worker killed between any two steps of claim, encode, publish loses nothing."""
    points = ["claim", "encode", "publish", "published", "notify"]
    done = run_script(FAULTY, prefetch, *points, PYTHONPATH=str(debug_build))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{point} True True True" for point in points]


def test_processes_can_be_asked_after_their_end() -> None:
    """For the exit code, which a pid would not tell."""
    with streams() as s:
        s.begin([2, 2])
        processes = s.processes(wait=True)
        first, second = (processes[number] for number in (0, 1))
        assert [first.pid, second.pid] == s.pids()
        assert not first.gone
        first.kill()
        assert first.status(10.0) == KILLED
        assert len(list(s)) == 4
    assert s.pids() == [None, None]
    assert second.status(10.0) == 0
    assert first.gone
    assert second.gone


def test_idle_workers_may_die() -> None:
    """A worker that dies with nothing to do is replaced; what `begin` gave it is given again."""
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
def test_no_restarts_at_all(tmp_path: Path, wait: str) -> None:
    """With max_restarts=0 a death is WorkerDied, which names the worker, wherever one waits."""
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


def test_an_item_that_kills_again_and_again_is_named(tmp_path: Path) -> None:
    """What has ended three workers ends the streams; WorkerDied names the item."""
    with streams(fatal(tmp_path, 2, 1000), prefetch=1) as s:
        s.begin([5, 5])
        with pytest.raises(cseq.WorkerDied, match="item 2 of worker 0, epoch 0") as caught:
            list(s)
    assert (caught.value.worker, caught.value.epoch, caught.value.indices) == (0, 0, [2])


def test_the_items_made_before_an_unrepaired_death_come(tmp_path: Path) -> None:
    """What was finished before a death that is not repaired is delivered first."""
    with streams(fatal(tmp_path, 5), 1, max_restarts=0, prefetch=1) as s:
        s.begin([9])
        assert [s.next(0)[1] for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(cseq.WorkerDied):
            s.next(0)


# -- workers hang


class Hangs(Fatal):
    """Hangs instead of dying."""

    def reach(self, place: Any) -> None:
        """Hang here, perhaps."""
        if place == self.where and self.number == 0:
            marks = len(list(self.folder.iterdir()))
            if marks < self.times:
                (self.folder / str(marks)).touch()
                a_place_to_be_found()


def a_place_to_be_found() -> None:
    """Never come back."""
    while True:
        threading.Event().wait(1000)


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("where", [3, "begin", "call"])
def test_a_timeout_shows_where_the_worker_is(tmp_path: Path, where: Any) -> None:
    """WorkerTimeout has the stack of the worker that hangs, and says what it works on."""
    with streams(partial(Hangs, str(tmp_path), where, 1), timeout=0.3) as s:
        with pytest.raises(cseq.WorkerTimeout, match="a_place_to_be_found") as caught:
            s.begin([9, 9])
            s.ask("call")
            list(s)
        assert "worker 0" in str(caught.value)
        for pid in filter(None, s.pids()):  # else closing waits for the one that hangs
            kill(pid)


def test_a_hanging_worker_can_be_replaced(tmp_path: Path) -> None:
    """on_timeout='restart': it is killed, and its items are made again."""
    hangs = partial(Hangs, str(tmp_path), 7, 1)
    with streams(hangs, timeout=1.5, on_timeout="restart") as s:
        s.begin([20, 20])
        assert plain(s) == in_process([20, 20])
        assert s.stats().restarts == 1


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("on_timeout", ["raise", "restart"])
def test_a_worker_that_was_stopped(monkeypatch: pytest.MonkeyPatch, on_timeout: str) -> None:
    """One that does not even take its ticket up meets the timeout, too."""
    monkeypatch.setattr("cseq.processes.worker.STACK_SECONDS", 0.1)
    with streams(timeout=0.3, on_timeout=on_timeout) as s:
        s.begin([3, 3])
        assert len(list(s)) == 6
        stopped = s.pids()[1]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        if on_timeout == "raise":
            with pytest.raises(cseq.WorkerTimeout, match=r"worker 1 is here:\n.*stopped"):
                s.begin([3, 3])
            kill(stopped)
        else:
            s.begin([3, 3])
            assert plain(s) == in_process([3, 3])
            assert s.stats().restarts == 1


class Slower(Numbers):
    """Items that are quick at first, and then not so quick."""

    def item(self, k: int) -> Any:
        if k >= 200:
            time.sleep(0.3)
        return super().item(k)


def test_the_timeout_is_for_an_item() -> None:
    """However many of them wait."""
    with streams(Slower, 1, prefetch=12, timeout=1.0) as s:
        s.begin([206])
        assert len(list(s)) == 206


class Held(Numbers):
    """Items that wait for a file."""

    path = ""

    def item(self, k: int) -> Any:
        while not os.path.exists(self.path):
            time.sleep(0.01)
        return super().item(k)


def test_the_timeout_of_a_call_that_waits(tmp_path: Path) -> None:
    """An item may have been made for longer than that before it was waited for."""
    held = type("Held", (Held,), {"path": str(tmp_path / "gate")})
    with streams(held, 1, prefetch=1, timeout=1.0) as s:
        s.begin([2])
        begun = time.monotonic()
        for _ in range(2):  # the second waits as long again
            with pytest.raises(cseq.WorkerTimeout, match="item 0 of worker 0"):
                s.next(0)
            assert time.monotonic() - begun > 1.0
            begun = time.monotonic()
        Path(held.path).touch()
        assert len(list(s)) == 2
