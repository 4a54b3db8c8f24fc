"""The trainer's end of a ring, for tests of the runners."""

from cseq._core import RangeReader, Ring, ring_bytes
from cseq._lock import RunState
from cseq._memory import Block
from cseq._work import Runner
from cseq.encoding._codec import Decoder
from cseq.engine._feed import Feed, FeedIterator
from cseq.measure._trace import begin_log, end_log
from cseq.order._source import OrderSource
from cseq.order.sampler import Cut


def make_ring(cells=4, size=2, runners=3, calls=0):
    """Make a ring in private memory."""
    return Ring(Block(ring_bytes(cells, size, runners), zero=True), cells, size, runners, calls)


def cut(batches, size=1, first=0):
    """Cut an epoch into full batches."""
    return Cut(first, batches, batches, 0, size, size, 0, 0, 0)._asdict()


def claim(ring, owner=1, stage=0, *, last=True):
    """Take a runner and a ticket."""
    runner = Runner(ring, stage, owner, last=last)
    assert runner.claim() is True
    return runner


class Asked:
    """A feed's pool that does nothing."""

    make_next = None
    on_cancel = None

    def await_next(self):
        """Fail: no test waits for a batch."""
        raise AssertionError("the next batch is not ready")

    def describe(self, ring, cell, error):
        """Return the exception unchanged."""
        return error, None

    def look(self):
        """Do nothing."""


class Trainer(Asked):
    """Posts the tickets of batches 0, 1, … of epoch 9, and takes the runners' answers.

    Each batch has one sample: the batch's number. The first tickets fill the ring's cells; each
    ticket that is taken is followed by a new one.
    """

    def __init__(
        self, ring, batches=1000, *, ordered=True, source=None, slots=None, recorded=False
    ):
        self.ring, self.sleeps, self._awaits = ring, 0, False
        decoder = Decoder(slots=slots)
        self.feed = Feed(RunState(), [ring], decoder, self)
        whole = cut(batches)
        source = source or OrderSource(RangeReader(batches), 9, whole, whole, 0)
        self.feed.begin_epoch(source, ordered=ordered)
        if recorded:
            begin_log(batches)
        self.feed.refill()
        self._batches = FeedIterator(self.feed, 0)

    def decode(self, ring, cell, status, slot, capacity, record):
        return (cell, self.ring.ticket(cell)[1], status, slot, capacity, record), None

    def await_next(self):
        """Sleep until the next ticket is ready; return whether it is."""
        while True:
            seen = self.feed.notices()
            ready = self.feed.advance()
            if ready:
                return
            if ready is None or not self._awaits:
                raise StopIteration
            self.sleeps += 1
            self.feed.wait(seen)

    def take(self):
        """Take the next ticket: cell, batch, status, slot, capacity, record; None if not ready."""
        self._awaits = False
        return next(self._batches, None)

    def batch(self):
        """Take the next ticket; return its batch number."""
        taken = self.take()
        return None if taken is None else taken[1]

    def await_batch(self):
        """Take the next ticket; sleep until it is ready."""
        self._awaits = True
        return next(self._batches)[1]


def stamps():
    """Return when each ticket that a recorded trainer took was claimed and published, in ns."""
    taken, _ = end_log()
    return list(zip(taken["started"].tolist(), taken["indexed"].tolist(), strict=True))
