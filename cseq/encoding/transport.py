"""How a batch travels to the next runner: as an object, or through a slot.

Threads pass on the object itself (`Objects`). Processes write the batch into the ticket's slot of
shared memory (`SlotWriter`), where the trainer decodes it (`SlotReader`). Converter processes write
handles of tensors on the device there, and `Imports` fetches the tensors. A runner has a
`BatchWriter`, and a converter also a `Source`; the trainer has a `BatchReader`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cseq._work import ObjectTable, ObjectWriter
from cseq.encoding import codec, failure
from cseq.stage import BATCH, CONVERTER, ENDED, RAISED

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from typing_extensions import TypedDict

    from cseq._core import Ring
    from cseq._memory import Mapping, Memory, Reader, Slots
    from cseq._work import Runner
    from cseq.memory.arena import Arena
    from cseq.memory.writer import Writer

    Fields = tuple[int, ...]

    class Ends(TypedDict, total=False):
        """Keywords of `Decoder`."""

        objects: ObjectTable
        slots: Slots
        known: tuple[list[Mapping | None], Reader, Callable[[int, int, int], Memory | None]]


__all__ = [
    "NO_SLOT",
    "BatchReader",
    "BatchWriter",
    "Importer",
    "Imports",
    "Lost",
    "Objects",
    "SlotReader",
    "SlotSource",
    "SlotWriter",
    "Source",
]

NO_SLOT = 0xFFFFFFFF  # of a ticket that lies in none

log = logging.getLogger("cseq")


# What a runner, a converter and the trainer have. A reader changes nothing: `Feed` frees the cell.
BatchWriter: TypeAlias = "Objects | SlotWriter"
Source: TypeAlias = "Objects | SlotReader"
BatchReader: TypeAlias = "Objects | SlotReader"


class Lost(RuntimeError):
    """A batch lies in the memory of a process that has ended."""


class Importer(Protocol):
    """Fetches batches out of converter processes (`converter.export.Receiver`)."""

    def unpack(self, batch: Any, /) -> Any:
        """Fetch a batch; raises `Lost` if it is gone."""

    def discard(self, batch: Any, /) -> None:
        """Release the part of a batch that was not fetched."""


class Objects:
    """Both ends between threads: one object for each cell of the ring.

    Parameters
    ----------
    below : SlotReader, optional
        Reads the batches of the stage before, if that writes to slots.
    """

    def __init__(self, cells: int, below: SlotReader | None = None) -> None:
        self._held = ObjectTable(cells)
        self._below = below
        self.ticket_writer = ObjectWriter(self._held)

    @property
    def ends(self) -> Ends:
        """The objects, by cell, and the slots of the stage before."""
        below: Ends = {} if self._below is None else self._below.ends
        below.pop("known", None)
        return {**below, "objects": self._held}

    def write(self, runner: Runner, batch: Any) -> tuple[int, ...]:
        """Store the batch under the cell's number, for the next stage, or the trainer."""
        self._held[runner.cell] = batch
        return ()

    def publish(self, runner: Runner, record: tuple[int, ...]) -> None:
        """Publish the ticket; the caller holds no reference to the batch any more."""
        runner.publish(BATCH, record)

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Store the exception under the cell's number."""
        self._held[runner.cell] = error
        runner.publish(RAISED)

    def fetch(self, runner: Runner) -> Any:
        """Return the batch of the present ticket."""
        return self._held[runner.cell]

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Any:  # noqa: ARG002
        """Return the object."""
        return self._held[cell]

    def error(self, cell: int, slot: int, capacity: int, record: Fields) -> BaseException:
        """Return the exception, from the slot if it was raised in the stage before."""
        error: BaseException | None = self._held[cell]
        if error is None:  # a thread may raise before its batch has left the slot
            assert self._below is not None
            return self._below.error(cell, slot, capacity, record)
        return error


class SlotWriter:
    """A worker process's end: writes into the slot of the present ticket."""

    def __init__(self, writer: Writer, cast: np.dtype[Any] | None) -> None:
        self._writer = writer
        self._cast = writer.cast = cast
        writer.dump = codec.dump
        self.ticket_writer = writer
        # Its methods, without a call in between.
        self.begin = writer.begin_ticket
        self.try_publish = writer.try_publish

    def write(self, runner: Runner, batch: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Encode the batch."""
        self._writer.settle()
        return codec.encode(batch, self._writer, self._cast)

    def publish(self, runner: Runner, record: tuple[int, ...]) -> None:
        """Publish the ticket; arrays in the slot that the indexer has kept stay where they are."""
        self._writer.end()
        self._writer.publish(runner, BATCH, record)

    def end_items(self, runner: Runner) -> None:
        """Publish the ticket with nothing: no more follows in this queue."""
        self._writer.settle()
        self._writer.end()
        self._writer.publish(runner, ENDED, (0, 0, 0, 0))

    def fail(self, runner: Runner, error: BaseException, status: int = RAISED) -> None:
        """Write the exception into the slot; its text alone, if memory is short."""
        try:
            record = self._write_error(runner, failure.pack(error))
        except MemoryError:
            try:
                record = self._write_error(runner, failure.pack_text(error))
            except MemoryError:  # there is not even a slot
                runner.publish(status)
                return
        self._writer.publish(runner, status, record)

    def _write_error(self, runner: Runner, packed: bytes) -> tuple[int, ...]:
        """Write a packed exception over what the slot holds."""
        if self._writer.slots is None:  # a converter writes over the indexer's batch
            self._writer.select(runner.slot, runner.capacity)
        else:
            self._writer.begin()
        record = codec.encode(packed, self._writer, None)
        self._writer.end()
        return record


class SlotReader:
    """The trainer's end of the slots."""

    in_c = True  # whether C may decode what lies in a slot

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def ends(self) -> Ends:
        """The slots, and how batches of a known structure are read."""
        if not self.in_c:
            return {"slots": self._arena.slots}
        return {
            "slots": self._arena.slots,
            "known": (self._arena.mapped, codec.reader, self._arena.lease),
        }

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Any:  # noqa: ARG002
        """Decode the batch: small leaves are copies; large ones lie in the slot if they may."""
        memory = self._arena.mapping_of(slot, capacity)
        return codec.decode(memory, record, self._arena.lease, slot, capacity)

    def error(self, cell: int, slot: int, capacity: int, record: Fields) -> BaseException:
        """Restore the exception."""
        if slot == NO_SLOT:
            return MemoryError(
                "no room in shared memory for a batch, nor for the text of its error"
            )
        return failure.unpack(SlotReader.decode(self, cell, slot, capacity, record))

    def fetch(self, runner: Runner) -> Any:
        """Decode the batch of the present ticket, in a converter thread; then it has no slot."""
        slot, used = runner.slot, codec.used(runner.record)
        # All of it where it lies: page-locked, and dropped once it is on the device.
        batch = codec.decode(self._arena.lend(slot, used, runner.capacity), runner.record)
        self._arena.slots.adopt(slot, used)
        runner.detach()
        self._arena.slots.vacate(slot)
        return batch


class Imports(SlotReader):
    """The trainer's end of the slots that converter processes write to.

    A converter writes handles of tensors in its device memory, which is freed when its process
    ends. The indexer's batch still lies in the slot, and its record in the cell. If the converted
    batch is gone, or an exception was raised while it was fetched, the indexer's is converted here.

    Parameters
    ----------
    convert : callable
        Converts an indexer's batch at once.

    Attributes
    ----------
    lost : int
        Batches that were converted here.
    """

    in_c = False

    def __init__(
        self, arena: Arena, ring: Ring, importer: Importer, convert: Callable[[Any], Any]
    ) -> None:
        super().__init__(arena)
        self._ring = ring
        self._importer = importer
        self._convert = convert
        # The ticket that was decoded last, and the handles that the converter has written for it.
        # The feed decodes a ticket again only if an exception interrupted the first time.
        self._fetched: tuple[int, Any] = 0, None
        # By ticket, what is being discarded: so what an interrupted discard has released already is
        # not released again.
        self._discarded: dict[int, Any] = {}
        self.lost = 0

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Any:
        """Fetch the batch, or convert it here."""
        token = self._ring.token(cell)
        if token == self._fetched[0]:
            return self._convert_here(cell, "an exception was raised while it was fetched")
        packed = super().decode(cell, slot, capacity, record)
        self._fetched = token, packed
        try:
            return self._importer.unpack(packed)
        except Lost as error:
            # As text: a log record that keeps the error would keep the slot.
            return self._convert_here(cell, str(error))

    def _convert_here(self, cell: int, reason: str) -> Any:
        """Convert the indexer's batch."""
        self._importer.discard(self._fetched[1])
        epoch, number, _ = self._ring.ticket(cell)
        log.warning("epoch %d, batch %d is converted again: %s", epoch, number, reason)
        _, _, slot, capacity, record, _ = self._ring.left_in(cell)
        memory = self._arena.lend(slot, codec.used(record), capacity)
        batch = self._convert(codec.decode(memory, record))
        self.lost += 1
        return batch

    def discard(self, cell: int) -> None:
        """Give the memory of a batch that was given up back to its converter."""
        stage, status, slot, capacity, _, record = self._ring.left_in(cell)
        token = self._ring.token(cell)
        if token == self._fetched[0]:
            self._importer.discard(self._fetched[1])
        elif stage == CONVERTER and status == BATCH:
            if token not in self._discarded:
                memory = self._arena.mapping_of(slot, capacity)
                self._discarded[token] = codec.decode(memory, record)
            self._importer.discard(self._discarded[token])
            del self._discarded[token]


class SlotSource:
    """A converter process's end of the slots: reads the indexer's batch in place."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def fetch(self, runner: Runner) -> Any:
        """Decode the batch of the present ticket; the converter will write after it."""
        writer, record = self._writer, runner.record
        writer.select(runner.slot, runner.capacity)
        writer.resume(codec.used(record))
        return codec.decode(writer.loan(), record)
