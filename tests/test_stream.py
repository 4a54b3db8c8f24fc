"""Streams: each worker's items in its own order, whatever happens to workers, loop and trainer."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import select
import signal
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import first_hits, interrupted
from streaming import lost_slots

import cseq
import cseq.deaths
from cseq import testing
from cseq._slots import Lease, Slots
from cseq._stream import Request
from cseq.stream import EncodedItem, Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from conftest import RunScript

pytestmark = pytest.mark.needs("fork")

METHODS = ["fork", "forkserver", "spawn"]


class Numbers:
    """Its assignment is how many items there are: its number, the item's, and some data."""

    def __init__(self, number: int, num_workers: int) -> None:
        self.number = number
        self.num_workers = num_workers
        self.epochs = 0
        self.made = 0

    def begin(self, length: int) -> tuple[str, int, int]:
        self.length = length
        self.epochs += 1
        self.made = 0
        return "begun", self.number, length

    def item(self, k: int) -> Any:
        return self.number, k, np.full(3, 10 * k + self.number)

    def items(self, start: int) -> Iterator[Any]:
        for k in range(start, self.length):
            item = self.item(k)
            self.made += 1
            yield item

    def add(self, a: int, b: int) -> tuple[int, int]:
        return self.number, a + b

    def count(self) -> int:
        return self.made

    def pid(self) -> int:
        return os.getpid()


def streams(
    producer: Callable[[int, int], Any] = Numbers, num_workers: int = 2, **options: Any
) -> Streams:
    """Make streams of forked workers, which are started quickest."""
    return Streams(producer, num_workers, **({"start_method": "fork"} | options))


def plain(items: Any) -> list[Any]:
    """Make items comparable, to the bit."""
    return [
        tuple(np.asarray(x).tobytes() if hasattr(x, "dtype") else x for x in item) for item in items
    ]


def in_process(lengths: Sequence[int], producer: type[Numbers] = Numbers) -> list[Any]:
    """What goes round when the producers run here, one after the other."""
    made = [producer(number, len(lengths)) for number in range(len(lengths))]
    for one, length in zip(made, lengths, strict=True):
        one.begin(length)
    rounds = itertools.zip_longest(*(list(one.items(0)) for one in made))
    return plain(item for turn in rounds for item in turn if item is not None)


def await_death(pid: int) -> None:
    """Wait until a process, which its supervisor reaps, is gone."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], 60)[0], f"process {pid} still runs"
        finally:
            os.close(descriptor)


# -- order

UNEVEN: list[tuple[int, ...]] = [(4, 4), (3, 5), (5, 3), (0, 3), (3, 0), (0, 0), (1,), (0,)]
UNEVEN += [(2, 4, 4), (5, 1, 3), (9, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize("prefetch", [1, 2, 10, 100])
def test_uneven_streams_go_round(prefetch: int) -> None:
    """One item of each worker in turn, in its own order, leaving out those that have no more."""
    for count in (1, 2, 3):
        with streams(num_workers=count, prefetch=prefetch) as s:
            for lengths in (lengths for lengths in UNEVEN if len(lengths) == count):
                s.begin(lengths)
                assert plain(s) == in_process(lengths)
                assert list(s) == []


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method(method: str) -> None:
    """However the workers are started: same items, epoch after epoch."""
    with streams(start_method=method) as s:
        for lengths in ((7, 5), (0, 1), (30, 31)):
            s.begin(lengths)
            assert plain(s) == in_process(lengths)


def test_any_stream_can_be_read_alone() -> None:
    """`next` gives a worker's items in its order, however the streams are mixed."""
    with streams(num_workers=3, prefetch=4) as s:
        s.begin([50, 50, 50])
        mixed = random.Random(3).choices(range(3), k=120)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for worker in mixed:
            number, k, _ = s.next(worker)
            assert number == worker
            got[worker].append(k)
        assert all(ks == list(range(mixed.count(worker))) for worker, ks in got.items())
        rest = [item[1] for item in iter(lambda: next_or_none(s, 1), None)]
        assert rest == list(range(mixed.count(1), 50))


def next_or_none(s: Streams, worker: int) -> Any:
    """Return the next item of a worker, or None."""
    try:
        return s.next(worker)
    except StopIteration:
        return None


def test_the_end_stays_the_end() -> None:
    """A stream that is over raises StopIteration as often as it is asked."""
    with streams() as s:
        s.begin([1, 0])
        assert s.next(0)[:2] == (0, 0)
        for worker in (0, 1, 0, 1):
            with pytest.raises(StopIteration):
                s.next(worker)


def test_begin_replies_in_the_order_of_the_workers() -> None:
    """What `begin` of the producers returned comes back, worker by worker."""
    with streams(num_workers=3) as s:
        assert s.begin([5, 0, 7]) == [("begun", 0, 5), ("begun", 1, 0), ("begun", 2, 7)]


def test_begin_in_the_middle() -> None:
    """Nothing of an epoch that was left comes out of the next one."""
    with streams(prefetch=7) as s:
        for taken in (0, 1, 2, 5, 20, 40):
            s.begin([15 + taken, 25])
            for _ in itertools.islice(s, taken):
                pass
        s.begin([6, 8])
        assert plain(s) == in_process([6, 8])


def test_a_second_iterator_goes_on() -> None:
    """The round is the streams': another iterator goes on where the first one stopped."""
    with streams() as s:
        s.begin([4, 4])
        first = list(itertools.islice(s, 3))
        assert plain([*first, *s]) == in_process([4, 4])


def test_an_iterator_ends_with_its_epoch() -> None:
    """After another `begin`, an older iterator raises InterruptedError."""
    with streams() as s:
        s.begin([4, 4])
        old = iter(s)
        next(old)
        s.begin([4, 4])
        with pytest.raises(InterruptedError):
            next(old)
        assert plain(s) == in_process([4, 4])


def test_before_the_first_epoch() -> None:
    """Without an epoch, `next` and `iter` raise InterruptedError, and `ask` works."""
    with streams() as s:
        assert s.ask("add", 1, 2) == [(0, 3), (1, 3)]
        with pytest.raises(InterruptedError):
            s.next(0)
        with pytest.raises(InterruptedError):
            iter(s)


# -- assignments and calls


class Echo(Numbers):
    """Tells what it got."""

    def begin(self, assignment: Any) -> Any:
        self.assignment = assignment
        return assignment

    def items(self, start: int) -> Iterator[Any]:
        for k in range(start, 3):
            yield self.number, k, self.assignment

    def back(self, *args: Any) -> Any:
        return args


def test_assignments_of_any_size() -> None:
    """An assignment may be anything that can be pickled, also megabytes of it."""
    large = {"seqs": np.arange(700_000), "tags": [f"seq-{k}" for k in range(20_000)], "none": None}
    with streams(Echo) as s:
        for _ in range(3):
            replies = s.begin([large, 1])
            assert np.array_equal(replies[0]["seqs"], large["seqs"])
            assert replies[0]["tags"] == large["tags"]
            assert replies[1] == 1
            assert s.next(1) == (1, 0, 1)
            assert np.array_equal(s.next(0)[2]["seqs"], large["seqs"])


def test_a_producer_may_keep_its_assignment() -> None:
    """What a producer keeps of an assignment is its own, epochs later too."""
    with streams(Keeps) as s:
        for epoch in range(20):
            s.begin([np.full(5000 + 100 * epoch, epoch)] * 2)
        assert s.ask("sums") == [[epoch * (5000 + 100 * epoch) for epoch in range(20)]] * 2


class Keeps(Echo):
    """Keeps all assignments."""

    def __init__(self, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.kept: list[Any] = []

    def begin(self, assignment: Any) -> None:
        super().begin(assignment)
        self.kept.append(assignment)

    def sums(self) -> list[int]:
        return [int(a.sum()) for a in self.kept]


def test_calls_between_items() -> None:
    """`ask` calls a method with its arguments, in one worker or all, and leaves the items alone."""
    with streams(prefetch=3) as s:
        s.begin([20, 20])
        got = []
        for k, item in enumerate(s):
            got.append(item)
            if k % 3 == 0:
                assert s.ask("add", k, 1) == [(0, k + 1), (1, k + 1)]
                assert s.ask("add", k, 2, worker=1) == (1, k + 2)
        assert plain(got) == in_process([20, 20])
        assert s.ask("add", 0, 0) == [(0, 0), (1, 0)]


def test_a_call_behind_all_items() -> None:
    """A call that overtakes nothing is answered when all items that were asked for are made."""
    with streams(prefetch=5) as s:
        s.begin([20, 3])
        assert s.ask("count", behind=True) == [5, 3]
        assert s.ask("count", worker=0) == 5
        s.next(0)
        assert 5 <= s.ask("count", worker=0, behind=True) <= 6
        assert len(list(s)) == 22


def test_a_call_carries_anything() -> None:
    """Arguments and replies of a call may be large arrays, and functions made on the spot."""
    pytest.importorskip("cloudpickle")
    array = np.arange(300_000)
    with streams(Echo) as s:
        (reply,) = s.ask("back", array, worker=0)
        assert np.array_equal(reply, array)
        assert reply is not array
        assert s.ask("back", lambda x: x + 1, worker=1)[0](4) == 5


def test_a_call_overtakes_what_was_only_asked_for(tmp_path: Path) -> None:
    """A call is answered between two items, not behind all that were asked for ahead."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with (
        open(gate, "r+b", buffering=0) as writer,
        streams(partial(Gated, str(gate)), 1, prefetch=6) as s,
    ):
        s.begin([6])
        writer.write(b"1")  # the first item can be made, and the second one not
        assert s.next(0)[1] == 0
        while not os.path.exists(f"{gate}.1"):  # until the second item is in work
            pass
        waiting = s.stats().depths[0]
        assert waiting > 0
        answer: list[int] = []
        asking = threading.Thread(target=lambda: answer.append(s.ask("count", worker=0)))
        asking.start()
        while s.stats().depths[0] == waiting:  # until the call waits, too
            pass
        writer.write(b"2")
        asking.join(60)
        assert answer == [2]
        writer.write(b"3456")
        assert [s.next(0)[1] for _ in range(5)] == [1, 2, 3, 4, 5]


class Gated(Numbers):
    """Makes an item for every byte that comes through a pipe; item k in work leaves a file `.k`."""

    def __init__(self, gate: str, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.name = gate
        self.gate = os.open(gate, os.O_RDONLY)

    def item(self, k: int) -> Any:
        Path(f"{self.name}.{k}").touch()
        os.read(self.gate, 1)
        return super().item(k)


# -- exceptions


class Unbuildable(Numbers):
    """Worker 1 cannot be made."""

    def __init__(self, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        if number == 1:
            raise FileNotFoundError(2, "no such data set", "/data/set")


class Broken(Numbers):
    """Raises what it is told, where it is told."""

    def begin(self, assignment: Any) -> Any:
        self.where, length = assignment
        if self.where == "begin":
            raise self.error()
        return super().begin(length)

    def item(self, k: int) -> Any:
        if self.where == k:
            raise self.error()
        return super().item(k)

    def fail(self) -> None:
        raise self.error()

    def error(self) -> Exception:
        return TwoArguments(self.number, "broken")


class TwoArguments(Exception):
    """Cannot be made from its `args` alone."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first}: {second}")
        self.first, self.second = first, second


def check_error(caught: pytest.ExceptionInfo[Any], worker: int, function: str) -> None:
    """An error is itself, shows where in the worker it was raised, and whose it is."""
    cause: Any = caught.value.__cause__
    assert isinstance(cause, cseq.RemoteTraceback)
    assert function in str(cause)
    assert cause.worker == worker


def test_a_producer_that_cannot_be_made() -> None:
    """What its construction raised comes out of whatever call waits for it, and is final."""
    for wait in ("begin", "ask"):
        with streams(Unbuildable) as s:
            for _ in range(2):
                with pytest.raises(FileNotFoundError, match="no such data set") as caught:
                    s.begin([3, 3]) if wait == "begin" else s.ask("pid")
                assert caught.value.filename == "/data/set"
                check_error(caught, 1, "__init__")


def test_an_exception_in_begin() -> None:
    """It comes out of `begin`; that epoch is none, and the next one is as usual."""
    with streams(Broken) as s:
        with pytest.raises(TwoArguments, match="1: broken") as caught:
            s.begin([(-1, 5), ("begin", 5)])
        assert (caught.value.first, caught.value.second) == (1, "broken")
        check_error(caught, 1, "in begin")
        with pytest.raises(InterruptedError):
            s.next(0)
        s.begin([(-1, 5), (-1, 5)])
        assert plain(s) == in_process([5, 5])


@pytest.mark.parametrize("where", [0, 1, 7, 30])
@pytest.mark.parametrize("prefetch", [1, 10, 100])
def test_an_exception_among_the_items(where: int, prefetch: int) -> None:
    """The items before it come, then it comes, once; that stream is over, the other one goes on."""
    with streams(Broken, prefetch=prefetch) as s:
        for _ in range(2):
            s.begin([(where, 40), (-1, 40)])
            assert [s.next(0)[1] for _ in range(where)] == list(range(where))
            with pytest.raises(TwoArguments, match="0: broken") as caught:
                s.next(0)
            check_error(caught, 0, "in item")
            with pytest.raises(StopIteration):
                s.next(0)
            assert [item[:2] for item in s] == [(1, k) for k in range(40)]
        s.begin([(-1, 40), (-1, 40)])
        assert plain(s) == in_process([40, 40])


def test_an_exception_in_a_call() -> None:
    """It comes out of `ask`; that worker's stream is over, the other one's is not."""
    with streams(Broken) as s:
        s.begin([(-1, 9), (-1, 9)])
        assert s.next(1)[1] == 0
        with pytest.raises(TwoArguments, match="1: broken") as caught:
            s.ask("fail", worker=1)
        check_error(caught, 1, "in fail")
        assert [item[1] for item in s if item[0] == 0] == list(range(9))
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            s.ask("nothing_of_the_kind")
        s.begin([(-1, 4), (-1, 4)])
        assert plain(s) == in_process([4, 4])


class Unsendable(Numbers):
    """One of its items cannot be pickled."""

    def item(self, k: int) -> Any:
        return {"lock": threading.Lock()} if k == 7 else super().item(k)


class Stopping(Numbers):
    """Raises StopIteration in a call."""

    def stop(self) -> None:
        raise StopIteration


def test_an_item_that_cannot_be_sent() -> None:
    """It is an exception that says what it is; the items before it come."""
    with streams(Unsendable, 1, prefetch=30) as s:
        s.begin([20])
        assert [s.next(0)[1] for _ in range(7)] == list(range(7))
        with pytest.raises(TypeError, match="lock"):
            s.next(0)


@pytest.mark.parametrize("prefetch", [1, 30])
def test_peek_and_commit(prefetch: int) -> None:
    """The round's next item is shown until it is committed, with its number, which counts on."""
    with streams(prefetch=prefetch) as s:
        for _ in range(2):
            s.begin([3, 5])
            got = []
            with contextlib.suppress(StopIteration):
                while True:
                    number, item = s.peek()
                    assert number == len(got)
                    assert s.peek()[1] is item
                    s.commit(number)
                    s.commit(number)  # it was done, so nothing happens
                    got.append(item)
                    if len(got) == 4:
                        got.append(next(iter(s)))
            assert plain(got) == in_process([3, 5])
        with pytest.raises(RuntimeError, match="item 8 was not peeked at"):
            s.commit(8)
        s.interrupt()
        with pytest.raises(InterruptedError):
            s.peek()
        with pytest.raises(InterruptedError):
            s.commit(0)


@pytest.mark.parametrize("prefetch", [1, 30])
def test_peek_tells_a_failure_from_an_end(prefetch: int) -> None:
    """Behind an exception, also one in a call, a stream does not just end."""
    with streams(Broken, prefetch=prefetch) as s:
        for _ in range(2):
            s.begin([(2, 9), (-1, 3)])
            for number, order in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
                assert s.peek()[1][:2] == order
                s.commit(number)
            with pytest.raises(TwoArguments):
                s.peek()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"stream of worker 0.*TwoArguments: 0: bro"):
                    s.peek()
            assert next_or_none(s, 0) is None
            assert next_or_none(s, 1)[:2] == (1, 2)
        s.begin([(-1, 0), (-1, 3)])
        with pytest.raises(AttributeError):
            s.ask("nothing", worker=1)
        with pytest.raises(RuntimeError, match=r"stream of worker 1.*AttributeError"):
            for _ in range(4):
                s.commit(s.peek()[0])


def test_stop_iteration_in_a_call_is_an_error() -> None:
    """A call that raises StopIteration does not look like the end of something."""
    with streams(Stopping) as s, pytest.raises(RuntimeError, match="StopIteration"):
        s.ask("stop")


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
                os.kill(os.getpid(), signal.SIGKILL)

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
        cseq.deaths, "TRIES", 10**9
    )  # chance may well strike one ticket three times
    rng = random.Random(5)
    with streams(num_workers=3, max_restarts=10_000, prefetch=6) as s:
        for epoch in range(6):
            lengths = [rng.randrange(200) for _ in range(3)]
            s.begin(lengths)
            got = []
            for item in s:
                got.append(item)
                if rng.random() < 0.04:
                    for pid in rng.sample(s.pids(), rng.randrange(1, 4)):
                        with contextlib.suppress(ProcessLookupError):
                            if pid:
                                os.kill(pid, signal.SIGKILL)
            assert plain(got) == in_process(lengths), epoch
        assert s.stats().restarts > 3


FAULTY = """
import sys, time
import numpy as np
from cseq import _memory, testing
from cseq.stream import EncodedItem, Streams

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
    with testing.dying(point, 5 if point == "notify" else 23):
        s = Streams(Producer, 2, max_restarts=1000, prefetch=int(sys.argv[1]))
    whole = []
    for length in (300, 200):
        s.begin([length, 200])
        got = [(n, k, bool((a == k).all())) for n, k, a in s]
        order = [(n, k) for k in range(length) for n in (0, 1)[: 1 + (k < 200)]]
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
        children = s.children()
        assert [child.pid for child in children if child is not None] == s.pids()
        first, second = children
        assert first is not None
        assert second is not None
        assert not first.gone
        first.kill()
        assert first.status(10.0) == -signal.SIGKILL
        assert len(list(s)) == 4
    assert s.children() == [None, None]
    assert second.status(10.0) == 0
    assert first.gone
    assert second.gone


def test_idle_workers_may_die() -> None:
    """A worker that dies with nothing to do is replaced; what `begin` gave it is given again."""
    with streams() as s:
        for pid in s.ask("pid"):
            os.kill(pid, signal.SIGKILL)
            await_death(pid)
        s.begin([3, 3])
        assert plain(s) == in_process([3, 3])
        for pid in s.ask("pid"):
            os.kill(pid, signal.SIGKILL)
            await_death(pid)
        assert s.ask("count") == [0, 0]
        assert list(s) == []


@pytest.mark.parametrize("wait", ["next", "begin", "ask"])
def test_no_restarts_at_all(tmp_path: Path, wait: str) -> None:
    """With max_restarts=0 a death is WorkerDied, which names the worker, wherever one waits."""
    where = {"next": 5, "begin": "begin", "ask": "call"}[wait]
    with streams(fatal(tmp_path, where), max_restarts=0) as s:
        with pytest.raises(cseq.WorkerDied, match="worker 0 was killed by SIGKILL") as caught:
            s.begin([9, 9])
            s.ask("call")
            list(s)
        assert (caught.value.worker, caught.value.exitcode) == (0, -signal.SIGKILL)
        for again in (lambda: s.begin([1, 1]), lambda: s.ask("pid")):
            with pytest.raises(cseq.WorkerDied):
                again()


def test_an_item_that_kills_again_and_again_is_named(tmp_path: Path) -> None:
    """What has ended three workers ends the streams; WorkerDied names the item."""
    with streams(fatal(tmp_path, 2, 1000), prefetch=1) as s:
        s.begin([5, 5])
        with pytest.raises(cseq.WorkerDied, match="item 2 of worker 0, epoch 1") as caught:
            list(s)
    assert (caught.value.worker, caught.value.epoch, caught.value.indices) == (0, 1, [2])


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
            os.kill(pid, signal.SIGKILL)


def test_a_hanging_worker_can_be_replaced(tmp_path: Path) -> None:
    """on_timeout='restart': it is killed, and its items are made again."""
    hangs = partial(Hangs, str(tmp_path), 7, 1)
    with streams(hangs, timeout=1.5, on_timeout="restart") as s:
        s.begin([20, 20])
        assert plain(s) == in_process([20, 20])
        assert s.stats().restarts == 1


@pytest.mark.parametrize("on_timeout", ["raise", "restart"])
def test_a_worker_that_was_stopped(monkeypatch: pytest.MonkeyPatch, on_timeout: str) -> None:
    """One that does not even take its ticket up meets the timeout, too."""
    monkeypatch.setattr("cseq.worker.STACK_SECONDS", 0.1)
    with streams(timeout=0.3, on_timeout=on_timeout) as s:
        s.begin([3, 3])
        assert len(list(s)) == 6
        stopped = s.pids()[1]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        if on_timeout == "raise":
            with pytest.raises(cseq.WorkerTimeout, match=r"worker 1 is here:\n.*stopped"):
                s.begin([3, 3])
            os.kill(stopped, signal.SIGKILL)
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
    """However many of them a ticket asks for."""
    with streams(Slower, 1, prefetch=12, timeout=1.0) as s:
        s.begin([206])
        assert len(list(s)) == 206
        assert s.stats().batches < 100


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
    with streams(held, 1, prefetch=1, timeout=1.0, timed_from="wait") as s:
        s.begin([2])
        begun = time.monotonic()
        for _ in range(2):  # the second waits as long again
            with pytest.raises(cseq.WorkerTimeout, match="item 0 of worker 0"):
                s.next(0)
            assert time.monotonic() - begun > 1.0
            begun = time.monotonic()
        Path(held.path).touch()
        assert len(list(s)) == 2


# -- bounds


@pytest.mark.parametrize("prefetch", [1, 2, 3, 10, 70, 200])
def test_the_bound_of_prefetch(prefetch: int) -> None:
    """A worker makes `prefetch` items ahead of what was taken from it, and never one more."""
    with streams(num_workers=1, prefetch=prefetch) as s:
        s.begin([1000])
        for taken in range(60):
            ahead = s.ask("count", worker=0) - taken
            assert 0 <= ahead <= prefetch
            if taken % 10 == 0:
                while s.ask("count", worker=0) - taken < min(prefetch, 64) // 2:
                    pass
            s.next(0)


def test_all_of_prefetch_is_made_ahead() -> None:
    """Without anybody asking for them, as many items as `prefetch` says get ready."""
    with streams(num_workers=1, prefetch=7) as s:
        s.begin([100])
        while s.ask("count", worker=0) < 7:
            pass
        assert s.next(0)[1] == 0


def test_small_items_cross_together() -> None:
    """Small and quick items share tickets; large ones have one each."""
    with streams(prefetch=64) as s:
        s.begin([3000, 3000])
        assert plain(s) == in_process([3000, 3000])
        small = s.stats()
    assert small.samples == 6000
    assert small.batches < 3000
    with streams(Large, prefetch=64) as s:
        s.begin([50, 50])
        assert len(list(s)) == 100
        large = s.stats()
    assert large.batches >= large.samples == 100


class Large(Numbers):
    """Items of a megabyte."""

    def item(self, k: int) -> Any:
        return self.number, k, np.full(1 << 17, 10 * k + self.number)


class Pieces(Numbers):
    """Items that adapters pack themselves, among others."""

    def item(self, k: int) -> Any:
        return bytearray(b"%d" % k * (k % 9)) if k % 5 else [k]


def test_pieces_of_bytes_are_the_loop_s_own() -> None:
    """A bytearray arrives as one, with other items or alone, and can be changed."""
    for prefetch in (1, 100):
        with streams(Pieces, 1, prefetch=prefetch) as s:
            s.begin([300])
            for k, item in enumerate(s):
                assert item == Pieces(0, 1).item(k)
                item.append(1)


class Reused(Numbers):
    """Yields the same buffers again and again, written to anew."""

    def items(self, start: int) -> Iterator[Any]:
        array, places = np.zeros(3, np.int64), [0]
        for k in range(start, self.length):
            array[:] = places[0] = 10 * k + self.number
            yield array, places


def test_a_producer_may_reuse_what_it_yields() -> None:
    """An item is taken as it is when it is yielded, whatever the producer does to it later."""
    with streams(Reused, 1, prefetch=100) as s:
        s.begin([500])
        for k, (array, places) in enumerate(s):
            assert array.tolist() == [10 * k] * 3
            assert places == [10 * k]
        assert s.stats().batches < 400


@pytest.mark.needs("Linux")
def test_idle_workers_are_left_asleep() -> None:
    """A worker is not woken for what another one is asked."""
    with streams(num_workers=4, prefetch=1) as s:
        s.begin([200] * 4)
        pids = s.ask("pid")
        taken = [s.next(worker)[1] for worker in range(4)]
        while s.stats().depths[2] < 4:  # until all are ready, so that the workers sleep, or will
            pass
        before = [sleeps(pid) for pid in pids[1:]]
        taken += [s.next(0)[1] for _ in range(100)]
        assert taken == [0] * 4 + list(range(1, 101))
        # They wake up by themselves, once a second.
        assert all(sleeps(pid) - slept < 30 for pid, slept in zip(pids[1:], before, strict=True))


def sleeps(pid: int) -> int:
    """Count how often a process has gone to sleep."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
    return int(line.split()[1])


# -- data


def test_large_arrays_are_not_copied() -> None:
    """A large item lies in its slot of shared memory, under a lease."""
    with streams(Large) as s:
        s.begin([3, 3])
        for _, _, array in s:
            assert isinstance(array.base, Lease)
        del array
        assert s.stats().copies == 0


@pytest.mark.parametrize("limit", [None, 0])
def test_items_held_stay_intact(limit: int | None) -> None:
    """Items in the user's hands never change, also when all are kept, and after the end."""
    with streams(Large, memory_limit=limit) as s:
        s.begin([30, 30])
        held = list(s)
        s.begin([30, 30])
        views = [item[2][5:9] for item in s]
        assert (s.stats().copies > 0) == (limit == 0)
    assert plain(held) == in_process([30, 30], Large)
    expected = [[10 * k + number] * 4 for k in range(30) for number in (0, 1)]
    assert [view.tolist() for view in views] == expected


def test_small_items_do_not_hold_each_other() -> None:
    """Each small item has memory of its own, so that one that is kept keeps no others."""
    with streams(num_workers=1, prefetch=64) as s:
        s.begin([400])
        assert max(item[2].base.nbytes for item in s) < 1000


class Mixed(Numbers):
    """Items of all sizes and kinds."""

    def item(self, k: int) -> Any:
        size = (1, 10, 3000, 90_000, 300_000)[k % 5] if k % 7 else 0
        return self.number, k, np.arange(size) + self.number, str(k), {"k": k, "n": None}


def test_sizes_change_from_item_to_item() -> None:
    """Items of any size follow each other."""
    with streams(Mixed, prefetch=20) as s:
        for _ in range(2):
            s.begin([40, 60])
            assert plain(s) == in_process([40, 60], Mixed)


class Tensors(Numbers):
    """Items with tensors in them."""

    def item(self, k: int) -> Any:
        import torch

        return torch.full((k,), k), torch.full((100_000,), float(k))


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_tensors() -> None:
    """Tensors arrive as tensors, the large ones where they lie."""
    with streams(Tensors, prefetch=16) as s:
        s.begin([10, 10])
        held = list(s)
    for number, (small, large) in enumerate(held):
        k = number // 2
        assert small.tolist() == [k] * k
        assert large.shape == (100_000,)
        assert (large == k).all()


@pytest.mark.parametrize("kind", [Mixed, Pieces])
def test_encoded_items(kind: type[Numbers]) -> None:
    """An encoded item decodes to its item; another process finds a large one in its slot."""
    lent = 0
    with streams(kind, prefetch=20, encoded=True) as s:
        for _ in range(2):
            s.begin([40, 60])
            encoded_items = [item for item in s if isinstance(item, EncodedItem)]
            opened = [item.decode() for item in encoded_items]
            if kind is Mixed:
                assert plain(opened) == in_process([40, 60], Mixed)
            else:
                order = [k for k in range(60) for w in (0, 1) if k < (40, 60)[w]]
                assert opened == [kind(0, 1).item(k) for k in order]
            for item in encoded_items:
                if item.slot >= 0:
                    decoded(s, item)
                    lent += 1
            del item, encoded_items, opened
    assert (lent > 0) == (kind is Mixed)


@pytest.mark.parametrize("prefetch", [1, 30])
def test_encoded_items_and_an_exception(prefetch: int) -> None:
    """An exception comes out as itself, behind the encoded_items of the items before it."""
    with streams(Broken, prefetch=prefetch, encoded=True) as s:
        for _ in range(3):
            s.begin([(5, 40), (-1, 3)])
            assert [s.next(0).decode()[1] for _ in range(5)] == list(range(5))
            with pytest.raises(TwoArguments, match="0: broken"):
                s.next(0)
            assert [item.decode()[0] for item in s] == [1, 1, 1]


def test_epochs_take_no_more_memory() -> None:
    """Slots for assignments, calls and items are used again, however an epoch ends."""
    with streams(Mixed, prefetch=5) as s:
        for epoch in range(100):
            s.begin([20, 20])
            list(itertools.islice(s, epoch % 20))
            s.ask("add", 1, 1)
        # Ten for items, two in work on what was given up, letters and calls; made by the dozen.
        assert testing.slots(s).total <= 32


# -- the end, from any state


class Tidy(Numbers):
    """Leaves a file when it is closed."""

    def __init__(self, folder: str, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.folder = Path(folder)

    def close(self) -> None:
        (self.folder / f"closed-{self.number}").touch()


@pytest.mark.parametrize("state", ["new", "begun", "in the middle", "over", "interrupted"])
def test_close_from_any_state(tmp_path: Path, state: str) -> None:
    """`close` ends all workers, whose producers are closed; then everything says it is closed."""
    s = streams(partial(Tidy, str(tmp_path)))
    if state != "new":
        s.begin([100, 100])
    if state == "in the middle":
        next(iter(s))
    if state == "over":
        list(s)
    if state == "interrupted":
        s.interrupt()
    s.close()
    s.close()
    if state != "new":  # a worker that has not started yet may be ended before it does
        assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}
    with pytest.raises(OSError, match="closed"):
        s.begin([1, 1])
    with pytest.raises(OSError, match="closed"):
        s.ask("pid")
    with pytest.raises(InterruptedError):
        s.next(0)
    assert s.stats().restarts == 0


@pytest.mark.parametrize("deed", ["close", "interrupt", "begin"])
def test_who_waits_in_another_thread_is_interrupted(tmp_path: Path, deed: str) -> None:
    """A `next` that waits raises InterruptedError when the streams are closed or begun again."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    s = streams(partial(Gated, str(gate)), 1)
    with open(gate, "r+b", buffering=0) as writer:
        s.begin([5])
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                s.next(0)
            except InterruptedError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not os.path.exists(f"{gate}.0"):
            pass
        if deed == "interrupt":
            s.interrupt()
            waiting.join(60)
        writer.write(b"x" * 100)
        if deed == "begin":
            s.begin([5])
            assert len(list(s)) == 5
        s.close()
        waiting.join(60)
        assert not waiting.is_alive()
    # With the gate opened, the item may have come before the interruption did.
    assert [type(error) for error in raised] in ([InterruptedError], [])
    assert raised or deed != "interrupt"


def test_interrupt_ends_the_epoch() -> None:
    """After `interrupt` there are no items until the next `begin`."""
    with streams() as s:
        s.begin([5, 5])
        s.next(0)
        s.interrupt()
        with pytest.raises(InterruptedError):
            s.next(0)
        s.begin([5, 5])
        assert plain(s) == in_process([5, 5])


def test_dropped_without_close() -> None:
    """Streams that nobody holds any more end their workers."""
    s = streams()
    s.begin([100, 100])
    pids = s.ask("pid")
    del s
    gc.collect()
    for pid in pids:
        await_death(pid)


SCRIPT = """
import sys
from cseq.stream import EncodedItem, Streams

class Item:
    def __init__(self, k): self.k = k

class Producer:
    def __init__(self, number, num_workers): self.number = number
    def begin(self, wanted): self.wanted = wanted
    def items(self, start):
        for k in range(start, self.wanted.k): yield Item(k)

s = Streams(Producer, 2, start_method=sys.argv[1])
s.begin([Item(3), Item(2)])
print([item.k for item in s], all(type(item) is Item for item in s))
s.begin([Item(1000), Item(1000)])
print(s.next(0).k)
"""


@pytest.mark.parametrize("method", METHODS)
def test_scripts_without_ceremony(run_script: RunScript, method: str) -> None:
    """Classes of a script travel both ways, and it may just end."""
    pytest.importorskip("cloudpickle")
    done = run_script(SCRIPT, method)
    assert (done.stdout, done.stderr) == ("[0, 0, 1, 1, 2] True\n0\n", "")


def test_a_forked_child_takes_no_items() -> None:
    """In a process that the user forks off, the streams are of no use, and harm nothing."""
    with streams() as s:
        s.begin([50, 50])
        got = [next(iter(s)) for _ in range(3)]
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with pytest.raises(InterruptedError):
                    s.next(0)
                with pytest.raises(OSError, match="forked"):
                    s.begin([1, 1])
                with pytest.raises(OSError, match="forked"):
                    s.ask("pid")
                s.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert plain([*got, *s]) == in_process([50, 50])


class Pressing(Numbers):
    """Presses Ctrl-C at some items."""

    def item(self, k: int) -> Any:
        if k % 10 == 7:
            os.kill(os.getppid(), signal.SIGINT)
        return super().item(k)


def test_ctrl_c_loses_nothing() -> None:
    """A KeyboardInterrupt comes out of the call that waits; the next one goes on."""
    interrupts = 0
    with streams(Pressing, 1, prefetch=1) as s:
        s.begin([40])
        got = []
        while len(got) < 40:
            try:
                got.append(s.next(0)[1])
            except KeyboardInterrupt:
                interrupts += 1
    assert got == list(range(40))
    assert interrupts > 0


def test_a_signal_handler_may_take_items() -> None:
    """It gets those that the interrupted call was waiting for, and that call gets the next one."""
    with streams(Pressing, 1, prefetch=1) as s:
        s.begin([40])
        got: list[int] = []
        before = signal.signal(signal.SIGINT, lambda *_: got.append(s.next(0)[1]))
        try:
            while len(got) < 40:
                with contextlib.suppress(StopIteration):
                    got.append(s.next(0)[1])
        finally:
            signal.signal(signal.SIGINT, before)
        assert got == list(range(40))


def test_a_signal_handler_may_call() -> None:
    """A call that it makes in the middle of another one ends that."""
    with streams(Calling, 1) as s:
        s.begin([3])
        replies: list[Any] = []
        before = signal.signal(signal.SIGINT, lambda *_: replies.append(s.ask("add", 1, 2)))
        try:
            with pytest.raises(InterruptedError, match="another call"):
                s.ask("press")
        finally:
            signal.signal(signal.SIGINT, before)
        assert replies == [[(0, 3)]]
        assert s.ask("add", 2, 3) == [(0, 5)]
        assert plain(s) == in_process([3])
        assert not lost_slots(s)


class Calling(Numbers):
    """Interrupts the process that calls it."""

    def press(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)


# -- any history

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=3)
STEP = st.one_of(
    st.tuples(st.just("next"), st.integers(0, 2)),
    st.tuples(st.just("round"), st.integers(1, 30)),
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
)


@settings(max_examples=25)
@given(
    epochs=LENGTHS.flatmap(
        lambda first: st.lists(
            st.tuples(
                st.lists(st.integers(0, 60), min_size=len(first), max_size=len(first)),
                st.lists(STEP, max_size=25),
            ),
            min_size=1,
            max_size=3,
        )
    ),
    prefetch=st.sampled_from([1, 2, 3, 8, 40]),
)
def test_any_history(epochs: list[tuple[list[int], list[Any]]], prefetch: int) -> None:
    """Whatever is asked for, and whoever is killed: each stream gives its items, in its order."""
    workers = len(epochs[0][0])
    with (
        pytest.MonkeyPatch.context() as patch,
        streams(Mixed, workers, prefetch=prefetch, max_restarts=1000) as s,
    ):
        patch.setattr(cseq.deaths, "TRIES", 10**9)  # chance may well strike one ticket three times
        for lengths, steps in epochs:
            s.begin(lengths)
            expected = [plain(one_alone(w, workers, lengths[w], Mixed)) for w in range(workers)]
            got: list[list[Any]] = [[] for _ in range(workers)]
            for what, argument in steps:
                take_step(s, got, what, argument)
            for items, whole in zip(got, expected, strict=True):
                assert items == whole[: len(items)]
            for item in s:
                got[item[0]] += plain([item])
            assert got == expected


def one_alone(number: int, num_workers: int, length: int, kind: type[Numbers]) -> list[Any]:
    """All items of one producer, made here."""
    producer = kind(number, num_workers)
    producer.begin(length)
    return list(producer.items(0))


def take_step(s: Streams, got: list[list[Any]], what: str, argument: int) -> None:
    """Do one thing."""
    worker = argument % len(got)
    if what == "next":
        item = next_or_none(s, worker)
        got[worker] += plain([] if item is None else [item])
    elif what == "round":
        for item in itertools.islice(s, argument):
            got[item[0]] += plain([item])
    elif what == "ask":
        assert s.ask("add", argument, 1, worker=worker) == (worker, argument + 1)
    else:
        os.kill(s.ask("pid", worker=worker), signal.SIGKILL)


# -- Ctrl-C between any two steps

STEPS = (
    "stream.py", "run.py", "transport.py", "arena.py", "writer.py", "slot_size.py", "codec.py",
    "failure.py", "pickling.py",
)  # fmt: skip


NEVER = contextlib.nullcontext(threading.Event())


class Reading:
    """Reads an epoch, interrupted here and there, and knows what is still to come."""

    def __init__(self, s: Streams, producer: type[Numbers], lengths: Sequence[int]) -> None:
        self.s = s
        s.begin(lengths)
        count = len(lengths)
        self.left = [plain(one_alone(w, count, n, producer)) for w, n in enumerate(lengths)]
        self.turns = [w for k in range(max(lengths)) for w in range(count) if k < lengths[w]]
        self.taken = 0
        self.round: Iterator[Any] = iter(s)
        self.held: list[BaseException] = []  # with what their frames have

    def take(self, how: str, countdown: int = 0, *, hold: bool = False) -> bool:
        """Take an item, in turn or of a worker; return whether that was interrupted."""
        worker = self.turns[0] if self.turns else 0
        items: list[Any] = []
        with interrupted(countdown, *STEPS) if countdown else NEVER as struck:
            try:
                if how == "peek":
                    items += self.committed()
                elif how == "turn":
                    items += itertools.islice(self.round, 1)
                else:
                    with contextlib.suppress(StopIteration):
                        items.append(self.s.next(worker))
            except KeyboardInterrupt as error:
                self.held += [error] if hold else []
                raise
        if items:
            assert plain(decoded(self.s, item) for item in items) == self.left[worker][:1]
            del self.turns[0], self.left[worker][0]
            self.taken += 1
        else:
            assert struck.is_set() or not self.turns
        return struck.is_set()

    def committed(self) -> list[Any]:
        """Take the next item of the round by `peek` and `commit`, if there is one."""
        try:
            number, item = self.s.peek()
        except StopIteration:
            return []
        assert number == self.taken
        self.s.commit(number)
        return [item]

    def finish(self, how: str) -> None:
        """Take the rest; no slot may be lost then."""
        while self.turns:
            self.take(how)
        self.take(how)
        self.held.clear()
        assert not lost_slots(self.s)


class Leased(Numbers):
    """Items just large enough to be handed out where they lie."""

    def item(self, k: int) -> Any:
        return self.number, k, np.full(1 << 13, 10 * k + self.number)


def decoded(s: Streams, item: Any) -> Any:
    """Decode an encoded item; where it lies in a slot, read it as another process does, too."""
    if not isinstance(item, EncodedItem):
        return item
    if item.slot >= 0:
        (fd, width), size = s.segment, item.memory.nbytes
        assert os.pread(fd, size, width * item.slot) == item.memory.load_bytes(0, size)
    return item.decode()


TEARING = [(Numbers, 1, (3, 2)), (Numbers, 12, (20, 15)), (Leased, 3, (4, 3))]
HOW = [("turn", False), ("worker", False), ("peek", False), ("worker", True)]


@pytest.mark.parametrize(("how", "encoded"), HOW)
@pytest.mark.parametrize(("producer", "prefetch", "lengths"), TEARING)
def test_ctrl_c_anywhere_in_the_taking_of_an_item(
    producer: type[Numbers], prefetch: int, lengths: Sequence[int], how: str, encoded: bool
) -> None:
    """Wherever in it a signal handler raises: no item is lost, doubled or out of its turn."""
    with streams(producer, 2, prefetch=prefetch, encoded=encoded) as s:
        s.begin([500, 500])
        assert len(list(s)) == 1000  # from now on small items come together

        hits = 0
        for behind in (0, 2, sum(lengths)):

            def step(countdown: int, behind: int = behind) -> bool:
                reading = Reading(s, producer, lengths)
                for _ in range(behind):
                    reading.take(how)
                hit = reading.take(how, countdown, hold=countdown % 2 == 0)
                reading.finish(how)
                return hit

            hits += first_hits(step)
        assert hits > 8


@pytest.mark.parametrize(("how", "encoded"), HOW)
@pytest.mark.parametrize(("producer", "prefetch", "lengths"), TEARING)
def test_ctrl_c_again_and_again(
    producer: type[Numbers], prefetch: int, lengths: Sequence[int], how: str, encoded: bool
) -> None:
    """The going on after an interrupt may be interrupted, too, and so may calls in between."""
    rng, hits = random.Random(7), 0
    with streams(producer, 2, prefetch=prefetch, encoded=encoded) as s:
        for _ in range(8):
            reading = Reading(s, producer, lengths)
            while reading.turns:
                countdown = int(10 ** rng.uniform(0, 3.3))
                hits += reading.take(how, countdown, hold=rng.random() < 0.3)
                if rng.random() < 0.3:
                    with interrupted(int(10 ** rng.uniform(0, 3.3)), *STEPS):
                        assert len(s.ask("count")) == 2
            reading.finish(how)
    assert hits > 15


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(("prefetch", "behind"), [(1, 3), (30, 0), (30, 1)])
def test_ctrl_c_does_not_hide_an_exception(prefetch: int, behind: int, encoded: bool) -> None:
    """Wherever a signal handler raises: what the producer has raised comes out, once."""
    with streams(Broken, 2, prefetch=prefetch, encoded=encoded) as s:
        s.begin([(-1, 500), (-1, 500)])
        assert len(list(s)) == 1000

        def step(countdown: int) -> bool:
            s.begin([(3, 9), (-1, 2)])
            got = [decoded(s, s.next(0))[1] for _ in range(behind)]
            raised: list[BaseException] = []

            def take() -> None:
                try:
                    got.append(decoded(s, s.next(0))[1])
                except TwoArguments as error:
                    raised.append(error)

            with interrupted(countdown, *STEPS) as struck:
                take()
            while not raised:
                take()
            without = [k for k in range(3) if k != behind]
            assert got == [0, 1, 2] or (struck.is_set() and got == without)
            assert next_or_none(s, 0) is None
            assert [decoded(s, item)[:2] for item in s] == [(1, 0), (1, 1)]
            return struck.is_set()

        assert first_hits(step) > 20 or behind == 1  # nothing is done for an item that is ready


@pytest.mark.parametrize("prefetch", [1, 30])
def test_ctrl_c_anywhere_in_a_call(prefetch: int) -> None:
    """Wherever in `ask` a signal handler raises: calls and items go on, and no slot is lost."""
    with streams(num_workers=2, prefetch=prefetch) as s:

        def step(countdown: int) -> bool:
            reading = Reading(s, Numbers, [9, 7])
            for _ in range(3):
                reading.take("turn")
            with interrupted(countdown, *STEPS) as struck:
                assert s.ask("add", countdown, 1) == [(w, countdown + 1) for w in (0, 1)]
            reading.take("turn")
            assert s.ask("add", 1, countdown, worker=1) == (1, countdown + 1)
            reading.finish("turn")
            return struck.is_set()

        assert first_hits(step) > 50


def test_a_request_has_its_slot_for_life() -> None:
    """It takes the lowest free slot, says so if there is none, and frees it when it is gone."""
    slots = Slots(2)
    requests = [Request(slots) for _ in range(3)]
    assert [request.slot for request in requests] == [0, 1, -1]
    del requests[2], requests[0]
    assert (slots.acquire(), slots.acquire()) == (0, -1)


class Pausing(Gated):
    """Presses Ctrl-C in a call, and does not come back before it is told to."""

    def pause(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        os.read(self.gate, 1)


def test_an_interrupted_call_keeps_its_request(tmp_path: Path) -> None:
    """The arguments of a call whose answer is not waited for any more stay until it is over."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with (
        open(gate, "r+b", buffering=0) as writer,
        streams(partial(Pausing, str(gate)), 1) as s,
    ):
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                s.ask("pause")
            for _ in range(2):
                # Its arguments and its answer, and those of the one that waits behind it.
                with pytest.raises(InterruptedError), interrupted_soon(s):
                    s.ask("pid")
                assert testing.slots(s).taken == 4
            writer.write(b"1")
            s.ask("pid")
            assert testing.slots(s).taken == 0
            assert not lost_slots(s)


@contextlib.contextmanager
def interrupted_soon(s: Streams) -> Iterator[None]:
    """Give up the next call once it waits behind the one in work."""
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.001):
            if s.stats().depths[0]:
                s.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch() -> None:
    """Wherever in `begin` a signal handler raises: there is no epoch, or it is as it should be."""
    with streams(prefetch=3) as s:

        def step(countdown: int) -> bool:
            s.begin([9, 9])
            next(iter(s))
            with interrupted(countdown, *STEPS) as struck:
                s.begin([6, 5])
            try:
                got = plain(s)
            except InterruptedError:
                assert struck.is_set()
            else:
                assert got == in_process([6, 5]) or (
                    struck.is_set() and got == in_process([9, 9])[1:]
                )
            return struck.is_set()

        assert first_hits(step) > 100


# -- several, and inside one another


class Nested(Numbers):
    """Has streams of its own."""

    def begin(self, length: int) -> Any:
        super().begin(length)
        self.inner = streams(num_workers=2, prefetch=3)
        return self.inner.begin([length, length])

    def items(self, start: int) -> Iterator[Any]:
        for k, (number, item, _) in enumerate(self.inner):
            if k >= start:
                yield self.number, number, item

    def close(self) -> None:
        self.inner.close()


def test_streams_inside_a_producer() -> None:
    """A producer may have streams of its own."""
    with streams(Nested) as s:
        s.begin([4, 4])
        expected = [(outer, n, k) for k in range(4) for n in (0, 1) for outer in (0, 1)]
        assert list(s) == expected


def test_several_at_once() -> None:
    """Streams in several threads do not disturb each other."""
    results: list[Any] = [None] * 3

    def work(number: int) -> None:
        with streams(prefetch=number + 1) as s:
            for length in (5, 50):
                s.begin([length, length + number])
                results[number] = plain(s)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [in_process([50, 50 + number]) for number in range(3)]


class Informed(Numbers):
    """Says what `worker_info` says."""

    def item(self, k: int) -> Any:
        return cseq.worker_info()


def test_a_producer_knows_who_it_is() -> None:
    """`worker_info` gives the worker's number, and how many there are."""
    with streams(Informed) as s:
        s.begin([2, 2])
        assert [(info.number, info.num_workers) for info in s] == [(0, 2), (1, 2)] * 2


# -- arguments


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {"producer": 5}),
        (ValueError, {"num_workers": 0}),
        (ValueError, {"prefetch": 0}),
        (ValueError, {"prefetch": 2**63}),
        (TypeError, {"prefetch": 1.5}),
        (ValueError, {"start_method": "clone"}),
        (ValueError, {"max_restarts": -1}),
        (ValueError, {"timeout": 0}),
        (ValueError, {"on_timeout": "skip"}),
        (ValueError, {"memory_limit": "much"}),
    ],
)
def test_wrong_arguments(error: type[Exception], options: dict[str, Any]) -> None:
    """A wrong argument is an error that names it, before anything is started."""
    (name,) = options
    with pytest.raises(error, match=name):
        Streams(**({"producer": Numbers, "num_workers": 2} | options))


def test_wrong_calls() -> None:
    """One assignment for each worker, and workers that exist."""
    with streams() as s:
        with pytest.raises(ValueError, match="3 assignments for 2 workers"):
            s.begin([1, 2, 3])
        with pytest.raises(TypeError, match="assignment"):
            s.begin([threading.Lock(), 1])
        s.begin([2, 2])
        for worker in (-1, 2):
            with pytest.raises(IndexError, match="worker"):
                s.next(worker)
            with pytest.raises(IndexError, match="worker"):
                s.ask("pid", worker=worker)
        assert plain(s) == in_process([2, 2])


def test_a_producer_that_cannot_be_pickled() -> None:
    """It is a TypeError at once, and nothing is left of the attempt."""
    lock = threading.Lock()

    def producer(number: int, num_workers: int) -> Any:
        return number, num_workers, lock

    with pytest.raises(TypeError, match="producer"):
        Streams(producer, 2)
