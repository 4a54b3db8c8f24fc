"""Slots of shared memory that batches lie in, and the leases on them.

A process maps the committed part of a slot, and maps the slot again when that has grown. Pages are
committed before they are written, so that a lack of memory is an exception and not a signal. Slots
are used again, lowest first, since writing to warm pages is many times faster than to fresh ones.

The guarantee: a slot is not written to while an array, a view or a tensor made from it is alive, in
the trainer or in the worker that filled it, also after the arena was closed. Its memory is freed
with the last of them.

                   take, place … publish                  lend, adopt
    worker   free ──────────────────────► its ticket's ──┬──────────► leased ──► free
                                                         └─ copied ────────────► free

Where an epoch begins, free slots are given back that the last one has not needed (`tidy`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from cseq._core import Lock
from cseq._memory import SMALL, Mapping, Memory, Slots, commit, copy_of
from cseq.memory.segment import FIRST, Segment, room_for
from cseq.system import memory_limit_of

if TYPE_CHECKING:
    from cseq._core import Ring

logger = logging.getLogger("cseq")

MAX_LEASED = 16384  # slots, each a mapping: a process can have 65530, for all that it does


class Locks(Protocol):
    """Page-locks mappings for a device: `converter.page_locks`."""

    def register(self, memory: Memory, /) -> bool:
        """Page-lock a mapping; return whether that succeeded."""

    def unregister(self, memory: Memory, /) -> None:
        """Unlock a mapping before it is dropped."""


class Arena:
    """The trainer's end of the slots: maps, lends and frees them.

    Any thread may call any method, and leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        Most bytes of slots that may be leased or pinned; large leaves of further batches are copied
        out of their slots. See `memory_limit_of`.
    locks : Locks, optional
        Registers every mapping that is made, until a larger one replaces it.
    tickets : int
        The most tickets that are posted at a time: slots for as many stay committed.

    Attributes
    ----------
    segment : Segment
        The file, for the workers.
    memory_limit : int
        In bytes.
    copies : int
        Batches with large leaves that were copied because too many were held.
    mapped : list of Mapping or None
        The present mapping of every slot; None: it was not mapped yet.
    slots : Slots
        The table.
    """

    def __init__(
        self,
        memory_limit: int | str | None = None,
        locks: Locks | None = None,
        *,
        tickets: int = 0,
    ) -> None:
        self._locks = locks
        # Around everything but what a lease does. A signal handler may take batches, or finish, in
        # the middle of it.
        self._lock = Lock()
        self._tickets = tickets
        self.memory_limit = memory_limit_of(memory_limit)
        self.segment = Segment.for_slots(tickets)
        self.copies = 0
        self.slots = Slots(self.segment.fd, self.segment.width, self.segment.slots)
        self.mapped: list[Mapping | None] = []

    def request(self, slot: int) -> int:
        """Commit the first pages of a slot that the trainer has taken; return how many bytes."""
        nbytes = self.slots.nbytes(slot)
        if nbytes < FIRST:
            commit(self.segment.fd, slot * self.segment.width, FIRST)
            nbytes = FIRST
            self.slots.resize(slot, nbytes)
        return nbytes

    def reclaim(self, owner: int, rings: list[Ring]) -> None:
        """Free the slots of a worker that has certainly ended and whose tickets are reposted.

        Not those of its published tickets, which the trainer makes its own before they leave their
        cells: so either they are seen here, or the slots are not the worker's any more.
        """
        published = set().union(*(ring.slots() for ring in rings))
        for slot, has in enumerate(self.slots.owners()):
            if has == owner and slot not in published:
                self.slots.shrink(slot, 0, owner)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot: its lease, or a copy; see `lease`."""
        lease = self.lease(slot, capacity) if used > SMALL else None
        return copy_of(self.mapping_of(slot, capacity), used) if lease is None else lease

    def lease(self, slot: int, capacity: int) -> Memory | None:
        """Return the memory of a taken slot, valid while there are references to it.

        The lease begins with `Slots.adopt`: the slot is free again when the last view of the memory
        is gone. None: too many slots are leased, and what is to be held has to be copied.

        `capacity`: bytes of the slot that are committed, as the worker says. MemoryError if there
        is no room for a mapping.
        """
        with self._lock.hold():
            mapping = self._look(slot, capacity)
            may_be_held = self.slots.leased_bytes + capacity <= self.memory_limit
            if may_be_held and self.slots.leased < self._most_leased():
                return self.slots.lend(slot, mapping)
            self._count_copy(capacity)
        return None

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a taken slot itself, valid while the slot stays taken."""
        with self._lock.hold():
            return self._look(slot, capacity)

    def close(self) -> None:
        """Close the file; leases keep their part of it. Closing twice is fine."""
        self.mapped[:] = [None] * len(self.mapped)
        self.slots.close()
        self.segment.close()

    def _look(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of the slot of a ticket."""
        mapping = self.mapped[slot] if slot < len(self.mapped) else None
        if mapping is None or mapping.nbytes < capacity:
            mapping = self._map(slot, capacity)
        self.slots.resize(slot, capacity)  # a converter may have made it larger
        return mapping

    def _map(self, slot: int, capacity: int) -> Mapping:
        """Map the committed part of a slot, in place of the mapping made before it grew."""
        self._unmap(slot)
        self.mapped += [None] * (slot + 1 - len(self.mapped))
        segment = self.segment
        mapping = Mapping(segment.fd, slot * segment.width, capacity)
        if self._locks is not None:
            self._locks.register(mapping)
        self.mapped[slot] = mapping
        return mapping

    def _unmap(self, slot: int) -> None:
        """Drop a mapping: the slot is free, or a ticket's, so no lease refers to the mapping."""
        if slot >= len(self.mapped):
            return
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def tidy(self) -> None:
        """Where an epoch begins, free what forks pinned, and give back what the last did not need.

        It shrinks each free slot to the epoch's largest batch, if that gives back more than half,
        and drops the slots that neither tickets nor the batches held at one time need.
        """
        with self._lock.hold():
            self.slots.unpin()
            largest, held = self.slots.peak()
            if not largest:
                return
            room = room_for(largest, 0, self.segment.width)
            free, busy = self.slots.free()
            for k, (slot, nbytes) in enumerate(free, busy):
                size = 0 if k >= self._tickets + held else room if nbytes > 2 * room else nbytes
                if size < nbytes and self.slots.shrink(slot, size):
                    self._unmap(slot)

    def _most_leased(self) -> int:
        """Return how many slots may be leased at a time."""
        return min(MAX_LEASED, self.segment.slots // 2)

    def _count_copy(self, nbytes: int) -> None:
        """Count a copy, of a slot of so many bytes; the first one is logged."""
        self.copies += 1
        if self.copies == 1 and nbytes > self.memory_limit:
            logger.warning(
                "a batch takes %d bytes of shared memory, and memory_limit is %d: all are copied",
                nbytes,
                self.memory_limit,
            )
        elif self.copies == 1:
            held, most = self.slots.leased_bytes, self._most_leased()
            limit, remedy = f"{most} batches is the most", ""
            if self.slots.leased < most:
                limit = f"memory_limit={self.memory_limit} is the most"
                remedy = "; a sequence, not a DataLoader, takes a larger memory_limit"
            logger.warning(
                "%d batches are held in %d bytes of shared memory, and %s: until some are dropped, "
                "further batches are copied. Hold fewer, or copies of what you need of them%s",
                self.slots.leased,
                held,
                limit,
                remedy,
            )
