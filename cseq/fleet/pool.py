"""The fleet pool: batches that agents on other machines make.

::

    trainer                                                        an agent
      Feed ── tickets, indices ──► ring ──► Dispatcher ══ parcel ══►  TicketServer ──► indexer
      SlotReader ◄── views ── slots ◄────── (Carrier)  ◄══ bytes ═══
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from cseq._core import Ring, ring_bytes
from cseq._memory import Block
from cseq._parcel import Carrier
from cseq._slots import Slots
from cseq._work import Runner
from cseq.encoding import failure
from cseq.encoding.transport import Objects, SlotReader
from cseq.fleet.dispatch import Dispatcher
from cseq.memory.arena import Arena
from cseq.memory.writer import Writer
from cseq.pools.base import BatchPool, named
from cseq.pools.process import slot_ends
from cseq.pools.thread import ThreadGroup, add_converters
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from cseq.arguments import Job
    from cseq.fleet.agent import Fleet
    from cseq.fleet.ray import RayFleet
    from cseq.order.place import Place
    from cseq.pools.base import Awaited
    from cseq.stats import Stats

__all__ = ["FleetPool"]

ROOM = 64 << 20  # bytes of indices that the ring has room for, if that is `FEWEST` batches or more
FEWEST = 64
CLOSE_SECONDS = 2.0


class FleetPool(BatchPool):
    """A ring whose tickets are made by the agents of a fleet."""

    _own: RayFleet | None = None  # where none was given

    def __init__(self, job: Job) -> None:
        fleet: Fleet = job.fleet or self._own_fleet(job)
        words = job.sampler.words
        cells = min(job.buffer, max(FEWEST, ROOM // (8 * words)))
        runners = 1 + job.num_converters
        ring = Ring(Block(ring_bytes(cells, words, runners), zero=True), cells, words, runners)
        self._arena = Arena(job.options.memory_limit, None, tickets=cells)
        segment = self._arena.segment
        slots = Slots(segment.fd, segment.width, segment.slots, INDEXER + 1)
        self._writer = Writer(segment.fd, segment.width, slots)
        self._carrier = Carrier(Runner(ring, INDEXER, 1, last=not job.num_converters), self._writer)
        self._group = ThreadGroup(ring)
        self._dispatcher = Dispatcher(
            ring,
            self._carrier,
            fleet,
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
        )

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
        self._dispatcher.open(self.clock)
        self._group.start()

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch; what agents still make of another one is given up at once."""
        self._arena.tidy()
        super().begin(place, epoch, consumed, generation)

    def _release(self, ticket: int) -> None:
        """Free the cells of all tickets before this one: they were given up."""
        self._dispatcher.give_up(ticket)

    def _describe(
        self, number: int, cell: int, error: BaseException
    ) -> tuple[BaseException, tuple[int, int, str]]:
        """Name the batch in an exception, and the agent."""
        agent = self._dispatcher.agent_of(cell)
        error, entry = super()._describe(number, cell, error)
        if agent is not None:
            failure.annotate(error, f"made by {agent}")
        return error, entry

    def _check(self, _: Awaited | None) -> None:
        """Raise what has ended a thread, or what no agent can make good."""
        self._group.check()
        self._dispatcher.failure.check()

    def stats(self) -> Stats:
        """Return counts and times, of all workers of the fleet."""
        return self._dispatcher.counted(super().stats())

    def close(self) -> None:
        """End the threads; a fleet that was given ends with what has made it."""
        self._ring.close()
        self._dispatcher.close()
        self._group.join(time.monotonic() + CLOSE_SECONDS)
        self._writer.close()
        self._arena.close()
        if self._own is not None:
            self._own.close()
        self._job = self._job.without_worker()
