# The process's global generators: set for each batch; the trainer's are kept and restored.

cdef enum:
    PURPOSE_BATCH = 4   # for each batch: docs/inside/shuffle.md
    PURPOSE_MAKING = 5  # while an indexer is made
    TORCH_KEY = 3       # where a state of torch's has the words of its twister, in 8 bytes each
cdef object FRESH = 1 << 31  # first word of a twister that was seeded, and not drawn from


cdef class Generator:
    """One of the process's global generators."""

    cdef object kept  # of the trainer's state: what is an object

    cdef int keep(self) except -1:
        """Keep the trainer's state, until `restore`."""
        raise NotImplementedError

    cdef int seed(self, const uint64_t* words) except -1:
        """Set the state that belongs to nine words, behind which are those that may be next in the place of the
        last one: docs/inside/shuffle.md."""
        raise NotImplementedError

    cdef int restore(self) except -1:
        """Set the state that was kept."""
        raise NotImplementedError


cdef class Twister(Generator):
    """A Mersenne Twister.

    Parameters
    ----------
    owner : object
        Has the state, in its memory, and methods that set and return it.
    key, position : int
        Addresses: of the 624 words and of the position in them. 0: the methods are called.
    """

    cdef object owner
    cdef readonly size_t key
    cdef size_t position
    cdef uint32_t[CSEQ_TWISTER + 1] kept_words  # with the position, which is before or behind them

    cdef void fill(self, const uint64_t* words) noexcept:
        """Write the state of four words into the memory."""
        cseq_twister_fill(<uint32_t*>self.key, words)
        (<int32_t*>self.position)[0] = 0

    cdef void copy(self) noexcept:
        """Keep what is in the memory."""
        memcpy(self.kept_words, <void*>min(self.key, self.position), sizeof(self.kept_words))

    cdef void copy_back(self) noexcept:
        """Write what was kept into the memory."""
        memcpy(<void*>min(self.key, self.position), self.kept_words, sizeof(self.kept_words))


cdef list twister(const uint64_t* words):
    cdef uint32_t[CSEQ_TWISTER] key
    cseq_twister_fill(key, words)
    return [key[k] for k in range(CSEQ_TWISTER)]


@cython.final
cdef class PythonGenerator(Twister):
    """That of `random`: `owner` is a `random.Random`."""

    def __cinit__(self, owner, size_t key=0, size_t position=0):
        self.owner, self.key, self.position = owner, key, position

    cdef int keep(self) except -1:
        self.kept = self.owner.gauss_next if self.key else self.owner.getstate()
        if self.key:
            self.copy()

    cdef int seed(self, const uint64_t* words) except -1:
        """Set the state of words 0 to 3."""
        if self.key:
            self.fill(words)
            self.owner.gauss_next = None
        else:
            self.owner.setstate((3, (*twister(words), 0), None))

    cdef int restore(self) except -1:
        if self.key:
            self.copy_back()
            self.owner.gauss_next = self.kept
        else:
            self.owner.setstate(self.kept)

    def is_fresh(self):
        """Whether nothing was drawn since it was seeded from the system's entropy, or by `seed`."""
        words = self.owner.getstate()[1]
        return words[0] == FRESH and words[CSEQ_TWISTER] == CSEQ_TWISTER


@cython.final
cdef class NumpyGenerator(Twister):
    """That of numpy.random: `owner` is that module, or a `RandomState`.

    Parameters
    ----------
    current : callable
        Returns the bit generator in use, which `numpy.random.set_bit_generator` can change.
    bit_generator : object
        The one that has the memory, an MT19937. While another one is in use, its `seed` is called.
    has_gauss, gauss : int
        Addresses: of the flag that the second Gaussian number of a pair is kept, and of that number.
    """

    cdef object current, bit_generator, acquire, release
    cdef int* has_gauss
    cdef double* gauss
    cdef int kept_flag
    cdef double kept_gauss

    def __cinit__(self, owner, current, bit_generator, size_t key=0, size_t position=0,
                  size_t has_gauss=0, size_t gauss=0):
        self.owner, self.current, self.bit_generator = owner, current, bit_generator
        self.key, self.position = key, position
        self.has_gauss, self.gauss = <int*>has_gauss, <double*>gauss
        lock = bit_generator.lock
        self.acquire, self.release = lock.acquire, lock.release

    cdef bint is_here(self) except -1:
        """Whether the memory is that of the bit generator in use. Other threads may draw from it without
        the GIL."""
        return self.key and self.current() is self.bit_generator

    cdef int keep(self) except -1:
        self.kept = None if self.is_here() else self.owner.get_state(legacy=False)
        if self.kept is None:
            self.acquire()
            self.copy()
            self.kept_flag, self.kept_gauss = self.has_gauss[0], self.gauss[0]
            self.release()

    cdef int seed(self, const uint64_t* words) except -1:
        """Set the state of words 4 to 7."""
        if self.is_here():
            self.acquire()
            self.fill(words + 4)
            self.has_gauss[0], self.gauss[0] = 0, 0.0
            self.release()
        elif self.current() is self.bit_generator:
            self.owner.set_state(("MT19937", twister(words + 4), 0, 0, 0.0))
        else:
            self.owner.seed(words[4] & 0xFFFFFFFF)

    cdef int restore(self) except -1:
        if self.kept is None:
            self.acquire()
            self.copy_back()
            self.has_gauss[0], self.gauss[0] = self.kept_flag, self.kept_gauss
            self.release()
        else:
            self.owner.set_state(self.kept)

    def is_fresh(self):
        """Whether nothing was drawn since its module was imported."""
        state = self.bit_generator.state["state"]
        return state["key"][0] == FRESH and state["pos"] == CSEQ_TWISTER - 1


@cython.final
cdef class TorchGenerator(Generator):
    """That of torch for the CPU; its methods are called.

    Attributes
    ----------
    is_prepared : bool
        A state as `get_state` returns it can be made here: `set_state` costs less than
        `manual_seed`, which computes 624 words, each from the one before.
    """

    cdef object probe, initial_seed, get_state, set_state, manual_seed, state
    cdef uint64_t* data  # of `state`
    cdef uint32_t[CSEQ_CHAINS][CSEQ_TWISTER] made
    cdef readonly bint is_prepared

    def __cinit__(self, generator):
        cdef uint64_t[8 + CSEQ_CHAINS] words
        cseq_derive(0, 0, PURPOSE_MAKING, words, 8 + CSEQ_CHAINS)
        self.initial_seed, self.manual_seed = generator.initial_seed, generator.manual_seed
        self.get_state, self.set_state = generator.get_state, generator.set_state
        self.probe = type(generator)().manual_seed
        self.state = self.probe(1).get_state()
        self.data = <uint64_t*><size_t>self.state.data_ptr()
        if self.state.numel() >= (TORCH_KEY + CSEQ_TWISTER) * 8:
            self.fill(words)
            want = self.probe(words[8]).get_state()
            self.is_prepared = not memcmp(self.data, <void*><size_t>want.data_ptr(), want.numel())

    cdef void fill(self, const uint64_t* words) noexcept:
        """Write a state into `state`."""
        cdef const uint32_t* key = cseq_twister_find(self.made, words + 8)
        cdef int k
        self.data[0] = words[8]
        for k in range(CSEQ_TWISTER):
            self.data[TORCH_KEY + k] = key[k]

    cdef int keep(self) except -1:
        self.kept = self.get_state()

    cdef int seed(self, const uint64_t* words) except -1:
        """Seed it with word 8."""
        if self.is_prepared:
            self.fill(words)
            self.set_state(self.state)
        else:
            self.manual_seed(words[8])

    cdef int restore(self) except -1:
        self.set_state(self.kept)

    def is_fresh(self):
        """Whether nothing was drawn since it was seeded."""
        return self.probe(self.initial_seed()).get_state().equal(self.get_state())


cdef class BatchSeeds:
    """Sets the generators for one batch after another: the part of `seeding.Seeds` that is in C.

    Parameters
    ----------
    batch_context : BatchContext
        Has the present batch, and the seed for the making of an indexer.

    Attributes
    ----------
    present : list of Generator
        Those whose modules are imported.
    missing : dict of str to callable
        By the name of a module that is not imported: what finds its generator then.
    """

    cdef readonly list present
    cdef readonly dict missing
    cdef tuple names  # of `missing`, when `is_due` was asked last
    cdef BatchState batch_state
    cdef uint64_t making, seed_word, epoch, key
    cdef bint has_key, lent
    cdef bint looked  # since the batch before: no module is there that was missing
    cdef Py_ssize_t kept  # the first of `present`, whose states `restore` restores
    cdef uint64_t place  # that the states belong to
    cdef uint64_t[8 + CSEQ_CHAINS] words

    def __cinit__(self, batch_context, *_):
        self.batch_state, self.making = batch_context, batch_context.seed
        self.present, self.missing, self.names = [], {}, ()

    cdef int write(self, uint64_t seed, uint64_t place, uint64_t purpose) except -1:
        """Set the states that belong to (seed, place, purpose), also of generators that are new."""
        if self.is_due():
            self.look()
        return self.set(seed, place, purpose)

    cdef int set(self, uint64_t seed, uint64_t place, uint64_t purpose) except -1:
        """Set the states of the generators in `present`; keep those that are lent before."""
        cdef Generator generator
        cdef uint64_t k, other
        if not self.present:
            return 0
        while self.lent and self.kept < len(self.present):  # which only grows
            generator = self.present[self.kept]
            generator.keep()
            self.kept += 1
        cseq_derive(seed, place, purpose, self.words, 9)
        for k in range(1, <uint64_t>CSEQ_CHAINS):  # at places as far apart as this one and the last
            other = cseq_stream(seed, place + k * (place - self.place), purpose)
            self.words[8 + k] = cseq_mix(other + 8 * CSEQ_GOLDEN)
        self.place = place
        for generator in self.present:
            generator.seed(self.words)

    cdef bint is_due(self) except -1:
        """Whether the import of a missing module has begun. Each batch asks."""
        cdef Py_ssize_t k
        if PyTuple_GET_SIZE(self.names) != PyDict_Size(self.missing):  # which only loses names
            self.names = tuple(self.missing)
        modules = <object>PyImport_GetModuleDict()
        for k in range(PyTuple_GET_SIZE(self.names)):
            if PyDict_Contains(modules, <object>PyTuple_GET_ITEM(self.names, k)):
                return True
        return False

    def seed(self, uint64_t key, uint64_t place):
        """Set the states of the batch, or sequence, at this place in the epoch that has this key."""
        self.write(key, place, PURPOSE_BATCH)

    cdef int seed_batch(self, uint64_t seed, uint64_t epoch, uint64_t start) except -1:
        """Set the states of the batch that begins at this position of an epoch."""
        if epoch != self.epoch or seed != self.seed_word or not self.has_key:
            cseq_derive(seed, epoch, PURPOSE_BATCH, &self.key, 1)
            self.seed_word, self.epoch, self.has_key = seed, epoch, True
        if not self.looked:
            return self.write(self.key, start, PURPOSE_BATCH)
        self.looked = False
        return self.set(self.key, start, PURPOSE_BATCH)

    def seed_present(self):
        """Set the states of the present batch, or of an indexer that is being made."""
        ticket = self.batch_state.ticket
        if ticket is None:
            self.write(self.making, 0, PURPOSE_MAKING)
        else:
            self.seed_batch(ticket.seed, ticket.epoch, ticket.start)

    cpdef void lend(self) noexcept:
        """Keep each generator's state before it is set, until `restore`: they are the trainer's."""
        self.lent = True

    cpdef restore(self):
        """Restore the states of the trainer's generators."""
        try:
            self.paste()
        except BaseException:  # a signal handler has raised in the middle
            self.paste()
            raise
        finally:
            self.kept, self.lent = 0, False

    cdef int paste(self) except -1:
        cdef Generator generator
        cdef Py_ssize_t k
        for k in range(self.kept):
            generator = self.present[k]
            generator.restore()
