"""Passes batches to a converter or the trainer, as objects or through slots.

Threads pass the object on (`Objects`). Processes write batches to slots in shared memory
(`TicketWriter`). The trainer reads them with `SlotReader`, or with `converter.export.Imports` if
converters are processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cseq.encoding import codec, failure
from cseq.encoding._codec import Decoder, Objects, TicketWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._work import Runner
    from cseq.memory.arena import Arena

    Fields = tuple[int, ...]
    Convert = Callable[[Any], object]
    LeafFor = Callable[[Any], Convert | None]

__all__ = ["NO_SLOT", "BatchReader", "SlotReader", "Source"]

# Used as the slot number if a ticket has no slot.
NO_SLOT = 0xFFFFFFFF

# A source does not change the ticket. The `Feed` frees the ticket's cell.
Source: TypeAlias = "Objects | SlotReader | TicketWriter"
BatchReader: TypeAlias = "Objects | SlotReader"


class SlotReader:
    """Reads batches and exceptions from slots, in the trainer."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def decoder(self, *, convert: Convert | None, leaf_for: LeafFor | None) -> Decoder:
        """Create a C decoder for batches in slots that are already mapped."""
        slots, mapped, lend = self.arena.slots, self.arena.mapped, self.arena.lease
        return Decoder(slots=slots, mapped=mapped, lend=lend, convert=convert, leaf_for=leaf_for)

    def decode(self, entry: int, slot: int, capacity: int, record: Fields) -> object:  # noqa: ARG002
        """Decode a batch. Small leaves are copied. Large ones stay in the slot, if possible."""
        memory = self.arena.mapping_of(slot, capacity)
        return codec.decode(memory, record, self.arena.lease, slot, capacity)

    def error(self, entry: int, slot: int, capacity: int, record: Fields) -> BaseException:
        """Return the exception in a slot."""
        if slot == NO_SLOT:
            return MemoryError("not enough shared memory for a batch or for the text of its error")
        packed: Any = SlotReader.decode(self, entry, slot, capacity, record)
        return failure.unpack(packed)

    def fetch(self, runner: Runner) -> object:
        """Decode the batch of a converter's ticket and free the slot."""
        slot, used = runner.slot, sum(runner.record)
        # Do not copy the page-locked batch, because it is dropped once it is on the device.
        batch = codec.decode(self.arena.lend(slot, used, runner.capacity), runner.record)
        self.arena.slots.free_cell(runner.ring, runner.cell)
        return batch
