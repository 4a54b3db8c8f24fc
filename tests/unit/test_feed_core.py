"""The feed in C: peek, decode and commit, over one ring and over several."""

import ctypes
import signal
import sys
from collections import OrderedDict

import numpy as np
import pytest
from ringing import Asked, make_ring
from slots import Scratch

from cseq._core import RangeReader, Ring, ring_bytes
from cseq._lock import RunState
from cseq._memory import COPIED, Block, Mapping, commit
from cseq._work import Runner
from cseq.converter.host import Converter
from cseq.converter.output import parse
from cseq.encoding import codec
from cseq.encoding._codec import Decoder, ObjectTable
from cseq.engine._feed import Feed, FeedIterator
from cseq.engine._streams import ItemSource, KeySource, Request
from cseq.engine.tickets.batches import wake_at
from cseq.memory._slots import SlotTable
from cseq.memory.descriptors import sparse_file
from cseq.order._source import OrderSource
from cseq.order.sampler import Cut
from cseq.stage import BATCH, ENDED, RAISED

# In bytes; on any system, a mapping can begin at any multiple of this.
GRAIN = 1 << 16
WIDTH = 4 * GRAIN


class Failed(Exception):
    """The exception of an indexer here."""


class Counter(Asked):
    """A feed of a ring with few cells, and 5 batches of 2 samples in their natural order."""

    def __init__(self, convert=None, *, ordered=True, cells=2, runners=1):
        self.ring = make_ring(cells, 2, runners)
        self.held = ObjectTable(cells)
        self.runner = Runner(self.ring, 0, 1, last=True)
        self.run = RunState()
        decoder = Decoder(objects=self.held, convert=convert)
        self.feed = Feed(self.run, [self.ring], decoder, self, interrupted="a newer iterator began")
        self.begin(ordered=ordered)

    def begin(self, *, ordered=True):
        cut = Cut(100, 5, 5, 0, 2, 2, 10, 1, 0)._asdict()
        source = OrderSource(RangeReader(10), 7, cut, cut, 0)
        self.feed.begin_epoch(source, ordered=ordered)
        self.feed.refill()

    def await_next(self):
        self.feed.advance()
        raise StopIteration

    def decode(self, ring, cell, status, slot, capacity, record):
        return self.held[cell], None

    def next(self):
        return next(FeedIterator(self.feed, 0))

    def describe(self, ring, cell, error):
        error.args = (*error.args, self.ring.ticket(cell)[1])
        return error, self.ring.ticket(cell)[1]

    def work(self, batch="batch"):
        assert self.runner.claim() is True
        self.held[self.runner.cell] = batch
        self.runner.publish()

    def state(self):
        """Return all that a step may change."""
        cells = [(self.held[c], self.ring.ticket(c), self.ring.indices(c).tolist()) for c in (0, 1)]
        return self.feed.ticket, self.feed.taken, self.feed.done, self.ring.depths(), cells


def test_wake_at():
    """Workers are woken for several tickets at once while enough batches are ready."""
    cases = (10, 4), (10, 8), (1, 1), (2, 8), (100, 1)
    assert [wake_at(buffer, workers) for buffer, workers in cases] == [5, 2, 1, 1, 50]


@pytest.mark.parametrize("convert", [None, lambda batch: batch])
def test_a_batch_that_is_taken_is_the_callers(convert):
    """No path loses or leaks a reference."""
    counter = Counter(convert)
    batch = Failed()
    before = sys.getrefcount(batch)
    counter.work(batch)
    got = counter.next()
    assert got is batch
    assert sys.getrefcount(batch) == before + 1
    del got
    assert sys.getrefcount(batch) == before


def test_an_epoch_that_is_begun_anew():
    """Each cell has a ticket, no matter what was left of the previous epoch."""
    counter = Counter()
    for first in (2, 4):
        counter.begin()
        assert [number for _, number in counter.feed.tickets(0)] == [first, first + 1]


def test_an_exit_of_a_conversion():
    """It is an error of the batch; a signal handler's exit ends the program, without a batch."""

    def convert(batch):
        if batch == "signal":
            signal.raise_signal(signal.SIGINT)
        sys.exit(0)

    counter = Counter(convert)
    counter.work("first")
    counter.work("signal")
    with pytest.raises(SystemExit) as caught:
        counter.next()
    assert (caught.value.args, counter.feed.taken, counter.feed.done) == ((0, 100), 1, 0)
    before = signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit) as caught:
            counter.next()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (caught.value.args, counter.feed.taken) == ((7,), 1)


def test_ctrl_c():
    """A handler raises before anything has changed; a finished conversion is kept."""
    # No handler runs after this C function before the consumer checks for one itself.
    pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(
        ("PyErr_SetInterrupt", ctypes.pythonapi)
    )
    counter = Counter(pending)
    counter.work()
    before = counter.state()
    with pytest.raises(KeyboardInterrupt):
        counter.next()
    assert counter.state() == before
    assert isinstance(counter.next(), int)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, GeneratorExit])
def test_a_handler_that_raises_while_a_batch_is_converted(kind):
    """For any exception, any number of times, the batch is still the next one."""
    struck = []

    def strike(number, frame):
        struck.append(number)
        raise kind

    def convert(batch):
        if len(struck) < 3:
            signal.raise_signal(signal.SIGINT)
        return batch

    counter = Counter(convert)
    counter.work()
    state, before = counter.state(), signal.signal(signal.SIGINT, strike)
    try:
        for _ in range(3):
            with pytest.raises(kind):
                counter.next()
            assert counter.state() == state
        assert counter.next() == "batch"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_batch_for_which_memory_is_short_twice():
    """The batch is retried once and then passed, since the MemoryError may be its own."""
    short = [True, True, True]

    def convert(batch):
        if short and short.pop():
            raise MemoryError
        return batch

    counter = Counter(convert)
    counter.work("first")
    counter.work("second")
    before = counter.state()
    for is_last in (False, True):
        with pytest.raises(MemoryError):
            counter.next()
        assert (counter.state() == before) != is_last
    assert (counter.feed.taken, counter.feed.done) == (1, 0)
    with pytest.raises(MemoryError):
        counter.next()
    assert counter.next() == "second"


def test_unordered_tickets_are_looked_at_in_turn():
    """An unready ticket goes to the end of the line, and is not checked before each batch."""
    counter = Counter(ordered=False, cells=4, runners=2)
    slow = Runner(counter.ring, 0, 2, last=True)
    assert slow.claim() is True
    for name in "bcd":
        counter.work(name)
    assert counter.next() == "b"
    counter.held[slow.cell] = "a"
    slow.publish(0)
    counter.work("e")
    assert [counter.next() for _ in range(4)] == ["c", "d", "a", "e"]
    with pytest.raises(StopIteration):
        counter.next()
    assert (counter.feed.ended, counter.feed.position) == (True, 10)


class Written(Asked):
    """A feed of batches encoded as workers encode them, in a ring of one cell."""

    def __init__(self, known, *, lends=True, **options):
        self.lends = lends
        self.scratch = Scratch()
        file = sparse_file(8 * WIDTH)
        commit(file.fd, 0, 8 * WIDTH)
        self.slots = SlotTable(file.fd, WIDTH, 8)
        self.worker = SlotTable(file.fd, WIDTH, 8, 1)
        self.mapped = [Mapping(file.fd, slot * WIDTH, WIDTH) for slot in range(8)]
        file.close()
        self.ring = make_ring(1, 1, 1)
        self.runner = Runner(self.ring, 0, 1, last=True)
        decoder = Decoder(slots=self.slots, mapped=self.mapped, lend=self.lend, **options)
        self.feed = Feed(RunState(), [self.ring], decoder, self)
        cut = Cut(0, 9, 9, 0, 1, 1, 0, 0, 0)._asdict()
        self.feed.begin_epoch(OrderSource(RangeReader(9), 0, cut, cut, 0))
        self.feed.refill()
        # Batches of this structure are now decoded in C.
        self.scratch.clear()
        record = self.scratch.encoder.encode(known)
        self.known = codec.decode(self.scratch.room.memory, record)

    def lend(self, slot, capacity):
        return self.slots.lease(slot, self.mapped[slot]) if self.lends else None

    def decode(self, ring, cell, status, slot, capacity, record):
        return self.slots.lease(slot, self.mapped[slot]), None

    def next(self):
        return next(FeedIterator(self.feed, 0))

    def write(self, batch):
        """Write the next ticket's batch to a slot, and publish the ticket."""
        assert self.runner.claim() is True
        slot = self.worker.take()
        self.scratch.clear()
        record = self.scratch.encoder.encode(batch)
        self.mapped[slot].store_from(0, self.scratch.room.memory, sum(record))
        self.runner.publish(0, record, WIDTH, slot)


class Holder:
    """An object with an array whose bytes are not in its pickle."""

    def __init__(self, length=200):
        self.array = np.arange(length)


def leaves_of(batch):
    """Return the leaves of a batch."""
    leaves = []
    codec.map_leaves(leaves.append, batch)
    return leaves


ARRAY = np.arange(24.0).reshape(2, 3, 4)
BATCHES = [
    np.full((), 7.0), np.zeros(0), np.arange(5), ARRAY, ARRAY.T,
    (ARRAY, np.arange(3)), [ARRAY, [ARRAY[0], (ARRAY[1],)]],
    {f"key {number}": np.arange(number) for number in range(20)},
    [{"a": ARRAY, "b": np.ones(2, np.uint8)}, np.arange(2)],
]  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES, ids=repr)
def test_a_small_batch(batch):
    """C code decodes a small batch of a known structure to writable copies."""
    bench = Written(batch)
    for _ in range(4):
        bench.write(batch)
        got = bench.next()
        assert repr(got) == repr(batch)
        assert all(array.flags.writeable for array in leaves_of(got))
        assert bench.slots.leased == 0


def test_what_is_kept_of_a_small_batch():
    """The memory of an array that is kept, or of part of one, is not reused."""
    batch = {"a": np.arange(5), "b": np.arange(6)}
    bench = Written(batch)
    kept = []
    for number in range(9):
        bench.write({name: array + number for name, array in batch.items()})
        got = bench.next()
        if number % 3 == 0:
            kept.append((number, got["a"][1:], memoryview(got["b"])))
        del got
    for number, part, view in kept:
        assert part.tolist() == list(range(number + 1, number + 5))
        assert list(view) == list(range(number, number + 6))


def test_a_loop_that_drops_its_batches_has_two_blocks():
    """It holds for any number of small batches, even if they become smaller."""
    bench = Written([np.arange(9), np.zeros(4)])
    places = set()
    for length in [9] * 5 + [3] * 4:
        bench.write([np.arange(length), np.zeros(4)])
        got = bench.next()
        places.add(got[0].ctypes.data)
    assert len(places) == 2


@pytest.mark.parametrize("convert", [None, lambda batch: codec.map_leaves(convert_leaf, batch)])
def test_a_batch_with_objects(convert):
    """Pickled parts are decoded with the lock held, and converted unless they are plain."""
    leaf_for = None if convert is None else lambda _: convert_leaf
    batch = [
        ARRAY, "text", {"a": [1]}, np.ma.masked_array([1, 2], [True, False]), np.float32(3),
        OrderedDict(a=ARRAY, b=np.ones(2, np.uint8)),
    ]  # fmt: skip
    bench = Written(batch, convert=convert, leaf_for=leaf_for)
    bench.write(batch)
    want = batch if convert is None else convert(batch)
    assert repr(bench.next()) == repr(want)
    assert bench.slots.leased == 0


def test_objects_with_buffers():
    """Small ones are copied; a large one keeps the slot."""
    bench = Written([ARRAY, Holder(), Holder()])
    for length, leased in [(200, 0), (10_000, 1)]:
        bench.write([ARRAY, Holder(length), Holder()])
        got = bench.next()
        assert [len(each.array) for each in got[1:]] == [length, 200]
        assert bench.slots.leased == leased
        small = got.pop()
        del got
        assert bench.slots.leased == 0
        assert small.array.tolist() == list(range(200))


def test_a_large_batch():
    """A batch that is not small is a view of the slot, and keeps it."""
    most = COPIED // 8
    bench = Written([np.zeros(most)])
    bench.write([np.full(most + 1, 7.0)])
    got = bench.next()
    assert (got[0] == 7).all()
    assert bench.slots.leased == 1
    bench.write([np.zeros(most)])
    assert not bench.next()[0].any()
    assert bench.slots.leased == 1
    del got
    assert bench.slots.leased == 0


def test_small_leaves_of_a_large_batch():
    """They are copied, so that keeping them holds no slot."""
    batch = {"a": np.arange(3), "text": b"x" * COPIED, "large": np.arange(10_000)}
    batch["b"] = np.arange(9)
    bench = Written(batch)
    for _ in range(2):
        bench.write(batch)
        got = bench.next()
        assert repr(got) == repr(batch)
        assert bench.slots.leased == 1
        del got["large"]
        assert bench.slots.leased == 0
        assert got["a"].base is got["b"].base
        assert got["a"].base.nbytes < 200


@pytest.mark.parametrize("large", [1, 10_000])
def test_many_small_leaves(large):
    """Above 64 KiB, they stay in the slot; with three leased slots, they are copied."""
    batch = {f"{number}": np.arange(2000) + number for number in range(8)}
    batch |= {"large": np.arange(large), "last": np.arange(3)}
    bench = Written(batch)
    kept = []
    for number in range(5):
        bench.write(batch)
        got = bench.next()
        assert repr(got) == repr(batch)
        kept.append(got.pop("last"))
        assert bench.slots.leased == min(number + 1, 3 + (large > 1))
        bases = [got[f"{each}"].base for each in range(8)]
        if number >= 3:
            assert all(base.nbytes <= COPIED for base in bases)
            assert bases[0] is bases[3] is not bases[4] is bases[7]
        del got, bases
        assert bench.slots.leased == min(number + 1, 3)
    assert [leaf.tolist() for leaf in kept] == [[0, 1, 2]] * 5


def test_beyond_the_limit_leaves_are_copied_one_by_one():
    """If the slot is not leased, each large leaf is a separate copy."""
    batch = [np.arange(9000), np.arange(9001), Holder(9002), np.arange(3)]
    bench = Written(batch, lends=False)
    bench.write(batch)
    one, two, held, small = bench.next()
    assert bench.slots.leased == 0
    assert [each.base.nbytes for each in (one, two, small)] == [72_000, 72_008, 24]
    assert (one[-1], two[-1], held.array[-1], small[-1]) == (8999, 9000, 9001, 2)


def convert_leaf(leaf):
    """Convert arrays, even masked ones."""
    return -leaf if isinstance(leaf, np.ndarray) else leaf


def test_leaves_are_converted():
    """Each leaf is converted according to its type, here all except bytes."""
    batch = {"a": np.ones(3), "b": [np.ones(2, np.uint8), (np.ones(1, np.int8),)]}
    bench = Written(
        batch,
        convert=lambda _: pytest.fail("converted as a whole"),
        leaf_for=lambda dtype: None if dtype == np.uint8 else np.negative,
    )
    for _ in range(3):
        bench.write(batch)
        got = bench.next()
        assert (got["a"].tolist(), got["b"][0].tolist()) == ([-1] * 3, [1] * 2)
        assert got["b"][1][0].tolist() == [-1]


@pytest.mark.parametrize("batch", BATCHES, ids=repr)
def test_a_batch_of_tensors(batch):
    """Arrays become the tensors of `torch.from_numpy`, on separate storages."""
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    converter = Converter(parse("cpu", None))
    bench = Written(batch, convert=converter.convert, leaf_for=converter.leaf_for)
    plain = leaves_of(bench.known)
    for _ in range(3):
        bench.write(batch)
        for leaf, value in zip(leaves_of(bench.next()), plain, strict=True):
            want = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            assert (type(leaf), repr(leaf)) == (type(want), repr(want))
            if isinstance(value, np.ndarray):
                assert leaf.stride() == want.stride()
                assert leaf.untyped_storage().nbytes() == value.nbytes


def test_tensors_of_a_batch():
    """An indexer's tensors come out unchanged, even of types that numpy lacks."""
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    batch = {
        "float": torch.arange(6.0).view(2, 3), "columns": torch.arange(6).view(2, 3).T,
        "bfloat16": torch.ones(3, dtype=torch.bfloat16), "none": torch.ones(0, 2),
        "bool": torch.tensor(True), "grad": torch.ones(2, requires_grad=True),
    }  # fmt: skip
    bench = Written(batch)
    for _ in range(3):
        bench.write(batch)
        got = bench.next()
        assert list(got) == list(batch)
        for name, tensor in batch.items():
            assert torch.equal(got[name], tensor), name
            assert got[name].dtype == tensor.dtype
            assert got[name].stride() == tensor.stride()
            assert got[name].requires_grad == tensor.requires_grad


def test_a_conversion_to_none():
    """A batch that becomes None is delivered, and converted once."""
    seen = []
    bench = Written(ARRAY, convert=seen.append, leaf_for=lambda _: seen.append)
    bench.write(ARRAY)
    assert bench.next() is None
    assert (len(seen), bench.feed.taken) == (1, 1)


def test_a_batch_while_one_is_taken():
    """A nested operation takes nothing; it may end the generation."""

    def convert(batch):
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            next(batches)
        return batch()

    counter = Counter(convert)
    batches = FeedIterator(counter.feed, 0)
    counter.work(lambda: "first")
    counter.work(counter.run.interrupt)
    assert next(batches) == "first"
    assert counter.feed.taken == 1
    with pytest.raises(InterruptedError, match="newer iterator"):
        next(batches)
    assert counter.feed.taken == 1


class Asking(Counter):
    """A feed of two workers' own items, each with its own queue."""

    def __init__(self):
        room = ring_bytes(5, 20, 1)
        memory = Block(2 * room, zero=True)
        self.rings = [Ring(memory, 5, 20, 1, 1, at=k * room) for k in range(2)]
        self.runners = [Runner(ring, 0, 1, last=True) for ring in self.rings]
        file = sparse_file(8 * GRAIN)
        commit(file.fd, 0, 8 * GRAIN)
        self.slots = SlotTable(file.fd, GRAIN, 8)
        file.close()
        self.feed = Feed(RunState(), [*self.rings], Decoder(slots=self.slots), self)
        self.requests = [Request(self.slots) for _ in range(2)]
        source = ItemSource([*self.rings], 1, self.requests, depth=2)
        self.feed.begin_epoch(source)
        self.feed.generation = 0
        self.feed.refill()

    def answer(self, number, status=BATCH):
        assert self.runners[number].claim() is True
        self.runners[number].publish(status)

    def decode(self, ring, cell, status, slot, capacity, record):
        """Decode an item to its worker and its number."""
        item = ring, self.rings[ring].start(cell)
        return (None, Failed(*item)) if status & RAISED else (item, None)

    def describe(self, ring, cell, error):
        return error, None

    def line(self):
        """Return, for each worker, the items that are requested and not taken."""
        tickets = map(self.feed.tickets, range(2))
        rings = zip(self.rings, tickets, strict=True)
        return [[ring.start(cell) for cell, _ in line] for ring, line in rings]


def test_keys_are_drawn_ahead():
    """At first, several are drawn for each worker, then one for each item that is taken."""
    asking, keys = Asking(), iter([number] for number in range(9))
    source = KeySource(
        [*asking.rings], 2, asking.requests, keys, None,
        depth=2, prefetch=2, in_order=True, free=False,
    )  # fmt: skip
    asking.feed.begin_epoch(source)
    asking.feed.refill()
    assert asking.line() == [[0, 2], [1, 3]]
    asking.answer(0)
    assert next(FeedIterator(asking.feed, 0)) == (0, 0)
    assert asking.line() == [[2, 4], [1, 3]]
    assert next(keys) == [5]


@pytest.mark.parametrize("status", [ENDED, RAISED | ENDED])
def test_the_end_of_a_workers_items(status):
    """Its other tickets are taken back: none of its items follows, and the others continue."""
    asking = Asking()
    assert asking.line() == [[0, 1], [0, 1]]
    asking.answer(0, status)
    asking.answer(1)
    items = FeedIterator(asking.feed, 0)
    if status & RAISED:
        with pytest.raises(Failed):
            next(items)
    assert next(items) == (1, 0)
    assert asking.line() == [[], [1, 2]]
    assert asking.rings[0].depths() == (0, 0, 0)


def test_calls_beside_the_line():
    """They come before the unclaimed tickets; a new call replaces the previous one."""
    asking = Asking()
    request = Request(asking.slots)
    first, last = (asking.feed.post_call(0, request, "a call") for _ in range(2))
    assert asking.rings[0].peek(*first) == ()
    asking.answer(0)
    assert asking.rings[0].peek(*last)
    asking.feed.commit_reply(0, *last, ends=True)
    assert asking.line() == [[], [0, 1]]
