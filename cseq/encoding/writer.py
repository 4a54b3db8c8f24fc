"""A worker's end of the slots: writes batches, and lets arrays be made in place.

A worker takes a slot when it begins a ticket, and publishes the slot's number with the batch. If
arrays in the slot are still alive then, it keeps the slot, and publishes a copy of the batch in
another one. A kept slot is freed when no array in it is alive. Arrays are not made in slots while a
worker keeps several.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._memory import (
    HAS_GIL,
    SMALL,
    Block,
    Loan,
    Mapping,
    Memory,
    SlotAllocator,
    address_of,
    commit,
    flat_of,
)
from cseq.check import dimensions
from cseq.encoding import codec, failure
from cseq.encoding._codec import Encoder
from cseq.encoding._plan import ALIGNMENT
from cseq.memory.arena import FIRST, room_for
from cseq.stage import BATCH, ENDED, RAISED
from cseq.system import MIB, check_available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from cseq._work import Runner
    from cseq.encoding._plan import Plan
    from cseq.memory._slots import SlotTable

Array: TypeAlias = np.ndarray[Any, Any]

CHECK = 32 * MIB  # committed between two checks of the free memory; a check takes about 1 ms
MAX_MAPPED = 16_384  # slots that a writer keeps mapped; Linux gives a process 65,530 mappings
KEEPS = 3  # slots; a worker that keeps so many makes no more arrays in them


class Kept(NamedTuple):
    """A slot that its worker keeps, since arrays in it are alive."""

    slot: int
    memories: list[Memory]  # its mappings
    loans: list[weakref.ref[Loan]]


class Writer(Encoder):
    """A worker's end of the slots: writes into the present one, and publishes it with its ticket.

    Mappings are kept for the next tickets in their slots, so that in the long run no system call is
    made.

    Parameters
    ----------
    fd : int
        Descriptor of the arena's file; stays the caller's.
    width : int
        Bytes from one slot to the next.
    slots : SlotTable, optional
        The table that it takes slots from. None: the caller names them (`select`), and no array of
        a slot may be alive when its batch is published.
    """

    def __init__(self, fd: int, width: int, slots: SlotTable | None = None) -> None:
        self._fd = fd
        self.slots = slots
        self._width = width
        self._window: Loan | None = None
        self._loans: list[weakref.ref[Loan]] = []
        self._unchecked = 0  # bytes committed since the system was last asked for its free memory

    # -- for the part in C

    dump = staticmethod(codec.dump)

    def survey(self, batch: Any) -> tuple[Plan, list[Array], list[Any]]:
        """Make the plan of a batch."""
        return codec.plan_for(batch, self)

    @property
    def allocator(self) -> Writer:
        """What makes arrays of a batch where the batch will lie."""
        return self

    # -- tickets

    def fetch(self, runner: Runner) -> Any:
        """Decode the batch of a converter's ticket where it lies, to write after it."""
        self.select(runner.slot, runner.capacity)
        self.used = sum(runner.record)
        self.loaned = True
        return codec.decode(self.loan(), runner.record)

    def write(self, runner: Runner, batch: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Encode the batch."""
        self.settle()
        record: tuple[int, ...] = self.encode(batch)
        return record

    def publish(self, runner: Runner, record: tuple[int, ...]) -> None:
        """Publish the ticket; arrays in the slot that the indexer has kept stay where they are."""
        self.end()
        self.deliver(runner, BATCH, record)

    def end_items(self, runner: Runner) -> None:
        """Publish the ticket with nothing: no more follows in this queue."""
        self.settle()
        self.end()
        self.deliver(runner, ENDED, (0, 0, 0, 0))

    def fail(self, runner: Runner, error: BaseException, status: int = RAISED) -> None:
        """Write the exception into the slot; its text alone, if memory is short."""
        try:
            record = self._write_error(runner, failure.pack(error))
        except MemoryError:
            try:
                record = self._write_error(runner, failure.pack_text(error))
            except MemoryError:  # there is not even a slot
                runner.publish(status)
                return
        self.deliver(runner, status, record)

    def _write_error(self, runner: Runner, packed: bytes) -> tuple[int, ...]:
        """Write a packed exception over what the slot holds."""
        if self.slots is None:  # a converter writes over the indexer's batch
            self.select(runner.slot, runner.capacity)
        else:
            self.begin()
        record: tuple[int, ...] = self.encode(packed)
        self.end()
        return record

    # -- the slot

    def begin(self) -> None:
        """Take a slot as the present one, empty; MemoryError if there is no room for another.

        One that was taken for a ticket which was published without a slot is used for the next.
        """
        self._abandon()
        if self.kept:
            self._recover()
        self._begin_empty()
        if self.placement is not None and self.capacity > SMALL and self._may_lend():
            mapping = self.mapped[self.slot]
            self.placement.begin(mapping, self.capacity)
            self.target = mapping

    def select(self, slot: int, capacity: int) -> None:
        """Make a slot of the caller's, of which `capacity` bytes are committed, the present one."""
        self._abandon()
        self._open(slot, capacity)

    def mapping_of(self, slot: int, capacity: int) -> Mapping:
        """Return the memory of a slot, the present one or another."""
        mapping = self.mapped.get(slot)
        if mapping is None or mapping.nbytes < capacity:
            mapping = self._map(slot, max(capacity, FIRST))
        return mapping

    def _begin_empty(self) -> None:
        """Begin to write at the beginning of a slot that this worker has taken."""
        assert self.slots is not None
        if self.slot < 0:
            self.take()
        capacity = self.slots.nbytes(self.slot)
        if capacity < FIRST:
            self._commit(0, FIRST)
            capacity = FIRST
            self.slots.resize(self.slot, capacity)
        self._open(self.slot, capacity)

    def _abandon(self) -> None:
        """Forget what was written to the present slot; it is kept if arrays in it are alive."""
        if self._stop_lending() and self.slots is not None:
            self._keep()
        self._loans, self._window = [], None

    def _open(self, slot: int, capacity: int) -> None:
        """Begin to write at the beginning of a slot."""
        self.memory = self.mapping_of(slot, capacity)
        self.slot = slot
        self.capacity = capacity
        self.used = 0
        self.watched = self.loaned = False
        self.older: list[Memory] = []

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

    def place(self, nbytes: int) -> int:
        """Reserve the next `nbytes` of the slot; return their offset, a multiple of 64 bytes.

        MemoryError if there is no room; nothing has changed then.
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

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = float) -> Array:
        """Make an array in the slot, uninitialised; if many slots are kept, in private memory."""
        kind = np.dtype(dtype)
        dims = dimensions(shape)
        if kind.hasobject:
            raise ValueError(f"dtype {kind} holds Python objects: make the array with numpy.empty")
        if self.slots is not None and not self._may_lend():
            return np.empty(dims, kind)
        offset = self.place(kind.itemsize * math.prod(dims))
        return self.loan().view(offset, kind, dims)

    def loan(self) -> Memory:
        """Return the slot as a `Loan`; `end` checks whether there are references to it."""
        if self._window is None:
            self._window = Loan(self.memory, self.capacity)
            self._loans.append(weakref.ref(self._window))
            self.loaned = True
        return self._window

    def find(self, array: Array) -> int:
        """Return the offset (bytes) of an array's data in the used part of the slot, or -1.

        All mappings of this ticket are searched. Only aligned arrays without gaps are found.
        """
        flat = array if array.flags.c_contiguous else flat_of(array)
        if flat is not None and flat.flags.aligned and flat.nbytes:
            start = address_of(flat)
            for memory in (self.memory, *self.older):
                offset = start - memory.address
                if offset >= 0 and offset + flat.nbytes <= min(self.used, memory.nbytes):
                    return offset
        return -1

    def end(self) -> None:
        """Finish the slot; if arrays in it are alive, keep it and copy the batch to another one.

        The caller holds no reference to the batch any more. Without a table, RuntimeError if arrays
        are alive.
        """
        self._window = None
        if not self._stop_lending():
            return
        if self.slots is not None:
            source, used = self.memory, self.used
            self._keep()
            self._begin_empty()
            self.place(used)
            self.memory.store_from(0, source, used)
            return
        gc.collect()  # such an array may be in a cycle that is garbage
        if any(loan() is not None for loan in self._loans):
            raise RuntimeError(
                "arrays of a slot are still held after its batch was made, and its memory will be "
                "written to for another batch: keep a copy (array.copy())"
            )

    def close(self) -> None:
        """Drop all mappings; each is unmapped with the last array on it."""
        self._stop_lending()
        self.mapped.clear()
        self.kept.clear()
        if self.slots is not None:
            self.slots.close()
        self.older = []
        self._window = None
        self.memory = Block(0)
        self.used = self.capacity = 0

    def _stop_lending(self) -> bool:
        """Stop making arrays in the slot; return whether arrays in it are alive."""
        placed = 0
        if self.target is not None and self.placement is not None:
            placed = self.placement.end()
        self.target = None
        return placed > 0 or any(loan() is not None for loan in self._loans)

    def _keep(self) -> None:
        """Keep the slot, for the arrays in it; there is no present one then."""
        self.kept.append(Kept(self.slot, [self.memory, *self.older], self._loans))
        self._loans = []
        self.slot = -1

    def _may_lend(self) -> bool:
        """Return whether arrays may be made in the slot."""
        if self.kept:
            self._recover()
        return len(self.kept) < KEEPS

    def _recover(self) -> None:
        """Free the kept slots in which no array is alive any more."""
        assert self.slots is not None
        for kept in self.kept[:]:
            if not self._is_held(kept):
                self.kept.remove(kept)
                self.slots.free(kept.slot)

    def _is_held(self, kept: Kept) -> bool:
        """Return whether arrays in a kept slot are alive."""
        if any(loan() is not None for loan in kept.loans):
            return True
        placement = self.placement
        return placement is not None and any(
            isinstance(memory, Mapping) and placement.holds(memory) for memory in kept.memories
        )

    def _grow(self, needed: int) -> None:
        """Commit and map more of the slot, at least `needed` bytes; arrays made before stay."""
        capacity = room_for(needed, self.capacity, self._width)
        self._commit(self.capacity, capacity)
        if self.slots is not None:
            self.slots.resize(self.slot, capacity)
        if self.memory.nbytes < capacity:
            self.older.append(self.memory)
            self.memory = self._map(self.slot, capacity)
        self.capacity = capacity
        self._window = None

    def _commit(self, start: int, end: int) -> None:
        if self._unchecked + end - start > CHECK:
            check_available(end - start)
            self._unchecked = 0
        commit(self._fd, self.slot * self._width + start, end - start)
        self._unchecked += end - start

    def _map(self, slot: int, capacity: int) -> Mapping:
        """Map a slot and remember it; of too many, forget the newest: slots come round in turn."""
        self.mapped.pop(slot, None)
        if len(self.mapped) >= MAX_MAPPED:
            self.mapped.popitem()
        mapping = self.mapped[slot] = Mapping(self._fd, slot * self._width, capacity)
        return mapping
