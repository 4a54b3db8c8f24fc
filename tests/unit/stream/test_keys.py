"""Streams of keyed items, and streams in no order: no item is ever lost."""

import contextlib
import itertools
import os
import threading
import time
from functools import partial

import pytest
from counting import TwoArguments
from keyed import Counting, Makes, begin, keys_of, lists, streams
from streaming import lost_slots
from waiting import until


@pytest.mark.parametrize("prefetch", [1, 2, 3, 10, 70])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("assign", ["turn", "free"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_key_is_made_once(workers, assign, ordered, prefetch):
    """Items come in the keys' order, if it is asked for; worker k mod N makes key k."""
    with streams(num_workers=workers, prefetch=prefetch) as s:
        for count in (0, 0, 1, 2, 2, 3, 5, 7, 7, 200, 400):
            begin(s, lists(count), ordered=ordered, assign=assign)
            got = [item[:2] for item in s]
            keys = keys_of(got)
            assert (keys if ordered else sorted(keys, key=lambda key: key[0])) == lists(count)
            if ordered and assign == "turn":
                assert [worker for worker, _ in got] == [k % workers for k in range(count)]
            assert list(s) == []
        assert not lost_slots(s)


def test_a_key_is_taken_as_it_is_when_it_is_drawn():
    """A sampler may reuse its list, even if more keys are drawn than a worker has room for."""

    def reusing():
        key = [0]
        for k in range(300):
            key[0] = k
            yield key

    for prefetch in (2, 100):
        with streams(prefetch=prefetch) as s:
            begin(s, reusing())
            assert keys_of(s) == [[k] for k in range(300)]


def test_a_key_that_cannot_be_pickled():
    """An error names the key, after the items of the keys before; the epoch is then over."""
    with streams() as s:
        with pytest.raises(TypeError, match="key 3 of epoch 0"):
            begin(s, [[0], [1], [2], threading.Lock()])
        with pytest.raises(InterruptedError):
            next(iter(s))
        begin(s, [[0], [1], [2], [3], [4], threading.Lock(), [6]])
        assert keys_of(itertools.islice(s, 5)) == [[k] for k in range(5)]
        with pytest.raises(TypeError, match="key 5 of epoch 1"):
            next(iter(s))
        assert list(s) == []
        assert not lost_slots(s)


def fail_to_unpickle(pid):
    """Raise, except in the process of this number."""
    if os.getpid() != pid:
        raise TwoArguments("unpickled elsewhere", 2)
    return "fine"


class Homebound:
    """Can be unpickled only where it was pickled."""

    def __reduce__(self):
        return fail_to_unpickle, (os.getpid(),)


class Broken(Makes):
    """For some keys, raises what the key names, or makes an item that cannot be read."""

    def make(self, key):
        if key == "home":
            return 0, key, Homebound()
        if isinstance(key, str):
            raise {"stop": StopIteration, "exit": SystemExit, "two": TwoArguments}[key](key, 2)
        return super().make(key)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_exception_is_an_answer(ordered):
    """It is raised instead of its item, and the stream continues."""
    keys = [[0], "two", [2], "home", [3], "two", "stop", [6], "exit", "home", *lists(9)]
    got = []
    with streams(Broken) as s:
        begin(s, keys, ordered=ordered)
        for _ in keys:
            try:
                got.append(next(iter(s))[1])
            except (TwoArguments, RuntimeError) as error:
                got.append(error.args[0])
        assert list(s) == []
        assert not lost_slots(s)
    said = {
        "stop": "the worker raised StopIteration: ('stop', 2)",
        "exit": "the worker raised SystemExit: ('exit', 2)",
        "home": "unpickled elsewhere",
    }
    expected = [said.get(str(key), key) for key in keys]
    assert got == expected if ordered else sorted(map(str, got)) == sorted(map(str, expected))


def test_a_sampler_that_is_interrupted():
    """A generator cannot continue, so the epoch does not just end; other iterators can continue."""

    def drawing():
        yield from lists(5)
        raise KeyboardInterrupt

    class Once(Counting):
        pressed = False

        def __next__(self):
            if self.drawn == 5 and not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt
            return super().__next__()

    with streams() as s:
        begin(s, drawing())
        got = keys_of(itertools.islice(s, 1))
        with pytest.raises(KeyboardInterrupt):
            next(iter(s))
        got += keys_of(itertools.islice(s, 4))
        assert got == lists(5)
        # A handler that raises again may hide the first exception.
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was interrupted"):
                next(iter(s))
        begin(s, Once(lists(9)))
        got = keys_of(itertools.islice(s, 1))
        with pytest.raises(KeyboardInterrupt):
            next(iter(s))
        assert got + keys_of(s) == lists(9)


class Gated(Makes):
    """Makes the item of key [2] after a byte from a pipe."""

    def __init__(self, gate, number, num_workers):
        super().__init__(number, num_workers)
        self.gate, self.begun = os.open(gate, os.O_RDONLY), gate + "-begun"

    def make(self, key):
        while key in ([0], [1]) and not os.path.exists(self.begun):
            time.sleep(0.0005)
        if key == [2]:
            os.read(self.gate, 1)
        return super().make(key)


@contextlib.contextmanager
def gated(folder, *, held=False, **options):
    """Yield streams whose key [2] waits for a byte, and its pipe; `held`: [0], [1] for a file."""
    gate = folder / "gate"
    if not held:
        (folder / "gate-begun").touch()
    os.mkfifo(gate)
    with (
        open(gate, "r+b", buffering=0) as writer,
        streams(partial(Gated, str(gate)), **options) as s,
    ):
        yield s, writer


def await_answers(s, worker):
    """Wait until a worker has made all that it was asked for."""
    ring = s._run.pool.rings[worker]
    until(lambda: not ring.depths()[0] and not ring.held(1))


@pytest.mark.needs("POSIX")
def test_a_slow_item_holds_no_other_up(tmp_path):
    """The keys after it go to the next worker with room, as in torch."""
    with gated(tmp_path) as (s, gate):
        for _ in range(2):
            begin(s, ([k] for k in range(10)), ordered=False)
            got = []
            while len(got) < 8:
                await_answers(s, 1)
                if not got:
                    until(lambda: s._run.pool.rings[0].depths()[2] >= 1)
                got.append(next(iter(s)))
            gate.write(b"1")
            got += s
            assert [key for (key,) in keys_of(got)] == [0, 1, 3, 5, 6, 7, 8, 9, 2, 4]
            assert [item[0] for item in got] == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.needs("POSIX")
def test_a_slow_item_and_free_keys(tmp_path):
    """Keys go to the worker with the fewest outstanding ones, the lowest of several."""
    with gated(tmp_path, held=True) as (s, gate):
        begin(s, ([k] for k in range(10)), assign="free")
        # Before this point, key 2 might go to the quick worker.
        (tmp_path / "gate-begun").touch()
        got = []
        while len(got) < 2:
            await_answers(s, 1)
            # The items of keys 4 and 5 go to worker 1.
            got.append(next(iter(s)))
        gate.write(b"1")
        for _ in range(4):
            await_answers(s, 0)
            await_answers(s, 1)
            got.append(next(iter(s)))
        got += s
        assert [key for (key,) in keys_of(got)] == list(range(10))
        assert [item[0] for item in got[:6]] == [0, 1, 0, 1, 1, 1]
        assert [item[0] for item in got[6:]] == [0] * 4


@pytest.mark.needs("POSIX")
def test_another_epoch_waits_for_nothing_under_way(tmp_path):
    """Items in work are given up, and their worker continues when it can."""
    with gated(tmp_path, prefetch=2) as (s, gate):
        begin(s, [[2], [1], [0], [1]])
        until(lambda: s._run.pool.rings[0].held(1))
        for k in range(10, 30):
            begin(s, [[5], [k], [5], [k]], ordered=False)
            assert next(iter(s))[:2] == (1, [k])
            assert next(iter(s))[:2] == (1, [k])
        gate.write(b"1")
        assert [item[:2] for item in s] == [(0, [5])] * 2
        begin(s, lists(9))
        assert keys_of(s) == lists(9)
        assert not lost_slots(s)
