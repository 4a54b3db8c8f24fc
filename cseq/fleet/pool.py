"""The fleet pool: batches that agents on other machines make.

::

    trainer                                                        an agent
      Feed ── tickets, indices ──► ring ──► Dispatcher ══ parcel ══►  TicketServer ──► indexer
      SlotReader ◄── views ── slots ◄────── (Carrier)  ◄══ bytes ═══
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import Ring, now_ns, ring_bytes
from cseq._memory import Block
from cseq._parcel import Carrier, ParcelSource
from cseq._slots import Slots
from cseq._source import KEYS
from cseq._work import Runner
from cseq.arguments import Job, Size, WorkerOptions
from cseq.converter.output import Output
from cseq.encoding import failure
from cseq.encoding.transport import Objects, SlotReader
from cseq.errors import WorkerTimeout
from cseq.fleet import keys as tickets
from cseq.fleet.dispatch import Dispatcher
from cseq.lanes import Lanes
from cseq.memory.arena import Arena
from cseq.memory.writer import Writer
from cseq.meters import Meters
from cseq.pools.base import BatchPool, named
from cseq.pools.process import slot_ends
from cseq.pools.thread import ThreadGroup, add_converters
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.fleet.agent import Fleet
    from cseq.fleet.ray import RayFleet
    from cseq.order.place import Place
    from cseq.pools.base import Awaited
    from cseq.stats import Stats

__all__ = ["AHEAD", "FleetPool", "KeyPool"]

ROOM = 64 << 20  # bytes of indices that the ring has room for, if that is `FEWEST` batches or more
FEWEST = 64
CLOSE_SECONDS = 2.0
AHEAD = 2048  # keys that are drawn ahead of the batches taken: several parcels for each agent
FIRST = 64  # of these, before the first is taken
PATIENCE = 10  # times `timeout`, for the first batch: agents, and their workers, have to get ready


class FleetPool(BatchPool):
    """A ring whose tickets are made by the agents of a fleet."""

    _own: RayFleet | None = None  # where none was given

    def __init__(self, job: Job) -> None:
        fleet: Fleet = job.fleet or self._own_fleet(job)
        words = self._words(job)
        cells = min(job.buffer, max(FEWEST, ROOM // (8 * words)))
        runners = 1 + job.num_converters
        ring = Ring(Block(ring_bytes(cells, words, runners), zero=True), cells, words, runners)
        self._arena = Arena(job.options.memory_limit, None, tickets=cells)
        segment = self._arena.segment
        slots = Slots(segment.fd, segment.width, segment.slots, INDEXER + 1)
        writer = Writer(segment.fd, segment.width, slots)
        self._carrier = Carrier(Runner(ring, INDEXER, 1, last=not job.num_converters), writer)
        lanes = Lanes(1, "fleet")
        self._group = ThreadGroup(ring, lanes)
        self._dispatcher = Dispatcher(
            ring,
            self._carrier,
            fleet,
            rank=0 if job.sampler is None else job.sampler.rank,
            ranks=1 if job.sampler is None else job.sampler.world_size,
            memory_limit=self._arena.memory_limit,
            named=partial(named, ring),
        )
        self._group.add("cseq-dispatcher", self._dispatcher.run)
        self._reader = SlotReader(self._arena)
        reader, convert, leaf_for = slot_ends(job, self._reader, cells)
        super().__init__(
            job,
            ring,
            reader,
            convert=convert,
            leaf_for=leaf_for,
            num_workers=1,
            num_converters=job.num_converters,
            lanes=lanes,
        )

    def _words(self, job: Job) -> int:
        """Return the most words of a ticket."""
        return job.sampler.words

    def _own_fleet(self, job: Job) -> Fleet:
        """Make a fleet that ends with this pool."""
        from cseq.fleet.ray import fleet_for

        self._own = fleet_for(job)
        return self._own

    def open(self) -> None:
        """Connect to the fleet, and start the threads."""
        job = self._job
        if isinstance(self._batch_reader, Objects):
            add_converters(job, self._ring, self._reader, self._batch_reader, self._group)
        self._dispatcher.open()
        self._group.start()

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch; what agents still make of another one is given up at once."""
        self._arena.tidy()
        super().begin(place, epoch, consumed, generation)

    def _release(self, ticket: int) -> None:
        """Free the cells of all tickets before this one: they were given up."""
        self._dispatcher.give_up(ticket)

    def _describe(self, number: int, cell: int, what: Any) -> tuple[Any, Any]:
        """Name the batch in an exception, and the agent."""
        agent = self._dispatcher.agent_of(cell)
        told, entry = super()._describe(number, cell, what)
        if agent is not None and isinstance(told, BaseException):
            failure.annotate(told, f"made by {agent}")
        return told, entry

    def _check(self, _: Awaited | None) -> None:
        """Raise what has ended a thread, or what no agent can make good."""
        self._group.check()
        self._dispatcher.failure.check()

    def stats(self) -> Stats:
        """Return counts and times, of all workers of the fleet."""
        return replace(self._dispatcher.counted(super().stats()), copies=self._arena.copies)

    def close(self) -> None:
        """End the threads; a fleet that was given ends with what has made it."""
        self._ring.close()
        self._dispatcher.close()
        self._group.join(CLOSE_SECONDS)
        self._carrier.close()
        self._arena.close()
        if self._own is not None:
            self._own.close()
        self._job = self._job.without_worker()


class KeyPool(FleetPool):
    """A fleet's pool for the batches that keys of any kind name.

    Parameters
    ----------
    fleet : Fleet
        Its indexers take what `keys.read` reads.
    ordered : bool
        False: batches come as they get ready.
    timeout : float, optional
        Seconds that a call may wait for a batch, and `PATIENCE` times as long for the first one.
    """

    _begun = 0  # when the present wait began (ns)

    def __init__(self, fleet: Any, *, ordered: bool, timeout: float | None) -> None:
        none: Any = None
        super().__init__(
            Job(
                worker=None,
                sampler=none,
                output=Output("null"),
                num_workers=1,
                num_converters=0,
                buffer=AHEAD,
                ordered=ordered,
                compat=None,
                on_error="return",
                seed_globals=True,
                options=WorkerOptions(None, 0, timeout, "raise", None, 1, None),
                start=Size(1, AHEAD),
                fleet=fleet,
            )
        )

    def _words(self, job: Job) -> int:
        """Return the most words of a ticket."""
        most: int = job.fleet.batch_size
        return most + KEYS

    def give_feed(self) -> Any:
        """Return the feed, to which this pool then refers weakly; see `StreamPool.give_feed`."""
        feed = self.feed
        self.feed = weakref.proxy(feed)
        return feed

    def begin_keys(self, keys: Iterator[Any], *, seed: int, first: int) -> None:
        """Begin the epoch; `first` is the number of its first batch here, `seed` that of all."""
        feed, cells = self.feed, self._ring.capacity
        source = ParcelSource(
            self.rings,
            0,
            [None],
            keys,
            partial(tickets.write, most=self._job.fleet.batch_size),
            depth=cells,
            prefetch=max(FIRST, 4 * self._job.fleet.workers),
            in_order=True,
            free=False,
            seed=seed,
            number=first,
        )
        feed.begin(source, ordered=self._job.ordered)
        feed.generation = self.run.generation
        feed.refill()
        source.open()
        self._ring.wake()
        feed.run_clock()

    def _await(self, *args: Any) -> Any:
        """Sleep until something is found; times are measured from here on."""
        self._begun = now_ns()
        return super()._await(*args)

    def _check(self, awaited: Awaited | None) -> None:
        """Raise errors, also for a batch that was waited for too long."""
        super()._check(awaited)
        limit = self._options.timeout
        if limit is not None:
            starting = not Meters.read(self.rings).begun
            limit *= PATIENCE if starting else 1
            if now_ns() - self._begun > limit * 1e9:
                self._complain(limit, starting=starting)

    def _complain(self, limit: float, *, starting: bool) -> None:
        """Raise for the batch that is waited for, if there is one."""
        for number, cell in self.feed.awaited()[:1]:
            place = named(self.rings[number], cell)[3]
            waits_for = f"; {self._job.fleet.waits_for}" if starting else ""
            raise WorkerTimeout(f"{place} has not come within {limit:g} s{waits_for}")
