"""Threads that share managers, iterators, streams and readers' memories, for ThreadSanitizer.

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
from operator import itemgetter
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
SLOT = 4096
# Samples, or items: no epoch of this size comes to its end.
MANY = 10**9


class Echo:
    """Fast enough that the loop's threads compete for ready batches."""

    def __getitem__(self, indices):
        return {"floats": indices}


class Pairs:
    """A separate structure: the indices as floats, and unchanged."""

    def __getitem__(self, indices):
        return indices.astype(np.float32), indices


class Dicts:
    """Another structure, with pickled leaves."""

    def __getitem__(self, indices):
        return {"floats": indices.astype(np.float32), "rest": [indices, "text"]}


class Numbers:
    """A producer: of its assignment's number of items, or of the items of keys."""

    def __init__(self, number, num_workers):
        self.number = number

    def begin(self, length):
        self.length = length
        return self.number

    def items(self, start):
        for k in range(start, self.length):
            yield self.make([self.number, k])

    def make(self, key):
        return tuple(key), np.arange(8.0) + key[-1]

    def which(self):
        return self.number


def started(kind, worker, batches, **options):
    """Start a manager of many batches of four samples."""
    options = {"batch_size": 4, "buffer": 10, "out_type": "null", **options}
    return kind(worker, 4 * batches, **options).start()


def first_of(batch):
    """Return the first number of a batch."""
    return float((batch[0] if isinstance(batch, tuple) else batch["floats"])[0])


def taking(items, taken, name=first_of):
    """Return a function that adds the name of each item that comes."""
    return lambda: taken.extend([name(item) for item in items])


def look(manager, times, *, ordered=True):
    """Read all that any thread may read."""
    for _ in range(times):
        stats = manager.stats()
        assert len(stats.depths) == 3, stats
        assert manager.skipped == []
        if ordered:
            assert manager.state_dict()["seed"] == manager.seed


# -- one iterator, many threads


def share(manager, *, ordered, batches):
    """Let threads take one iterator's batches, and others look at the manager."""
    taken, iterator = [], iter(manager)
    looking = partial(look, manager, batches // 4, ordered=ordered)
    together(*[taking(iterator, taken)] * THREADS, looking)
    assert len(set(taken)) == len(taken) == batches, len(taken)


def share_all(kind, worker, batches):
    """Share managers of one and two workers, in both orders."""
    for workers, ordered in ((1, True), (2, True), (2, False)):
        with started(kind, worker, batches, num_workers=workers, ordered=ordered) as manager:
            for _ in range(2):
                share(manager, ordered=ordered, batches=batches)
            for _ in manager:
                break
            assert sum(1 for _ in manager) == batches


def threads(scale):
    """Share managers whose workers are threads."""
    share_all(cseq.MTSequence, Echo, 10 * scale)
    share_all(cseq.MTSequence, Dicts, scale)


def processes(scale):
    """Share managers whose workers are processes."""
    share_all(cseq.MPSequence, Dicts, 2 * scale)


def inline(scale):
    """Share managers that make a batch in the thread that asks."""
    sequence = cseq.MTSequence(Dicts, 4 * scale, 1, batch_size=4, out_type="null")
    with sequence.start_test() as manager:
        for _ in range(2):
            share(manager, ordered=True, batches=scale)


# -- one manager, many iterators


def reset(scale):
    """Let threads each begin epochs, which ends other threads' epochs."""
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
    """Take what comes; set `begun` with the first; the epoch must not reach its end."""
    try:
        for _ in items:
            begun.set()
    except InterruptedError:
        return
    finally:
        begun.set()
    raise AssertionError("the epoch was not interrupted")


def cut(items, end, look):
    """End an epoch from another thread, while two take and one looks."""
    begun = threading.Event()
    take = partial(take_until_interrupted, items, begun)

    def cut_it():
        begun.wait()
        end()

    together(take, take, cut_it, look)


def closed(scale):
    """Finish a manager, or start it again, in the middle of an epoch."""
    options = {"batch_size": 4, "shuffle": False, "out_type": "null"}
    in_threads, in_processes = cseq.MTSequence, cseq.MPSequence
    for kind, workers, rounds in ((in_threads, 1, 8), (in_threads, 2, 8), (in_processes, 2, 2)):
        manager = kind(Echo, MANY, workers, **options)
        for turn in range(rounds):
            end = manager.start if turn % 2 else manager.finish
            cut(iter(manager.start()), end, partial(look, manager, 10))
            manager.finish()


# -- the memories of readers and plans


def alone(worker, batches):
    """Run epochs of this thread's own manager; another thread drops the batches."""
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
    """Run threads with a manager each: they share the plans, and the reader's memory."""
    together(*[partial(alone, worker, scale) for worker in (Pairs, Pairs, Dicts)])


def readers(scale):
    """Do the same without processes, with more structures than a reader remembers."""

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


def streams(scale, kind="processes"):
    """Let threads take the items of producers, and others look, interrupt and close."""
    workers = 3
    with Streams(Numbers, workers, prefetch=4, kind=kind) as made:
        assert made.ask("which") == list(range(workers))
        every = {(number, k) for number in range(workers) for k in range(scale)}
        for keyed in (False, True, True):
            made.begin([scale] * workers, map(list, sorted(every)) if keyed else None)
            taken, items = [], iter(made)
            together(*[taking(items, taken, itemgetter(0))] * 2, partial(glance, made, scale))
            assert sorted(taken) == sorted(every), len(taken)

        def cut_epoch(end):
            made.begin([MANY] * workers)
            cut(iter(made), end, partial(glance, made, scale))

        for _ in range(3):
            cut_epoch(made.interrupt)
        made.begin([1] * workers)
        assert sum(1 for _ in made) == workers
        cut_epoch(made.close)


def thread_streams(scale):
    """Do the same with threads, as in a DataLoader with worker_method="thread"."""
    streams(10 * scale, "threads")


def glance(made, times):
    """Read all of a stream that any thread may read."""
    for _ in range(times // 4):
        assert made.stats().samples >= 0
        # Threads have no process ids.
        assert len(made.pids()) in (0, made.num_workers)


# -- slots


def owners(scale):
    """Change the owners of slots while another thread frees a dead worker's slots."""
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
    """Kill workers while threads take batches, or items."""
    with started(cseq.MPSequence, Dicts, 4 * scale, num_workers=2) as manager:
        supervisor = manager._run.pool.supervisor

        def kill(owner):
            for _ in range(2):
                await_ready(lambda: supervisor.is_ready(owner))
                supervisor.processes[owner - 1].kill()

        taken, iterator = [], iter(manager)
        takers, killers = [taking(iterator, taken)] * 2, [partial(kill, k) for k in (1, 2)]
        together(*takers, *killers, partial(look, manager, scale))
        assert len(set(taken)) == len(taken) == 4 * scale, len(taken)
    with Streams(Numbers, 2, prefetch=4) as made:
        made.begin([4 * scale] * 2)
        keys, items = [], iter(made)

        def kill_all():
            for pid in filter(None, made.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        takers = [taking(items, keys, itemgetter(0))] * 2
        together(*takers, kill_all, partial(glance, made, scale))
        assert len(set(keys)) == len(keys) == 8 * scale, len(keys)


def await_ready(ready):
    """Wait until a worker is ready, for at most a minute."""
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.001)


SCENARIOS = (threads, inline, reset, closed, readers, owners, processes, plans, streams)
SCENARIOS = {each.__name__: each for each in (*SCENARIOS, thread_streams, deaths)}


def main():
    """Run the scenarios of the command line."""
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
