"""The memory that a trainer and its workers share: rings, slots and their leases.

It lies in two anonymous files. A worker process maps them by their descriptors and the numbers of
`Arena.setup_of`. The file of slots is sparse: slot ``s`` begins at byte ``s * width``, and only its
committed part takes memory.

A process maps the committed part of a slot, and maps the slot again once that part has grown. Pages
are committed before they are written, so that a lack of memory is an exception and not a signal.
Slots are used again, lowest first: writing to warm pages is many times faster than to fresh ones.

The guarantee: a slot is not written to while an array, a view or a tensor made from it is alive, in
the trainer or in the worker that filled it, even after the arena was closed. Its memory is freed
with the last of them.

                   take, place … publish                  lease, free
    worker   free ──────────────────────► its ticket's ──┬──────────► leased ──► free
                                                         └─ copied ────────────► free

Where an epoch begins, free slots that the last one did not need are given back (`tidy`).
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

# Bytes from one slot to the next, and how many slots. Where a file cannot be that long, the next
# pair is tried.
SIZES = (
    (1 << 40, 1 << 22),
    (1 << 36, 1 << 16),
    (1 << 33, 1 << 10),
    (1 << 30, 1 << 9),
    (1 << 28, 1 << 7),
)
# Bytes to reserve on Windows, tried in this order, for at least FEWEST slots. Windows pays some 8
# bytes for each reserved page of 4 KiB.
RESERVED = (1 << 37, 1 << 36)
FEWEST = 1 << 8
# Bytes of a slot that are committed before it is used: the text of an error fits.
FIRST = SMALL
# On any system, a mapping can begin at a multiple of this many bytes.
GRAIN = 1 << 16
# Slots grow by doubling up to this many bytes, then in multiples of them.
LARGE = 2 * MIB
# Each leased slot is a mapping, and a process can have 65530 of these.
MAX_LEASED = 16384


class Arena:
    """The trainer's end of the slots: maps, leases and frees them; and the rings.

    Any thread may call any method, and leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        The most bytes of slots that may be leased or pinned; large leaves of further batches are
        copied out of their slots. See `memory_limit_of`.
    locks : PageLocks, optional
        Registers every mapping, until a larger one replaces it.
    tickets : int
        The most tickets that are posted at a time: slots for as many stay committed.

    Attributes
    ----------
    fd, width, most : int
        The file of the slots; bytes from one slot to the next; how many slots there can be.
    rings : list of Ring
    owners : int
        How many processes use the rings, numbered from 1.
    memory_limit : int
        In bytes.
    copies : int
        Batches with large leaves that were copied because too many were held.
    mapped : list of Mapping or None
        The present mapping of every slot, or None if it has none yet.
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
        # Guards everything but what a lease does. A signal handler may take batches, or finish, in
        # the middle of what it guards.
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
        """Make the rings, each of `capacity` cells for `room` indices; see `Ring`.

        `rings` is 1 if all workers share one, else there is a queue for each. ``/proc`` shows
        `name`.
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
        """The descriptor of the file of slots, or -1 once it is closed."""
        return self._files[-1].fd

    @property
    def fds(self) -> list[int]:
        """Descriptors of the rings' file and of the slots'."""
        return [file.fd for file in self._files]

    def _locate(self, runner_number: int) -> tuple[int, int]:
        """Return the number of a runner's ring, and the runner's number there, its owner."""
        above, ring_number = divmod(runner_number - 1, len(self.rings))
        return ring_number, above + 1

    def setup_of(
        self, runner_number: int, *, has_slots: bool
    ) -> tuple[int, tuple[int, int], int, int]:
        """Return where a worker finds its ring and the slots: fields of `worker.Setup`."""
        ring_number, owner = self._locate(runner_number)
        location = ring_number * self._ring_width, self._ring_bytes
        return owner, location, self.width, self.most if has_slots else 0

    def held(self, runner_number: int) -> list[tuple[int, int]]:
        """Return the cell of each ticket that a runner has, and since when (ns of `now_ns`)."""
        ring_number, owner = self._locate(runner_number)
        ring = self.rings[ring_number]
        return [(cell, ring.holder(cell)[1]) for cell in ring.held(owner)]

    def notify_all(self) -> None:
        """Wake the trainer, whichever ring it waits for."""
        for ring in self.rings:
            ring.notify_all()

    def end(self) -> None:
        """Close the rings: workers end, and the trainer wakes up."""
        for ring in self.rings:
            ring.close()

    @property
    def ended(self) -> bool:
        """Whether all rings are closed."""
        return self.rings[-1].closed == 1

    def request(self, slot: int) -> int:
        """Commit the first pages of a slot that the trainer has taken; return their bytes."""
        nbytes = self.slots.nbytes(slot)
        if nbytes < FIRST:
            commit(self.fd, slot * self.width, FIRST)
            nbytes = FIRST
            self.slots.resize(slot, nbytes)
        return nbytes

    def reclaim(self, runner_number: int, status: int = 0) -> None:
        """Post the tickets of a worker that has certainly ended again, and free its slots.

        With a `status`, the tickets are published with that instead. The slots of published tickets
        stay. The trainer makes them its own before they leave their cells: either they are seen
        here, or they are no longer the worker's.
        """
        ring_number, number_there = self._locate(runner_number)
        self.rings[ring_number].repost(number_there, status)
        published = set().union(*(ring.slots() for ring in self.rings))
        for slot, owner in enumerate(self.slots.owners()):
            if owner == runner_number and slot not in published:
                self.slots.give_back(slot, runner_number)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot: its lease, or a copy; see `lease`."""
        lease = self.lease(slot, capacity) if used > SMALL else None
        return copy_of(self.mapping_of(slot, capacity), used) if lease is None else lease

    def lease(self, slot: int, capacity: int) -> Memory | None:
        """Return the memory of a taken slot, valid while there are references to it.

        The lease begins when the ticket is committed; the end of the last view of the memory frees
        the slot. Return None if too many slots are leased: what is held then has to be copied.

        The worker says how many bytes of the slot are committed (`capacity`). MemoryError if there
        is no room for a mapping.
        """
        with self._lock.hold():
            mapping = self.mapping_of(slot, capacity)
            may_be_held = self.slots.leased_bytes + capacity <= self.memory_limit
            if may_be_held and self.slots.leased < self._most_leased():
                return self.slots.lease(slot, mapping)
            self._count_copy(capacity)
        return None

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a taken slot, valid while the slot stays taken.

        The slot may have grown since it was mapped; a converter may have made it larger, too.
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
        """Close the files; leases keep their part of the slots."""
        self.mapped[:] = [None] * len(self.mapped)
        self.slots.close()
        for file in self._files:
            file.close()

    def _unmap(self, slot: int) -> None:
        """Drop a mapping. The slot is free, or a ticket's, so no lease refers to the mapping."""
        if slot >= len(self.mapped):
            return
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def tidy(self) -> None:
        """Where an epoch begins, free what forks pinned and give back what the last did not need.

        The last epoch did not need slots of more than twice its largest batch, nor more slots than
        its tickets and the batches that were held at a time.
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
        """Count a copy out of a slot of `nbytes` bytes; log the first one."""
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
    """Make a file of as many and as wide slots as the file system can have.

    Return the file, the width and the number of slots. At most `tickets` are posted at a time. If
    there are too many descriptors, no size would do.
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
    """Return what to try on Windows: (width in bytes, slots).

    There are slots for the tickets, as many for a cancelled epoch, and as many again to lease; the
    more slots, the narrower they are.
    """
    slots = max(FEWEST, 1 << (4 * tickets - 1).bit_length())
    return tuple((nbytes // slots, slots) for nbytes in RESERVED)


def room_for(needed: int, capacity: int, width: int) -> int:
    """Return how many bytes a slot of `capacity` bytes grows to, to hold `needed` bytes."""
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
