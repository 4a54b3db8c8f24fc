"""The memory that a trainer and its workers share: rings, slots, leases on these.

It lies in two anonymous files. A worker process maps them by their descriptors and the numbers of
`Arena.setup_of`. The file of slots is sparse: slot ``s`` begins at byte ``s * width``, and only its
committed part takes memory.

A process maps the committed part of a slot, and maps the slot again when that has grown. Pages are
committed before they are written, so that a lack of memory is an exception and not a signal. Slots
are used again, lowest first, since writing to warm pages is many times faster than to fresh ones.

The guarantee: a slot is not written to while an array, a view or a tensor made from it is alive, in
the trainer or in the worker that filled it, also after the arena was closed. Its memory is freed
with the last of them.

                   take, place … publish                  lease, free
    worker   free ──────────────────────► its ticket's ──┬──────────► leased ──► free
                                                         └─ copied ────────────► free

Where an epoch begins, free slots are given back that the last one has not needed (`tidy`).
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

# Bytes from one slot to the next, and how many; the next ones where a file cannot be that long.
SIZES = (
    (1 << 40, 1 << 22),
    (1 << 36, 1 << 16),
    (1 << 33, 1 << 10),
    (1 << 30, 1 << 9),
    (1 << 28, 1 << 7),
)
# Windows pays some 8 bytes for each page of 4 KiB that is reserved: bytes to try, in this order,
# and how many slots these have at least.
RESERVED = (1 << 37, 1 << 36)
FEWEST = 1 << 8
FIRST = SMALL  # bytes of a slot that are committed before it is used: the text of an error fits
GRAIN = 1 << 16  # bytes; a mapping can begin at any multiple of it, on any system
LARGE = 2 * MIB  # slots grow by doubling up to this, then in multiples of it
MAX_LEASED = 16384  # slots, each a mapping: a process can have 65530, for all that it does


class Arena:
    """The trainer's end of the slots: maps, leases and frees them; and the rings.

    Any thread may call any method, and leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        Most bytes of slots that may be leased or pinned; large leaves of further batches are copied
        out of their slots. See `memory_limit_of`.
    locks : PageLocks, optional
        Registers every mapping that is made, until a larger one replaces it.
    tickets : int
        The most tickets that are posted at a time: slots for as many stay committed.

    Attributes
    ----------
    fd, width, most : int
        The file of the slots; bytes from one to the next; how many there can be.
    rings : list of Ring
    owners : int
        How many processes use the rings, numbered from 1.
    memory_limit : int
        In bytes.
    copies : int
        Batches with large leaves that were copied because too many were held.
    mapped : list of Mapping or None
        The present mapping of every slot; None: it was not mapped yet.
    slots : SlotTable
        The table.
    """

    def __init__(
        self,
        memory_limit: int | str | None = None,
        locks: Any = None,
        *,
        tickets: int = 0,
    ) -> None:
        self._locks = locks
        # Around everything but what a lease does. A signal handler may take batches, or finish, in
        # the middle of it.
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

        `rings`: 1, if all workers share one, or a queue for each. `name`: what `/proc` calls them.
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
        """Descriptor of the file of slots; -1 once it is closed."""
        return self._files[-1].fd

    @property
    def fds(self) -> list[int]:
        """Descriptors of the rings' file and of the slots'."""
        return [file.fd for file in self._files]

    def _locate(self, owner: int) -> tuple[int, int]:
        """Return the number of a worker's ring, and the worker's number there."""
        above, at = divmod(owner - 1, len(self.rings))
        return at, above + 1

    def setup_of(self, owner: int, *, has_slots: bool) -> tuple[int, tuple[int, int], int, int]:
        """Return where a worker finds its ring and the slots: fields of `worker.Setup`."""
        at, number = self._locate(owner)
        where = at * self._ring_width, self._ring_bytes
        return number, where, self.width, self.most if has_slots else 0

    def held(self, owner: int) -> list[tuple[int, int]]:
        """Return cell and beginning (ns of `now_ns`) of each ticket that a worker works on."""
        at, number = self._locate(owner)
        ring = self.rings[at]
        return [(cell, ring.holder(cell)[1]) for cell in ring.held(number)]

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
        """Whether the rings are closed, the last one too."""
        return self.rings[-1].closed == 1

    def request(self, slot: int) -> int:
        """Commit the first pages of a slot that the trainer has taken; return how many bytes."""
        nbytes = self.slots.nbytes(slot)
        if nbytes < FIRST:
            commit(self.fd, slot * self.width, FIRST)
            nbytes = FIRST
            self.slots.resize(slot, nbytes)
        return nbytes

    def reclaim(self, owner: int, status: int = 0) -> None:
        """Post the tickets of a worker that has certainly ended again, and free its slots.

        With a `status`, the tickets are published with that instead. The slots of published ones
        stay; the trainer makes them its own before they leave their cells: so either they are seen
        here, or they are not the worker's any more.
        """
        at, number = self._locate(owner)
        self.rings[at].repost(number, status)
        published = set().union(*(ring.slots() for ring in self.rings))
        for slot, has in enumerate(self.slots.owners()):
            if has == owner and slot not in published:
                self.slots.give_back(slot, owner)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot: its lease, or a copy; see `lease`."""
        lease = self.lease(slot, capacity) if used > SMALL else None
        return copy_of(self.mapping_of(slot, capacity), used) if lease is None else lease

    def lease(self, slot: int, capacity: int) -> Memory | None:
        """Return the memory of a taken slot, valid while there are references to it.

        The lease begins when the ticket is committed; the end of the last view of the memory frees
        the slot. None: too many slots are leased, and what is to be held has to be copied.

        `capacity`: bytes of the slot that are committed, as the worker says. MemoryError if there
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
        """Return the memory of a taken slot itself, valid while the slot stays taken."""
        with self._lock.hold():
            mapping = self.mapped[slot] if slot < len(self.mapped) else None
            if mapping is None or mapping.nbytes < capacity:
                self._unmap(slot)  # what was mapped before the slot grew
                self.mapped += [None] * (slot + 1 - len(self.mapped))
                mapping = Mapping(self.fd, slot * self.width, capacity)
                if self._locks is not None:
                    self._locks.register(mapping)
                self.mapped[slot] = mapping
            self.slots.resize(slot, capacity)  # a converter may have made it larger
            return mapping

    def close(self) -> None:
        """Close the files; leases keep their part of the slots. Closing twice is fine."""
        self.mapped[:] = [None] * len(self.mapped)
        self.slots.close()
        for file in self._files:
            file.close()

    def _unmap(self, slot: int) -> None:
        """Drop a mapping: the slot is free, or a ticket's, so no lease refers to the mapping."""
        if slot >= len(self.mapped):
            return
        before, self.mapped[slot] = self.mapped[slot], None
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def tidy(self) -> None:
        """Where an epoch begins, free what forks pinned, and give back what the last did not need.

        These are the slots of more than twice the epoch's largest batch, and those that neither
        tickets nor the batches held at one time need.
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
        """Return how many slots may be leased at a time."""
        return min(MAX_LEASED, self.most // 2)

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


def _slots_file(tickets: int) -> tuple[Descriptor, int, int]:
    """Make a file with as many and as wide slots as the file system can have: it, width, slots.

    `tickets`: the most that are posted at a time. On Windows there are slots for these, for those
    of an epoch that was cancelled, and as many again to lease; the more, the narrower.
    """
    for width, slots in reserved(tickets) if os.name == "nt" else SIZES:
        try:
            return sparse_file(width * slots), width, slots
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # of any size
                raise
            last = error
    raise last


def reserved(tickets: int) -> tuple[tuple[int, int], ...]:
    """Return what to try on Windows: (width in bytes, slots)."""
    slots = max(FEWEST, 1 << (4 * tickets - 1).bit_length())
    return tuple((nbytes // slots, slots) for nbytes in RESERVED)


def room_for(needed: int, capacity: int, width: int) -> int:
    """Return how large (bytes) a slot of `capacity` bytes becomes to hold `needed` bytes."""
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
