# cython: language_level=3, freethreading_compatible=True
"""Slots of shared memory, with their owners, sizes and leases."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset, strerror

cimport cython

from cseq._core cimport Ring
from cseq._headers cimport *
from cseq._memory cimport Mapping, Memory, forks_here

import os
from weakref import ref as weak_reference

# A search that skips more than FAR slots raises the hint. A loop that drops its batches has fewer
# than HARDLY_ANY leases. LEASED and PINNED are uses of a slot.
cdef enum:
    FREE = 0
    FAR = 64
    HARDLY_ANY = 3
    LEASED = 1
    PINNED = 2

TRAINER = 0xFFFFFFFF

# Weak references to the trainer's `SlotTable`s. The guard's critical section protects them, because
# list methods enter the critical section of the list.
cdef list tables = []
cdef object tables_guard = object()


@cython.final
@cython.no_gc
cdef class SlotTable:
    """The owners of slots, in shared memory.

    The table is in the first slot of the file. A process must take a slot before writing to it::

        FREE ──► worker k ──► TRAINER ──► FREE
        FREE ──► TRAINER ──► FREE                     used by the trainer: requests, `give_back`
                 worker k ──► FREE                    a slot that was kept, or whose worker is gone

    `take` replaces FREE with a compare-and-swap. Worker k may replace k until it has published the
    slot. Then the trainer replaces k (`free_from`) while the slot is in its cell. Only the trainer
    replaces TRAINER. After the death of worker k, its tickets are reposted. Then the supervisor
    replaces k in all other slots (`reclaim`), also with a compare-and-swap.

    A slot of the trainer is freed when its `uses` become 0. `free_from` adds LEASED for the
    `Lease`, which may be dropped in any thread, even during garbage collection. A fork adds PINNED
    to leased slots until the next epoch, because the child may read them. The child's copy of this
    object changes nothing.

    The search for the lowest free slot starts at `hint`. Freeing a lower slot lowers the hint. A
    long search raises it and checks the skipped slots again. A wrong hint only costs memory.

    The file `fd` belongs to the caller. `width` is the distance between slots in bytes. `owner` is
    TRAINER or a worker's number, from 1. The trainer creates the table.
    """

    def __cinit__(self, int fd, uint64_t width, Py_ssize_t slots, uint32_t owner=TRAINER):
        cdef Py_ssize_t chunks = min((slots + CHUNK - 1) // CHUNK,
                                     <Py_ssize_t>((width - PAGE) // sizeof(slot_chunk)))
        self.fd, self.width, self.owner = fd, width, owner
        self.most = min(slots, chunks * CHUNK)
        self.mapping = Mapping(fd, 0, PAGE + chunks * sizeof(slot_chunk))
        self.table = <slot_table*>self.mapping.data
        self.depth = forks_here[0]
        self.leases = {}
        if owner == TRAINER:
            # Otherwise, another thread's table might be lost, and forks would not pin its leases.
            with cython.critical_section(tables_guard):
                tables[:] = [ref for ref in tables if ref() is not None]
                tables.append(weak_reference(self))
            self.commit(0, PAGE)
            self.extend()
            self.word(0)[0] = TRAINER

    cdef int commit(self, uint64_t offset, uint64_t nbytes) except -1:
        cdef int error
        with nogil:
            error = cseq_commit(self.fd, offset, nbytes)
        if error:
            raise MemoryError(f"not enough memory for the table of slots: {strerror(error).decode()}")
        return 0

    cdef int check(self, Py_ssize_t slot) except -1:
        if slot < 1 or slot >= self.count():
            raise IndexError(f"slot {slot} is out of range for {self.count()} slots")
        return 0

    def close(self):
        """Unmap the table. If there are leases, it stays mapped as long as this object exists."""
        if not self.leased:
            self.table = NULL
            self.mapping = None

    @property
    def leased(self):
        return cseq_load_acq_u64(&self.held)

    @property
    def leased_bytes(self):
        return cseq_load_acq_u64(&self.held_bytes)

    def nbytes(self, Py_ssize_t slot):
        self.check(slot)
        return self.committed(slot)

    def resize(self, Py_ssize_t slot, uint64_t nbytes):
        """Set the committed bytes of one of the caller's slots."""
        self.check(slot)
        self.set_committed(slot, nbytes)

    def owners(self):
        """Return the owner of each slot."""
        return [cseq_load_acq_u32(self.word(slot)) for slot in range(self.count())]

    def spare(self):
        """Return (slot, bytes) for free slots with memory, and the number of slots in use."""
        cdef list free = []
        cdef Py_ssize_t slot
        cdef Py_ssize_t used = 0
        for slot in range(1, self.count()):
            if cseq_load_acq_u32(self.word(slot)) != FREE:
                used += 1
            elif self.committed(slot):
                free.append((slot, self.committed(slot)))
        return free, used

    def is_leased(self, Py_ssize_t slot):
        """Return True if a slot is leased or pinned."""
        self.check(slot)
        return cseq_load_acq_u32(self.uses(slot)) != 0

    cdef int extend(self) except -1:
        """Add free slots. Other processes may do the same."""
        cdef uint64_t made = cseq_load_acq_u64(&self.table.made)
        cdef uint64_t upto = min(<uint64_t>self.most, made + CHUNK)
        if made == upto:
            raise MemoryError(f"all {made - 1} slots of shared memory are in use; hold fewer batches")
        self.commit(PAGE + made // CHUNK * sizeof(slot_chunk), sizeof(slot_chunk))
        cseq_cas_sc_u64(&self.table.made, made, upto)  # SYNC: entries of slots are there
        return 0

    cdef Py_ssize_t search(self, Py_ssize_t first) noexcept nogil:
        """Take and return the lowest free slot from `first`, or return -1."""
        cdef Py_ssize_t upto = self.count()
        cdef Py_ssize_t slot, below
        for slot in range(first, upto):
            if (cseq_load_rlx_u32(self.word(slot)) == FREE
                    and cseq_cas_sc_u32(self.word(slot), FREE, self.owner)):  # SYNC: slot is free
                if (slot - first > FAR
                        and cseq_cas_sc_u64(&self.table.hint, <uint64_t>first, <uint64_t>slot)):
                    for below in range(first, slot):  # SYNC: hint is lowered
                        if cseq_load_acq_u32(self.word(below)) == FREE:
                            self.lower(below)
                            break
                return slot
        return -1

    cpdef Py_ssize_t take(self) except -1:
        """Take and return the lowest free slot, or add slots."""
        cdef Py_ssize_t slot
        if self.table == NULL:
            raise RuntimeError("the slots are closed")
        while True:
            slot = self.search(<Py_ssize_t>cseq_load_acq_u64(&self.table.hint))
            if slot < 0:
                slot = self.search(0)
            if slot >= 0:
                return slot
            self.extend()

    cdef void lower(self, Py_ssize_t slot) noexcept nogil:
        cdef uint64_t hint = cseq_load_acq_u64(&self.table.hint)
        while <uint64_t>slot < hint:
            if cseq_cas_sc_u64(&self.table.hint, hint, <uint64_t>slot):
                return
            hint = cseq_load_acq_u64(&self.table.hint)

    cdef void set_free(self, Py_ssize_t slot) noexcept nogil:
        """Free one of the caller's slots, in any thread, even during garbage collection."""
        if forks_here[0] == self.depth and self.table != NULL:
            cseq_swap_sc_u32(self.word(slot), FREE)  # SYNC: slot is free; SYNC: hint is lowered
            self.lower(slot)

    def free(self, Py_ssize_t slot):
        """Free a slot of this process."""
        self.check(slot)
        if cseq_load_acq_u32(self.word(slot)) != self.owner:
            raise RuntimeError(f"slot {slot} is not taken")
        self.set_free(slot)

    def give_back(self, Py_ssize_t slot, uint32_t owner=FREE):
        """Return the memory of a slot to the system and free the slot.

        `owner` is the expected owner: FREE, or a worker that is gone. Return False if this fails.
        """
        cdef int error
        self.check(slot)
        if not cseq_cas_sc_u32(self.word(slot), owner, self.owner):  # SYNC: slot is the trainer's
            return False
        with nogil:
            error = cseq_punch(self.fd, slot * self.width, self.width)
        if not error:
            self.set_committed(slot, 0)
        self.set_free(slot)
        return not error

    def lease(self, Py_ssize_t slot, Mapping mapping not None):
        """Lease the slot of a ticket to the batch that is being decoded.

        All calls before `free_from` return the same `Lease`, in case decoding is repeated.
        """
        cdef Lease lease = self.leases.get(slot)
        self.check(slot)
        if lease is not None:
            return lease
        if cseq_load_acq_u32(self.word(slot)) == FREE or cseq_load_acq_u32(self.uses(slot)):
            raise RuntimeError(f"slot {slot} is not taken")
        lease = Lease.__new__(Lease)
        lease.data = mapping.data
        lease.size = min(mapping.size, <Py_ssize_t>self.committed(slot) or mapping.size)
        lease.mapping = mapping
        lease.slot = slot
        lease.early = cseq_load_acq_u64(&self.held) < HARDLY_ANY
        self.leases[slot] = lease
        return lease

    cdef int free_from(self, cseq_cell* c) except -1:
        """Free the slot of a ticket, or let its `Lease` free it."""
        cdef Py_ssize_t slot = cseq_load_acq_u32(&c.slot)
        cdef uint64_t* f = c.converted if c.stage else c.record
        cdef Lease lease
        if slot >= self.count():
            return 0
        cseq_store_rlx_u64(&self.peak_bytes,
                           max(cseq_load_rlx_u64(&self.peak_bytes), f[0] + f[1] + f[2] + f[3]))
        cseq_store_rel_u32(self.word(slot), self.owner)
        cseq_store_rel_u32(&c.slot, CSEQ_NO_SLOT)  # SYNC: slot is the trainer's (both stores)
        lease = self.leases.pop(slot, None) if self.leases else None
        if lease is None:
            self.set_free(slot)
            return 0
        if cseq_add_sc_u32(self.uses(slot), LEASED):
            raise RuntimeError(f"slot {slot} is already leased")
        cseq_store_rlx_u64(&self.peak_held,
                           max(cseq_load_rlx_u64(&self.peak_held), cseq_add_sc_u64(&self.held, 1) + 1))
        cseq_add_sc_u64(&self.held_bytes, self.committed(slot))
        lease.slots = self
        return 0

    def free_cell(self, Ring ring not None, uint32_t cell):
        """Call `free_from` for a cell outside a `Feed`."""
        self.free_from(ring.at(cell))

    def peak(self):
        """Return the largest ticket in bytes and the peak number of leases since the last call."""
        peak = cseq_load_rlx_u64(&self.peak_bytes), cseq_load_rlx_u64(&self.peak_held)
        cseq_store_rlx_u64(&self.peak_bytes, 0)
        cseq_store_rlx_u64(&self.peak_held, cseq_load_acq_u64(&self.held))
        return peak

    def pin(self):
        """Keep leased slots until `unpin`, because a forked child may read them."""
        cdef Py_ssize_t slot
        for slot in range(1, self.count() if forks_here[0] == self.depth else 0):
            if cseq_cas_sc_u32(self.uses(slot), LEASED, LEASED + PINNED):
                self.pinned = True

    def unpin(self):
        """Free pinned slots without leases."""
        cdef Py_ssize_t slot
        if self.pinned:
            self.pinned = False
            for slot in range(1, self.count()):
                if cseq_load_acq_u32(self.uses(slot)) >= PINNED and self.end_use(slot, PINNED):
                    self.set_free(slot)

    cdef bint end_use(self, Py_ssize_t slot, uint32_t use) noexcept nogil:
        """End a use of a slot. Return True if the caller must free the slot."""
        if (forks_here[0] != self.depth or self.table == NULL
                or cseq_add_sc_u32(self.uses(slot), -use) != use):
            return False
        cseq_add_sc_u64(&self.held_bytes, -self.committed(slot))
        return True


def pin_leased():
    """Pin all leased slots before a fork. No signal handler can run in C code."""
    with cython.critical_section(tables_guard):
        refs = tables[:]
    for ref in refs:
        slots = ref()
        if slots is not None:
            (<SlotTable>slots).pin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pin_leased)


@cython.final
@cython.no_gc
cdef class Lease(Memory):
    """A leased slot. The lease ends with this object, in any thread.

    It is `early` if there were hardly any other leases. `slots` is None as long as the slot belongs
    to its ticket.
    """

    cdef readonly bint early
    cdef Mapping mapping
    cdef SlotTable slots
    cdef Py_ssize_t slot

    def __dealloc__(self):
        if self.slots is None:
            return
        if self.slots.end_use(self.slot, LEASED):
            if CSEQ_POISON:
                memset(self.data, 0xDB, self.size)
            self.slots.set_free(self.slot)
        cseq_add_sc_u64(&self.slots.held, <uint64_t>-1)
