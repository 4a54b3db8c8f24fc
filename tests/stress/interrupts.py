"""Signal handlers that raise at random times, in every kind of loop.

    python tests/stress/interrupts.py [times] [seed | random] [kind ...]

Each kind of loop runs until it was interrupted the given number of times. Its items are compared
with the expected ones: an item may be missing (lost), come again (doubled), or come elsewhere, in
the wrong epoch or with other contents (misplaced).
"""

import gc
import random
import secrets
import sys
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from stress import Alarm

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "helpers"))

import conftest
import held
from streaming import lost_slots

import cseq
from cseq.stream import Streams

# The int64 numbers of an item that is leased in place; smaller ones are copied.
LARGE = 8400
EPOCHS = 20
# Seconds that a worker may take for a batch of an abandoned epoch.
PATIENCE = 10.0
WRONG = ("lost", "doubled", "misplaced", "slots left")
COLUMNS = ("interrupts", "epochs", "items", *WRONG)


def content(name):
    """Make the content of an item; some are large."""
    return np.full(LARGE if name % 16 == 0 else name % 7 + 1, name, np.int64)


def checked(name, data):
    """Return an item's name, or -1 if its data are wrong."""
    own = np.asarray(data)
    return name if len(own) == len(content(name)) and (own == name).all() else -1


class Loop:
    """A kind of loop. `begin` and `take` are interrupted, and then called again.

    `begin` begins an epoch, and returns the names of its items; `take` returns True at the end;
    `look` is not interrupted, and returns the names of the items that have come. `close` ends all.
    """

    ordered = True

    def __init__(self, rng):
        self.rng, self.epoch = rng, 0
        self.items, self.got, self.found = iter(()), [], []

    def names(self):
        """Choose the names of the next epoch's items, which no other epoch has."""
        self.epoch += 1
        names = [10_000 * self.epoch + k for k in range(self.rng.choice([3, 100, 1000]))]
        self.rng.shuffle(names)
        self.got, self.found = [], []
        return names

    def take(self):
        # In C, no handler runs between an item's arrival and its storage.
        self.got.extend(self.items)
        return True

    def look(self):
        self.found += [self.name(item) for item in self.got]
        self.got = []
        return self.found

    def name(self, item):
        return checked(*item)

    def slots_in_use(self):
        """Return the number of slots that are wrongly in use after an epoch."""
        return 0


class Worker:
    """Returns a batch of its samples, with content from the first one's name."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __getitem__(self, indices):
        if self.seconds:
            time.sleep(self.seconds)
        return indices, content(int(indices[0]))


class Sequence(Loop):
    """An `MSequence`: a batch's name is its place in the epoch."""

    def __init__(self, rng, kind, *, ordered=True):
        super().__init__(rng)
        self.ordered, self.processes = ordered, kind == "proc"
        self.count, self.seed = rng.choice([30, 4000]), rng.randrange(2**32)
        worker, workers = partial(Worker, rng.choice([0, 1e-4])), rng.randint(1, 3)
        self.m = cseq.MSequence(
            worker, self.count, batch_size=4,
            num_workers=workers, buffer=rng.choice([1, 3, 8]), seed=self.seed,
            thread_type="proc" if self.processes else "thread", out_type="null", ordered=ordered,
            **({"start_method": "fork"} if self.processes else {}),
        )  # fmt: skip
        self.m.start_test() if kind == "test" else self.m.start()

    def begin(self):
        self.items = iter(self.m)
        self.got, self.found = [], []
        self.order = cseq.permutation(self.count, self.seed, self.m.epoch)
        self.places = {int(name): place for place, name in enumerate(self.order[::4])}
        return list(range(len(self.m)))

    def name(self, item):
        indices, data = item
        place = self.places.get(int(indices[0]), -1)
        mine = place >= 0 and np.array_equal(indices, self.order[4 * place : 4 * place + 4])
        return place if mine and checked(int(indices[0]), data) >= 0 else -1

    def slots_in_use(self):
        if not self.processes:
            return 0
        slots = held.slots(self.m)
        if slots.leased:
            # An interrupted frame may be in a cycle with its exception.
            gc.collect()
            slots = held.slots(self.m)
        # A worker may still be at work on a batch of an abandoned epoch.
        deadline = time.monotonic() + PATIENCE
        while slots.taken and time.monotonic() < deadline:
            # This frees finished slots; no more batches come.
            next(self.items, None)
            time.sleep(1e-3)
            slots = held.slots(self.m)
        return slots.leased + slots.taken

    def close(self):
        self.m.finish()


class Producer:
    """Makes items from names: of an assignment in turn, or of keys."""

    def __init__(self, seconds, number, num_workers):
        self.seconds, self.number, self.num_workers = seconds, number, num_workers

    def begin(self, names):
        self.names = names[self.number :: self.num_workers]
        return len(names)

    def items(self, start):
        return map(self.make, self.names[start:])

    def make(self, key):
        if self.seconds:
            time.sleep(self.seconds)
        name = int(key if isinstance(key, str) else key[0] if isinstance(key, list) else key)
        return name, content(name)


class Stream(Loop):
    def __init__(self, rng, *, keyed=False, kind="processes", **options):
        super().__init__(rng)
        self.ordered = options.get("ordered", True)
        self.keyed, self.options, self.workers = keyed, options, rng.randint(1, 3)
        self.s = Streams(
            partial(Producer, rng.choice([0, 1e-4])), self.workers,
            prefetch=rng.choice([1, 3, 20]), start_method="fork", kind=kind,
        )  # fmt: skip

    def begin(self):
        names = self.names()
        if self.keyed:
            keys = iter([[n] if n % 3 else str(n) for n in names])
            self.s.begin([[]] * self.workers, keys, **self.options)
        else:
            self.s.begin([names] * self.workers, **self.options)
        self.items = iter(self.s)
        return names

    def slots_in_use(self):
        return len(lost_slots(self.s))

    def close(self):
        self.s.close()


KINDS = {
    "threads": partial(Sequence, kind="thread"),
    "threads unordered": partial(Sequence, kind="thread", ordered=False),
    "processes": partial(Sequence, kind="proc"),
    "processes unordered": partial(Sequence, kind="proc", ordered=False),
    "test mode": partial(Sequence, kind="test"),
    "streams": Stream,
    "streams unordered": partial(Stream, ordered=False),
    "keys": partial(Stream, keyed=True),
    "keys unordered": partial(Stream, keyed=True, ordered=False),
    "keys free": partial(Stream, keyed=True, assign="free"),
    "streams of threads": partial(Stream, kind="threads"),
    "keys of threads": partial(Stream, keyed=True, kind="threads"),
    "keys of threads unordered": partial(Stream, keyed=True, ordered=False, kind="threads"),
    "keys of threads free": partial(Stream, keyed=True, assign="free", kind="threads"),
}


def compare(expected, found, count, *, ordered, over):
    """Count the faults in the items of an epoch; unless it is over, the last may be missing."""
    place = {name: k for k, name in enumerate(expected)}
    places = [place[name] for name in found if name in place]
    upto = max(places, default=-1) + 1 if ordered else 0
    count["items"] += len(found)
    count["lost"] += len(set(range(len(expected) if over else upto)) - set(places))
    count["doubled"] += len(places) - len(set(places))
    count["misplaced"] += len(found) - len(places)
    if ordered:
        count["misplaced"] += sum(after < before for before, after in pairwise(places))


def run_epoch(loop, alarm, count):
    """Run an epoch, or leave it in its middle."""
    expected = []
    while not expected:
        expected = alarm.during(loop.begin, [])
    stop = len(expected) if loop.rng.random() < 0.7 else loop.rng.randrange(len(expected))
    over, found = False, []
    while not over and len(found) <= stop:
        over = alarm.during(loop.take, default=False)
        found = loop.look()
    count["epochs"] += over
    compare(expected, found, count, ordered=loop.ordered, over=over)
    if over:
        count["slots left"] += loop.slots_in_use()


def run_kind(name, times, seed):
    """Run loops of a kind until the given number of interruptions."""
    rng, count = random.Random(f"{seed} {name}"), Counter[str]()
    alarm = Alarm(rng, count, share=0.99)
    while count["interrupts"] < times:
        loop = KINDS[name](rng)
        for _ in range(EPOCHS):
            run_epoch(loop, alarm, count)
        loop.close()
    return count


def main(times, seed, names):
    """Run the kinds, print a line for each, and return the number of faults."""
    print(f"Python {sys.version.split()[0]}, seed {seed}, {times} interrupts of each kind")
    print(f"{'':20}" + "".join(f"{what:>12}" for what in COLUMNS), flush=True)
    sum_of_all, before = Counter[str](), conftest.take_census()
    for name in names:
        count = run_kind(name, times, seed)
        print(f"{name:20}" + "".join(f"{count[what]:12}" for what in COLUMNS), flush=True)
        sum_of_all += count
    print(f"{'all':20}" + "".join(f"{sum_of_all[what]:12}" for what in COLUMNS), flush=True)
    leaks = conftest.settled_leaks(before)
    assert not leaks, leaks.report()
    return sum(sum_of_all[what] for what in WRONG)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    wrong = main(
        int(arguments[0]) if arguments else 10_000,
        secrets.randbits(32) if arguments[1:2] in ([], ["random"]) else int(arguments[1]),
        arguments[2:] or list(KINDS),
    )
    sys.exit(f"{wrong} wrong" if wrong else 0)
