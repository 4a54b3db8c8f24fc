"""Slots of shared memory that batches lie in, and the leases on them.

One anonymous file, very sparse: slot ``s`` begins at byte ``s * width``. A process maps of a slot
what is committed, and maps it anew when it has grown; pages are committed before they are
written, so that a lack of memory is an exception and not a signal. Slots are used again, lowest
first, since writing to warm pages is many times faster than to fresh ones.

The guarantee: a slot is not written to while an array, a view or a tensor made from it is alive, in
the trainer or in the worker that filled it, also after the arena was closed. Its memory is freed
with the last of these.

                     acquire              begin … place … end         lend, vacate
    trainer   free ───────────► taken ──────────────────────► taken ──┬────────► leased ──► free
                                          in a worker: Writer         └─ copied ──────────► free

A worker owns a few slots besides that of its ticket, its *spares*. If arrays in the ticket's slot
are still alive when the batch is published, the worker keeps the slot and publishes a copy of the
batch in a spare, which is the trainer's from then on (`Slots.settle`). A kept slot is a spare again
when no array in it is alive. Arrays are made in a slot only while there is a spare.

Slots shrink: every `WINDOW` batches, pages are given back far beyond what these batches needed, and
all of free slots above the highest one that two windows used.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import operator
import os
import re
import sys
import threading
import weakref
from os.path import join  # pathlib is slow to import, and every start waits for it
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from cseq._core import (
    ALIGNMENT,
    BULKY,
    HAS_GIL,
    SMALL,
    Block,
    Descriptor,
    Hand,
    Mapping,
    Memory,
    Placement,
    Slots,
    Window,
    address_of,
    commit,
    copy_of,
    punch,
)
from cseq.check import dimensions
from cseq.descriptors import anonymous_file
from cseq.threads import imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cseq._core import Ring, Seat


Array: TypeAlias = np.ndarray[Any, Any]
Folder: TypeAlias = "str | os.PathLike[str]"

logger = logging.getLogger("cseq")

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

WIDTH = 1 << 40  # bytes from one slot to the next
SLOTS = 1 << 22  # so that the file stays below 2^63 bytes
# What is tried where a file cannot be that long: (width in bytes, slots).
NARROWER = ((1 << 36, 1 << 16), (1 << 33, 1 << 10), (1 << 30, 1 << 9), (1 << 28, 1 << 7))

FIRST = SMALL  # bytes; committed when a slot is made, so that an error report always fits
LARGE = 2 * MIB  # slots grow by doubling up to this, then in multiples of it
CHECK = 32 * MIB  # committed after one look at the free memory; the look takes about 1 ms
MAX_LEASED = 1024  # slots; a process can have some 65000 mappings
MAX_MAPPED = 4096  # slots that a writer keeps mapped
SPARES = 3  # slots that a worker owns besides that of its ticket
WINDOW = 32  # batches; what those of the last window needed stays committed
SLACK = BULKY  # bytes; a slot shrinks if its excess is more than this and than what is needed

ROOT = "/"
# Files of a control group: of the limit of its memory, and of what it has taken.
USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
# And of its processes that were killed for lack of memory.
KILLS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}
UNKNOWN_RAM = 8 * GIB  # bytes; taken where the system does not say


# -- the file -----------------------------------------------------------------------------------


class Segment:
    """An anonymous file: gone with its last descriptor and mapping, whichever process is killed.

    Parameters
    ----------
    file : Descriptor
    width : int
        Bytes from one slot to the next; the size of the file where it has no slots.
    slots : int
        How many of them there are.
    """

    def __init__(self, file: Descriptor, width: int, slots: int = 1) -> None:
        self._file = file
        self.width = width
        self.slots = slots

    @property
    def fd(self) -> int:
        """Descriptor of the file; -1 once it is closed."""
        return self._file.fd

    @classmethod
    def create(cls, nbytes: int, slots: int = 1) -> Segment:
        """Make a file of `slots` times `nbytes` zeroes, of which none takes memory yet.

        Raises
        ------
        OSError
            If the file system cannot have a file of that size.
        """
        file, sealable = anonymous_file("cseq")
        os.ftruncate(file.fd, nbytes * slots)
        if sealable:
            _seal(file.fd)
        return cls(file, nbytes, slots)

    @classmethod
    def for_slots(cls) -> Segment:
        """Make a file with as many and as wide slots as the file system can have.

        Raises
        ------
        OSError
            If it cannot even have the smallest one.
        """
        for width, slots in ((WIDTH, SLOTS), *NARROWER[:-1]):
            with contextlib.suppress(OSError):
                return cls.create(width, slots)
        width, slots = NARROWER[-1]
        try:
            return cls.create(width, slots)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no sparse file of {width * slots >> 30} GiB for shared memory: "
                f"{error.strerror}; is the size of files limited (ulimit -f)?",
            ) from error

    def close(self) -> None:
        """Close the descriptor; mappings stay. Closing twice is fine."""
        self._file.close()


def _seal(fd: int) -> None:
    """Fix the size, so that no process can cut the file under a mapping (that would be SIGBUS)."""
    fcntl = imported("fcntl")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


# -- a worker's side ----------------------------------------------------------------------------


class Need:
    """The most bytes that a batch needed: of the window before, and of the present one so far."""

    __slots__ = ("_before", "_count", "_now")

    def __init__(self) -> None:
        self._now = self._before = self._count = 0

    def add(self, nbytes: int) -> bool:
        """Count a batch of `nbytes`; return whether it was the last one of a window."""
        self._now = max(self._now, nbytes)
        self._count += 1
        if self._count % WINDOW:
            return False
        self._before, self._now = self._now, 0
        return True

    def excess(self, width: int) -> tuple[int, int]:
        """Return above how many bytes a slot is too large, and to how many it shrinks."""
        if self._count < 2 * WINDOW:
            return width, width
        room = _room(max(self._now, self._before), 0, width)
        return max(2 * room, room + SLACK), room


class Kept(NamedTuple):
    """A slot that its worker keeps, since arrays in it are alive."""

    slot: int
    nbytes: int
    memories: list[Memory]  # its mappings
    loans: list[weakref.ref[Window]]


class Writer(Hand):
    """A worker's end of the arena: writes into the slot of its present ticket.

    Every mapping made is kept for the slot's next ticket, so that in the long run no system call
    is made.

    Parameters
    ----------
    fd : int
        Descriptor of the arena's file; stays the caller's.
    width : int
        Bytes from one slot to the next.
    spares : sequence of (int, int), optional
        Slots that this worker owns, and how many bytes of each are committed. None: no array of a
        slot may be alive when its batch is published.
    """

    __slots__ = ("_fd", "_kept", "_loans", "_need", "_spares", "_unchecked", "_width", "_window")

    def __init__(
        self, fd: int, width: int, spares: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._fd = fd
        self._width = width
        self._spares = None if spares is None else list(spares)  # the last is used first
        self._kept: list[Kept] = []
        self._need = Need()
        self._window: Window | None = None
        self._loans: list[weakref.ref[Window]] = []
        self._unchecked = 0  # bytes committed since the system was last asked for its free memory

    def begin(self, slot: int, capacity: int) -> None:
        """Make a slot, of which `capacity` bytes are committed, the present one; none are used.

        If the writer has kept that slot, since arrays in it are alive, a spare is the present one.

        Raises
        ------
        MemoryError
            If it cannot be mapped.
        """
        if self._leave() and self._spares is not None:
            self._keep()
        self._loans, self._window = [], None
        place = self.placement is not None and capacity > SMALL
        if self._kept:
            self._recover()
            if self._spares and any(kept.slot == slot for kept in self._kept):
                slot, capacity = self._spares[-1]
                place = False
        self._turn_to(slot, capacity)
        if place and self._has_spare():
            mapping = self.mapped[slot]
            self.placement.aim(mapping, capacity)  # type: ignore[union-attr]
            self.aimed = mapping

    def look(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a slot; it need not be the present one."""
        mapping = self.mapped.get(slot)
        if mapping is None or mapping.nbytes < capacity:
            mapping = self._map(slot, max(capacity, FIRST))
        return mapping

    def _turn_to(self, slot: int, capacity: int) -> None:
        """Make a slot the present one."""
        self.memory = self.look(slot, capacity)
        self.slot = slot
        self.capacity = capacity
        self.used = 0
        self.watched = self.loaned = False
        self.older = []

    def place_arrays(self) -> None:
        """Make numpy allocate large arrays in the present slot.

        Only on Linux, and where one thread allocates at a time.
        """
        if sys.platform == "linux" and HAS_GIL:
            self.placement = Placement()

    def settle(self) -> None:
        """Stop making arrays in the slot: the indexer has returned."""
        placement = self.placement
        if self.aimed is not None and placement is not None:
            placement.rest()
            self.watched = placement.count > 0
            if placement.live:
                self.used = max(self.used, placement.used)
                self.loaned = True

    def learn(self, arrays: list[Array]) -> None:
        """Make arrays like these in the next ticket's slot, if they were made for this batch."""
        if self.placement is not None:
            self.placement.learn(arrays)

    def resume(self, used: int) -> None:
        """Go on behind the `used` bytes that a stage before this one has filled."""
        self.used = used
        self.loaned = True

    def place(self, nbytes: int) -> int:
        """Reserve the next `nbytes` of the slot: where they begin, a multiple of 64.

        Raises
        ------
        MemoryError
            If there is no room for them; nothing has changed then.
        """
        placement = self.placement if self.aimed is not None else None
        used = self.used if placement is None else max(self.used, placement.used)
        offset = (used + (ALIGNMENT - 1)) & -ALIGNMENT
        end = offset + nbytes
        if end > self.capacity:
            self._grow(end)
        self.used = end
        if placement is not None:
            placement.used = end
        return offset

    def empty(
        self, shape: int | Sequence[int], dtype: object = float, *, fortran: bool = False
    ) -> Array:
        """Make an array in the slot, uninitialised; if there is no spare, in private memory.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype_like
            Without Python objects in it.
        fortran : bool
            Column-major order.

        Raises
        ------
        ValueError
            For a negative shape, or a type with Python objects.
        MemoryError
            If there is no room for it.
        """
        kind: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
        dims = dimensions(shape)
        if kind.hasobject:
            raise ValueError(f"dtype {kind} holds Python objects: make the array with numpy.empty")
        if self._spares is not None and not self._has_spare():
            made: Array = np.empty(dims, kind, order="F" if fortran else "C")
            return made
        offset = self.place(kind.itemsize * math.prod(dims))
        return self.loan().view(offset, kind, dims, fortran)

    def loan(self) -> Memory:
        """Return the slot as a memory; `end` knows whether there are references to it."""
        if self._window is None:
            self._window = Window(self.memory, self.capacity)
            self._loans.append(weakref.ref(self._window))
            self.loaned = True
        return self._window

    def find(self, array: Array) -> int:
        """Return where in the used part of the slot an array's data lies, or -1.

        All mappings of this ticket are searched. Only contiguous and aligned arrays are found.
        """
        flags = array.flags
        if flags.forc and flags.aligned and array.nbytes:
            start = address_of(array)
            for memory in (self.memory, *self.older):
                offset = start - memory.address
                if offset >= 0 and offset + array.nbytes <= min(self.used, memory.nbytes):
                    return offset
        return -1

    def end(self) -> None:
        """Finish the slot, with no reference to the batch left; use a spare if arrays are alive.

        Raises
        ------
        MemoryError
            There is no room for the copy.
        RuntimeError
            Arrays are alive, and this writer has no spares at all.
        """
        self._window = None
        if self._need.add(self.used) and self._spares:
            self._trim()
        if not self._leave():
            return
        if self._spares is not None:
            self._keep()
            self._move()
            return
        gc.collect()  # it may be in a cycle that nothing holds
        if any(loan() is not None for loan in self._loans):
            raise RuntimeError(
                "arrays of a slot are still held after its batch was made; its memory is written "
                "to again for another batch: keep a copy (array.copy())"
            )

    def publish(self, seat: Seat, status: int, record: tuple[int, ...]) -> None:
        """Publish the ticket with what was written; the slot is the trainer's from now on."""
        seat.publish(status, record, self.capacity, self.slot)
        if self._spares:
            self._spares = [spare for spare in self._spares if spare[0] != self.slot]

    def close(self) -> None:
        """Drop all mappings; each is unmapped with the last array on it."""
        self._leave()
        self.mapped.clear()
        self._kept.clear()
        self.older = []
        self._window = None
        self.memory = Block(0)
        self.used = self.capacity = 0

    def _leave(self) -> bool:
        """Stop making arrays in the slot; return whether arrays in it are alive."""
        placed = 0
        if self.aimed is not None and self.placement is not None:
            placed = self.placement.leave()
        self.aimed = None
        return placed > 0 or any(loan() is not None for loan in self._loans)

    def _keep(self) -> None:
        """Keep the slot, for the arrays in it."""
        self._kept.append(Kept(self.slot, self.capacity, [self.memory, *self.older], self._loans))
        self._loans = []

    def _move(self) -> None:
        """Copy what was written to a spare, which becomes the present slot."""
        assert self._spares  # else nothing was made in the slot
        source, used = self.memory, self.used
        slot, nbytes = self._spares[-1]
        self._turn_to(slot, nbytes)
        if used > nbytes:
            self._grow(used)
            self._spares[-1] = slot, self.capacity
        self.memory.store_from(0, source, used)
        self.used = used

    def _has_spare(self) -> bool:
        """Return whether there is a spare; at least the text of an error fits into it."""
        if self._kept:
            self._recover()
        if not self._spares:
            return False
        slot, nbytes = self._spares[-1]
        if nbytes < FIRST:
            try:
                commit(self._fd, slot * self._width, FIRST)
            except MemoryError:
                return False
            self._spares[-1] = slot, FIRST
        return True

    def _recover(self) -> None:
        """Make spares of the kept slots in which no array is alive any more."""
        assert self._spares is not None
        for kept in self._kept[:]:
            if not self._is_held(kept):
                self._kept.remove(kept)
                self._spares.append((kept.slot, kept.nbytes))
                self._trim()

    def _is_held(self, kept: Kept) -> bool:
        """Return whether arrays in a kept slot are alive."""
        if any(loan() is not None for loan in kept.loans):
            return True
        placement = self.placement
        return placement is not None and any(
            isinstance(memory, Mapping) and placement.holds(memory) for memory in kept.memories
        )

    def _trim(self) -> None:
        """Give pages of spares back that batches have not needed for a while."""
        assert self._spares is not None
        most, room = self._need.excess(self._width)
        for at, (slot, nbytes) in enumerate(self._spares):
            if nbytes > most and punch(self._fd, slot * self._width + room, self._width - room):
                self._spares[at] = slot, room

    def _grow(self, needed: int) -> None:
        """Commit and map more of the slot, at least `needed` bytes; arrays made before stay."""
        capacity = _room(needed, self.capacity, self._width)
        start = self.slot * self._width
        more = capacity - self.capacity
        if self._unchecked + more > CHECK:
            _check_available(more)
            self._unchecked = 0
        commit(self._fd, start + self.capacity, more)
        self._unchecked += more
        if self.memory.nbytes < capacity:
            self.older.append(self.memory)
            self.memory = self._map(self.slot, capacity)
        self.capacity = capacity
        self._window = None

    def _map(self, slot: int, capacity: int) -> Mapping:
        """Map a slot and remember it, forgetting the oldest mapping if there are too many."""
        self.mapped.pop(slot, None)
        if len(self.mapped) >= MAX_MAPPED:
            del self.mapped[next(iter(self.mapped))]
        mapping = self.mapped[slot] = Mapping(self._fd, slot * self._width, capacity)
        return mapping


def _room(needed: int, capacity: int, width: int) -> int:
    """Return how large a slot of `capacity` bytes should become to hold `needed` bytes."""
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


# -- the trainer's side -------------------------------------------------------------------------


class Locks(Protocol):
    """What page-locks the mappings for a device."""

    def register(self, memory: Memory, /) -> bool:
        """Page-lock a mapping."""

    def unregister(self, memory: Memory, /) -> None:
        """Unlock a mapping before it is dropped."""


class Arena:
    """All slots, as the trainer sees them.

    Any thread may call any method; leases may end on any thread.

    Parameters
    ----------
    memory_limit : int, str or None
        Most bytes of slots that may be leased, or free and committed beyond what the tickets need;
        further batches are copied out of their slots. See `memory_limit_of`.
    locks : Locks, optional
        Registers every mapping that is made, until a larger one replaces it.
    tickets : int
        Most slots that are posted at a time: so many free ones stay committed in any case.

    Attributes
    ----------
    segment : Segment
        The file, for the workers.
    slots : Slots
        Which of them are in use.
    memory_limit : int
        In bytes.
    copies : int
        Batches copied because too many were held; small ones, which always are, do not count.
    mapped : dict of int to Mapping
        The present mapping of every slot that was looked at.
    slots : Slots
        Their states and sizes.
    """

    def __init__(
        self,
        memory_limit: int | str | None = None,
        locks: Locks | None = None,
        *,
        tickets: int = 0,
    ) -> None:
        self._locks = locks
        self._turn = threading.Lock()  # around everything but what a lease does
        self._tickets = tickets
        self.memory_limit = memory_limit_of(memory_limit)
        self.segment = Segment.for_slots()
        self.copies = 0
        self.slots = Slots(0)
        self.mapped: dict[int, Mapping] = {}
        self._need = Need()
        self._room = self.segment.width  # slots of more than `slots.most` bytes shrink to this
        self._top_before = -1  # the highest slot taken in the last window
        self.slots.least, self.slots.most = FIRST, self.segment.width

    @property
    def leased(self) -> int:
        """Slots under lease."""
        return self.slots.leased

    @property
    def leased_bytes(self) -> int:
        """Bytes that are committed in them."""
        return self.slots.leased_bytes

    def prepare(self) -> None:
        """Make the lowest free slot fit for a ticket; make more slots if none is free.

        Nothing is taken, so an exception (Ctrl-C) leaves nothing behind.

        Raises
        ------
        MemoryError
            If there is no room for a new one.
        """
        slots = self.slots
        with self._turn:
            slot = slots.lowest()
            if slot < 0:
                self._extend()
                slot = slots.lowest()
            if slots.nbytes(slot) > slots.most:
                self._shrink(slot, self._room)
            if slots.nbytes(slot) < FIRST:
                commit(self.segment.fd, slot * self.segment.width, FIRST)
                slots.resize(slot, FIRST)

    def acquire(self) -> int:
        """Take the lowest free slot, or a new one, fit for a ticket.

        Raises
        ------
        MemoryError
            If there is no room for a new one.
        """
        self.prepare()
        return self.slots.acquire()

    def release(self, slot: int) -> None:
        """Free a taken slot whose batch is not wanted."""
        self.slots.release(slot)

    def capacity(self, slot: int) -> int:
        """Bytes that are committed in a slot."""
        return self.slots.nbytes(slot)

    def grant(self, owner: int, count: int) -> list[tuple[int, int]]:
        """Give a worker `count` slots, if there are so many: their numbers and committed bytes."""
        granted = []
        with self._turn:
            for _ in range(min(count, self.segment.slots // 1024)):
                slot = self.slots.acquire()
                if slot < 0:
                    self._extend()
                    slot = self.slots.acquire()
                self.slots.grant(slot, owner)
                granted.append((slot, self.slots.nbytes(slot)))
        return granted

    def bury(self, owner: int, rings: list[Ring]) -> None:
        """Free the slots of a worker that is gone for certain and whose tickets are reposted."""
        first, *others = rings
        with self._turn:
            for slot in first.bury(owner, others):
                self.slots.release(slot)
                self._shrink(slot, 0)

    def lend(self, slot: int, used: int, capacity: int) -> Memory:
        """Return the first `used` bytes of a taken slot, for as long as there are references to it.

        Either the slot itself, under a lease that counts from `Slots.vacate` on: the slot is free
        again when the last view of the memory is gone. Or a copy, of a small batch or if too many
        are held.

        Parameters
        ----------
        slot : int
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
            return self.copy(slot, used, capacity)
        mapping = self.look(slot, capacity, used)
        lease: Memory | None = None
        with self._turn:
            if self._may_lease(capacity):
                lease = self.slots.lend(slot, mapping, used)
            else:
                self._count_copy()
        return copy_of(mapping, used) if lease is None else lease

    def copy(self, slot: int, used: int, capacity: int) -> Memory:
        """Return a copy of the first `used` bytes of a slot, which stays taken."""
        return copy_of(self.look(slot, capacity, used), used)

    def look(self, slot: int, capacity: int, used: int = 0) -> Mapping:
        """Return the memory of a taken slot itself, valid for as long as the slot stays taken."""
        with self._turn:
            if self._need.add(used):
                self._tidy()
            mapping = self.mapped.get(slot)
            if mapping is None or mapping.nbytes < capacity:
                mapping = self._map(slot, capacity)
            self.slots.resize(slot, capacity)
            return mapping

    def close(self) -> None:
        """Close the file; leases keep their part of it. Closing twice is fine."""
        self.mapped.clear()
        self.segment.close()

    def _extend(self) -> None:
        """Make more slots: some at first, then a quarter more each time."""
        made = self.slots.capacity
        count = min(max(16, made // 4), self.segment.slots - made)
        if count <= 0:
            raise MemoryError(f"all {made} slots of shared memory are in use: hold fewer batches")
        self.slots.extend(count)

    def _map(self, slot: int, capacity: int) -> Mapping:
        """Map all of a slot that is committed, instead of the mapping made before it grew."""
        self._unmap(slot)
        segment = self.segment
        mapping = Mapping(segment.fd, slot * segment.width, capacity)
        if self._locks is not None:
            self._locks.register(mapping)
        self.mapped[slot] = mapping
        return mapping

    def _unmap(self, slot: int) -> None:
        """Drop a mapping: the slot is TAKEN, so no lease refers to the mapping."""
        before = self.mapped.pop(slot, None)
        if before is not None and self._locks is not None:
            self._locks.unregister(before)

    def _tidy(self) -> None:
        """Give back pages that were not needed lately, and those beyond the limit."""
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
        limit = min(MAX_LEASED, self.segment.slots // 2)
        return slots.leased < limit and slots.leased_bytes + nbytes <= self.memory_limit

    def _count_copy(self) -> None:
        """Count a copy, and say once that there are some."""
        self.copies += 1
        if self.copies == 1:
            logger.warning(
                "%d batches are held in %d bytes of shared memory (at most %d batches and "
                "memory_limit=%d bytes): until some are dropped, further batches are copied. "
                "Hold fewer batches, or raise memory_limit",
                self.leased,
                self.leased_bytes,
                MAX_LEASED,
                self.memory_limit,
            )


# -- how much memory ----------------------------------------------------------------------------

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?i?B)", re.ASCII)


def memory_limit_of(value: int | str | None) -> int:
    """Get the argument ``memory_limit`` in bytes.

    Parameters
    ----------
    value : int, str or None
        Bytes; or a number and a unit, as ``'2GiB'``, ``'500 MB'``; or None, a quarter of the
        memory that this machine, or its control group, has. 0: never lend a slot, always copy.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For a negative number, or a text that is no size.
    """
    if value is None:
        return default_memory_limit()
    if isinstance(value, str):
        return _parse_size(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"memory_limit={value!r} is a {type(value).__name__}: give bytes (an int), a size "
            "such as '2GiB', or None"
        )
    limit = operator.index(value)
    if limit < 0:
        raise ValueError(f"memory_limit={limit} is negative: give 0 or more bytes")
    return limit


def _parse_size(text: str) -> int:
    """Read '2GiB'."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"memory_limit={text!r} is not a size: write a number and one of {', '.join(_UNITS)}, "
            "such as '2GiB'"
        )
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2]])


def default_memory_limit(root: Folder = ROOT) -> int:
    """Take a quarter of the memory that this process may use, in bytes.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    """
    groups = [_number(join(group, limit)) for group, limit in _groups(root)]
    return min([_ram(), *(limit for limit in groups if limit is not None)]) // 4


def available_memory(root: Folder = ROOT) -> int | None:
    """Tell how many bytes this process may still take; None where the system does not say.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    """
    machine = _fields(join(root, "proc/meminfo"))
    if "MemAvailable:" not in machine:
        return None
    free = KIB * (machine["MemAvailable:"] + machine.get("SwapFree:", 0))
    return max(0, min([free, *_free_of_groups(root)]))


def oom_kills(root: Folder = ROOT) -> int | None:
    """Return how many processes of this control group were killed for lack of memory, or None.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    """
    counts = [_fields(join(group, KILLS[name])).get("oom_kill") for group, name in _groups(root)]
    told = [count for count in counts if count is not None]
    return told[0] if told else None


def _check_available(nbytes: int) -> None:
    """Raise MemoryError if so much would make the system kill a process: it does not itself."""
    free = available_memory()
    if free is not None and nbytes > free:
        raise MemoryError(
            f"no room for {nbytes} bytes of shared memory: {free} are available; make batch_size "
            "or buffer smaller"
        )


def _ram() -> int:
    """Bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_RAM


def _free_of_groups(root: Folder) -> Iterator[int]:
    """Bytes that are left in this process's control groups and all above them."""
    for group, name in _groups(root):
        limit = _number(join(group, name))
        taken = _number(join(group, USAGE[name]))
        if limit is not None and taken is not None:
            cache = _fields(join(group, "memory.stat"))  # files' pages can be dropped
            yield limit - taken + cache.get("total_inactive_file", cache.get("inactive_file", 0))


def _groups(root: Folder) -> Iterator[tuple[str, str]]:
    """Name this process's control groups and all above them, and the file with their limit."""
    for line in _lines(join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(join(root, "sys/fs/cgroup"), path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _upwards(join(root, "sys/fs/cgroup/memory"), path, "memory.limit_in_bytes")


def _upwards(top: str, path: str, name: str) -> Iterator[tuple[str, str]]:
    """Name a control group and all above it; in a container, only some may exist."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield join(top, *parts[:depth]), name


def _lines(path: str) -> list[str]:
    """Read a file's lines; none if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    """Read a file with a number in it; None if there is none, or another word ('max')."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: str) -> dict[str, int]:
    """Read a file of lines with a name and a number."""
    words = [line.split() for line in _lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
