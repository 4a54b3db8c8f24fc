"""The ends of loops and programs: nothing stays on the cluster, and nothing comes twice."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from drawing import OPTIONS, SMALL, DrawsSlowly, assert_is_test_mode, pids, sequence
from local_cluster import STORE, at_work, kill, processes_of, until

import cseq

pytestmark = pytest.mark.usefixtures("cluster")


def test_an_epoch_that_is_left_delivers_nothing_later(fleet):
    """It ends by break, iter(), set_epoch, an exception or finish, with batches in flight."""
    with sequence(fleet).start() as batches:
        for k, _ in enumerate(batches):
            if k == 5:
                break
        next(iter(batches))
        with pytest.raises(ZeroDivisionError):
            for _ in batches:
                1 / 0  # noqa: B018
        batches.set_epoch(1)
        assert_is_test_mode(list(batches), DrawsSlowly, 1)
        next(iter(batches))
    assert_is_test_mode(list(sequence(fleet).start()), DrawsSlowly)


def test_a_loop_that_leaves_waits_for_no_agent(fleet):
    """All agents are stopped, and hold all tickets."""
    there = pids(fleet)
    with sequence(fleet, **SMALL).start() as batches:
        next(iter(batches))
        try:
            for pid in there:
                os.kill(pid, signal.SIGSTOP)
            iter(batches)
            batches.set_epoch(7)
            iter(batches)
        finally:
            for pid in there:
                os.kill(pid, signal.SIGCONT)
        batches.set_epoch(0)
        assert_is_test_mode(list(batches), DrawsSlowly)


class Large:
    def __getitem__(self, indices):
        return np.full(8 << 20, indices[0], np.uint8)


def test_more_than_the_stores_have_room_for_is_not_spilled(cluster):
    """The data are ten times a store; the loop is slow at times; the fixture checks for spills."""
    count = 10 * STORE // (8 << 20)
    options = OPTIONS | {"batch_size": 1, "memory_limit": 64 << 20}
    with cseq.RayFleet(Large, 2, 1) as fleet:
        seen = []
        with cseq.RaySequence(fleet, count, 2, **options).start() as batches:
            for k, batch in enumerate(batches):
                seen.append(int(batch[0]))
                assert (batch == batch[0]).all()
                if k % 100 == 50:
                    time.sleep(0.2)
        until(lambda: cluster.stored() < 1 << 20, "answers are left in a store")
    assert len(seen) == count


def test_ctrl_c_while_the_loop_waits(fleet):
    """It happens ten times, at random; then an epoch is whole."""
    waits = np.random.default_rng(5).uniform(0.001, 0.1, 10)
    interrupted = 0
    with sequence(fleet, **SMALL).start() as batches:
        for wait in waits:
            sender = subprocess.Popen(
                [sys.executable, "-c", SENDER, str(os.getpid()), str(wait)], stdout=subprocess.PIPE
            )
            try:
                sender.stdout.read(1)
                while True:
                    list(batches)
            except KeyboardInterrupt:
                interrupted += 1
            sender.communicate()
        batches.set_epoch(0)
        assert_is_test_mode(list(batches), DrawsSlowly)
    assert interrupted == 10


SENDER = """
import os, signal, sys, time
print(end="x", flush=True)
time.sleep(float(sys.argv[2]))
os.kill(int(sys.argv[1]), signal.SIGINT)
"""


# A driver that dies, or is interrupted, in the middle of an epoch.
DRIVER = """
import os, signal, sys
sys.path[:0] = sys.argv[2:4]
from local_cluster import at_work, local_cluster, until
from drawing import DrawsSlowly, OPTIONS, SAMPLES
import cloudpickle, cseq, drawing

cloudpickle.register_pickle_by_value(drawing)

with local_cluster(2) as cluster:
    manager = cseq.RaySequence(DrawsSlowly, SAMPLES, 2, **OPTIONS)
    with manager.start() as batches:
        for k, batch in enumerate(batches):
            if k == 40:
                until(lambda: len(at_work(cluster.folder)) >= 2, "the agents are late")
                print(cluster.folder, flush=True)
                if sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise SystemExit(3)
"""


@pytest.mark.parametrize("way", ["killed", "exits"])
def test_a_driver_that_ends_leaves_nothing(run_anew, way):
    """Agents, worker processes and files of shared memory are gone."""
    here = Path(__file__).parent
    done = run_anew(DRIVER, way, str(here), str(here.parent / "helpers"))
    assert done.stdout.strip(), done.stderr
    kept = Path(done.stdout.strip())
    try:
        assert done.returncode == {"killed": -9, "exits": 3}[way], done.stderr
        until(lambda: not at_work(kept), f"left: {at_work(kept)}")
    finally:
        kill(processes_of(kept))
        until(lambda: not processes_of(kept), "the rest does not end")
        shutil.rmtree(kept, ignore_errors=True)
    # `nothing_left_behind` checks the files of shared memory.


def test_the_memory_of_large_batches_is_used_again():
    """It is the memory of a batch that the loop has dropped, but not of a held one."""
    with cseq.RayFleet(Large, 2, 1) as fleet:
        options = OPTIONS | {"batch_size": 1, "buffer": 4, "shuffle": False}
        with cseq.RaySequence(fleet, 60, 2, **options).start() as batches:
            places, held = Counter(), []
            for k, batch in enumerate(batches):
                places[batch.ctypes.data] += 1
                if k % 20 == 0:
                    held.append((k, batch))
                assert (batch == k).all()
            assert all((batch == k).all() for k, batch in held)
    assert len(places) <= 16
