"""How a batch travels to the next runner: as an object, or through a slot.

Threads pass on the object itself (`Objects`). Processes write the batch into the ticket's slot of
shared memory (`SlotWriter`), where the trainer decodes it (`SlotReader`). What converter processes
write there, `converter.export.Imports` fetches. A runner has a `BatchWriter`, and a converter also
a `Source`; the trainer has a `BatchReader`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from cseq._work import ObjectTable, ObjectWriter
from cseq.encoding import codec, failure
from cseq.stage import BATCH, ENDED, RAISED

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from typing_extensions import TypedDict

    from cseq._memory import Mapping, Memory, Reader, Slots
    from cseq._work import Runner
    from cseq.memory.arena import Arena
    from cseq.memory.writer import Writer

    Fields = tuple[int, ...]

    class Ends(TypedDict, total=False):
        """Keywords of `Decoder`."""

        objects: ObjectTable
        slots: Slots
        known: tuple[list[Mapping | None], Reader, Callable[[int, int], Memory | None]]


__all__ = [
    "NO_SLOT",
    "BatchReader",
    "BatchWriter",
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
