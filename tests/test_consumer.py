"""The trainer's end of a ring: peek, decode, commit."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cseq._core import BatchIterator, Block, Consumer, Mapping, Order, Ring, Seat, Slots, ring_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096


class Failed(Exception):
    """What an indexer raises here."""


class Counter:
    """A consumer of a ring of two cells and 5 batches of 2 samples, in their natural order."""

    def __init__(self, convert: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.ring = Ring(Block(ring_bytes(2, 2, 1), zero=True), 2, 2, 1)
        self.held: list[Any] = [None, None]
        self.seat = Seat(self.ring, 0, 1, last=True)
        self.reads: list[Callable[[], Any]] = []  # what `read` does before it looks
        self.convert = convert
        self.consumer = Consumer(
            self.ring,
            Order(10, shuffle=False, seed=0),
            self.fill,
            self.read,
            self.describe,
            objects=self.held,
            convert=convert,
            **options,
        )
        self.consumer.begin(7, 100, 5, 5, 0, 2, 2)
        self.consumer.refill()

    def fill(self, batch: int, room: Any) -> tuple[int, int]:
        """Be a sampler of batches that are not full: of one sample."""
        room[0] = -batch
        return 1, 1000 + batch

    def read(self) -> Any:
        """Decode the next batch."""
        if self.reads:
            self.reads.pop()()
        found = self.consumer.peek()
        if found is None:
            raise StopIteration
        token, cell, status, *_ = found
        if status:
            return token, cell, None, self.held[cell]
        return token, cell, self.held[cell], None

    def describe(self, cell: int, error: BaseException) -> Any:
        """Name the batch of an exception."""
        error.args = (*error.args, self.ring.ticket(cell)[1])
        return error, self.ring.ticket(cell)[1]

    def work(self, batch: Any = "batch", status: int = 0) -> None:
        """Publish the next ticket."""
        assert self.seat.claim() is True
        self.held[self.seat.cell] = batch
        self.seat.publish(status)

    def state(self) -> tuple[Any, ...]:
        """All that a step may change."""
        cells = [(self.ring.ticket(c), self.ring.indices(c).tolist()) for c in range(2)]
        c = self.consumer
        return c.ticket, c.posted, c.taken, c.done, self.ring.depths(), *self.held, cells


@pytest.mark.parametrize("way", ["step", "next"])
def test_a_commit(way: str) -> None:
    """The oldest batch comes out, and the next ticket is posted where it lay."""
    counter = Counter()
    consumer = counter.consumer
    for batch in range(3):
        counter.work(f"batch {batch}")
        assert getattr(consumer, way)() == f"batch {batch}"
        cell = batch % 2
        assert counter.held[cell] is None
        assert counter.ring.ticket(cell) == (7, 102 + batch, 2)
        assert counter.ring.indices(cell).tolist() == [4 + 2 * batch, 5 + 2 * batch]
        assert (consumer.taken, consumer.done) == (batch + 1, batch + 1)
        assert (consumer.posted, consumer.ticket) == (batch + 3, batch + 3)
    assert counter.ring.taken_batches == 3
    for batch in range(3, 5):  # all are posted
        assert not consumer.over
        counter.work(batch)
        assert getattr(consumer, way)() == batch
        assert consumer.posted == 5
    assert consumer.over
    assert consumer.step() is None
    with pytest.raises(StopIteration):
        consumer.next()


def prepare(counter: Counter, why: str) -> None:
    """Make a step in C impossible."""
    if why == "raised":
        counter.work(Failed(), status=1)
    elif why == "none":
        counter.work(None)
    elif why == "given up":
        counter.work()
        counter.consumer.end()
    elif why == "not full":
        counter.consumer.begin(7, 100, 5, 2, 0, 2, 2)
        counter.consumer.refill()
        counter.work()


@pytest.mark.parametrize("why", ["not ready", "raised", "none", "given up", "not full"])
def test_what_c_cannot_do_stays_as_it_is(why: str) -> None:
    """A batch that is None, or not ready, or an exception, indices from Python: nothing changes."""
    counter = Counter()
    prepare(counter, why)
    before = counter.state()
    assert counter.consumer.step() is None
    assert counter.state() == before


def test_batches_that_are_not_full() -> None:
    """The indices of such a batch are asked of Python, before the batch in its cell is taken."""
    counter = Counter()
    counter.consumer.begin(7, 100, 5, 3, 0, 2, 2)
    counter.consumer.refill()
    for batch in range(5):
        counter.work(batch)
        assert counter.consumer.next() == batch
    assert counter.ring.ticket(0)[2] == counter.ring.ticket(1)[2] == 1
    assert sorted(counter.ring.indices(cell)[0] for cell in range(2)) == [-4, -3]


def refuse(batch: Any) -> Any:
    """Be a conversion that fails."""
    raise Failed(batch)


def interrupt(batch: Any) -> Any:
    """Be a conversion during which Ctrl-C comes."""
    raise KeyboardInterrupt


def test_a_conversion_that_fails() -> None:
    """It is raised as if its indexer had raised it; the next batch follows."""
    counter = Counter(refuse)
    counter.work(1)
    counter.work(2)
    for batch in range(2):
        with pytest.raises(Failed) as caught:
            counter.consumer.next()
        assert caught.value.args == (batch + 1, 100 + batch)
    assert (counter.consumer.taken, counter.consumer.done) == (2, 0)
    assert not counter.consumer.alone  # it may call anything: a lock is needed


def test_skipped() -> None:
    """What was raised is noted down and left out; a batch that raised counts as done then."""
    counter = Counter(skip_errors=True)
    counter.work(Failed(), status=1)
    counter.work("second")
    assert counter.consumer.next() == "second"
    assert (counter.consumer.skipped, counter.consumer.done) == ([100], 2)


def test_raised() -> None:
    """A batch that raised is taken, and done only when the loop went on."""
    counter = Counter()
    counter.work(Failed(), status=1)
    counter.work("second")
    with pytest.raises(Failed):
        counter.consumer.next()
    assert (counter.consumer.taken, counter.consumer.done) == (1, 0)
    assert counter.consumer.next() == "second"
    assert (counter.consumer.taken, counter.consumer.done) == (2, 2)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c(late: bool) -> None:
    """A signal handler raises before anything has changed, not behind it.

    A conversion that was broken off is made again, one that was not is not.
    """
    # A function of C behind which no handler runs before the consumer looks for one itself.
    pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(
        ("PyErr_SetInterrupt", ctypes.pythonapi)
    )
    counter = Counter(pending if late else interrupt)
    counter.work()
    before = counter.state()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            counter.consumer.next()
        assert counter.state() == before
        if late:
            break
    if late:
        assert isinstance(counter.consumer.next(), int)  # what `pending` has returned


def test_another_epoch_begins_while_one_decodes() -> None:
    """What is decoded then belongs to no epoch that is wanted: it does not come out."""
    counter = Counter()

    def begin() -> None:
        counter.consumer.begin(8, 0, 5, 5, 0, 2, 2)

    counter.reads.append(begin)
    counter.work(None)
    with pytest.raises(StopIteration):
        counter.consumer.next()
    assert counter.consumer.taken == 0
    counter.consumer.refill()
    counter.work("of the new epoch")
    assert counter.consumer.next() == "of the new epoch"


def test_the_batch_is_taken_while_one_decodes_it() -> None:
    """A handler that takes the batch under way gets it; the call that was interrupted, the next."""
    counter = Counter()
    got = []
    counter.reads += [lambda: None, lambda: got.append(counter.consumer.next())]
    counter.work(None)
    counter.work("second")
    assert counter.consumer.next() == "second"
    assert got == [None]
    assert counter.consumer.taken == 2


def test_unordered() -> None:
    """Unordered, whatever is finished comes out; the others stay where they are."""
    counter = Counter(ordered=False)
    assert counter.seat.claim() is True  # the first one
    other = Seat(counter.ring, 0, 1, last=True)
    assert other.claim() is True
    counter.held[other.cell] = "second"
    other.publish()
    assert counter.consumer.step() == "second"
    assert counter.consumer.step() is None
    counter.held[counter.seat.cell] = "first"
    counter.seat.publish()
    assert counter.consumer.next() == "first"


# -- slots


class Slotted:
    """A consumer of batches in slots: a ring of one cell."""

    def __init__(self, count: int = 1, most: int = 1000, known: Any = None) -> None:
        fd = os.memfd_create("slots")
        os.ftruncate(fd, 8 * PAGE)
        self.slots = Slots()
        self.slots.extend(count, PAGE)
        self.mapped = {slot: Mapping(fd, slot * PAGE, PAGE) for slot in range(8)}
        os.close(fd)
        self.ring = Ring(Block(ring_bytes(1, 1, 1), zero=True), 1, 1, 1)
        self.seat = Seat(self.ring, 0, 1, last=True)
        small = None if known is None else (self.mapped, known, most)
        self.consumer = Consumer(
            self.ring, Order(9, shuffle=False, seed=0), list, self.read, list,
            slots=self.slots, extend=lambda: self.slots.extend(1, PAGE), small=small,
        )  # fmt: skip
        self.consumer.begin(0, 0, 9, 9, 0, 1, 1)
        self.consumer.refill()

    def read(self) -> Any:
        """Lend the slot."""
        found = self.consumer.peek()
        if found is None:
            raise StopIteration
        token, cell, _, slot, *_ = found
        return token, cell, self.slots.lend(slot, self.mapped[slot]), None

    def work(self, text: bytes = b"text") -> int:
        """Write to the slot of the next ticket, and publish it."""
        assert self.seat.claim() is True
        slot = self.seat.slot
        self.mapped[slot].store_bytes(0, text)
        self.seat.publish(0, (0, 0, 0, len(text)))
        return slot


def test_leased() -> None:
    """A slot that was lent goes with the batch; the next ticket has another, which may be new."""
    bench = Slotted()
    assert bench.work(b"first") == 0
    first = bench.consumer.next()
    assert bench.slots.leased == 1
    assert bench.work(b"second") == 1
    second = bench.consumer.next()
    assert (first.load_bytes(0, 5), second.load_bytes(0, 6)) == (b"first", b"second")
    del first
    assert bench.slots.leased == 1
    assert bench.work() == 2
    bench.consumer.next()
    assert bench.work() == 0  # the lowest that is free


def test_lent_twice() -> None:
    """Decodes of one ticket share a lease: what an interrupted one has left behind stays intact."""
    bench = Slotted(3)
    bench.work(b"first")
    left = bench.read()[2]
    assert bench.slots.leased == 0
    batch = bench.consumer.next()
    assert batch is left
    assert bench.slots.leased == 1
    del batch
    assert bench.slots.leased == 1
    assert bench.work() == 1
    del left
    assert bench.slots.leased == 0


def in_slot(array: np.ndarray[Any, Any], most: int = 1000) -> Any:
    """Lay an array into a slot, and take it out."""
    layout = b"layout of one array"
    known = {layout: (64, array.dtype, array.shape, False)}
    bench = Slotted(1, most, known)
    taken = []
    for batch in range(4):
        assert bench.seat.claim() is True
        slot = bench.mapped[bench.seat.slot]
        slot.store(64, np.asarray(array + batch))
        offset = 64 + array.nbytes
        slot.store_bytes(offset, layout)
        bench.seat.publish(0, (offset, 6, len(layout) - 6, 0), PAGE)
        if batch == 2:
            known.clear()  # the latest layout is remembered
        taken.append(bench.consumer.step())
        if taken[-1] is None:
            break
    return taken


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_a_small_array(shape: tuple[int, ...]) -> None:
    """A small array comes out as a copy of its own, which can be written to."""
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    for batch, got in enumerate(in_slot(np.asarray(array))):
        assert got.flags.owndata
        assert got.flags.writeable
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array + batch, strict=True)
        got[...] = -1


def test_a_large_array() -> None:
    """What is not small is for Python to decode."""
    assert in_slot(np.zeros(120)) == [None]
    assert in_slot(np.zeros(100))[0] is not None


# -- the iterator


class Going:
    """A run whose iterators may go on as long as `present` does not change."""

    def __init__(self) -> None:
        self.present = 3
        self.turn = threading.RLock()


def test_the_iterator() -> None:
    """A step in C if that can be, else the next batch, with the lock held; then the end."""
    run, counter = Going(), Counter()
    following = iter(["next"])

    def go() -> Any:
        assert run.turn._is_owned()  # type: ignore[attr-defined]
        return next(following)

    batches = BatchIterator(run, counter.consumer, go)
    counter.work("step")
    assert [next(batches), next(batches)] == ["step", "next"]
    with pytest.raises(StopIteration):
        next(batches)
    assert iter(batches) is batches


def test_another_iterator() -> None:
    """Once another iterator is the present one, nothing is taken; the lock is free again."""
    run, counter = Going(), Counter()
    batches = BatchIterator(run, counter.consumer, list)
    counter.work()
    run.present = 4
    with pytest.raises(InterruptedError, match="newer iterator"):
        next(batches)
    assert not run.turn._is_owned()  # type: ignore[attr-defined]
    assert counter.consumer.taken == 0
