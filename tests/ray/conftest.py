"""The fixtures of tests with Ray: a shared cluster, and a check that each test leaves it unchanged.

`make check-ray` runs them. Without Ray, there is nothing to collect.
"""

import gc
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import drawing
    import ray
    from drawing import DrawsSlowly, await_agents
    from local_cluster import QUICK_DEATHS, at_work, kill, local_cluster, until

    # Actors, tasks and fleets of the tests need it.
    ray.cloudpickle.register_pickle_by_value(drawing)
    cloudpickle.register_pickle_by_value(drawing)
except ImportError:
    collect_ignore_glob = ["test_*.py"]

import cseq


def pytest_collection_modifyitems(items):
    """Ignore Ray's many warnings; cseq's stay errors. Fleets get the tests' own workers."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.filterwarnings("error:iterating a manager"))


@pytest.fixture(scope="session")
def cluster(watched_names):
    """Yield a head without CPUs and two nodes with one each, whose deaths are noticed at once."""
    names_left = watched_names()
    with local_cluster(2, **QUICK_DEATHS) as running:
        yield running
    assert names_left() == set()


@pytest.fixture
def fleet(cluster):
    """Yield a fleet of two agents with a worker each, on two nodes, both of them ready."""
    with cseq.RayFleet(DrawsSlowly, 2, 1) as fleet:
        await_agents(fleet)
        yield fleet


@pytest.fixture
def added_node(cluster):
    """Yield another node, with the resource `added`; the test may remove it."""
    node = cluster.add_node(resources={"added": 1})
    yield node
    if node in cluster.nodes:
        cluster.remove_node(node)


@pytest.fixture(autouse=True)
def nothing_left_behind(request, cluster, watched_names):
    """Fail a test that leaves an actor, a process, an object, a thread or a name, or that spilled.

    This replaces the check of all other tests, as Ray starts processes and threads at any time.
    """
    threads, names_left = set(threading.enumerate()), watched_names()
    nodes, spills = list(cluster.nodes), cluster.spills()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        # A failed test's traceback keeps its objects alive.
        kill(at_work(cluster.folder))
        return
    # These are handles of actors and references to objects.
    gc.collect()
    until(lambda: not at_work(cluster.folder), f"the test left {at_work(cluster.folder)}")
    until(lambda: cluster.stored() == 0, "the test left objects in a store")
    assert cluster.spills() == spills, "objects were spilled to a disk"
    assert cluster.nodes == nodes
    assert {thread.name for thread in set(threading.enumerate()) - threads} <= RAYS_THREADS
    assert names_left() == set()


# Ray starts these at their first use, and ends them with the connection.
RAYS_THREADS = {"ray_import_thread", "ray_listen_error_messages", "ray_print_logs"}
