"""Both ends of parcels in one process: a trainer's ring with its carrier, and a ring of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ringing import make_ring

from cseq._parcel import Carrier, ParcelFeed
from cseq._slots import Slots
from cseq._work import Runner
from cseq.encoding.transport import SlotReader, SlotWriter
from cseq.memory.arena import Arena
from cseq.memory.writer import Writer
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from cseq._core import Ring


def writer_for(arena: Arena) -> Writer:
    """Make the end of the slots of worker 1."""
    segment = arena.segment
    return Writer(segment.fd, segment.width, Slots(segment.fd, segment.width, segment.slots, 1))


class Trainer:
    """A ring whose only runner is a carrier, and the slots that it publishes in."""

    def __init__(self, cells: int = 8, size: int = 4) -> None:
        self.ring = make_ring(cells, size, runners=1)
        self.arena = Arena()
        self.writer = writer_for(self.arena)
        self.reader = SlotReader(self.arena)
        self.carrier = Carrier(Runner(self.ring, INDEXER, 1, last=True), self.writer)
        self.posted = 0

    def post(self, count: int, samples: int = 2, seed: int = 5, epoch: int = 9) -> list[int]:
        """Post the next batches of an epoch that is not shuffled; return their numbers."""
        first = self.posted
        for number in range(first, first + count):
            cell, start = number % self.ring.capacity, samples * number
            self.ring.indices(cell)[:samples] = start + np.arange(samples)
            self.ring.post(cell, number, epoch, number, samples, start, seed)
        self.posted += count
        return list(range(first, self.posted))

    def take(self, number: int) -> Any:
        """Return the batch of a ticket, or the status and slot of one without; free its cell."""
        cell = number % self.ring.capacity
        answer = self.ring.peek(cell, number)
        assert answer, f"ticket {number} is not answered"
        status, slot, capacity, record = answer
        if status:
            left = status, slot, capacity, record
        else:
            left = self.reader.decode(cell, slot, capacity, record)
            self.arena.slots.adopt(slot, 0)
            self.arena.slots.vacate(slot)
        self.ring.retire(cell)
        return left

    def close(self) -> None:
        """Drop the mappings."""
        self.carrier.close()
        self.arena.close()


class Workshop:
    """A ring with one worker, in this process, that is fed with parcels."""

    def __init__(self, cells: int = 4, size: int = 4) -> None:
        self.ring: Ring = make_ring(cells, size, runners=1)
        self.arena = Arena()
        self.writer = writer_for(self.arena)
        self.feed = ParcelFeed(self.ring, self.arena)
        self.runner = Runner(self.ring, INDEXER, 1, last=True)
        self.batch_writer = SlotWriter(self.writer, None)

    def claim(self) -> Runner:
        """Claim a ticket."""
        assert self.runner.claim()
        self.writer.begin_ticket(self.runner)
        return self.runner

    def publish(self, batch: Any) -> None:
        """Publish the ticket that was claimed."""
        self.batch_writer.publish(self.runner, self.batch_writer.write(self.runner, batch))

    def close(self) -> None:
        """Drop the mappings."""
        self.writer.close()
        self.arena.close()
