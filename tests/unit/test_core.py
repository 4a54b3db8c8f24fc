"""The core's Python interface, the ring and its runners: what they refuse and keep alive.

The shuffle has its own file. All of this runs a second time with the naps that replace the futex on
systems without one.
"""

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ringing
from ringing import Asked, Trainer, claim, make_ring
from slots import MOST, PAGE, WIDTH, file_of, shared

from cseq import _core
from cseq._core import FIELDS, RangeReader, Ring, Turns, ring_bytes
from cseq._lock import RunState
from cseq._memory import Block, Mapping, address_of
from cseq._work import Runner
from cseq.encoding._codec import Decoder
from cseq.engine._feed import Feed
from cseq.measure.meters import Meters
from cseq.memory._slots import TRAINER, SlotTable
from cseq.memory.arena import Arena
from cseq.order._source import OrderSource
from cseq.stage import GIL_SPIN_NS, LONG_SPIN_NS, SPIN_NS, spin_ns

NAP = os.environ.get("CSEQ_WAIT") == "nap"


def test_a_tickets_journey():
    """After post, claim, publish and take, each side has what the other side gave."""
    ring, whole = make_ring(), ringing.cut(1, 2, first=2**50) | {"start": 2**47}
    trainer = Trainer(ring, source=OrderSource(RangeReader(2**48), 2**63, whole, whole, 0))
    assert trainer.take() is None
    runner = Runner(ring, 0, 2, last=True)
    assert runner.claim() is True
    assert (runner.cell, runner.epoch, runner.batch, runner.start) == (0, 2**63, 2**50, 2**47)
    assert (runner.slot, runner.capacity) == (0xFFFFFFFF, 0)
    indices = runner.indices()
    assert (indices.dtype, indices.tolist()) == (np.int64, [2**47, 2**47 + 1])
    indices[:] = 0
    assert runner.indices().tolist() == [2**47, 2**47 + 1]
    assert indices.tolist() == [0, 0]
    assert trainer.take() is None
    record = tuple(range(2**63, 2**63 + FIELDS))
    runner.publish(0, record, 8192, 6)
    assert trainer.take() == (0, 2**50, 0, 6, 8192, record)
    assert ring.ticket(0) == (2**63, 2**50, 2)
    assert trainer.take() is None


def runner_of(*sizes):
    """Make a runner with a ticket of the given number of indices, followed by more tickets."""
    ring = make_ring(cells=2, size=max(sizes), runners=1)
    full, *rest = sizes
    whole = ringing.cut(1, full) | {"batches": len(sizes), "part_start": full, "part": sum(rest)}
    reader = RangeReader(sum(sizes))
    trainer = Trainer(ring, source=OrderSource(reader, 9, whole, whole, 0))
    assert trainer.feed.ticket == len(sizes)
    return claim(ring)


def test_an_array_of_indices_is_used_again():
    """It is reused if nothing refers to it, and if it is small."""
    runner = runner_of(3, 2)
    first = runner.indices()
    place = id(first)
    first[:] = -1
    del first
    again = runner.indices()
    assert (id(again), again.tolist()) == (place, [0, 1, 2])
    del again
    runner.publish()
    assert runner.claim() is True
    assert runner.indices().shape == (2,)
    large = runner_of(3000)
    # The array may lie in a slot.
    assert sys.getrefcount(large.indices()) == sys.getrefcount(object())


def become(indices, dtype):
    """Make an array another type's, as `pickle` does."""
    indices.__setstate__((1, indices.shape, np.dtype(dtype), False, bytes(indices.nbytes)))


KEEPS = {
    "kept": lambda indices: indices,
    "a view": lambda indices: indices[:0],
    "a buffer": memoryview,
}
USES = KEEPS | {
    "a weak reference": lambda indices: weakref.ref(indices, lambda _: None),
    "read-only": lambda indices: indices.setflags(write=False),
    "a shape": lambda indices: indices.resize((2, 2), refcheck=False),
    "a size": lambda indices: indices.resize(1, refcheck=False),
    "a type": lambda indices: become(indices, "f8"),
    "a byte order": lambda indices: become(indices, ">i8"),
}


@pytest.mark.parametrize("use", USES)
def test_an_array_of_indices_in_use_is_left_alone(use):
    """An array that an indexer keeps, or from which it made another one, is not touched."""
    runner = runner_of(4)
    indices = runner.indices()
    held = USES[use](indices)
    place = address_of(indices)
    if use in KEEPS:
        indices[:] = 7
    del indices
    fresh = runner.indices()
    assert (fresh.tolist(), fresh.dtype, fresh.flags.writeable) == ([0, 1, 2, 3], np.int64, True)
    if use in KEEPS:
        assert address_of(fresh) != place
        assert use == "a view" or list(held) == [7] * 4
    elif use == "a weak reference":
        assert held() is None


def test_two_stages():
    """Between the stages, a record is kept until the second one has published its own."""
    ring = make_ring()
    trainer = Trainer(ring, 1)
    first = claim(ring, last=False)
    assert ring.depths() == (0, 0, 0)
    first.publish(0, (1, 2, 3))
    assert ring.depths() == (0, 1, 0)
    assert trainer.take() is None
    second = claim(ring, 2, stage=1)
    assert second.record == (1, 2, 3, 0)
    assert ring.repost(2) == [second.cell]
    again = claim(ring, 3, stage=1)
    assert again.record == (1, 2, 3, 0)
    again.publish(0, (4,))
    assert ring.depths() == (0, 0, 1)
    assert trainer.take() == (0, 0, 0, 0xFFFFFFFF, 0, (4, 0, 0, 0))


def test_a_status_skips_the_second_stage():
    """A failure goes to the trainer; so does a ticket reposted with a status."""
    ring = make_ring()
    trainer = Trainer(ring, 1)
    claim(ring, 1, last=False).publish(1, (5,))
    assert trainer.take() == (0, 0, 1, 0xFFFFFFFF, 0, (5, 0, 0, 0))
    ring = make_ring()
    trainer = Trainer(ring, 2)
    claim(ring, 1)
    assert ring.repost(1, 1) == [0]
    assert trainer.take() == (0, 0, 1, 0xFFFFFFFF, 0, (0,) * FIELDS)
    assert claim(ring).batch == 1


def test_what_a_dead_runner_held():
    """`held` and `repost` know a runner's tickets, which are posted again, oldest first."""
    ring = make_ring()
    trainer = Trainer(ring, 3)
    cells = [claim(ring, owner).cell for owner in (1, 1, 2)]
    assert (ring.held(1), ring.held(2), ring.held(3)) == (cells[:2], cells[2:], [])
    owner, since = ring.holder(cells[0])
    assert owner == 1
    assert 0 < since <= _core.now_ns()
    assert sorted(ring.repost(1)) == cells[:2]
    assert ring.repost(1) == []
    assert ring.holder(cells[0]) == (0, 0)
    runners = [claim(ring, 3) for _ in range(2)]
    assert [runner.batch for runner in runners] == [0, 1]
    for runner in runners:
        runner.publish()
    assert [trainer.batch() for _ in range(3)] == [0, 1, None]


def test_what_a_dead_worker_owned():
    """Its slots are freed, except for published tickets; other workers' slots stay."""
    arena = Arena()
    ring = make_ring()
    arena.rings = [ring]
    workers = [SlotTable(arena.fd, arena.width, arena.most, owner) for owner in (1, 2)]
    trainer = Trainer(ring, 3, slots=arena.slots)
    published, working, other = workers[0].take(), workers[0].take(), workers[1].take()
    claim(ring, 1).publish(slot=published)
    runner = claim(ring, 1)
    assert ring.slots() == {published}
    arena.reclaim(1)
    assert arena.slots.owners()[1:5] == [1, 0, 2, 0]
    assert working == 2
    assert ring.left_in(runner.cell)[2] == 0xFFFFFFFF
    assert trainer.take() == (0, 0, 0, published, 0, (0,) * FIELDS)
    assert arena.slots.take() == published
    arena.reclaim(1)
    arena.reclaim(2)
    assert arena.slots.owners()[1:5] == [TRAINER, 0, 0, 0]
    assert other == 3
    arena.close()


def test_a_slot_that_a_converter_frees():
    """A batch that has left its slot comes without one."""
    ring = make_ring()
    file, slots = shared()
    trainer = Trainer(ring, 1, slots=slots)
    slot = SlotTable(file.fd, WIDTH, MOST, 1).take()
    claim(ring, last=False).publish(slot=slot)
    second = claim(ring, 2, 1)
    slots.free_cell(second.ring, second.cell)
    assert slots.owners()[slot] == 0
    second.publish()
    assert trainer.take() == (0, 0, 0, 0xFFFFFFFF, 0, (0,) * FIELDS)


def test_a_claim_of_nothing():
    """It returns after a while, and counts the time; closing ends all claims."""
    ring = make_ring()
    assert Runner(ring, 0, 2, last=True).claim() is False
    waited = Meters.read_rings([ring]).runners["wait"]["sum"]
    assert waited[1] > waited[0] == 0
    claims = iter(Runner(ring, 0, 1, last=True).claim, None)
    with ThreadPoolExecutor() as pool:
        results = pool.submit(list, claims)
        assert not ring.closed
        ring.close()
    assert ring.closed
    assert True not in results.result()
    Trainer(ring, 1)
    assert Runner(ring, 0, 2, last=True).claim() is None


def test_waiting_for_a_ticket():
    """The trainer sleeps until a ticket is ready: of thousands, it misses none."""
    ring, total = make_ring(), 300 if NAP else 3000
    ring.wake_at = 1
    trainer = Trainer(ring, total)
    with serving(ring, 1, 2):
        assert [trainer.await_batch() for _ in range(total)] == list(range(total))
    meters = Meters.read_rings([ring])
    assert meters.runners["batches"].sum() == total
    assert meters.loop["wait"]["sum"] > 0


def test_a_notification_ends_a_wait():
    """It is counted, so a thread that read the number before neither sleeps nor spins."""
    ring = make_ring()
    feed = Trainer(ring, 1).feed
    for notify in (ring.notify_all, ring.close, lambda: ring.repost(1)):
        seen = feed.notices()
        notify()
        assert feed.notices() != seen
        feed.wait(seen)
    ring = make_ring()
    ring.set_spin(LONG)
    feed = Trainer(ring, 1).feed
    seen = feed.notices()
    ring.notify_all()
    feed.wait(seen)
    assert Meters.read_rings([ring]).loop["waited"] < LONG


def rings_in_one_memory(count):
    """Make rings in one memory, and return the memory, too, with the size of each."""
    nbytes = -(-ring_bytes(4, 2, 1) // 128) * 128
    memory = Block(count * nbytes, zero=True)
    return [Ring(memory, 4, 2, 1, 1, at=k * nbytes) for k in range(count)], memory, nbytes


def test_rings_in_one_memory():
    """Each has its own tickets; the trainer waits for all of them at one gate."""
    rings, memory, nbytes = rings_in_one_memory(3)
    attached = [Ring(memory, at=k * nbytes) for k in range(3)]
    trainers, cells = [Trainer(ring, 1) for ring in rings], [(0, 0), (1, 0), (2, 0)]
    feed = Feed(RunState(), rings, Decoder(), Asked())
    seen = feed.notices()
    attached[2].notify_all()
    assert {trainer.feed.notices() for trainer in trainers} == {seen + 1}
    feed.wait(seen, cells)
    for k in (2, 0, 1):
        claim(attached[k]).publish()
        feed.wait(feed.notices(), cells[k:])
        assert trainers[k].batch() == 0
    for wrong in (lambda: Ring(memory, 4, 2, 1, at=3 * nbytes), lambda: Ring(memory, at=-1)):
        with pytest.raises((ValueError, IndexError)):
            wrong()


def test_several_tickets_are_waited_for():
    """Publishing one of them wakes the sleeper."""
    rings, _, _ = rings_in_one_memory(2)
    trainers = [Trainer(ring, 300) for ring in rings]
    feed = Feed(RunState(), rings, Decoder(), Asked())
    rng = random.Random(4)
    for turn in range(300):
        runners = [claim(ring) for ring in rings]
        awaited = [(k, runner.cell) for k, runner in enumerate(runners)]
        chosen = rng.randrange(2)
        publisher = threading.Thread(target=runners[chosen].publish)
        publisher.start()
        while rings[chosen].depths()[2] == 0:
            seen = feed.notices()
            feed.wait(seen, awaited)
        publisher.join()
        runners[1 - chosen].publish()
        assert [trainer.batch() for trainer in trainers] == [turn, turn]


def test_a_ring_keeps_its_memory():
    """Indices, runners and the ring keep the memory that they lie in."""
    ring = make_ring()
    room, runner = ring.indices(0), Runner(ring, 0, 1, last=True)
    assert room.shape == (2,)
    del ring
    gc.collect()
    room[:] = 4
    assert runner.ring.indices(0).tolist() == [4, 4]


# In ns; no turn here takes nearly as long.
LONG = 4_000_000_000


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_nobody_looks_on_a_single_core(monkeypatch, cores):
    """A thread that looks at the ring before it sleeps needs a core that the others do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert spin_ns(1) == {1: 0}.get(cores, LONG_SPIN_NS)
    assert spin_ns(2) == {1: 0, 2: SPIN_NS}.get(cores, LONG_SPIN_NS)
    assert spin_ns(1, turns=True) == (GIL_SPIN_NS if cores > 1 else 0)


@contextmanager
def serving(ring, *owners):
    """Run threads that publish all they can claim."""

    def serve(owner):
        runner = Runner(ring, 0, owner, last=True)
        while runner.claim() is not None:
            if runner.cell >= 0:
                runner.publish()

    threads = [threading.Thread(target=serve, args=(owner,)) for owner in owners or (1,)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ring.close()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("pool", ["threads", "threads in turns", "processes"])
def test_threads_wait_for_each_other_awake(pool):
    """Trainer and runner spin where they would otherwise sleep, and wake each other."""
    ring = make_ring(cells=2, runners=1)
    if pool == "processes":
        with file_of(PAGE) as fd:
            ring = Ring(Mapping(fd, 0, PAGE), 2, 2, 1)
    ring.set_spin(LONG, pool == "threads in turns")
    with serving(ring):
        trainer = Trainer(ring, 100)
        assert [trainer.await_batch() for _ in range(100)] == list(range(100))
        assert Meters.read_rings([ring]).runners["wait"]["sum"] == 0
        assert trainer.sleeps == 0


def test_a_turn_begins_when_the_other_one_waits():
    """A spinning runner leaves tickets alone while the trainer does other work.

    The exception is a runner that has just seen it wait, and is delayed before it claims.
    """
    ring = make_ring(cells=1, runners=1)
    ring.set_spin(LONG, 1)
    alone = 0
    with serving(ring):
        trainer = Trainer(ring, 41)
        # Each batch returns when the next one is posted.
        for batch in range(40):
            assert trainer.await_batch() == batch
            alone += all(ring.depths() == (1, 0, 0) for _ in range(1000))
    assert alone > 20


def test_the_trainer_goes_on_when_the_crew_waits():
    """Its batch is ready, but a runner works: it continues once that runner waits, too."""
    ring = make_ring(cells=2, runners=1)
    ring.set_spin(LONG, 1)
    runner, trainer = Runner(ring, 0, 1, last=True), Trainer(ring, 1)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(trainer.await_batch()))
    thread.start()
    assert runner.claim()
    runner.publish()
    time.sleep(0.05)
    assert not waited
    other = threading.Thread(target=runner.claim)
    other.start()
    thread.join()
    assert waited == [0]
    assert Meters.read_rings([ring]).loop["start"] < LONG
    ring.close()
    other.join()


@pytest.mark.parametrize("crew", [0, 2])
def test_turns_that_never_come(crew):
    """Spinning in vain changes nothing: sleepers are woken, and everything is delivered."""
    # The other runner is never parked.
    ring = make_ring(cells=2, runners=2)
    ring.set_spin(1000, crew)
    ring.wake_at = 3
    with serving(ring):
        trainer = Trainer(ring, 600)
        assert [trainer.await_batch() for _ in range(600)] == list(range(600))


BAD_RINGS = [
    lambda: Ring(Block(10), 4, 2, 3),
    lambda: Ring(Block(ring_bytes(4, 2, 3) - 1, zero=True), 4, 2, 3),
    lambda: Ring(Block(10**7, zero=True), 4, 2, 70_000),
    lambda: Ring(Block(10)),
    lambda: Ring(Block(10**5, zero=True)),
    lambda: Runner(make_ring(), 2, 1, last=True),
    lambda: Runner(make_ring(), 0, 0, last=True),
    lambda: Runner(make_ring(), 0, 4, last=True),
    lambda: make_ring(cells=5, runners=1, calls=5),
    lambda: make_ring(cells=5, runners=2, calls=1),
]


@pytest.mark.parametrize("make", BAD_RINGS)
def test_bad_rings(make):
    """Rings that do not fit, unknown owners and stages, and too large tickets are refused."""
    with pytest.raises(ValueError, match=r"\d|not contain a ring"):
        make()


def test_bad_cells():
    """Unknown cells are refused everywhere."""
    ring = make_ring(cells=4)
    for use in (ring.indices, ring.holder, ring.ticket):
        with pytest.raises(IndexError, match="cell 4"):
            use(4)
        with pytest.raises(OverflowError):
            use(-1)
    for make in (lambda: Ring(None), lambda: Runner(None, 0, 1, last=True)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            make()


def test_a_runner_has_one_ticket():
    """A second claim before the publish is refused, as is any operation without a ticket."""
    ring = make_ring()
    Trainer(ring, 2)
    runner = claim(ring)
    with pytest.raises(RuntimeError, match="has not been published"):
        runner.claim()
    runner.publish()
    for use in (runner.publish, runner.indices, lambda: runner.batch, lambda: runner.record):
        with pytest.raises(RuntimeError, match="no ticket"):
            use()
    runner = claim(ring)
    for record in ((0,) * (FIELDS + 1), [1], None):
        # A record is a tuple of a few numbers.
        with pytest.raises(ValueError, match="record"):
            runner.publish(0, record)


def test_turns_are_kept_while_they_are_quicker():
    """The trainer measures 64 batches both ways, and tries the slower way more and more rarely."""

    def measured(cost, share=1.0):
        """Take 64 batches of the given time in ns; return whether threads then take turns."""
        clock[0] += 64 * cost
        clock[1] += 64
        turns.learn(clock[0] - int(64 * cost * share), clock[0], clock[1])
        return bool(turns.on)

    turns = Turns(8)
    clock = [10**12, 0]
    turns.learn(clock[0], clock[0], 0)
    # Turns win.
    assert [measured(1000), measured(800), measured(800)] == [True, True, True]
    # The other way loses.
    assert [measured(800), measured(1000)] == [False, True]
    assert [measured(800) for _ in range(2)] == [True] * 2
    # The other way is tried until it wins.
    assert [measured(800), measured(700)] == [False, False]
    # Batches that take 8 ms in a thread cause no trial.
    assert [measured(10**6) for _ in range(9)] == [False] * 9
    # The loop takes longer.
    assert [measured(700, share=0.4) for _ in range(9)] == [False] * 9
    assert (measured(700), turns.holder) == (True, 0)


@pytest.mark.skipif(NAP, reason="this is that run")
def test_all_this_with_naps():
    """Without the futex, naps serve: every test of this file passes with them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", __file__,
         "-k", "wait or claim or clos or notif or order or stage or any_history"],
        env=os.environ
        | {"CSEQ_WAIT": "nap", "PYTHONPATH": str(Path(_core.__file__).parents[1])},
        # No other cseq is in this folder, if the tested one is a wheel's.
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.skipif(NAP, reason="this is that run")
def test_a_sequence_with_naps(run_script):
    """Pools give the same stream with naps as with the futex."""
    done = run_script(
        "import cseq, numpy as np\n"
        "for make in cseq.MTSequence, cseq.MPSequence:\n"
        "    m = make(np.arange(100) * 2, 100, 2, batch_size=3, out_type='null', seed=1)\n"
        "    want = (cseq.permutation(100, 1).astype(int) * 2).tolist()\n"
        "    with m.start() as s:\n"
        "        assert [int(i) for b in s for i in b] == want\n"
        "print('same')",
        CSEQ_WAIT="nap",
    )
    assert (done.stdout, done.stderr) == ("same\n", "")
