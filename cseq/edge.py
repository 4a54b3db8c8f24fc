"""How a batch crosses to the next runner: as an object, or through a slot.

Threads hand over the object itself (`Objects`); processes write it into the ticket's slot of shared
memory (`SlotWriter`), where the trainer finds it (`SlotReader`). What converter processes write
there only says where on the device the batch is: `Imports` fetches it. A runner holds the edge it
fills, and a converter also the one it empties.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cseq import codec, failure
from cseq._core import SMALL
from cseq.stage import BATCH, CONVERTER, RAISED

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from cseq._core import Mapping, Memory, Ring, Seat
    from cseq.arena import Arena, Writer

    Fields = tuple[int, ...]

__all__ = [
    "NO_SLOT",
    "Importer",
    "Imports",
    "Inlet",
    "Lost",
    "Objects",
    "Outlet",
    "SlotReader",
    "SlotSource",
    "SlotWriter",
    "Source",
]

NO_SLOT = 0xFFFFFFFF  # a ticket whose batch lies in no slot

log = logging.getLogger("cseq")


class Lost(RuntimeError):
    """A batch lies in the memory of a process that has ended."""


class Inlet(Protocol):
    """The end that a runner fills."""

    @property
    def begin(self) -> Callable[[Seat], None]:
        """Get ready for the ticket in hand."""

    @property
    def give(self) -> Callable[[Seat, Any], bool]:
        """Hand a batch on, if that can be done in one step; else return False."""

    def write(self, seat: Seat, batch: Any) -> tuple[int, ...]:
        """Put the batch where the next one finds it."""

    def publish(self, seat: Seat, record: tuple[int, ...]) -> None:
        """Hand the ticket on; the caller has let go of the batch."""

    def fail(self, seat: Seat, error: BaseException) -> None:
        """Hand the ticket on with an exception instead of a batch."""


class Source(Protocol):
    """The end that a converter empties."""

    def fetch(self, seat: Seat) -> Any:
        """Return the batch of the ticket in hand."""


class Outlet(Protocol):
    """The end that the trainer empties.

    A slot that comes back with a batch is free for the next ticket; -1: it is in use elsewhere.
    """

    @property
    def source(self) -> Any:
        """Where batches are that can go the short way (`Exchange`); None if there is none."""

    def room(self) -> tuple[int, int]:
        """Return slot and committed bytes for a ticket about to be posted."""

    def collect(self, cell: int, slot: int, capacity: int, record: Fields) -> tuple[Any, int]:
        """Take the batch out: it, and the slot."""

    def error(
        self, cell: int, slot: int, capacity: int, record: Fields
    ) -> tuple[BaseException, int]:
        """Take the exception out: it, and the slot."""

    def release(self, slot: int) -> None:
        """Free a slot that came back, and that no ticket is posted in."""

    def drop(self, cell: int, slot: int) -> None:
        """Throw away whatever a given-up ticket holds, and free its slot."""

    def keep(self, slots: list[int]) -> None:
        """Free all slots but those of the cells: an exception may have lost some."""


class Importer(Protocol):
    """Who fetches batches out of converter processes (`converter.Receiver`)."""

    def unpack(self, batch: Any, /) -> Any:
        """Fetch a batch; raises `Lost` if it is gone."""

    def discard(self, batch: Any, /) -> None:
        """Let go of what of a batch was not fetched."""


class Objects:
    """Both ends between threads: one object for each cell of the ring.

    Parameters
    ----------
    cells : int
    below : SlotReader, optional
        Where the stage before put its batches, if that is not here as well.
    """

    def __init__(self, cells: int, below: SlotReader | None = None) -> None:
        self._held: list[Any] = [None] * cells
        self._below = below

    @property
    def source(self) -> list[Any] | None:
        """The objects, by cell, if that is all there is to it."""
        return self._held if self._below is None else None

    def begin(self, seat: Seat) -> None:
        """Nothing to do."""

    def give(self, seat: Seat, batch: Any) -> bool:
        """Leave the batch in the cell's place, and hand the ticket on."""
        self._held[seat.cell] = batch
        seat.publish()
        return True

    def write(self, seat: Seat, batch: Any) -> tuple[int, ...]:
        """Leave the batch in the cell's place."""
        self._held[seat.cell] = batch
        return ()

    def publish(self, seat: Seat, record: tuple[int, ...]) -> None:
        """Hand the ticket on."""
        seat.publish(BATCH, record)

    def fail(self, seat: Seat, error: BaseException) -> None:
        """Leave the exception in the cell's place."""
        self._held[seat.cell] = error
        seat.publish(RAISED)

    def fetch(self, seat: Seat) -> Any:
        """Return the batch of a ticket in hand."""
        return self._held[seat.cell]

    def room(self) -> tuple[int, int]:
        """Take a slot if the stage before needs one."""
        return (NO_SLOT, 0) if self._below is None else self._below.room()

    def collect(self, cell: int, slot: int, capacity: int, record: Fields) -> tuple[Any, int]:  # noqa: ARG002
        """Take the object out."""
        batch, self._held[cell] = self._held[cell], None
        return batch, slot if self._below is None else -1

    def error(
        self, cell: int, slot: int, capacity: int, record: Fields
    ) -> tuple[BaseException, int]:
        """Take the exception out, from the slot if it was raised in the stage before."""
        if self._below is not None and slot != NO_SLOT:
            return self._below.error(cell, slot, capacity, record)
        return self.collect(cell, slot, capacity, record)

    def release(self, slot: int) -> None:
        """Free a slot of the stage before."""
        if self._below is not None:
            self._below.release(slot)

    def drop(self, cell: int, slot: int) -> None:
        """Forget the object."""
        self._held[cell] = None
        self.release(slot)

    def keep(self, slots: list[int]) -> None:
        """Nothing: converters, too, have slots that are in no cell."""


class SlotWriter:
    """A worker process's end: writes into the slot of the ticket in hand."""

    def __init__(self, writer: Writer, cast: np.dtype[Any] | None) -> None:
        self._writer = writer
        self._cast = cast
        # The writer's methods, without a call in between.
        self.begin = writer.turn
        self.give = writer.give

    def write(self, seat: Seat, batch: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Encode the batch."""
        self._writer.settle()
        return codec.encode(batch, self._writer, self._cast)

    def publish(self, seat: Seat, record: tuple[int, ...]) -> None:
        """Hand the ticket on; arrays in the slot that the indexer has kept stay where they are."""
        self._writer.end()
        self._writer.publish(seat, BATCH, record)

    def fail(self, seat: Seat, error: BaseException) -> None:
        """Write the exception into the slot; its text alone, if memory is short."""
        try:
            record = self._write_error(seat, failure.pack(error))
        except MemoryError:  # the slot's first pages are always there
            record = self._write_error(seat, failure.pack_text(error))
        self._writer.publish(seat, RAISED, record)

    def _write_error(self, seat: Seat, packed: bytes) -> tuple[int, ...]:
        """Write a packed exception instead of whatever the slot holds."""
        self._writer.begin(seat.slot, seat.capacity)
        record = codec.encode(packed, self._writer, None)
        self._writer.end()
        return record


class SlotReader:
    """The trainer's end of the slots."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def source(self) -> tuple[dict[int, Mapping], dict[bytes, Any], int] | None:
        """Where a small array is found."""
        return self._arena.mapped, codec.singles, SMALL

    def room(self) -> tuple[int, int]:
        """Take a free slot."""
        slot = self._arena.acquire()
        return slot, self._arena.capacity(slot)

    def collect(self, cell: int, slot: int, capacity: int, record: Fields) -> tuple[Any, int]:  # noqa: ARG002
        """Decode the batch: views on the slot, or on a copy if it is small or many are held."""
        batch = codec.decode_copy(self._arena.look(slot, capacity), record, SMALL)
        if batch is not None:  # a batch that is None goes the long way
            return batch, slot
        memory = self._arena.take(slot, codec.used(record), capacity)
        return codec.decode(memory, record), -1

    def error(
        self, cell: int, slot: int, capacity: int, record: Fields
    ) -> tuple[BaseException, int]:
        """Restore the exception."""
        packed, slot = SlotReader.collect(self, cell, slot, capacity, record)
        return failure.unpack(packed), slot

    def fetch(self, seat: Seat) -> Any:
        """Decode the batch of a ticket in hand, in a converter thread; it leaves the ring."""
        slot = seat.slot
        seat.attach()
        batch, kept = self.collect(seat.cell, slot, seat.capacity, seat.record)
        seat.detach()
        self.release(slot if kept >= 0 else NO_SLOT)
        return batch

    def release(self, slot: int) -> None:
        """Free the slot."""
        if slot != NO_SLOT:
            self._arena.release(slot)

    def drop(self, cell: int, slot: int) -> None:  # noqa: ARG002
        """Free the slot; an exception in `collect` may have left it leased, or free."""
        if slot != NO_SLOT:
            self._arena.reclaim(slot)

    def keep(self, slots: list[int]) -> None:
        """Free all slots but these, and those in the user's hands."""
        self._arena.keep(slots)


class _Parcel(NamedTuple):
    """A batch from a converter process that is being fetched."""

    cell: int
    slot: int  # -1: leased, by the memory
    memory: Memory  # what lies in the slot
    packed: Any  # what the converter has written there


class Imports(SlotReader):
    """The trainer's end of the slots behind converter processes.

    What a converter has written says where on the device the batch lies, in memory that goes with
    its process. The indexer's batch still lies in the slot, and its record in the cell: a batch
    that is gone is converted here, from that. So it is fetched before the slot is used again.

    Parameters
    ----------
    arena : Arena
    ring : Ring
    importer : Importer
    convert : callable
        Converts an indexer's batch at once.

    Attributes
    ----------
    lost : int
        Batches that were converted here.
    """

    def __init__(
        self, arena: Arena, ring: Ring, importer: Importer, convert: Callable[[Any], Any]
    ) -> None:
        super().__init__(arena)
        self._ring = ring
        self._importer = importer
        self._convert = convert
        self._hand: _Parcel | None = None  # an exception on the way (Ctrl-C) leaves it here
        self.lost = 0

    @property
    def source(self) -> None:
        """Nothing of it can go the short way."""

    def collect(self, cell: int, slot: int, capacity: int, record: Fields) -> tuple[Any, int]:
        """Fetch the batch, or convert it here."""
        parcel = self._hand = self._open(cell, slot, capacity, record)
        try:
            batch = self._importer.unpack(parcel.packed)
        except Lost as error:
            # Not the error itself: whoever keeps the log's records would keep the slot.
            batch = self._convert_here(parcel, str(error))
        self._hand = None
        return batch, parcel.slot

    def _open(self, cell: int, slot: int, capacity: int, record: Fields) -> _Parcel:
        """Read what a converter has written."""
        nbytes = codec.used(record)
        if nbytes <= SMALL:
            memory = self._arena.copy(slot, nbytes, capacity)
        else:
            memory = self._arena.take(slot, nbytes, capacity)
            slot = -1
        return _Parcel(cell, slot, memory, codec.decode(memory, record))

    def _convert_here(self, parcel: _Parcel, reason: str) -> Any:
        """Convert the indexer's batch."""
        self._importer.discard(parcel.packed)
        epoch, number, _ = self._ring.ticket(parcel.cell)
        log.warning("epoch %d, batch %d is converted again: %s", epoch, number, reason)
        record = self._ring.left_in(parcel.cell)[3]
        batch = self._convert(codec.decode(parcel.memory, record))
        self.lost += 1
        return batch

    def drop(self, cell: int, slot: int) -> None:
        """Let the converter have its memory back, and free the slot."""
        parcel, self._hand = self._hand, None
        if parcel is None or parcel.cell != cell:
            parcel = self._given_up(cell, slot)
        if parcel is not None:
            self._importer.discard(parcel.packed)
        super().drop(cell, slot)

    def _given_up(self, cell: int, slot: int) -> _Parcel | None:
        """Read what a converter has written for nobody, where it lies."""
        stage, status, capacity, _, record = self._ring.left_in(cell)
        if stage != CONVERTER or status != BATCH:
            return None
        memory = self._arena.look(slot, capacity)
        return _Parcel(cell, slot, memory, codec.decode(memory, record))


class SlotSource:
    """A converter process's end of the slots: reads what the indexer wrote, where it lies."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def fetch(self, seat: Seat) -> Any:
        """Decode the batch of the ticket in hand; what is written goes behind it."""
        writer, record = self._writer, seat.record
        writer.begin(seat.slot, seat.capacity)
        writer.resume(codec.used(record))
        return codec.decode(writer.loan(), record)
