"""Which tickets are in which parcel, at which agent: the trainer's ledger.

It is bookkeeping alone: no thread, no network, a clock that is given. One thread, the carrier's,
drives it::

    while carrier.wait(seen, until(ledger.due())):
        seen = carrier.notices()
        for parcel, answer in arrived():           # and events of agents, in the order they came
            if ledger.answered(parcel.number, answer.nbytes, answer.seconds):
                carrier.publish(parcel.tickets, answer)    # late tickets are dropped there, too
        for agent, cause in failed():
            ledger.lost(agent, cause)              # it comes back by `join`, when it answers again
        for agent in answered_pings():
            ledger.pong(agent)
        for agent in ledger.overdue():
            ping(agent)
        ledger.add(carrier.claim(buffer))
        while (parcel := ledger.send()) is not None:
            call(parcel.agent, parcel.number, carrier.request(parcel.tickets))

An epoch that is over is given up before the next claim: `ledger.give_up()`.

What holds at each moment:

- Each ticket that was added is answered, waiting, or in a parcel at an agent that is in the ledger.
- `answered` counts a ticket once. The answer to a parcel of an agent that was lost counts nothing.
- What was lost or hedged is sent before what is new, the first in order first.

What is new is kept as lists, and looked at parcel by parcel. A ticket has a state of its own only
from the moment on when its parcel is lost, hedged or given up.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

__all__ = ["Counts", "Ledger", "Loss", "Parcel", "TicketLost", "chosen"]

AHEAD = 2  # parcels that an agent has beside the one in work
PARCEL_SECONDS = 0.020  # a parcel grows until it takes this long to make
PARCEL_BYTES = 32_000_000  # or has so many
TURNS = 64  # parcels of which the median turn-round is taken
WORKS = 16  # parcels of which the median work on a ticket is taken
LATE = 4.0  # times that median
LEAST_LATE = 0.1  # seconds; also how long the answer to a ping is waited for
HEDGED = 0.05  # share of the parcels of the last minute that may be hedged
TRIES = 3  # agents that may be lost with the same ticket
FEWEST, SHARES = 6, 3  # agents of a rank, of many: so many, or so many times its share


def chosen(rank: int, ranks: int, agents: Collection[str]) -> list[str]:
    """Choose agents for a rank: each rank has others, and keeps those that stay when some go.

    Six, or three times its share of them, with the highest hashes of rank and name (rendezvous
    hashing): each rank has few connections, all agents have about as many, and an agent more or
    less concerns few ranks.
    """

    def weight(agent: str) -> bytes:
        return blake2b(f"{rank}/{agent}".encode(), digest_size=8).digest()

    return heapq.nlargest(max(FEWEST, -(-SHARES * len(agents) // ranks)), agents, key=weight)


class Loss(NamedTuple):
    """An agent that was lost with a ticket."""

    agent: str
    cause: object


class TicketLost(Exception):
    """A ticket was lost with `TRIES` agents: it may be what ends them.

    Attributes
    ----------
    ticket : int
        The first in order, if it holds for several.
    losses : tuple of Loss
        The agents, in the order in which they were lost.
    """

    def __init__(self, ticket: int, losses: tuple[Loss, ...]) -> None:
        names = ", ".join(loss.agent for loss in losses)
        super().__init__(f"ticket {ticket} was lost with {len(losses)} agents: {names}")
        self.ticket, self.losses = ticket, losses


@dataclass(eq=False)
class Parcel:
    """Tickets that are sent with one call."""

    number: int
    agent: str
    tickets: list[int]
    sent: float
    left: int  # tickets that are not answered, by this parcel or another one
    first: int | None  # place in order of the first one; None: each has a state of its own
    asked: int = 0  # bytes of the request, once it is sent


@dataclass
class Counts:
    """For `stats()`. `bytes` are all that came back, with late answers."""

    parcels: int = 0
    lost: int = 0
    hedged: int = 0
    late: int = 0  # answers that counted nothing
    bytes: int = 0


@dataclass(eq=False)
class _Ticket:
    """A ticket that is not answered, and whose parcel was lost, hedged or given up."""

    order: int
    parcels: list[Parcel] = field(default_factory=list)
    losses: tuple[Loss, ...] = ()

    @property
    def tries(self) -> int:
        """How many agents were lost with it, or are at it."""
        return len(self.losses) + len(self.parcels)


@dataclass(eq=False)
class _Agent:
    """An agent that can be sent parcels, or has some."""

    name: str
    parcels: dict[int, Parcel] = field(default_factory=dict)
    last: int = 0  # its newest parcel
    heard: float = -math.inf  # when it last answered a ping
    pinged: float | None = None  # since when an answer to a ping is awaited: it gets nothing new
    is_hedged: bool = False  # all it has was given to others as well
    is_reserved: bool = False  # it has a ticket that goes alone
    is_leaving: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it may get parcels."""
        return self.pinged is None and not self.is_reserved and not self.is_leaving

    def oldest(self) -> float:
        """Since when the oldest parcel that is awaited is under way; infinite: there is none."""
        for parcel in self.parcels.values():  # in the order in which they were sent
            if parcel.left:
                return max(parcel.sent, self.heard)
        return math.inf


class Ledger:
    """Decides which agent gets which tickets next, and counts the answers.

    Parameters
    ----------
    buffer : int
        Tickets that the trainer can have under way at most.
    hedge : bool
        Whether an agent that is late has its tickets made by others as well.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        buffer: int,
        *,
        hedge: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer, self._hedge, self._clock = buffer, hedge, clock
        self._agents: dict[str, _Agent] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._fresh: deque[tuple[float, list[int]]] = deque()  # when they were added
        self._waiting = 0  # tickets in these lists
        self._again: list[tuple[int, int]] = []  # a heap: order, ticket
        self._alone: list[tuple[int, int]] = []  # the same, of tickets that go alone
        self._parcels: dict[int, Parcel] = {}
        self._numbers = 0  # parcels so far
        self._orders = 0  # tickets that were sent for the first time so far
        self._size = 1  # tickets of a parcel, as far as they have grown
        self._turns, self._works = _Median(TURNS), _Median(WORKS)
        self._minute = _Minute()
        self.counts = Counts()

    # -- agents

    @property
    def agents(self) -> dict[str, int]:
        """The agents, with how many parcels each has."""
        return {name: len(agent.parcels) for name, agent in self._agents.items()}

    def join(self, agent: str) -> None:
        """Take an agent in, again if it was lost; it must be able to answer."""
        there = self._agents.get(agent)
        if there is None:
            self._agents[agent] = _Agent(agent)
        elif there.is_leaving:
            there.is_leaving = False
        else:
            raise ValueError(f"agent {agent} is in the ledger already")

    def leave(self, agent: str) -> None:
        """Give an agent nothing new. It stays in the ledger until it has answered all it has."""
        there = self._agents[agent]
        there.is_leaving = True
        self._forget_if_done(there)

    def lost(self, agent: str, cause: object) -> None:
        """Take an agent out: all it has is sent again.

        Raises
        ------
        TicketLost
            It is the third agent that was lost with the same ticket. That ticket is not sent again.
        """
        there = self._agents.pop(agent, None)
        if there is None:
            return  # several calls fail when an agent dies
        doomed: dict[int, tuple[int, tuple[Loss, ...]]] = {}
        for parcel in there.parcels.values():
            del self._parcels[parcel.number]
            self.counts.lost += 1
            self._divide(parcel)
            for number in parcel.tickets:
                ticket = self._tickets.get(number)
                if ticket is None:
                    continue
                ticket.parcels.remove(parcel)
                ticket.losses += (Loss(agent, cause),)
                if len(ticket.losses) >= TRIES:
                    doomed[ticket.order] = number, ticket.losses
                    self._settle(number)
                else:
                    self._send_again(number)
        if doomed:
            raise TicketLost(*doomed[min(doomed)])

    # -- tickets

    @property
    def size(self) -> int:
        """Tickets of a parcel: no more than half of an agent's share of the buffer."""
        return min(self._size, max(1, self._buffer // (2 * max(1, len(self._agents)))))

    @property
    def tickets(self) -> list[int]:
        """Those that are not answered, the first in order first."""
        found = {ticket.order: number for number, ticket in self._tickets.items()}
        for parcel in self._parcels.values():
            if parcel.first is not None:
                found.update(enumerate(parcel.tickets, parcel.first))
        return [found[order] for order in sorted(found)] + [
            number for _, tickets in self._fresh for number in tickets
        ]

    def add(self, tickets: Iterable[int]) -> None:
        """Enter tickets, in order."""
        entered = list(tickets)
        if entered:
            self._fresh.append((self._clock(), entered))
            self._waiting += len(entered)

    def give_up(self, tickets: Iterable[int] | None = None) -> None:
        """Forget tickets, all if none are named: their epoch is over; the next begins.

        What is under way counts as the agents' work until they answer; the answers count nothing.
        """
        over = set(self.tickets if tickets is None else tickets)
        for parcel in self._parcels.values():
            if not over.isdisjoint(parcel.tickets):
                self._divide(parcel)
        for number in over:
            self._settle(number)
        fresh, self._fresh, self._waiting = self._fresh, deque(), 0
        for added, listed in fresh:
            kept = [number for number in listed if number not in over]
            if kept:
                self._fresh.append((added, kept))
                self._waiting += len(kept)

    def send(self) -> Parcel | None:
        """Return a parcel that is to be sent now; None: there is none."""
        if not (self._fresh or self._again or self._alone):
            return None
        agent, alone = self._next_agent()
        if agent is None:
            return None
        if alone:
            agent.is_reserved = True
            return self._parcel(agent, [heapq.heappop(self._alone)[1]])
        size = self.size
        tickets: list[int] = []
        while len(tickets) < size and self._waits(self._again):
            number = heapq.heappop(self._again)[1]
            if tickets[-1:] != [number]:  # it may be there twice
                tickets.append(number)
        if tickets:
            return self._parcel(agent, tickets)
        if self._waiting >= size or self._flush_at(agent) <= self._clock():
            return self._parcel(agent, self._take(size), self._orders)
        return None

    def awaits(self, number: int) -> bool:
        """Whether an answer to a parcel would count: its agent was not lost since it was sent."""
        return number in self._parcels

    def answered(self, number: int, nbytes: int, seconds: float) -> list[int]:
        """Count the answer to a parcel.

        Parameters
        ----------
        number : int
            That of the parcel.
        nbytes : int
            The size of the answer.
        seconds : float
            How long the agent worked on it.

        Returns
        -------
        list of int
            The tickets that it is the first answer to.
        """
        self.counts.bytes += nbytes
        parcel = self._parcels.pop(number, None)
        if parcel is None:  # of an agent that was lost
            self.counts.late += 1
            return []
        agent = self._agents[parcel.agent]
        del agent.parcels[number]
        agent.is_reserved &= bool(agent.parcels)
        self._turns.add(self._clock() - parcel.sent)
        self._works.add(seconds / len(parcel.tickets))
        if len(parcel.tickets) == self.size:
            size = self.size
            work = max(size * self._works.median, 1e-9)
            factor = min(PARCEL_SECONDS / work, PARCEL_BYTES / max(nbytes, parcel.asked, 1))
            self._size = max(1, int(size * min(2.0, max(0.5, factor))))
        if parcel.first is None:
            counted = [ticket for ticket in parcel.tickets if self._settle(ticket)]
        else:
            counted, parcel.left = parcel.tickets, 0
        self.counts.late += not counted
        self._forget_if_done(agent)
        return counted

    # -- what is late

    def due(self) -> float:
        """When `send` or `overdue` has something to do, if nothing happens before; or infinity."""
        times = [math.inf]
        agent = self._next_agent()[0] if self._fresh else None
        if agent is not None:
            times.append(self._flush_at(agent))
        if self._hedge:
            patience = self._patience()
            for agent in self._agents.values():
                if agent.pinged is None:
                    times.append(agent.oldest() + patience)
                elif not agent.is_hedged and self._is_other_open(agent):
                    times.append(agent.pinged + LEAST_LATE)
        return min(times)

    def overdue(self) -> list[str]:
        """Look for agents that are late, and return those that are to be pinged.

        One that is late becomes a suspect: it gets nothing new until `pong`. What it has goes to
        others as well: at once while that is in the budget, else when the ping is not answered.
        """
        found: list[str] = []
        if not self._hedge:
            return found
        now, patience = self._clock(), self._patience()
        for agent in self._agents.values():
            if agent.pinged is None and agent.oldest() + patience <= now:
                agent.pinged = now
                found.append(agent.name)
                awaited = sum(parcel.left > 0 for parcel in agent.parcels.values())
                is_allowed = self._is_other_open(agent) and self._minute.hedge(now, awaited)
            elif agent.pinged is not None and agent.pinged + LEAST_LATE <= now:
                is_allowed = not agent.is_hedged and self._is_other_open(agent)
            else:
                continue
            if is_allowed:
                self._hedge_all(agent)
        return found

    def pong(self, agent: str) -> None:
        """Note that an agent has answered a ping: what it has is awaited from now on."""
        there = self._agents.get(agent)
        if there is not None:
            there.pinged, there.is_hedged, there.heard = None, False, self._clock()

    # -- inside

    def _next_agent(self) -> tuple[_Agent | None, bool]:
        """Find who takes the next parcel, and whether that is a ticket that goes alone.

        It is the agent with the fewest parcels; of several, the one that waits longest. While a
        ticket waits that goes alone, that agent gets nothing else.
        """
        free = [one for one in self._agents.values() if one.is_open and len(one.parcels) <= AHEAD]
        free.sort(key=lambda agent: (len(agent.parcels), agent.last))
        if free and self._waits(self._alone):
            if not free[0].parcels:
                return free[0], True
            del free[0]
        return (free[0] if free else None), False

    def _is_other_open(self, agent: _Agent) -> bool:
        """Whether an agent is there that could take over."""
        return any(other.is_open for other in self._agents.values() if other is not agent)

    def _take(self, most: int) -> list[int]:
        """Take out what was added first."""
        taken: list[int] = []
        while self._fresh and len(taken) < most:
            _, tickets = self._fresh[0]
            count = min(most - len(taken), len(tickets))
            taken += tickets[:count]
            del tickets[:count]
            if not tickets:
                self._fresh.popleft()
        self._waiting -= len(taken)
        return taken

    def _parcel(self, agent: _Agent, tickets: list[int], first: int | None = None) -> Parcel:
        """Make a parcel and enter it; `first`: the tickets are new."""
        self._numbers += 1
        parcel = Parcel(self._numbers, agent.name, tickets, self._clock(), len(tickets), first)
        self._parcels[parcel.number] = agent.parcels[parcel.number] = parcel
        agent.last = parcel.number
        if first is None:
            for number in tickets:
                self._tickets[number].parcels.append(parcel)
        else:
            self._orders += len(tickets)
        self.counts.parcels += 1
        self._minute.sent(parcel.sent)
        return parcel

    def _divide(self, parcel: Parcel) -> None:
        """Give each ticket of a parcel a state of its own, unless that was done."""
        if parcel.first is not None:
            for order, number in enumerate(parcel.tickets, parcel.first):
                self._tickets[number] = _Ticket(order, [parcel])
            parcel.first = None

    def _settle(self, number: int) -> bool:
        """Take a ticket out; False: it is out already."""
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return False
        for parcel in ticket.parcels:
            parcel.left -= 1
        return True

    def _forget_if_done(self, agent: _Agent) -> None:
        """Take an agent out that leaves, if it has nothing any more."""
        if agent.is_leaving and not agent.parcels:
            del self._agents[agent.name]

    # -- tickets that are sent again

    def _is_needed(self, number: int) -> bool:
        """Whether a ticket is neither answered nor at an agent that can be relied on.

        Nor is it sent to a fourth agent while three do not answer: they may be dead, because of it.
        """
        ticket = self._tickets.get(number)
        return (
            ticket is not None
            and ticket.tries < TRIES
            and all(self._agents[parcel.agent].is_hedged for parcel in ticket.parcels)
        )

    def _queue_of(self, number: int) -> list[tuple[int, int]]:
        """Return where a ticket waits to be sent again.

        To its last agent it goes alone, one that has nothing else: if that is lost, too, it is the
        ticket that did it and none of its neighbours.
        """
        many = self._tickets[number].tries == TRIES - 1
        return self._alone if many else self._again

    def _send_again(self, number: int) -> None:
        """Let a ticket wait to be sent, if it is needed."""
        if self._is_needed(number):
            heapq.heappush(self._queue_of(number), (self._tickets[number].order, number))

    def _waits(self, queue: list[tuple[int, int]]) -> bool:
        """Whether a ticket waits there, after those are dropped that do not any more."""
        while queue:
            number = queue[0][1]
            if self._is_needed(number) and self._queue_of(number) is queue:
                return True
            heapq.heappop(queue)
        return False

    # -- times

    def _flush_at(self, agent: _Agent) -> float:
        """When an agent gets tickets that do not fill a parcel; never while it has others."""
        if not self._fresh or len(agent.parcels) > 1:
            return math.inf
        return self._fresh[0][0] + PARCEL_SECONDS

    def _patience(self) -> float:
        """How long an answer may take; infinitely long before the first."""
        return max(LEAST_LATE, LATE * self._turns.median)

    def _hedge_all(self, agent: _Agent) -> None:
        """Give all that an agent has to others as well."""
        agent.is_hedged = True
        for parcel in agent.parcels.values():
            self.counts.hedged += parcel.left > 0
            self._divide(parcel)
            for number in parcel.tickets:
                self._send_again(number)


class _Median:
    """The median of the last times; infinite: there are none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Count one."""
        self._last.append(seconds)
        insort(self._sorted, seconds)
        if len(self._last) > self._count:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    @property
    def median(self) -> float:
        """The upper one of two."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else math.inf


class _Minute:
    """Parcels that were sent and hedged in the last minute, by the second."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # second, sent, hedged
        self._sent = self._hedged = 0

    def sent(self, now: float) -> None:
        """Count a parcel."""
        self._second(now)[1] += 1
        self._sent += 1

    def hedge(self, now: float, parcels: int) -> bool:
        """Count parcels that are hedged, if the budget has room for them."""
        second = self._second(now)
        if self._hedged + parcels > HEDGED * self._sent:
            return False
        second[2] += parcels
        self._hedged += parcels
        return True

    def _second(self, now: float) -> list[int]:
        """Return the counts of this second; drop those of a minute ago."""
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append([int(now), 0, 0])
        while self._seconds[0][0] <= int(now) - 60:
            _, sent, hedged = self._seconds.popleft()
            self._sent -= sent
            self._hedged -= hedged
        return self._seconds[-1]
