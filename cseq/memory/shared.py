"""The memory that the trainer and the workers of a pool share: rings, and slots.

It lies in two anonymous files. A worker process maps them from the descriptors that it gets, beside
the numbers of `Shared.place`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cseq._core import Ring, ring_bytes
from cseq._memory import Mapping, commit
from cseq.memory.arena import Arena
from cseq.memory.segment import Segment, whole_grains
from cseq.stage import spins

if TYPE_CHECKING:
    from cseq.memory.arena import Locks

__all__ = ["Shared"]


class Shared:
    """Rings and slots in shared memory.

    Parameters
    ----------
    capacity, room, runners : int
        Of a ring: cells, indices in each, owners.
    owners : int
        How many processes use it, numbered from 1.
    memory_limit, locks
        See `Arena`.
    rings : int
        1: all workers share one ring. Else each worker has a ring of its own, a queue (see `Ring`).
    calls : int
        See `Ring`.
    tickets : int, optional
        The most that are posted at a time, if fewer than there are cells.
    limit : int
        See `Ring`.
    name : str
        What `/proc` calls the file of the rings.
    """

    def __init__(
        self,
        capacity: int,
        room: int,
        runners: int,
        *,
        owners: int,
        memory_limit: int | str | None,
        locks: Locks | None = None,
        rings: int = 1,
        calls: int = 0,
        tickets: int | None = None,
        limit: int = 0,
        name: str = "cseq",
    ) -> None:
        self.owners = owners
        self._ring_bytes = size = ring_bytes(capacity, room, runners)
        width = whole_grains(size)
        self._segment = Segment.create(width, rings, name)
        self.rings: list[Ring] = []
        mapping = Mapping(self._segment.fd, 0, rings * width)
        for k in range(rings):
            offset = k * self._segment.width
            commit(self._segment.fd, offset, size)
            self.rings.append(Ring(mapping, capacity, room, runners, calls, at=offset, limit=limit))
            self.rings[k].spin = spins(owners)
        self.arena = Arena(memory_limit, locks, tickets=tickets or rings * capacity)

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of the rings' file and of the slots'."""
        return self._segment.fd, self.arena.segment.fd

    def _locate(self, owner: int) -> tuple[int, int]:
        """Return the number of a worker's ring, and the worker's number there."""
        above, at = divmod(owner - 1, len(self.rings))
        return at, above + 1

    def place(self, owner: int, *, has_slots: bool) -> tuple[int, tuple[int, int], int, int]:
        """Return where a worker finds its ring and the slots: fields of `worker.Setup`."""
        at, number = self._locate(owner)
        where = at * self._segment.width, self._ring_bytes
        slots = self.arena.segment
        return number, where, slots.width, slots.slots if has_slots else 0

    def held(self, owner: int) -> list[tuple[int, int]]:
        """Return cell and beginning (ns of `now_ns`) of each ticket that a worker works on."""
        at, number = self._locate(owner)
        ring = self.rings[at]
        return [(cell, ring.holder(cell)[1]) for cell in ring.held(number)]

    def reclaim(self, owner: int, status: int = 0) -> None:
        """Post the tickets of a worker that has certainly ended again, and free its slots.

        With a `status`, they are given up: published with that.
        """
        at, number = self._locate(owner)
        self.rings[at].repost(number, status)
        self.arena.reclaim(owner, self.rings)

    def notify_all(self) -> None:
        """Wake the trainer, whichever ring it waits for."""
        for ring in self.rings:
            ring.notify_all()

    def end(self) -> None:
        """Close the rings: workers end, and the trainer wakes up."""
        for ring in self.rings:
            ring.close()

    def close(self) -> None:
        """Release the memory; no process or thread may use it any more."""
        self.arena.close()
        self._segment.close()
