"""Batches that travel through slots: a worker's end writes them, the trainer leases them."""

from contextlib import contextmanager

import numpy as np
from ringing import Trainer, claim, make_ring

from cseq._memory import commit
from cseq.encoding._codec import Encoder, TicketWriter
from cseq.encoding._room import Room
from cseq.memory._slots import SlotTable
from cseq.memory.descriptors import sparse_file

WIDTH, MOST = 1 << 20, 4096
# A multiple of every system's page size.
PAGE = 65536


@contextmanager
def file_of(nbytes):
    """Make a file without a name; all of it is committed."""
    file = sparse_file(nbytes)
    commit(file.fd, 0, nbytes)
    yield file.fd
    file.close()


class Scratch:
    """A room of a mebibyte, and the encoder that writes into it."""

    def __init__(self):
        with file_of(WIDTH) as fd:
            self.room = Room(fd, WIDTH)
            self.room.select(0, WIDTH)
        self.encoder = Encoder(self.room)

    def clear(self):
        self.room.used = 0


def writer_of(arena):
    """Make a writer that has begun a new slot."""
    writer = TicketWriter(arena.fd, arena.width)
    slot = acquire(arena)
    writer.room.select(slot, arena.slots.nbytes(slot))
    return writer


def acquire(arena):
    """Take the lowest free slot."""
    slot = arena.slots.take()
    arena.request(slot)
    return slot


def shared(most=MOST):
    """Make a table of slots of `WIDTH` bytes, and its file."""
    file = sparse_file(WIDTH * most)
    return file, SlotTable(file.fd, WIDTH, most)


def commit_ticket(slots, slot, used):
    """Commit a ticket in a slot, which is then free or leased."""
    ring = make_ring(cells=1, runners=1)
    trainer = Trainer(ring, 1, slots=slots)
    claim(ring).publish(0, (used,), slot=slot)
    assert trainer.batch() == 0


def lease(slots, slot, mapping):
    """Lease a taken slot, and commit its ticket; the lease frees the slot."""
    leased = slots.lease(slot, mapping)
    slots.resize(slot, mapping.nbytes)
    commit_ticket(slots, slot, mapping.nbytes)
    return leased


def filled(arena, writer, value, nbytes):
    """Fill a slot with a value, and take it."""
    slot = acquire(arena)
    writer.room.select(slot, arena.slots.nbytes(slot))
    array = writer.room.empty(nbytes, np.uint8)
    array[:] = value
    del array
    writer.room.end_slot()
    return take(arena, slot, writer.room.used, writer.room.capacity)


def take(arena, slot, used, capacity):
    """Decode a slot, and commit its ticket."""
    memory = arena.lend(slot, used, capacity)
    commit_ticket(arena.slots, slot, used)
    return memory


def whole(memory, nbytes):
    """Make an array of the start of a memory."""
    return memory.view(0, np.dtype(np.uint8), (nbytes,))
