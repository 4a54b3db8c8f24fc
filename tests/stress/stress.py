"""Random kills and stops of workers, dropped managers and streams, abandoned epochs.

    python tests/stress/stress.py [seconds] [seed]

Every batch is compared with the expectation from its epoch's order and its own generator, and every
item of a stream with the expectation from its place; held ones are compared again later; at the
end, nothing may be left. Signal handlers raise meanwhile. The script prints the seed, and what
happened.
"""

from __future__ import annotations

import gc
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
from typing import Any

import numpy as np
from streams import Alarm, StreamTrial

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import held

import cseq
import cseq.processes.deaths
from cseq import testing
from cseq.indexing.context import generator
from cseq.runs import await_closings

# Chance, not the data, kills here, and may strike the same batch many times.
cseq.processes.deaths.TRIES = 10**9

# The time for objects that were dropped last.
CLOSE_SECONDS = 60.0
# This comes instead of a batch.
END: Any = object()


class Worker:
    """Batches whose content tells everything about how they were made.

    Their arrays are requested (`cseq.empty`) or made normally, and perhaps kept; or a thread fills
    one of them while the previous batch is on its way.
    """

    def __init__(self, rows, microseconds, style):
        self.rows = rows
        self.pause = threading.Event()
        self.seconds = microseconds / 1e6
        self.style = style
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.notes: list[tuple[np.ndarray, threading.Thread]] = []

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


def check(batch, indices, rows):
    """Compare a batch with its expected value."""
    assert np.array_equal(batch["indices"], indices), "wrong samples"
    assert np.array_equal(batch["data"], expected(indices, rows)), "wrong data"
    note = batch.get("note")
    assert note is None or note.min() == note.max(), "an array that a thread has filled has changed"


class Killer(threading.Thread):
    """Kills and stops workers of the current manager at random."""

    def __init__(self, rng, count):
        super().__init__(daemon=True)
        self.rng = rng
        self.count = count
        self.target: Any = None
        self.workers = 0
        self.over = threading.Event()
        # By worker: its process, and whether it is spared.
        self.starts: dict[int, tuple[int, bool]] = {}

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


class Trial:
    """One manager, through some epochs; after `end` (of `time.monotonic`), these are abandoned."""

    def __init__(self, rng, killer, count, alarm, end):
        self.rng = rng
        self.end = end
        self.killer = killer
        self.count = count
        self.alarm = alarm
        self.n = rng.choice([1, 7, 100, 1000, 5000])
        self.batch_size = rng.choice([1, 3, 16, 64])
        self.rows = rng.choice([1, 10, 2000])
        self.seed = rng.randrange(2**32)
        self.ordered = rng.random() < 0.8
        self.processes = rng.random() < 0.8
        self.workers = rng.randint(1, 6)
        self.micros = rng.choice([0, 0, 100, 3000])
        self.style = rng.choice(["empty", "fresh", "keep", "ahead"])
        self.held: list[tuple[dict[str, Any], np.ndarray]] = []

    def manager(self):
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
        )  # fmt: skip

    def run(self):
        m = self.manager()
        m.start()
        if self.processes:
            self.killer.workers = self.workers
            self.killer.target = m
        try:
            for _ in range(self.rng.randint(1, 4)):
                m = self.epoch(m)
        finally:
            self.killer.target = None
        stats = m.stats()
        self.count["restarts"] += stats.restarts
        self.count["retries"] += stats.retries
        self.count["copies"] += stats.copies
        if self.rng.random() < 0.5:
            m.finish()
        del m
        self.look_at_held(all_of_them=True)

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
                return m
        assert seen == set(range(len(m))), "batches are missing"
        self.count["epochs"] += 1
        return m

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
        check(batch, indices, self.rows)
        assert np.array_equal(batch["draw"], generator(self.seed, epoch, start).random(3))
        self.count["batches"] += 1
        if self.rng.random() < 0.05:
            # These are views, not the delivered arrays.
            part = {k: v[...] for k, v in batch.items()}
            self.held.append((part, indices))
            self.count["held"] += 1
        elif self.processes:
            for name in batch.keys() - {"indices", "draw"}:
                # No other holder may see this.
                batch[name][::2] = -1
        if self.rng.random() < 0.02:
            self.look_at_held(all_of_them=False)

    def look_at_held(self, *, all_of_them):
        """Compare held batches again, and release some."""
        for batch, indices in self.held:
            check(batch, indices, self.rows)
        self.held = [] if all_of_them else [h for h in self.held if self.rng.random() < 0.7]


def left_behind():
    """Return what should be gone."""
    gc.collect()
    # Dropped objects end on other threads.
    await_closings(CLOSE_SECONDS)
    gc.collect()
    own = str(os.getpid())
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[1] == own:
            yield f"process {pid} in state {fields[0]}"
    with open("/proc/self/maps") as maps:
        yield from (line.strip() for line in maps if "memfd:cseq" in line)
    yield from (t.name for t in threading.enumerate() if t.name.startswith("cseq"))


def main(seconds, seed):
    """Run trials until the time is up."""
    logging.getLogger("cseq").setLevel(logging.CRITICAL)
    print(f"seed {seed}, {seconds:g} s", flush=True)
    rng, count = random.Random(seed), Counter[str]()
    killer, alarm = Killer(random.Random(seed + 1), count), Alarm(rng, count)
    killer.start()
    descriptors = len(os.listdir("/proc/self/fd"))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if rng.random() < 0.6:
            Trial(rng, killer, count, alarm, end).run()
            count["managers"] += 1
        else:
            StreamTrial(rng, killer, count, alarm, end).run()
            count["streams"] += 1
    killer.over.set()
    killer.join()
    left = list(left_behind())
    assert not left, left
    assert len(os.listdir("/proc/self/fd")) == descriptors, "descriptors are left"
    print(", ".join(f"{number} {what}" for what, number in sorted(count.items())))
    print("nothing was lost, doubled, changed or left behind")


if __name__ == "__main__":
    main(
        float(sys.argv[1]) if len(sys.argv) > 1 else 60.0,
        int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbits(32),
    )
