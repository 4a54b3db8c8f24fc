"""Batches that go through slots: written by a worker's end, leased by the trainer's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from ringing import Trainer, claim, make_ring

from cseq._memory import commit
from cseq.encoding._codec import Encoder, TicketWriter
from cseq.encoding._room import Room
from cseq.memory._slots import SlotTable
from cseq.memory.descriptors import sparse_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq._memory import Descriptor, Mapping
    from cseq.memory._slots import Lease
    from cseq.memory.arena import Arena


WIDTH, MOST = 1 << 20, 4096
PAGE = 65536  # a multiple of every system's page size


@contextmanager
def file_of(nbytes: int) -> Iterator[int]:
    """Make a file without a name, all of it committed."""
    file = sparse_file(nbytes)
    commit(file.fd, 0, nbytes)
    yield file.fd
    file.close()


class Scratch:
    """A room of a mebibyte, and what encodes into it."""

    def __init__(self) -> None:
        with file_of(WIDTH) as fd:
            self.room = Room(fd, WIDTH)
            self.room.select(0, WIDTH)
        self.encoder = Encoder(self.room)

    def clear(self) -> None:
        """Drop what was written."""
        self.room.used = 0


def writer_of(arena: Arena) -> TicketWriter:
    """Make a writer that has begun with a new slot."""
    writer = TicketWriter(arena.fd, arena.width)
    slot = acquire(arena)
    writer.room.select(slot, arena.slots.nbytes(slot))
    return writer


def acquire(arena: Arena) -> int:
    """Take the lowest free slot."""
    slot = arena.slots.take()
    arena.request(slot)
    return slot


def shared(most: int = MOST) -> tuple[Descriptor, SlotTable]:
    """Make a table of slots of `WIDTH` bytes, and its file."""
    file = sparse_file(WIDTH * most)
    return file, SlotTable(file.fd, WIDTH, most)


def commit_ticket(slots: SlotTable, slot: int, used: int) -> None:
    """Commit a ticket that lies in a slot, which is then free, or leased."""
    ring = make_ring(cells=1, runners=1)
    trainer = Trainer(ring, 1, slots=slots)
    claim(ring).publish(0, (used,), slot=slot)
    assert trainer.batch() == 0


def lease(slots: SlotTable, slot: int, mapping: Mapping) -> Lease:
    """Lease a taken slot, and commit its ticket: the lease frees it."""
    leased = slots.lease(slot, mapping)
    slots.resize(slot, mapping.nbytes)
    commit_ticket(slots, slot, mapping.nbytes)
    return leased


def filled(arena: Arena, writer: TicketWriter, value: int, nbytes: int) -> Any:
    """Fill a slot with a value, and take it."""
    slot = acquire(arena)
    writer.room.select(slot, arena.slots.nbytes(slot))
    array = writer.room.empty(nbytes, np.uint8)
    array[:] = value
    del array
    writer.room.end()
    return take(arena, slot, writer.room.used, writer.room.capacity)


def take(arena: Arena, slot: int, used: int, capacity: int) -> Any:
    """Decode a slot, and commit its ticket."""
    memory = arena.lend(slot, used, capacity)
    commit_ticket(arena.slots, slot, used)
    return memory


def whole(memory: Any, nbytes: int) -> np.ndarray[Any, Any]:
    """Make an array of the beginning of a memory."""
    array: np.ndarray[Any, Any] = memory.view(0, np.dtype(np.uint8), (nbytes,))
    return array
