"""Streams whose items are named by keys, and streams in no order: none is ever lost."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import first_hits, interrupted
from killing import kill
from kinds import QUICKEST
from streaming import lost_slots

import cseq
import cseq.deaths
from cseq._slots import Lease
from cseq.launcher import start_methods
from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from conftest import RunScript

SPAWNED = QUICKEST.start_method == "spawn"  # to replace a worker then takes a second or two
PAUSE = 0.0005  # seconds between two looks at what nothing signals


class Makes:
    """An item is its worker's number, its key, and some data."""

    def __init__(self, number: int, num_workers: int) -> None:
        self.number = number
        self.num_workers = num_workers
        self.assignment: Any = None
        self.made = 0

    def begin(self, assignment: Any) -> Any:
        self.assignment = assignment
        self.made = 0
        return assignment

    def make(self, key: Any) -> Any:
        self.made += 1
        return self.number, key, np.full(3, self.number)

    def items(self, start: int) -> Iterator[Any]:
        for k in range(start, self.assignment):
            yield self.make([k])

    def add(self, a: int, b: int) -> tuple[int, int]:
        return self.number, a + b

    def assigned(self) -> Any:
        return self.assignment

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ZeroDivisionError("in a call")


def streams(
    producer: Callable[[int, int], Any] = Makes, num_workers: int = 2, **options: Any
) -> Streams:
    """Make streams of workers that are started in the quickest way."""
    options = {"start_method": QUICKEST.start_method, "prefetch": 2} | options
    return Streams(producer, num_workers, **options)


def begin(s: Streams, keys: Any, **options: Any) -> None:
    """Begin an epoch of keys; the assignments are of no account."""
    assert s.begin([0] * s.num_workers, iter(keys), **options) == []


def lists(count: int) -> list[list[int]]:
    """Keys as a batch sampler's."""
    return [[k, -k] for k in range(count)]


def keys_of(items: Any) -> list[Any]:
    """The keys of some items."""
    return [item[1] for item in items]


class Counting:
    """An iterator that knows how many keys were drawn, and in which thread."""

    def __init__(self, keys: Any) -> None:
        self.keys = iter(keys)
        self.drawn = 0
        self.threads: set[int] = set()

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        self.threads.add(threading.get_ident())
        key = next(self.keys)
        self.drawn += 1
        return key


# -- order and laziness


@pytest.mark.parametrize("prefetch", [1, 2, 10, 70])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 200])
def test_items_come_in_the_order_of_the_keys(prefetch: int, count: int) -> None:
    """Key k is made by worker k mod N, and its item is the k-th."""
    for workers in (1, 3):
        with streams(num_workers=workers, prefetch=prefetch) as s:
            for _ in range(2):
                begin(s, lists(count))
                assert [item[:2] for item in s] == [
                    (k % workers, key) for k, key in enumerate(lists(count))
                ]
                assert list(s) == []
            assert not lost_slots(s)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("prefetch", [1, 3, 70])
def test_keys_are_drawn_as_items_are_taken(prefetch: int, ordered: bool) -> None:
    """`prefetch` for each worker at the beginning, one more for each item, in this thread."""
    with streams(prefetch=prefetch) as s:
        for _ in range(2):
            keys = Counting(itertools.count())
            begin(s, keys, ordered=ordered)
            assert keys.drawn == 2 * prefetch
            for taken in range(1, 40):
                next(iter(s))
                assert keys.drawn == 2 * prefetch + taken
            for number in range(39, 60):
                assert s.peek()[0] == number
                assert s.peek()[0] == number
                assert keys.drawn == 2 * prefetch + number + 1
                s.commit(number)
                assert keys.drawn == 2 * prefetch + number + 1
            assert keys.threads == {threading.get_ident()}


def test_a_sampler_may_look_at_what_came_out() -> None:
    """A key may depend on the items before, as far as they were taken."""
    got: list[Any] = []

    def sampler() -> Iterator[list[int]]:
        for _ in range(20):
            yield [len(got)]

    with streams(prefetch=2) as s:
        begin(s, sampler())
        got.extend(s)  # one after the other: `extend` appends each before it asks for the next
        begin(s, sampler())
        assert [key for (key,) in keys_of(s)] == [20] * 20
        growing = [[0]] * 5
        begin(s, growing)
        for k, _ in enumerate(s):
            if k < 7:
                growing.append([k])
        assert k == 11


def test_many_workers_and_many_keys() -> None:
    """Twelve workers, and as many keys as an epoch has."""
    with streams(num_workers=12) as s:
        begin(s, ([k] for k in range(5000)))
        assert [item[:2] for item in s] == [(k % 12, [k]) for k in range(5000)]
        begin(s, ([k] for k in range(5000)), ordered=False)
        assert sorted(keys_of(s)) == [[k] for k in range(5000)]


def test_a_hundred_thousand_keys() -> None:
    """Each of them is made, once."""
    with streams(prefetch=10) as s:
        begin(s, ([k] for k in range(100_000)))
        assert all(key == [k] for k, (_, key, _) in enumerate(s))
        assert s.stats().samples == 100_000


# -- what a key can be

KEYS: list[Any] = [
    5,
    True,
    None,
    "name",
    ["a", "b"],
    [],
    [0, -1, 2**63 - 1, -(2**63)],
    [2**63],
    [1, True],
    [1, 2.0],
    [np.int64(3)],
    (1, 2),
    {"k": [1]},
    np.int64(3),
    np.arange(4),
    np.float32(2),
    b"x" * 10_000,
    list(range(512)),
    list(range(513)),
    list(range(40_960)),
    [[1], [2]],
]


def same(a: Any, b: Any) -> bool:
    """Whether two keys are the same, in type and value, down to what they have in them."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and (a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("method", [m for m in start_methods() if m != "spawn"] or ["spawn"])
def test_a_key_arrives_as_what_it_was(method: str) -> None:
    """Its type and its value."""
    with streams(start_method=method) as s:
        for _ in range(2):
            begin(s, KEYS)
            got = keys_of(s)
            assert len(got) == len(KEYS)
            assert all(map(same, got, KEYS))
        assert not lost_slots(s)


def test_a_key_is_taken_as_it_is_when_it_is_drawn() -> None:
    """A sampler may reuse its list, also if more keys are drawn than a worker has room for."""

    def reusing() -> Iterator[list[int]]:
        key = [0]
        for k in range(300):
            key[0] = k
            yield key

    for prefetch in (2, 100):
        with streams(prefetch=prefetch) as s:
            begin(s, reusing())
            assert keys_of(s) == [[k] for k in range(300)]


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_tensors_as_keys() -> None:
    """Tensors, also of no dimension."""
    import torch

    with streams() as s:
        begin(s, [torch.tensor(3), torch.arange(5)])
        zero, one = keys_of(s)
        assert type(zero) is torch.Tensor
        assert (zero.dim(), zero.item(), one.tolist()) == (0, 3, [0, 1, 2, 3, 4])


def test_the_room_for_ints() -> None:
    """Longer lists of ints than `key_size` arrive as well."""
    for key_size in (0, 3):
        with streams(key_size=key_size) as s:
            begin(s, [[0] * n for n in range(6)])
            assert [len(key) for key in keys_of(s)] == list(range(6))
            assert not lost_slots(s)


def shared_bytes() -> int:
    """Memory of this process's anonymous files."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    own = [file for file in files if os.path.islink(file) and "memfd:cseq" in os.readlink(file)]
    return sum(512 * os.stat(file).st_blocks for file in own)


@pytest.mark.needs("Linux")
def test_the_memory_of_the_room_for_ints() -> None:
    """There is room for what each worker has ahead, but not for all keys in each worker."""
    before = shared_bytes()
    with streams(num_workers=32, key_size=4096, start_method="fork", launch="begin"):
        assert shared_bytes() - before < 24 << 20


@pytest.mark.parametrize("ordered", [False, True])
def test_a_slow_worker_where_there_is_room_for_few_keys(ordered: bool) -> None:
    """The other one does not get all keys at once; none is lost."""
    with streams(Hesitant, key_size=1 << 18) as s:
        begin(s, lists(40), ordered=ordered, assign="free")
        keys = keys_of(s)
        assert (keys if ordered else sorted(keys)) == lists(40)
        begin(s, lists(5), assign="free")
        assert keys_of(s) == lists(5)
        assert not lost_slots(s)


class Hesitant(Makes):
    """One of its workers takes its time."""

    def make(self, key: Any) -> Any:
        if self.number == 0:
            time.sleep(0.02)
        return super().make(key)


class Unpicklable:
    """Cannot be pickled, for more than one reason."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_key_that_cannot_be_pickled() -> None:
    """It is an error that names it, behind the items of the keys before; the epoch is over then."""
    with streams() as s:
        with pytest.raises(TypeError, match="key 3 of epoch 0"):
            begin(s, [[0], [1], [2], Unpicklable()])
        with pytest.raises(InterruptedError):
            next(iter(s))
        begin(s, [[0], [1], [2], [3], [4], Unpicklable(), [6]])
        assert keys_of(itertools.islice(s, 5)) == [[k] for k in range(5)]
        with pytest.raises(TypeError, match="key 5 of epoch 1"):
            next(iter(s))
        assert list(s) == []
        assert not lost_slots(s)


# -- exceptions


class Broken(Makes):
    """Raises for some keys what they name."""

    def make(self, key: Any) -> Any:
        if isinstance(key, str):
            raise {"stop": StopIteration, "exit": SystemExit, "two": TwoArguments}[key](key, 2)
        return super().make(key)


class TwoArguments(Exception):
    """Has a second argument."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


def fail_to_unpickle(pid: int) -> str:
    """Raise, except in the process of this number."""
    if os.getpid() != pid:
        raise TwoArguments("unpickled elsewhere", 2)
    return "fine"


class Homebound:
    """Cannot be unpickled but where it was pickled."""

    def __reduce__(self) -> Any:
        return fail_to_unpickle, (os.getpid(),)


class MakesHomebound(Makes):
    """Two of its items cannot be read."""

    def make(self, key: Any) -> Any:
        return (0, key, Homebound()) if key[0] in (2, 7) else super().make(key)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_item_that_cannot_be_read_is_an_exception(ordered: bool) -> None:
    """In its place, once; the items behind it come."""
    with streams(MakesHomebound) as s:
        begin(s, lists(10), ordered=ordered)
        got: list[Any] = []
        raised: list[str] = []
        items = iter(s)
        while len(got) + len(raised) < 10:
            try:
                got.append(next(items)[1])
            except TwoArguments as error:
                raised.append(str(error))
        assert raised == ["unpickled elsewhere"] * 2
        assert sorted(got) == [key for key in lists(10) if key[0] not in (2, 7)]
        assert list(items) == []
        assert not lost_slots(s)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_exception_is_an_answer(ordered: bool) -> None:
    """It is raised in place of its item, a key is drawn for it, and the stream goes on."""
    keys = Counting([[0], "two", [2], [3], "two", "stop", [6], "exit", *lists(9)])
    got: list[Any] = []
    with streams(Broken) as s:
        begin(s, keys, ordered=ordered)
        for taken in range(1, 18):
            try:
                got.append(next(iter(s))[1])
            except TwoArguments as error:
                got.append((error.args, error.second))
                cause: Any = error.__cause__
                assert isinstance(cause, cseq.RemoteTraceback)
                assert "in make" in cause.args[0]
                assert cause.worker in (0, 1)
            except RuntimeError as error:
                got.append(error.args[0])
            assert keys.drawn == min(17, taken + 4)
        assert list(s) == []
    two = (("two",), 2)
    stop, left = (
        f"the worker raised {name}: ('{key}', 2)"
        for name, key in (("StopIteration", "stop"), ("SystemExit", "exit"))
    )
    expected = [[0], two, [2], [3], two, stop, [6], left, *lists(9)]
    assert got == expected if ordered else Counter(map(str, got)) == Counter(map(str, expected))


def test_an_exception_at_a_peek() -> None:
    """It is raised once, and has a number, as an item has."""
    with streams(Broken) as s:
        begin(s, [[0], "two", [2]])
        assert s.peek()[0] == 0
        s.commit(0)
        with pytest.raises(TwoArguments):
            s.peek()
        number, item = s.peek()
        assert (number, item[1]) == (2, [2])
        s.commit(2)
        with pytest.raises(StopIteration):
            s.peek()


class Reluctant(Makes):
    """Cannot begin an epoch that it is told not to."""

    def begin(self, assignment: Any) -> Any:
        if assignment == "no":
            raise TwoArguments("begin", 2)
        return super().begin(assignment)


def test_an_exception_in_begin() -> None:
    """It is raised in place of each item of that worker."""
    with streams(Reluctant) as s:
        assert s.begin(["no", "yes"], iter(lists(4))) == []
        for k in range(4):
            if k % 2:
                assert next(iter(s))[:2] == (1, lists(4)[k])
            else:
                with pytest.raises(TwoArguments):
                    next(iter(s))
        assert list(s) == []


def raising(error: Callable[[], BaseException], after: int) -> Iterator[list[int]]:
    """Draw some keys, then raise: a new one, since this frame would be in a circle with another."""
    yield from lists(after)
    raise error()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_sampler_that_raises(ordered: bool) -> None:
    """From `begin`; or, later, behind the items of all keys before, once."""
    with streams() as s:
        for after in range(9):
            if after < 4:
                with pytest.raises(TwoArguments):
                    begin(s, raising(partial(TwoArguments, "s", 1), after), ordered=ordered)
                with pytest.raises(InterruptedError):
                    iter(s)
                continue
            begin(s, raising(partial(TwoArguments, "s", 1), after), ordered=ordered)
            assert sorted(keys_of(itertools.islice(s, after))) == sorted(lists(after))
            with pytest.raises(TwoArguments):
                next(iter(s))
            assert list(s) == []
        assert not lost_slots(s)


def test_a_sampler_that_is_interrupted() -> None:
    """A generator cannot go on then, so the epoch does not just end; other iterators can."""

    class Once(Counting):
        def __next__(self) -> Any:
            if self.drawn == 5 and not self.threads & {0}:
                self.threads.add(0)
                raise KeyboardInterrupt
            return super().__next__()

    with streams() as s:
        begin(s, raising(KeyboardInterrupt, 5))
        got = keys_of(itertools.islice(s, 1))
        with pytest.raises(KeyboardInterrupt):
            next(iter(s))
        got += keys_of(itertools.islice(s, 4))
        assert got == lists(5)
        for _ in range(2):  # a handler that strikes again may hide the first of them
            with pytest.raises(RuntimeError, match="was interrupted"):
                next(iter(s))
        begin(s, Once(lists(9)))
        got = keys_of(itertools.islice(s, 1))
        with pytest.raises(KeyboardInterrupt):
            next(iter(s))
        assert got + keys_of(s) == lists(9)


# -- calls


def test_calls_between_items() -> None:
    """`ask` works in an epoch of keys; what it raises ends nothing."""
    with streams() as s:
        s.begin(["left", "right"], iter(lists(30)))
        got = []
        for k, item in enumerate(s):
            got.append(item[1])
            assert s.ask("add", k, 1) == [(0, k + 1), (1, k + 1)]
            with pytest.raises(ZeroDivisionError):
                s.ask("fail", worker=k % 2)
            assert s.ask("assigned", behind=k % 3 == 0) == ["left", "right"]
        assert got == lists(30)
        assert not lost_slots(s)


def test_a_stream_of_keys_is_not_read_worker_by_worker() -> None:
    """The order is that of the keys."""
    with streams() as s:
        begin(s, lists(3))
        with pytest.raises(RuntimeError, match="worker by worker"):
            s.next(0)
        assert keys_of(s) == lists(3)


def test_wrong_arguments() -> None:
    """They are named."""
    with streams() as s:
        with pytest.raises(TypeError, match="keys"):
            s.begin([0, 0], [1, 2])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="assign"):
            begin(s, [], assign="any")
        with pytest.raises(TypeError, match="ordered"):
            begin(s, [], ordered=2)
    with pytest.raises(ValueError, match="key_size"):
        streams(key_size=-1)


# -- in no order, and to whom


class Gated(Makes):
    """Makes the item of key [2] when it is told to, through a pipe."""

    def __init__(self, gate: str, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.gate = os.open(gate, os.O_RDONLY)

    def make(self, key: Any) -> Any:
        if key == [2]:
            os.read(self.gate, 1)
        return super().make(key)


@contextlib.contextmanager
def gated(folder: Path, **options: Any) -> Iterator[tuple[Streams, Any]]:
    """Streams whose key [2] waits for a byte, and the pipe for it."""
    gate = folder / "gate"
    os.mkfifo(gate)
    with (
        open(gate, "r+b", buffering=0) as writer,
        streams(partial(Gated, str(gate)), **options) as s,
    ):
        yield s, writer


def await_answers(s: Streams, worker: int) -> None:
    """Wait until a worker has made all that it was asked for."""
    ring = s._run.pool.consumers[worker].ring
    while ring.depths()[0] or ring.held(1):
        time.sleep(PAUSE)


@pytest.mark.needs("POSIX")
def test_a_slow_item_holds_no_other_up(tmp_path: Path) -> None:
    """The keys behind it go to the next worker that has room: the order is torch's."""
    with gated(tmp_path) as (s, gate):
        for _ in range(2):
            begin(s, ([k] for k in range(10)), ordered=False)
            got = []
            while len(got) < 8:
                await_answers(s, 1)
                if not got:
                    while s._run.pool.consumers[0].ring.depths()[2] < 1:
                        time.sleep(PAUSE)
                got.append(next(iter(s)))
            gate.write(b"1")
            got += s
            assert [key for (key,) in keys_of(got)] == [0, 1, 3, 5, 6, 7, 8, 9, 2, 4]
            assert [item[0] for item in got] == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.needs("POSIX")
def test_a_slow_item_and_free_keys(tmp_path: Path) -> None:
    """Keys go to the worker that has the fewest to work on, the lowest of several."""
    with gated(tmp_path) as (s, gate):
        begin(s, ([k] for k in range(10)), assign="free")
        got = []
        while len(got) < 2:
            await_answers(s, 1)
            got.append(next(iter(s)))  # those of keys 4 and 5 go to worker 1
        gate.write(b"1")
        for _ in range(4):
            await_answers(s, 0)
            await_answers(s, 1)
            got.append(next(iter(s)))
        got += s
        assert [key for (key,) in keys_of(got)] == list(range(10))
        assert [item[0] for item in got[:6]] == [0, 1, 0, 1, 1, 1]
        assert [item[0] for item in got[6:]] == [0] * 4


@pytest.mark.parametrize("prefetch", [1, 3, 70])
@pytest.mark.parametrize(("ordered", "assign"), [(True, "free"), (False, "turn"), (False, "free")])
def test_every_key_is_made_once(ordered: bool, assign: str, prefetch: int) -> None:
    """In whichever order, by whomever."""
    with streams(num_workers=3, prefetch=prefetch) as s:
        for count in (0, 1, 5, 400):
            begin(s, lists(count), ordered=ordered, assign=assign)
            got = keys_of(s)
            assert (got if ordered else sorted(got, key=abs_of)) == lists(count)
        assert not lost_slots(s)


@pytest.mark.parametrize("ordered", [True, False])
def test_whose_turn_is_first(ordered: bool) -> None:
    """With keys and without; each epoch says it anew."""
    with streams(num_workers=3, prefetch=2) as s:
        for keys in (lists(7), None):
            for first, workers in ((2, [2, 0, 1]), (1, [1, 2, 0]), (0, [0, 1, 2])):
                s.begin([3] * 3, iter(keys) if keys else None, first=first, ordered=ordered)
                for worker in range(3):
                    await_answers(s, worker)
                got = list(s)
                assert got[0][0] == first
                assert len(got) == (7 if keys else 9)
                if ordered:
                    assert [item[0] for item in got[:6]] == 2 * workers
                    assert not keys or keys_of(got) == keys


def abs_of(key: list[int]) -> int:
    """The number of a key of `lists`."""
    return key[0]


@pytest.mark.needs("POSIX")
def test_streams_in_no_order(tmp_path: Path) -> None:
    """Without keys: from whichever stream has an item; of each, in its order."""
    with gated(tmp_path, prefetch=5) as (s, gate):
        for _ in range(2):
            s.begin([20, 20], ordered=False)
            # Both wait at their item 2: one byte lets one of them go on.
            gate.write(b"1")
            got = list(itertools.islice(s, 22))
            numbers = Counter(item[0] for item in got)
            assert sorted(numbers.values()) == [2, 20]
            gate.write(b"1")
            got += s
            for worker in (0, 1):
                own = [key for number, (key,), _ in got if number == worker]
                assert own == list(range(20))


def test_a_peeked_item_stays_in_front() -> None:
    """In no order, too, `peek` returns the same item until it is committed."""
    with streams(num_workers=3, prefetch=4) as s:
        for keys in (iter(lists(60)), None):
            s.begin([20] * 3, keys, ordered=False)
            got = []
            for number in range(60):
                first = s.peek()
                assert first[0] == number
                for worker in range(3):
                    await_answers(s, worker)
                assert s.peek()[1] is first[1]
                s.commit(number)
                got.append(first[1])
            assert list(s) == []
            assert len({(item[0], *item[1]) for item in got}) == 60


def glanced(s: Streams) -> Any:
    """The next item, without taking it, once it is ready."""
    while s.glance() is None:
        time.sleep(PAUSE)
    return s.glance()


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("assign", ["turn", "free"])
def test_a_glance_changes_nothing(tmp_path: Path, assign: str) -> None:
    """It is what comes next, once that is ready: nothing is waited for, no key is drawn for it."""
    with gated(tmp_path) as (s, gate):
        keys = Counting([k] for k in range(6))
        begin(s, keys, assign=assign)
        items = iter(s)
        for number in range(2):
            first = glanced(s)
            assert first[1] == [number]
            assert glanced(s) is first
            assert keys.drawn == 4 + number
            assert next(items) is first
        assert s.glance() is None  # its worker waits in it
        gate.write(b"1")
        assert glanced(s)[1] == [2]
        assert keys_of(items) == [[2], [3], [4], [5]]
        assert s.glance() is None
        assert not lost_slots(s)


def test_where_there_is_no_glance() -> None:
    """Without an epoch, without keys, and in no order; an exception is not raised."""
    with streams() as s:
        assert s.glance() is None
        for options in ({"ordered": False}, {"keys": None}):
            s.begin([2, 2], **({"keys": iter(lists(4))} | options))
            for worker in range(2):
                await_answers(s, worker)
            assert s.glance() is None
            assert len(list(s)) == 4
    with streams(Broken) as s:
        begin(s, ["two"])
        assert isinstance(glanced(s).error, TwoArguments)
        with pytest.raises(TwoArguments):
            next(iter(s))


@pytest.mark.needs("POSIX")
def test_another_epoch_waits_for_nothing_under_way(tmp_path: Path) -> None:
    """What is being made is given up, and its worker goes on when it can."""
    with gated(tmp_path, prefetch=2) as (s, gate):
        begin(s, [[2], [1], [0], [1]])
        while not s._run.pool.consumers[0].ring.held(1):
            time.sleep(PAUSE)
        for k in range(10, 30):
            begin(s, [[5], [k], [5], [k]], ordered=False)
            assert next(iter(s))[:2] == (1, [k])
            assert next(iter(s))[:2] == (1, [k])
        gate.write(b"1")
        assert [item[:2] for item in s] == [(0, [5])] * 2
        begin(s, lists(9))
        assert keys_of(s) == lists(9)
        assert not lost_slots(s)


def test_epochs_with_and_without_keys() -> None:
    """They may follow each other."""
    with streams(prefetch=7) as s:
        for taken in (0, 1, 5, 40):
            assert s.begin([50, 50]) == [50, 50]
            assert len(list(itertools.islice(s, taken))) == taken
            begin(s, lists(60), ordered=taken != 5)
            assert len(list(itertools.islice(s, taken))) == taken
        assert len(list(s)) == 20
        assert not lost_slots(s)


# -- data


class Sized(Makes):
    """Arrays of as many numbers as the key says, made in place if they are large."""

    def __init__(self, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.kept: list[Any] = []

    def make(self, key: Any) -> Any:
        (size,) = key
        array = cseq.empty(size, np.int64)
        array[:] = size
        if size % 3 == 0:
            self.kept = [*self.kept[-2:], array]
        assert all((kept == len(kept)).all() for kept in self.kept)
        return array, np.full(size, size)


def test_arrays_are_made_in_place_and_may_be_kept() -> None:
    """Large items come out where they lie, and stay intact, also if the producer keeps arrays."""
    sizes = random.Random(2).choices((0, 5, 999, 30_000, 90_001), k=120)
    with streams(Sized, prefetch=3) as s:
        for ordered in (True, False):
            begin(s, ([size] for size in sizes), ordered=ordered)
            held = []
            for item in s:
                held.append(item)
                for array in item:
                    assert (array == len(array)).all()
                    assert isinstance(array.base, Lease) or len(array) < 2000
            del held[5:]
            assert all((array == len(array)).all() for item in held for array in item)
            del item, array, held
        begin(s, [])
        assert not s.stats().copies


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_encoded_items() -> None:
    """They come out of an epoch of keys as well."""
    with streams(Sized, encoded=True) as s:
        begin(s, [[5], [30_000], [6]])
        assert [len(item.decode()[0]) for item in s] == [5, 30_000, 6]


# -- workers die


class Fatal(Makes):
    """Dies at some keys, as often as files can be made for it."""

    def __init__(self, folder: str, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.folder = Path(folder)

    def make(self, key: Any) -> Any:
        if key[0] % 5 == 3:
            with contextlib.suppress(FileExistsError):
                (self.folder / str(key[0])).touch(exist_ok=False)
                kill(os.getpid())
        assert self.assignment == "assigned"
        return super().make(key)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_a_dead_worker_s_keys_are_made_by_its_replacement(
    tmp_path: Path, ordered: bool, assign: str, long: bool
) -> None:
    """The same keys, after it has begun with the epoch's assignment."""
    keys = [[k, 2**70] if long else [k, 1] for k in range(40)]
    with streams(partial(Fatal, str(tmp_path)), prefetch=3) as s:
        s.begin(["assigned"] * 2, iter(keys), ordered=ordered, assign=assign)
        got = keys_of(s)
        assert (got if ordered else sorted(got)) == keys
        assert s.stats().restarts == 8
        assert not lost_slots(s)


@pytest.mark.parametrize(
    ("fatal", "shown", "indices"),
    [([7, 8], r"\[7, 8\]", [7, 8]), (7, "7", [7]), (("a", 7), r"\('a', 7\)", [("a", 7)])],
)
def test_an_item_that_kills_again_and_again_is_named(
    fatal: Any, shown: str, indices: list[Any]
) -> None:
    """WorkerDied has the key, and the process."""
    with streams(partial(Killing, fatal)) as s:
        begin(s, [[0], [1], fatal, [3]])
        named = rf"item 2 \({shown}\) of worker 0, epoch 0; this item has"
        with pytest.raises(cseq.WorkerDied, match=named) as caught:
            list(s)
        assert caught.value.indices == indices
        assert caught.value.pid not in (None, os.getpid())


def test_what_is_shown_of_a_key() -> None:
    """Numbers that the keys were given, for example, are left out."""
    with streams(partial(Killing, [7, 8]), show=lambda key: key[1:]) as s:
        begin(s, [[0], [1], [7, 8], [3]])
        with pytest.raises(cseq.WorkerDied, match=r"item 2 \(\[8\]\) of worker 0") as caught:
            list(s)
        assert caught.value.indices == [8]


class Killing(Makes):
    """Dies at a key."""

    def __init__(self, fatal: Any, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.fatal = fatal

    def make(self, key: Any) -> Any:
        if key == self.fatal:
            kill(os.getpid())
        return super().make(key)


@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_workers_killed_at_any_time(
    monkeypatch: pytest.MonkeyPatch, ordered: bool, assign: str
) -> None:
    """Killed at random, again and again, with arrays that are kept: each item comes, once."""
    monkeypatch.setattr(cseq.deaths, "TRIES", 10**9)  # chance may strike one thrice
    rng = random.Random(5)
    with streams(Sized, 3, max_restarts=10_000, prefetch=3) as s:
        for _ in range(1 if SPAWNED else 2):
            sizes = rng.choices((3, 999, 9_000, 30_001), k=80 if SPAWNED else 150)
            begin(s, ([size] for size in sizes), ordered=ordered, assign=assign)
            got = []
            for item in s:
                assert all((array == len(array)).all() for array in item)
                got.append(len(item[0]))
                if rng.random() < 0.06:
                    for pid in rng.sample(s.pids(), rng.randrange(1, 4)):
                        if pid:
                            kill(pid)
            assert (got if ordered else sorted(got)) == (sizes if ordered else sorted(sizes))
        assert s.stats().restarts > 3


FAULTY = """
import sys, time
import cseq
from cseq import _memory, testing
from cseq.stream import Streams

class Producer:
    seconds = 0
    def __init__(self, number, num_workers): self.kept = []
    def begin(self, assignment): pass
    def make(self, key):
        time.sleep(self.seconds)
        k = key[0]
        array = cseq.empty((5000, 3)[k % 9 == 8], int)
        array[:] = k
        self.kept = [*self.kept[-1:], array]
        return k, array

assert _memory.DEBUG
ordered = sys.argv[1] == "ordered"
for point in sys.argv[2:]:
    # It notifies only where the trainer sleeps, which it does for an item that takes so long.
    Producer.seconds = 0.002 if point == "notify" else 0
    # A ticket passes some points several times.
    with testing.dying(point, 5 if point == "notify" else 23):
        s = Streams(Producer, 2, max_restarts=1000, prefetch=3)
    whole = []
    for length in (160, 100):
        keys = iter([[k] if k % 4 else [k, None] for k in range(length)])
        s.begin([0, 0], keys, ordered=ordered)
        got = [(k, bool((a == k).all())) for k, a in s]
        whole.append((got if ordered else sorted(got)) == [(k, True) for k in range(length)])
    print(point, *whole, s.stats().restarts > 0)
    s.close()
"""


@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_death_at_every_labelled_point(
    run_script: RunScript, debug_build: Path, order: str
) -> None:
    """A worker killed between any two steps of claim, encode, publish loses nothing."""
    points = ["claim", "taken", "encode", "named", "publish", "notify"]
    done = run_script(FAULTY, order, *points, PYTHONPATH=str(debug_build))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{point} True True True" for point in points]


# -- signal handlers

STEPS = ("stream.py", "run.py", "transport.py", "arena.py", "codec.py", "failure.py", "payload.py")
MIXED: Sequence[Any] = [[0], "one", [2], [3, 2**70], [4], "five", [6], [7], [8]]


@pytest.mark.parametrize("how", ["turn", "peek", "glance"])
@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_ctrl_c_anywhere_in_the_taking_of_an_item(ordered: bool, assign: str, how: str) -> None:
    """Wherever in it a signal handler raises: no key and no item is lost, doubled, misplaced."""
    with streams(prefetch=2) as s:
        hits = 0
        for behind in (0, 2, len(MIXED)):

            def step(countdown: int, behind: int = behind) -> bool:
                keys = Counting(MIXED)
                begin(s, keys, ordered=ordered, assign=assign)
                got: list[Any] = []
                for _ in range(behind):
                    take(s, how, got)
                with interrupted(countdown, *STEPS) as struck:
                    take(s, how, got)
                while take(s, how, got):
                    assert keys.drawn == min(len(MIXED), 4 + len(got))
                assert (got if ordered else sorted(map(str, got))) == (
                    MIXED if ordered else sorted(map(str, MIXED))
                )
                assert not lost_slots(s)
                return struck.is_set()

            hits += first_hits(step)
        assert hits > 5


def take(s: Streams, how: str, got: list[Any]) -> bool:
    """Take an item's key; return whether there was one."""
    if how in ("turn", "glance"):
        ahead = s.glance() if how == "glance" else None
        items = list(itertools.islice(s, 1))
        assert ahead is None or ahead is items[0]
        got += keys_of(items)
        return bool(items)
    try:
        number, item = s.peek()
    except StopIteration:
        return False
    assert number == len(got)
    s.commit(number)
    got.append(item[1])
    return True


def test_ctrl_c_does_not_hide_an_exception() -> None:
    """Wherever a signal handler raises: what the producer has raised comes out, once."""
    with streams(Broken) as s:

        def step(countdown: int) -> bool:
            begin(s, [[0], "two", [2], [3]])
            got: list[Any] = []

            def take_one() -> bool:
                try:
                    return take(s, "turn", got)
                except TwoArguments:
                    got.append("two")
                    return True

            take_one()
            with interrupted(countdown, *STEPS) as struck:
                take_one()
            while take_one():
                pass
            assert got == [[0], "two", [2], [3]]
            return struck.is_set()

        assert first_hits(step) > 8


def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch() -> None:
    """Wherever in `begin` a signal handler raises: there is no epoch, or it is as it should be."""
    with streams(prefetch=3) as s:

        def step(countdown: int) -> bool:
            begin(s, lists(9))
            next(iter(s))
            with interrupted(countdown, *STEPS) as struck:
                begin(s, MIXED)
            try:
                got = keys_of(s)
            except InterruptedError:
                assert struck.is_set()
            else:
                assert got == MIXED or (struck.is_set() and got == lists(9)[1:])
            begin(s, [])
            assert not lost_slots(s)
            return struck.is_set()

        assert first_hits(step) > 50


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_signals_at_random_times(ordered: bool, assign: str) -> None:
    """A timer's handler raises again and again: every key's item comes, once, in its place."""

    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    rng, strikes = random.Random(3), 0
    keys: list[Any] = [[k] if k % 5 else str(k) for k in range(1500)]
    before = signal.signal(signal.SIGALRM, strike)
    gc.disable()  # hypothesis has a function that is called at collections: none may raise there
    try:
        with streams(prefetch=3) as s:
            begin(s, keys, ordered=ordered, assign=assign)
            got: list[Any] = []
            items = iter(s)
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-5, -3))
                    got.extend(items)  # in C, so no handler comes between
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    break
                except KeyboardInterrupt:
                    strikes += 1
            assert not lost_slots(s)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    found = keys_of(got)
    assert (found if ordered else sorted(found, key=str)) == (
        keys if ordered else sorted(keys, key=str)
    )
    assert strikes > 20


def test_the_iterator_of_keys_takes_no_items() -> None:
    """It is part of a call: there, that is an error."""

    def sampler() -> Iterator[list[int]]:
        for k in range(40):
            if k == 10:
                with pytest.raises(RuntimeError, match="in the middle of another call"):
                    next(iter(s))
            yield [k]

    with streams() as s:
        begin(s, sampler())
        assert keys_of(s) == [[k] for k in range(40)]
        assert not lost_slots(s)


class Awkward:
    """A key that ends the thread on which it is unpickled, in the trainer."""

    def __reduce__(self) -> Any:
        return end_thread, (os.getpid(),)


def end_thread(trainer: int) -> int:
    """Raise SystemExit in the trainer."""
    if os.getpid() == trainer:
        raise SystemExit("of the user's key")
    return 7


class Mortal(Makes):
    """Dies with its first key, once."""

    def __init__(self, folder: str, number: int, num_workers: int) -> None:
        super().__init__(number, num_workers)
        self.folder = Path(folder)

    def make(self, key: Any) -> Any:
        with contextlib.suppress(FileExistsError):
            (self.folder / "died").touch(exist_ok=False)
            kill(os.getpid())
        return super().make(key)


def test_a_key_that_raises_where_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """Whatever the user's class does: the worker is replaced, and no item is missing."""
    with streams(partial(Mortal, str(tmp_path)), 1) as s:
        begin(s, [Awkward(), Awkward()])
        assert keys_of(s) == [7, 7]
        assert s.stats().restarts == 1
