"""A Ray cluster of several nodes on this machine, and what is left of it.

Each node has a raylet and an object store of its own, so what goes from one to another travels. All
is at 127.0.0.2: Ray takes 127.0.0.1 for the machine's outer address. The head has no CPUs:
actors are on the other nodes. Sessions lie in a folder of their own, which Ray finds in
`RAY_TMPDIR`; its name is in the environment of every process of the cluster, and tells them from
those of other clusters.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

ADDRESS = "127.0.0.2"
STORE = 200 << 20  # bytes, of each node
GRACE = 60.0  # seconds in which what is about to happen has to happen

# A node that is gone is noticed within a second.
QUICK_DEATHS = {
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}
# What a node itself consists of: these processes are there with and without work.
OF_A_NODE = re.compile(
    rb"ray::(IDLE|DashboardAgent|RuntimeEnvAgent)|[^\0]*/(raylet|gcs_server)\0"
    rb"|[^\0]*/python[\d.]*\0(-u\0)?[^\0]*/site-packages/ray/"
)


@dataclass
class LocalCluster:
    """A running cluster; this process is its driver."""

    cluster: Cluster
    folder: Path
    nodes: list[Any] = field(default_factory=list)

    def add_node(self, **arguments):
        """Start a node with one CPU; wait until the cluster has it."""
        arguments = {"num_cpus": 1, "object_store_memory": STORE} | arguments
        node = self.cluster.add_node(node_ip_address=ADDRESS, **arguments)
        self.nodes.append(node)
        until(lambda: node.node_id in self.alive(), "the node is not there")
        return node

    def remove_node(self, node):
        """Kill a node without a warning; wait until the cluster knows."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        until(lambda: node.node_id not in self.alive(), "the node is still there")

    def alive(self):
        """Return the ids of the nodes that the cluster believes to be alive."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def stored(self):
        """Count the bytes in all object stores together."""
        of = "object_store_memory"
        return int(ray.cluster_resources()[of] - ray.available_resources().get(of, 0))

    def spills(self):
        """Find the logs of processes that wrote objects to a disk; one is there from the first."""
        return set(self.folder.glob("ray/session_*/logs/*spill_worker*"))

    def at_work(self):
        """Find the actors, and all processes that these have started: pid → command."""
        return at_work(self.folder)


@contextlib.contextmanager
def local_cluster(nodes, **system):
    """Start a cluster and connect to it; leave nothing of it. `system`: Ray's internal settings."""
    # A short name: paths of sockets, which are below, have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="cseq-ray-"))
    shm = shared_names()
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(folder))
    cluster = Cluster()
    running = LocalCluster(cluster, folder)
    try:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": system}
        cluster.add_node(node_ip_address=ADDRESS, object_store_memory=STORE, **head)
        # Before there are others: Ray would connect to any of the nodes with this address.
        ray.init(
            address=cluster.address,
            _node_ip_address=ADDRESS,
            log_to_driver=False,
            logging_level="WARNING",
        )
        for _ in range(nodes):
            running.add_node()
        yield running
    finally:
        ray.shutdown()
        cluster.shutdown()
        del os.environ["RAY_TMPDIR"]
        left = await_end(folder)
        shutil.rmtree(folder)
    assert not left, f"processes of the cluster are left: {left}"
    assert shared_names() <= shm


def await_end(folder):
    """Wait until no process is left; kill what does not end, and return what is not Ray's."""
    with contextlib.suppress(TimeoutError):
        until(lambda: not processes_of(folder), "processes are left")
    left = processes_of(folder)
    kill(left)
    return {pid: command for pid, command in left.items() if not OF_A_NODE.match(command)}


def kill(pids):
    """Kill processes, if they are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def at_work(folder):
    """Find a cluster's actors, and all processes that these have started: pid → command."""
    return {
        pid: command.decode(errors="replace")
        for pid, command in processes_of(folder).items()
        if not OF_A_NODE.match(command)
    }


def processes_of(folder):
    """Find all processes of the cluster whose sessions lie in `folder`: pid → command line.

    A process belongs to it whose environment names the folder, or whose parent belongs to it: some
    of Ray's write their title over their environment. This process, the driver, is not counted.
    """
    mark = f"RAY_TMPDIR={folder}\0".encode()
    parents = {}
    commands = {}
    marked = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            status = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if status[0] == b"Z":
                continue
            pid = int(entry.name)
            commands[pid] = (entry / "cmdline").read_bytes().rstrip(b"\0") + b"\0"
            parents[pid] = int(status[1])
            if mark in (entry / "environ").read_bytes():
                marked.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in marked} - marked:
        marked |= more
    return {pid: commands[pid] for pid in sorted(marked)}


def shared_names():
    """List the files of shared memory, without locks of multiprocessing: other programs' alone."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def until(condition, complaint):
    """Ask again and again, for `GRACE` seconds at most, until something is so."""
    deadline = time.monotonic() + GRACE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.02)
