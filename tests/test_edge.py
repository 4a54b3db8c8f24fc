"""How a batch crosses: as an object between threads, through a slot between processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cseq
from cseq import failure
from cseq._core import Block, Ring, Seat, ring_bytes
from cseq.arena import FIRST, SMALL, Arena, Writer
from cseq.edge import NO_SLOT, Objects, SlotReader, SlotSource, SlotWriter
from cseq.stage import BATCH, CONVERTER, INDEXER, RAISED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.edge import Outlet


class Bench:
    """Both ends of the slots in one process: an indexer, a converter and a trainer."""

    def __init__(self, arena: Arena, cast: Any = None, *, stages: int = 1) -> None:
        self.ring = Ring(Block(ring_bytes(2, 1, 2), zero=True), 2, 1, 2)
        self.arena = arena
        self.seat = Seat(self.ring, INDEXER, 1, last=stages == 1)
        self.second = Seat(self.ring, CONVERTER, 2, last=True)
        self.writer = Writer(arena.segment.fd, arena.segment.width)
        self.inlet = SlotWriter(self.writer, cast)
        self.reader = SlotReader(arena)
        self.outlet: Outlet = self.reader

    def post(self) -> None:
        """Post a ticket and have it claimed."""
        slot, capacity = self.outlet.room()
        self.ring.post(self.ring.vacant(), 0, 0, 0, 0, slot=slot, capacity=capacity)
        assert self.seat.claim()
        self.inlet.begin(self.seat)

    def send(self, batch: Any) -> None:
        """Put a batch through the first stage."""
        self.post()
        self.inlet.publish(self.seat, self.inlet.write(self.seat, batch))

    def receive(self) -> Any:
        """Take what comes out: status, batch or error, slot."""
        taken = self.ring.take()
        assert taken is not None
        cell, status, slot, capacity, record = taken
        out = self.outlet.collect if status == BATCH else self.outlet.error
        batch, slot = out(cell, slot, capacity, record)
        if slot >= 0:
            self.outlet.drop(cell, slot)
        return batch


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench with an arena of its own."""
    arena = Arena()
    bench = Bench(arena)
    yield bench
    bench.writer.close()
    arena.close()


BATCHES = [
    None,
    np.arange(5),
    {"a": np.zeros((2, 3), "f4"), "b": ["text", 3]},
    np.arange(10**6),
    (np.arange(SMALL), b"x" * 100_000),
]


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_through_a_slot(bench: Bench, batch: Any) -> None:
    """Small batches and large ones arrive, again and again, and every slot comes back."""
    for _ in range(3):
        bench.send(batch)
        got = bench.receive()
        assert repr(got) == repr(batch)
        del got
        assert bench.arena.leased == 0
    assert bench.arena.acquire() == 0


def test_a_large_batch_is_not_copied(bench: Bench) -> None:
    """A large batch lies in its slot, which is in the user's hands; a small one does not."""
    bench.send(np.arange(10))
    small = bench.receive()
    assert bench.arena.leased == 0
    bench.send(np.arange(10**5))
    large = bench.receive()
    assert bench.arena.leased == 1
    bench.send(np.zeros(10**5, np.int64))
    bench.receive()
    assert (small.tolist(), large[-1]) == (list(range(10)), 10**5 - 1)


def test_the_trainer_learns_a_slots_growth(bench: Bench) -> None:
    """A slot that has grown is not committed a second time."""
    bench.send(np.zeros(10**5))
    bench.receive()
    slot, capacity = bench.reader.room()
    assert slot == 0
    assert capacity >= 8 * 10**5
    bench.reader.drop(0, slot)


def test_cast_on_the_way() -> None:
    """Numbers are cast while they are written; other leaves stay."""
    arena = Arena()
    bench = Bench(arena, np.dtype("f4"))
    bench.send([np.arange(3), np.array(["a"]), 5])
    numbers, text, five = bench.receive()
    assert (numbers.dtype, text.dtype.kind, five) == (np.float32, "U", 5)
    arena.close()


def test_an_exception_through_a_slot(bench: Bench) -> None:
    """An exception arrives as itself, in place of whatever had been written already."""
    bench.post()
    bench.writer.empty(10**5)
    bench.inlet.fail(bench.seat, KeyError("x" * 50_000))
    error = bench.receive()
    assert type(error) is KeyError
    assert error.args == ("x" * 50_000,)
    assert isinstance(error.__cause__, cseq.RemoteTraceback)
    assert bench.arena.leased == 0


def test_an_exception_when_memory_is_short(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no room even for the exception, its text fits into what the slot has always."""
    grown: list[int] = []

    def grow(self: Writer, needed: int) -> None:
        grown.append(needed)
        raise MemoryError(f"no room for {needed} bytes")

    monkeypatch.setattr(Writer, "_grow", grow)
    bench.post()
    assert bench.writer.capacity == FIRST
    bench.inlet.fail(bench.seat, ValueError("y" * 50_000))
    error = bench.receive()
    assert grown
    assert isinstance(error, cseq.WorkerError)
    assert str(error).startswith("ValueError: yyy")


def test_a_kept_array_without_spares(bench: Bench) -> None:
    """Where there is no spare slot, a kept array is refused at publish; the ticket can fail."""
    bench.post()
    kept = bench.writer.empty(10)
    record = bench.inlet.write(bench.seat, np.arange(3))
    with pytest.raises(RuntimeError, match="held"):
        bench.inlet.publish(bench.seat, record)
    bench.inlet.fail(bench.seat, RuntimeError("kept"))
    assert type(bench.receive()) is RuntimeError
    kept[:] = 1


def test_dropped(bench: Bench) -> None:
    """A given-up ticket's slot is free again; a ticket without one is no matter."""
    slot, _ = bench.reader.room()
    bench.reader.drop(0, slot)
    bench.reader.drop(0, NO_SLOT)
    assert bench.reader.room()[0] == slot
    bench.reader.drop(0, slot)


def test_two_stages_in_processes() -> None:
    """A converter process reads what lies in the slot and writes behind it, in the same slot."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    for n in (10, 10**5):
        bench.send({"a": np.arange(n)})
        assert bench.second.claim()
        writer = Writer(arena.segment.fd, arena.segment.width)
        source, inlet = SlotSource(writer), SlotWriter(writer, None)
        batch = source.fetch(bench.second)
        assert batch["a"].tolist() == list(range(n))
        record = inlet.write(bench.second, [batch["a"] * 2])
        batch["a"][:] = -1  # what was written does not lie there
        del batch
        inlet.publish(bench.second, record)
        (got,) = bench.receive()
        assert got.tolist() == list(range(0, 2 * n, 2))
        writer.close()
    del got
    assert arena.leased == 0
    arena.close()


@pytest.mark.parametrize("n", [10, 10**5])
def test_a_converter_thread_takes_the_batch_out(n: int) -> None:
    """A converter thread takes the batch out of its slot and hands an object on."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    objects = Objects(2, bench.reader)
    bench.outlet = objects
    bench.send(np.arange(n))
    assert bench.second.claim()
    batch = bench.reader.fetch(bench.second)
    objects.publish(bench.second, objects.write(bench.second, batch.sum()))
    assert bench.receive() == n * (n - 1) // 2
    assert arena.leased == (1 if n > 10 else 0)
    del batch
    assert arena.leased == 0
    assert arena.acquire() == 0
    arena.release(0)
    arena.close()


def test_errors_before_a_converter_thread() -> None:
    """An indexer's exception passes a converter thread by; the thread's own comes as an object."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    objects = Objects(2, bench.reader)
    bench.outlet = objects
    bench.post()
    bench.inlet.fail(bench.seat, KeyError("indexer"))
    assert bench.receive().args == ("indexer",)
    bench.send(np.arange(10**5))
    assert bench.second.claim()
    bench.reader.fetch(bench.second)
    own = KeyError("converter")
    objects.fail(bench.second, own)
    assert bench.receive() is own
    assert arena.acquire() == 0
    arena.release(0)
    arena.close()


# -- between threads


def test_objects() -> None:
    """Between threads the object itself is handed over, and forgotten when it was taken."""
    ring = Ring(Block(ring_bytes(2, 1, 1), zero=True), 2, 1, 1)
    edge = Objects(2)
    seat = Seat(ring, INDEXER, 1, last=True)
    batch, error = object(), KeyError()
    for status, value in ((BATCH, batch), (RAISED, error)):
        slot, capacity = edge.room()
        assert slot == NO_SLOT
        ring.post(ring.vacant(), 0, 0, 0, 0, slot=slot, capacity=capacity)
        assert seat.claim()
        edge.begin(seat)
        if status == BATCH:
            edge.publish(seat, edge.write(seat, value))
        else:
            edge.fail(seat, error)
        taken = ring.take()
        assert taken is not None
        cell, got, slot, capacity, record = taken
        out = edge.collect if status == BATCH else edge.error
        assert (got, out(cell, slot, capacity, record)[0]) == (status, value)
        assert edge.collect(cell, slot, capacity, record)[0] is None


def test_objects_dropped() -> None:
    """What a given-up ticket held is let go."""

    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    ring = Ring(Block(ring_bytes(1, 1, 1), zero=True), 1, 1, 1)
    edge = Objects(1)
    seat = Seat(ring, INDEXER, 1, last=True)
    ring.post(0, 0, 0, 0, 0)
    assert seat.claim()
    edge.publish(seat, edge.write(seat, Batch()))
    assert Batch.alive == 1
    edge.drop(0, NO_SLOT)
    gc.collect()
    assert Batch.alive == 0


def test_the_text_always_fits() -> None:
    """What `pack_text` makes of the worst exception fits into a slot's first pages."""
    error = ValueError("\U0001f600" * 100_000)
    assert len(failure.pack_text(error)) < FIRST - 1000
