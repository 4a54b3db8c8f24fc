"""Agents and nodes die or stop; the stream equals test mode's."""

import os
import random
import signal
import time

import pytest
import ray
from drawing import (
    BATCHES,
    SMALL,
    Draws,
    DrawsSlowly,
    assert_is_test_mode,
    await_agents,
    in_test_mode,
    pids,
    sequence,
)
from killing import kill_agent

import cseq

pytestmark = pytest.mark.usefixtures("cluster")


def epoch_with(fleet, events, **options):
    """Run an epoch with `events` before given batches; return the batches."""
    got = []
    with sequence(fleet, **SMALL | options).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k in events:
                events[k]()
    return got


def test_an_agent_is_killed_at_a_quarter_and_at_three_quarters(fleet):
    """One agent dies, then the other: each time, the remaining one makes its batches."""
    before = pids(fleet)
    kills = {
        BATCHES // 4: lambda: kill_agent(fleet, 0),
        3 * BATCHES // 4: lambda: kill_agent(fleet, 1, None),
    }
    assert_is_test_mode(epoch_with(fleet, kills))
    await_agents(fleet, without=before)


def test_all_agents_are_killed_at_once(fleet):
    """The loop continues when one is back."""
    before = pids(fleet)
    got = epoch_with(fleet, {50: lambda: [os.kill(pid, signal.SIGKILL) for pid in before]})
    assert_is_test_mode(got)


def test_an_answer_that_comes_too_late_is_used_the_next_time(fleet, monkeypatch):
    """Agents whose answers always exceed a thread's wait are found, even after a death."""
    monkeypatch.setattr("cseq.fleet.ray.AGAIN", 0)
    assert_is_test_mode(epoch_with(fleet, {50: lambda: kill_agent(fleet, 0)}))


def test_an_agent_that_was_killed_before_a_loop_begins_is_back(fleet):
    """The loop never notices its death."""
    before = pids(fleet)
    kill_agent(fleet, 0)
    assert_is_test_mode(epoch_with(fleet, {}))
    assert len(set(before) & set(await_agents(fleet))) == 1


def test_a_stopped_agent_is_replaced(cluster):
    """After `timeout`, another agent makes its batches."""
    with cseq.RayFleet(DrawsSlowly, 2, 1, timeout=1.0) as fleet:
        await_agents(fleet)
        # Both have made some batches, so the next one is not the first.
        assert_is_test_mode(epoch_with(fleet, {}))
        stopped = pids(fleet)[0]
        got = epoch_with(fleet, {40: lambda: os.kill(stopped, signal.SIGSTOP)})
        assert_is_test_mode(got)
        if ray.__version__ < "2.46":
            # This version asks the process to end, which it does later.
            os.kill(stopped, signal.SIGCONT)
        await_agents(fleet, without=[stopped])


@pytest.mark.parametrize("tls", [False, True])
def test_an_agent_that_hangs_is_replaced(cluster, monkeypatch, tmp_path, tls):
    """After `timeout`, another agent makes its batches."""

    class Hangs(DrawsSlowly):
        """Never finishes one batch, unless a file exists."""

        def __getitem__(self, indices):
            if 77 in indices and not (tmp_path / "it has").exists():
                (tmp_path / "it has").touch()
                time.sleep(1000)
            return super().__getitem__(indices)

    monkeypatch.setenv("RAY_USE_TLS", str(int(tls)))
    with cseq.RayFleet(Hangs, 2, 1, timeout=1.0) as fleet:
        before = await_agents(fleet)
        assert_is_test_mode(epoch_with(fleet, {}))
        assert len(set(before) & set(await_agents(fleet))) == 1


class Waits(Draws):
    def __getitem__(self, indices):
        if 77 in indices:
            time.sleep(2)
        return super().__getitem__(indices)


def test_what_waits_for_another_batch_is_not_late(cluster):
    """Two sequences share an agent: `timeout` applies to a batch, not to those before it."""
    with cseq.RayFleet(Waits, 1, 1, timeout=3.0) as fleet:
        before = await_agents(fleet, 1)
        with sequence(fleet).start() as ones, sequence(fleet).start() as twos:
            got = list(zip(ones, twos, strict=True))
        assert pids(fleet) == before
    for one in zip(*got, strict=True):
        assert_is_test_mode(list(one))


def test_a_node_is_lost(cluster, added_node):
    """Other agents make the batches of its agents."""
    with cseq.RayFleet(DrawsSlowly, 3, 1) as fleet:
        await_agents(fleet, 3)
        assert_is_test_mode(epoch_with(fleet, {40: lambda: cluster.remove_node(added_node)}))


class KillsItsAgent(Draws):
    def __getitem__(self, indices):
        if 77 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(indices)


def test_a_batch_that_ends_three_agents_is_named():
    """WorkerDied has its indices; the fleet continues for loops without it."""
    with cseq.RayFleet(KillsItsAgent, 2, 1) as fleet:
        await_agents(fleet)
        manager = sequence(fleet, **SMALL).start()
        with manager, pytest.raises(cseq.WorkerDied, match="was lost on 3 agents") as caught:
            list(manager)
        assert 77 in caught.value.indices
        assert in_test_mode()[caught.value.batch][0].tolist() == caught.value.indices
        assert "the agent with pid" in str(caught.value)
        with cseq.RaySequence(fleet, 76, batch_size=4, out_type="null").start() as batches:
            assert len(list(batches)) == 19
        with sequence(fleet, on_error="skip").start() as batches:
            assert len(list(batches)) == BATCHES - 1
            (skipped,) = batches.skipped
        assert skipped.indices == caught.value.indices
        assert "was lost on 3 agents" in skipped.error


# In seconds; for many, use pytest -o faulthandler_timeout=0.
SOAK = float(os.environ.get("CSEQ_SOAK", "8"))


def test_agents_are_killed_at_random_again_and_again(cluster):
    """One of four agents dies each second; neither the stores nor the trainer fill up."""
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
                    if time.monotonic() > due:
                        there = pids(fleet)
                        if len(there) > 1:
                            os.kill(chance.choice(there), signal.SIGKILL)
                            killed += 1
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
