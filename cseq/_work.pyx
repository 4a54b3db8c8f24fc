# cython: language_level=3, freethreading_compatible=True
"""The work of a runner: making batches, and publishing them."""

from libc.stdint cimport uint64_t

cimport cython

from cseq._core cimport Runner
from cseq._headers cimport *
from cseq._memory cimport forks_here
from cseq._objects cimport ObjectTable

cdef uint64_t SERVE_NS = 50_000  # how long tickets are claimed between two instructions of Python


@cython.auto_pickle(False)
cdef class BatchState:
    """The part of a `context.BatchContext` that changes with every batch.

    Attributes
    ----------
    ticket : Ticket or None
        The present one.
    drawn : numpy.random.Generator or None
        That of the present ticket, once it was asked for.
    """


@cython.auto_pickle(False)
cdef class TicketWriter:
    """What publishes a runner's batches: the part that is in C."""

    cdef int open_ticket(self, Runner runner) except -1:
        """Prepare for the present ticket."""
        return 0

    cdef bint publish_batch(self, Runner runner, object batch) except -1:
        """Write a batch and publish its ticket, if that can be done in C; return whether it was."""
        return False

    def begin_ticket(self, Runner runner not None):
        """Prepare for the present ticket."""
        self.open_ticket(runner)

    def try_publish(self, Runner runner not None, batch):
        """Write a batch and publish its ticket, if that can be done in C; return whether it was."""
        return self.publish_batch(runner, batch)


@cython.final
cdef class ObjectWriter(TicketWriter):
    """Publishes the batches of threads: the objects themselves. `transport.Objects` has the rest.

    Parameters
    ----------
    objects : ObjectTable
    """

    def __cinit__(self, ObjectTable objects not None):
        self.objects = objects

    cdef bint publish_batch(self, Runner runner, object batch) except -1:
        """Leave the batch in the cell's place, and publish the ticket."""
        cdef cseq_cell* c = runner.held()
        self.objects.put(runner.cell, batch)
        runner.deliver(c, 0, 0)
        return True


cdef class BatchMaker:
    """Makes and publishes batches: the part of `indexer.Indexing` that is in C.

    Parameters
    ----------
    indexer : object
    batch_state : BatchState
        The context that this thread has entered.
    batch_writer : BatchWriter
    convert : callable, optional
        Applied to every batch.
    seeds : Seeds, optional
        Seeds the global generators for each batch.
    """

    def __cinit__(self, indexer, BatchState batch_state not None, batch_writer, convert=None,
                  seeds=None):
        self.indexer, self.batch_state, self.batch_writer = indexer, batch_state, batch_writer
        self.writer = batch_writer.ticket_writer
        self.convert, self.seeds = convert, seeds
        self.loaded = [] if seeds is None else seeds.loaded
        self.depth = forks_here[0]

    cdef int make(self, Runner runner) except -1:
        """Make the present ticket's batch and publish it; `fail` publishes an exception.

        A process that the user's code forks, and that returns here, does neither: it has no part in
        the ring. `end_copy` ends it.
        """
        try:
            if self.batch_state.drawn is not None or self.batch_state.ticket is not runner:
                self.batch_state.drawn, self.batch_state.ticket = None, runner
            if self.loaded:
                self.seeds.seed()
            self.writer.open_ticket(runner)
            indexer = self.indexer  # the first call changes it
            batch = indexer[runner.indices()]
            if self.convert is not None:
                batch = self.convert(batch)
            if forks_here[0] != self.depth:
                self.end_copy(None)
            if self.writer.publish_batch(runner, batch):
                return 0
            record = self.batch_writer.write(runner, batch)
            del batch  # publish checks whether the indexer has kept arrays in the slot
            self.batch_writer.publish(runner, record)
        except BaseException as error:  # SystemExit, too, is the user's to see
            if forks_here[0] != self.depth:
                self.end_copy(error)
            self.fail(runner, error)
        return 0

    def work(self, Runner runner not None):
        """Work on the present ticket."""
        self.make(runner)

    def serve(self, Runner runner not None):
        """Work on the present ticket, then on those that can be claimed at once.

        Not on many slow ones: between two calls, the interpreter lets other threads run, collects
        garbage, and frees what other threads have dropped. So `SERVE_NS` after the first claim, only
        the ticket in hand is worked on.
        """
        cdef uint64_t begun = runner.since
        self.make(runner)
        while runner.since - begun < SERVE_NS and runner.claim_at_once():
            self.make(runner)
