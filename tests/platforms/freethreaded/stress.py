"""Threads that share managers, iterators, streams and what readers remember, for ThreadSanitizer.

python tests/platforms/freethreaded/stress.py [--scale N] [SCENARIO...]

All scenarios by default.
"""

import argparse
import contextlib
import os
import queue
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "helpers"))

from ringing import Trainer, make_ring
from waiting import together

import cseq
from cseq._work import Runner
from cseq.encoding import codec
from cseq.encoding._codec import TicketWriter
from cseq.engine._streams import Request
from cseq.memory._slots import TRAINER, SlotTable
from cseq.memory.arena import Arena
from cseq.memory.descriptors import sparse_file
from cseq.stream import Streams

THREADS = 3
SLOT = 4096  # bytes
MANY = 10**9  # samples, or items: no epoch of so many comes to its end


class Echo:
    """So quick that the loop's threads compete for ready batches."""

    def __getitem__(self, indices):
        """Return what the other classes do."""
        return {"floats": indices}


class Pairs:
    """A structure of its own: the indices as floats, and as they are."""

    def __getitem__(self, indices):
        """Return a pair."""
        return indices.astype(np.float32), indices


class Dicts:
    """Another one, with leaves that go by pickle."""

    def __getitem__(self, indices):
        """Return a dict."""
        return {"floats": indices.astype(np.float32), "rest": [indices, "text"]}


class Numbers:
    """A producer: of its assignment's many items, or of the items of keys."""

    def __init__(self, number, num_workers):
        self.number = number

    def begin(self, length):
        """Begin an epoch."""
        self.length = length
        return self.number

    def items(self, start):
        """Yield a pair of numbers, and some data."""
        for k in range(start, self.length):
            yield self.make([self.number, k])

    def make(self, key):
        """Return the item of a key."""
        return tuple(key), np.arange(8.0) + key[-1]

    def which(self):
        """Answer a call."""
        return self.number


def started(kind, worker, batches, **options):
    """Start a manager of many batches of four samples."""
    options = {"batch_size": 4, "buffer": 10, "out_type": "null", **options}
    return kind(worker, 4 * batches, **options).start()


def first_of(batch):
    """The first number of a batch."""
    return float((batch[0] if isinstance(batch, tuple) else batch["floats"])[0])


def look(manager, times, *, ordered=True):
    """Read what any thread may read."""
    for _ in range(times):
        stats = manager.stats()
        assert len(stats.depths) == 3, stats
        assert manager.skipped == []
        if ordered:
            assert manager.state_dict()["seed"] == manager.seed


# -- one iterator, many threads


def share(manager, *, ordered, batches):
    """Have threads take the batches of one iterator, and others look at the manager."""
    iterator = iter(manager)
    taken = []

    def take():
        taken.extend([first_of(batch) for batch in iterator])

    together(*[take] * THREADS, partial(look, manager, batches // 4, ordered=ordered))
    assert len(set(taken)) == len(taken) == batches, len(taken)


def share_all(kind, worker, batches):
    """Managers of one and two workers, in both orders."""
    for workers, ordered in ((1, True), (2, True), (2, False)):
        with started(kind, worker, batches, num_workers=workers, ordered=ordered) as manager:
            for _ in range(2):
                share(manager, ordered=ordered, batches=batches)
            for _ in manager:
                break  # an epoch that is given up
            assert sum(1 for _ in manager) == batches


def threads(scale):
    """Workers that are threads."""
    share_all(cseq.MTSequence, Echo, 10 * scale)
    share_all(cseq.MTSequence, Dicts, scale)


def processes(scale):
    """Workers that are processes."""
    share_all(cseq.MPSequence, Dicts, 2 * scale)


def inline(scale):
    """Batches that are made by whichever thread asks."""
    sequence = cseq.MTSequence(Dicts, 4 * scale, 1, batch_size=4, out_type="null")
    with sequence.start_test() as manager:
        for _ in range(2):
            share(manager, ordered=True, batches=scale)


# -- one manager, many iterators


def reset(scale):
    """Threads that each begin epochs, which ends those of the others."""
    for kind, workers in ((cseq.MTSequence, 1), (cseq.MTSequence, 2), (cseq.MPSequence, 2)):
        with started(kind, Echo, scale, num_workers=workers) as manager:
            state = manager.state_dict()

            def begin(manager=manager):
                for _ in range(scale // 10):
                    with contextlib.suppress(InterruptedError):
                        for number, _batch in enumerate(manager):
                            if number == scale // 4:
                                break

            def jump(manager=manager, state=state):
                for epoch in range(scale // 20):
                    manager.set_epoch(epoch)
                    look(manager, 2)
                    manager.load_state_dict(state)

            together(begin, begin, jump)
            assert sum(1 for _ in manager) == scale


def take_until_interrupted(items, begun):
    """Take what comes; set `begun` with the first; the epoch must not come to its end."""
    try:
        for _ in items:
            begun.set()
    except InterruptedError:
        return
    finally:
        begun.set()
    raise AssertionError("the epoch was not interrupted")


def closed(scale):
    """A manager that is finished, or started again, in the middle of an epoch."""
    for kind, workers, rounds in (
        (cseq.MTSequence, 1, 8),
        (cseq.MTSequence, 2, 8),
        (cseq.MPSequence, 2, 2),
    ):
        options = {"batch_size": 4, "shuffle": False, "out_type": "null"}
        manager = kind(Echo, MANY, workers, **options)
        for turn in range(rounds):
            iterator = iter(manager.start())
            begun = threading.Event()

            take = partial(take_until_interrupted, iterator, begun)

            def end(begun=begun, turn=turn, manager=manager):
                begun.wait()
                if turn % 2:
                    manager.start()
                else:
                    manager.finish()

            together(take, take, end, partial(look, manager, 10))
            manager.finish()


# -- what readers and plans remember


def alone(worker, batches):
    """Go through epochs of a manager of this thread; another thread drops the batches."""
    handed = queue.SimpleQueue()

    def drop():
        while (found := handed.get()) is not None:
            number, batch = found
            assert first_of(batch) == 4 * number

    dropper = threading.Thread(target=drop)
    dropper.start()
    try:
        with started(cseq.MPSequence, worker, batches, num_workers=1, shuffle=False) as manager:
            for _ in range(3):
                for number, batch in enumerate(manager):
                    floats = batch[0] if worker is Pairs else batch["floats"]
                    assert floats.tolist() == list(range(4 * number, 4 * number + 4))
                    if number % 4 == 0:
                        handed.put((number, batch))
                assert number == batches - 1
    finally:
        handed.put(None)
        dropper.join()


def plans(scale):
    """Threads with a manager each: plans, and what the reader remembers, belong to all of them."""
    together(*[partial(alone, worker, scale) for worker in (Pairs, Pairs, Dicts)])


def readers(scale):
    """The same without processes, with more structures than are remembered."""

    def read():
        file = sparse_file(1 << 16)
        scratch = TicketWriter(file.fd, 1 << 16)
        scratch.room.select(0, 1 << 16)
        held = []
        for turn in range(20 * scale):
            floats = np.arange(16.0) + turn
            batch = [floats] * (turn // 3 % 6) + [{f"{turn % 100}": floats}]
            batch += [(floats, turn)[: 1 + turn % 2]]
            scratch.room.used = 0
            record = scratch.encoder.encode(batch)
            found = codec.decode(scratch.room.memory, record, lambda *_: None)
            assert len(found) == len(batch)
            for array in [*found[:-2], found[-2][f"{turn % 100}"], found[-1][0]]:
                assert (array == floats).all()
            held = [*held[-2:], found]

    together(*[read] * THREADS)


# -- streams


def streams(scale):
    """Several producers in processes."""
    stream_all("processes", scale)


def thread_streams(scale):
    """Several producers in threads, as a DataLoader's worker_method="thread" has them."""
    stream_all("threads", 10 * scale)


def stream_all(kind, scale):
    """Threads take the items of producers, and others look, interrupt and close."""
    workers = 3
    with Streams(Numbers, workers, prefetch=4, kind=kind) as made:
        assert made.ask("which") == list(range(workers))
        every = {(number, k) for number in range(workers) for k in range(scale)}
        for keyed in (False, True, True):
            made.begin([scale] * workers, map(list, sorted(every)) if keyed else None)
            items = iter(made)
            taken = []
            together(
                *[lambda items=items, taken=taken: taken.extend([key for key, _ in items])] * 2,
                partial(glance, made, scale),
            )
            assert sorted(taken) == sorted(every), len(taken)
        for _ in range(3):
            cut(made, scale, made.interrupt)
        made.begin([1] * workers)
        assert sum(1 for _ in made) == workers
        cut(made, scale, made.close)


def glance(made, times):
    """Read what any thread may read of streams."""
    for _ in range(times // 4):
        assert made.stats().samples >= 0
        assert len(made.pids()) in (0, made.num_workers)  # none of threads


def cut(made, scale, end):
    """End an epoch from another thread."""
    made.begin([MANY] * made.num_workers)
    begun = threading.Event()
    take = partial(take_until_interrupted, iter(made), begun)

    def cut_it():
        begun.wait()
        end()

    together(take, take, cut_it, partial(glance, made, scale))


# -- slots


def owners(scale):
    """Slots change owners, while another thread frees those of a dead worker."""
    arena = Arena()
    slots = arena.slots
    ring = make_ring(runners=2)
    arena.rings = [ring]
    trainer = Trainer(ring, 10 * scale, slots=slots)
    over = threading.Event()

    def post():
        try:
            for ticket in range(10 * scale):
                assert trainer.await_batch() == ticket
        finally:
            ring.close()
            over.set()

    def work():
        runner = Runner(ring, 0, 1, last=True)
        mine = SlotTable(arena.fd, arena.width, arena.most, 1)
        kept = -1
        while (claimed := runner.claim()) is not None:
            if not claimed:
                continue
            slot = mine.take()
            mine.resize(slot, SLOT)
            if runner.batch % 3 == 0:
                if kept >= 0:
                    mine.free(kept)
                kept, slot = slot, mine.take()
            runner.publish(0, (8,), SLOT, slot)

    def supervise():
        dead = SlotTable(arena.fd, arena.width, arena.most, 2)
        while not over.is_set():
            dead.take()
            arena.reclaim(2)
            assert 2 not in slots.owners()
            arena.tidy()

    live = {}

    def request():
        me = threading.get_ident()
        while not over.is_set():
            held = Request(slots)
            assert live.setdefault(held.slot, me) == me
            assert slots.owners()[held.slot] == TRAINER
            del live[held.slot]
            del held

    together(post, work, supervise, request, request)


# -- deaths


def deaths(scale):
    """Workers that are killed while threads take batches, or items."""
    with started(cseq.MPSequence, Dicts, 4 * scale, num_workers=2) as manager:
        supervisor = manager._run.pool.supervisor

        def kill(owner):
            for _ in range(2):
                await_ready(lambda: supervisor.is_ready(owner))
                supervisor.processes[owner - 1].kill()

        iterator = iter(manager)
        taken = []

        def take():
            taken.extend([first_of(batch) for batch in iterator])

        together(take, take, partial(kill, 1), partial(kill, 2), partial(look, manager, scale))
        assert len(set(taken)) == len(taken) == 4 * scale, len(taken)
    with Streams(Numbers, 2, prefetch=4) as made:
        made.begin([4 * scale] * 2)
        items = iter(made)
        keys = []

        def kill_one():
            for pid in made.pids():
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        together(
            *[lambda: keys.extend([key for key, _ in items])] * 2,
            kill_one,
            partial(glance, made, scale),
        )
        assert len(set(keys)) == len(keys) == 8 * scale, len(keys)


def await_ready(ready):
    """Wait until a worker is ready, at most a minute."""
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.001)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        threads,
        inline,
        reset,
        closed,
        readers,
        owners,
        processes,
        plans,
        streams,
        thread_streams,
        deaths,
    )
}


def main():
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--scale", type=int, default=100)
    arguments = parser.parse_args()
    for name in arguments.scenarios or SCENARIOS:
        begun = time.monotonic()
        SCENARIOS[name](arguments.scale)
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    main()
