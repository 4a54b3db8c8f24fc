"""A worker's end of the slots: writes batches, and lets arrays be made in place.

A worker owns a few slots besides that of its ticket, its *spares*. If arrays in the ticket's slot
are still alive when the batch is published, the worker keeps the slot and publishes a copy of the
batch in a spare, which the trainer owns from then on (`Slots.settle`). A kept slot is a spare again
when no array in it is alive. Arrays are made in a slot only while there is a spare.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._encoder import SlotEncoder
from cseq._memory import HAS_GIL, SMALL, Block, Mapping, Memory, Window, address_of, commit, punch
from cseq._placement import SlotAllocator
from cseq._plan import ALIGNMENT
from cseq.check import dimensions
from cseq.memory_limit import MIB, check_available
from cseq.slot_size import FIRST, Need, room_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cseq._core import Runner

Array: TypeAlias = np.ndarray[Any, Any]

CHECK = 32 * MIB  # committed between two checks of the free memory; a check takes about 1 ms
MAX_MAPPED = 4096  # slots that a writer keeps mapped
SPARES = 3  # slots that a worker owns besides that of its ticket


class Kept(NamedTuple):
    """A slot that its worker keeps, since arrays in it are alive."""

    slot: int
    nbytes: int
    memories: list[Memory]  # its mappings
    loans: list[weakref.ref[Window]]


class Writer(SlotEncoder):
    """A worker's end of the slots: writes into the slot of its present ticket.

    Mappings are kept for the next tickets of their slots, so that in the long run no system call is
    made.

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

    @property
    def spares(self) -> Sequence[tuple[int, int]]:
        """Slots that this worker owns, and their committed bytes; the last is used first."""
        return self._spares or ()

    def begin(self, slot: int, capacity: int) -> None:
        """Make a slot, of which `capacity` bytes are committed, the present one; it is empty then.

        If the writer has kept that slot, since arrays in it are alive, a spare takes its place.

        Raises
        ------
        MemoryError
            The slot cannot be mapped.
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
        self._select(slot, capacity)
        if place and self._has_spare():
            mapping = self.mapped[slot]
            self.placement.begin(mapping, capacity)  # type: ignore[union-attr]
            self.target = mapping

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a slot, the present one or another."""
        mapping = self.mapped.get(slot)
        if mapping is None or mapping.nbytes < capacity:
            mapping = self._map(slot, max(capacity, FIRST))
        return mapping

    def _select(self, slot: int, capacity: int) -> None:
        """Make a slot the present one."""
        self.memory = self.mapping_of(slot, capacity)
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
            self.placement = SlotAllocator()

    def settle(self) -> None:
        """Stop making arrays in the slot: the indexer has returned."""
        placement = self.placement
        if self.target is not None and placement is not None:
            placement.pause()
            self.watched = placement.count > 0
            if placement.live:
                self.used = max(self.used, placement.used)
                self.loaned = True

    def learn(self, arrays: list[Array]) -> None:
        """Note these arrays of the batch: their allocations are served from the slot next time."""
        if self.placement is not None:
            self.placement.learn(arrays)

    def resume(self, used: int) -> None:
        """Write behind the `used` bytes that the stage before has written."""
        self.used = used
        self.loaned = True

    def place(self, nbytes: int) -> int:
        """Reserve the next `nbytes` of the slot; return their offset, a multiple of 64 bytes.

        Raises
        ------
        MemoryError
            There is no room for them; nothing has changed then.
        """
        placement = self.placement if self.target is not None else None
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
        """Return the slot as a `Window`; `end` checks whether there are references to it."""
        if self._window is None:
            self._window = Window(self.memory, self.capacity)
            self._loans.append(weakref.ref(self._window))
            self.loaned = True
        return self._window

    def find(self, array: Array) -> int:
        """Return the offset (bytes) of an array's data in the used part of the slot, or -1.

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
        """Finish the slot; if arrays in it are alive, keep it and copy the batch to a spare.

        The caller holds no reference to the batch any more.

        Raises
        ------
        MemoryError
            There is no room for the copy.
        RuntimeError
            Arrays are alive, and this writer was made without spares.
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
        gc.collect()  # such an array may be in a cycle that is garbage
        if any(loan() is not None for loan in self._loans):
            raise RuntimeError(
                "arrays of a slot are still held after its batch was made, and its memory will be "
                "written to for another batch: keep a copy (array.copy())"
            )

    def publish(self, runner: Runner, status: int, record: tuple[int, ...]) -> None:
        """Publish the ticket with what was written; the trainer owns the slot from now on."""
        runner.publish(status, record, self.capacity, self.slot)
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
        if self.target is not None and self.placement is not None:
            placed = self.placement.leave()
        self.target = None
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
        self._select(slot, nbytes)
        if used > nbytes:
            self._grow(used)
            self._spares[-1] = slot, self.capacity
        self.memory.store_from(0, source, used)
        self.used = used

    def _has_spare(self) -> bool:
        """Return whether there is a spare, with enough committed for the text of an error."""
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
        capacity = room_for(needed, self.capacity, self._width)
        start = self.slot * self._width
        more = capacity - self.capacity
        if self._unchecked + more > CHECK:
            check_available(more)
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
