"""How a batch crosses: as an object between threads, through a slot between processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import exports
import numpy as np
import pytest
import rehearsal
from slots import acquire

import cseq
from cseq._core import OrderSource, RangeReader, Ring, RunState, ring_bytes
from cseq._feed import Feed, FeedIterator
from cseq._memory import SMALL, Block, Slots
from cseq._work import Decoder, Runner
from cseq.converter.export import Imports
from cseq.converter.output import parse
from cseq.encoding import failure
from cseq.encoding.pickling import dumps
from cseq.encoding.transport import Objects, SlotReader, SlotSource, SlotWriter
from cseq.memory.arena import Arena
from cseq.memory.segment import FIRST
from cseq.memory.writer import Writer
from cseq.order.sampler import Cut
from cseq.stage import CONVERTER, INDEXER, RAISED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.encoding.transport import BatchReader


class Returned(Exception):
    """Carries what was raised in a stage."""


class Bench:
    """Both ends of the slots in one process: an indexer, a converter and a trainer."""

    def __init__(self, arena: Arena, cast: Any = None, *, stages: int = 1) -> None:
        self.ring = Ring(Block(ring_bytes(2, 1, 2), zero=True), 2, 1, 2)
        self.arena = arena
        self.runner = Runner(self.ring, INDEXER, 1, last=stages == 1)
        self.second = Runner(self.ring, CONVERTER, 2, last=True)
        segment = arena.segment
        slots = Slots(segment.fd, segment.width, segment.slots, 1)
        self.writer = Writer(segment.fd, segment.width, slots)
        self.batch_writer = SlotWriter(self.writer, cast)
        self.reader = SlotReader(arena)
        self.batch_reader = self.reader

    @property
    def batch_reader(self) -> BatchReader:
        """The trainer's end."""
        return self._batch_reader

    @batch_reader.setter
    def batch_reader(self, batch_reader: BatchReader) -> None:
        self._batch_reader = batch_reader
        discard = getattr(batch_reader, "discard", None)
        self.feed = Feed(
            RunState(), [self.ring], Decoder(**batch_reader.ends), self._wait, self._decode,
            self._describe, discard=discard,
        )  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        cut = Cut(0, 1000, 1000, 0, 1, 1, 0, 0, 0)
        self.feed.begin(OrderSource(RangeReader(1000), 0, cut))

    def _wait(self) -> None:
        raise AssertionError("nothing is ready")

    def _decode(
        self, ring: int, cell: int, status: int, slot: int, capacity: int, record: tuple[int, ...]
    ) -> Any:
        if status == RAISED:
            return None, self.batch_reader.error(cell, slot, capacity, record)
        return self.batch_reader.decode(cell, slot, capacity, record), None

    def _describe(self, ring: int, cell: int, error: BaseException) -> Any:
        return Returned(error), None

    def post(self) -> None:
        """Have a ticket posted and claimed."""
        self.feed.refill()
        assert self.runner.claim()
        self.batch_writer.ticket_writer.begin_ticket(self.runner)

    def send(self, batch: Any) -> None:
        """Put a batch through the first stage."""
        self.post()
        self.batch_writer.publish(self.runner, self.batch_writer.write(self.runner, batch))

    def receive(self) -> Any:
        """Take what comes out: a batch, or the exception."""
        try:
            return next(FeedIterator(self.feed, 0))
        except Returned as returned:
            return returned.args[0]

    def free_slots(self) -> int:
        """Count the slots that no ticket and no batch has, up to five."""
        self.feed.end()
        slots = [acquire(self.arena) for _ in range(5)]
        for slot in slots:
            self.arena.slots.release(slot)
        return sum(slot <= 5 for slot in slots)


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
        assert bench.arena.slots.leased == 0
    assert bench.free_slots() == 5


def test_a_large_batch_is_not_copied(bench: Bench) -> None:
    """A large batch lies in its slot, which is in the user's hands; a small one does not."""
    bench.send(np.arange(10))
    small = bench.receive()
    assert bench.arena.slots.leased == 0
    bench.send(np.arange(10**5))
    large = bench.receive()
    assert bench.arena.slots.leased == 1
    bench.send(np.zeros(10**5, np.int64))
    bench.receive()
    assert (small.tolist(), large[-1]) == (list(range(10)), 10**5 - 1)


def test_the_trainer_learns_a_slots_growth(bench: Bench) -> None:
    """A slot that has grown is not committed a second time."""
    bench.send(np.zeros(10**5))
    bench.receive()
    assert bench.arena.slots.nbytes(1) >= 8 * 10**5
    assert bench.free_slots() == 5


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
    bench.batch_writer.fail(bench.runner, KeyError("x" * 50_000))
    error = bench.receive()
    assert type(error) is KeyError
    assert error.args == ("x" * 50_000,)
    assert isinstance(error.__cause__, cseq.RemoteTraceback)
    assert bench.arena.slots.leased == 0


def test_an_exception_when_memory_is_short(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no room even for the exception, its text fits into what the slot has always."""
    grown: list[int] = []

    def grow(self: Writer, needed: int) -> None:
        grown.append(needed)
        raise MemoryError(f"no room for {needed} bytes")

    monkeypatch.setattr(Writer, "_grow", grow)
    bench.post()
    assert bench.writer.capacity == FIRST
    bench.batch_writer.fail(bench.runner, ValueError("y" * 50_000))
    error = bench.receive()
    assert grown
    assert isinstance(error, cseq.WorkerError)
    assert str(error).startswith("ValueError: yyy")


@pytest.mark.parametrize("n", [3, 10**5])
def test_given_up(bench: Bench, n: int) -> None:
    """A given-up ticket's slot is free again, wherever the ticket stands; its batch stays intact
    if a decode that was interrupted has left views of it.
    """
    bench.send(np.arange(n))
    cell, number = bench.feed.tickets(0)[0]
    answer = bench.ring.peek(cell, number)
    assert answer
    _, slot, capacity, record = answer
    views = [bench.reader.decode(cell, slot, capacity, record) for _ in range(2)]
    bench.post()  # another is in work
    bench.feed.end()
    assert bench.feed.abandoned_count == 1
    bench.batch_writer.fail(bench.runner, KeyError())
    assert bench.arena.slots.leased == (n > 3)
    assert bench.free_slots() == (4 if n > 3 else 5)
    for _ in range(3):  # others are written into the slots that are free
        bench.begin()
        bench.send(np.zeros(n, int))
        bench.receive()
    assert [view.tolist() == list(range(n)) for view in views] == [True, True]
    del views
    assert bench.arena.slots.leased == 0


def test_two_stages_in_processes() -> None:
    """A converter process reads what lies in the slot and writes behind it, in the same slot."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    for n in (10, 10**5):
        bench.send({"a": np.arange(n)})
        assert bench.second.claim()
        writer = Writer(arena.segment.fd, arena.segment.width)
        source, batch_writer = SlotSource(writer), SlotWriter(writer, None)
        batch = source.fetch(bench.second)
        assert batch["a"].tolist() == list(range(n))
        record = batch_writer.write(bench.second, [batch["a"] * 2])
        batch["a"][:] = -1  # what was written does not lie there
        del batch
        batch_writer.publish(bench.second, record)
        (got,) = bench.receive()
        assert got.tolist() == list(range(0, 2 * n, 2))
        writer.close()
    del got
    assert arena.slots.leased == 0
    arena.close()


@pytest.mark.parametrize("n", [10, 10**5])
def test_a_converter_thread_takes_the_batch_out(n: int) -> None:
    """A converter thread takes the batch out of its slot and hands an object on."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    objects = Objects(2, bench.reader)
    bench.batch_reader = objects
    bench.send(np.arange(n))
    assert bench.second.claim()
    batch = bench.reader.fetch(bench.second)
    objects.publish(bench.second, objects.write(bench.second, batch.sum()))
    assert bench.receive() == n * (n - 1) // 2
    assert arena.slots.leased == (1 if n > 10 else 0)
    del batch
    assert arena.slots.leased == 0
    assert bench.free_slots() == 5
    arena.close()


def test_errors_before_a_converter_thread() -> None:
    """An indexer's exception passes a converter thread by; the thread's own comes as an object."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    objects = Objects(2, bench.reader)
    bench.batch_reader = objects
    bench.post()
    bench.batch_writer.fail(bench.runner, KeyError("indexer"))
    assert bench.receive().args == ("indexer",)
    bench.send(np.arange(10**5))
    assert bench.second.claim()
    bench.reader.fetch(bench.second)
    own = KeyError("converter")
    objects.fail(bench.second, own)
    assert bench.receive() is own
    assert bench.free_slots() == 5
    arena.close()


def test_an_error_of_a_converter_thread_that_has_not_got_the_batch() -> None:
    """An exception before the batch has left its slot is the thread's own, too."""
    arena = Arena()
    bench = Bench(arena, stages=2)
    objects = Objects(2, bench.reader)
    bench.batch_reader = objects
    for _ in range(3):
        bench.send(np.arange(10**5))
        assert bench.second.claim()
        own = MemoryError("no room for a mapping")
        objects.fail(bench.second, own)
        assert bench.receive() is own
    bench.post()
    bench.batch_writer.fail(bench.runner, KeyError("indexer"))
    assert bench.receive().args == ("indexer",)
    assert bench.free_slots() == 5
    arena.close()


# -- between threads


RELEASED: list[int] = []


def release(number: int) -> int:
    """Open memory of another process, and be interrupted once."""
    RELEASED.append(number)
    if len(RELEASED) == 2:
        raise KeyboardInterrupt
    return number


def test_a_discard_that_is_interrupted() -> None:
    """What a converter has pickled is read at most once."""
    pytest.importorskip("torch")
    arena = Arena()
    bench = Bench(arena, stages=2)
    RELEASED.clear()
    with rehearsal.on(rehearsal.CpuLane()):
        output = rehearsal.rehearse(parse("cuda", None))
        bench.batch_reader = Imports(arena, bench.ring, output, list)
    source = SlotSource(bench.writer)
    for ticket in range(2):
        bench.send(ticket)
        assert bench.second.claim()
        source.fetch(bench.second)
        packed = dumps([exports.Theirs(release, 3 * ticket + k) for k in range(3)])
        bench.batch_writer.publish(bench.second, bench.batch_writer.write(bench.second, packed))
    with pytest.raises(KeyboardInterrupt):
        bench.feed.end()
    assert bench.feed.abandoned_count == 2
    bench.feed.refill()
    assert bench.feed.abandoned_count == 0
    assert RELEASED == [3, 4, 0, 1, 2]  # the latest ticket first
    bench.writer.close()
    arena.close()


class Batch:
    """Counts its kind."""

    alive = 0

    def __init__(self) -> None:
        Batch.alive += 1

    def __del__(self) -> None:
        Batch.alive -= 1


def between_threads() -> Bench:
    """Make a bench whose ends are objects."""
    arena = Arena()
    bench = Bench(arena)
    bench.batch_writer = bench.batch_reader = Objects(2)  # type: ignore[assignment]
    arena.close()
    return bench


def test_objects() -> None:
    """Between threads the object itself is handed over, and forgotten when it was taken."""
    bench, error = between_threads(), KeyError()
    bench.send(Batch())
    bench.post()
    bench.batch_writer.fail(bench.runner, error)
    assert type(bench.receive()) is Batch
    gc.collect()
    assert Batch.alive == 0
    assert bench.receive() is error
    assert list(bench.batch_reader.ends["objects"]) == [None, None]


def test_objects_dropped() -> None:
    """What a given-up ticket held is let go."""
    bench = between_threads()
    bench.send(Batch())
    assert Batch.alive == 1
    bench.feed.end()
    gc.collect()
    assert Batch.alive == 0


def test_the_text_always_fits() -> None:
    """What `pack_text` makes of the worst exception fits into a slot's first pages."""
    error = ValueError("\U0001f600" * 100_000)
    assert len(failure.pack_text(error)) < FIRST - 1000
