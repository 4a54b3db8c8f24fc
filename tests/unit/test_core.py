"""The core's door: the ring and its runners, in Python; what they refuse, and what they keep alive.

The shuffle has a file of its own. All of this runs a second time with the naps that stand in for
the futex on systems that have none.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ringing
from ringing import claim, make_ring
from slots import PAGE, file_of

from cseq import _core, _feed
from cseq._core import FIELDS, PARK_NS, Ring, now_ns, ring_bytes
from cseq._memory import TRAINER, Block, Mapping, Slots, address_of
from cseq._work import Runner
from cseq.measure.meters import Meters
from cseq.memory.arena import Arena
from cseq.stage import MOST_SPIN_NS, SPIN_NS, spin_ns, spins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAP = os.environ.get("CSEQ_WAIT") == "nap"


# -- the ring


def post(ring: Ring, *batches: int) -> list[int]:
    """Post tickets; their number and index are made from the batch's number."""
    cells = []
    for batch in batches:
        cell = ringing.vacant(ring)
        ring.indices(cell)[0] = batch
        ringing.post(ring, cell, batch, 9, batch, 1, start=batch)
        cells.append(cell)
    return cells


def take(ring: Ring, *, ordered: bool = True) -> int | None:
    """Take a ticket: the number of its batch."""
    taken = ringing.take(ring, ordered=ordered)
    return None if taken is None else ring.ticket(taken[0])[1]


def test_a_tickets_journey() -> None:
    """post, claim, publish, take: all that was given on one side is there on the other."""
    ring = make_ring()
    cell = ringing.vacant(ring)
    ring.indices(cell)[:] = 7, -1
    ringing.post(ring, cell, 3, 2**63, 2**50, 2, start=2**47)
    assert ringing.take(ring) is None
    runner = Runner(ring, 0, 2, last=True)
    assert runner.claim() is True
    assert (runner.cell, runner.epoch, runner.batch, runner.start) == (cell, 2**63, 2**50, 2**47)
    assert (runner.slot, runner.capacity) == (0xFFFFFFFF, 0)
    indices = runner.indices()
    assert (indices.dtype, indices.tolist()) == (np.int64, [7, -1])
    indices[:] = 0
    assert runner.indices().tolist() == [7, -1]
    assert indices.tolist() == [0, 0]
    assert ringing.take(ring) is None
    record = tuple(range(2**63, 2**63 + FIELDS))
    runner.publish(0, record, 8192, 6)
    assert ringing.take(ring) == (cell, 0, 6, 8192, record)
    assert ring.ticket(cell) == (2**63, 2**50, 2)
    assert ringing.take(ring) is None


def test_the_stamps_of_a_ticket() -> None:
    """Claimed and published by each stage; what a stage has not begun is 0."""
    ring = make_ring()
    begun = now_ns()
    (cell,) = post(ring, 1)
    indexer, converter = Runner(ring, 0, 1, last=False), Runner(ring, 1, 2, last=True)
    assert (ring.stamps(cell)[0][0], ring.holder(cell)) == (0, (0, 0))
    assert indexer.claim()
    assert ring.holder(cell) == (1, ring.stamps(cell)[0][0])
    indexer.publish()
    assert ring.stamps(cell)[1][0] == 0
    assert converter.claim()
    assert ring.holder(cell) == (2, ring.stamps(cell)[1][0])
    assert ring.repost(2) == [cell]
    assert ring.stamps(cell)[1][0] == 0  # its stage begins anew, and the one before does not
    converter = Runner(ring, 1, 2, last=True)
    assert converter.claim()
    converter.publish()
    indexed, converted = ring.stamps(cell)
    times = [begun, *indexed, *converted, now_ns()]
    assert times == sorted(times)
    ringing.take(ring)
    assert ring.stamps(cell) == (indexed, converted)
    ringing.post(ring, cell, 2, 9, 2, 1)
    assert [started for started, _ in ring.stamps(cell)] == [0, 0]


def runner_of(count: int) -> Runner:
    """Make a runner with a ticket of so many indices."""
    ring = Ring(Block(ring_bytes(2, count, 1), zero=True), 2, count, 1)
    ring.indices(0)[:] = range(count)
    ringing.post(ring, 0, 0, 0, 0, count)
    return claim(ring)


def test_an_array_of_indices_is_used_again() -> None:
    """Where nothing refers to the one before, and it is small."""
    runner = runner_of(3)
    first = runner.indices()
    place = id(first)
    first[:] = -1
    del first
    again = runner.indices()
    assert (id(again), again.tolist()) == (place, [0, 1, 2])
    del again
    ring = runner.ring
    runner.publish()
    ringing.take(ring)
    ringing.post(ring, 1, 1, 0, 1, 2)  # of another length
    assert runner.claim() is True
    assert runner.indices().shape == (2,)
    large = runner_of(3000)
    assert sys.getrefcount(large.indices()) == sys.getrefcount(object())  # it may lie in a slot


def become(indices: Any, dtype: str) -> None:
    """Have an array become one of another type, as `pickle` does."""
    indices.__setstate__((1, indices.shape, np.dtype(dtype), False, bytes(indices.nbytes)))


USES: dict[str, Callable[[Any], Any]] = {
    "kept": lambda indices: indices,
    "a view": lambda indices: indices[:0],
    "a buffer": memoryview,
    "a weak reference": lambda indices: weakref.ref(indices, lambda _: None),
    "read-only": lambda indices: indices.setflags(write=False),
    "a shape": lambda indices: indices.resize((2, 2), refcheck=False),
    "a size": lambda indices: indices.resize(1, refcheck=False),
    "a type": lambda indices: become(indices, "f8"),
    "a byte order": lambda indices: become(indices, ">i8"),
}


@pytest.mark.parametrize("use", USES)
def test_an_array_of_indices_in_use_is_left_alone(use: str) -> None:
    """What an indexer keeps, or has made of an array, is not touched."""
    runner = runner_of(4)
    indices = runner.indices()
    held = USES[use](indices)
    place = address_of(indices)
    if use in ("kept", "a view", "a buffer"):
        indices[:] = 7
    del indices
    fresh = runner.indices()
    assert (fresh.tolist(), fresh.dtype, fresh.flags.writeable) == ([0, 1, 2, 3], np.int64, True)
    if use in ("kept", "a view", "a buffer"):
        assert address_of(fresh) != place
        assert use == "a view" or list(held) == [7] * 4
    elif use == "a weak reference":
        assert held() is None


def test_ticket_order_and_order_of_completion() -> None:
    """Ordered, tickets come out as they were posted; unordered, as soon as they are ready."""
    for ordered in (True, False):
        ring = make_ring()
        post(ring, 1, 2, 3)
        runners = [claim(ring, owner) for owner in (1, 2, 3)]
        assert [runner.batch for runner in runners] == [1, 2, 3]
        runners[2].publish()
        assert take(ring, ordered=ordered) == (None if ordered else 3)
        runners[0].publish()
        assert take(ring, ordered=ordered) == 1
        runners[1].publish()
        assert take(ring, ordered=ordered) == 2
        assert take(ring, ordered=ordered) == (3 if ordered else None)


def test_two_stages() -> None:
    """Between the stages a record is kept until the second one has published its own."""
    ring = make_ring()
    post(ring, 1)
    first = Runner(ring, 0, 1, last=False)
    assert first.claim()
    assert ring.depths() == (0, 0, 0)
    first.publish(0, (1, 2, 3))
    assert ring.depths() == (0, 1, 0)
    assert ringing.take(ring) is None
    second = claim(ring, 2, stage=1)
    assert second.record == (1, 2, 3, 0)
    assert ring.repost(2) == [second.cell]
    again = claim(ring, 3, stage=1)
    assert again.record == (1, 2, 3, 0)
    again.publish(0, (4,))
    assert ring.depths() == (0, 0, 1)
    taken = ringing.take(ring)
    assert taken is not None
    assert taken[4] == (4, 0, 0, 0)


def test_a_failure_skips_the_second_stage() -> None:
    """A status other than 0 goes straight to the trainer."""
    ring = make_ring()
    post(ring, 1)
    first = Runner(ring, 0, 1, last=False)
    assert first.claim()
    first.publish(1, (5,))
    taken = ringing.take(ring)
    assert taken is not None
    assert (taken[1], taken[4][0]) == (1, 5)


def test_a_full_ring() -> None:
    """A ring has its cells and no more; a cell is free again when its ticket was taken."""
    ring = make_ring(cells=2)
    assert ring.capacity == 2
    cells = post(ring, 1, 2)
    assert (ringing.vacant(ring), ring.outstanding) == (-1, 2)
    claim(ring).publish()
    assert take(ring) == 1
    assert ringing.vacant(ring) == cells[0]


def test_a_queue() -> None:
    """Its runner claims in the order of the cells, also after a death; the last ones come first."""
    ring = make_ring(cells=5, runners=1, calls=2)
    for cell in (0, 2):  # the runner waits for cell 1, whatever is behind it
        ringing.post(ring, cell, cell, 9, cell, 1)
    assert claim(ring).cell == 0
    idle = Runner(ring, 0, 1, last=True)
    idle.park = 0
    assert idle.claim() is False
    ringing.post(ring, 1, 1, 9, 1, 1)
    assert claim(ring).cell == 1
    assert ring.repost(1) == [0, 1]
    assert claim(ring).cell == 0
    ringing.post(ring, 4, 4, 9, 4, 1)
    assert [claim(ring).cell for _ in range(3)] == [4, 1, 2]
    for runners, calls in ((1, 5), (2, 1)):
        with pytest.raises(ValueError, match="a queue has one runner"):
            make_ring(cells=5, runners=runners, calls=calls)


def test_a_ticket_that_is_given_up() -> None:
    """It is published with a status, in no slot; a queue goes on behind it."""
    ring = make_ring(cells=5, runners=1, calls=2)
    for cell in range(2):
        ringing.post(ring, cell, cell, 9, cell, 1)
    assert claim(ring).cell == 0
    assert ring.repost(1, 1) == [0]
    assert ring.peek(0, 0)[:2] == (1, 0xFFFFFFFF)
    assert claim(ring).cell == 1


def test_what_a_dead_runner_held() -> None:
    """`held` and `repost` know what a runner works on; it is posted again, oldest first."""
    ring = make_ring()
    post(ring, 1, 2, 3)
    cells = [claim(ring, owner).cell for owner in (1, 1, 2)]
    assert (ring.held(1), ring.held(2), ring.held(3)) == (cells[:2], cells[2:], [])
    owner, since = ring.holder(cells[0])
    assert owner == 1
    assert 0 < since <= _core.now_ns()
    assert sorted(ring.repost(1)) == cells[:2]
    assert ring.repost(1) == []
    assert ring.holder(cells[0]) == (0, 0)
    runners = [claim(ring, 3) for _ in range(2)]
    assert [runner.batch for runner in runners] == [1, 2]
    for runner in runners:
        runner.publish()
    assert [take(ring), take(ring), take(ring)] == [1, 2, None]


def test_what_a_dead_worker_owned() -> None:
    """Its slots are freed, but those of its published tickets and of other workers."""
    arena = Arena()
    ring = make_ring()
    arena.rings = [ring]
    workers = [Slots(arena.fd, arena.width, arena.most, owner) for owner in (1, 2)]
    cells = post(ring, 1, 2, 3)
    published, working, other = workers[0].take(), workers[0].take(), workers[1].take()
    claim(ring, 1).publish(slot=published)
    runner = claim(ring, 1)
    assert ring.slots() == {published}
    arena.reclaim(1)
    assert arena.slots.owners()[1:5] == [1, 0, 2, 0]
    assert working == 2
    assert ring.left_in(runner.cell)[2] == 0xFFFFFFFF
    arena.slots.adopt(published, 0)
    assert ringing.take(ring) == (cells[0], 0, published, 0, (0,) * FIELDS)
    arena.reclaim(1)
    arena.reclaim(2)
    assert arena.slots.owners()[1:5] == [TRAINER, 0, 0, 0]
    assert other == 3
    arena.close()


def test_a_detached_slot() -> None:
    """A batch that has left its slot comes out without one."""
    ring = make_ring()
    post(ring, 1)
    runner = claim(ring)
    runner.detach()
    runner.publish()
    taken = ringing.take(ring)
    assert taken is not None
    assert taken[2] == 0xFFFFFFFF


def test_nothing_to_claim() -> None:
    """A claim with nothing to claim comes back after a while, and counts the time."""
    ring = make_ring()
    runner = Runner(ring, 0, 2, last=True)
    assert runner.claim() is False
    assert Meters.read([ring]).runners["wait"]["sum"][1] > 0
    assert Meters.read([ring]).runners["wait"]["sum"][0] == 0


def test_a_closed_ring() -> None:
    """Closing ends claims, also one that another thread waits in, and wakes the trainer."""
    ring = make_ring()
    results: list[bool | None] = []

    def run() -> None:
        runner = Runner(ring, 0, 1, last=True)
        while (result := runner.claim()) is not None:
            results.append(result)

    thread = threading.Thread(target=run)
    thread.start()
    assert not ring.closed
    ring.close()
    thread.join()
    assert ring.closed
    assert True not in results
    post(ring, 1)
    assert Runner(ring, 0, 2, last=True).claim() is None


def test_waiting_for_a_ticket() -> None:
    """The trainer sleeps until a ticket is ready: thousands of times, none is missed."""
    ring = make_ring()
    ring.wake_at = 1

    def run(owner: int) -> None:
        runner = Runner(ring, 0, owner, last=True)
        while (claimed := runner.claim()) is not None:
            if claimed:
                runner.publish(0, (runner.batch,))

    threads = [threading.Thread(target=run, args=(owner,)) for owner in (1, 2)]
    for thread in threads:
        thread.start()
    got: list[int | None] = []
    total = 300 if NAP else 3000
    for batch in range(total):
        while ringing.vacant(ring) < 0:
            got.append(wait_and_take(ring))
        post(ring, batch)
    while len(got) < total:
        got.append(wait_and_take(ring))
    ring.close()
    for thread in threads:
        thread.join()
    assert got == list(range(total))
    meters = Meters.read([ring])
    assert meters.runners["batches"].sum() == total
    assert meters.loop["waited"] > 0


def wait_and_take(ring: Ring) -> int | None:
    """Take the next ticket, sleeping as long as there is none."""
    while True:
        seen = ring.notices()
        batch = take(ring)
        if batch is not None:
            return batch
        ringing.wait(ring, seen)


def test_a_notification_is_not_missed() -> None:
    """A notification between the look at `notices` and the sleep ends the sleep at once."""
    ring = make_ring()
    post(ring, 1)
    for notify in (ring.notify_all, ring.close, lambda: ring.repost(1)):
        seen = ring.notices()
        notify()
        assert ring.notices() != seen
        ring.wait(seen, ns=2**63)  # it would sleep for centuries


def test_a_wait_is_bounded() -> None:
    """A wait ends after the given time, with nothing to take."""
    ring = make_ring()
    post(ring, 1)
    for cell in (0, -1):
        ring.wait(ring.notices(), cell, 1000)
    assert ringing.take(ring) is None
    assert PARK_NS == 100_000_000


def test_a_ring_in_shared_memory() -> None:
    """Another process's ring object on the same memory is the same ring."""
    nbytes = ring_bytes(3, 2, 2)
    with file_of(nbytes) as fd:
        ours, theirs = Mapping(fd, 0, nbytes), Mapping(fd, 0, nbytes)
    ring = Ring(ours, 3, 2, 2)
    attached = Ring(theirs)
    assert (attached.capacity, attached.memory) == (3, theirs)
    post(ring, 5)
    runner = claim(attached, 2)
    assert (runner.batch, runner.indices().tolist(), runner.ring) == (5, [5], attached)
    runner.publish()
    assert take(ring) == 5


def test_rings_in_one_memory() -> None:
    """Each has its own tickets; the trainer waits for all of them at one gate."""
    nbytes = -(-ring_bytes(4, 2, 1) // 128) * 128
    memory = Block(3 * nbytes, zero=True)
    rings = [Ring(memory, 4, 2, 1, at=k * nbytes) for k in range(3)]
    attached = [Ring(memory, at=k * nbytes) for k in range(3)]
    cells = [post(ring, k + 1)[0] for k, ring in enumerate(rings)]
    assert [ring.indices(cell)[0] for ring, cell in zip(attached, cells, strict=True)] == [1, 2, 3]
    seen = rings[0].notices()
    attached[2].notify_all()
    assert {ring.notices() for ring in rings} == {seen + 1}
    _feed.wait_any(rings, cells, seen)  # it has changed
    for k in (2, 0, 1):
        claim(attached[k]).publish()
        _feed.wait_any(rings[k:], cells[k:], rings[0].notices())
        assert take(rings[k]) == k + 1
    for wrong in (lambda: Ring(memory, 4, 2, 1, at=3 * nbytes), lambda: Ring(memory, at=-1)):
        with pytest.raises((ValueError, IndexError)):
            wrong()
    with pytest.raises(IndexError):
        _feed.wait_any(rings, [0, 4, 0], 0)
    for nothing in (([], []), (rings, cells[1:])):
        with pytest.raises(ValueError, match="give a ring or more, and a cell of each"):
            _feed.wait_any(*nothing, 0)


def test_several_tickets_are_waited_for() -> None:
    """Publishing one of them wakes the sleeper."""
    nbytes = -(-ring_bytes(4, 2, 1) // 128) * 128
    memory = Block(2 * nbytes, zero=True)
    rings = [Ring(memory, 4, 2, 1, at=k * nbytes) for k in range(2)]
    rng = random.Random(4)
    for _ in range(300):
        cells = [post(ring, 1)[0] for ring in rings]
        runners = [claim(ring) for ring in rings]
        chosen = rng.randrange(2)
        publisher = threading.Thread(target=runners[chosen].publish)
        publisher.start()
        while rings[chosen].depths()[2] == 0:
            _feed.wait_any(rings, cells, rings[0].notices())
        publisher.join()
        runners[1 - chosen].publish()
        assert [take(ring) for ring in rings] == [1, 1]


def test_a_ring_keeps_its_memory() -> None:
    """Indices, runners and the ring keep the memory they lie on."""
    ring = make_ring()
    room, runner = ring.indices(0), Runner(ring, 0, 1, last=True)
    assert room.shape == (2,)
    del ring
    gc.collect()
    room[:] = 4
    assert runner.ring.indices(0).tolist() == [4, 4]


def test_the_spin_can_be_set() -> None:
    """How long an idle runner looks at the ring before it sleeps is shared by all."""
    ring = make_ring()
    assert ring.spin == (0, 0)
    ring.spin = 12, 34
    assert Ring(ring.memory).spin == (12, 34)
    assert Runner(ring, 0, 1, last=True).claim() is False


LONG = 4_000_000_000  # ns; no turn here takes nearly as long


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_nobody_looks_on_a_single_core(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Who looks at the ring before it sleeps needs a core that the others do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert spin_ns() == (SPIN_NS if cores > 1 else 0)
    assert spins(1) == {1: (0, 0)}.get(cores, (SPIN_NS, MOST_SPIN_NS))
    assert spins(2) == {1: (0, 0), 2: (SPIN_NS, SPIN_NS)}.get(cores, (SPIN_NS, MOST_SPIN_NS))


@contextmanager
def serving(ring: Ring) -> Iterator[None]:
    """Have a thread that publishes whatever it can claim."""
    runner = Runner(ring, 0, 1, last=True)

    def serve() -> None:
        while runner.claim() is not None:
            if runner.cell >= 0:
                runner.publish()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ring.close()
        thread.join()


def alternate(ring: Ring, turns: int) -> None:
    """Post two tickets, and wait for them, again and again."""
    for turn in range(turns):
        for batch in (2 * turn, 2 * turn + 1):
            post(ring, batch)
        for batch in (2 * turn, 2 * turn + 1):
            while (taken := ringing.take(ring)) is None:
                ringing.wait(ring, ring.notices())
            assert ring.ticket(taken[0])[1] == batch


@pytest.mark.parametrize("apart", [0, 2])
def test_threads_take_turns_awake(apart: int) -> None:
    """Trainer and runner take turns without going to sleep, and without being woken."""
    ring = make_ring(runners=1)
    ring.gil_spin = LONG
    ring.apart = apart
    with serving(ring):
        alternate(ring, 50)
        assert Meters.read([ring]).runners["wait"]["sum"] == 0
        assert ring.notices() == 0


def test_processes_wait_for_each_other_awake() -> None:
    """Trainer and runner spin where a sleep would follow."""
    with file_of(PAGE) as fd:
        ring = Ring(Mapping(fd, 0, PAGE), 4, 2, 1)
    ring.spin = LONG, LONG
    with serving(ring):
        alternate(ring, 50)
        assert Meters.read([ring]).runners["wait"]["sum"] == 0
        assert ring.notices() == 0


def test_a_turn_begins_when_the_other_one_waits() -> None:
    """A runner that looks leaves tickets alone while the trainer has something else to do.

    But for one that has just seen it wait, and is held up by the system before it claims.
    """
    ring = make_ring(runners=1)
    ring.gil_spin = LONG
    alone = 0
    with serving(ring):
        for batch in range(40):
            post(ring, batch)
            alone += all(ring.depths() == (1, 0, 0) for _ in range(1000))
            ringing.wait(
                ring, ring.notices()
            )  # until it has published, let go of the GIL, and looks
            assert take(ring) == batch
    assert alone > 20


def test_a_runner_begins_when_there_are_enough_tickets() -> None:
    """It leaves one alone while the trainer has something else to do, and claims two."""
    ring = make_ring(runners=1)
    ring.gil_spin = LONG
    ring.apart = 2
    with serving(ring):
        for batch in (0, 1):
            post(ring, batch)
            ringing.wait(ring, ring.notices())
            assert take(ring) == batch
        for batch in range(2, 12, 2):
            post(ring, batch)
            post(ring, batch + 1)
            while ring.depths() != (0, 0, 2):  # without a wait at the ring
                pass
            assert [take(ring), take(ring)] == [batch, batch + 1]


def test_the_trainer_goes_on_when_there_are_enough_batches() -> None:
    """Though a runner works, which it would wait for without `apart`; and if one ticket is left."""
    for posted in (3, 1):
        ring = make_ring(runners=2)
        ring.gil_spin = LONG
        ring.apart = 2
        runner = Runner(ring, 0, 1, last=True)
        post(ring, *range(posted))
        waited = []

        def wait(ring: Ring = ring, waited: list[int | None] = waited) -> None:
            ringing.wait(ring, ring.notices())
            waited.append(take(ring))

        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(min(posted, 2)):
            assert not waited
            assert runner.claim()
            runner.publish()
        thread.join()
        assert waited == [0]
        assert Meters.read([ring]).loop["waited"] < LONG


@pytest.mark.parametrize("apart", [0, 2])
def test_turns_that_never_come(apart: int) -> None:
    """Looking in vain changes nothing: who sleeps is woken, and everything is delivered."""
    ring = make_ring(runners=2)  # the other one is never parked
    ring.gil_spin = 1000
    ring.apart = apart
    ring.wake_at = 3
    with serving(ring):
        alternate(ring, 300)


def test_a_notification_ends_spinning() -> None:
    """A trainer that spins sees a notification at once."""
    ring = make_ring()
    ring.gil_spin = LONG
    post(ring, 1)
    seen = ring.notices()
    ring.notify_all()
    ringing.wait(ring, seen)
    assert Meters.read([ring]).loop["waited"] < LONG


BAD_RINGS: list[Callable[[], Any]] = [
    lambda: Ring(Block(10), 4, 2, 3),
    lambda: Ring(Block(ring_bytes(4, 2, 3) - 1, zero=True), 4, 2, 3),
    lambda: Ring(Block(10**7, zero=True), 4, 2, 70_000),
    lambda: Ring(Block(10)),
    lambda: Ring(Block(10**5, zero=True)),
    lambda: Runner(make_ring(), 2, 1, last=True),
    lambda: Runner(make_ring(), 0, 0, last=True),
    lambda: Runner(make_ring(), 0, 4, last=True),
    lambda: setattr(make_ring(), "apart", 5),
]


@pytest.mark.parametrize("make", BAD_RINGS)
def test_bad_rings(make: Callable[[], Any]) -> None:
    """Rings that do not fit, owners and stages that do not exist, tickets too large: refused."""
    with pytest.raises(ValueError, match=r"\d|no ring"):
        make()


def test_bad_cells() -> None:
    """Cells that do not exist are refused everywhere."""
    ring = make_ring(cells=4)
    for use in (
        ring.indices,
        ring.holder,
        ring.ticket,
    ):
        with pytest.raises(IndexError, match="cell 4"):
            use(4)
        with pytest.raises(OverflowError):
            use(-1)
    for make in (lambda: Ring(None), lambda: Runner(None, 0, 1, last=True)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            make()


def test_a_runner_has_one_ticket() -> None:
    """A second claim before the publish is refused; so is everything without a ticket in hand."""
    ring = make_ring()
    post(ring, 1, 2)
    runner = claim(ring)
    with pytest.raises(RuntimeError, match="in hand"):
        runner.claim()
    runner.publish()
    uses = [runner.publish, runner.indices, runner.detach]
    uses += [lambda: runner.batch, lambda: runner.record]
    for use in uses:
        with pytest.raises(RuntimeError, match="no ticket"):
            use()


@pytest.mark.parametrize("record", [(0,) * (FIELDS + 1), [1], None])
def test_bad_records(record: Any) -> None:
    """A record is a tuple of a few numbers."""
    ring = make_ring()
    post(ring, 1)
    with pytest.raises(ValueError, match="record"):
        claim(ring).publish(0, record)


# -- without the futex


@pytest.mark.skipif(NAP, reason="this is that run")
def test_all_this_with_naps() -> None:
    """Where there is no futex, naps do: every test of this file passes with them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", __file__,
         "-k", "wait or claim or clos or notif or order or stage or any_history"],
        env=os.environ
        | {"CSEQ_WAIT": "nap", "PYTHONPATH": str(Path(_core.__file__).parents[1])},
        cwd=Path(__file__).parent,  # where there is no other cseq, if it is that of a wheel
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.needs("worker processes")
@pytest.mark.skipif(NAP, reason="this is that run")
def test_a_sequence_with_naps(run_script: Any) -> None:
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
