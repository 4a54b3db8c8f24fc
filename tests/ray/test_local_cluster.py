"""What the tests with Ray see of their cluster: its processes, and what it writes to a disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ray
from local_cluster import at_work, kill, processes_of, until


@ray.remote(num_cpus=1)
class Maker:
    """An actor that starts a process."""

    def start_process(self):
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid


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
