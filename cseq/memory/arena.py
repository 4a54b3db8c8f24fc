"""The memory that a trainer and its workers share: rings, slots and leases.

The memory consists of two anonymous files. The slot file is sparse. Slot ``s`` starts at byte
``s * width``, and only the committed part of a slot uses memory.

Pages are committed before they are written, so that running out of memory raises an exception
instead of a signal. The lowest free slots are used first, because warm pages are many times faster.

A slot is never overwritten while an array, view or tensor in it is alive, in the trainer or in the
worker that filled it, even after the arena has been closed.

                   take, place … publish                  lease, free
    worker   free ──────────────────────► its ticket's ──┬──────────► leased ──► free
                                                         └─ copied ────────────► free
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any

from cseq._core import Ring, ring_bytes
from cseq._lock import Lock
from cseq._memory import SMALL, Mapping, Memory, commit, copy_of
from cseq.memory._slots import SlotTable
from cseq.memory.descriptors import sparse_file
from cseq.stage import spin_ns
from cseq.system import MIB, memory_limit_of

if TYPE_CHECKING:
    from cseq._memory import Descriptor

logger = logging.getLogger("cseq")

# The (width in bytes, number of slots) of the slot file, tried in this order.
SIZES = (
    (1 << 40, 1 << 22),
    (1 << 36, 1 << 16),
    (1 << 33, 1 << 10),
    (1 << 30, 1 << 9),
    (1 << 28, 1 << 7),
)
# Bytes to reserve on Windows for at least FEWEST slots, tried in this order. Windows uses about
# 8 bytes per reserved 4-KiB page.
RESERVED = (1 << 37, 1 << 36)
FEWEST = 1 << 8
# Bytes to commit before a slot is first used, enough for the text of an error.
FIRST = SMALL
# On any system, mappings can start at multiples of this number.
GRAIN = 1 << 16
# Slots double in size up to this number of bytes, then grow in multiples of this size.
LARGE = 2 * MIB
# Every leased slot needs a mapping. Linux allows 65,530 mappings per process.
MAX_LEASED = 16384


class Arena:
    """The trainer's side of shared memory: maps, leases and frees slots, and owns the rings.

    Any thread may call methods or end leases.

    Parameters
    ----------
    memory_limit : int, str or None
        The maximum number of bytes in leased slots. Beyond it, large leaves are copied.
    locks : PageLocks, optional
        Page-locks every mapping, for copies to a CUDA device.
    tickets : int
        The maximum number of posted tickets. `tidy` keeps slots for all of them.

    Attributes
    ----------
    fd, width, most : int
        The slot file's descriptor, the width of a slot in bytes, and the maximum number of slots.
    rings : list of Ring
        The rings.
    owners : int
        The number of processes that use the rings. They are numbered from 1.
    memory_limit : int
        The limit in bytes.
    copies : int
        The number of batches that were copied because too many slots were leased.
    mapped : list of Mapping or None
        The mapping of each slot, or None.
    slots : SlotTable
        The table of slots.
    """

    def __init__(
        self,
        memory_limit: int | str | None = None,
        locks: Any = None,
        *,
        tickets: int = 0,
    ) -> None:
        self._locks = locks
        # Leases end without this lock. A signal handler may fetch batches while the lock is held.
        self._lock = Lock()
        self._tickets = tickets
        self.memory_limit = memory_limit_of(memory_limit)
        file, self.width, self.most = _slots_file(tickets)
        self._files = [file]
        self.copies = 0
        self.slots = SlotTable(self.fd, self.width, self.most)
        self.mapped: list[Mapping | None] = []
        self.rings: list[Ring] = []

    def add_rings(
        self,
        capacity: int,
        room: int,
        runners: int,
        *,
        owners: int,
        rings: int = 1,
        calls: int = 0,
        limit: int = 0,
        name: str = "cseq",
    ) -> None:
        """Create `rings` rings with `capacity` cells for `room` indices; see `Ring`.

        `rings` is 1 if all workers share a ring, and the number of workers otherwise. `name` is
        shown in ``/proc``.
        """
        self.owners = owners
        self._ring_bytes = size = ring_bytes(capacity, room, runners)
        self._ring_width = width = -(-size // GRAIN) * GRAIN
        file = sparse_file(rings * width, name)
        self._files.insert(0, file)
        mapping = Mapping(file.fd, 0, rings * width)
        for at in range(0, rings * width, width):
            commit(file.fd, at, size)
            ring = Ring(mapping, capacity, room, runners, calls, at=at, limit=limit)
            ring.set_spin(spin_ns(owners))
            self.rings.append(ring)

    @property
    def fd(self) -> int:
        """The descriptor of the slot file, or -1 if it is closed."""
        return self._files[-1].fd

    @property
    def fds(self) -> list[int]:
        """The descriptors of the ring file and the slot file."""
        return [file.fd for file in self._files]

    def _locate(self, runner_number: int) -> tuple[int, int]:
        """Return the number of a runner's ring, and the runner's owner number on this ring."""
        above, ring_number = divmod(runner_number - 1, len(self.rings))
        return ring_number, above + 1

    def setup_of(
        self, runner_number: int, *, has_slots: bool
    ) -> tuple[int, tuple[int, int], int, int]:
        """Return a worker's ring and slots, as fields of `worker.Setup`."""
        ring_number, owner = self._locate(runner_number)
        location = ring_number * self._ring_width, self._ring_bytes
        return owner, location, self.width, self.most if has_slots else 0

    def held(self, runner_number: int) -> list[tuple[int, int]]:
        """Return the cell and start time (`now_ns`) of each ticket that a runner has claimed."""
        ring_number, owner = self._locate(runner_number)
        ring = self.rings[ring_number]
        return [(cell, ring.holder(cell)[1]) for cell in ring.held(owner)]

    def notify_all(self) -> None:
        """Wake up the trainer."""
        for ring in self.rings:
            ring.notify_all()

    def end(self) -> None:
        """Close the rings, so that the workers exit and the trainer wakes up."""
        for ring in self.rings:
            ring.close()

    @property
    def ended(self) -> bool:
        """Whether all rings are closed."""
        return self.rings[-1].closed == 1

    def request(self, slot: int) -> int:
        """Commit the first pages of one of the trainer's slots. Return its committed size."""
        nbytes = self.slots.nbytes(slot)
        if nbytes < FIRST:
            commit(self.fd, slot * self.width, FIRST)
            nbytes = FIRST
            self.slots.resize(slot, nbytes)
        return nbytes

    def reclaim(self, runner_number: int, status: int = 0) -> None:
        """Repost the tickets of a worker that has exited, and free its slots.

        If `status` is given, publish the tickets with it instead. Slots of published tickets are
        kept. The trainer takes ownership of such a slot before the slot leaves its cell, so this
        method finds the slot either in the cell or with another owner.
        """
        ring_number, number_there = self._locate(runner_number)
        self.rings[ring_number].repost(number_there, status)
        published = set().union(*(ring.slots() for ring in self.rings))
        for slot, owner in enumerate(self.slots.owners()):
            if owner == runner_number and slot not in published:
                self.slots.give_back(slot, runner_number)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a slot, as a lease or a copy."""
        lease = self.lease(slot, capacity) if used > SMALL else None
        return copy_of(self.mapping_of(slot, capacity), used) if lease is None else lease

    def lease(self, slot: int, capacity: int) -> Memory | None:
        """Return the memory of a slot. It stays valid as long as it is referenced.

        If too many slots are leased, return None, and the caller must copy. `capacity` comes from
        the worker. Raises MemoryError if the slot cannot be mapped.
        """
        with self._lock.hold():
            mapping = self.mapping_of(slot, capacity)
            may_be_held = self.slots.leased_bytes + capacity <= self.memory_limit
            if may_be_held and self.slots.leased < self._most_leased():
                return self.slots.lease(slot, mapping)
            self._count_copy(capacity)
        return None

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a slot. It is valid while the slot is in use.

        A slot that has grown is mapped again.
        """
        with self._lock.hold():
            mapping = self.mapped[slot] if slot < len(self.mapped) else None
            if mapping is None or mapping.nbytes < capacity:
                self._unmap(slot)
                self.mapped += [None] * (slot + 1 - len(self.mapped))
                mapping = Mapping(self.fd, slot * self.width, capacity)
                if self._locks is not None:
                    self._locks.register(mapping)
                self.mapped[slot] = mapping
            self.slots.resize(slot, capacity)
            return mapping

    def close(self) -> None:
        """Close the files. Leased slots stay valid."""
        self.mapped[:] = [None] * len(self.mapped)
        self.slots.close()
        for file in self._files:
            file.close()

    def _unmap(self, slot: int) -> None:
        """Drop the mapping of a slot without leases."""
        if slot >= len(self.mapped):
            return
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def tidy(self) -> None:
        """Free pinned slots, and release the memory of free slots that are not needed.

        A slot is not needed if it is more than twice the size of the previous epoch's largest
        batch, or if there are enough others for all tickets and for that epoch's leases.
        """
        with self._lock.hold():
            self.slots.unpin()
            largest, held = self.slots.peak()
            if not largest:
                return
            room = room_for(largest, 0, self.width)
            free, busy = self.slots.spare()
            for k, (slot, nbytes) in enumerate(free, busy):
                is_spare = k >= self._tickets + held or nbytes > 2 * room
                if is_spare and self.slots.give_back(slot):
                    self._unmap(slot)

    def _most_leased(self) -> int:
        return min(MAX_LEASED, self.most // 2)

    def _count_copy(self, nbytes: int) -> None:
        """Count a copy of a batch, and log the first one."""
        self.copies += 1
        if self.copies == 1 and nbytes > self.memory_limit:
            logger.warning(
                "a batch takes %d bytes of shared memory, but memory_limit is %d, so all batches "
                "are copied",
                nbytes,
                self.memory_limit,
            )
        elif self.copies == 1:
            held, most = self.slots.leased_bytes, self._most_leased()
            limit, remedy = f"the maximum is {most} batches", ""
            if self.slots.leased < most:
                limit = f"the maximum is memory_limit={self.memory_limit}"
                remedy = ". With a sequence (not a DataLoader), you can raise memory_limit"
            logger.warning(
                "the loop holds %d batches in %d bytes of shared memory, and %s. Until it drops "
                "some, further batches are copied. Hold fewer batches, or copy what you need%s",
                self.slots.leased,
                held,
                limit,
                remedy,
            )


def _slots_file(tickets: int) -> tuple[Descriptor, int, int]:
    """Create the largest file that the file system supports.

    Return the file, the width and the number of slots. If too many descriptors are open, raise
    OSError without trying a smaller file.
    """
    for width, slots in reserved(tickets) if os.name == "nt" else SIZES:
        try:
            return sparse_file(width * slots), width, slots
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            last = error
    raise last


def reserved(tickets: int) -> tuple[tuple[int, int], ...]:
    """Return the sizes to try on Windows, as (width in bytes, number of slots).

    Half of the slots are enough for two epochs' tickets (one cancelled). Half can be leased.
    """
    slots = max(FEWEST, 1 << (4 * tickets - 1).bit_length())
    return tuple((nbytes // slots, slots) for nbytes in RESERVED)


def room_for(needed: int, capacity: int, width: int) -> int:
    """Return the new size of a slot that must hold `needed` bytes."""
    if needed > width:
        raise MemoryError(
            f"a batch of {needed} bytes exceeds the maximum slot size of {width} bytes; reduce "
            "batch_size"
        )
    if needed <= LARGE:
        room = max(FIRST, capacity, 1 << (needed - 1).bit_length())
    else:
        room = -(-needed // LARGE) * LARGE
    return min(room, width)
