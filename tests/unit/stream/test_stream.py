"""Streams: each worker's items in order, bounded and intact, to the end of each epoch."""

import errno
import itertools
import re
import threading
from functools import partial
from pathlib import Path

import held
import numpy as np
import pytest
from counting import METHODS, Numbers, in_process, plain, streams
from forking import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import kill
from kinds import QUICKEST
from waiting import until

from cseq.processes.launcher import processes
from cseq.stream import Streams

UNEVEN = [(4, 4), (3, 5), (5, 3), (0, 3), (3, 0), (0, 0), (1,), (0,)]
UNEVEN += [(2, 4, 4), (5, 1, 3), (9, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize("prefetch", [1, 2, 10, 100])
def test_uneven_streams_go_round(prefetch):
    """Each worker in turn gives one item, in its own order; workers without more are skipped."""
    for count in (1, 2, 3):
        with streams(num_workers=count, prefetch=prefetch) as s:
            for lengths in (lengths for lengths in UNEVEN if len(lengths) == count):
                s.begin(lengths)
                assert plain(s) == in_process(lengths)
                assert list(s) == []


def test_an_iterator_ends_with_its_epoch():
    """After another `begin`, an older iterator raises InterruptedError.

    So does `iter` before the first one, but `ask` works.
    """
    with streams() as s:
        assert s.ask("add", 1, 2) == [(0, 3), (1, 3)]
        with pytest.raises(InterruptedError):
            iter(s)
        s.begin([4, 4])
        old = iter(s)
        next(old)
        s.begin([4, 4])
        with pytest.raises(InterruptedError):
            next(old)
        assert plain(s) == in_process([4, 4])


@pytest.mark.parametrize("prefetch", [1, 2, 3, 10, 70, 200])
def test_the_bound_of_prefetch(prefetch):
    """A worker makes `prefetch` items beyond those taken from it, and no more."""
    with streams(num_workers=1, prefetch=prefetch) as s:
        s.begin([1000])
        items = iter(s)
        for taken in range(60):
            ahead = s.ask("count", worker=0) - taken
            assert 0 <= ahead <= prefetch
            if taken % 10 == 0:
                least = taken + min(prefetch, 64) // 2
                until(lambda least=least: s.ask("count", worker=0) >= least)
            next(items)


class Reused(Numbers):
    """Yields the same buffers repeatedly, with new content."""

    def items(self, start):
        array, places = np.zeros(3, np.int64), [0]
        for k in range(start, self.length):
            array[:] = places[0] = 10 * k + self.number
            yield array, places


def test_a_producer_may_reuse_what_it_yields():
    """An item is copied when it is yielded, so later changes do not reach it."""
    with streams(Reused, 1, prefetch=100) as s:
        s.begin([500])
        for k, (array, places) in enumerate(s):
            assert array.tolist() == [10 * k] * 3
            assert places == [10 * k]


@pytest.mark.needs("Linux")
def test_idle_workers_are_left_asleep():
    """Requests to one worker do not wake another."""
    with streams(num_workers=4, prefetch=1) as s:
        s.begin([101, 1, 1, 1])
        pids = s.ask("pid")
        items = iter(s)
        taken = [next(items)[1] for _ in range(4)]
        # When all items are ready, the workers sleep, or soon will.
        until(lambda: s.stats().depths[2] >= 4)
        before = [sleeps(pid) for pid in pids[1:]]
        taken += [next(items)[1] for _ in range(100)]
        assert taken == [0] * 4 + list(range(1, 101))
        # They wake by themselves once a second.
        assert all(sleeps(pid) - slept < 30 for pid, slept in zip(pids[1:], before, strict=True))


def sleeps(pid):
    """Count how often a process has gone to sleep."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])


class Mixed(Numbers):
    def item(self, k):
        size = (1, 10, 3000, 90_000, 300_000)[k % 5] if k % 7 else 0
        return self.number, k, np.arange(size) + self.number, str(k), {"k": k, "n": None}


def test_epochs_take_no_more_memory():
    """Slots of assignments, calls and items are reused, no matter how an epoch ends."""
    with streams(Mixed, prefetch=5) as s:
        for epoch in range(100):
            s.begin([20, 20])
            list(itertools.islice(s, epoch % 20))
            s.ask("add", 1, 1)
        # Ten are for items, two for work that was given up, and others for messages; they come in
        # dozens.
        assert held.slots(s).total <= 32


class Tidy(Numbers):
    def __init__(self, folder, number, num_workers):
        super().__init__(number, num_workers)
        self.folder = Path(folder)

    def close(self):
        (self.folder / f"closed-{self.number}").touch()


@pytest.mark.parametrize(
    "state", ["unstarted", "new", "begun", "in the middle", "over", "interrupted"]
)
def test_close_from_any_state(tmp_path, state):
    """`close` ends all workers and closes their producers; every later call raises."""
    launch = "begin" if state == "unstarted" else "now"
    s = streams(partial(Tidy, str(tmp_path)), launch=launch)
    is_begun = state not in ("unstarted", "new")
    if is_begun:
        s.begin([100, 100])
    if state == "in the middle":
        next(iter(s))
    if state == "over":
        list(s)
    if state == "interrupted":
        s.interrupt()
    s.close()
    s.close()
    if state == "unstarted":
        assert s.pids() == [None, None]
    if is_begun:
        # A worker that has not started may be ended before it starts.
        assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}
    with pytest.raises(OSError, match="closed"):
        s.begin([1, 1])
    with pytest.raises(OSError, match="closed"):
        s.ask("pid")
    with pytest.raises(InterruptedError):
        iter(s)
    assert s.stats().restarts == 0


@pytest.mark.needs("fork")
def test_a_forked_child_takes_no_items():
    """In a process that the user forks, the streams are unusable and harmless."""

    def act():
        with pytest.raises(InterruptedError):
            iter(s)
        with pytest.raises(OSError, match="forked"):
            s.begin([1, 1])
        with pytest.raises(OSError, match="forked"):
            s.ask("pid")
        s.close()
        return True

    with streams() as s:
        s.begin([50, 50])
        got = [next(iter(s)) for _ in range(3)]
        assert in_child(act)
        assert plain([*got, *s]) == in_process([50, 50])


@pytest.mark.parametrize("method", METHODS)
def test_begin_starts_the_workers(method):
    """With `launch="begin"`, the first epoch starts them, and later ones keep them."""
    with streams(start_method=method, launch="begin") as s:
        assert s.pids() == [None, None]
        assert s.begin([7, 5]) == [("begun", 0, 7), ("begun", 1, 5)]
        pids = s.ask("pid")
        assert plain(s) == in_process((7, 5))
        s.begin([2, 3])
        assert plain(s) == in_process((2, 3))
        assert s.ask("pid") == pids


class Level(Numbers):
    def make(self, key):
        return key


def test_keys_that_raise_before_workers_are_started():
    """Nothing has begun then, and the next call begins."""

    def keys():
        yield 1
        raise KeyError("no more")

    with streams(Level, launch="begin") as s:
        with pytest.raises(KeyError, match="no more"):
            s.begin([0, 0], keys())
        assert s.pids() == [None, None]
        s.begin([0, 0], iter(range(5)))
        assert list(s) == list(range(5))


@pytest.mark.needs("fork")
@pytest.mark.parametrize("launch", ["now", "begin"])
def test_a_fork_that_fails(launch, monkeypatch):
    """The call that starts the workers raises, even if the first one was forked."""
    fork, forked = processes.fork, []

    def full():
        if forked:
            raise OSError(errno.EAGAIN, "full")
        forked.append(True)
        return fork()

    monkeypatch.setattr(processes, "fork", full)
    with (
        pytest.raises(OSError, match="full"),
        streams(Level, start_method="fork", launch=launch) as s,
    ):
        assert launch == "begin"
        s.begin([0, 0], iter(range(5)))
    assert forked


STEP = st.one_of(
    st.tuples(st.just("round"), st.integers(1, 30)),
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
)
LENGTHS = st.lists(st.integers(0, 60), min_size=3, max_size=3)
EPOCHS = st.lists(st.tuples(LENGTHS, st.lists(STEP, max_size=25)), min_size=1, max_size=3)


@settings(max_examples=3 if QUICKEST.start_method == "spawn" else 12)
@given(workers=st.integers(1, 3), epochs=EPOCHS, prefetch=st.sampled_from([1, 2, 3, 8, 40]))
def test_any_history(workers, epochs, prefetch):
    """For any requests and any kills, the streams give their items in order."""
    with (
        pytest.MonkeyPatch.context() as patch,
        streams(Mixed, workers, prefetch=prefetch, max_restarts=1000) as s,
    ):
        # Random kills may well strike one ticket three times.
        patch.setattr("cseq.processes.deaths.TRIES", 10**9)
        for drawn, steps in epochs:
            lengths = drawn[:workers]
            s.begin(lengths)
            got = []
            for what, argument in steps:
                worker = argument % workers
                if what == "round":
                    got += plain(itertools.islice(s, argument))
                elif what == "ask":
                    assert s.ask("add", argument, 1, worker=worker) == (worker, argument + 1)
                else:
                    kill(s.ask("pid", worker=worker))
            assert got + plain(s) == in_process(lengths, Mixed)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {"producer": 5}),
        (TypeError, {"producer": partial(Numbers, threading.Lock())}),
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
def test_wrong_arguments(error, options):
    """A wrong argument is an error with its name; nothing remains of the attempt."""
    (name,) = options
    with pytest.raises(error, match=name):
        Streams(**({"producer": Numbers, "num_workers": 2} | options))


def test_wrong_calls():
    """There must be one assignment for each worker, and workers must exist."""
    wrong = [
        (TypeError, "ordered='x'", [None] * 2, {"ordered": "x"}),
        (TypeError, "ordered", [0, 0], {"keys": iter([]), "ordered": 2}),
        (TypeError, "keys", [0, 0], {"keys": [1, 2]}),
        (ValueError, "assign", [0, 0], {"keys": iter([]), "assign": "any"}),
        (ValueError, "first=2 is above 1", [None] * 2, {"first": 2}),
        (ValueError, "3 assignments for 2 workers", [1, 2, 3], {}),
        (TypeError, "assignment", [threading.Lock(), 1], {}),
    ]
    with streams() as s:
        for error, said, assignments, options in wrong:
            with pytest.raises(error, match=said):
                s.begin(assignments, **options)
        s.begin([2, 2])
        items = iter(s)
        assert next(items)[:2] == (0, 0)
        with pytest.raises(TypeError, match="ordered='x'"):
            s.begin([9, 9], ordered="x")
        assert len(list(items)) == 3
        s.begin([2, 2])
        for worker in (-1, 2):
            with pytest.raises(IndexError, match="worker"):
                s.ask("pid", worker=worker)
        assert plain(s) == in_process([2, 2])


def test_items_are_measured():
    """An item is a batch of one sample; the report names the slowest ones by epoch and number."""
    with streams(num_workers=2) as s:
        for _ in range(2):
            s.begin((5, 3))
            assert len(list(s)) == 8
        stats = s.stats()
    assert (stats.batches, stats.samples, stats.num_workers) == (16, 16, 2)
    # The end of a worker's items is an answer, too, and so are the requests after it.
    assert 16 <= stats.index_seconds.count == sum(one.batches for one in stats.workers)
    assert {slow.epoch for slow in stats.slowest} <= {0, 1}
    assert {slow.worker for slow in stats.slowest} == {0, 1}
    assert 0 <= stats.loop_waiting <= 1
    assert stats.advice().change.keys() <= {"num_workers"}
