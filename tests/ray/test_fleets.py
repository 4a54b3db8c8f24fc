"""Fleets: of one sequence, with copies in other processes, and of several sequences."""

import copy
import gc
import os
import time

import numpy as np
import pytest
import ray
from drawing import BATCHES, OPTIONS, SAMPLES, Draws, assert_is_test_mode, await_agents, sequence
from killing import kill_agent
from kinds import assert_same

import cseq

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote(num_cpus=0)
class Rank:
    """A process beside the driver that runs an epoch on a fleet."""

    def epoch(self, fleet, **options):
        with sequence(fleet, **options).start() as batches:
            return list(batches)

    def halting(self, fleet, path, **options):
        """Take a batch; once a file exists, take the rest."""
        with sequence(fleet, **options).start() as batches:
            iterator = iter(batches)
            first = next(iterator)
            while not os.path.exists(path):
                time.sleep(0.01)
            return [first, *iterator]


def own(workers=2, **options):
    """Make a sequence with its own fleet."""
    return cseq.RaySequence(Draws, SAMPLES, workers, **OPTIONS | options)


def test_a_sequence_has_a_fleet_of_its_own():
    """`finish` ends it, and leaves Ray; the sequence can start again, and may be dropped."""
    manager = own()
    with manager.start() as batches:
        got = list(batches)
        stats = batches.stats()
        assert (stats.num_workers, stats.batches) == (2, BATCHES)
    assert_is_test_mode(got)
    assert ray.is_initialized()
    manager.start()
    assert_is_test_mode(list(manager), epoch=1)
    del manager


def test_more_workers_than_cpus_are_waited_for():
    """The default is four workers; two nodes with a CPU each have room for two."""
    with own(4).start() as batches:
        assert_is_test_mode(list(batches))


def test_a_fleet_has_what_the_nodes_have_room_for():
    """By default, it has a worker process for each CPU."""
    rooms = (({}, 2), ({"num_cpus": 0.5}, 4), ({"num_workers": 3, "num_cpus": 0.1}, 6))
    for options, expected in rooms:
        with cseq.RayFleet(Draws, **options) as fleet:
            assert len(fleet.handles) == expected
    with pytest.raises(ValueError, match="num_cpus=64, but no node in the cluster currently has"):
        cseq.RayFleet(Draws, num_cpus=64)


def test_a_copy_uses_the_same_agents():
    """The copy runs in another process, at the same time as here."""
    with cseq.RayFleet(Draws, 2, 1) as fleet:
        rank = Rank.remote()
        there = rank.epoch.remote(fleet)
        assert_is_test_mode(list(sequence(fleet).start()))
        # Ray's arrays are read-only.
        assert_is_test_mode(copy.deepcopy(ray.get(there)))


def test_a_copy_outlives_the_object_that_was_pickled():
    """Its agents start again, too; they end with the last copy."""
    fleet = cseq.RayFleet(Draws, 2, 1)
    made = copy.copy(fleet)
    del fleet
    gc.collect()
    with sequence(made).start() as batches:
        assert_is_test_mode(list(batches))
        kill_agent(made, 0)
        assert_is_test_mode(list(batches), epoch=1)
        await_agents(made)
        made.close()


class Tens:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return 10 * index


@ray.remote(num_cpus=0)
def from_copy(fleet):
    """Run an epoch, make a batch here, and collect garbage, which an idle process does not do."""

    def work():
        manager = cseq.RaySequence(fleet, **OPTIONS)
        with manager.start() as batches:
            return list(batches), manager.remake(0, 5).batch

    try:
        return work()
    finally:
        gc.collect()


def test_a_copy_knows_how_many_samples_there_are_and_of_which_type():
    """Like the fleet's maker, it asks the worker."""
    with cseq.RayFleet(cseq.from_dataset(Tens()), 2, 1) as fleet:
        here = list(cseq.RaySequence(fleet, **OPTIONS).start())
        there, again = ray.get(from_copy.remote(fleet))
    assert {batch.dtype for batch in here + there} == {np.dtype(np.int64)}
    assert [batch.tolist() for batch in there] == [batch.tolist() for batch in here]
    assert again.tolist() == here[5].tolist()


def test_a_rank_that_sleeps_holds_no_other_up(tmp_path):
    """One of two ranks on a fleet waits for the other's end; together, they have all samples."""
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


class Rows:
    """Returns the division of its indices."""

    def __getitem__(self, indices):
        return indices, cseq.parts()


def test_rows_are_divided_as_in_test_mode():
    """An agent gets the right `cseq.parts`."""
    packed = cseq.Packed(np.arange(60) % 7 + 1, 16)
    options = {"order": packed, "batch_size": 3, "seed": 3, "out_type": "null"}
    with cseq.RayFleet(Rows, 2, 1) as fleet, cseq.RaySequence(fleet, **options).start() as batches:
        got = list(batches)
    with cseq.MPSequence(Rows, **options).start_test() as batches:
        assert_same(got, list(batches))


def test_sequences_share_a_fleet():
    """At the same time, with their own seeds, sizes and types, each gets its own batches."""
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


def test_a_state_is_dealt_to_other_ranks_and_batches():
    """Two ranks run on a fleet, then three in threads with other batches, then one on the fleet."""
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
