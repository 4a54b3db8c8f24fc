# What an epoch asks for: samples in an order, items of workers, or keys.

# For `producer`, and `stream`.
ITEM, BEGIN, CALL = ASK_ITEM, ASK_BEGIN, ASK_CALL
CALLED, ASSIGNED = slice(0, REQUEST_WORDS), slice(REQUEST_WORDS, 2 * REQUEST_WORDS)
KEY, KEYS, NO_KEY, IN_REQUEST = KEY_LENGTH, KEY_INTS, WITHOUT_KEY, KEY_IN_REQUEST

cdef uint64_t ENDED = <uint64_t>-1
cdef uint64_t READ_AHEAD = 128  # samples: tickets that have fewer are read together
cdef uint64_t MOST_AHEAD = <uint64_t>1 << 40
cdef object NOTHING = object()


@cython.auto_pickle(False)
cdef class Source:
    """What the next ticket of an epoch asks for, the ring it goes to, and how many units it counts for.

    A `Feed` posts the tickets. Units are what a place in an epoch is counted in: samples that all ranks
    have had, or items.
    """

    cdef bint is_ready(self, uint64_t taken) noexcept:
        """Whether nothing is left to do before the ticket that is due when `taken` were taken out."""
        return True

    cdef int prepare(self, uint64_t taken) except -1:
        """Do a step of what is left to do. May run any code; an interrupted step is done again."""
        return 0

    cdef Py_ssize_t target(self) noexcept:
        """The number of the ring that the next ticket goes to, which is prepared; -1: none has room."""
        return -1

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        """Post the next ticket in a free cell of its ring: how many units it counts for."""
        return 0

    cdef void end(self, Py_ssize_t number) noexcept:
        """No more tickets go to a ring."""

    cdef bint is_over(self, Py_ssize_t number) noexcept:
        """Whether no more tickets go to a ring; -1: to any."""
        return True

    cdef int finish(self) except -1:
        """Raise what comes after the last ticket, if anything does."""
        return 0


@cython.final
cdef class OrderSource(Source):
    """The batches of an epoch, or of some in a row: units of an order.

    Parameters
    ----------
    reader : Reader
    epoch : int
    cut, later : sampler.Cut
        How the epoch is cut into batches, and how the `more` epochs after it are.
    """

    def __cinit__(self, Reader reader not None, uint64_t epoch, cut, later=None, uint64_t more=0):
        self.reader, self.epoch, self.later, self.more = reader, epoch, later, more
        self.most = max(1, *[each[5] if each[2] else each[7] for each in (cut, later) if each])
        self.divide(cut)
        self.consumed = cut[8]
        if later is None or not later[1]:  # no batches
            self.more = 0

    cdef int divide(self, cut) except -1:
        """Cut the epoch into batches."""
        cdef uint64_t consumed
        (self.first, self.batches, self.full, self.start, self.stride, self.size, self.part_start,
         self.part, consumed) = cut
        self.rest = self.reader.units - min(self.reader.units, consumed + self.full * self.stride)
        self.posted = self.known = 0
        return 0

    def __len__(self):
        """Batches, from `consumed` on."""
        return <Py_ssize_t>self.batches

    cdef uint64_t at(self, uint64_t batch) noexcept:
        """The position of a batch's first unit."""
        return self.start + batch * self.stride if batch < self.full else self.part_start

    cdef int64_t read(self, uint64_t batch, int64_t* out, int64_t* sizes) except -1:
        """Write the samples of a batch; the tail goes on with the beginning of the epoch."""
        cdef uint64_t start = self.at(batch)
        cdef uint64_t done = 0, count
        cdef int64_t written = 0
        if batch < self.full:
            return self.reader.read_batch(self.epoch, self.consumed + batch * self.stride, self.stride,
                                          start, self.size, out, sizes)
        while done < self.part:
            start %= self.reader.units
            count = min(self.part - done, self.reader.units - start)
            written += self.reader.read(self.epoch, start, count, out + written,
                                        NULL if sizes == NULL else sizes + done)
            done += count
            start += count
        return written

    def samples(self, uint64_t batch):
        """The samples of a batch, and the size of each of its units: new int64 arrays."""
        if batch >= self.batches:
            raise IndexError(f"batch {batch} is not one of {self.batches}")
        sizes = numpy.ones(self.size if batch < self.full else self.part, numpy.int64)
        out = numpy.empty(len(sizes) * self.reader.room, numpy.int64)
        written = self.read(batch, <int64_t*>cnp.PyArray_DATA(out), <int64_t*>cnp.PyArray_DATA(sizes))
        return out[:written], sizes

    cdef bint is_ready(self, uint64_t taken) noexcept:
        return self.posted < self.known or self.is_over(-1)

    cdef int prepare(self, uint64_t taken) except -1:
        """Read the samples of the next ticket, and of those after it while they are few."""
        cdef uint64_t room = self.reader.room
        cdef uint64_t count = 1, read, words
        cdef int64_t* out
        if self.posted >= self.batches:
            self.divide(self.later)
            self.epoch += 1
            self.more -= 1
        words = READ_AHEAD + self.most * room  # one ticket more than are enough
        if self.data is None:
            self.data = Block(8 * <Py_ssize_t>(words + READ_AHEAD + self.most))
        out = self.samples_read = <int64_t*>self.data.data
        self.sizes = self.sizes_read = out + words if room > 1 else NULL
        if self.posted < self.full and room == 1 and self.stride == self.size:  # of one rank
            count = min(self.full - self.posted, max(<uint64_t>1, READ_AHEAD // self.size))
            self.reader.read(self.epoch, self.at(self.posted), count * self.size, out, NULL)
        else:
            read = self.read(self.posted, out, self.sizes)
            while (self.posted + count < self.full and read < READ_AHEAD
                   and count * self.size < READ_AHEAD):
                read += self.read(self.posted + count, out + read,
                                  NULL if room == 1 else self.sizes + count * self.size)
                count += 1
        self.known = self.posted + count
        return 0

    cdef Py_ssize_t target(self) noexcept:
        return 0 if self.posted < self.known else -1

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words = cseq_ring_indices(ring.r, cell)
        cdef bint is_full = self.posted < self.full
        cdef uint32_t k, parts = self.size if is_full else self.part
        cdef uint32_t count = parts
        if self.sizes != NULL:
            count = 0
            for k in range(parts):
                count += <uint32_t>self.sizes_read[k]
            memcpy(words + count, self.sizes_read, 8 * <size_t>parts)
            self.sizes_read += parts
        memcpy(words, self.samples_read, 8 * <size_t>count)
        self.samples_read += count
        cseq_ring_cell(ring.r, cell).parts = 0 if self.sizes == NULL else parts
        ring.offer(cell, ticket, self.epoch, self.first + self.posted, count, self.at(self.posted),
                   self.reader.seed)
        self.posted += 1
        return self.stride if is_full else self.rest

    cdef bint is_over(self, Py_ssize_t number) noexcept:
        return self.posted >= self.batches and not self.more


cdef int64_t* refer(Ring ring, uint32_t cell, Request key, Request assignment, str name) noexcept:
    """Write the requests that the ticket in a cell refers to: the cell's words.

    `name`: what messages call it, if it is a call.
    """
    cdef int64_t* words = cseq_ring_indices(ring.r, cell)
    words[KEY_LENGTH] = WITHOUT_KEY
    if assignment is not None:
        memcpy(words + REQUEST_WORDS, assignment.words, sizeof(assignment.words))
    if key is not None:
        words[KEY_LENGTH] = KEY_IN_REQUEST
        memcpy(words, key.words, sizeof(key.words))
    ring.kept[cell] = assignment, key, name
    return words


@cython.final
@cython.no_gc
cdef class Request:
    """Data for a worker, in a slot that is taken for as long as this object exists.

    Parameters
    ----------
    slots : Slots

    Attributes
    ----------
    slot : int
        The lowest free one.
    """

    def __cinit__(self, Slots slots not None):
        memset(self.words, 0, sizeof(self.words))
        self.slot = -1
        self.slots = slots
        self.slot = slots.take()

    def __dealloc__(self):
        if self.slot >= 0:
            self.slots.set_free(self.slot)

    def locate(self, uint64_t capacity, record):
        """Set where in the slot the data lie: the slot's committed bytes, and a `codec.Record`."""
        cdef int k
        self.slots.resize(self.slot, capacity)
        self.words[0], self.words[1] = self.slot, <int64_t>capacity
        for k in range(4):
            self.words[2 + k] = record[k]


cdef class StreamSource(Source):
    """Tickets of workers, each of which has a queue of its own and an assignment for the epoch.

    Parameters
    ----------
    rings : list of Ring
        By worker.
    epoch : int
    assignments : list of Request
    depth : int
        The most tickets of a worker that are in the ring.
    first : int
        The worker whose turn is the first.
    """

    def __cinit__(self, list rings not None, uint64_t epoch, list assignments not None, *_,
                  uint32_t depth, Py_ssize_t first=0, **__):
        self.rings, self.epoch, self.assignments = rings, epoch, assignments
        self.depth, self.latest = depth, first - 1

    cdef inline Ring ring(self, Py_ssize_t worker):
        return <Ring>PyList_GET_ITEM(self.rings, worker)

    cdef inline Request assignment(self, Py_ssize_t worker):
        return <Request>PyList_GET_ITEM(self.assignments, worker)


@cython.final
cdef class ItemSource(StreamSource):
    """The workers' own items, of one worker after the other; a worker whose items have ended gets no
    more tickets. The first ticket of each says that the epoch begins, and counts for nothing."""

    def __cinit__(self, *_, **__):
        self.asked = <uint64_t*>PyMem_RawCalloc(len(self.rings), sizeof(uint64_t))
        if self.asked == NULL:
            raise MemoryError(f"no memory for {len(self.rings)} workers")
        self.beginning = 1

    def __dealloc__(self):
        PyMem_RawFree(self.asked)

    def open(self):
        """The workers have begun the epoch."""
        self.beginning = 0

    cdef Py_ssize_t target(self) noexcept:
        cdef Py_ssize_t count = PyList_GET_SIZE(self.rings)
        cdef Py_ssize_t k, worker
        for k in range(count):
            worker = (self.latest + 1 + k) % count
            if (self.asked[worker] != ENDED
                    and self.ring(worker).outstanding < self.depth + self.beginning):
                return worker
        return -1

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef uint64_t asked = self.asked[number]
        self.latest = number
        refer(ring, cell, None, self.assignment(number), None)
        if asked:
            ring.offer(cell, ticket, self.epoch, ASK_ITEM, 1, asked - 1, 0)
        else:
            ring.offer(cell, ticket, self.epoch, ASK_BEGIN, 0, 0, 0)
        self.asked[number] += 1
        return 1 if asked else 0

    cdef void end(self, Py_ssize_t number) noexcept:
        self.asked[number] = ENDED

    cdef bint is_over(self, Py_ssize_t number) noexcept:
        cdef Py_ssize_t k
        for k in range(PyList_GET_SIZE(self.rings)):
            if self.asked[k] != ENDED and number in (-1, k):
                return False
        return True


cdef Block ints_of(key, Py_ssize_t most):
    """The numbers of a list of 1 to `most` ints within int64 (no subclasses); else None."""
    cdef Py_ssize_t k
    cdef int64_t* words
    cdef int overflow = 0
    cdef Block block
    cdef tuple numbers  # another thread may change the list
    if type(key) is not list:
        return None
    numbers = tuple(key)
    if not 0 < PyTuple_GET_SIZE(numbers) <= most:
        return None
    block = Block(8 * PyTuple_GET_SIZE(numbers))
    words = <int64_t*>block.data
    for k in range(PyTuple_GET_SIZE(numbers)):
        if type(<object>PyTuple_GET_ITEM(numbers, k)) is not int:
            return None
        words[k] = PyLong_AsLongLongAndOverflow(<object>PyTuple_GET_ITEM(numbers, k), &overflow)
        if overflow:
            return None
    return block


@cython.final
cdef class KeySource(StreamSource):
    """Items that are named by keys, which an iterator gives: so many ahead, then one for each item taken.

    A key goes through three steps::

        draw     store the iterator's next key in `key`; the next step may be interrupted
        write    store its ints, or a `Request`, in `drawn`
        post     post its ticket, in the step that takes an item out: C alone

    Parameters
    ----------
    keys : iterator
    pickle : callable
        ``pickle(key, number)`` → `Request`.
    prefetch : int
        How many keys of each worker are drawn ahead of the items that were taken.
    in_order : bool
        The items come in the order of the keys: so do the tickets go to the workers in turn.
    free : bool
        A key goes to the worker that has the fewest keys to work on; else to the workers in turn.
    samples : callable, optional
        ``samples(key)``: how many samples its item counts for, at least 1. None: one each.
    """

    def __cinit__(self, list rings not None, uint64_t epoch, list assignments not None, keys, pickle, *,
                  uint32_t depth, uint64_t prefetch, bint in_order, bint free, samples=None, **__):
        self.keys, self.pickle, self.keyed = keys, pickle, True
        self.in_order, self.in_turn, self.free = in_order, True, free
        self.ahead = min(prefetch, MOST_AHEAD) * <uint64_t>PyList_GET_SIZE(rings)
        self.each = min(prefetch, <uint64_t>depth)
        self.key, self.drawn = NOTHING, []
        self.samples, self.counts = samples, []

    def open(self):
        """The first keys are posted: raise the iterator's exception, or that of writing a key."""
        self.in_turn = False
        error, self.error = self.error, None
        if error is not None:
            raise error

    cdef bint is_ready(self, uint64_t taken) noexcept:
        return self.key is NOTHING and (
            self.keys is None
            or self.posted + <uint64_t>PyList_GET_SIZE(self.drawn) >= self.ahead + taken)

    cdef int prepare(self, uint64_t taken) except -1:
        return self.draw() if self.key is NOTHING else self.put()

    cdef int draw(self) except -1:
        """Draw a key. An exception of the iterator is raised after the items of the keys before.

        One that is no `Exception`, such as KeyboardInterrupt of a signal handler, is raised at
        once. The iterator is asked again afterwards; if it has ended, as a generator has, that is
        an error, which is raised again and again until an epoch begins.
        """
        check_depth()
        try:
            self.key = next(self.keys)
        except StopIteration:
            self.keys = None
        except Exception as error:
            self.keys, self.error = None, error
        except BaseException as cause:
            self.error = self.incomplete = RuntimeError(
                f"the iterator of keys was interrupted ({type(cause).__name__}) and has ended: "
                "the rest of the epoch may be missing")
            raise
        else:
            self.error = None
        return 0

    cdef int put(self) except -1:
        """Write the key that was drawn."""
        written = ints_of(self.key, <Py_ssize_t>self.ring(0).r.batch_size - KEY_INTS)
        count = 1 if self.samples is None else max(1, self.samples(self.key))  # 0: see `publish`
        if written is None:
            try:
                written = self.pickle(self.key, self.posted + <uint64_t>len(self.drawn))
            except (TypeError, ValueError) as error:  # it cannot be pickled, or is too long
                self.keys, self.error, self.key = None, error, NOTHING
                return 0
        self.drawn.append(written)
        if self.samples is not None:
            self.counts.append(count)
        self.key = NOTHING
        return 0

    cdef Py_ssize_t target(self) noexcept:
        cdef Py_ssize_t count = PyList_GET_SIZE(self.rings)
        cdef Py_ssize_t k, worker
        cdef Py_ssize_t chosen = -1
        cdef uint32_t fewest = 0, working
        cdef Ring ring
        if not PyList_GET_SIZE(self.drawn):
            return -1
        if self.free and not self.in_turn:
            for k in range(count):
                ring = self.ring(k)
                working = ring.unanswered()
                if ring.outstanding < self.depth and (chosen < 0 or working < fewest):
                    chosen, fewest = k, working
            return chosen
        for k in range(1 if self.in_order or self.in_turn else count):
            worker = (self.latest + 1 + k) % count
            if self.ring(worker).outstanding < self.each:
                return worker
        return -1

    cdef uint64_t write(self, Py_ssize_t number, Ring ring, uint32_t cell, uint64_t ticket) noexcept:
        cdef int64_t* words
        cdef Block ints
        cdef uint32_t count = 1 if self.samples is None else <uint32_t>self.counts.pop(0)
        self.latest = number
        key = self.drawn.pop(0)
        if type(key) is Block:
            ints = <Block>key
            words = refer(ring, cell, None, self.assignment(number), None)
            words[KEY_LENGTH] = ints.size // 8
            memcpy(words + KEY_INTS, ints.data, <size_t>ints.size)
        else:
            refer(ring, cell, <Request>key, self.assignment(number), None)
        ring.offer(cell, ticket, self.epoch, ASK_ITEM, count, self.posted, 0)
        self.posted += 1
        return 1

    cdef bint is_over(self, Py_ssize_t number) noexcept:
        return self.keys is None and self.key is NOTHING and not PyList_GET_SIZE(self.drawn)

    cdef int finish(self) except -1:
        error = self.error
        if error is not self.incomplete:  # that is raised until an epoch begins
            self.error = None
        if error is not None:
            raise error
        return 0
