"""Simulate a fleet of thousands of machines: `scale.py [--ranks N] [--output FOLDER]`.

A discrete-event model: no figure that it gives was measured on a cluster of this size. What it
shares with reality is the ledger of each rank, which is cseq's own (`cseq.fleet.ledger`), and what
a request, a transfer and a death cost, which `ray_costs.py` measured.

All ranks train in step: a step ends when each rank has its batch and has computed. Each rank has
6 of the agents, by rendezvous hashing. The agents make batches for all ranks that ask, in turn, on
their cores; a batch then goes over the rank's connection, one after another. In the course of it
agents are killed, agents are stopped (they neither work nor answer, and Ray says nothing of it),
and for a while the storage is slow, so that all is late at once.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.fleet import ledger as ledgers
from cseq.fleet.ledger import Ledger, Parcel, chosen
from harness.report import commit, row

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent
DRAWING = FOLDER.parent / "docs" / "drawings" / "scale.svg"

STEP = 0.1  # seconds of computing a step; each rank takes a batch
BATCH_BYTES = 4_816_896  # 32 images of 3 × 224 × 224
BATCH_SECONDS = 0.06  # of one core of an agent; the median: it varies by a quarter
CORES = 4  # of an agent; four ranks to an agent keep 2.4 of them busy
RANKS_PER_AGENT = 4
BUFFER = 8  # batches ahead of the loop
SLOWER = 8.0  # times, while the storage is slow
STOPPED = 3.0  # seconds that an agent is stopped
BACK = 5.0  # seconds until there is another agent in the place of a dead one


class Phase(NamedTuple):
    """A part of the simulated time, in seconds, and what happens in it."""

    name: str
    begin: float
    end: float


# What happens in a phase may be seen a little later: each lasts until the next one begins.
PHASES = (
    Phase("quiet", 1.5, 4.0),
    Phase("an agent is killed each second", 4.0, 8.0),
    Phase("an agent is stopped each second", 8.0, 14.0),
    Phase("the storage is slow", 14.0, 18.0),
)
SLOW = (14.5, 16.0)
END = PHASES[-1].end


class Costs(NamedTuple):
    """Seconds, as measured; `ray_costs.py`."""

    call: float
    transfer: float  # of a batch, once it is made
    death: float  # from an agent's death until its calls fail

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Take a batch's transfer from those of 1 MB and 32 MB."""
        costs = json.loads(path.read_text(encoding="utf-8"))["costs"]
        small, large = (costs[f"{size} MB, over connections"]["wall_us"] for size in (1, 32))
        transfer = small + (large - small) * (BATCH_BYTES / 1e6 - 1) / 31
        call = costs["nothing over a connection, one at a time"]["wall_us"]
        death = costs["an actor killed, until its call fails"]["wall_us"]
        return cls(call / 1e6, transfer / 1e6, death / 1e6)


class Agent:
    """Cores that make batches in the order in which they were asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.is_up = True
        self.stopped_until = 0.0
        self.free = [0.0] * CORES  # a heap: when each core has done what it has
        self.ranks: list[Rank] = []
        self.made = 0


class Rank:
    """A rank's carrier and its loop."""

    def __init__(self, number: int, clock: Callable[[], float], *, hedge: bool) -> None:
        self.number = number
        self.ledger = Ledger(BUFFER, hedge=hedge, clock=clock)
        self.link_free = 0.0  # its connection is busy until then
        self.ready: set[int] = set()
        self.asked = 0.0  # when the loop has come to its next batch
        self.looks = math.inf  # the next look that is scheduled


@dataclass
class Outcome:
    """What a simulation found."""

    steps: list[tuple[float, float]]  # when each step began, and its seconds
    waits: dict[str, list[float]]  # of the ranks' loops, by phase
    counts: dict[str, list[int]]  # parcels, hedged, lost, by phase
    seconds: float


class Simulation:
    """Ranks, agents, and the events between them."""

    def __init__(self, ranks: int, costs: Costs, *, hedge: bool, seed: int = 1) -> None:
        self.now = 0.0
        self.costs = costs
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = 0
        self.agents = {f"agent {n}": Agent(f"agent {n}") for n in range(ranks // RANKS_PER_AGENT)}
        self.ranks = [Rank(number, lambda: self.now, hedge=hedge) for number in range(ranks)]
        for rank in self.ranks:
            for name in chosen(rank.number, ranks, self.agents):
                rank.ledger.join(name)
                self.agents[name].ranks.append(rank)
        self.step = 0
        self.missing = ranks  # ranks without the batch of this step
        self.began = 0.0
        self.outcome = Outcome([], defaultdict(list), {}, 0.0)

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Let something happen."""
        self.order += 1
        heapq.heappush(self.events, (when, self.order, what, arguments))

    # -- agents

    def call(self, rank: Rank, parcel: Parcel) -> None:
        """Make the batches of a parcel, on an agent's cores, after all that it has."""
        agent = self.agents[parcel.agent]
        if not agent.is_up:
            return
        arrives = max(self.now + self.costs.call / 2, agent.stopped_until)
        done = arrives
        for _ in parcel.tickets:
            start = max(arrives, heapq.heappop(agent.free))
            seconds = BATCH_SECONDS * self.random.lognormvariate(0.0, 0.25)
            if SLOW[0] <= start < SLOW[1]:
                seconds *= SLOWER
            heapq.heappush(agent.free, start + seconds)
            done = max(done, start + seconds)
            agent.made += 1
        self.at(done, self.made, rank, parcel, agent, agent.life, done - arrives)

    def made(self, rank: Rank, parcel: Parcel, agent: Agent, life: int, seconds: float) -> None:
        """Send what was made over the rank's connection."""
        if agent.life != life:
            return
        if agent.stopped_until > self.now:
            self.at(agent.stopped_until, self.made, rank, parcel, agent, life, seconds)
            return
        begins = max(self.now, rank.link_free)
        rank.link_free = begins + self.costs.transfer * len(parcel.tickets)
        self.at(rank.link_free + self.costs.call / 2, self.arrived, rank, parcel, seconds)

    def kill(self, name: str) -> None:
        """End an agent; its ranks hear of it, and another comes."""
        agent = self.agents[name]
        agent.is_up, agent.life = False, agent.life + 1
        for rank in agent.ranks:
            self.at(self.now + self.costs.death, self.lost, rank, agent)
        self.at(self.now + BACK, self.back, agent)

    def back(self, agent: Agent) -> None:
        """Another agent is there in its place."""
        agent.is_up, agent.free = True, [self.now] * CORES
        for rank in agent.ranks:
            rank.ledger.join(agent.name)
            self.look(rank)

    def stop(self, name: str) -> None:
        """Stop an agent; it goes on later, with what it has."""
        agent = self.agents[name]
        agent.stopped_until = self.now + STOPPED
        agent.free = [max(free, agent.stopped_until) for free in agent.free]
        heapq.heapify(agent.free)

    def ping(self, rank: Rank, agent: Agent) -> None:
        """Answer, if that is possible."""
        if agent.is_up and agent.stopped_until <= self.now:
            rank.ledger.pong(agent.name)
            self.look(rank)
        elif agent.is_up:
            self.at(agent.stopped_until, self.ping, rank, agent)

    # -- ranks

    def arrived(self, rank: Rank, parcel: Parcel, seconds: float) -> None:
        """Take a parcel's batches."""
        size = BATCH_BYTES * len(parcel.tickets)
        rank.ready.update(rank.ledger.answered(parcel.number, size, seconds))
        if rank.asked >= 0:
            self.take(rank)
        self.look(rank)

    def lost(self, rank: Rank, agent: Agent) -> None:
        """Ray tells a rank of a death."""
        rank.ledger.lost(agent.name, "killed")
        self.look(rank)

    def take(self, rank: Rank) -> None:
        """Give the loop the batch of this step, if it is there; the last rank ends the step."""
        if self.step not in rank.ready:
            return
        rank.ready.remove(self.step)
        rank.ledger.add([self.step + BUFFER])
        phase = phase_at(self.now)
        if phase:
            self.outcome.waits[phase].append(self.now - rank.asked)
        rank.asked = -1.0
        self.missing -= 1
        if not self.missing:
            self.at(self.now + STEP, self.next_step)

    def next_step(self) -> None:
        """All ranks have computed: each comes to its next batch."""
        self.outcome.steps.append((self.began, self.now - self.began))
        self.began = self.now
        self.step += 1
        self.missing = len(self.ranks)
        for rank in self.ranks:
            rank.asked = self.now
            self.take(rank)
            self.look(rank)

    def look(self, rank: Rank) -> None:
        """What a carrier does when it is awake."""
        ledger = rank.ledger
        for name in ledger.overdue():
            self.at(self.now + self.costs.call, self.ping, rank, self.agents[name])
        while (parcel := ledger.send()) is not None:
            self.call(rank, parcel)
        due = ledger.due()
        if due < rank.looks:
            rank.looks = due
            self.at(due, self.awake, rank, due)

    def awake(self, rank: Rank, due: float) -> None:
        """Look again, unless an earlier look has been scheduled meanwhile."""
        if rank.looks == due:
            rank.looks = math.inf
            self.look(rank)

    # -- the course of it

    def count(self, phase: str) -> None:
        """Add up the ledgers' counts, as they are at the end of a phase."""
        counts = [rank.ledger.counts for rank in self.ranks]
        self.outcome.counts[phase] = [
            sum(getattr(one, name) for one in counts) for name in ("parcels", "hedged", "lost")
        ]

    def run(self) -> Outcome:
        """Go from event to event."""
        begun = time.perf_counter()
        names = self.random.sample(sorted(self.agents), 6)
        for number in range(3):
            self.at(PHASES[1].begin + 0.2 + number, self.kill, names[number])
            self.at(PHASES[2].begin + 0.2 + number, self.stop, names[3 + number])
        for phase in PHASES:
            self.at(phase.end, self.count, phase.name)
        for rank in self.ranks:
            rank.ledger.add(range(BUFFER))
            self.look(rank)
        while self.events[0][0] <= END:
            self.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        self.outcome.seconds = time.perf_counter() - begun
        return self.outcome


def phase_at(when: float) -> str:
    """Name the phase, if there is one."""
    return next((phase.name for phase in PHASES if phase.begin <= when < phase.end), "")


def steps_of(outcome: Outcome, phase: str) -> list[float]:
    """The seconds of the steps that began in a phase."""
    return [seconds for began, seconds in outcome.steps if phase_at(began) == phase]


def table(ranks: int, outcomes: dict[str, Outcome]) -> str:
    """A line for each phase and way."""
    lines = [
        f"### {ranks} ranks, {ranks // RANKS_PER_AGENT} agents\n",
        row(
            [
                "phase",
                "",
                "step, median",
                "longest step",
                "loops that waited",
                "hedged so far",
                "lost",
            ]
        ),
        row(["---"] * 7),
    ]
    for index, phase in enumerate(PHASES):
        for way, outcome in outcomes.items():
            steps, waits = steps_of(outcome, phase.name), outcome.waits[phase.name]
            parcels, hedged, lost = outcome.counts[phase.name]
            lost -= outcome.counts[PHASES[index - 1].name][2] if index else 0
            cells = [
                phase.name,
                way,
                f"{1e3 * statistics.median(steps):.0f} ms",
                f"{1e3 * max(steps):.0f} ms",
                f"{100 * sum(wait > 0 for wait in waits) / len(waits):.2f} %",
                f"{100 * hedged / parcels:.2f} %",
                f"{lost}",
            ]
            lines.append(row(cells))
    return "\n".join([*lines, ""])


def drawing(ranks: int, outcomes: dict[str, Outcome]) -> str:
    """Draw each step's time over the simulated time, for the pages: a panel for each way."""
    left, wide, high, gap = 64, 566, 92, 40
    title = (
        f"Simulation: the time of each step of {ranks} ranks in step, {ranks // RANKS_PER_AGENT} "
        "agents, with hedges and without"
    )
    first = PHASES[0].begin
    most = max(seconds for one in outcomes.values() for began, seconds in one.steps if began >= 1)
    scale = wide / (END - first)

    def text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} class="{style}">{escape(words)}</text>'

    parts = []
    for number, (way, outcome) in enumerate(outcomes.items()):
        top = 42 + number * (high + gap)
        base = top + high
        parts.append(text(0, top - 8, way, "title"))
        for began, seconds in outcome.steps:
            if began < first:
                continue
            height = high * seconds / most
            x, width = left + (began - first) * scale, max(1.0, seconds * scale - 0.6)
            style = "ours" if number == 0 else "other"
            parts.append(
                f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" class="{style}"/>'
            )
        for seconds in (STEP, most):
            y = base - high * seconds / most
            parts.append(text(left - 6, y + 4, f"{1e3 * seconds:.0f} ms", "small note", "end"))
        parts.append(f'<path d="M{left} {base}H{left + wide}" class="axis"/>')
    bottom = 42 + len(outcomes) * (high + gap) - gap
    for phase in PHASES:
        x = left + (phase.begin - first) * scale
        parts.append(f'<path d="M{x:.1f} 36V{bottom + 22}" class="group"/>')
        words = phase.name.replace("an agent is ", "").replace(" each second", "")
        parts.append(text(x + 4, bottom + 18, words, "small note"))
    about = f"simulation: {ranks} ranks, {ranks // RANKS_PER_AGENT} agents; the time of each step"
    parts.append(text(640, 14, about, "small note", "end"))
    return (
        f'<svg class="wide" viewBox="0 0 640 {bottom + 28}" role="img" '
        f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def simulate(ranks: int, costs: Costs, *, hedge: bool, budget: float) -> Outcome:
    """Run one simulation."""
    ledgers.HEDGED, before = budget, ledgers.HEDGED
    try:
        return Simulation(ranks, costs, hedge=hedge).run()
    finally:
        ledgers.HEDGED = before


UNLIMITED = "with hedges without a budget"
ABOUT = """\
# A fleet at scale: a simulation

By `benchmarks/scale.py` at commit {commit}: a model, no measurement. Real are the ledger, and the
costs from ray_costs.md: {call:.2f} ms a request, {transfer:.1f} ms for the transfer of a batch of
{size:.1f} MB, {death:.3f} s until Ray tells of a death.

All ranks train in step, {step:.0f} ms of computing each. An agent has {cores} cores and takes
{batch:.0f} ms of one for a batch; a rank has {of_a_rank} agents and {buffer} batches ahead. Three
agents are killed, three are stopped for {stopped:.0f} s, and the storage is {slower:.0f} times
slower for {slow:.1f} s.
"""


def scales(costs: Costs) -> dict[str, float]:
    """The numbers for the text."""
    return {
        "call": 1e3 * costs.call,
        "transfer": 1e3 * costs.transfer,
        "death": costs.death,
        "size": BATCH_BYTES / 1e6,
        "step": 1e3 * STEP,
        "cores": CORES,
        "batch": 1e3 * BATCH_SECONDS,
        "of_a_rank": ledgers.FEWEST,
        "buffer": BUFFER,
        "stopped": STOPPED,
        "slower": SLOWER,
        "slow": SLOW[1] - SLOW[0],
    }


def main() -> None:
    """Simulate, print the tables, write them and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--costs", type=Path, default=FOLDER / "results" / "ray_costs.json")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--drawing", type=Path, default=DRAWING)
    arguments = parser.parse_args()
    costs = Costs.read(arguments.costs)
    ways: dict[str, Callable[..., Outcome]] = {
        "with hedges": partial(simulate, hedge=True, budget=ledgers.HEDGED),
        "without": partial(simulate, hedge=False, budget=0.0),
        UNLIMITED: partial(simulate, hedge=True, budget=1e9),
    }
    page = [ABOUT.format(commit=commit(), **scales(costs))]
    for ranks in arguments.ranks:
        outcomes: dict[str, Outcome] = {}
        for name, way in ways.items():
            if name == UNLIMITED and ranks > min(arguments.ranks):
                continue  # it takes longer than all else, and shows the same
            outcomes[name] = way(ranks, costs)
            sys.stderr.write(f"{ranks} ranks, {name}: {outcomes[name].seconds:.0f} s\n")
        page.append(table(ranks, outcomes))
    shown = {name: outcomes[name] for name in ("with hedges", "without")}
    arguments.drawing.write_text(drawing(ranks, shown), encoding="utf-8")
    (arguments.output / "scale.md").write_text("\n".join(page), encoding="utf-8")
    sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()
