# The line of outstanding tickets: posted, given up, taken out of their cells.

cdef struct Ticket:
    uint64_t number
    uint64_t units  # that it counts for; 0: a reply
    uint32_t ring
    uint32_t cell

cdef uint64_t NONE = <uint64_t>-1


def wait_any(list rings not None, list cells not None, uint32_t seen, bint spun=False):
    """Sleep until one of some tickets is ready, or `Ring.notify_all` is called; see `Ring.wait`.

    Parameters
    ----------
    rings : list of Ring
        In one memory; one ticket is waited for in each.
    cells : list of int
        The cell of that ticket in each ring.
    seen : int
        `Ring.notices` of any of them, from before the caller looked for news.
    spun : bool
        They were waited for in vain already, without sleeping.
    """
    cdef uint32_t count = <uint32_t>len(rings)
    cdef uint32_t k
    cdef Ring ring
    cdef uint64_t before, awake
    cdef uint64_t park = PARK_NS
    cdef cseq_ring** r
    cdef uint32_t* at
    if not rings or len(cells) != len(rings):
        raise ValueError(f"give a ring or more, and a cell of each, not {len(rings)} rings and "
                         f"{len(cells)} cells")
    r = <cseq_ring**>PyMem_RawMalloc((sizeof(cseq_ring*) + 4) * <size_t>(count + 1))
    if r == NULL:
        raise MemoryError(f"no memory for {count} rings")
    at = <uint32_t*>(r + count)
    try:
        for k in range(count):
            ring = rings[k]
            ring.at(cells[k])
            r[k], at[k] = ring.r, cells[k]
        before = ring.sleep()
        with nogil:
            if spun or not cseq_ring_expect(r, at, count, at[0], seen):
                cseq_ring_wait_any(r, at, count, seen, park)
            awake = cseq_now_ns()
        ring.slept(before, awake)
    finally:
        PyMem_RawFree(r)
    PyErr_CheckSignals()


cdef class Line:
    """The tickets that are outstanding in all rings, in the order of delivery: the part of a `Feed`
    that posts them. Those that were given up wait beside it until no runner works on them.

    Parameters
    ----------
    rings : list of Ring
        One shared ring; or queues, one for each worker, in one memory.
    decoder : Decoder
    discard : callable, optional
        ``discard(cell)`` is called before the cell of a ticket that was given up is freed.

    Attributes
    ----------
    source : Source or None
        What the tickets ask for; None: nothing is under way.
    ticket : int
        Number of the next one.
    """

    cdef readonly Source source
    cdef readonly uint64_t ticket
    cdef uint64_t taken_count  # tickets of this epoch, which any thread reads: see `cseq_count_u64`
    cdef uint64_t now          # ns, of the present step: when a ticket was taken, and the next one posted
    cdef list rings
    cdef cseq_ring** r         # of these
    cdef Decoder decoder
    cdef object discard
    cdef bint queues           # each worker has a ring of its own
    cdef uint64_t runners      # of all rings
    cdef Ticket* buffer        # circular
    cdef Py_ssize_t room, first, length
    cdef Ticket* abandoned     # given up, and still in their cells
    cdef readonly Py_ssize_t abandoned_count
    @cython.final
    cdef inline Ticket* at(self, Py_ssize_t k) noexcept:
        """The ticket at a position of the line."""
        cdef Py_ssize_t i = self.first + k
        return &self.buffer[i if i < self.room else i - self.room]
    @cython.final
    cdef inline cseq_cell* cell(self, Ticket* t) noexcept:
        return cseq_ring_cell(self.r[t.ring], t.cell)
    @cython.final
    cdef inline bint is_ready(self, Py_ssize_t k) noexcept:
        """Whether the ticket at a position is answered."""
        return cseq_ring_ready(self.r[self.at(k).ring], self.at(k).cell)
    @cython.final
    cdef inline void remove(self, Py_ssize_t k) noexcept:
        """Remove a ticket from the line."""
        while k > 0:
            self.at(k)[0] = self.at(k - 1)[0]
            k -= 1
        self.first = 0 if self.first + 1 == self.room else self.first + 1
        self.length -= 1
    @cython.final
    cdef inline void rotate(self) noexcept:
        """Move the first ticket of the line to its end."""
        self.at(self.length)[0] = self.at(0)[0]
        self.first = 0 if self.first + 1 == self.room else self.first + 1

    def __cinit__(self, run, list rings not None, Decoder decoder not None, *_, discard=None, **__):
        cdef Ring ring
        cdef Py_ssize_t k = 0
        for ring in rings:
            self.room += ring.r.capacity
        self.buffer = <Ticket*>PyMem_RawCalloc(2 * self.room, sizeof(Ticket))
        self.r = <cseq_ring**>PyMem_RawCalloc(len(rings), sizeof(cseq_ring*))
        if self.buffer == NULL or self.r == NULL:
            raise MemoryError(f"no memory for {self.room} cells")
        for ring in rings:
            self.r[k] = ring.r
            self.runners += ring.r.runners
            k += 1
        self.abandoned = self.buffer + self.room
        self.rings, self.decoder, self.discard = rings, decoder, discard
        self.queues = self.r[0].calls != 0

    def __dealloc__(self):
        PyMem_RawFree(self.buffer)
        PyMem_RawFree(self.r)

    cdef Py_ssize_t locate(self, uint64_t number) noexcept:
        """Position of a ticket; -1: it is not in the line."""
        cdef Py_ssize_t k
        for k in range(self.length):
            if self.at(k).number == number:
                return k
        return -1

    cdef bint post(self) noexcept:
        """Post the next ticket, if it is prepared and there is room; return whether it was."""
        cdef Py_ssize_t number = self.source.target()
        cdef Ring ring
        cdef Ticket* t
        cdef int cell
        if number < 0:
            return False
        ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cell = ring.find_vacant()
        if cell < 0:
            return False
        t = self.at(self.length)
        t.number, t.ring, t.cell = self.ticket, <uint32_t>number, <uint32_t>cell
        t.units = self.source.write(number, ring, t.cell, self.ticket)
        self.length += 1
        self.ticket += 1
        return True

    cpdef int refill(self) except -1:
        """Post tickets while there are free cells, and the source has any."""
        cdef bint ready
        self.sweep()
        while self.source is not None:
            ready = self.source.is_ready(self.taken_count)
            if not ready:
                self.source.prepare(self.taken_count)
            self.now = cseq_now_ns()
            if not self.post() and ready:
                break
        return 0

    cdef void abandon(self, Ticket* t) noexcept:
        self.abandoned[self.abandoned_count] = t[0]
        self.abandoned_count += 1

    cdef void give_up(self, uint32_t number) noexcept:
        """Give up the tickets of a ring: of a queue, those that are not claimed are taken back, newest
        first, and so leave no gap."""
        cdef bint back = self.queues
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cdef Py_ssize_t k, kept = 0
        cdef Ticket* t
        if self.source is not None:
            self.source.end(number)
        for k in range(self.length - 1, -1, -1):
            t = self.at(k)
            if t.ring == number:
                back = back and ring.retract(t.cell)
                if not back:
                    self.abandon(t)
        for k in range(self.length):
            t = self.at(k)
            if t.ring != number:
                self.at(kept)[0] = t[0]
                kept += 1
        self.length = kept
        ring.outstanding = ring.unwoken = 0

    cdef void give_up_call(self, uint32_t number) noexcept:
        """Give up the call that a worker has to answer, if there is one."""
        cdef Ring ring = <Ring>PyList_GET_ITEM(self.rings, number)
        cdef Ticket t
        if ring.calling >= 0:
            t.number, t.units, t.ring, t.cell = NONE, 0, number, <uint32_t>ring.calling
            self.abandon(&t)
            ring.calling = -1

    cpdef int sweep(self) except -1:
        """Free the cells of given-up tickets that no runner works on any more."""
        cdef Py_ssize_t k = 0
        cdef Ticket t
        cdef Ring ring
        while k < self.abandoned_count:
            t = self.abandoned[k]
            ring = self.rings[t.ring]
            if not (cseq_ring_ready(ring.r, t.cell) if self.queues and t.cell < cseq_ring_round(ring.r)
                    else cseq_ring_cancel(ring.r, t.cell)):
                k += 1
                continue
            if self.discard is not None:
                self.discard(t.cell)
            before = self.decoder.release(t.cell, self.cell(&t))
            ring.free(t.cell)
            self.abandoned_count -= 1
            self.abandoned[k] = self.abandoned[self.abandoned_count]
            before = None
        return 0

    cdef object drop(self, Py_ssize_t k, Ring ring):
        """Take an answered ticket out: free its cell; return the object that was left there."""
        cdef Ticket t = self.at(k)[0]
        left = self.decoder.release(t.cell, self.cell(&t))
        self.remove(k)
        ring.outstanding -= 1
        ring.free(t.cell)
        return left

    def tickets(self, uint32_t number):
        """Cell and number of each outstanding ticket of a ring, the oldest first."""
        return [(self.at(k).cell, self.at(k).number) for k in range(self.length)
                if self.at(k).ring == number]

    def post_call(self, uint32_t number, Request request not None, str name not None,
                  Request assignment=None, uint64_t epoch=0):
        """Post a call beside a worker's queue, which comes before all items that it has not claimed.

        One at a time: the one before is given up, if it is not answered.

        Parameters
        ----------
        number : int
            The worker.
        request : Request
        name : str
            What messages call it.
        assignment : Request, optional
        epoch : int
            Which the worker is to begin first, with that assignment; 0: none.

        Returns
        -------
        tuple of int
            Cell and number of the ticket.
        """
        cdef Ring ring = self.rings[number]
        cdef uint32_t cell = cseq_ring_round(ring.r)
        self.give_up_call(number)
        self.sweep()
        # One cell may be that of a call which was given up, and which the worker is busy with.
        while cseq_ring_state(ring.r, cell) != CSEQ_FREE:
            cell += 1
            if cell == ring.r.capacity:
                raise RuntimeError("a worker is busy with two calls, which it never should be")
        refer(ring, cell, request, assignment, name)
        ring.offer(cell, self.ticket, epoch, ASK_CALL, 0, 0, 0)
        ring.calling = <int>cell
        ring.wake()
        self.ticket += 1
        return cell, self.ticket - 1

    cdef uint64_t note_first(self, cseq_meter* m) noexcept:
        """The first batch of all: what was waited until now, which is returned, is the start."""
        cdef uint64_t waited = m.waited_ns
        cdef Py_ssize_t k
        cdef uint32_t owner
        cdef cseq_meter* runner
        cseq_store_rlx_u64(&m.start_ns, waited)
        cseq_store_rlx_u64(&m.waited_ns, 0)
        cseq_store_rlx_u64(&m.since_ns, self.now)
        for k in range(PyList_GET_SIZE(self.rings)):
            for owner in range(1, self.r[k].runners + 1):
                runner = cseq_ring_meter(self.r[k], owner)
                cseq_store_rlx_u64(&runner.first_ns, cseq_load_rlx_u64(&runner.work.sum))
        cseq_meter_poll(m, self.now, False)
        cseq_store_rlx_u64(&m.first_ns, self.now)
        return waited
