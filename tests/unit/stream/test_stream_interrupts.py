"""Ctrl-C between any two steps of a stream's loop: no item is lost, doubled or misplaced."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from counting import (
    Broken,
    Gated,
    Numbers,
    TwoArguments,
    in_process,
    next_or_none,
    one_alone,
    plain,
    streams,
)
from interrupting import first_hits, handled, in_shares, interrupted
from streaming import lost_slots

from cseq import testing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from cseq.stream import Streams


# -- Ctrl-C between any two steps

STEPS = (
    "stream.py", "pools/base.py", "manager.py", "encoding/transport.py", "memory/arena.py",
    "encoding/writer.py", "encoding/codec.py", "encoding/failure.py", "encoding/pickling.py",
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
                if how == "turn":
                    items += itertools.islice(self.round, 1)
                else:
                    with contextlib.suppress(StopIteration):
                        items.append(self.s.next(worker))
            except KeyboardInterrupt as error:
                self.held += [error] if hold else []
                raise
        if items:
            assert plain(items) == self.left[worker][:1]
            del self.turns[0], self.left[worker][0]
            self.taken += 1
        else:
            assert struck.is_set() or not self.turns
        return struck.is_set()

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


TEARING = [(Numbers, 1, (3, 2)), (Numbers, 12, (20, 15)), (Leased, 3, (4, 3))]
HOW = ["turn", "worker"]


@in_shares
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("producer", "prefetch", "lengths"), TEARING)
def test_ctrl_c_anywhere_in_the_taking_of_an_item(
    producer: type[Numbers], prefetch: int, lengths: Sequence[int], how: str, share: int
) -> None:
    """Wherever in it a signal handler raises: no item is lost, doubled or out of its turn."""
    with streams(producer, 2, prefetch=prefetch) as s:
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

            hits += first_hits(step, share=share)
        assert hits >= 7 or share  # one place in each share, but perhaps in the last ones


class Wide(Numbers):
    """Its items lie in slots of their own, those of keys too."""

    def item(self, k: int) -> Any:
        return self.number, k, np.zeros(20_000)

    def make(self, key: int) -> Any:
        return -1, key, np.zeros(20_000)


def names_of(items: Iterable[Any]) -> list[Any]:
    """Return the worker and the number of each item."""
    return [item[:2] for item in items]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("verb", ["take", "close"])
def test_a_signal_handler_in_the_taking_of_an_item(verb: str, keyed: bool, prefetch: int) -> None:
    """It may end all, and take and begin nothing."""

    def begin(s: Streams) -> Any:
        if keyed:
            s.begin([0, 0], iter(range(9)))
        else:
            s.begin([4, 5])
        return iter(s)

    def step(countdown: int) -> bool:
        s = both.enter_context(streams(Wide, 2, prefetch=prefetch)) if verb == "close" else shared
        items = begin(s)
        got = names_of([next(items)])

        def handler() -> None:
            assert s.stats().batches >= 1
            if verb == "close":
                s.close()
                return
            for refused in (lambda: next(items), lambda: begin(s)):
                with pytest.raises(RuntimeError, match="in the middle of another call"):
                    refused()

        ends = () if verb == "take" else (InterruptedError,)
        with handled(countdown, *STEPS, by=handler) as struck, contextlib.suppress(*ends):
            got.extend(names_of([next(items)]))
        if verb == "take" or not struck.is_set():
            assert got + names_of(items) == expected
        return struck.is_set()

    with contextlib.ExitStack() as both:
        shared = both.enter_context(streams(Wide, 2, prefetch=prefetch))
        expected = names_of(begin(shared))
        assert first_hits(step, 1 if verb != "close" else 4) > 3
        assert not lost_slots(shared)


class Echoing(Wide):
    """Its items are made of what it is told."""

    told: Any = None

    def begin(self, assignment: Any) -> Any:
        self.told = assignment
        return super().begin(4)

    def make(self, key: Any) -> Any:
        return self.told[0], key, self.told[1]

    def item(self, k: int) -> Any:
        return self.told[0], k, self.told[1]

    def echo(self, value: Any) -> Any:
        return value


@in_shares
@pytest.mark.parametrize("keyed", [False, True])
def test_a_signal_handler_may_call(keyed: bool, share: int) -> None:
    """In the middle of the writing of an assignment or a key, too: each gets what was meant."""
    with streams(Echoing, 2, prefetch=2) as s:

        def begin(tag: str) -> Any:
            told = [(f"{tag}{number}", np.full(30_000, number)) for number in range(2)]
            if keyed:
                s.begin(told, iter((tag, k, "y" * 999) for k in range(6)))
            else:
                s.begin(told)
            return iter(s)

        def step(countdown: int) -> bool:
            def handler() -> None:
                value = "h" * 7000
                assert s.ask("echo", value) == [value, value]

            with handled(countdown, *STEPS, by=handler) as struck:
                items = begin("a")
                got = [next(items)]
            got += items
            for at, (tag, k, data) in enumerate(got):
                assert tag == f"a{at % 2}"
                assert k == (("a", at, "y" * 999) if keyed else at // 2)
                assert np.array_equal(data, np.full(30_000, at % 2))
            assert len(got) == (6 if keyed else 8)
            return struck.is_set()

        assert first_hits(step, share=share) > 30
        assert not lost_slots(s)


@pytest.mark.parametrize(("prefetch", "behind"), [(1, 3), (30, 0), (30, 1)])
def test_ctrl_c_does_not_hide_an_exception(prefetch: int, behind: int) -> None:
    """Wherever a signal handler raises: what the producer has raised comes out, once."""
    with streams(Broken, 2, prefetch=prefetch) as s:
        s.begin([(-1, 500), (-1, 500)])
        assert len(list(s)) == 1000

        def step(countdown: int) -> bool:
            s.begin([(3, 9), (-1, 2)])
            got = [s.next(0)[1] for _ in range(behind)]
            raised: list[BaseException] = []

            def take() -> None:
                try:
                    got.append(s.next(0)[1])
                except TwoArguments as error:
                    raised.append(error)

            with interrupted(countdown, *STEPS) as struck:
                take()
            while not raised:
                take()
            without = [k for k in range(3) if k != behind]
            assert got == [0, 1, 2] or (struck.is_set() and got == without)
            assert next_or_none(s, 0) is None
            assert [item[:2] for item in s] == [(1, 0), (1, 1)]
            return struck.is_set()

        assert first_hits(step) > 2 or behind == 1  # nothing is done for an item that is ready


@in_shares
@pytest.mark.parametrize("prefetch", [1, 30])
def test_ctrl_c_anywhere_in_a_call(prefetch: int, share: int) -> None:
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

        assert first_hits(step, share=share) > 50


class Pausing(Gated):
    """Presses Ctrl-C in a call, and does not come back before it is told to."""

    def pause(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        os.read(self.gate, 1)


@pytest.mark.needs("POSIX")
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
                # Its arguments, and those of the one that waits behind it.
                with pytest.raises(InterruptedError), interrupted_soon(s):
                    s.ask("pid")
                assert testing.slots(s).taken == 2
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


@in_shares
def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch(share: int) -> None:
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

        assert first_hits(step, share=share) > 100


@pytest.mark.needs("fork")
@pytest.mark.parametrize("verb", ["raise", "close"])
def test_a_signal_while_begin_starts_the_workers(verb: str) -> None:
    """Wherever it comes: there is an epoch, or the next call begins one; or all is closed."""
    steps = (*STEPS, "processes/supervisor.py")
    lengths = (4, 5)

    def step(countdown: int) -> bool:
        with streams(Numbers, 2, start_method="fork", launch="begin") as s:

            def handler() -> None:
                if verb == "raise":
                    raise KeyboardInterrupt
                s.close()

            got = None
            with contextlib.suppress(KeyboardInterrupt, OSError):
                with handled(countdown, *steps, by=handler) as struck:
                    s.begin(lengths)
                got = plain(s)
            if verb == "close" and struck.is_set():
                with pytest.raises(OSError, match="closed"):
                    s.begin(lengths)
                return True
            if got is None:
                s.begin(lengths)
                got = plain(s)
            assert got == in_process(lengths)
            return struck.is_set()

    assert first_hits(step, 5) > 5


class Signalling:
    """Calls a function when it is pickled."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        self.function()
        return int, ()


def test_an_epoch_of_keys_cannot_be_begun_while_another_one_is() -> None:
    """As by a signal handler: that is an error there, and the outer call goes on."""

    def begin() -> None:
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            s.begin([0, 0], iter(range(100, 109)))

    with streams(Wide) as s:
        s.begin([Signalling(begin), 0], iter(range(9)))
        assert [key for _, key, _ in s] == list(range(9))
