"""Streams under stress: workers killed and stopped, abandoned epochs, held items, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np

from cseq.stream import Streams

SIZES = {"small": (0, 30), "mixed": (0, 9000), "large": (4000, 200_000)}


def item_of(seed, worker, k, sizes):
    """Make an item, which depends only on its place."""
    least, most = SIZES[sizes]
    mixed = (seed * 1_000_003 + worker * 10_007 + k * 7919) % 1_000_000_007
    size = least + mixed % (most - least)
    return worker, k, np.arange(mixed, mixed + size, dtype=np.int64)


class Maker:
    """Makes a worker's items: as many from a seed as its assignment says."""

    def __init__(self, sizes, microseconds, number, num_workers):
        del num_workers
        self.sizes, self.seconds, self.number = sizes, microseconds / 1e6, number
        self.pause = threading.Event()

    def begin(self, assignment):
        self.seed, lengths = assignment
        self.length = lengths[self.number]
        return self.number, self.length

    def items(self, start):
        for k in range(start, self.length):
            if self.seconds:
                self.pause.wait(self.seconds)
            yield item_of(self.seed, self.number, k, self.sizes)

    def double(self, value):
        return self.number, 2 * value


class Alarm:
    """A signal handler that raises at any time within an interruptible call.

    Parameters
    ----------
    rng, count
    share : float
        The fraction of the calls that get a signal, within a millisecond.
    """

    def __init__(self, rng, count, share=0.1):
        self.rng, self.count, self.share = rng, count, share
        self.armed = False
        signal.signal(signal.SIGALRM, self.strike)

    def strike(self, number, frame):
        """Raise, if a call may be interrupted now."""
        del number, frame
        if self.armed:
            self.armed = False
            self.count["interrupts"] += 1
            raise KeyboardInterrupt

    def during(self, step, default=None):
        """Run a function; if it is interrupted, return the default."""
        if self.rng.random() >= self.share:
            return step()
        signal.setitimer(signal.ITIMER_REAL, 10 ** self.rng.uniform(-6, -3))
        try:
            self.armed = True
            result = step()
            self.armed = False
        except KeyboardInterrupt:
            return default
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return result


class StreamTrial:
    """Streams, through some epochs; after `end` (of `time.monotonic`), these are abandoned."""

    def __init__(self, rng, killer, count, alarm, end):
        self.end = end
        self.rng, self.killer, self.count, self.alarm = rng, killer, count, alarm
        self.workers = rng.randint(1, 4)
        self.sizes = rng.choice(list(SIZES))
        self.most = rng.choice([3, 40, 1000]) if self.sizes == "small" else rng.choice([3, 40, 150])
        # An item, and its epoch's seed.
        self.held: list[tuple[Any, int]] = []

    def streams(self):
        rng = self.rng
        return Streams(
            partial(Maker, self.sizes, rng.choice([0, 0, 100, 2000])), self.workers,
            prefetch=rng.choice([1, 2, 10, 64, 300]), max_restarts=10**9,
            start_method=rng.choice(["fork"] * 4 + ["forkserver", "spawn"]),
            memory_limit=rng.choice([0, 10**6, None]),
            kind=rng.choice(["processes"] * 5 + ["threads"]),
        )  # fmt: skip

    def run(self):
        """Run some epochs, and end in one of several ways."""
        s = self.streams()
        self.killer.workers = self.workers
        self.killer.target = s
        try:
            for _ in range(self.rng.randint(1, 5)):
                self.epoch(s)
        finally:
            self.killer.target = None
        stats = s.stats()
        self.count["restarts"] += stats.restarts
        self.count["retries"] += stats.retries
        self.count["copies"] += stats.copies
        if self.rng.random() < 0.5:
            s.close()
        del s
        self.look_at_held(all_of_them=True)

    def begin(self, s, seed, lengths):
        """Begin an epoch, until that is not interrupted."""
        begun = list(enumerate(lengths))
        while self.alarm.during(lambda: s.begin([(seed, lengths)] * self.workers)) != begun:
            pass

    def epoch(self, s):
        rng = self.rng
        seed = rng.randrange(2**32)
        lengths = [rng.randrange(self.most) for _ in range(self.workers)]
        self.begin(s, seed, lengths)
        self.delivered = [0] * self.workers
        order = [w for k in range(max(lengths)) for w in range(self.workers) if k < lengths[w]]
        step = partial(next, iter(s))
        stop = rng.randrange(len(order) * 3 + 1)
        for number, worker in enumerate(order):
            self.take(s, step, worker, seed)
            if rng.random() < 0.02:
                self.call(s)
            if number == stop or time.monotonic() > self.end:
                self.count["breaks"] += 1
                return
        assert list(s) == [], "there are more items than there should be"
        self.count["epochs"] += 1

    def take(self, s, step, worker, seed):
        """Take an item, retrying until one comes out, and compare it."""
        feed, item, at = s._run.pool.feed, None, self.delivered[worker]
        before = feed.taken
        while feed.taken == before:
            item = self.alarm.during(step)
        assert feed.taken == before + 1
        self.delivered[worker] += 1
        if item is None:
            # It was on its way out, in a frame of this file, when the signal came.
            self.count["items interrupted"] += 1
            return
        self.look_at(item, worker, at, seed)

    def look_at(self, item, worker, at, seed):
        """Compare an item that has come out, and keep it or write to it."""
        self.count["items"] += 1
        assert (item[0], item[1]) == (worker, at), "a wrong item"
        self.compare(item, seed)
        if self.rng.random() < 0.05:
            self.held.append(((*item[:2], item[2][...]), seed))
            self.count["held"] += 1
        else:
            # No other holder may see this.
            item[2][...] = -1
        if self.rng.random() < 0.02:
            self.look_at_held(all_of_them=False)

    def compare(self, item, seed):
        expected = item_of(seed, item[0], item[1], self.sizes)
        assert np.array_equal(item[2], expected[2]), "wrong data"

    def call(self, s):
        value = np.arange(self.rng.randrange(20_000))
        worker = self.rng.choice([None, *range(self.workers)])
        behind = self.rng.random() < 0.3
        ask = partial(s.ask, "double", value, worker=worker, behind=behind)
        replies = self.alarm.during(ask)
        if worker is not None and replies is not None:
            replies = [replies]
        for number, reply in replies or ():
            assert worker in (number, None), "an answer of somebody else"
            assert np.array_equal(reply, 2 * value), "a wrong answer"
        self.count["calls"] += 1

    def look_at_held(self, *, all_of_them):
        """Compare held items again, and release some."""
        for item, seed in self.held:
            self.compare(item, seed)
        self.held = [] if all_of_them else [h for h in self.held if self.rng.random() < 0.7]
