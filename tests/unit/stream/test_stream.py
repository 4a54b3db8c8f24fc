"""Streams: each worker's items in its own order, bounded and intact, to the end of each epoch."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from counting import (
    METHODS,
    Gated,
    Numbers,
    in_process,
    next_or_none,
    one_alone,
    plain,
    streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import await_death, kill
from kinds import QUICKEST
from streaming import lost_slots

import cseq
import cseq.processes.deaths
from cseq import testing
from cseq._memory import Lease
from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunScript

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


@pytest.mark.needs("POSIX")
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
    """Streams without references end their workers."""
    s = streams()
    s.begin([100, 100])
    pids = s.ask("pid")
    del s
    gc.collect()
    for pid in pids:
        await_death(pid)


SCRIPT = """
import sys
from cseq.stream import Streams

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


@pytest.mark.needs("fork")
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


@pytest.mark.needs("POSIX")
def test_ctrl_c_loses_nothing() -> None:
    """A KeyboardInterrupt comes out of the call that waits; the next one goes on."""
    taking: list[bool] = []  # while an item is taken, which C puts into the list
    interrupts = 0

    def press(*_: Any) -> None:
        if taking:
            taking.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        with streams(Pressing, 1, prefetch=1) as s:
            s.begin([40])
            got: list[Any] = []
            while len(got) < 40:
                try:
                    taking.append(True)
                    got.extend(map(s.next, (0,)))
                    taking.clear()
                except KeyboardInterrupt:
                    interrupts += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert [k for _, k, *_ in got] == list(range(40))
    assert interrupts > 0


@pytest.mark.needs("POSIX")
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
def test_any_history(epochs: list[tuple[list[int], list[Any]]], prefetch: int) -> None:
    """Whatever is asked for, whichever worker is killed: each stream gives its items, in order."""
    workers = len(epochs[0][0])
    with (
        pytest.MonkeyPatch.context() as patch,
        streams(Mixed, workers, prefetch=prefetch, max_restarts=1000) as s,
    ):
        patch.setattr(
            cseq.processes.deaths, "TRIES", 10**9
        )  # chance may well strike one ticket three times
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
        kill(s.ask("pid", worker=worker))


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
        assert len(list(items)) == 3  # of the epoch that goes on
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


def test_items_are_measured() -> None:
    """An item is a batch of one sample; the slowest are named by epoch and number."""
    with streams(num_workers=2) as s:
        for _ in range(2):
            s.begin((5, 3))
            assert len(list(s)) == 8
        stats = s.stats()
    assert (stats.batches, stats.samples, stats.num_workers) == (16, 16, 2)
    # The end of a worker's items is an answer, too, and so is what was asked for after it.
    assert 16 <= stats.index_seconds.count == sum(one.batches for one in stats.workers)
    assert {slow.epoch for slow in stats.slowest} <= {0, 1}
    assert {slow.worker for slow in stats.slowest} == {0, 1}
    assert 0 <= stats.loop_waiting <= 1
    assert stats.advice().change.keys() <= {"num_workers"}
