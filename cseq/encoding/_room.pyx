# cython: language_level=3, freethreading_compatible=True
"""A room: the slot that a batch is written to."""

from libc.stdint cimport int64_t, uint64_t

cimport cython

from cseq._headers cimport *
from cseq._memory cimport LEAST, Block, Mapping, Memory
from cseq.encoding._plan cimport aligned
from cseq.memory._slots cimport SlotTable

import gc
import math
import sys
from weakref import ref

import numpy

from cseq._memory import HAS_GIL, Loan, SlotAllocator, address_of, commit, flat_of
from cseq.check import dimensions
from cseq.memory.arena import room_for
from cseq.system import MIB, check_available

# Bytes to commit between checks of free memory. A check takes about 1 ms.
CHECK = 32 * MIB
# Maximum number of slots that a room keeps mapped. Linux allows 65,530 mappings per process.
MAX_MAPPED = 16_384
# A worker that keeps this many slots stops making arrays in slots.
KEEPS = 3


@cython.final
cdef class Room:
    """The slot that a batch is written to. It can grow.

    A worker takes a slot for each ticket and publishes it with the batch. If arrays in the slot are
    still alive, the worker keeps the slot, and publishes a copy of the batch in another one. A
    worker that keeps several slots stops making arrays in slots.

    Mappings are kept for later tickets to save system calls.

    Parameters
    ----------
    fd : int
        The arena's file, which the caller must close.
    width : int
        The distance between slots in bytes.
    slots : SlotTable, optional
        The table that slots are taken from. Without it, the caller uses `select`, and arrays in a
        slot must not outlive the ticket.

    Attributes
    ----------
    memory : Memory
        The memory of the current slot.
    used, capacity : int
        The bytes in use, and the committed bytes.
    slot : int
        The current slot, or -1.
    mapped : dict
        The Mapping of each slot.
    slot_allocator : SlotAllocator or None
        Makes numpy allocate the indexer's large arrays in the slot.
    """

    def __cinit__(self, int fd, uint64_t width, SlotTable slots=None):
        self.fd, self.width, self.slots = fd, width, slots
        self.memory, self.slot = Block(0), -1
        self.mapped, self.older, self.kept, self.loans = {}, [], [], []

    # -- selecting a slot

    cdef int open_slot(self) except -1:
        """Take a slot for the current ticket. A fast path for `begin_slot`."""
        cdef Mapping mapping
        cdef uint64_t nbytes
        if self.slots is None or self.slot >= 0 or self.loaned or self.older or self.kept:
            self.begin_slot()
            return 0
        self.take_slot()
        mapping = self.mapped.get(self.slot)
        nbytes = self.slots.committed(self.slot)
        if (mapping is None or <uint64_t>mapping.size < nbytes or nbytes < LEAST
                or (self.slot_allocator is not None and nbytes > LEAST)):
            self.begin_slot()
            return 0
        self.memory, self.capacity = mapping, <Py_ssize_t>nbytes
        self.used = 0
        self.watched = False
        return 0

    cdef int take_slot(self) except -1:
        self.slot = self.slots.take()
        CSEQ_POINT("taken")
        return 0

    def begin_slot(self):
        """Take an empty slot, or the previous one if it was not published."""
        self.abandon()
        if self.kept:
            self.recover()
        self.begin_empty()
        if self.slot_allocator is not None and self.capacity > LEAST and self.may_lend():
            mapping = self.mapped[self.slot]
            self.slot_allocator.serve(mapping, self.capacity)
            self.target = mapping

    def select(self, int64_t slot, Py_ssize_t capacity, Py_ssize_t used=0):
        """Select one of the caller's slots. Its first `used` bytes contain a batch."""
        self.abandon()
        self.open_at(slot, capacity)
        self.used, self.loaned = used, used > 0

    def mapping_of(self, int64_t slot, Py_ssize_t capacity):
        cdef Mapping mapping = self.mapped.get(slot)
        if mapping is None or mapping.size < capacity:
            mapping = self.map(slot, max(capacity, <Py_ssize_t>LEAST))
        return mapping

    cdef int begin_empty(self) except -1:
        cdef Py_ssize_t capacity
        if self.slot < 0:
            self.take_slot()
        capacity = self.slots.nbytes(self.slot)
        if capacity < LEAST:
            self.commit(0, LEAST)
            capacity = LEAST
            self.slots.resize(self.slot, capacity)
        return self.open_at(self.slot, capacity)

    cdef int abandon(self) except -1:
        """Discard the current slot, or keep it if it has live arrays."""
        if self.stop_lending() and self.slots is not None:
            self.keep()
        self.loans, self.window = [], None
        return 0

    cdef int open_at(self, int64_t slot, Py_ssize_t capacity) except -1:
        self.memory = self.mapping_of(slot, capacity)
        self.slot, self.capacity, self.used = slot, capacity, 0
        self.watched = self.loaned = False
        self.older = []
        return 0

    # -- arrays and loans

    def allocate_in_slots(self):
        """Make numpy allocate large arrays in the current slot.

        This requires Linux, and the GIL, so that one thread allocates at a time.
        """
        if sys.platform == "linux" and HAS_GIL:
            self.slot_allocator = SlotAllocator()

    def settle(self):
        """Stop making arrays in the slot after the indexer has returned."""
        if self.target is not None and self.slot_allocator is not None:
            self.slot_allocator.pause()
            self.watched = self.slot_allocator.count > 0
            if self.slot_allocator.live:
                self.used = max(self.used, <Py_ssize_t>self.slot_allocator.used)
                self.loaned = True

    cpdef Py_ssize_t reserve(self, Py_ssize_t nbytes) except -1:
        """Reserve `nbytes` bytes of the slot and return their offset, a multiple of 64.

        A MemoryError leaves everything unchanged.
        """
        cdef object allocator = self.slot_allocator if self.target is not None else None
        cdef Py_ssize_t used = self.used
        if allocator is not None:
            used = max(used, <Py_ssize_t>allocator.used)
        cdef Py_ssize_t offset = aligned(used)
        cdef Py_ssize_t end = offset + nbytes
        if end > self.capacity:
            self.grow(end)
        self.used = end
        if allocator is not None:
            allocator.used = end
        return offset

    def empty(self, shape, dtype=float):
        """Make an uninitialized array in the slot, or in private memory if many slots are kept."""
        kind = numpy.dtype(dtype)
        dims = dimensions(shape)
        if kind.hasobject:
            raise ValueError(f"dtype {kind} holds Python objects; make the array with numpy.empty")
        if self.slots is not None and not self.may_lend():
            return numpy.empty(dims, kind)
        offset = self.reserve(kind.itemsize * math.prod(dims))
        return self.loan().view(offset, kind, dims)

    def loan(self):
        """Return the slot as a `Loan`. `end_slot` checks whether it is still referenced."""
        if self.window is None:
            self.window = Loan(self.memory, self.capacity)
            self.loans.append(ref(self.window))
            self.loaned = True
        return self.window

    cpdef Py_ssize_t offset_of(self, array) except -2:
        """Return the offset of an aligned array without gaps in the slot, or -1."""
        cdef Memory memory
        cdef Py_ssize_t offset, nbytes
        flat = array if array.flags.c_contiguous else flat_of(array)
        if flat is not None and flat.flags.aligned and flat.nbytes:
            start, nbytes = address_of(flat), flat.nbytes
            for memory in (self.memory, *self.older):
                offset = start - memory.address
                if offset >= 0 and offset + nbytes <= min(self.used, memory.size):
                    return offset
        return -1

    def end_slot(self):
        """Finish the slot. If it has live arrays, keep it and copy the batch to another slot.

        The caller must have dropped the batch. Without a slot table, this raises RuntimeError
        instead of copying.
        """
        cdef Memory source = self.memory
        cdef Py_ssize_t used = self.used
        self.window = None
        if not self.stop_lending():
            return
        if self.slots is not None:
            self.keep()
            self.begin_empty()
            self.reserve(used)
            self.memory.store_from(0, source, used)
            return
        # An array may be alive only because of a reference cycle.
        gc.collect()
        if self.is_lent():
            raise RuntimeError(
                "arrays in a slot are still in use after its batch was made, but another batch will "
                "overwrite the slot; keep copies (array.copy())")

    def close(self):
        """Drop all mappings. Live arrays keep theirs."""
        self.stop_lending()
        self.mapped.clear()
        self.kept.clear()
        if self.slots is not None:
            self.slots.close()
        self.older = []
        self.window = None
        self.memory = Block(0)
        self.used = self.capacity = 0

    cdef bint is_lent(self) except -1:
        for loan in self.loans:
            if loan() is not None:
                return True
        return False

    cdef bint stop_lending(self) except -1:
        placed = 0
        if self.target is not None and self.slot_allocator is not None:
            placed = self.slot_allocator.stop()
        self.target = None
        return placed > 0 or self.is_lent()

    cdef int keep(self) except -1:
        """Keep the slot for the arrays in it. There is no current slot afterwards."""
        self.kept.append((self.slot, [self.memory, *self.older], self.loans))
        self.loans = []
        self.slot = -1
        return 0

    cdef bint may_lend(self) except -1:
        if self.kept:
            self.recover()
        return len(self.kept) < KEEPS

    cdef int recover(self) except -1:
        for kept in self.kept[:]:
            slot, memories, loans = kept
            held = any([loan() is not None for loan in loans]) or self.slot_allocator is not None and any([
                isinstance(memory, Mapping) and self.slot_allocator.holds(memory) for memory in memories])
            if not held:
                self.kept.remove(kept)
                self.slots.free(slot)
        return 0

    # -- growth

    cdef int grow(self, Py_ssize_t needed) except -1:
        """Commit and map at least `needed` bytes of the slot. Existing arrays stay valid."""
        cdef Py_ssize_t capacity = room_for(needed, self.capacity, self.width)
        self.commit(self.capacity, capacity)
        if self.slots is not None:
            self.slots.resize(self.slot, capacity)
        if self.memory.size < capacity:
            self.older.append(self.memory)
            self.memory = self.map(self.slot, capacity)
        self.capacity = capacity
        self.window = None
        return 0

    cdef int commit(self, Py_ssize_t start, Py_ssize_t end) except -1:
        if self.unchecked + end - start > CHECK:
            check_available(end - start)
            self.unchecked = 0
        commit(self.fd, <uint64_t>self.slot * self.width + start, end - start)
        self.unchecked += end - start
        return 0

    cdef Mapping map(self, int64_t slot, Py_ssize_t capacity):
        """Map a slot and keep the mapping. At the limit, drop the newest one (slots take turns)."""
        self.mapped.pop(slot, None)
        if len(self.mapped) >= MAX_MAPPED:
            self.mapped.popitem()
        mapping = self.mapped[slot] = Mapping(self.fd, <uint64_t>slot * self.width, capacity)
        return mapping
