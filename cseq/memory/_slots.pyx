# cython: language_level=3, freethreading_compatible=True
"""Slots of shared memory: the owner of each, how large it is, and leases on it."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset, strerror

cimport cython

from cseq._core cimport Ring
from cseq._headers cimport *
from cseq._memory cimport Mapping, Memory, forks_here

import os
from weakref import ref as weak_reference

cdef enum:
    FREE = 0
    FAR = 64  # slots: a search over more raises the hint
    HARDLY_ANY = 3  # leases: what a loop has that drops its batches
    # Uses of a slot.
    LEASED = 1
    PINNED = 2

TRAINER = 0xFFFFFFFF

cdef list tables = []  # weak references to the trainer's `SlotTable`
cdef object tables_guard = object()  # its critical section is that of `tables`, whose own its methods enter


@cython.final
@cython.no_gc
cdef class SlotTable:
    """The table of slots: one word a slot, its owner, in memory that all processes share.

    It lies in the first slot of the file, which therefore holds no data. The process that writes a
    slot takes it::

        FREE ──► worker k ──► TRAINER ──► FREE
        FREE ──► TRAINER ──► FREE                     the trainer's own: requests, `give_back`
                 worker k ──► FREE                    a slot that was kept; one of a worker that is gone

    FREE is changed by compare-and-swap (`take`), k by worker k, until it has published the slot's
    number in a cell; then by the trainer (`free_from`), before that cell names it no more. TRAINER is changed
    by the trainer. When worker k is gone, its tickets are reposted, and the slots of its published
    tickets are known, the supervisor changes k of all others, by compare-and-swap (`reclaim`).

    A slot of the trainer is leased while its `uses` are not 0: `free_from` adds LEASED for the `Lease`,
    which any thread drops, also inside garbage collection; a fork adds PINNED to what is leased, since
    the child may read it, and the next epoch's begin ends that. The party that makes it 0 frees the
    slot. A copy of this object in a forked process changes nothing.

    A search for the lowest free slot begins at the `hint`. Freeing a slot below lowers it; a search
    over many slots raises it, then looks at these once more. A wrong hint costs memory only.

    Parameters
    ----------
    fd : int
        The file that the slots lie in; stays the caller's.
    width : int
        Bytes from one slot to the next.
    slots : int
        How many there are.
    owner : int
        TRAINER, which makes the table, or a worker's number, from 1.
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
            with cython.critical_section(tables_guard):  # or a table of another thread gets lost, and no
                tables[:] = [ref for ref in tables if ref() is not None]  # fork pins what is leased in it
                tables.append(weak_reference(self))
            self.commit(0, PAGE)
            self.extend()
            self.word(0)[0] = TRAINER  # that of the table

    cdef int commit(self, uint64_t offset, uint64_t nbytes) except -1:
        cdef int error
        with nogil:
            error = cseq_commit(self.fd, offset, nbytes)
        if error:
            raise MemoryError(f"no room for the table of slots: {strerror(error).decode()}")
        return 0

    cdef int check(self, Py_ssize_t slot) except -1:
        if slot < 1 or slot >= self.count():
            raise IndexError(f"slot {slot} is not one of {self.count()}")
        return 0

    def close(self):
        """Unmap the table, unless leases are alive; then that is done when this object is dropped.
        No slot may be taken any more."""
        if not self.leased:
            self.table = NULL
            self.mapping = None

    @property
    def leased(self):
        """Leases alive."""
        return cseq_load_acq_u64(&self.held)

    @property
    def leased_bytes(self):
        """Bytes of the slots under lease."""
        return cseq_load_acq_u64(&self.held_bytes)

    def nbytes(self, Py_ssize_t slot):
        """Bytes of a slot that are committed."""
        self.check(slot)
        return self.committed(slot)

    def resize(self, Py_ssize_t slot, uint64_t nbytes):
        """Set how many bytes of a slot are committed; the caller has it."""
        self.check(slot)
        self.set_committed(slot, nbytes)

    def owners(self):
        """The owner of each slot: a list of 0 (free), a worker's number, or TRAINER."""
        return [cseq_load_acq_u32(self.word(slot)) for slot in range(self.count())]

    def spare(self):
        """Free slots that take memory, lowest first, (slot, bytes) each; and how many are in use."""
        cdef list found = []
        cdef Py_ssize_t slot
        cdef Py_ssize_t used = 0
        for slot in range(1, self.count()):
            if cseq_load_acq_u32(self.word(slot)) != FREE:
                used += 1
            elif self.committed(slot):
                found.append((slot, self.committed(slot)))
        return found, used

    def is_leased(self, Py_ssize_t slot):
        """Whether a slot has a lease, or is pinned for a forked process."""
        self.check(slot)
        return cseq_load_acq_u32(self.uses(slot)) != 0

    # -- taken and free

    cdef int extend(self) except -1:
        """Make more slots, free. Several processes may do so at once."""
        cdef uint64_t made = cseq_load_acq_u64(&self.table.made)
        cdef uint64_t upto = min(<uint64_t>self.most, made + CHUNK)
        if made == upto:
            raise MemoryError(f"all {made - 1} slots of shared memory are in use: hold fewer batches")
        self.commit(PAGE + made // CHUNK * sizeof(slot_chunk), sizeof(slot_chunk))
        cseq_cas_sc_u64(&self.table.made, made, upto)  # SYNC: entries of slots are there
        return 0

    cdef Py_ssize_t search(self, Py_ssize_t first) noexcept nogil:
        """Take the lowest free slot that is `first` or above: its number, or -1."""
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
        """Take the lowest free slot: its number. More are made if none is free; else MemoryError."""
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
        """Lower the hint to a free slot."""
        cdef uint64_t hint = cseq_load_acq_u64(&self.table.hint)
        while <uint64_t>slot < hint:
            if cseq_cas_sc_u64(&self.table.hint, hint, <uint64_t>slot):
                return
            hint = cseq_load_acq_u64(&self.table.hint)

    cdef void set_free(self, Py_ssize_t slot) noexcept nogil:
        """Free a slot that is the caller's; on any thread, also inside garbage collection."""
        if forks_here[0] == self.depth and self.table != NULL:
            cseq_swap_sc_u32(self.word(slot), FREE)  # SYNC: slot is free; SYNC: hint is lowered
            self.lower(slot)

    def free(self, Py_ssize_t slot):
        """Free a slot that this process has."""
        self.check(slot)
        if cseq_load_acq_u32(self.word(slot)) != self.owner:
            raise RuntimeError(f"slot {slot} is not taken")
        self.set_free(slot)

    def give_back(self, Py_ssize_t slot, uint32_t owner=FREE):
        """Give the pages of a slot back and free it, if its owner is FREE or a worker that is gone. Return
        whether they are given back: not if another process has the slot, or the system cannot do that.
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

    # -- leased

    def lease(self, Py_ssize_t slot, Mapping mapping not None):
        """The memory of a slot that a ticket lies in, for a batch that is being decoded.

        Always the same `Lease` until `free_from`: the views of an interrupted decode and of the next one
        share it.
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
        """Free the slot, if there is one, in the cell of a ticket that is committed or cancelled; if it is
        leased, the last view of its `Lease` frees it."""
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
            raise RuntimeError(f"slot {slot} is leased already")
        cseq_store_rlx_u64(&self.peak_held,
                           max(cseq_load_rlx_u64(&self.peak_held), cseq_add_sc_u64(&self.held, 1) + 1))
        cseq_add_sc_u64(&self.held_bytes, self.committed(slot))
        lease.slots = self
        return 0

    def free_cell(self, Ring ring not None, uint32_t cell):
        """Free the slot that the batch in a cell lies in, or leave that to its lease: `Feed` must not do it."""
        self.free_from(ring.at(cell))

    def peak(self):
        """The most bytes that a ticket took, and the most leases alive, since this was called."""
        peak = cseq_load_rlx_u64(&self.peak_bytes), cseq_load_rlx_u64(&self.peak_held)
        cseq_store_rlx_u64(&self.peak_bytes, 0)
        cseq_store_rlx_u64(&self.peak_held, cseq_load_acq_u64(&self.held))
        return peak

    def pin(self):
        """Keep what is leased in use until `unpin`: a process is forked that may read it."""
        cdef Py_ssize_t slot
        for slot in range(1, self.count() if forks_here[0] == self.depth else 0):
            if cseq_cas_sc_u32(self.uses(slot), LEASED, LEASED + PINNED):
                self.pinned = True

    def unpin(self):
        """Free what was pinned, and is not leased any more."""
        cdef Py_ssize_t slot
        if self.pinned:
            self.pinned = False
            for slot in range(1, self.count()):
                if cseq_load_acq_u32(self.uses(slot)) >= PINNED and self.end_use(slot, PINNED):
                    self.set_free(slot)

    cdef bint end_use(self, Py_ssize_t slot, uint32_t use) noexcept nogil:
        """End a use of a slot. True: it was the last; the slot is the caller's, to be freed.
        In a forked process, the use is not its own."""
        if (forks_here[0] != self.depth or self.table == NULL
                or cseq_add_sc_u32(self.uses(slot), -use) != use):
            return False
        cseq_add_sc_u64(&self.held_bytes, -self.committed(slot))
        return True


def pin_leased():
    """Pin what is leased, before a fork. In C alone: no signal handler runs here."""
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
    """A leased slot. Deallocating this object, on any thread, ends the lease."""

    cdef readonly bint early  # when it was made, hardly any other batch was held
    cdef Mapping mapping
    cdef SlotTable slots  # None: the slot still belongs to its ticket
    cdef Py_ssize_t slot

    def __dealloc__(self):
        if self.slots is None:
            return
        if self.slots.end_use(self.slot, LEASED):
            if CSEQ_POISON:
                memset(self.data, 0xDB, self.size)
            self.slots.set_free(self.slot)
        cseq_add_sc_u64(&self.slots.held, <uint64_t>-1)  # now the table may be unmapped
