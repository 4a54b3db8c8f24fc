"""The trainer's thread that sends tickets to agents, and publishes their answers.

It drives a `Ledger`, which decides, and a `Carrier`, which has the tickets. What agents answer
comes on threads of their transport; these put it down and wake this one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cseq._parcel import outline
from cseq.encoding import failure
from cseq.errors import WorkerDied
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.ledger import Ledger, Parcel, TicketLost, chosen
from cseq.meters import Meters
from cseq.threads import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cseq._core import Ring
    from cseq._parcel import Carrier
    from cseq.fleet.agent import Agent, Fleet, Outcome
    from cseq.stats import Stats

__all__ = ["Dispatcher"]

FIRST = 8  # tickets that are claimed before the first answer
LOOK = 1.0  # seconds: the longest sleep
NO_ROOM = 0.002  # the longest one while tickets wait for room: the loop, which makes it, wakes none
AGAIN = 0.2  # seconds after which an agent that was lost is asked again for a sign of life
SHORT, LONG = 2.0, 10.0  # seconds without an agent: logged as INFO, as WARNING
KEPT = 1000  # exceptions whose agents are remembered until the loop has them


class Dispatcher:
    """Sends the tickets of a ring to a fleet.

    Parameters
    ----------
    ring : Ring
    carrier : Carrier
        Its runner.
    fleet : Fleet
        Stays the caller's.
    rank, ranks : int
        Which rank this process is, and of how many: each has its own agents, if there are many.
    memory_limit : int
        Bytes of batches that may be under way, or wait for the loop.
    named : callable
        ``named(cell)``: epoch, number, indices and name of the batch there.
    """

    def __init__(
        self,
        ring: Ring,
        carrier: Carrier,
        fleet: Fleet,
        *,
        rank: int,
        ranks: int,
        memory_limit: int,
        named: Callable[[int], tuple[int, int, list[int], str]],
    ) -> None:
        self._ring, self._carrier = ring, carrier
        self._fleet: Fleet | None = fleet
        self._rank, self._ranks = rank, ranks
        self._workers = 0  # of the fleet, when this was looked at last
        self._memory_limit, self._named = memory_limit, named
        self._ledger = Ledger(ring.capacity)
        self._events: deque[Callable[[], None]] = deque()  # from other threads
        self._agents: Mapping[int, Agent] = {}  # the fleet's, which change
        self._mine: dict[str, Agent] = {}  # those of this rank
        self._known: dict[str, Agent] = {}  # these, and others that have parcels of it
        self._asked: dict[str, float] = {}  # when to ask lost agents again
        self._received = 0, 0  # tickets, bytes
        self._raised: dict[int, str] = {}  # by ticket: the agent whose indexer has raised
        self._measured = 0.0  # when counts were exported last
        self._alone = time.monotonic()  # since when there is no agent; 0: there is one
        self._patience = SHORT
        self._cause = ""  # why an agent was lost last
        self.failure = failure.Failure()

    # -- on the loop's thread

    def open(self) -> None:
        """Get the agents; whatever this raises is for the caller."""
        assert self._fleet is not None
        self._meter = self._fleet.meter()
        self._agents = self._fleet.attach(self._look_soon)
        self._look_soon()

    def give_up(self, ticket: int) -> None:
        """Free the cells of all tickets before this one at once: they were given up."""
        self._carrier.give_up(ticket)
        self._post(partial(self._forget, ticket))

    def agent_of(self, cell: int) -> str | None:
        """Name the agent that has sent the exception in a cell."""
        return self._raised.pop(self._ring.token(cell) >> 24, None)

    def counted(self, stats: Stats) -> Stats:
        """Add what this has counted."""
        counts = self._ledger.counts
        if self._fleet is not None:
            self._workers = self._fleet.workers
        workers = self._workers
        return replace(
            stats,
            num_workers=workers,
            agents=len(self._ledger.agents),
            parcels=counts.parcels,
            lost=counts.lost,
            hedged=counts.hedged,
            received=counts.bytes,
        )

    def close(self) -> None:
        """Leave the fleet. The ring is closed, so the thread ends."""
        fleet, self._fleet = self._fleet, None  # it refers to the user's worker
        if fleet is not None:
            self._workers = fleet.workers
            fleet.detach(self._look_soon)
        self._agents = {}

    # -- on any thread

    def _post(self, event: Callable[[], None]) -> None:
        """Have something done on the dispatcher's thread."""
        self._events.append(event)
        self._carrier.notify()

    def _look_soon(self) -> None:
        """The fleet has changed."""
        self._post(self._look)

    # -- on the dispatcher's thread

    def run(self) -> None:
        """Send and publish until the ring is closed."""
        carrier, ledger = self._carrier, self._ledger
        while True:
            seen = carrier.notices()
            while self._events:
                self._events.popleft()()
            for agent in ledger.overdue():
                self._ping(agent)
            room = self._room()
            if room:
                ledger.add(carrier.claim(room))
            while (parcel := ledger.send()) is not None:
                self._send(parcel)
            self._ask_again()
            if time.monotonic() - self._measured > LOOK:
                self._measure()
            if not carrier.wait(seen, self._until(room), room > 0):
                self._measure()
                self._mine, self._known = {}, {}  # they hold what the fleet has in a store
                return

    def _measure(self) -> None:
        """Export what was counted."""
        counts = self._ledger.counts
        self._measured = time.monotonic()
        meters = Meters.read([self._ring])
        exported = {
            "batches": meters.batches,
            "loop_waited_seconds": meters.waited,
            "parcels": counts.parcels,
            "parcels_lost": counts.lost,
            "parcels_hedged": counts.hedged,
            "received_bytes": counts.bytes,
        }
        self._meter(exported, len(self._ledger.agents))

    def _until(self, room: int) -> int:
        """Return how long to sleep, in ns."""
        now = time.monotonic()
        longest = LOOK if room or not self._carrier.waiting else NO_ROOM
        times = [self._ledger.due(), *self._asked.values(), now + longest]
        return int(max(0.0, min(times) - now) * 1e9)

    def _room(self) -> int:
        """Return how many tickets may be claimed now: so many that their batches have room."""
        tickets, nbytes = self._received
        cells: int = self._ring.capacity
        if not tickets:  # how large they are is not known yet
            return max(0, FIRST - self._carrier.held)
        if nbytes * cells <= self._memory_limit * tickets:
            return cells
        most = max(1, self._memory_limit * tickets // nbytes)
        return max(0, most - self._ring.depths()[2] - self._carrier.held)

    def _send(self, parcel: Parcel) -> None:
        """Send a parcel to its agent."""
        request = self._carrier.request(parcel.tickets)
        parcel.asked = request.nbytes
        done = partial(self._arrived, parcel)
        self._known[parcel.agent].send(request, done, self._carrier.land)

    def _arrived(self, parcel: Parcel, outcome: Outcome) -> None:
        """Pass on what has become of a parcel; on any thread."""
        self._post(partial(self._count, parcel, outcome))

    def _count(self, parcel: Parcel, outcome: Outcome) -> None:
        """Publish the answer to a parcel, or have its tickets made by others."""
        if isinstance(outcome, Lost):
            if self._ledger.awaits(parcel.number):  # else it was lost with its agent before
                self._lose(parcel.agent, outcome)
        elif isinstance(outcome, Failed):
            error = failure.unpack(outcome.packed)
            failure.annotate(error, f"raised by {self._known[parcel.agent].name}")
            self._fail(error)
        else:
            nbytes, seconds, raised = outline(parcel.tickets, outcome)
            if self._ledger.answered(parcel.number, nbytes, seconds):
                for ticket in raised[: KEPT - len(self._raised)]:
                    self._raised[ticket >> 24] = self._known[parcel.agent].name
                self._carrier.publish(parcel.tickets, outcome)
                tickets, before = self._received
                self._received = tickets + len(parcel.tickets), before + nbytes

    def _forget(self, floor: int) -> None:
        """Forget the tickets before this one."""
        ledger = self._ledger
        ledger.give_up([one for one in ledger.tickets if (one >> 24) - floor < 0])
        self._raised.clear()

    def _fail(self, error: BaseException) -> None:
        """Raise an error in the loop."""
        self.failure.note(error)
        self._ring.notify_all()

    # -- agents

    def _look(self) -> None:
        """Greet new agents of this rank, and part with those that are not its own any more."""
        fleet = self._fleet
        if fleet is not None and fleet.over:
            self._fail(RuntimeError(f"the fleet is over: {fleet.over}"))
        agents = {str(number): agent for number, agent in list(self._agents.items())}
        before = self._mine
        self._mine = {name: agents[name] for name in chosen(self._rank, self._ranks, agents)}
        for name in self._known.keys() - self._mine.keys():
            if name in self._ledger.agents:
                self._ledger.leave(name)
            else:
                self._known.pop(name)
            self._asked.pop(name, None)
        for name in self._mine.keys() - (before.keys() & self._known.keys()):
            self._known[name] = self._mine[name]
            if name in self._ledger.agents:  # it is leaving
                self._ledger.join(name)
            else:
                self._ping(name)

    def _ping(self, name: str) -> None:
        """Ask an agent for a sign of life."""
        agent = self._known.get(name)
        if agent is not None:
            agent.ping(lambda what: self._post(partial(self._pinged, name, what)))

    def _pinged(self, name: str, what: Lost | Failed | None) -> None:
        """Take an agent in, or back, that has given a sign of life."""
        if isinstance(what, Failed):
            self._fail(failure.unpack(what.packed))
        elif isinstance(what, Lost):
            self._lose(name, what)
        elif name in self._ledger.agents:
            self._ledger.pong(name)
        elif name in self._mine:
            self._ledger.join(name)

    def _lose(self, name: str, lost: Lost) -> None:
        """Have what an agent had made by others; ask it again later."""
        agent = self._known.get(name)
        self._cause = f"{agent.name if agent else name} ({lost.cause})"
        try:
            self._ledger.lost(name, self._cause)
        except TicketLost as error:
            epoch, batch, indices, place = self._named(error.ticket & 0xFFFFFF)
            ends = "; ".join(str(loss.cause) for loss in error.losses)
            self._fail(
                WorkerDied(
                    f"{place} was lost with {len(error.losses)} agents: {ends}",
                    epoch=epoch,
                    batch=batch,
                    indices=indices,
                )
            )
        if lost.final:
            self._known.pop(name, None)
            self._asked.pop(name, None)
        elif name in self._mine:
            self._asked[name] = time.monotonic() + AGAIN

    def _ask_again(self) -> None:
        """Ask lost agents for signs of life, and log if there is no agent for long."""
        now = time.monotonic()
        for name in [name for name, when in self._asked.items() if when <= now]:
            del self._asked[name]
            self._ping(name)
        fleet = self._fleet
        if self._ledger.agents:
            self._alone = 0.0
        elif not self._alone:
            self._alone, self._patience = now, SHORT
        if self._alone and now - self._alone > self._patience and fleet is not None:
            level = logging.INFO if now - self._alone < LONG else logging.WARNING
            tell(
                level,
                "no agent is there after %.0f s: %s%s",
                now - self._alone,
                fleet.waits_for,
                f"; lost last: {self._cause}" if self._cause else "",
            )
            self._patience = max(LONG, 2 * (now - self._alone))
