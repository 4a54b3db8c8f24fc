"""Agents, worker processes and nodes die or stop: the stream is that of test mode."""

from __future__ import annotations

import math
import os
import random
import signal
import time

import pytest
from drawing import (
    BATCHES,
    SMALL,
    ByProcess,
    Draws,
    DrawsSlowly,
    actor_of_this_process,
    assert_is_test_mode,
    await_agents,
    in_test_mode,
    ready,
    sequence,
)

import cseq
from cseq.fleet import ledger
from cseq.testing import kill_agent

pytestmark = pytest.mark.usefixtures("cluster")


def epoch_with(fleet, events, **options):
    """Go through an epoch; `events`: what to do before which batch. Returns batches and stats."""
    got = []
    with sequence(fleet, **SMALL | options).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k in events:
                events[k]()
        return got, batches.stats()


def test_an_agent_is_killed_at_a_quarter_and_at_three_quarters(fleet):
    """First one, then the other: each time, the rest makes what it had."""
    kills = {
        BATCHES // 4: lambda: kill_agent(fleet, 0),
        3 * BATCHES // 4: lambda: kill_agent(fleet, 1),
    }
    got, stats = epoch_with(fleet, kills)
    assert_is_test_mode(got)
    assert stats.batches == BATCHES
    assert stats.lost + stats.hedged > 0


def test_all_agents_are_killed_at_once(fleet):
    """The loop goes on when one is back."""
    pids = [agent.pid for agent in fleet.agents]
    got, _ = epoch_with(fleet, {50: lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]})
    assert_is_test_mode(got)
    assert not {agent.pid for agent in fleet.agents} & set(pids)


def test_an_agent_that_is_killed_for_good_is_replaced(fleet):
    """As by a signal."""
    before = {agent.pid for agent in fleet.agents}
    got, _ = epoch_with(fleet, {40: lambda: kill_agent(fleet, 0, None)})
    assert_is_test_mode(got)
    await_agents(fleet)
    assert len(before & {agent.pid for agent in fleet.agents}) == 1


def test_an_agent_that_was_killed_before_a_loop_begins_is_replaced(fleet):
    """The loop has never had a sign of life of it."""
    kill_agent(fleet, 0, None)
    assert_is_test_mode(epoch_with(fleet, {})[0])
    await_agents(fleet)


def test_late_answers_of_a_stopped_agent_are_dropped(fleet):
    """Another makes what it has; when it goes on, its answers count nothing, and it gets work."""
    pid = fleet.agents[0].pid
    events = {
        40: lambda: os.kill(pid, signal.SIGSTOP),
        60: lambda: time.sleep(3.0),
        120: lambda: os.kill(pid, signal.SIGCONT),
    }
    got, stats = epoch_with(fleet, events)
    assert_is_test_mode(got)
    assert stats.hedged > 0
    made = fleet.agents[0].batches
    assert_is_test_mode(epoch_with(fleet, {})[0])
    assert fleet.agents[0].batches > made


def test_a_worker_process_that_dies_costs_no_parcel():
    """The agent replaces it; the trainer's ledger does not know of it."""
    got = []
    with cseq.RayFleet(ByProcess, 2, 1) as fleet, sequence(fleet, **SMALL).start() as batches:
        for k, (pid, batch) in enumerate(batches):
            got.append(batch)
            if k in (30, 90):
                os.kill(pid, signal.SIGKILL)
        assert batches.stats().lost == 0
    assert_is_test_mode(got)


def test_a_node_is_lost_with_a_parcel_that_was_not_fetched(cluster, added_node):
    """Its answers, over 100 KB each, are gone with it: they are made again."""
    got = []
    with cseq.RayFleet(DrawsSlowly, 3, 1) as fleet:
        await_agents(fleet, 3)
        with sequence(fleet, **SMALL).start() as batches:
            for k, batch in enumerate(batches):
                got.append(batch)
                if k == 40:
                    cluster.remove_node(added_node)
    assert_is_test_mode(got)


class KillsItsAgent(Draws):
    """Ends the agent in one batch, and all its processes with it."""

    def __getitem__(self, indices):
        if 77 in indices:
            os.kill(actor_of_this_process(), signal.SIGKILL)
            signal.pause()
        return super().__getitem__(indices)


def test_a_batch_that_ends_three_agents_is_named():
    """As WorkerDied, with its indices and what Ray knows of the end."""
    with cseq.RayFleet(KillsItsAgent, 2, 1) as fleet:
        await_agents(fleet)
        with sequence(fleet, shuffle=False, **SMALL).start() as batches:
            iterator, got = iter(batches), 0
            with pytest.raises(cseq.WorkerDied, match="was lost with 3 agents") as caught:
                for _ in iterator:
                    got += 1
    assert caught.value.batch == 77 // 4
    assert 77 in caught.value.indices
    assert "the agent with pid" in str(caught.value)
    assert "Actor" in str(caught.value)
    assert got <= 77 // 4


def test_all_parcels_are_hedged(monkeypatch):
    """What is under way is late at once, and others make it as well: the same draws."""
    monkeypatch.setattr(ledger, "LATE", 0.0)
    monkeypatch.setattr(ledger, "LEAST_LATE", 0.0)
    monkeypatch.setattr(ledger, "HEDGED", math.inf)
    with cseq.RayFleet(DrawsSlowly, 4, 1, num_cpus=0.5) as fleet:
        await_agents(fleet, 4)
        got, stats = epoch_with(fleet, {})
    assert_is_test_mode(got)
    assert stats.hedged > stats.parcels / 4


def test_hedged_parcels_draw_what_test_mode_draws(fleet):
    """Whichever agent makes a batch: one is stopped every few batches."""
    pids = [agent.pid for agent in fleet.agents]
    events = {}
    for k in range(20, 160, 40):
        events[k] = lambda k=k: os.kill(pids[k // 40 % 2], signal.SIGSTOP)
        events[k + 20] = lambda k=k: os.kill(pids[k // 40 % 2], signal.SIGCONT)
    got, stats = epoch_with(fleet, events)
    assert_is_test_mode(got)
    assert stats.hedged > 0


SOAK = float(os.environ.get("CSEQ_SOAK", "8"))  # seconds; of many, pytest -o faulthandler_timeout=0


def test_agents_are_killed_at_random_again_and_again(cluster):
    """Of four, one each second while three others are there; no store fills, nor the trainer."""
    memory = []
    with cseq.RayFleet(DrawsSlowly, 4, 1, num_cpus=0.5) as fleet:
        await_agents(fleet, 4)
        due = time.monotonic() + 1
        end, chance, epoch, killed = due + SOAK, random.Random(7), 0, 0
        with sequence(fleet, **SMALL).start() as batches:
            while time.monotonic() < end or not killed or len(memory) < 2:
                got = []
                for batch in batches:
                    got.append(batch)
                    if time.monotonic() > due and ready(fleet) == 4:
                        killed += kill_agent(fleet, chance.randrange(4)) > 0
                        due = time.monotonic() + 1
                assert_is_test_mode(got, epoch=epoch)
                epoch += 1
                memory.append(resident(os.getpid()))
                assert cluster.stored() < 50 << 20
                in_test_mode.cache_clear()
    half = len(memory) // 2
    assert max(memory[half:]) < max(memory[:half]) + (32 << 20)


def resident(pid):
    """Count the bytes of a process that are in memory and its own."""
    with open(f"/proc/{pid}/statm") as file:
        _, pages, shared, *_ = map(int, file.read().split())
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")
