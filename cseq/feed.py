"""Feeding a ring: an epoch's tickets in, its finished batches out.

The trainer's side of the thread and the process pool. Only the consuming thread comes here; what
other threads have to say (a worker that cannot be built, one that died too often) reaches it
through `check`, which raises, and the ring's alarm.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cseq import failure
from cseq._core import Exchange
from cseq.stage import RAISED
from cseq.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.edge import Outlet
    from cseq.sampler import Sampler

    Taken = tuple[int, int, int, int, tuple[int, ...]]

__all__ = ["Fed", "Feed", "wake_at"]

log = logging.getLogger("cseq")


def wake_at(buffer: int, num_workers: int) -> int:
    """Return how many tickets gather before sleeping workers are woken for them.

    Waking for each one costs more than a small batch does. Workers only sleep when everything
    is done, so `buffer` minus this many batches are ready; that must last until the woken
    workers have made the next, hence as many as there are workers.
    """
    return max(1, min(buffer // 2, buffer - num_workers))


class Feed:
    """One epoch after the other over a ring.

    Parameters
    ----------
    ring : Ring
    sampler : Sampler
    outlet : Outlet
        Where finished batches come out.
    ordered : bool
        In ticket order, not in that of completion.
    skip_errors : bool
        Log and leave out a batch whose indexer raised, instead of raising.
    check : callable
        Called before every sleep; raises what went wrong elsewhere.
    convert : callable, optional
        Applied to every batch on its way out.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler,
        outlet: Outlet,
        *,
        ordered: bool,
        skip_errors: bool,
        check: Callable[[], None],
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._ring = ring
        self._sampler = sampler
        self._outlet = outlet
        self._ordered = ordered
        self._skip_errors = skip_errors
        self._check = check
        self._convert = convert
        self._rooms = [ring.indices(cell) for cell in range(ring.capacity)]
        # Counts batches. Torn: an exception has come in the middle of `next`.
        self.exchange = Exchange(ring, sampler.order, outlet.source, convert)
        self._epoch = 0
        self._first = 0  # number of the first batch: above 0 if the epoch is resumed
        self._batches = 0
        self._goal: tuple[int, int] | None = None  # what is being begun
        self._place: tuple[int, int] | None = None  # what was begun last
        self._met = False  # the loop has had something that `exchange.taken` does not count
        self.ended = False  # the loop was told that this epoch is over
        self._hand: Taken | None = None  # taken out of the ring, and not yet out of its slot
        self._sweeping = False
        self._swept: list[tuple[int, int]] = []  # cells and slots that are being cleared
        self._interrupted = False
        self.skipped: list[tuple[int, int, str]] = []

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have had."""
        goal = self._goal
        return self._sampler.position(self.exchange.done) if goal is None else goal[1]

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything of this epoch: a batch, an exception, or its end."""
        return self._met or self.exchange.taken > 0

    def begin(self, epoch: int, consumed: int = 0) -> None:
        """Begin an epoch, wherever the last one stands; nothing of that one will be delivered.

        If this very place was begun and the loop has had nothing of it, work on it goes on.
        """
        self._interrupted = False
        if self.begun or self.exchange.torn or self._place != (epoch, consumed):
            self._met = self.ended = False
            self._begin(epoch, consumed)

    def _begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch, or go on with one, behind the samples that are consumed."""
        exchange = self.exchange
        torn, exchange.torn = exchange.torn, True
        self._goal = epoch, consumed
        hand, self._hand = self._hand, None
        if hand is not None:
            self._outlet.drop(hand[0], hand[2])
        self._drop_swept()
        self._ring.abandon()
        if torn:
            self._outlet.keep(self._ring.slots())
        self._sweeping = True
        self._sampler.begin(epoch, consumed)
        self._epoch = epoch
        self._first = self._sampler.first
        self._batches = len(self._sampler)
        full, start, stride, size = self._sampler.cut
        exchange.begin(epoch, self._first, full if self._ordered else 0, start, stride, size)
        self._refill()
        exchange.torn, self._goal, self._place = False, None, (epoch, consumed)

    def interrupt(self) -> None:
        """Let a `next` that waits in another thread raise InterruptedError; `begin` ends this."""
        self._interrupted = True
        self._ring.alarm()

    def _refill(self) -> None:
        """Post tickets while there are free cells and batches left."""
        ring = self._ring
        if self._sweeping:
            self._sweep()
        while self.exchange.posted < self._batches:
            cell = ring.vacant()
            if cell < 0:
                return
            self._post(cell, *self._outlet.room())

    def _post(self, cell: int, slot: int, capacity: int) -> None:
        """Post the next ticket in a free cell."""
        exchange = self.exchange
        batch = exchange.posted
        count = self._sampler.fill(batch, self._rooms[cell])
        start = self._sampler.start(batch)
        number = self._first + batch
        self._ring.post(cell, exchange.ticket, self._epoch, number, count, start, slot, capacity)
        exchange.ticket += 1
        exchange.posted = batch + 1

    def _sweep(self) -> None:
        """Clear the cells of given-up tickets that no runner works on any more."""
        self._swept += self._ring.sweep()
        self._drop_swept()
        self._sweeping = self._ring.abandoned_count > 0

    def _drop_swept(self) -> None:
        """Drop what cleared cells held."""
        while self._swept:
            self._outlet.drop(*self._swept.pop())

    def next(self) -> Any:
        """Return the next finished batch, the long way: `exchange.swap` is the short one.

        Raises
        ------
        StopIteration
            The epoch is over.
        """
        exchange = self.exchange
        if exchange.torn:
            self._mend()
        exchange.torn = True  # until the books are in order again
        while True:
            self._hand = taken = self._ring.take(self._ordered) or self._await()
            cell, status, slot, capacity, record = taken
            if status == RAISED:
                self._raised(cell, slot, capacity, record)
                continue
            batch, slot = self._outlet.collect(cell, slot, capacity, record)
            if self._convert is not None:
                failed, exchange.failed = exchange.failed, None
                try:
                    if failed is not None:  # the short way has tried
                        raise failed
                    batch = self._convert(batch)
                except Exception as error:  # noqa: BLE001 - the user's, and raised again
                    self._refuse(cell, slot, error)
                    continue
                finally:
                    del failed
            break
        self._hand = None
        if slot >= 0 and exchange.posted < self._batches:
            self._post(cell, slot, capacity)  # without looking for another cell, another slot
        else:
            self._release(slot)
            self._refill()
        exchange.done = exchange.taken = exchange.taken + 1
        exchange.torn = False
        return batch

    def _mend(self) -> None:
        """Make anew what was under way when an exception came in the middle of `next`.

        A signal handler may raise between any two steps (Ctrl-C does), so that nobody knows which
        were done. But what was delivered is known: the rest of the epoch begins behind that.
        """
        self._refuse_interrupted()
        if not self._ordered:
            raise InterruptedError(
                "an exception has interrupted the taking of a batch, and with ordered=False "
                "nobody can say which ones are left; begin another epoch"
            )
        # In the middle of a beginning, the numbers are partly of before: its goal is known.
        if self._goal is None:
            self._met = self.begun
        self._begin(*(self._goal or (self._epoch, self.position)))

    def _refuse_interrupted(self) -> None:
        """Raise if `interrupt` was called."""
        if self._interrupted:
            raise InterruptedError("a newer iterator, a start or a finish has interrupted this")

    def _release(self, slot: int) -> None:
        """Give a slot back that the batch has left."""
        if slot >= 0:
            self._outlet.release(slot)

    def _await(self) -> Taken:
        """Sleep until a ticket is finished, and take it."""
        ring, exchange = self._ring, self.exchange
        while True:
            exchange.torn = False  # here all is in order, and most signals come while it waits
            seen = ring.alarms()
            self._refuse_interrupted()
            self._check()
            exchange.torn = True
            self._refill()
            if not ring.outstanding_count and exchange.posted == self._batches:
                exchange.torn, self._met, self.ended = False, True, True
                raise StopIteration
            taken = ring.take(self._ordered)
            if taken is not None:
                return taken
            exchange.torn = False
            ring.wait(seen, self._ordered)

    def in_work(self) -> list[tuple[int, int, str]]:
        """List who works on what is awaited, since when (ns of `now_ns`), and what it is."""
        ring = self._ring
        found = []
        for cell in ring.awaited(self._ordered):
            owner, since = ring.holder(cell)
            if owner and since:  # since is 0 for an instant after the claim
                epoch, batch, count = ring.ticket(cell)
                place = failure.where(epoch, batch, self._rooms[cell][:count].tolist())
                found.append((owner, since, place))
        return found

    def stats(self, num_workers: int) -> Stats:
        """Count what went through the ring; `num_workers` runners are indexers."""
        ring = self._ring
        return Stats(
            batches=ring.taken_batches,
            samples=ring.taken_samples,
            nbytes=ring.taken_bytes,
            skips=len(self.skipped),
            depths=ring.depths(),
            loop_waited=ring.waited_ns / 1e9,
            workers_waited=sum(ring.idle_ns()[:num_workers]) / 1e9,
        )

    def _raised(self, cell: int, slot: int, capacity: int, record: tuple[int, ...]) -> None:
        """Take an exception out instead of a batch."""
        error, slot = self._outlet.error(cell, slot, capacity, record)
        try:
            self._refuse(cell, slot, error)
        finally:
            del error  # its traceback has this frame: a circle

    def _refuse(self, cell: int, slot: int, error: BaseException) -> None:
        """Raise, or note down, what an indexer or a conversion raised instead of a batch."""
        epoch, batch, count = self._ring.ticket(cell)
        place = failure.where(epoch, batch, self._rooms[cell][:count].tolist())
        self._hand = None
        self._release(slot)
        exchange = self.exchange
        exchange.taken += 1
        if not self._skip_errors or not isinstance(error, Exception):
            exchange.torn = False
            try:
                failure.deliver(error, place)
            finally:
                del error
        left_out = epoch, batch, failure.repr_of(error)
        exchange.done = exchange.taken  # no signal handler runs between this and the next
        self.skipped.append(left_out)
        # Its text alone: whoever keeps the log's records would keep its traceback, and the ring.
        log.error("skipped %s: %s", place, left_out[2])
        self._refill()


class Fed:
    """What a pool that has a feed says of it."""

    feed: Feed

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have had, or left out for an error."""
        return self.feed.position

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that were left out for an error: epoch, batch, what was raised."""
        return self.feed.skipped

    @property
    def begun(self) -> bool:
        """Whether the loop has had anything of this epoch: a batch, an exception, or its end."""
        return self.feed.begun

    @property
    def ended(self) -> bool:
        """Whether the loop was told that this epoch is over."""
        return self.feed.ended

    def interrupt(self) -> None:
        """Let a `next` that waits in another thread raise InterruptedError."""
        self.feed.interrupt()

    @property
    def exchange(self) -> Exchange:
        """The feed's short way."""
        return self.feed.exchange

    @property
    def next(self) -> Callable[[], Any]:
        """Return the next batch: the feed's method, without a call in between."""
        return self.feed.next
