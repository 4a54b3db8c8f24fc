"""The memory shared by a trainer and its workers: rings, slots and their leases.

The memory consists of two anonymous files. A worker process maps them using their descriptors and
the numbers from `Arena.setup_of`. The slot file is sparse: slot ``s`` starts at byte ``s * width``,
and only its committed part uses memory.

A process maps the committed part of a slot, and remaps the slot when that part grows. Pages are
committed before they are written, so a lack of memory raises an exception instead of a signal.
Slots are reused lowest first, because writing to warm pages is many times faster than to new ones.

The guarantee: a slot is never overwritten while an array, view or tensor made from it is alive in
the trainer or in the worker that filled it, even after the arena is closed. The slot's memory is
freed together with the last of these objects.

                   take, place … publish                  lease, free
    worker   free ──────────────────────► its ticket's ──┬──────────► leased ──► free
                                                         └─ copied ────────────► free

At the start of an epoch, `tidy` releases free slots that the previous epoch did not need.
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

# (slot width in bytes, number of slots). If a file cannot be that large, the next pair is tried.
SIZES = (
    (1 << 40, 1 << 22),
    (1 << 36, 1 << 16),
    (1 << 33, 1 << 10),
    (1 << 30, 1 << 9),
    (1 << 28, 1 << 7),
)
# The number of bytes to reserve on Windows for at least FEWEST slots, tried in this order. Windows
# uses about 8 bytes per reserved 4 KiB page.
RESERVED = (1 << 37, 1 << 36)
FEWEST = 1 << 8
# The number of bytes committed before a slot's first use, enough for an error's text.
FIRST = SMALL
# Mappings can start at multiples of this many bytes on any system.
GRAIN = 1 << 16
# Slots double in size up to this many bytes, then grow in multiples of this size.
LARGE = 2 * MIB
# Each leased slot uses a mapping, and a process can have 65530 mappings.
MAX_LEASED = 16384


class Arena:
    """The trainer side of shared memory: maps, leases and frees slots, and owns the rings.

    Any thread may call any method, and leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        The maximum number of bytes in leased or pinned slots. Beyond the limit, large leaves of
        batches are copied out of their slots. See `memory_limit_of`.
    locks : PageLocks, optional
        Registers every mapping until a larger one replaces it.
    tickets : int
        The maximum number of posted tickets. Free slots for that many tickets stay committed.

    Attributes
    ----------
    fd, width, most : int
        The slot file, the distance between slots in bytes, and the maximum number of slots.
    rings : list of Ring
    owners : int
        The number of processes that use the rings, numbered from 1.
    memory_limit : int
        The limit in bytes.
    copies : int
        The number of batches whose large leaves were copied because too many batches were held.
    mapped : list of Mapping or None
        The current mapping of each slot, or None if it is not mapped.
    slots : SlotTable
    """

    def __init__(
        self,
        memory_limit: int | str | None = None,
        locks: Any = None,
        *,
        tickets: int = 0,
    ) -> None:
        self._locks = locks
        # Guards everything except the end of a lease. A signal handler may fetch batches or finish
        # the run inside the guarded sections.
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
        """Create the rings, each with `capacity` cells for `room` indices; see `Ring`.

        `rings` is 1 if all workers share a ring; otherwise each worker has a queue. `name` is shown
        in ``/proc``.
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
        """The descriptor of the slot file, or -1 if the file is closed."""
        return self._files[-1].fd

    @property
    def fds(self) -> list[int]:
        """The descriptors of the ring file and the slot file."""
        return [file.fd for file in self._files]

    def _locate(self, runner_number: int) -> tuple[int, int]:
        """Return a runner's ring number and its owner number in that ring."""
        above, ring_number = divmod(runner_number - 1, len(self.rings))
        return ring_number, above + 1

    def setup_of(
        self, runner_number: int, *, has_slots: bool
    ) -> tuple[int, tuple[int, int], int, int]:
        """Return the location of a worker's ring and slots, as fields of `worker.Setup`."""
        ring_number, owner = self._locate(runner_number)
        location = ring_number * self._ring_width, self._ring_bytes
        return owner, location, self.width, self.most if has_slots else 0

    def held(self, runner_number: int) -> list[tuple[int, int]]:
        """Return the cell and start time (`now_ns`) of each ticket that a runner holds."""
        ring_number, owner = self._locate(runner_number)
        ring = self.rings[ring_number]
        return [(cell, ring.holder(cell)[1]) for cell in ring.held(owner)]

    def notify_all(self) -> None:
        """Wake the trainer, no matter which ring it is waiting on."""
        for ring in self.rings:
            ring.notify_all()

    def end(self) -> None:
        """Close the rings, so that workers exit and the trainer wakes up."""
        for ring in self.rings:
            ring.close()

    @property
    def ended(self) -> bool:
        """Whether all rings are closed."""
        return self.rings[-1].closed == 1

    def request(self, slot: int) -> int:
        """Commit the first pages of a slot taken by the trainer. Return the committed bytes."""
        nbytes = self.slots.nbytes(slot)
        if nbytes < FIRST:
            commit(self.fd, slot * self.width, FIRST)
            nbytes = FIRST
            self.slots.resize(slot, nbytes)
        return nbytes

    def reclaim(self, runner_number: int, status: int = 0) -> None:
        """Repost the tickets of a worker that is known to have exited, and free its slots.

        With a `status`, publish the tickets with that status instead, and keep the slots of
        published tickets. The trainer takes ownership of such a slot before the slot leaves its
        cell. This method therefore finds the slot either in the cell or with another owner.
        """
        ring_number, number_there = self._locate(runner_number)
        self.rings[ring_number].repost(number_there, status)
        published = set().union(*(ring.slots() for ring in self.rings))
        for slot, owner in enumerate(self.slots.owners()):
            if owner == runner_number and slot not in published:
                self.slots.give_back(slot, runner_number)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot as a lease or a copy; see `lease`."""
        lease = self.lease(slot, capacity) if used > SMALL else None
        return copy_of(self.mapping_of(slot, capacity), used) if lease is None else lease

    def lease(self, slot: int, capacity: int) -> Memory | None:
        """Return a taken slot's memory, which stays valid as long as it is referenced.

        The lease starts when the ticket is committed. The slot is freed when the last view of the
        memory is dropped. Return None if too many slots are leased; the caller must then copy.

        `capacity` is the slot's number of committed bytes as reported by the worker. Raise
        MemoryError if the slot cannot be mapped.
        """
        with self._lock.hold():
            mapping = self.mapping_of(slot, capacity)
            may_be_held = self.slots.leased_bytes + capacity <= self.memory_limit
            if may_be_held and self.slots.leased < self._most_leased():
                return self.slots.lease(slot, mapping)
            self._count_copy(capacity)
        return None

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return a taken slot's memory, which stays valid as long as the slot is taken.

        The slot is mapped again if a worker or a converter has enlarged it.
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
        """Close the files. The memory of leased slots stays valid."""
        self.mapped[:] = [None] * len(self.mapped)
        self.slots.close()
        for file in self._files:
            file.close()

    def _unmap(self, slot: int) -> None:
        """Drop a mapping. The slot is free or belongs to a ticket, so no lease uses the mapping."""
        if slot >= len(self.mapped):
            return
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def tidy(self) -> None:
        """Free pinned slots, and release free slots that the last epoch did not need.

        This runs at the start of an epoch. The last epoch needed no slot larger than twice its
        largest batch, and no more slots than its tickets plus the peak number of held batches.
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
        """Count a copy out of a slot of `nbytes` bytes. Log the first copy."""
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
                "further batches are copied. Hold fewer, or copies of what you need%s",
                self.slots.leased,
                held,
                limit,
                remedy,
            )


def _slots_file(tickets: int) -> tuple[Descriptor, int, int]:
    """Make a file with the largest slot width and slot count that the file system supports.

    Return the file, the width and the number of slots. `tickets` is the maximum number of posted
    tickets. If the process has too many open descriptors, raise OSError without further attempts.
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
    """Return the sizes to try on Windows as (width in bytes, slots).

    There are enough slots for the tickets, plus the same number for a cancelled epoch and the same
    number for leases. A larger number of slots makes each slot narrower.
    """
    slots = max(FEWEST, 1 << (4 * tickets - 1).bit_length())
    return tuple((nbytes // slots, slots) for nbytes in RESERVED)


def room_for(needed: int, capacity: int, width: int) -> int:
    """Return the size to which a slot of `capacity` bytes grows to hold `needed` bytes."""
    if needed > width:
        raise MemoryError(
            f"a batch of {needed} bytes exceeds a slot, which has at most {width} bytes: "
            "make batch_size smaller"
        )
    if needed <= LARGE:
        room = max(FIRST, capacity, 1 << (needed - 1).bit_length())
    else:
        room = -(-needed // LARGE) * LARGE
    return min(room, width)
