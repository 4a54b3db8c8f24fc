"""The loop's assignments and calls to producers, and their exceptions."""

import os
import threading
from functools import partial

import pytest
from counting import Broken, Gated, Numbers, TwoArguments, in_process, plain, streams
from waiting import until

import cseq
from cseq.engine.tickets.items import Items


def test_calls_between_items():
    """`ask` calls a method with arguments, in one worker or in all, and leaves the items alone."""
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


def test_a_call_behind_all_items():
    """A call that does not overtake runs when all requested items are made."""
    with streams(prefetch=5) as s:
        s.begin([20, 3])
        assert s.ask("count", behind=True) == [5, 3]
        assert s.ask("count", worker=0) == 5
        next(iter(s))
        assert 5 <= s.ask("count", worker=0, behind=True) <= 6
        assert len(list(s)) == 22


@pytest.mark.needs("POSIX")
def test_a_call_overtakes_what_was_only_asked_for(tmp_path):
    """A call runs between two items, not after all that were requested ahead."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with (
        open(gate, "r+b", buffering=0) as writer,
        streams(partial(Gated, str(gate)), 1, prefetch=6) as s,
    ):
        s.begin([6])
        # The first item can be made, but not the second one.
        writer.write(b"1")
        items = iter(s)
        assert next(items)[1] == 0
        # The second item is in work.
        until(lambda: os.path.exists(f"{gate}.1"))
        waiting = s.stats().depths[0]
        assert waiting > 0
        answer = []
        asking = threading.Thread(target=lambda: answer.append(s.ask("count", worker=0)))
        asking.start()
        # The call waits, too.
        until(lambda: s.stats().depths[0] != waiting)
        writer.write(b"2")
        asking.join(60)
        assert answer == [2]
        writer.write(b"3456")
        assert [item[1] for item in items] == [1, 2, 3, 4, 5]


def test_a_worker_that_begins_before_it_is_told_to(monkeypatch):
    """A worker that claims an item first begins the epoch for it, once, and keeps the reply."""
    original = Items.post_call

    def late(items, *call):
        items.pool.feed.refill()
        for ring in items.pool.rings:
            ring.wake()
            until(lambda ring=ring: ring.depths()[2])
        return original(items, *call)

    monkeypatch.setattr(Items, "post_call", late)
    with streams() as s:
        assert s.begin([3, 4]) == [("begun", 0, 3), ("begun", 1, 4)]
        assert plain(s) == in_process([3, 4])
        assert s.begin([2, 2]) == [("begun", 0, 2), ("begun", 1, 2)]


class Unbuildable(Numbers):
    def __init__(self, number, num_workers):
        super().__init__(number, num_workers)
        if number == 1:
            raise FileNotFoundError(2, "no such data set", "/data/set")


def check_error(caught, worker, function):
    """Check that an error has its type, and names its worker and the line that raised it."""
    cause = caught.value.__cause__
    assert isinstance(cause, cseq.RemoteTraceback)
    assert function in cause.args[0]
    assert cause.worker == worker


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_producer_that_cannot_be_made(kind):
    """The next call that waits raises the constructor's exception, which is final."""
    for wait in ("begin", "ask"):
        with streams(Unbuildable, kind=kind) as s:
            for _ in range(2):
                with pytest.raises(FileNotFoundError, match="no such data set") as caught:
                    s.begin([3, 3]) if wait == "begin" else s.ask("pid")
                assert caught.value.filename == "/data/set"
                if kind == "processes":
                    check_error(caught, 1, "__init__")


def test_an_exception_in_begin():
    """`begin` raises it; that epoch does not exist, and the next one is normal."""
    with streams(Broken) as s:
        with pytest.raises(TwoArguments, match="1: broken") as caught:
            s.begin([(-1, 5), ("begin", 5)])
        assert caught.value.args == (1, "broken")
        check_error(caught, 1, "in begin")
        with pytest.raises(InterruptedError):
            iter(s)
        s.begin([(-1, 5), (-1, 5)])
        assert plain(s) == in_process([5, 5])


@pytest.mark.parametrize("where", [0, 1, 7, 30])
@pytest.mark.parametrize("prefetch", [1, 10, 100])
def test_an_exception_among_the_items(where, prefetch):
    """It comes once, after the items before it; that stream is over, the other one continues."""
    with streams(Broken, prefetch=prefetch) as s:
        for _ in range(2):
            s.begin([(where, 40), (-1, 40)])
            got = []
            with pytest.raises(TwoArguments, match="0: broken") as caught:
                got.extend(item[:2] for item in s)
            check_error(caught, 0, "in item")
            assert got == [(w, k) for k in range(where) for w in range(2)]
            assert [item[:2] for item in s] == [(1, k) for k in range(where, 40)]
        s.begin([(-1, 40), (-1, 40)])
        assert plain(s) == in_process([40, 40])


def test_an_exception_in_a_call():
    """`ask` raises it; that worker's stream is over, and the other one is not."""
    with streams(Broken) as s:
        s.begin([(-1, 9), (-1, 9)])
        items = iter(s)
        assert [next(items)[:2] for _ in range(2)] == [(0, 0), (1, 0)]
        with pytest.raises(TwoArguments, match="1: broken") as caught:
            s.ask("fail", worker=1)
        check_error(caught, 1, "in fail")
        assert [item[1] for item in s if item[0] == 0] == list(range(1, 9))
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            s.ask("nothing_of_the_kind")
        # It does not look like an end.
        with pytest.raises(RuntimeError, match="StopIteration"):
            s.ask("stop")
        s.begin([(-1, 4), (-1, 4)])
        assert plain(s) == in_process([4, 4])
