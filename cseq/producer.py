"""A worker's side of a stream: makes the items that tickets ask for.

Each worker has a ring of its own. A ticket asks for `count` items from the `start`-th of an epoch
on, or for a call of a method. All that a worker needs to answer it is in shared memory: if the
ticket's epoch or start differs from the worker's (it has replaced a dead one), the worker begins
the epoch from the assignment that the ticket refers to, and goes to `start`.

::

    ticket    epoch, kind, start, count      of the cell
              call, assignment               two requests: six of the cell's words for each
    request   slot, bytes committed, record  data that the trainer has written into a slot
    answer    record, ns, items and flags    one item as a batch; several behind one another,
                                             each as a batch of its own, and a table of them
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cseq import codec, context, failure, indexer
from cseq._core import BEGIN, CALL, ITEMS, Block, Seat, copy_of, now_ns
from cseq.edge import SlotWriter
from cseq.stage import BATCH, INDEXER, run
from cseq.worker import FAILED, READY, enter, send_state
from cseq.writer import Writer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from cseq._core import Memory, Ring

__all__ = [
    "ASSIGNED",
    "BEGIN",
    "BROKEN",
    "CALL",
    "CALLED",
    "ENDED",
    "ENTRY",
    "ITEMS",
    "MOST",
    "SINCE",
    "EncodedItem",
    "Producer",
    "Task",
    "main",
    "parse",
]

ENTRY = "cseq.producer:main"

CALLED, ASSIGNED = slice(0, 6), slice(6, 12)  # the requests among the cell's words
SINCE = 12  # which of them is the time (`now_ns`) at which the worker began the present item
MOST = 64  # items that one ticket can ask for; also the room for words in a cell
ENDED, BROKEN = 1, 2  # flags of an answer: nothing follows; and its last item is an exception
ENTRY_WORDS = 5  # of a table: where an item begins, and its record
SCRATCH = 1 << 16  # bytes
INT64 = np.dtype(np.int64)


class Producer(Protocol):
    """Makes a worker's items, in the main thread of its process.

    Other methods may be called by `Streams.ask`. If there is a method ``close``, it is called when
    the worker ends.
    """

    def begin(self, assignment: Any, /) -> Any:
        """Begin an epoch, also if the last is not over; `Streams.begin` returns the reply."""

    def items(self, start: int, /) -> Iterator[Any]:
        """Return the items of the epoch from the `start`-th on.

        `start` is not 0 only in a process that replaces a dead one. It has the same assignment, and
        must make the same items: skip those before `start`, or make and drop them.
        """


class Task(NamedTuple):
    """What a worker process has to do."""

    number: int
    num_workers: int
    timed: bool = False  # whether items have a time limit


def main(sock: socket.socket, local: Any = None) -> None:
    """Run one worker process.

    Parameters
    ----------
    sock : socket
        To the trainer. When it ends, so does this process.
    local : object, optional
        What makes the producer, where it came by `os.fork` and not through a file.
    """
    entered = enter(sock)
    task = entered.setup.task
    seat = Seat(entered.ring, INDEXER, entered.setup.owner, last=True)
    context.enter(context.Desk(task.number, task.num_workers, 0))
    try:
        make = entered.read(local)
        producer = make(task.number, task.num_workers)
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer
        send_state(sock, FAILED, failure.pack(error))
        return
    send_state(sock, READY)
    run(seat, Making(producer, entered.ring, entered.writer, timed=task.timed))
    indexer.dispose(make, producer, copied=True)


_END = object()


class Making:
    """The work on a ticket: has the producer make the items, and writes them into the slot."""

    def __init__(
        self, producer: Producer, ring: Ring, writer: Writer, *, timed: bool = False
    ) -> None:
        self._producer = producer
        self._timed = timed
        self._ring = ring
        self._writer = writer
        self._scratch = Scratch()
        self._inlet = SlotWriter(writer, None)
        self._rooms = [ring.indices(cell) for cell in range(ring.capacity)]
        self._epoch = 0  # the one the producer is in; the trainer counts them from 1
        self._over = 0  # the one of which nothing follows
        self._items: Iterator[Any] | None = None
        self._at = 0  # which item comes next

    def __call__(self, seat: Seat) -> None:
        """Make what the present ticket asks for, and publish it, or the exception raised."""
        epoch, kind, count = self._ring.ticket(seat.cell)
        try:
            if kind == ITEMS:
                self._make(seat, epoch, count)
            else:
                self._answer(seat, epoch, kind)
        except BaseException as error:  # noqa: BLE001 - SystemExit, too, is the user's to see
            self._end(epoch)
            self._inlet.fail(seat, error)

    def _end(self, epoch: int) -> None:
        """End the stream for this epoch."""
        self._over = epoch
        self._items = None

    def _begin(self, seat: Seat, epoch: int) -> Any:
        """Begin an epoch."""
        self._end(epoch)  # unless it begins
        self._epoch = epoch
        reply = self._producer.begin(self._read(seat, ASSIGNED))
        self._over = 0
        return reply

    def _read(self, seat: Seat, which: slice) -> Any:
        """Read a request: copied, since the slot is used again."""
        slot, capacity, *record = self._rooms[seat.cell][which].tolist()
        self._writer.begin(slot, capacity)
        memory = copy_of(self._writer.memory, codec.used(record))
        return codec.decode(memory, record)

    def _answer(self, seat: Seat, epoch: int, kind: int) -> None:
        """Call a method, and publish what it returns."""
        if kind == BEGIN:
            reply = self._begin(seat, epoch)
        else:
            if epoch not in (0, self._epoch):
                self._begin(seat, epoch)
            method, args = self._read(seat, CALLED)
            reply = getattr(self._producer, method)(*args)
        self._writer.begin(seat.slot, seat.capacity)
        seat.publish(BATCH, codec.encode(reply, self._writer), self._writer.capacity)

    def _make(self, seat: Seat, epoch: int, count: int) -> None:
        """Make the next items."""
        if epoch != self._epoch:
            self._begin(seat, epoch)
        self._writer.begin(seat.slot, seat.capacity)
        if self._over == epoch:
            seat.publish(BATCH, (0, 0, 0, 0, 0, ENDED), self._writer.capacity)
            return
        items = self._go_to(seat.start)
        if count == 1:
            self._make_one(seat, items)
        else:
            self._make_some(seat, items, count)

    def _go_to(self, start: int) -> Iterator[Any]:
        """Return the iterator, at the item where the ticket begins."""
        if self._items is None or self._at != start:
            self._items = None
            self._items = iter(self._producer.items(start))
            self._at = start
        return self._items

    def _make_one(self, seat: Seat, items: Iterator[Any]) -> None:
        """Publish one item, encoded as a batch is."""
        begun = now_ns()
        item = next(items, _END)
        if item is _END:
            self._end(self._epoch)
            seat.publish(BATCH, (0, 0, 0, 0, 0, ENDED))
            return
        writer = self._writer
        record = codec.encode(item, writer)
        self._at += 1
        seat.publish(BATCH, (*record, now_ns() - begun, 1 << 2), writer.capacity)

    def _make_some(self, seat: Seat, items: Iterator[Any], count: int) -> None:
        """Publish several items, each encoded before the next is made.

        An exception behind the first of them is encoded as an item.
        """
        table = array("q")
        made = flags = 0
        begun = now_ns()
        while made < count and not flags:
            if self._timed:
                self._rooms[seat.cell][SINCE] = now_ns()
            try:
                item = next(items, _END)
                if item is _END:
                    flags = ENDED
                    break
                table.extend(self._append(item))
            except BaseException as error:
                if not made:
                    raise
                table.extend(self._append(failure.pack(error)))
                flags = ENDED | BROKEN
                break
            made += 1
        self._at += made
        if flags:
            self._end(self._epoch)
        writer, nbytes = self._writer, len(table) * table.itemsize
        offset = writer.place(nbytes)
        writer.memory.store_bytes(offset, table.tobytes())
        record = (offset, nbytes, 0, 0, now_ns() - begun, made << 2 | flags)
        seat.publish(BATCH, record, writer.capacity)

    def _append(self, item: Any) -> tuple[int, ...]:
        """Encode an item behind the others; offsets in its record count from its beginning."""
        scratch, writer = self._scratch, self._writer
        if type(item) is bytearray:  # one piece, and read as one, wherever it lies
            return 0, *codec.encode(item, writer)
        scratch.clear()
        record = codec.encode(item, scratch)
        offset = writer.place(scratch.used)
        writer.memory.store_from(offset, scratch.memory, scratch.used)
        return offset, *record


class Scratch(Writer):
    """A writer to private memory, for items that are copied into the slot once they are encoded."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(-1, 0)
        self.clear()

    def clear(self) -> None:
        """Drop what was written."""
        self.used = 0
        if self.capacity != SCRATCH:
            self.memory = Block(SCRATCH)
            self.capacity = SCRATCH

    def _grow(self, needed: int) -> None:
        """Move to a larger memory."""
        smaller = self.memory
        self.capacity = 2 * needed
        self.memory = Block(self.capacity)
        self.memory.store_from(0, smaller, self.used)


class EncodedItem(NamedTuple):
    """An item as its worker has encoded it; `decode` makes it an object."""

    memory: Memory
    record: tuple[int, ...]
    slot: int = -1  # where it lies while there are references to `memory`; -1: in private memory

    def decode(self) -> Any:
        """Return the item."""
        return codec.decode(self.memory, self.record)


def parse(memory: Memory, record: tuple[int, ...], *, encoded: bool = False) -> list[Any]:
    """Read the items of an answer that has a table, decoded or not; each has its own memory."""
    words = memory.view(record[0], INT64, (record[1] // 8,)).tolist()
    items = []
    for at in range(0, len(words), ENTRY_WORDS):
        entry = words[at + 1 : at + ENTRY_WORDS]
        own: Memory
        if encoded and not entry[1]:  # a piece of bytes, wherever it lies
            own = copy_of(memory, entry[3], entry[0])
            items.append(EncodedItem(own, (0, 0, 0, entry[3])))
            continue
        own = copy_of(memory, codec.used(entry), words[at]) if entry[1] else memory
        items.append(EncodedItem(own, tuple(entry)) if encoded else codec.decode(own, entry))
    return items
