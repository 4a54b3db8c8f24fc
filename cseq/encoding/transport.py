"""How a batch travels to the next runner: as an object, or through a slot.

Threads pass on the object itself (`Objects`). Processes write the batch into the ticket's slot of
shared memory (`Writer`), where the trainer decodes it (`SlotReader`). What converter processes
write there, `converter.export.Imports` fetches. A runner has a `BatchWriter`, and a converter also
a `Source`; the trainer has a `BatchReader`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from cseq._work import ObjectWriter
from cseq.encoding import codec, failure
from cseq.stage import BATCH, RAISED

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import TypedDict

    from cseq._memory import Mapping, Memory, PlanReader, SlotTable
    from cseq._work import ObjectTable, Runner
    from cseq.encoding.writer import Writer
    from cseq.memory.arena import Arena

    Fields = tuple[int, ...]

    class Ends(TypedDict, total=False):
        """Keywords of `Decoder`."""

        objects: ObjectTable
        slots: SlotTable
        known: tuple[list[Mapping | None], PlanReader, Callable[[int, int], Memory | None]]


__all__ = ["NO_SLOT", "BatchReader", "BatchWriter", "Objects", "SlotReader", "Source"]

NO_SLOT = 0xFFFFFFFF  # of a ticket that lies in none

log = logging.getLogger("cseq")


# What a runner, a converter and the trainer have. A reader changes nothing: `Feed` frees the cell.
BatchWriter: TypeAlias = "Objects | Writer"
Source: TypeAlias = "Objects | SlotReader | Writer"
BatchReader: TypeAlias = "Objects | SlotReader"


class Objects(ObjectWriter):
    """Both ends between threads: one object for each cell of the ring.

    Parameters
    ----------
    below : SlotReader, optional
        Reads the batches of the stage before, if that writes to slots.
    """

    def __init__(self, cells: int, below: SlotReader | None = None) -> None:  # noqa: ARG002
        self._below = below

    @property
    def ends(self) -> Ends:
        """The objects, by cell, and the slots of the stage before."""
        below: Ends = {} if self._below is None else self._below.ends
        below.pop("known", None)
        return {**below, "objects": self.objects}

    def write(self, runner: Runner, batch: Any) -> tuple[int, ...]:
        """Store the batch under the cell's number, for the next stage, or the trainer."""
        self.objects[runner.cell] = batch
        return ()

    def publish(self, runner: Runner, record: tuple[int, ...]) -> None:
        """Publish the ticket; the caller holds no reference to the batch any more."""
        runner.publish(BATCH, record)

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Store the exception under the cell's number."""
        self.objects[runner.cell] = error
        runner.publish(RAISED)

    def fetch(self, runner: Runner) -> Any:
        """Return the batch of the present ticket."""
        return self.objects[runner.cell]

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Any:  # noqa: ARG002
        """Return the object."""
        return self.objects[cell]

    def error(self, cell: int, slot: int, capacity: int, record: Fields) -> BaseException:
        """Return the exception, from the slot if it was raised in the stage before."""
        error: BaseException | None = self.objects[cell]
        if error is None:  # a thread may raise before its batch has left the slot
            assert self._below is not None
            return self._below.error(cell, slot, capacity, record)
        return error


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
        runner.free_slot(self._arena.slots)
        return batch
