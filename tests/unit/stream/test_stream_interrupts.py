"""Ctrl-C between any two steps of a stream's loop: no item is lost, doubled or misplaced."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from counting import Numbers, in_process, plain, streams
from interrupting import first_hits, handled, in_shares, interrupted
from streaming import STEPS, lost_slots

NEVER = contextlib.nullcontext(threading.Event())


class Reading:
    """Reads an epoch with interruptions, and knows what must still come."""

    def __init__(self, s, producer, lengths):
        self.s = s
        s.begin(lengths)
        self.left = in_process(lengths, producer)
        self.round = iter(s)
        # These exceptions keep the contents of their frames.
        self.held = []

    def take(self, countdown=0, *, hold=False):
        """Take an item; return whether that was interrupted."""
        items = []
        with interrupted(countdown, *STEPS) if countdown else NEVER as struck:
            try:
                items += itertools.islice(self.round, 1)
            except KeyboardInterrupt as error:
                self.held += [error] if hold else []
                raise
        if items:
            assert plain(items) == [self.left.pop(0)]
        else:
            assert struck.is_set() or not self.left
        return struck.is_set()

    def finish(self):
        """Take the rest; no slot may then be lost."""
        while self.left:
            self.take()
        self.take()
        self.held.clear()
        assert not lost_slots(self.s)


class Leased(Numbers):
    """Items just large enough to be leased in place."""

    def item(self, k):
        return self.number, k, np.full(1 << 13, 10 * k + self.number)


TEARING = [(Numbers, 1, (3, 2)), (Numbers, 12, (20, 15)), (Leased, 3, (4, 3))]


@in_shares
@pytest.mark.parametrize(("producer", "prefetch", "lengths"), TEARING)
def test_ctrl_c_anywhere_in_the_taking_of_an_item(producer, prefetch, lengths, share):
    """Wherever a signal handler raises in it, no item is lost, doubled or out of turn."""
    with streams(producer, 2, prefetch=prefetch) as s:
        s.begin([500, 500])
        # From now on, small items come together.
        assert len(list(s)) == 1000

        hits = 0
        for behind in (0, 2, sum(lengths)):

            def step(countdown, behind=behind):
                reading = Reading(s, producer, lengths)
                for _ in range(behind):
                    reading.take()
                hit = reading.take(countdown, hold=countdown % 2 == 0)
                reading.finish()
                return hit

            hits += first_hits(step, share=share)
        # Each share has one place, except perhaps the last ones.
        assert hits >= 7 or share


class Wide(Numbers):
    """Its items have their own slots, even with keys."""

    def item(self, k):
        return self.number, k, np.zeros(20_000)

    def make(self, key):
        return -1, key, np.zeros(20_000)


def names_of(items):
    """Return the worker and the number of each item."""
    return [item[:2] for item in items]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("verb", ["take", "close"])
def test_a_signal_handler_in_the_taking_of_an_item(verb, keyed, prefetch):
    """It may end all, but neither take nor begin anything."""

    def begin(s):
        if keyed:
            s.begin([0, 0], iter(range(9)))
        else:
            s.begin([4, 5])
        return iter(s)

    def step(countdown):
        s = both.enter_context(streams(Wide, 2, prefetch=prefetch)) if verb == "close" else shared
        items = begin(s)
        got = names_of([next(items)])

        def handler():
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


@in_shares
@pytest.mark.parametrize(
    ("kind", "prefetch"), [("processes", 1), ("processes", 30), ("threads", 3)]
)
def test_ctrl_c_anywhere_in_a_call(kind, prefetch, share):
    """Wherever a signal handler raises in `ask`, calls and items continue, and no slot is lost."""
    with streams(num_workers=2, prefetch=prefetch, kind=kind) as s:

        def step(countdown):
            reading = Reading(s, Numbers, [9, 7])
            for _ in range(3):
                reading.take()
            with interrupted(countdown, *STEPS) as struck:
                assert s.ask("add", countdown, 1) == [(w, countdown + 1) for w in (0, 1)]
            reading.take()
            assert s.ask("add", 1, countdown, worker=1) == (1, countdown + 1)
            reading.finish()
            return struck.is_set()

        assert first_hits(step, share=share) > (40 if kind == "processes" else 10)


@in_shares
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch(kind, share):
    """Wherever a signal handler raises in `begin`, the epoch does not exist, or is intact."""
    with streams(prefetch=3, kind=kind) as s:

        def step(countdown):
            s.begin([9, 9])
            next(iter(s))
            with interrupted(countdown, *STEPS) as struck:
                s.begin([6, 5])
            try:
                got = plain(s)
            except InterruptedError:
                assert struck.is_set()
            else:
                before = [in_process([9, 9])[1:]] if struck.is_set() else []
                assert got in [in_process([6, 5]), *before]
            return struck.is_set()

        assert first_hits(step, share=share) > (90 if kind == "processes" else 20)


@pytest.mark.needs("fork")
@pytest.mark.parametrize("verb", ["raise", "close"])
def test_a_signal_while_begin_starts_the_workers(verb):
    """Wherever it comes, the epoch exists, or the next call begins one, or all is closed."""
    steps = (*STEPS, "processes/supervisor.py")
    lengths = (4, 5)

    def step(countdown):
        with streams(Numbers, 2, start_method="fork", launch="begin") as s:

            def handler():
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


def test_an_epoch_of_keys_cannot_be_begun_while_another_one_is():
    """An inner call, as in a signal handler, is an error, and the outer call continues."""

    def keys():
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            s.begin([0, 0], iter(range(100, 109)))
        yield from range(9)

    with streams(Wide) as s:
        s.begin([0, 0], keys())
        assert [key for _, key, _ in s] == list(range(9))
