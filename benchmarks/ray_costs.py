"""Measure what Ray costs: calls of actors on other nodes, and arrays that come back from there.

    python benchmarks/ray_costs.py [--rounds N] [--output FOLDER]

A cluster of three nodes on this machine: the driver is on one without CPUs, an actor on each of the
others. Wall and CPU time are for one call; CPU time is that of the driver and of all processes of
Ray together, and, of it, that of the trainer's machine: the driver and its node's raylet, which
receives objects for it. The same is measured over connections of a fleet (`cseq.fleet.link`). Last
come loops over fleets on these nodes, and the longest time for a batch when an agent is killed.
`scale.py` reads the results. `make check-ray` makes an environment that has Ray; cseq has to be on
the path (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report import head, machine, row
from harness.usage import clock, cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADDRESS = "127.0.0.2"  # Ray takes 127.0.0.1 for the machine's outer address
SIZES = {"8 kB": 8_000, "64 kB": 64_000, "1 MB": 10**6, "32 MB": 32 * 10**6, "81 MB": 81 * 10**6}
AHEAD = 3  # calls that each actor has: one in work and two that wait
BYTES = 640 * 10**6  # of a round of arrays, at most
SETTLE = 1.0  # seconds in which actors end: their CPU time is lost, no case may see that
raylets: list[int] = []  # the processes of the driver's node
CALLS = 600  # of a round, at most
BATCHES = 900  # of a loop over a fleet, of a millisecond each


@contextmanager
def two_actors() -> Iterator[list[Any]]:
    """Start the cluster and an actor on each of two nodes; leave nothing."""
    folder = tempfile.mkdtemp(prefix="cseq-ray-")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        node = {"object_store_memory": 1 << 30, "node_ip_address": ADDRESS}
        first = cluster.add_node(num_cpus=0, include_dashboard=False, **node)
        raylets[:] = [one.process.pid for one in first.all_processes["raylet"]]
        # Before there are others: Ray would connect to any of the nodes with this address.
        ray.init(address=cluster.address, _node_ip_address=ADDRESS, log_to_driver=False)
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"agent": 1}, **node)
        actors = [ray.remote(Agent).options(num_cpus=1).remote() for _ in range(2)]
        nodes = set(ray.get([actor.node.remote() for actor in actors]))
        if len(nodes | {ray.get_runtime_context().get_node_id()}) != 3:
            raise RuntimeError("driver and actors are not on three nodes")
        yield actors
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder)


class Agent:
    """What each actor runs."""

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        """Say which process this is."""
        return os.getpid()

    def null(self) -> None:
        """Do nothing."""

    def sleep(self, seconds: float) -> None:
        """Work for a while."""
        time.sleep(seconds)

    def array(self, size: int) -> Any:
        """Return the same array each time: making it costs nothing, sending it does."""
        import numpy as np

        if not hasattr(self, "made") or self.made.size != size:
            self.made = np.ones(size, np.uint8)
        return self.made

    def listen(self) -> tuple[str, int, bytes]:
        """Answer requests for such arrays over connections."""
        import ray

        from cseq.fleet.link import Listener

        host = ray.util.get_node_ip_address()
        self.listener = Listener(host, lambda request: [self.array(int(request[0]))])
        return host, self.listener.port, self.listener.key


def alone(actors: list[Any]) -> int:
    """One call after another."""
    import ray

    for number in range(CALLS):
        ray.get(actors[number % 2].null.remote())
    return CALLS


def pipelined(method: str, arguments: tuple[int, ...], calls: int, actors: list[Any]) -> int:
    """Keep `AHEAD` calls of each actor under way; take what is ready, and drop it."""
    import ray

    waiting: dict[Any, Any] = {}
    left = calls
    while waiting or left:
        while left and len(waiting) < AHEAD * len(actors):
            actor = actors[left % len(actors)]
            waiting[getattr(actor, method).remote(*arguments)] = actor
            left -= 1
        ready, _ = ray.wait(list(waiting), num_returns=1, fetch_local=True)
        for reference in ready:
            ray.get(reference)
            del waiting[reference]
        del reference, ready
    return calls


def linked(size: int, ahead: int, requests: int, actors: list[Any]) -> tuple[Any, ...]:
    """Keep `ahead` requests for such an array under way over each actor's connection."""
    import numpy as np
    import ray

    from cseq.fleet.link import Link

    links = [Link(*address) for address in ray.get([actor.listen.remote() for actor in actors])]
    for link in links:
        link.open()
    request, rooms = np.array([size]), [threading.Semaphore(ahead) for _ in links]
    before = usage()
    for number in range(requests):
        rooms[number % 2].acquire()
        links[number % 2].send(request, lambda _, room=rooms[number % 2]: room.release())
    for room in rooms:
        for _ in range(ahead):
            room.acquire()
    taken = [now - then for now, then in zip(usage(), before, strict=True)]
    for link in links:
        link.close()
    return requests, *taken


def prepared(size: int, actors: list[Any]) -> tuple[int, float, float, float]:
    """Make objects, then get them: the rate of Ray's transfer alone."""
    import ray

    made = [actor.array.remote(size) for actor in actors for _ in range(4)]
    ray.wait(made, num_returns=len(made), fetch_local=False)
    count = len(made)
    before = usage()
    while made:
        ray.get(made.pop())
    return count, *(now - then for now, then in zip(usage(), before, strict=True))


def started(_: list[Any]) -> int:
    """Start an actor; wait until it answers."""
    import ray

    actor = ray.remote(Agent).options(num_cpus=0, resources={"agent": 0.01}).remote()
    ray.get(actor.pid.remote())
    return 1


def killed(restarts: int, _: list[Any]) -> tuple[int, float, float, float]:
    """Kill an actor's process; wait until its call fails: when Ray has told of it."""
    import ray

    options = {"num_cpus": 0, "resources": {"agent": 0.01}, "max_restarts": restarts}
    actor = ray.remote(Agent).options(**options).remote()
    pid = ray.get(actor.pid.remote())
    call = actor.sleep.remote(60.0)
    ray.wait([call], timeout=0.2)
    before = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        seconds = time.perf_counter() - before
    ray.kill(actor)
    return 1, seconds, 0.0, 0.0  # the CPU time of what was killed is lost


class Sleeps:
    """An indexer that takes a millisecond."""

    def __getitem__(self, indices: Any) -> Any:
        time.sleep(0.001)
        return indices


class Images:
    """An indexer that has its batches of 4.8 MB ready."""

    def __init__(self) -> None:
        import numpy as np

        self.made = np.ones((32, 3, 224, 224), np.uint8)

    def __getitem__(self, indices: Any) -> Any:
        return self.made


def large(_: list[Any]) -> tuple[int, float, float, float]:
    """Take batches of 4.8 MB from two agents."""
    import cseq

    count = 300
    with cseq.RayFleet(Images, 2, 1, num_cpus=0, resources={"agent": 0.3}) as fleet:
        sequence = cseq.RaySequence(fleet, 32 * count, batch_size=32, out_type="null", buffer=64)
        with sequence.start() as batches:
            for _ in batches:
                pass
            before = usage()
            for _ in batches:
                pass
            taken = [now - then for now, then in zip(usage(), before, strict=True)]
    return count, *taken


def copied(_: list[Any]) -> tuple[int, float, float, float]:
    """Copy 4.8 MB from memory to memory, in this process alone: more of it than caches hold."""
    import numpy as np

    there, here = (np.ones((32, 4_816_896), np.uint8) for _ in range(2))
    before = usage()
    for number in range(320):
        np.copyto(here[number % 32], there[number % 32])
    return 320, *(now - then for now, then in zip(usage(), before, strict=True))


def gap(agents: list[int], _: list[Any]) -> tuple[int, float, float, float]:
    """Kill some of the agents of a fleet, in the middle of a loop: the longest time for a batch."""
    import cseq

    longest = 0.0
    with cseq.RayFleet(Sleeps, 3, 1, num_cpus=0, resources={"agent": 0.3}) as fleet:
        while [agent.state for agent in fleet.agents] != ["ready"] * 3:
            time.sleep(0.1)
        pids = [fleet.agents[number].pid for number in agents]
        with cseq.RaySequence(fleet, 8 * BATCHES, batch_size=8, out_type="null").start() as batches:
            before = time.perf_counter()
            for number, _ in enumerate(batches):
                now = time.perf_counter()
                longest = max(longest, now - before if number > BATCHES // 4 else 0.0)
                if number == BATCHES // 2:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                before = time.perf_counter()
    return 1, longest, 0.0, 0.0


def first(_: list[Any]) -> tuple[int, float, float, float]:
    """Start a sequence on a fleet whose agents are there; wait for its first batch."""
    import cseq

    with cseq.RayFleet(Sleeps, 2, 1, num_cpus=0, resources={"agent": 0.3}) as fleet:
        while [agent.state for agent in fleet.agents] != ["ready"] * 2:
            time.sleep(0.1)
        sequence = cseq.RaySequence(fleet, 8 * BATCHES, batch_size=8, out_type="null")
        with sequence.start() as batches:  # the workers have imported what they need
            next(iter(batches))
        before = usage()
        with sequence.start() as batches:
            next(iter(batches))
            taken = [now - then for now, then in zip(usage(), before, strict=True)]
    return 1, *taken


def usage() -> tuple[float, float, float]:
    """Seconds: of the clock, of all processes' CPU time, of that of the trainer's machine."""
    here = time.process_time() + sum(map(clock, raylets))
    return time.perf_counter(), cpu_seconds(os.getpid()), here


def timed(work: Callable[[list[Any]], int], actors: list[Any]) -> tuple[int, float, float, float]:
    """Count the calls, and what they took together."""
    before = usage()
    calls = work(actors)
    return calls, *(now - then for now, then in zip(usage(), before, strict=True))


def measured(work: Callable[[list[Any]], Any], actors: list[Any]) -> Any:
    """Let a case measure itself."""
    return work(actors)


def measure(rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Measure all, in turn: microseconds of a call, of CPU, and of it the trainer's machine's."""
    cases: dict[str, tuple[Callable[[list[Any]], Any], Callable[..., Any]]] = {
        "null call, one at a time": (alone, timed),
        "null calls, pipelined": (partial(pipelined, "null", (), CALLS), timed),
    }
    for name, size in SIZES.items():
        calls = min(CALLS, BYTES // size)
        cases[f"{name}, pipelined"] = partial(pipelined, "array", (size,), calls), timed
    cases["nothing over a connection, one at a time"] = partial(linked, 1, 1, CALLS), measured
    for name, size in SIZES.items():
        calls = min(CALLS, BYTES // size)
        cases[f"{name}, over connections"] = partial(linked, size, AHEAD, calls), measured
    size = SIZES["81 MB"]
    cases["81 MB, made beforehand"] = partial(prepared, size), measured
    cases["an actor, until it answers"] = started, timed
    cases["an actor killed, until its call fails"] = partial(killed, 0), measured
    cases["the same, with max_restarts=-1"] = partial(killed, -1), measured
    cases["a first batch, from an agent that is there"] = first, measured
    cases["4.8 MB, a batch of a loop"] = large, measured
    cases["4.8 MB, copied once"] = copied, measured
    cases["a loop over three agents, its longest gap"] = partial(gap, []), measured
    cases["the same, when one is killed"] = partial(gap, [1]), measured
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    with two_actors() as actors:
        for work, way in cases.values():  # warms up
            way(work, actors)
        time.sleep(SETTLE)
        before = usage()
        time.sleep(2.0)
        wall, idle, _ = (now - then for now, then in zip(usage(), before, strict=True))
        for _ in range(rounds):
            time.sleep(SETTLE)
            for name, (work, way) in cases.items():
                calls, *seconds = way(work, actors)
                found[name].append(tuple(1e6 * one / calls for one in seconds))
        found["nothing, for a second"] = [(1e6, 1e6 * idle / wall, 0.0)]
    return found


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    about, load = machine(("ray", "numpy")), os.getloadavg()[0]
    found = measure(arguments.rounds)
    costs = {
        name: dict(
            zip(
                ("wall_us", "cpu_us", "here_us"),
                map(statistics.median, zip(*figures, strict=True)),
                strict=True,
            )
        )
        for name, figures in found.items()
    }
    report = {"machine": about, "rounds": arguments.rounds, "load": load, "costs": costs}
    lines = [
        head(about, arguments.rounds),
        f"Load before: {load:.1f}. Times are microseconds of one call.\n",
        row(["what", "wall", "CPU", "of it the trainer's machine's", "GB/s"]),
        row(["---"] * 5),
    ]
    for name, cost in costs.items():
        size = SIZES.get(name.partition(",")[0])
        rate = f"{size / cost['wall_us'] / 1e3:.2f}" if size else ""
        figures = [f"{cost[key]:.0f}" for key in ("wall_us", "cpu_us", "here_us")]
        lines.append(row([name, *figures, rate]))
    table = "\n".join([*lines, ""])
    (arguments.output / "ray_costs.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.output / "ray_costs.md").write_text(table, encoding="utf-8")
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
