"""Slots of shared memory that batches lie in, and the leases on them.

A process maps the committed part of a slot, and maps the slot again when that has grown. Pages are
committed before they are written, so that a lack of memory is an exception and not a signal. Slots
are used again, lowest first, since writing to warm pages is many times faster than to fresh ones.

The guarantee: a slot is not written to while an array, a view or a tensor made from it is alive, in
the trainer or in the worker that filled it, also after the arena was closed. Its memory is freed
with the last of them.

                     acquire              begin … place … end         lend, vacate
    trainer   free ───────────► taken ──────────────────────► taken ──┬────────► leased ──► free
                                          in a worker: Writer         └─ copied ──────────► free

After each window of batches, free slots shrink to what these needed (`slot_size`), and all free
slots above the highest one that two windows used are given back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from cseq._lock import Lock
from cseq._memory import SMALL, Mapping, Memory, commit, copy_of
from cseq._slots import Slots
from cseq.memory_limit import memory_limit_of
from cseq.segment import Segment
from cseq.slot_size import FIRST, Need

if TYPE_CHECKING:
    from cseq._core import Ring

logger = logging.getLogger("cseq")

MAX_LEASED = 1024  # slots; a process can have some 65000 mappings


class Locks(Protocol):
    """Page-locks mappings for a device: `converter.page_locks`."""

    def register(self, memory: Memory, /) -> bool:
        """Page-lock a mapping; return whether that succeeded."""

    def unregister(self, memory: Memory, /) -> None:
        """Unlock a mapping before it is dropped."""


class Arena:
    """The trainer's end of the slots: takes, maps, lends and frees them.

    Any thread may call any method, and leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        Most bytes of slots that may be leased, or free and committed beyond what the tickets need;
        further batches are copied out of their slots. See `memory_limit_of`.
    locks : Locks, optional
        Registers every mapping that is made, until a larger one replaces it.
    tickets : int
        The most tickets that are posted at a time: free slots for as many stay committed.

    Attributes
    ----------
    segment : Segment
        The file, for the workers.
    memory_limit : int
        In bytes.
    copies : int
        Batches copied because too many were held; small ones, which always are, do not count.
    mapped : list of Mapping or None
        The present mapping of every slot; None: it was not mapped yet.
    slots : Slots
        States and sizes of the slots.
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
        self.slots = Slots(0)
        self.mapped: list[Mapping | None] = []
        self._need = Need()
        self._room = self.segment.width  # slots of more than `slots.most` bytes shrink to this
        self._top_before = -1  # the highest slot taken in the last window
        self.slots.least, self.slots.most = FIRST, self.segment.width

    def prepare(self) -> None:
        """Commit what a ticket needs of the lowest free slot; make more slots if none is free.

        No slot is taken, so an exception (Ctrl-C) leaks none.

        Raises
        ------
        MemoryError
            If there is no room for a new one.
        """
        slots = self.slots
        with self._lock.hold():
            slot = slots.lowest()
            if slot < 0:
                self._extend()
                slot = slots.lowest()
            if slots.nbytes(slot) > slots.most:
                self._shrink(slot, self._room)
            if slots.nbytes(slot) < FIRST:
                commit(self.segment.fd, slot * self.segment.width, FIRST)
                slots.resize(slot, FIRST)

    def release(self, slot: int) -> None:
        """Free a taken slot whose batch is not wanted."""
        self.slots.release(slot)

    def capacity(self, slot: int) -> int:
        """Bytes that are committed in a slot."""
        return self.slots.nbytes(slot)

    def grant(self, owner: int, count: int) -> list[tuple[int, int]]:
        """Give a worker `count` slots, if there are so many: their numbers and committed bytes."""
        granted = []
        with self._lock.hold():
            for _ in range(min(count, self.segment.slots // 1024)):
                slot = self.slots.acquire()
                if slot < 0:
                    self._extend()
                    slot = self.slots.acquire()
                self.slots.grant(slot, owner)
                granted.append((slot, self.slots.nbytes(slot)))
        return granted

    def reclaim(self, owner: int, rings: list[Ring]) -> None:
        """Free the slots of a worker that has certainly ended and whose tickets are reposted."""
        first, *others = rings
        with self._lock.hold():
            for slot in first.reclaim(owner, others):
                self.slots.release(slot)
                self._shrink(slot, 0)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot, valid while there are references to them.

        Either the slot itself, under a lease that begins with `Slots.vacate`: the slot is free
        again when the last view of the memory is gone. Or a copy, of a small batch or if too many
        batches are held.

        Parameters
        ----------
        used : int
            Bytes of the slot that the batch takes.
        capacity : int
            Bytes of the slot that are committed, as the worker says.

        Raises
        ------
        MemoryError
            If there is no room for the copy, or for a mapping.
        """
        if used <= SMALL:
            return copy_of(self.mapping_of(slot, capacity, used), used)
        lease: Memory | None = None
        with self._lock.hold():
            mapping = self._look(slot, capacity, used)
            if self._may_lease(capacity):
                lease = self.slots.lend(slot, mapping, used)
            else:
                self._count_copy(capacity)
        return copy_of(mapping, used) if lease is None else lease

    def mapping_of(self, slot: int, capacity: int, used: int = 0) -> Mapping:
        """Return the memory of a taken slot itself, valid while the slot stays taken."""
        with self._lock.hold():
            return self._look(slot, capacity, used)

    def close(self) -> None:
        """Close the file; leases keep their part of it. Closing twice is fine."""
        self.mapped[:] = [None] * len(self.mapped)
        self.segment.close()

    def _look(self, slot: int, capacity: int, used: int) -> Mapping:
        """Return the memory of a taken slot, and count its batch."""
        if self._need.add(used, len(self.mapped)):
            self._tidy()
        mapping = self.mapped[slot]
        if mapping is None or mapping.nbytes < capacity:
            mapping = self._map(slot, capacity)
        self.slots.resize(slot, capacity)
        return mapping

    def _extend(self) -> None:
        """Make more slots: some at first, then a quarter more each time."""
        made = self.slots.capacity
        count = min(max(16, made // 4), self.segment.slots - made)
        if count <= 0:
            raise MemoryError(f"all {made} slots of shared memory are in use: hold fewer batches")
        self.mapped += [None] * (made + count - len(self.mapped))
        self.slots.extend(count)

    def _map(self, slot: int, capacity: int) -> Mapping:
        """Map the committed part of a slot, in place of the mapping made before it grew."""
        self._unmap(slot)
        segment = self.segment
        mapping = Mapping(segment.fd, slot * segment.width, capacity)
        if self._locks is not None:
            self._locks.register(mapping)
        self.mapped[slot] = mapping
        return mapping

    def _unmap(self, slot: int) -> None:
        """Drop a mapping: the slot is TAKEN, so no lease refers to the mapping."""
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def _tidy(self) -> None:
        """Give back pages that no batch needed lately, and pages beyond the limit."""
        slots = self.slots
        slots.most, self._room = self._need.excess(self.segment.width)
        top = max(slots.top, self._top_before)
        self._top_before, slots.top = slots.top, -1
        free = slots.free()
        idle = self._room < self.segment.width
        for slot in free:
            if idle and slot > top:
                self._shrink(slot, 0)
            elif slots.nbytes(slot) > slots.most:
                self._shrink(slot, self._room)
        self._limit(free)

    def _limit(self, free: list[int]) -> None:
        """Give pages of free slots back until free and leased slots together are within the limit.

        The lowest free slots keep theirs, as many as tickets that are yet to be posted could need.
        """
        slots = self.slots
        posted = sum(slots.is_taken(slot) for slot in range(slots.capacity))
        beyond = free[max(0, self._tickets - posted) :]
        excess = slots.leased_bytes + sum(map(slots.nbytes, beyond)) - self.memory_limit
        while excess > 0 and beyond:
            slot = beyond.pop()
            excess -= slots.nbytes(slot)
            self._shrink(slot, 0)

    def _shrink(self, slot: int, nbytes: int) -> None:
        """Give the pages of a free slot back but for the first `nbytes`, where the system can."""
        if self.slots.shrink(slot, nbytes, self.segment.fd, self.segment.width):
            self._unmap(slot)

    def _may_lease(self, nbytes: int) -> bool:
        """Return whether one more slot may be leased."""
        slots = self.slots
        if slots.leased >= self._most_leased():
            return False
        return slots.leased_bytes + nbytes <= self.memory_limit

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
            logger.warning(
                "%d batches are held in %d bytes of shared memory (at most %d batches and "
                "memory_limit=%d bytes): until some are dropped, further batches are copied. "
                "Hold fewer batches, or raise memory_limit",
                self.slots.leased,
                self.slots.leased_bytes,
                self._most_leased(),
                self.memory_limit,
            )
