"""The cluster of these tests is one: results travel, nodes die, and nothing is left of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
from local_cluster import at_work, kill, processes_of, until


@ray.remote(num_cpus=1)
class Maker:
    """An actor that makes arrays, looks at those of others and starts processes."""

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def make(self, count):
        return np.arange(count, dtype=np.uint32)

    def total(self, array):
        return int(array.sum())

    def start_process(self):
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid


def test_results_travel_between_nodes(cluster):
    """Two actors are on two nodes, the driver on a third; arrays reach the driver and the other."""
    makers = [Maker.remote() for _ in range(2)]
    nodes = ray.get([maker.node.remote() for maker in makers])
    here = ray.get_runtime_context().get_node_id()
    assert {here, *nodes} == cluster.alive()
    assert len({here, *nodes}) == 3
    made = makers[0].make.remote(1 << 20)
    assert np.array_equal(ray.get(made), np.arange(1 << 20))
    until(lambda: cluster.stored() >= 4 << 20, "nothing is in the stores")
    assert ray.get(makers[1].total.remote(made)) == (1 << 20) * ((1 << 20) - 1) // 2


def test_a_node_comes_and_goes(cluster, added_node):
    """Actors run on an added node; when it is killed, calls fail and objects are lost."""
    maker = Maker.options(resources={"added": 1}, max_restarts=0).remote()
    assert ray.get(maker.node.remote()) == added_node.node_id
    made = maker.make.remote(1 << 20)
    ray.wait([made], fetch_local=False)
    cluster.remove_node(added_node)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(maker.node.remote())
    with pytest.raises((ray.exceptions.ObjectLostError, ray.exceptions.RayActorError)):
        ray.get(made)


def test_processes_of_actors_are_seen(cluster):
    """An actor, and a process that it has started, are at work until they end."""
    assert cluster.at_work() == {}
    maker = Maker.remote()
    pid = ray.get(maker.start_process.remote())
    assert len(cluster.at_work()) == 2
    assert pid in cluster.at_work()
    ray.kill(maker)
    until(lambda: not cluster.at_work(), "the process is left")


# A driver with an actor; it fills a store until Ray spills, says so, and dies.
DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import numpy, ray
from test_local_cluster import Maker
from local_cluster import STORE, local_cluster

with local_cluster(1) as cluster:
    @ray.remote(num_cpus=0)
    def make():
        return numpy.zeros(STORE // 5, numpy.uint8)

    maker = Maker.remote()
    ray.get(maker.start_process.remote())
    few = [make.remote()]
    ray.wait(few, fetch_local=False)
    print(cluster.folder, len(cluster.spills()), flush=True)
    many = [make.remote() for _ in range(8)]
    ray.wait(many, num_returns=8, fetch_local=False)
    print(len(cluster.spills()), len(cluster.at_work()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_actors_end_with_their_driver(run_anew):
    """Spilling is seen; when the driver is killed, no actor stays, nor what it has started."""
    done = run_anew(DRIVER, str(Path(__file__).parent))
    folder, before, after, actors = done.stdout.split()
    kept = Path(folder)
    try:
        assert done.returncode == -9, done.stderr
        assert (int(before), int(after) > 0, int(actors) >= 2) == (0, True, True)
        until(lambda: not at_work(kept), f"left: {at_work(kept)}")
    finally:  # Ray's own processes, one for metrics and one for environments, stay for a minute
        kill(processes_of(kept))
        until(lambda: not processes_of(kept), "the rest does not end")
        shutil.rmtree(kept)
