"""Streams of threads: requests and items are the objects themselves."""

import gc
import threading
import weakref

import pytest

from cseq._core import Turns
from cseq._memory import HAS_GIL
from cseq.stream import ItemFailure, Streams


class Held:
    """An object that can be neither copied nor pickled, and that is watched."""

    def __reduce__(self):
        raise TypeError("Held is to stay")


class Producing:
    def __init__(self, number, num_workers):
        self.number, self.closed = number, False
        self.holders = set()
        made.append(self)

    def begin(self, assignment):
        self.assignment = assignment
        return self.number, assignment

    def items(self, start):
        for k in range(start, 4):
            if k == 3 and self.number == 1:
                raise ValueError("no third")
            yield self.number, k, self.assignment

    def make(self, key):
        if key == "bad":
            raise ValueError("a bad key")
        if type(key) is threading.Barrier:
            key.wait(20)
        if type(key) is threading.Event:
            assert key.wait(20)
        if type(key) is Turns:
            self.holders.add(key.holder)
        return key

    def thread(self, given):
        return threading.current_thread().name, given

    def close(self):
        self.closed = True


made = []


def streams(num_workers=3, **options):
    """Make streams of threads."""
    made.clear()
    return Streams(Producing, num_workers, kind="threads", **options)


def test_items_of_each_thread():
    """They alternate, in each epoch; an exception ends its own thread's items."""
    given = [Held() for _ in range(3)]
    with streams(errors="return", prefetch=2) as s:
        for _ in range(2):
            assert s.begin(given) == [*enumerate(given)]
            items = [*s]
            (failed,) = (one for one in items if type(one) is ItemFailure)
            assert (failed.worker, str(failed.error).partition("\n")[0]) == (1, "no third")
            assert failed is not items[-1]
            items.remove(failed)
            assert items == [
                (w, k, given[w]) for k in range(4) for w in range(3) if (w, k) != (1, 3)
            ]
    assert [one.closed for one in made] == [True] * 3


@pytest.mark.parametrize("prefetch", [1, 2, 40])
def test_items_of_keys(prefetch):
    """Tickets carry lists of small integers, other keys travel as objects; their order is kept."""
    keys = [[1, 2], Held(), None, "text", [2**70], [Held()], 7, {"a": 1}, (1,), [*range(600)]] * 5
    with streams(prefetch=prefetch) as s:
        for ordered in (True, False):
            s.begin([None] * 3, iter(keys), ordered=ordered)
            items = [*s]
            assert len(items) == len(keys)
            if ordered:
                assert items == keys
                assert all(a is b for a, b in zip(items, keys, strict=True) if type(a) is Held)


def test_calls_run_in_each_thread_and_failures_name_the_item():
    """Each call gets its very arguments."""
    value = Held()
    with streams(2, errors="return") as s:
        replies = s.ask("thread", value)
        assert replies == [("cseq-w0", value), ("cseq-w1", value)]
        with pytest.raises(AttributeError, match="missing"):
            s.ask("missing")
        s.begin([None] * 2, iter(["good", "bad", "good"]))
        first, failure, last = s
        assert (first, last, failure.worker) == ("good", "good", 1)
        assert str(failure.error).startswith("a bad key")
        assert "item 1 of worker 1, epoch 0" in "".join(getattr(failure.error, "__notes__", [""]))
        assert (s.pids(), s.processes()) == ([], {})


@pytest.fixture
def turns(monkeypatch):
    """Return turns that threads take until the trainer has tried the other way."""
    if not HAS_GIL:
        pytest.skip("without a GIL, threads take no turns")
    made = Turns(2)
    for k in range(1, 3):
        made.learn(k * 1000, k * 1000 + 999, k * 64)
    assert made.on
    monkeypatch.setattr("cseq.engine.crews.threads.Turns", lambda _: made)
    return made


def test_in_turns_one_thread_works_at_a_time(turns):
    """A turn lasts from one wait for tickets to the next. The results are as without turns."""
    with streams(2, prefetch=4) as s:
        seen = set()
        # A thread that has not yet waited has no turn.
        while len(seen) < 2:
            # Many turns are needed: a loop that the end of a turn does not wake looks ten times a
            # second.
            s.begin([None] * 2, iter([turns] * 16_000))
            assert [one is turns for one in s] == [True] * 16_000
            seen = set.union(*(one.holders for one in made)) - {0}
    assert len(seen) == 2


def test_in_turns_an_item_comes_while_its_thread_works(turns):
    """The loop need not wait for the end of the turn."""
    with streams(2, prefetch=4) as s:
        for _ in range(4):
            taken = threading.Event()
            s.begin([None] * 2, iter([turns, turns, taken, taken]))
            for _ in s:
                taken.set()
    assert turns.on


def test_threads_that_wait_for_each_other_go_on_in_turns(turns):
    """One thread's turn does not block another one's work forever."""
    barrier = threading.Barrier(2)
    with streams(2) as s:
        s.begin([None] * 2, iter([barrier] * 6))
        assert [*s] == [barrier] * 6
    assert (barrier.broken, turns.on) == (False, True)


def test_nothing_is_kept():
    """Keys and items go with their tickets, assignments with the epoch."""
    with streams(2, prefetch=3) as s:
        keys = [Held() for _ in range(20)]
        watched = [weakref.ref(key) for key in keys]
        assignment = weakref.ref(held := Held())
        s.begin([held] * 2, iter(keys[:]))
        del held
        for key in s:
            assert key is keys.pop(0)
        del key
        gc.collect()
        assert [one for one in watched if one() is not None] == []
        s.begin([None] * 2, iter([]))
        for one in made:
            one.assignment = None
        gc.collect()
        assert s.ask("thread", 1) == [("cseq-w0", 1), ("cseq-w1", 1)]
        assert assignment() is None
