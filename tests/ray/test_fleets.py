"""Fleets: a sequence's own, one with copies in other processes, one with a name, one that grows."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import time
import weakref

import numpy as np
import pytest
import ray
from drawing import (
    BATCHES,
    OPTIONS,
    SAMPLES,
    SMALL,
    Draws,
    DrawsAlone,
    DrawsSlowly,
    assert_is_test_mode,
    await_agents,
    in_test_mode,
    sequence,
)
from kinds import assert_same
from local_cluster import until

import cseq
from cseq.fleet import actors
from cseq.testing import kill_agent

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote(num_cpus=0)
class Rank:
    """A process beside the driver that goes through an epoch on a fleet, or makes one."""

    def epoch(self, fleet, **options):
        with sequence(fleet, **options).start() as batches:
            return list(batches)

    def halting(self, fleet, path, **options):
        """Take a batch; once a file is there, take the rest."""
        with sequence(fleet, **options).start() as batches:
            iterator = iter(batches)
            first = next(iterator)
            while not os.path.exists(path):
                time.sleep(0.01)
            return [first, *iterator]

    def make(self, **options):
        self.fleet = cseq.RayFleet(DrawsSlowly, 2, 1, **options)
        return self.fleet.start()

    def kill_first(self):
        kill_agent(self.fleet, 0, None)

    def resize(self, nodes):
        self.fleet.resize(nodes)


def own(workers=2, **options):
    """Make a sequence with a fleet of its own."""
    return cseq.RaySequence(Draws, SAMPLES, workers, **OPTIONS | options)


def test_a_sequence_has_a_fleet_of_its_own():
    """Its workers are on all nodes; `finish` ends them, and leaves Ray."""
    with own().start() as batches:
        got = list(batches)
        stats = batches.stats()
        assert (stats.num_workers, stats.batches) == (2, BATCHES)
    assert_is_test_mode(got)
    assert ray.is_initialized()


def test_more_workers_than_cpus_is_logged_once(caplog):
    """The default of four workers on two nodes with a CPU each: they share."""
    with caplog.at_level(logging.WARNING, "cseq"), own(4).start() as batches:
        got = list(batches)
        assert batches.stats().num_workers == 4
    assert_is_test_mode(got)
    messages = [record.message for record in caplog.records]
    # On a slow machine, also that none is there yet.
    messages = [one for one in messages if not one.startswith("no agent is there")]
    assert [one[:18] for one in messages] == ["4 worker processes"]


def test_a_sequence_begins_again_and_is_dropped():
    """Each start has a fleet; without `finish`, it ends with the manager."""
    manager = own()
    with manager.start() as batches:
        next(iter(batches))
    manager.start()
    assert_is_test_mode(list(manager), epoch=1)
    del manager


def test_a_copy_uses_the_same_agents():
    """In another process, at the same time as here."""
    with cseq.RayFleet(Draws, 2, 1) as fleet:
        rank = Rank.remote()
        there = rank.epoch.remote(fleet)
        assert_is_test_mode(list(sequence(fleet).start()))
        assert_is_test_mode(copy.deepcopy(ray.get(there)))  # Ray's arrays are read-only
        assert len(fleet.agents) == 2
        assert sum(agent.batches for agent in fleet.agents) >= 2 * BATCHES


def test_a_copy_outlives_the_object_that_was_pickled():
    """A function may make a fleet, and return only the task that it was given to."""
    fleet = cseq.RayFleet(Draws, 2, 1)
    made, here = copy.copy(fleet), weakref.ref(fleet)
    del fleet
    gc.collect()
    with sequence(made).start() as batches:
        assert_is_test_mode(list(batches))
        kill_agent(here(), 0, signal.SIGKILL)
        until(lambda: len(made.agents) == 2, "the agent is not replaced")
        assert_is_test_mode(list(batches), epoch=1)
    here().close()
    gc.collect()
    assert here() is None


class Tens:
    """A data set of whole numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return 10 * index


@ray.remote(num_cpus=0)
def from_copy(fleet):
    """Go through an epoch; also say what is raised in test mode."""
    manager = cseq.RaySequence(fleet, **OPTIONS)
    with manager.start() as batches:
        got = list(batches)
    try:
        with manager.start_test() as batches:
            next(iter(batches))
    except RuntimeError as error:
        return got, str(error)


def test_a_copy_knows_how_many_samples_there_are_and_of_which_type():
    """It says what it lacks, where test mode wants it."""
    with cseq.RayFleet(cseq.from_dataset(Tens()), 2, 1) as fleet:
        here = list(cseq.RaySequence(fleet, **OPTIONS).start())
        there, text = ray.get(from_copy.remote(fleet))
    assert {batch.dtype for batch in here + there} == {np.dtype(np.int64)}
    assert [batch.tolist() for batch in there] == [batch.tolist() for batch in here]
    assert "has a copy of a fleet, and not its worker" in text


def test_a_rank_that_sleeps_holds_no_other_up(tmp_path):
    """Two ranks on a fleet, one of which waits for the other's end: together, all samples once."""
    with cseq.RayFleet(Draws, 2, 1) as fleet:
        await_agents(fleet)
        sleeper = Rank.remote()
        asleep = sleeper.halting.remote(fleet, str(tmp_path / "go on"), shard=(1, 2))
        with sequence(fleet, shard=(0, 2)).start() as batches:
            mine = list(batches)
        (tmp_path / "go on").touch()
        theirs = ray.get(asleep)
    seen = sorted(int(index) for batch in mine + theirs for index in batch[0])
    assert seen == list(range(SAMPLES))


def test_resize_and_replacements_reach_copies():
    """In the middle of an epoch of a copy."""
    rank = Rank.remote()
    fleet = ray.get(rank.make.remote())
    got = []
    with sequence(fleet, **SMALL).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 30:
                rank.resize.remote(3)
                until(lambda: fleet.workers == 3, "the agent is not known")
            if k == 60:
                kill_agent(fleet, 1, None)
            if k == 100:
                rank.resize.remote(1)
                until(lambda: fleet.workers == 1, "the agents are still known")
    assert_is_test_mode(got)
    with pytest.raises(RuntimeError, match="this fleet is a copy"):
        fleet.resize(2)


@pytest.mark.parametrize("name", [None, "shared"])
def test_a_roster_that_dies_is_restarted(cluster, name):
    """A copy learns from the new one which agents there are, and which come later."""
    rank = Rank.remote()
    fleet = ray.get(rank.make.remote(name=name))
    got = []
    with sequence(fleet, **SMALL).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 30:
                (roster,) = [pid for pid, title in cluster.at_work().items() if "Roster" in title]
                os.kill(roster, signal.SIGKILL)
                until(lambda: is_known(fleet), "the roster is not restarted")
                if name is None:
                    rank.resize.remote(1)
                    until(lambda: fleet.workers == 1, "the agents are still known")
    assert_is_test_mode(got)
    if name is not None:
        cseq.RayFleet.find(name).close()


def is_known(fleet):
    """Whether a roster tells of agents."""
    try:
        return bool(fleet.agents)
    except ray.exceptions.RayActorError:
        return False


def test_a_copy_whose_maker_dies_says_so():
    """Its agents are gone; the loop ends with an error."""
    rank = Rank.remote()
    fleet = ray.get(rank.make.remote())
    with sequence(fleet, **SMALL).start() as batches:
        iterator = iter(batches)
        next(iterator)
        ray.kill(rank)
        with pytest.raises(RuntimeError, match="the fleet is over: what has made it has ended"):
            list(iterator)


def test_a_fleet_with_a_name_outlives_its_maker():
    """Another process finds, resizes and ends it."""
    rank = Rank.remote()
    ray.get(rank.make.remote(name="shared"))
    ray.kill(rank)
    del rank
    with cseq.RayFleet.find("shared") as fleet:
        assert_is_test_mode(list(sequence(fleet).start()))
        with pytest.raises(ValueError, match="a fleet of this name runs"):
            cseq.RayFleet(Draws, 2, 1, name="shared").start()
        got = []
        with sequence(fleet, **SMALL).start() as batches:
            for k, batch in enumerate(batches):
                got.append(batch)
                if k == 40:
                    kill_agent(fleet, 0, None)
                if k == 80:
                    fleet.resize(1)
        assert_is_test_mode(got)
    with pytest.raises(ValueError, match="no such fleet"):
        cseq.RayFleet.find("shared")


def test_agents_come_and_go_in_the_middle_of_an_epoch(cluster, added_node):
    """More of them get work within 80 batches (of 4 ms); those that go make what they have."""
    got = []
    with cseq.RayFleet(DrawsSlowly, 1, 1) as fleet:
        await_agents(fleet, 1)
        with sequence(fleet, **SMALL).start() as batches:
            for k, batch in enumerate(batches):
                got.append(batch)
                if k == 20:
                    fleet.resize(3)
                    await_agents(fleet, 3)
                if k == 100:
                    until(  # their workers may still be starting
                        lambda: all(agent.batches for agent in fleet.agents), "one has no work"
                    )
                if k == 120:
                    fleet.resize(1)
            assert batches.stats().agents == 1
    assert_is_test_mode(got)


def test_an_elastic_fleet_grows_while_its_agents_are_busy(monkeypatch):
    """And shrinks while they are not; the stream is the same."""
    monkeypatch.setattr(actors, "SCALE_SECONDS", 0.3)
    monkeypatch.setattr(actors, "BUSY", 0.8)  # of an agent that shares two cores with others
    with cseq.RayFleet(DrawsSlowly, (1, 3), 1, num_cpus=0.5) as fleet:
        await_agents(fleet, 1)
        got = []
        with sequence(fleet, repeat=100).start() as batches:
            for batch in batches:
                got.append(batch)
                if len(got) == BATCHES:
                    assert_is_test_mode(got, epoch=batches.epoch)
                    got = []
                    if fleet.workers == 3:
                        break
            assert fleet.workers == 3
            until(lambda: fleet.workers == 1, "no agent ends")
        assert len(fleet.agents) == 1


@pytest.mark.parametrize(
    ("nodes", "text"), [((3, 2), r"nodes\[1\]=2 is below 3"), ((0, 2), r"nodes\[0\]=0 is below 1")]
)
def test_bounds_that_are_none_are_refused(nodes, text):
    """At once."""
    with pytest.raises(ValueError, match=text):
        cseq.RayFleet(Draws, nodes)


def test_sequences_share_a_fleet():
    """At a time, with seeds, sizes and types of their own; each batch is its sequence's."""
    others = {"seed": 8, "batch_size": 7}
    with cseq.RayFleet(Draws, 2, 1) as fleet:
        one = cseq.RaySequence(fleet, SAMPLES, 2, **OPTIONS)
        other = cseq.RaySequence(fleet, SAMPLES, 2, **OPTIONS | others)
        with one.start() as ones, other.start() as twos:
            got, rest = list(ones), iter(twos)
            first = [next(rest) for _ in range(30)]
            ones.set_epoch(0)
            both = list(zip(ones, rest))  # noqa: B905 - one ends first
    assert_is_test_mode(got)
    assert_is_test_mode([batch for batch, _ in both] + got[len(both) :])
    with cseq.MPSequence(Draws, SAMPLES, **OPTIONS | others).start_test() as batches:
        assert_same(first + [batch for _, batch in both], list(batches)[: 30 + len(both)])


def test_states_move_between_kinds_of_pools():
    """Half an epoch on a fleet, a quarter in processes, some in threads, the rest on the fleet."""
    with cseq.RayFleet(DrawsAlone, 2, 1) as fleet:
        kinds = [
            (sequence(fleet), BATCHES // 2),
            (cseq.MPSequence(DrawsAlone, SAMPLES, 2, **OPTIONS), BATCHES // 4),
            (cseq.MTSequence(DrawsAlone, SAMPLES, 2, **OPTIONS), BATCHES // 8),
            (sequence(fleet, buffer=3), None),
        ]
        got, state = [], None
        for manager, most in kinds:
            if state is not None:
                manager.load_state_dict(state)
            with manager.start() as batches:
                for k, batch in enumerate(batches):
                    got.append(batch)
                    if k + 1 == most:
                        break
                state = manager.state_dict()
    assert_same(got, in_test_mode(DrawsAlone))


def test_a_state_is_dealt_to_other_ranks_and_batches():
    """Two ranks on a fleet, then three in threads with other batches, then one on the fleet."""
    with cseq.RayFleet(Draws, 2, 1) as fleet:
        seen, state = [], None
        threads = {"batch_size": 3}
        worlds = [(sequence, fleet, {}, 2, 40), (cseq.MTSequence, Draws, threads, 3, 20)]
        for make, worker, options, world, most in [*worlds, (sequence, fleet, {}, 1, None)]:
            states = []
            for rank in range(world):
                own = OPTIONS | options | {"shard": (rank, world)}
                manager = (
                    make(worker, **own) if make is sequence else make(worker, SAMPLES, 2, **own)
                )
                if state is not None:
                    manager.load_state_dict(state)
                with manager.start() as batches:
                    for k, batch in enumerate(batches):
                        seen += batch[0].tolist()
                        if k + 1 == most:
                            break
                    states.append(manager.state_dict())
            state = states[0]
    assert sorted(seen) == list(range(SAMPLES))
