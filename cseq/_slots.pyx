# cython: language_level=3, freethreading_compatible=True
"""Slots of shared memory: their states, owners and sizes."""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport Py_DECREF
from libc.stdlib cimport free
from libc.string cimport memset
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport cython

from cseq._headers cimport *
from cseq._memory cimport Mapping, Memory, fork_keeping, in_use

cdef extern from "cseq_fault.h":
    int CSEQ_POISON

cdef uint64_t LOWEST = 0xFFFFFFFF  # of the hint: a slot; above it, how often slots were freed

@cython.final
@cython.no_gc
cdef class Slots:
    """Which slots are free, taken or leased, which a worker owns, and how large they are.

    In private memory of the trainer. The trainer writes FREE → TAKEN and TAKEN → LEASED or FREE.
    LEASED → FREE is written when the last use ends, by the `Lease` that any thread drops, also inside
    garbage collection, or by the `Kept` of a forked worker. `uses` is 0 unless the slot is LEASED:
    `vacate` sets it to 1 for the lease, a fork adds 1 while the lease is in the list of what is in use
    (so that it has not ended), and who makes it 0 owns the slot. The entries lie in chunks that never
    move.

    The `hint` is where the search for the lowest free slot begins: all slots below are in use, or are
    being freed. Who frees a slot writes its state first, then lowers the hint to it, and counts in the
    upper half of that word. A search raises the hint by compare-and-swap, which fails if any slot was
    freed since the search began; so it never passes a slot that was freed behind it.

    A slot that a worker owns is TAKEN. If a worker has published a ticket in a slot that it owned,
    `settle` changes the owners: it adds the worker's number to `owned` of the slot that the ticket
    was posted with, and subtracts it from that of the other slot. So tickets may be settled in any
    order; until all are, `owned` is a partial sum, which names no worker and can be negative.
    `owned`, and the `home` of a published ticket, are written under `lock`: a spin lock, under
    which nothing is allocated and no Python code runs.
    """

    def __cinit__(self, Py_ssize_t capacity=0):
        memset(self.chunk, 0, sizeof(self.chunk))
        self.held = self.held_bytes = self.hint = 0
        self.lent = {}
        self.most_bytes = <uint64_t>-1
        self.extend(capacity)

    def __dealloc__(self):
        for i in range(CHUNKS):
            PyMem_RawFree(self.chunk[i])

    cdef int check(self, Py_ssize_t slot) except -1:
        if slot < 0 or slot >= self.count():
            raise IndexError(f"slot {slot} is not one of {self.count()}")
        return 0

    @property
    def capacity(self):
        """Slots made so far."""
        return self.count()

    @property
    def leased(self):
        """Leases alive."""
        return cseq_load_acq_u64(&self.held)

    @property
    def leased_bytes(self):
        """Bytes of the slots under lease."""
        return cseq_load_acq_u64(&self.held_bytes)

    @property
    def least(self):
        """Committed bytes that a free slot has at least when it is used again; else see `Arena`."""
        return cseq_load_rlx_u64(&self.least_bytes)

    @least.setter
    def least(self, uint64_t nbytes):
        cseq_store_rlx_u64(&self.least_bytes, nbytes)

    @property
    def most(self):
        """And at most."""
        return cseq_load_rlx_u64(&self.most_bytes)

    @most.setter
    def most(self, uint64_t nbytes):
        cseq_store_rlx_u64(&self.most_bytes, nbytes)

    @property
    def top(self):
        """The highest slot taken since this was set; without a GIL, one may be missed."""
        return <Py_ssize_t>cseq_load_rlx_u64(&self.reached) - 1

    @top.setter
    def top(self, Py_ssize_t slot):
        cseq_store_rlx_u64(&self.reached, <uint64_t>(slot + 1))

    def nbytes(self, Py_ssize_t slot):
        """Bytes of a slot that are committed."""
        self.check(slot)
        return self.committed(slot)

    def resize(self, Py_ssize_t slot, uint64_t nbytes):
        """Set how many bytes of a slot are committed."""
        self.check(slot)
        self.set_committed(slot, nbytes)

    def extend(self, Py_ssize_t count):
        """Make `count` more slots, free."""
        cdef Py_ssize_t upto = self.count() + count
        cdef Py_ssize_t i
        if count < 0 or upto > CHUNK * CHUNKS:
            raise ValueError(f"cannot make {count} slots more than {self.count()}: "
                             f"at most {CHUNK * CHUNKS} are possible")
        for i in range((upto + CHUNK - 1) // CHUNK):
            if self.chunk[i] == NULL:
                self.chunk[i] = <slot_entry*>PyMem_RawCalloc(CHUNK, sizeof(slot_entry))
                if self.chunk[i] == NULL:
                    raise MemoryError("no memory for the table of slots")
        cseq_store_rel_u64(&self.made, <uint64_t>upto)  # SYNC: entries of slots are there

    # -- free and taken

    cdef Py_ssize_t find_free(self) noexcept:
        """The lowest free slot, or -1 when none is free. Looks from the hint on, and raises it to what
        was found unless a slot was freed meanwhile."""
        cdef uint64_t hint = cseq_load_acq_u64(&self.hint)
        cdef Py_ssize_t first = <Py_ssize_t>(hint & LOWEST)
        cdef Py_ssize_t upto = self.count()
        cdef Py_ssize_t slot = first
        while slot < upto and cseq_load_acq_u8(&self.at(slot).state) != FREE:  # SYNC: slot is free
            slot += 1
        if slot > first:
            cseq_cas_sc_u64(&self.hint, hint, (hint & ~LOWEST) | <uint64_t>slot)
        return slot if slot < upto else -1

    cdef void set_free(self, Py_ssize_t slot) noexcept nogil:
        """Free a slot that is the caller's; on any thread, also inside garbage collection."""
        cdef uint64_t hint
        cseq_store_rel_u8(&self.at(slot).state, FREE)  # SYNC: slot is free
        while True:
            hint = cseq_load_acq_u64(&self.hint)
            if cseq_cas_sc_u64(&self.hint, hint, (hint & ~LOWEST) + LOWEST + 1
                               + min(hint & LOWEST, <uint64_t>slot)):
                return

    cdef bint is_fit(self, Py_ssize_t slot) noexcept:
        """Whether a slot's committed bytes are in [least, most]; else the arena changes them first
        (`Arena.prepare`)."""
        return (cseq_load_rlx_u64(&self.least_bytes) <= self.committed(slot)
                <= cseq_load_rlx_u64(&self.most_bytes))

    cdef Py_ssize_t find_fit(self) noexcept:
        """The lowest free slot, or -1 when none is free or it is not fit."""
        cdef Py_ssize_t slot = self.find_free()
        return slot if slot >= 0 and self.is_fit(slot) else -1

    cdef bint occupy(self, Py_ssize_t slot) noexcept:
        """Take a slot if it is still free: where there is no GIL, another thread may have taken it."""
        if not cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN):
            return False
        if <uint64_t>slot >= cseq_load_rlx_u64(&self.reached):
            cseq_store_rlx_u64(&self.reached, <uint64_t>(slot + 1))
        return True

    cdef Py_ssize_t occupy_fit(self) noexcept:
        """Take the slot that `find_fit` finds: its number, or -1."""
        cdef Py_ssize_t slot = self.find_fit()
        while slot >= 0 and not self.occupy(slot):
            slot = self.find_fit()
        return slot

    def acquire(self):
        """Take the lowest free slot: its number, or -1 when none is free."""
        cdef Py_ssize_t slot = self.find_free()
        while slot >= 0 and not self.occupy(slot):
            slot = self.find_free()
        return slot

    def take(self, Py_ssize_t slot):
        """Take a given slot if it is free; return whether it was."""
        self.check(slot)
        return bool(cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN))

    def lowest(self):
        """The lowest free slot, or -1 when none is free; it stays free."""
        return self.find_free()

    def shrink(self, Py_ssize_t slot, uint64_t nbytes, int fd, uint64_t width):
        """Give the pages of a free slot back but for the first `nbytes`.

        They read as zeros, and must be committed before they are written again.

        Parameters
        ----------
        slot : int
        nbytes : int
        fd : int
            The file that the slots lie in.
        width : int
            Bytes from one slot to the next.

        Returns
        -------
        bool
            False: the slot is not free, or no larger, or the system cannot do that.
        """
        cdef int error
        self.check(slot)
        if self.committed(slot) <= nbytes:
            return False
        if not cseq_cas_sc_u8(&self.at(slot).state, FREE, TAKEN):
            return False
        with nogil:
            error = cseq_punch(fd, slot * width + nbytes, width - nbytes)
        if not error:
            self.set_committed(slot, nbytes)
        self.set_free(slot)
        return not error

    def free(self):
        """The free slots, in their order."""
        return [slot for slot in range(self.count()) if cseq_load_acq_u8(&self.at(slot).state) == FREE]

    def is_taken(self, Py_ssize_t slot):
        """Whether a slot is neither free nor leased nor a worker's."""
        cdef int64_t owned
        self.check(slot)
        cseq_seize(&self.lock)
        owned = self.at(slot).owned
        cseq_store_rel_u32(&self.lock, 0)
        return cseq_load_acq_u8(&self.at(slot).state) == TAKEN and owned <= 0

    def is_leased(self, Py_ssize_t slot):
        """Whether a slot has a lease, or a forked worker may read it."""
        self.check(slot)
        return cseq_load_acq_u8(&self.at(slot).state) == LEASED

    cpdef int release(self, Py_ssize_t slot) except -1:
        """Free a taken slot."""
        self.check(slot)
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        self.set_free(slot)
        return 0

    # -- leased

    def lend(self, Py_ssize_t slot, Mapping mapping not None, Py_ssize_t used=-1):
        """The memory of a taken slot, for a batch that is being decoded.

        Always the same `Lease` until `vacate`: views of an interrupted decode and those of the next
        one share it. But where a signal handler has taken the ticket that was decoded, a lease can be
        left for the next ticket in the slot: not of this mapping or size, it is replaced. A forked
        process gets a copy of the first `used` bytes; -1: of all.
        """
        cdef uint64_t nbytes
        cdef Lease lease
        self.check(slot)
        nbytes = min(<uint64_t>mapping.size, self.committed(slot) or <uint64_t>mapping.size)
        lease = self.lent.get(slot)
        if lease is not None and lease.mapping is mapping and <uint64_t>lease.size == nbytes:
            return lease
        if used > mapping.size:
            raise ValueError(f"used={used} exceeds a mapping of {mapping.size} bytes")
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        lease = Lease.__new__(Lease)
        lease.data = mapping.data
        lease.size = <Py_ssize_t>nbytes
        lease.mapping = mapping
        lease.slot = slot
        if used:
            cseq_span_add(in_use, &lease.span, lease.data, used if used > 0 else lease.size)
        self.lent[slot] = lease
        return lease

    cpdef bint vacate(self, Py_ssize_t slot) except -1:
        """Detach a taken slot from its ticket, which leaves the ring. True: the slot is still
        taken, and can go to the next ticket; False: it is leased, until the last view of its
        `Lease` is gone."""
        cdef Lease lease
        if not self.lent:
            return True
        lease = self.lent.pop(slot, None)
        if lease is None:
            return True
        self.check(slot)
        if not cseq_cas_sc_u8(&self.at(slot).state, TAKEN, LEASED):
            raise RuntimeError(f"slot {slot} is not taken")
        cseq_add_sc_u64(&self.held, 1)
        cseq_add_sc_u64(&self.held_bytes, <uint64_t>lease.size)
        cseq_add_sc_u32(&self.at(slot).uses, 1)
        lease.slots = self
        cseq_span_lease(in_use, &lease.span, <void*>self, slot, &self.at(slot).uses)
        return False

    cdef bint is_last_use(self, Py_ssize_t slot) noexcept nogil:
        """End one use of a leased slot. True: it was the last; the slot is the caller's, to be freed."""
        return cseq_add_sc_u32(&self.at(slot).uses, <uint32_t>-1) == 1

    cdef Py_ssize_t leave(self, cseq_cell* c) except -2:
        """Detach the slot of a ticket that leaves the ring: its number, or -1 if a `Lease` has it now."""
        self.settle(c)
        return c.slot if self.vacate(c.slot) else -1

    # -- what workers own

    def grant(self, Py_ssize_t slot, uint32_t owner):
        """Give a taken slot to a worker."""
        self.check(slot)
        if cseq_load_acq_u8(&self.at(slot).state) != TAKEN:
            raise RuntimeError(f"slot {slot} is not taken")
        cseq_seize(&self.lock)
        self.at(slot).owned += owner  # it may be waiting for a ticket to be settled
        cseq_store_rel_u32(&self.lock, 0)

    cdef void settle(self, cseq_cell* c) noexcept nogil:
        """Record the owners of the slots of a published ticket, before its cell is used again."""
        if c.slot >= self.count():  # in none
            return
        if c.slot != cseq_load_acq_u32(&c.home):  # SYNC: owners are entered
            cseq_seize(&self.lock)
            if c.slot != c.home:  # `reclaim` has not done it meanwhile
                self.enter_owners(c)
            cseq_store_rel_u32(&self.lock, 0)
        self.set_committed(c.slot, c.capacity)

    cdef void enter_owners(self, cseq_cell* c) noexcept nogil:
        """Change the owners of a ticket's two slots, under `lock`. Then `settle` does not wait for
        it, and the cell may be used again."""
        self.at(c.home).owned += c.by
        self.at(c.slot).owned -= c.by
        cseq_store_rel_u32(&c.home, c.slot)  # SYNC: owners are entered

    cdef Py_ssize_t reclaim(self, cseq_ring** rings, Py_ssize_t ring_count, uint32_t owner,
                         Py_ssize_t* taken) noexcept nogil:
        """Take back the slots that a worker owned: write them into `taken`, return how many.

        First the owners of all published tickets' slots are recorded, also those of other workers:
        only then is each `owned` the number of a worker. If a ticket's slot is not its home, its
        cell is not used again before `settle` has had `lock`; so if the word is unchanged after
        slot and home were read, both are that ticket's.
        """
        cdef Py_ssize_t slot, at
        cdef Py_ssize_t count = 0
        cdef uint32_t k
        cdef cseq_cell* c
        cdef uint64_t word
        cdef uint32_t held
        cdef int state
        cseq_seize(&self.lock)
        for at in range(ring_count):
            for k in range(rings[at].capacity):
                c = cseq_ring_cell(rings[at], k)
                word = cseq_load_acq_u64(&c.word)
                state = CSEQ_STATE(word)
                if state != CSEQ_INDEXED and state != CSEQ_CONVERTING and state != CSEQ_READY:
                    continue
                held = cseq_load_rlx_u32(&c.slot)
                if (held != cseq_load_rlx_u32(&c.home) and held < self.count()
                        and cseq_cas_sc_u64(&c.word, word, word)):
                    self.enter_owners(c)
        for slot in range(self.count()):
            if self.at(slot).owned == owner:
                self.at(slot).owned = 0
                taken[count] = slot
                count += 1
        cseq_store_rel_u32(&self.lock, 0)
        return count


@cython.final
@cython.no_gc
cdef class Lease(Memory):
    """A leased slot. Deallocating this object, on any thread, frees the slot unless a `Kept` has it."""

    def __dealloc__(self):
        cseq_span_remove(in_use, &self.span)
        if self.slots is None:
            return
        cseq_add_sc_u64(&self.slots.held, <uint64_t>-1)
        cseq_add_sc_u64(&self.slots.held_bytes, -<uint64_t>self.size)
        if self.slots.is_last_use(self.slot):
            if CSEQ_POISON:
                memset(self.data, 0xDB, self.size)
            self.slots.set_free(self.slot)


@cython.final
@cython.no_gc
cdef class Kept:
    """The leased slots that a forked worker has inherited: in use until this object is gone."""

    cdef cseq_kept kept

    def __len__(self):
        return self.kept.count

    def __dealloc__(self):
        cdef Slots slots
        cdef uint64_t i
        for i in range(self.kept.count):
            slots = <Slots>self.kept.all[i].slots
            if slots.is_last_use(<Py_ssize_t>self.kept.all[i].slot):
                slots.set_free(<Py_ssize_t>self.kept.all[i].slot)
            Py_DECREF(slots)
        free(self.kept.all)


def fork_worker():
    """Fork a worker, which shares the leased slots with this process instead of copies of them.

    Returns
    -------
    tuple of (int, Kept)
        As of `fork`; and what keeps those slots from being used again, to be held until the process
        has certainly ended.

    Raises
    ------
    OSError
        There can be no more processes.
    """
    cdef Kept kept = Kept()
    return fork_keeping(&kept.kept), kept
