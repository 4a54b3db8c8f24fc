"""Streams: each worker's items in order, bounded and intact, to the end of each epoch."""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial
from pathlib import Path

import held
import numpy as np
import pytest
from counting import (
    Numbers,
    in_process,
    one_alone,
    plain,
    streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import kill
from kinds import QUICKEST

import cseq
import cseq.processes.deaths
from cseq.stream import Streams

# -- order

UNEVEN: list[tuple[int, ...]] = [(4, 4), (3, 5), (5, 3), (0, 3), (3, 0), (0, 0), (1,), (0,)]
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
    """After another `begin`, an older iterator raises InterruptedError."""
    with streams() as s:
        s.begin([4, 4])
        old = iter(s)
        next(old)
        s.begin([4, 4])
        with pytest.raises(InterruptedError):
            next(old)
        assert plain(s) == in_process([4, 4])


def test_before_the_first_epoch():
    """Without an epoch, `iter` raises InterruptedError, and `ask` works."""
    with streams() as s:
        assert s.ask("add", 1, 2) == [(0, 3), (1, 3)]
        with pytest.raises(InterruptedError):
            iter(s)


# -- bounds


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
                while s.ask("count", worker=0) - taken < min(prefetch, 64) // 2:
                    pass
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
        while s.stats().depths[2] < 4:
            pass
        before = [sleeps(pid) for pid in pids[1:]]
        taken += [next(items)[1] for _ in range(100)]
        assert taken == [0] * 4 + list(range(1, 101))
        # They wake by themselves once a second.
        assert all(sleeps(pid) - slept < 30 for pid, slept in zip(pids[1:], before, strict=True))


def sleeps(pid):
    """Count how often a process has gone to sleep."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
    return int(line.split()[1])


# -- data


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


# -- the end, in any state


class Tidy(Numbers):
    def __init__(self, folder, number, num_workers):
        super().__init__(number, num_workers)
        self.folder = Path(folder)

    def close(self):
        (self.folder / f"closed-{self.number}").touch()


@pytest.mark.parametrize("state", ["new", "begun", "in the middle", "over", "interrupted"])
def test_close_from_any_state(tmp_path, state):
    """`close` ends all workers and closes their producers; every later call raises."""
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
    if state != "new":
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
    with streams() as s:
        s.begin([50, 50])
        got = [next(iter(s)) for _ in range(3)]
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with pytest.raises(InterruptedError):
                    iter(s)
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


# -- random histories

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=3)
STEP = st.one_of(
    st.tuples(st.just("round"), st.integers(1, 30)),
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
)


@settings(max_examples=3 if QUICKEST.start_method == "spawn" else 12)
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
def test_any_history(epochs, prefetch):
    """For any requests and any kills, each stream gives its items in order."""
    workers = len(epochs[0][0])
    with (
        pytest.MonkeyPatch.context() as patch,
        streams(Mixed, workers, prefetch=prefetch, max_restarts=1000) as s,
    ):
        # Random kills may well strike one ticket three times.
        patch.setattr(cseq.processes.deaths, "TRIES", 10**9)
        for lengths, steps in epochs:
            s.begin(lengths)
            expected = [plain(one_alone(w, workers, lengths[w], Mixed)) for w in range(workers)]
            got = [[] for _ in range(workers)]
            for what, argument in steps:
                take_step(s, got, what, argument)
            for items, whole in zip(got, expected, strict=True):
                assert items == whole[: len(items)]
            for item in s:
                got[item[0]] += plain([item])
            assert got == expected


def take_step(s, got, what, argument):
    """Do one step."""
    worker = argument % len(got)
    if what == "round":
        for item in itertools.islice(s, argument):
            got[item[0]] += plain([item])
    elif what == "ask":
        assert s.ask("add", argument, 1, worker=worker) == (worker, argument + 1)
    else:
        kill(s.ask("pid", worker=worker))


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
def test_wrong_arguments(error, options):
    """A wrong argument is an error with its name, before anything starts."""
    (name,) = options
    with pytest.raises(error, match=name):
        Streams(**({"producer": Numbers, "num_workers": 2} | options))


def test_wrong_calls():
    """There must be one assignment for each worker, and workers must exist."""
    with streams() as s:
        with pytest.raises(TypeError, match="ordered='x'"):
            s.begin([None] * 2, ordered="x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="first=2 is above 1"):
            s.begin([None] * 2, first=2)
        with pytest.raises(ValueError, match="3 assignments for 2 workers"):
            s.begin([1, 2, 3])
        with pytest.raises(TypeError, match="assignment"):
            s.begin([threading.Lock(), 1])
        s.begin([2, 2])
        items = iter(s)
        assert next(items)[:2] == (0, 0)
        with pytest.raises(TypeError, match="ordered='x'"):
            s.begin([9, 9], ordered="x")  # type: ignore[arg-type]
        assert len(list(items)) == 3
        s.begin([2, 2])
        for worker in (-1, 2):
            with pytest.raises(IndexError, match="worker"):
                s.ask("pid", worker=worker)
        assert plain(s) == in_process([2, 2])


def test_a_producer_that_cannot_be_pickled():
    """`Streams` raises a TypeError at once, and nothing remains of the attempt."""
    lock = threading.Lock()

    def producer(number, num_workers):
        return number, num_workers, lock

    with pytest.raises(TypeError, match="producer"):
        Streams(producer, 2)


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
