"""The worker's side of a stream: makes the items that tickets request.

Each worker has its own ring. A ticket requests item `start` of an epoch, the item for a key, a
method call, or the result of `begin`. A replacement process begins the epoch with the assignment in
the ticket, and continues with item `start`.

::

    ticket    epoch, kind, start             fields of the cell
              call or key, assignment        two requests of six words each
              key                            a list of ints, one word each
    request   slot, bytes committed, record  data that the trainer has written to a slot
    answer    record, status                 an item, a reply or an exception, encoded as a batch;
                                             ENDED if no more items follow
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cseq._core import ASSIGNED, CALLED, ITEM, KEY, KEYS, NO_KEY
from cseq._memory import copy_of
from cseq._work import NO_MORE, Work
from cseq.encoding import codec
from cseq.processes.launcher.base import end_copy
from cseq.stage import ENDED, INDEXER, RAISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq._core import Ring
    from cseq._work import BatchWriter, Runner
    from cseq.indexing import context

__all__ = ["ItemTask", "KeyProducer", "Producer"]


class Producer(Protocol):
    """Makes a worker's items, in the main thread of the worker process.

    Other methods can be called with `Streams.ask`. A ``close`` method, if any, is called on exit.
    """

    def begin(self, assignment: Any, /) -> object:
        """Start an epoch even if the last one is unfinished. `Streams.begin` returns the result."""

    def items(self, start: int, /) -> Iterator[object]:
        """Return an iterator over the items of the epoch, starting with item `start`.

        `start` is 0 unless a process has died. Its replacement must make the same items.
        """


class KeyProducer(Protocol):
    """Like a `Producer`, but makes items for keys."""

    def begin(self, assignment: Any, /) -> object:
        """Start an epoch; see `Producer`."""

    def make(self, key: Any, /) -> object:
        """Return the item for a key. Exceptions are raised in the training loop.

        Arrays may be created with `cseq.empty`. If a process dies, some items are made again.
        """


class EitherProducer(Producer, KeyProducer, Protocol):
    """A producer with the methods of both protocols."""


class Making(Work):
    """Calls the producer for each ticket. `work` is implemented in C.

    Epochs are numbered from 1. `_reply` holds the result of `begin` until it is requested.
    `_ended_epoch` is an epoch with no items left. Exceptions are given the status `_failing`.
    """

    end_copy: Callable[[BaseException | None], None] = staticmethod(end_copy)

    def __init__(
        self,
        writer: BatchWriter,
        producer: Any,
        ring: Ring,
        batch_context: context.BatchContext,
    ) -> None:
        self._producer: EitherProducer = producer
        self._ring = ring
        self._writer = writer
        self._room = writer.room
        self._batch_context = batch_context
        self._rooms = [ring.indices(cell).data for cell in range(ring.capacity)]
        self._epoch = 0
        self._reply: object = None
        self._ended_epoch = 0
        self._items: Iterator[object] | None = None
        self._next_number = 0
        self._failing = RAISED

    def answer(self, runner: Runner) -> object:
        """Return the item or reply for the current ticket."""
        epoch, kind, _ = self._ring.ticket(runner.cell)
        room = self._rooms[runner.cell]
        self._failing = RAISED | ENDED
        if kind != ITEM:
            return self._answer_call(runner, epoch, begins=room[KEY] == NO_KEY)
        if room[KEY] == NO_KEY:
            if self._ended_epoch != epoch and epoch != self._epoch:
                self._begin_epoch(runner, epoch)
            items = iter(()) if self._ended_epoch == epoch else self._go_to(runner.start)
            return self._make_item(runner, lambda: next(items, NO_MORE))
        self._failing = RAISED
        if epoch != self._epoch:
            self._begin_epoch(runner, epoch)
        count = room[KEY]
        key = self._read(runner, CALLED) if count < 0 else room[KEYS : KEYS + count].tolist()
        return self._make_item(runner, partial(self._producer.make, key))

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Publish an exception."""
        self._batch_context.allocator = None
        if self._failing & ENDED:
            self._end_epoch(runner.epoch)
        self._writer.fail(runner, error, self._failing)

    def _end_epoch(self, epoch: int) -> None:
        self._ended_epoch = epoch
        self._items = None

    def _begin_epoch(self, runner: Runner, epoch: int) -> None:
        # Treat the epoch as finished until the producer starts it.
        self._end_epoch(epoch)
        self._epoch = 0
        self._reply = self._producer.begin(self._read(runner, ASSIGNED))
        self._epoch, self._ended_epoch = epoch, 0

    def _read(self, runner: Runner, which: slice) -> Any:
        """Decode a copy of a request. The copy is needed because the slot will be reused."""
        slot, capacity, *record = self._rooms[runner.cell][which].tolist()
        assert self._room is not None
        memory = copy_of(self._room.mapping_of(slot, capacity), sum(record))
        return codec.decode(memory, record)

    def _answer_call(self, runner: Runner, epoch: int, *, begins: bool) -> object:
        """Return the reply to a call. Arrays are not created in the slot."""
        if epoch not in (0, self._epoch):
            self._begin_epoch(runner, epoch)
        if begins:
            reply, self._reply = self._reply, None
        else:
            call: tuple[str, tuple[object, ...]] = self._read(runner, CALLED)
            reply = getattr(self._producer, call[0])(*call[1])
        self._writer.begin_ticket()
        return reply

    def _go_to(self, start: int) -> Iterator[object]:
        if self._items is None or self._next_number != start:
            self._items = None
            self._items = iter(self._producer.items(start))
            self._next_number = start
        return self._items

    def _make_item(self, runner: Runner, make: Callable[[], object]) -> object:
        """Make an item. `cseq.empty` creates arrays in the slot."""
        self._writer.begin_ticket()
        self._batch_context.allocator = self._room
        self._batch_context.item = runner.start
        item = make()
        self._batch_context.allocator = None
        if item is NO_MORE:
            self._end_epoch(self._epoch)
        else:
            self._next_number += 1
            self._failing = RAISED
        return item


class Serving(Making):
    """Calls the producer in a thread. The ring holds requests as Python objects."""

    def _read(self, runner: Runner, which: slice) -> object:
        assignment, key, _ = self._ring.kept[runner.cell]
        return (assignment if which == ASSIGNED else key).value


class ItemTask(NamedTuple):
    """The task of a `Streams` worker: make items."""

    num_workers: int
    stage: int = INDEXER
    last: bool = True
    seed: int = 0

    def make(
        self,
        read: Callable[[], Callable[[int, int], Producer | KeyProducer]],
        batch_context: context.BatchContext,
        *,
        copied: bool,  # noqa: ARG002 - for batches
    ) -> tuple[object, Any]:
        """Return the user's object and its producer."""
        make = read()
        return make, make(batch_context.number, self.num_workers)

    def work(
        self,
        producer: Any,
        ring: Ring,
        batch_context: context.BatchContext,
        writer: BatchWriter,
        tell: Callable[[str], object],  # noqa: ARG002 - for batches
        convert: Callable[[Any], object] | None,  # noqa: ARG002 - for batches
    ) -> Making:
        """Return the object that processes tickets."""
        kind = Serving if writer.room is None else Making
        return kind(writer, producer, ring, batch_context)
