"""Random kills and stops of workers, dropped managers and streams, abandoned epochs.

    python tests/stress/stress.py [seconds] [seed]

Every batch is compared with the expectation from its epoch's order and its own generator, and every
item of a stream with the expectation from its place; held ones are compared again later; at the
end, nothing may be left. Signal handlers raise meanwhile. The script prints the seed, and what
happened.
"""

import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "helpers"))

import conftest
import held

import cseq
import cseq.processes.deaths
from cseq import testing
from cseq.indexing.context import generator
from cseq.stream import Streams

# This comes instead of a batch.
END = object()


class Killer(threading.Thread):
    """Kills and stops workers of the current manager at random."""

    def __init__(self, rng, count):
        super().__init__(daemon=True)
        self.rng, self.count = rng, count
        self.target, self.workers, self.over = None, 0, threading.Event()
        # By worker: its process, and whether it is spared.
        self.starts = {}

    def run(self):
        while not self.over.wait(self.rng.expovariate(1 / 0.03)):
            running = self.target
            if running is None:
                continue
            worker = self.rng.randrange(self.workers)
            try:
                pid, ready = testing.pids(running)[worker], held.ready(running)[worker]
                if pid is None or (not ready and self.spares(worker, pid)):
                    continue
                if self.rng.random() < 0.6:
                    testing.kill(running, worker)
                    self.count["kills"] += 1
                else:
                    self.stop_for_a_while(pid)
            except RuntimeError:
                # It has already ended.
                continue

    def spares(self, worker, pid):
        """Return whether a process may become ready: nine of ten may, for starts of any length."""
        before, spared = self.starts.get(worker, (None, False))
        if before != pid:
            spared = self.rng.random() < 0.9
            self.starts[worker] = pid, spared
        return spared

    def stop_for_a_while(self, pid):
        """Stop a worker in the middle of its work."""
        try:
            os.kill(pid, signal.SIGSTOP)
            self.over.wait(self.rng.random() * 0.02)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        self.count["stops"] += 1


class Alarm:
    """A signal handler that raises at any time within an interruptible call.

    `share` is the fraction of the calls that get a signal, within a millisecond.
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


class Trial:
    """Some epochs; after `end` (of `time.monotonic`), these are abandoned."""

    processes, last_call = True, "close"

    def __init__(self, rng, killer, count, alarm, end):
        self.rng, self.killer, self.count, self.alarm, self.end = rng, killer, count, alarm, end
        # A batch or item, and what it is compared with.
        self.held = []

    def run(self):
        """Run some epochs, and end in one of several ways."""
        made = self.make()
        if self.processes:
            self.killer.workers = self.workers
            self.killer.target = made
        try:
            for _ in range(self.rng.randint(1, 5)):
                self.epoch(made)
        finally:
            self.killer.target = None
        stats = made.stats()
        for name in ("restarts", "retries", "copies"):
            self.count[name] += getattr(stats, name)
        if self.rng.random() < 0.5:
            getattr(made, self.last_call)()
        del made
        self.look_at_held(all_of_them=True)

    def hold(self, some, of):
        """Hold this one, sometimes; look at all held ones, sometimes. Return whether it is held."""
        is_held = self.rng.random() < 0.05
        if is_held:
            self.held.append((some, of))
            self.count["held"] += 1
        if self.rng.random() < 0.02:
            self.look_at_held(all_of_them=False)
        return is_held

    def look_at_held(self, *, all_of_them):
        """Compare held ones again, and release some."""
        for some, of in self.held:
            self.compare(some, of)
        self.held = [] if all_of_them else [h for h in self.held if self.rng.random() < 0.7]


# -- managers


class Worker:
    """Batches whose content tells everything about how they were made.

    Their arrays are requested (`cseq.empty`) or made normally, and perhaps kept; or a thread fills
    one of them while the previous batch is on its way.
    """

    def __init__(self, rows, microseconds, style):
        self.rows, self.seconds, self.style = rows, microseconds / 1e6, style
        self.pause, self.kept, self.notes = threading.Event(), [], []

    def __getitem__(self, indices):
        if self.seconds:
            self.pause.wait(self.seconds)
        if self.style == "empty":
            rows = int(indices[0]) % self.rows + 1
            data = cseq.empty((rows, len(indices)), np.int64)
            np.multiply(np.arange(1, rows + 1)[:, None], indices, out=data)
        else:
            data = expected(indices, self.rows)
        if self.style == "keep":
            for array, of in self.kept:
                assert np.array_equal(array, expected(of, self.rows)), "a kept array has changed"
            self.kept = [*self.kept[-2:], (data, indices.copy())]
        batch = {"indices": indices, "data": data, "draw": cseq.rng().random(3)}
        if self.style == "ahead":
            batch["note"] = self.take_note(int(indices[0]))
        return batch

    def take_note(self, value):
        """Take the array that a thread has filled, and make it fill the next one."""
        while len(self.notes) < 2:
            make = np.empty if value % 2 else cseq.empty
            note = make((self.rows, 64), np.int64)
            thread = threading.Thread(target=fill, args=(note, value))
            thread.start()
            self.notes.append((note, thread))
        note, thread = self.notes.pop(0)
        thread.join()
        return note


def fill(note, value):
    """Fill an array in some steps."""
    for row in note:
        row[:] = value


def expected(indices, rows):
    """Make the large part of a batch."""
    return np.arange(1, int(indices[0]) % rows + 2)[:, None] * indices


class ManagerTrial(Trial):
    last_call = "finish"

    def __init__(self, rng, *others):
        super().__init__(rng, *others)
        self.n, self.batch_size = rng.choice([1, 7, 100, 1000, 5000]), rng.choice([1, 3, 16, 64])
        self.rows, self.seed = rng.choice([1, 10, 2000]), rng.randrange(2**32)
        self.ordered, self.processes = rng.random() < 0.8, rng.random() < 0.8
        self.workers, self.micros = rng.randint(1, 6), rng.choice([0, 0, 100, 3000])
        self.style = rng.choice(["empty", "fresh", "keep", "ahead"])

    def make(self):
        rng = self.rng
        options = {}
        if self.processes:
            options["start_method"] = rng.choice(["fork"] * 4 + ["forkserver", "spawn"])
        return cseq.MSequence(
            partial(Worker, self.rows, self.micros, self.style), self.n, num_workers=self.workers,
            batch_size=self.batch_size, buffer=rng.choice([1, 2, 5, 16]), seed=self.seed,
            thread_type="proc" if self.processes else "thread", out_type="null",
            ordered=self.ordered, max_restarts=10**9,
            memory_limit=rng.choice([0, 10**6, None]), **options,
        ).start()  # fmt: skip

    def compare(self, batch, indices):
        """Compare a batch with its expected value."""
        data, note = expected(indices, self.rows), batch.get("note")
        assert np.array_equal(batch["indices"], indices), "wrong samples"
        assert np.array_equal(batch["data"], data), "wrong data"
        assert note is None or note.min() == note.max(), "a thread has changed a filled array"

    def epoch(self, m):
        iterator = iter(m)
        epoch = m.epoch
        order = cseq.permutation(self.n, self.seed, epoch).astype(np.int64)
        stop = self.rng.randrange(len(m) * 3 + 1)
        seen = set()
        for number, batch in enumerate(iter(partial(self.take, iterator), END)):
            at = self.place_of(batch, order) if not self.ordered else number
            self.verify(batch, order, epoch, at)
            assert at not in seen, f"batch {at} came twice"
            seen.add(at)
            if number == stop or time.monotonic() > self.end:
                self.count["breaks"] += 1
                return
        assert seen == set(range(len(m))), "batches are missing"
        self.count["epochs"] += 1

    def take(self, iterator):
        """Return the next batch, or END, for any number of signal handlers that raise."""
        hand = [END]

        def step():
            for hand[0] in iterator:
                # No handler runs before it has the batch.
                return True
            return False

        while self.alarm.during(step) is None and hand[0] is END:
            pass
        return hand[0]

    def place_of(self, batch, order):
        """Return the position of this batch in an unordered epoch."""
        return int(np.flatnonzero(order == batch["indices"][0])[0]) // self.batch_size

    def verify(self, batch, order, epoch, at):
        """Compare a batch, and perhaps hold it."""
        start = at * self.batch_size
        indices = order[start : start + self.batch_size]
        self.compare(batch, indices)
        assert np.array_equal(batch["draw"], generator(self.seed, epoch, start).random(3))
        self.count["batches"] += 1
        # Views are held, not the delivered arrays.
        if not self.hold({k: v[...] for k, v in batch.items()}, indices) and self.processes:
            for name in batch.keys() - {"indices", "draw"}:
                # No other holder may see this.
                batch[name][::2] = -1


# -- streams

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


class StreamTrial(Trial):
    def __init__(self, rng, *others):
        super().__init__(rng, *others)
        self.workers, self.sizes = rng.randint(1, 4), rng.choice(list(SIZES))
        self.most = rng.choice([3, 40, 1000]) if self.sizes == "small" else rng.choice([3, 40, 150])

    def make(self):
        rng = self.rng
        return Streams(
            partial(Maker, self.sizes, rng.choice([0, 0, 100, 2000])), self.workers,
            prefetch=rng.choice([1, 2, 10, 64, 300]), max_restarts=10**9,
            start_method=rng.choice(["fork"] * 4 + ["forkserver", "spawn"]),
            memory_limit=rng.choice([0, 10**6, None]),
            kind=rng.choice(["processes"] * 5 + ["threads"]),
        )  # fmt: skip

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
        if not self.hold((*item[:2], item[2][...]), seed):
            # No other holder may see this.
            item[2][...] = -1

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


def main(seconds, seed):
    """Run trials until the time is up."""
    # Chance, not the data, kills here, and may strike the same batch many times.
    cseq.processes.deaths.TRIES = 10**9
    # Objects that were dropped last need some time.
    conftest.GRACE = 60.0
    logging.getLogger("cseq").setLevel(logging.CRITICAL)
    print(f"seed {seed}, {seconds:g} s", flush=True)
    rng, count = random.Random(seed), Counter[str]()
    killer, alarm = Killer(random.Random(seed + 1), count), Alarm(rng, count)
    before, end = conftest.take_census(), time.monotonic() + seconds
    killer.start()
    while time.monotonic() < end:
        kind = ManagerTrial if rng.random() < 0.6 else StreamTrial
        kind(rng, killer, count, alarm, end).run()
        count[kind.__name__] += 1
    killer.over.set()
    killer.join()
    leaks = conftest.settled_leaks(before)
    assert not leaks, leaks.report()
    print(", ".join(f"{number} {what}" for what, number in sorted(count.items())))
    print("nothing was lost, doubled, changed or left behind")


if __name__ == "__main__":
    main(
        float(sys.argv[1]) if len(sys.argv) > 1 else 60.0,
        int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbits(32),
    )
