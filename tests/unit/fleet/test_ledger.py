"""The trainer's ledger, driven as its carrier drives it, with agents that die, stop and are slow.

Time is simulated: a drive goes from event to event. Each is random, from a seed, and the same each
time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import Counter

import pytest

from cseq.fleet.ledger import Ledger, TicketLost, chosen

PING = 0.001


class FakeAgent:
    """An agent that makes one parcel after another."""

    def __init__(self, name):
        self.name = name
        self.free_at = 0.0
        self.stopped_until = 0.0
        self.life = 0  # how often it has died
        self.is_up = True


class Drive:
    """A trainer's carrier with its ledger, and agents; `now` is the simulated time."""

    def __init__(self, seed, agents=4, buffer=64, tickets=3000, **options):
        self.random = random.Random(seed)
        self.now = 1000.0
        self.ledger = Ledger(buffer, clock=lambda: self.now, **options)
        self.buffer, self.end = buffer, tickets
        self.agents = {f"agent {number}": FakeAgent(f"agent {number}") for number in range(agents)}
        for name in self.agents:
            self.ledger.join(name)
        self.events = []
        self.order = itertools.count()
        self.posted = 0
        self.answers = Counter()  # how often each ticket was answered
        self.parcels = {}  # those that may still count
        self.sent_at = []
        self.hedges = []  # when, how many, with an answered ping
        self.killer = None  # a ticket that ends each agent that makes it
        self.slow = lambda now: 1.0
        self.seconds = lambda tickets: 0.001 * len(tickets)

    def at(self, delay, what, *arguments):
        heapq.heappush(self.events, (self.now + delay, next(self.order), what, arguments))

    # -- what happens to agents

    def call(self, parcel):
        """Make a parcel after those before it, later if the agent is stopped."""
        agent = self.agents[parcel.agent]
        if not agent.is_up:
            return
        seconds = self.seconds(parcel.tickets) * self.slow(self.now) * self.random.uniform(0.8, 1.3)
        start = max(self.now, agent.free_at, agent.stopped_until)
        agent.free_at = start + seconds
        if self.killer in parcel.tickets:
            self.at(agent.free_at - self.now, self.die, agent.name, agent.life)
        else:
            self.at(agent.free_at - self.now, self.answer, parcel, agent.life, seconds)

    def answer(self, parcel, life, seconds):
        agent = self.agents[parcel.agent]
        if agent.life != life:
            return
        if agent.stopped_until > self.now:
            delay = agent.stopped_until - self.now + self.random.random() * 0.01
            self.at(delay, self.answer, parcel, life, seconds)
            return
        counted = self.ledger.answered(parcel.number, 1000 * len(parcel.tickets), seconds)
        assert not counted or parcel.number in self.parcels
        assert set(counted) <= set(parcel.tickets)
        self.parcels.pop(parcel.number, None)
        self.answers.update(counted)

    def die(self, name, life=None):
        """Kill an agent; the trainer hears of it later, and it is back later still."""
        agent = self.agents[name]
        if not agent.is_up or life not in (None, agent.life):
            return
        agent.is_up, agent.life = False, agent.life + 1
        self.at(self.random.uniform(0.01, 2.0), self.tell, name)

    def tell(self, name):
        self.parcels = {n: parcel for n, parcel in self.parcels.items() if parcel.agent != name}
        self.at(self.random.uniform(0.1, 3.0), self.restart, name)
        self.ledger.lost(name, "killed")

    def restart(self, name):
        agent = self.agents[name]
        agent.is_up, agent.free_at, agent.stopped_until = True, self.now, 0.0
        self.ledger.join(name)

    def stop(self, name, seconds):
        self.agents[name].stopped_until = self.now + seconds

    def ping(self, name, life=None):
        agent = self.agents[name]
        life = agent.life if life is None else life
        if agent.is_up and agent.life == life:
            late = max(0.0, agent.stopped_until - self.now)
            if late:
                self.at(late, self.ping, name, life)
            else:
                self.ledger.pong(name)

    # -- the carrier's loop

    def step(self):
        """What the carrier does when it is awake."""
        before = self.ledger.counts.hedged
        for name in self.ledger.overdue():
            self.at(PING, self.ping, name)
        if self.ledger.counts.hedged > before:
            self.hedges.append((self.now, self.ledger.counts.hedged - before))
        under_way = self.posted - sum(self.answers.values())
        count = min(self.buffer - under_way, self.end - self.posted)
        self.ledger.add(range(self.posted, self.posted + count))
        self.posted += count
        while (parcel := self.ledger.send()) is not None:
            assert 1 <= len(parcel.tickets) <= self.ledger.size
            assert not self.answers.keys() & set(parcel.tickets)
            assert self.ledger.agents[parcel.agent] <= 3
            self.parcels[parcel.number] = parcel
            self.sent_at.append(self.now)
            self.call(parcel)

    def run(self):
        """Go on until each ticket is answered."""
        self.step()
        while sum(self.answers.values()) < self.end:
            due = self.ledger.due()
            assert due > self.now, "the carrier does not rest"
            if self.events and self.events[0][0] <= due:
                self.now, _, what, arguments = heapq.heappop(self.events)
                what(*arguments)
            else:
                assert due < float("inf"), "the carrier sleeps for ever"
                self.now = due
            self.step()
        assert self.answers == dict.fromkeys(range(self.end), 1)
        assert self.ledger.tickets == []


@pytest.mark.parametrize("seed", range(12))
def test_each_ticket_is_answered_once(seed):
    """Agents die, stop and come back at random; what was lost is made again, late answers not."""
    drive = Drive(seed, agents=2 + seed % 4, tickets=12_000)
    drive.seconds = lambda tickets: 0.004 * len(tickets)
    names = sorted(drive.agents)
    for wave in range(4):  # in between, all are up for a while: no ticket is lost three times
        for name in drive.random.sample(names, drive.random.randint(1, len(names))):
            dies = wave == 1 or (wave > 1 and drive.random.random() < 0.5)
            seconds = drive.random.uniform(0.5, 3)
            when = 0.3 + 6 * wave + drive.random.uniform(0, 0.3) * (wave > 0)
            drive.at(when, *((drive.die, name) if dies else (drive.stop, name, seconds)))
            if wave == 0:
                break
    drive.run()
    assert drive.ledger.counts.lost > 0
    assert drive.ledger.counts.hedged > 0


@pytest.mark.parametrize("seed", range(4))
def test_without_hedges_what_is_lost_is_sent_again(seed):
    """Nothing is made twice while its agent lives."""
    drive = Drive(seed, tickets=6000, hedge=False)
    for name in drive.agents:
        drive.at(drive.random.uniform(0, 1), drive.die, name)
    drive.run()
    assert drive.ledger.counts.hedged == 0
    assert drive.ledger.counts.lost > 0
    assert drive.ledger.counts.late == 0


@pytest.mark.parametrize("seed", range(6))
def test_agents_join_and_leave(seed):
    """One that leaves answers what it has and gets nothing new; one that joins gets parcels."""
    drive = Drive(seed, agents=3)
    made_by = Counter()

    def leave():
        drive.ledger.leave("agent 0")
        made_by.update(drive.ledger.agents)

    def join():
        drive.agents["new"] = FakeAgent("new")
        drive.ledger.join("new")

    drive.at(0.1, leave)
    drive.at(0.2, join)
    drive.at(0.3, lambda: made_by.update(later=drive.ledger.agents["new"]))
    drive.run()
    assert "agent 0" not in drive.ledger.agents
    assert made_by["agent 0"] > 0
    assert made_by["later"] > 0
    assert drive.ledger.counts.lost == 0


def within_budget(drive):
    """Whether hedges were at most 5 % of the parcels of the minute before, by whole seconds."""
    hedged = Counter()
    for when, count in drive.hedges:
        hedged[int(when)] += count
        minute = range(int(when) - 59, int(when) + 1)
        sent = sum(1 for at in drive.sent_at if at <= when and int(at) in minute)
        if sum(hedged[second] for second in minute) > 0.05 * sent:
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_hedges_stay_in_budget_when_all_is_late(seed):
    """A store that is slow for a while makes all agents late at once; they answer pings."""
    drive = Drive(seed, agents=6, buffer=256, tickets=20_000)
    drive.slow = lambda now: 60.0 if 1001 < now < 1003 else 1.0
    drive.run()
    assert drive.ledger.counts.hedged > 0
    assert within_budget(drive)


def test_no_hedges_while_nothing_is_late():
    """Parcels of 20 ms that vary by a third are never made twice."""
    drive = Drive(1, tickets=20_000, buffer=256)
    drive.run()
    assert drive.ledger.counts.hedged == 0


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_an_agent_that_is_stopped_delays_little(after):
    """Without a ping's answer no budget is needed, even at the start, when there is none."""
    drive = Drive(3, agents=3, tickets=3000)
    drive.at(0.05 + after, drive.stop, "agent 1", 10**6)
    answered = []
    original = drive.answers.update
    drive.answers.update = lambda tickets: (
        original(tickets),
        answered.append(drive.now) if tickets else None,
    )
    drive.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(answered)]
    assert max(gaps) < 0.3
    assert drive.ledger.agents["agent 1"] > 0  # it still owes its answers
    assert drive.ledger.counts.lost == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_ticket_that_ends_agents_is_named(seed):
    """After three agents, the error names this ticket and no neighbour, with the causes."""
    drive = Drive(seed, agents=4)
    drive.killer = 400 + seed
    with pytest.raises(TicketLost) as caught:
        drive.run()
    assert caught.value.ticket == drive.killer
    assert [loss.cause for loss in caught.value.losses] == ["killed"] * 3


def test_what_is_given_up_counts_nothing():
    """Answers to an epoch that is over count nothing; its parcels are still the agents' work."""
    drive = Drive(5, tickets=100)
    drive.step()
    parcels = list(drive.parcels.values())
    drive.ledger.give_up()
    assert drive.ledger.tickets == []
    assert sum(drive.ledger.agents.values()) == len(parcels)
    assert drive.ledger.send() is None
    assert drive.ledger.due() == float("inf")
    assert [drive.ledger.answered(parcel.number, 8, 0.001) for parcel in parcels] == [
        [] for _ in parcels
    ]
    assert drive.ledger.counts.late == len(parcels)
    assert sum(drive.ledger.agents.values()) == 0


def test_one_of_two_epochs_is_given_up():
    """Tickets of the next epoch, added before the old ones are given up, are sent."""
    ledger = Ledger(8, clock=lambda: 0.0)
    ledger.join("a")
    ledger.add(range(6))
    ledger.give_up(range(4))
    assert ledger.tickets == [4, 5]
    assert [ledger.send().tickets for _ in range(2)] == [[4], [5]]


def one_agent(buffer=10**6, **options):
    """A ledger with one agent and a clock that is set by hand."""
    clock = [0.0]
    ledger = Ledger(buffer, clock=lambda: clock[0], **options)
    ledger.join("a")
    ledger.add(range(min(buffer, 50_000)))
    return ledger, clock


def sizes(ledger, seconds, nbytes, count=9):
    """The sizes of parcels that take so long, and so many bytes, a ticket."""
    found = []
    for _ in range(count):
        parcel = ledger.send()
        found.append(len(parcel.tickets))
        ledger.answered(parcel.number, nbytes * found[-1], seconds * found[-1])
    return found


def test_parcels_grow_until_they_take_long_enough():
    """They double from one ticket on, up to 20 ms, 32 MB or a half of the buffer, and shrink.

    What decides is the median, and an epoch does not begin anew.
    """
    assert sizes(one_agent()[0], 0.0001, 8) == [1, 2, 4, 8, 16, 32, 64, 128, 200]
    assert sizes(one_agent()[0], 0.0001, 4_800_000) == [1, 2, 4, 6, 6, 6, 6, 6, 6]
    assert sizes(one_agent()[0], 0.5, 8, 3) == [1, 1, 1]
    assert sizes(one_agent(buffer=20)[0], 0.0001, 8, 4) == [1, 2, 4, 8]
    ledger, _ = one_agent()
    assert sizes(ledger, 0.0001, 8)[-1] == 200
    assert sizes(ledger, 1.0, 8, 7) == [200] * 7
    assert sizes(ledger, 0.001, 8, 5) == [200, 100, 50, 25, 20]
    ledger.give_up()
    ledger.add(range(50_000, 60_000))
    assert sizes(ledger, 0.001, 8, 1) == [20]


def test_what_is_asked_for_counts_as_what_is_answered():
    """Requests with many indices take as long on their way as answers with many bytes."""
    ledger, _ = one_agent()
    for _ in range(9):
        parcel = ledger.send()
        parcel.asked = 4_800_000 * len(parcel.tickets)
        ledger.answered(parcel.number, 8 * len(parcel.tickets), 0.0001 * len(parcel.tickets))
    assert ledger.size == 6


def test_the_buffer_is_shared_by_the_agents():
    """A parcel has at most a half of an agent's share."""
    ledger, _ = one_agent(buffer=40)
    for name in "bcde":
        ledger.join(name)
    assert max(sizes(ledger, 0.0001, 8, 8)) == 4


def test_what_does_not_fill_a_parcel_waits_a_little():
    """Few are sent after 20 ms, so that a slow loop costs few calls; not to a busy agent."""
    ledger, clock = one_agent(hedge=False)
    sizes(ledger, 0.0001, 8, 3)
    ledger.give_up()
    parcels = []
    for number in range(2):
        ledger.add([10**6 + number])
        assert ledger.send() is None
        assert ledger.due() == pytest.approx(clock[0] + 0.020)
        clock[0] = ledger.due()
        parcels.append(ledger.send())
        assert parcels[-1].tickets == [10**6 + number]
    ledger.add([10**6 + 2])
    clock[0] += 1.0
    assert ledger.send() is None
    assert ledger.due() == math.inf
    ledger.answered(parcels[0].number, 8, 0.001)
    assert ledger.send().tickets == [10**6 + 2]


def test_the_agent_with_the_fewest_parcels_is_next():
    """Each gets one in turn, three at most; what comes back first gets the next."""
    ledger, _ = one_agent()
    ledger.join("b")
    sent = [ledger.send() for _ in range(6)]
    assert [parcel.agent for parcel in sent] == ["a", "b"] * 3
    assert ledger.send() is None
    ledger.answered(sent[3].number, 8, 1.0)
    assert ledger.send().agent == "b"


def test_what_was_lost_comes_first_in_order():
    """Before what is new, in the order of the epoch; a second death has nothing to add."""
    ledger, _ = one_agent()
    ledger.join("b")
    sent = [ledger.send() for _ in range(6)]
    ledger.answered(sent[1].number, 8, 1.0)
    ledger.lost("a", "killed")
    ledger.lost("a", "killed")
    assert ledger.send().tickets == [0]
    ledger.answered(sent[3].number, 8, 1.0)
    assert ledger.send().tickets == [2]
    assert ledger.send() is None
    ledger.join("a")
    assert [ledger.send().tickets for _ in range(3)] == [[4], [6], [7]]


def test_an_agent_joins_once():
    """A second one of the same name is an error of the caller."""
    ledger, _ = one_agent()
    with pytest.raises(ValueError, match="agent a is in the ledger already"):
        ledger.join("a")


def test_ranks_choose_agents_evenly():
    """Each rank has six of 100; an agent that goes changes the choice of its own ranks alone.

    With fewer ranks each has three times its share; one, and ranks of few agents, have all.
    """
    agents = [f"agent {number}" for number in range(100)]
    choices = {rank: chosen(rank, 250, agents) for rank in range(250)}
    load = Counter(itertools.chain.from_iterable(choices.values()))
    assert all(len(set(choice)) == 6 for choice in choices.values())
    assert 3 <= min(load.values()) <= max(load.values()) <= 35
    for rank, choice in choices.items():
        after = chosen(rank, 250, agents[1:])
        assert len(set(choice) - set(after)) == (agents[0] in choice)
    assert [len(chosen(1, ranks, agents)) for ranks in (1, 2, 4, 10, 50, 60)] == [
        *(100, 100, 75, 30, 6, 6)
    ]
    assert sorted(chosen(7, 250, agents[:6])) == agents[:6]


def steps(size):
    """Count the steps of the interpreter for one more parcel of `size` tickets."""
    ledger, clock = one_agent(buffer=2 * size)
    numbers = itertools.count(2 * size)
    while ledger.size < size or ledger.tickets:
        parcel = ledger.send()
        if parcel is not None:
            ledger.answered(parcel.number, 8, 0.020 * len(parcel.tickets) / size)
        elif ledger.size < size:
            ledger.add(itertools.islice(numbers, size))
        else:
            clock[0] = ledger.due()
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    tickets = list(itertools.islice(numbers, size))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ledger.add(tickets)
        parcel = ledger.send()
        ledger.due()
        ledger.overdue()
        answered = ledger.answered(parcel.number, 8, 0.020)
    finally:
        sys.settrace(before)
    assert answered == parcel.tickets == tickets
    return counted


def test_an_ordinary_parcel_costs_as_much_as_a_ticket():
    """No step of Python is done ticket by ticket, unless one is lost or hedged."""
    assert 0 < steps(256) == steps(16)


def test_what_is_hedged_and_lost_in_part_counts_once():
    """Of a parcel that was divided, each ticket counts with the first answer that has it."""
    ledger, clock = one_agent(buffer=40)
    sizes(ledger, 0.0001, 8, 4)
    for name in "bc":
        ledger.join(name)
    first = [ledger.send() for _ in range(3)]
    assert [len(parcel.tickets) for parcel in first] == [6, 6, 6]
    of = {parcel.agent: parcel for parcel in first}
    clock[0] = 1.0
    assert ledger.overdue() == ["a", "b", "c"]
    clock[0] = 1.05
    ledger.pong("b")
    clock[0] = 1.12
    ledger.overdue()  # a has not answered the ping, and is hedged
    ledger.lost("c", "killed")
    again = ledger.send()
    assert again.agent == "b"
    lost = [*of["a"].tickets, *of["c"].tickets]
    assert again.tickets == sorted(lost)[: ledger.size]
    before = ledger.tickets
    assert before == sorted(before)
    counted = ledger.answered(again.number, 8, 0.001)
    assert counted == again.tickets
    rest = [ticket for ticket in of["a"].tickets if ticket not in counted]
    assert ledger.answered(of["a"].number, 8, 0.001) == rest
    assert set(before) - set(ledger.tickets) == {*counted, *rest}


def late_ledger(names):
    """A ledger whose agents have a ticket each, 0, 1, …, sent at 0; they are late from 0.1 on."""
    clock = [0.0]
    ledger = Ledger(1000, clock=lambda: clock[0])
    ledger.join(names[0])
    ledger.add([1000])
    ledger.answered(ledger.send().number, 8, 1.0)  # slow: parcels stay at one ticket
    for name in names[1:]:
        ledger.join(name)
    ledger.add(range(100))
    sent = {(parcel := ledger.send()).agent: parcel for _ in names}
    for _ in range(2 * len(names)):  # and two more
        ledger.send()
    return ledger, clock, sent


def test_what_is_answered_for_in_time_is_not_made_twice():
    """A suspect that answers the ping before its tickets were sent elsewhere makes them alone."""
    ledger, clock, sent = late_ledger("ab")
    clock[0] = 0.1
    assert ledger.overdue() == ["a", "b"]
    clock[0] = 0.2
    ledger.pong("b")
    ledger.overdue()
    assert ledger.counts.hedged == 3  # all that a has
    ledger.pong("a")
    ledger.answered(sent["b"].number, 8, 1.0)
    assert ledger.send().tickets == [6]  # b, which has room, gets what is new


def test_three_agents_that_do_not_answer_are_enough():
    """What three have that may be dead because of it is not sent to a fourth."""
    ledger, clock, sent = late_ledger("a")
    for name in "bcd":
        clock[0] += 0.1
        ledger.overdue()
        ledger.join(name)
        clock[0] += 0.1
        ledger.overdue()
        while (parcel := ledger.send()) is not None:
            sent[name] = min(parcel, sent.get(name, parcel), key=lambda one: one.tickets)
    assert [sent[name].tickets for name in "abc"] == [[0]] * 3
    made = [sent["d"]]
    for parcel in made:
        ledger.answered(parcel.number, 8, 1.0)
        made += [parcel for parcel in (ledger.send(),) if parcel]
    tickets = [ticket for parcel in made for ticket in parcel.tickets]
    assert 0 not in tickets
    assert len(tickets) == 99


def test_a_ticket_that_goes_alone_has_its_agent_for_itself():
    """Its agent is emptied for it, and gets nothing else before it has answered."""
    ledger, _, _ = late_ledger("ab")
    ledger.lost("a", "killed")
    ledger.lost("b", "killed")
    ledger.join("a")
    again = [ledger.send().tickets for _ in range(3)]
    assert again == [[0], [1], [2]]
    ledger.lost("a", "killed")
    for name in "ab":
        ledger.join(name)
    alone = [ledger.send() for _ in range(2)]
    assert [parcel.tickets for parcel in alone] == [[0], [1]]
    assert ledger.send() is None  # though each could have three
    ledger.answered(alone[0].number, 8, 1.0)
    assert ledger.send().tickets == [2]
    assert ledger.send() is None


def test_an_old_entry_takes_no_ticket_along_that_goes_alone():
    """A ticket that waited twice, as late and as lost, goes alone after two losses."""
    ledger, clock, sent = late_ledger("abcd")
    for name in "bcd":
        ledger.answered(sent[name].number, 8, 1.0)
    clock[0] = 0.1
    ledger.overdue()
    clock[0] = 0.2
    for name in "bcd":
        ledger.pong(name)
    ledger.overdue()
    ledger.lost("a", "killed")
    parcel = ledger.send()
    assert parcel.tickets == sent["a"].tickets
    ledger.lost(parcel.agent, "killed")
    while (parcel := ledger.send()) is not None:
        assert parcel.tickets != sent["a"].tickets  # all others have something


def test_what_others_have_answered_is_not_late():
    """A suspect is awaited no longer when others have made all that it has."""
    ledger, clock, _ = late_ledger("a")
    clock[0] = 0.1
    ledger.overdue()
    ledger.join("b")
    clock[0] = 0.2
    ledger.overdue()
    for _ in range(3):
        ledger.answered(ledger.send().number, 8, 1.0)
    ledger.pong("a")
    assert ledger.agents["a"] == 3
    clock[0] = 10.0
    assert ledger.overdue() == []


def test_fewer_parcels_go_before_a_longer_wait():
    """The agent with none is next, though it got its last one after the other."""
    ledger, _, _ = late_ledger("ab")
    for number in (3, 5, 7, 2, 4):  # all of a, two of the three of b
        ledger.answered(number, 8, 1.0)
    assert [ledger.send().agent for _ in range(3)] == ["a", "b", "a"]
