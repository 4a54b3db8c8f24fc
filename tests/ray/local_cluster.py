"""A Ray cluster of several nodes on this machine, and checks of what it leaves.

Each node has its own raylet and object store, so objects travel between nodes. All are at
127.0.0.2, as Ray takes 127.0.0.1 for the machine's outer address. The head has no CPUs: actors are
on the other nodes. Sessions have their own folder, which Ray finds in `RAY_TMPDIR`; its name is in
the environment of every process of the cluster, which identifies them.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

ADDRESS = "127.0.0.2"
# Bytes of each node's store.
STORE = 200 << 20
# Seconds in which an expected event must happen.
GRACE = 60.0

# A lost node is noticed within a second.
QUICK_DEATHS = {
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}
# A node's own processes, which exist with and without work.
OF_A_NODE = re.compile(
    rb"ray::(IDLE|DashboardAgent|RuntimeEnvAgent)|[^\0]*/(raylet|gcs_server)\0"
    rb"|[^\0]*/python[\d.]*\0(-u\0)?[^\0]*/site-packages/ray/"
)


@dataclass
class LocalCluster:
    """A running cluster; this process is its driver."""

    cluster: Cluster
    folder: Path
    nodes: list = field(default_factory=list)

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
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def stored(self):
        of = "object_store_memory"
        return int(ray.cluster_resources()[of] - ray.available_resources().get(of, 0))

    def spills(self):
        """Return the logs of processes that wrote objects to a disk; one exists from the start."""
        return set(self.folder.glob("ray/session_*/logs/*spill_worker*"))


@contextlib.contextmanager
def local_cluster(nodes, **system):
    """Start a cluster and connect to it; leave nothing. `system` has Ray's internal settings."""
    # A short name, since paths of sockets, which are below, have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="cseq-ray-"))
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(folder))
    cluster = Cluster()
    running = LocalCluster(cluster, folder)
    try:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": system}
        cluster.add_node(node_ip_address=ADDRESS, object_store_memory=STORE, **head)
        # This precedes other nodes: Ray would connect to any node with this address.
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


def await_end(folder):
    """Wait until no process is left; kill those that do not end, and return those not of Ray."""
    with contextlib.suppress(TimeoutError):
        until(lambda: not processes_of(folder), "processes are left")
    left = at_work(folder)
    kill(processes_of(folder))
    return left


def kill(pids):
    """Kill processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def at_work(folder):
    """Return a cluster's actors, and all processes that they started: pid → command."""
    return {
        pid: command.decode(errors="replace")
        for pid, command in processes_of(folder).items()
        if not OF_A_NODE.match(command)
    }


def processes_of(folder):
    """Return all processes of the cluster with sessions in `folder`: pid → command line.

    A process belongs to it if its environment names the folder, or if its parent belongs to it:
    some of Ray's write their title over their environment. This process, the driver, does not
    count.
    """
    mark, found = f"RAY_TMPDIR={folder}\0".encode(), {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            # It is gone, or another user's.
            if is_marked(pid, mark):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") + b"\0"
    return found


def is_marked(pid, mark):
    """Return whether a process that is no zombie has a variable, or descends from one with it."""
    state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    if state == b"Z" or pid in (1, os.getpid()):
        return False
    is_own = mark in Path(f"/proc/{pid}/environ").read_bytes()
    return is_own or (int(parent) > 1 and is_marked(int(parent), mark))


def until(condition, complaint):
    """Check repeatedly, for at most `GRACE` seconds, until a condition holds."""
    deadline = time.monotonic() + GRACE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.02)
