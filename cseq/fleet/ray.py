"""Fleets of Ray actors: an agent on each of some nodes, with worker processes.

Ray starts the agents, restarts those that die, and carries parcels and answers. It repeats no call:
what is lost is made anew by the ledger of the trainer that asked for it. This is the only module
that imports ray.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import check
from cseq.arguments import MAX_RESTARTS, WorkerOptions, batch_size_of
from cseq.encoding import failure
from cseq.encoding.pickling import Pickled, dump
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.server import TicketServer
from cseq.indexing.indexer import check_worker

try:
    import ray
    from ray import exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ImportError(
        "RaySequence and RayFleet need Ray, which is not installed here or has no build for this "
        "Python: pip install 'cseq-loader[ray]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq.fleet.agent import Outcome

__all__ = ["RayFleet"]

log = logging.getLogger("cseq")

CALLS = 4  # of an agent at a time: parcels that it has, and one for signs of life
LARGEST = 4096  # samples of a batch that a fleet makes, unless it is made for larger ones
NAMESPACE = "cseq"


# ── in the actor ───────────────────────────────────────────────────────────────────────────


class About(NamedTuple):
    """What an agent says of itself."""

    node: str  # its address
    pid: int
    system: str  # what has to be the same in the trainer
    workers: int


def system() -> str:
    """Name what two processes must have in common to exchange batches."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"cseq {sys.modules['cseq'].__version__} on Python {python}, {sys.byteorder}-endian"


class AgentActor:
    """A ticket server in a process of Ray's.

    Parameters
    ----------
    payload : tuple
        The fields of a `Pickled` worker, its buffers as arrays.
    num_workers, batch_size, options, seed_globals
        See `TicketServer`.
    """

    def __init__(
        self,
        payload: tuple[bytes, list[Any], tuple[str, ...]],
        num_workers: int,
        batch_size: int,
        options: WorkerOptions,
        *,
        seed_globals: bool,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the trainer's to handle
        data, buffers, modules = payload
        worker = Pickled(data, [memoryview(buffer) for buffer in buffers], modules)
        self._workers = num_workers
        self._server = TicketServer(
            worker, num_workers, batch_size, options, seed_globals=seed_globals
        )
        self._server.start()

    def make(self, request: NDArray[np.int64]) -> NDArray[np.uint8] | Failed:
        """Make the batches of a parcel."""
        try:
            return self._server.make(request)
        except InterruptedError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the training loop
            return Failed(failure.pack(error))

    def about(self) -> About:
        """Give a sign of life."""
        return About(ray.util.get_node_ip_address(), os.getpid(), system(), self._workers)

    def close(self) -> None:
        """End the workers."""
        self._server.close()


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


def outcome_of(future: Future[Any]) -> Any:
    """Return what has become of a call of an agent: its result, `Lost` or `Failed`."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, exceptions.RayTaskError):
        cause = error.as_instanceof_cause()
        if not isinstance(cause, InterruptedError):  # the agent is being closed
            return Failed(failure.pack(cause))
    final = isinstance(error, exceptions.ActorDiedError)
    return Lost(failure.line_of(error), final)


class RayAgent:
    """An agent, as a trainer sees it."""

    def __init__(self, handle: Any, gone: Callable[[Lost], None]) -> None:
        self._handle = handle
        self._gone = gone
        self._about: About | None = None  # once it has given a sign of life
        self.name = "an agent that is not there yet"

    def send(self, request: NDArray[np.int64], done: Callable[[Outcome], None]) -> None:
        """Send a parcel; `done` is called once, with what becomes of it."""

        def finish(future: Future[Any]) -> None:
            done(self._looked_at(outcome_of(future)))

        self._handle.make.remote(request).future().add_done_callback(finish)

    def ping(self, done: Callable[[Lost | Failed | None], None]) -> None:
        """Ask for a sign of life; `done` is called with None once it comes."""

        def finish(future: Future[Any]) -> None:
            found = self._looked_at(outcome_of(future))
            if isinstance(found, About):
                self._about, self.name = found, f"pid {found.pid} on node {found.node}"
                found = None if found.system == system() else self._another_system(found)
            done(found)

        self._handle.about.remote().future().add_done_callback(finish)

    def _another_system(self, about: About) -> Failed:
        """Refuse an agent whose batches could not be read here."""
        return Failed(
            failure.pack(
                RuntimeError(
                    f"the agent with {self.name} has {about.system}, and the trainer {system()}: "
                    "install the same on all nodes, or give runtime_env="
                )
            )
        )

    def _looked_at(self, outcome: Any) -> Any:
        """Have an agent that is gone for good replaced; one that never was there is a failure."""
        if isinstance(outcome, Lost) and outcome.final:
            if self._about is None:
                return Failed(
                    failure.pack(RuntimeError(f"an agent did not start: {outcome.cause}"))
                )
            self._gone(outcome)
        return outcome


@dataclass(frozen=True)
class Placement:
    """Where agents are to be, and what each gets: arguments of `ray.remote`."""

    nodes: int | None
    num_workers: int | None
    resources: dict[str, Any]

    def plan(self) -> list[tuple[int, dict[str, Any]]]:
        """Return for each agent its number of workers, and its arguments of `ray.remote`."""
        if self.nodes is not None:
            workers = self.num_workers or max(1, int(self.resources.get("num_cpus") or 1))
            spread = {"scheduling_strategy": "SPREAD"} if self.nodes > 1 else {}
            own = {"num_cpus": workers, **spread, **self.resources}
            return [(workers, own)] * self.nodes
        found = []
        for node in ray.nodes():
            cpus = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
            wanted = self.num_workers or int(self.resources.get("num_cpus") or cpus)
            if 0 < wanted <= cpus:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                own = {"num_cpus": wanted, "scheduling_strategy": there, **self.resources}
                found.append((wanted, own))
        if not found:
            raise ValueError(
                f"nodes=None asks for an agent on every node that has {self.num_workers or 'any'} "
                "CPUs, and the cluster has no such node now: give nodes="
            )
        return found


class RayFleet:
    """Agents on the nodes of a Ray cluster, each with worker processes that make batches.

    Give it to `RaySequence` in the place of `worker`. Several sequences, with other seeds and batch
    sizes, and several ranks can use one fleet at a time: pickled (as an argument of a Ray task, or
    of a `TorchTrainer`), it refers to the same agents, which end with the fleet that made them.

    Parameters
    ----------
    worker : object
        As in `MSequence`. Made once in each worker process.
    nodes : int, optional
        Agents. None: one on every node that has CPUs when the fleet starts.
    num_workers : int, optional
        Worker processes of each agent. None: its `num_cpus`; without these, all CPUs of its node.
    batch_size : int
        The most samples of a batch that is asked for.
    num_cpus, num_gpus, resources, memory, label_selector, runtime_env
        What each agent gets: see `ray.remote`.
    name : str, optional
        The fleet outlives its maker, and other jobs find it: `RayFleet.find`. `close` ends it.
    start_method, max_restarts, timeout, on_timeout, memory_limit, threads, preload, seed_globals
        As in `MSequence`, for the worker processes of each agent.

    Attributes
    ----------
    worker : object
        In the process that has made the fleet; elsewhere None.
    """

    def __init__(
        self,
        worker: Any,
        nodes: int | None = None,
        num_workers: int | None = None,
        *,
        batch_size: int = LARGEST,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: dict[str, float] | None = None,
        memory: float | None = None,
        label_selector: dict[str, str] | None = None,
        runtime_env: dict[str, Any] | None = None,
        name: str | None = None,
        start_method: str | None = None,
        max_restarts: int = MAX_RESTARTS,
        timeout: float | None = None,
        on_timeout: str = "raise",
        memory_limit: int | str | None = None,
        threads: int | None = 1,
        preload: Any = None,
        seed_globals: bool = True,
    ) -> None:
        check_worker(worker)
        self.worker = worker
        self.batch_size = batch_size_of(batch_size)
        self._name = name
        own = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": resources,
            "memory": memory,
            "label_selector": label_selector,
            "runtime_env": runtime_env,
        }
        self._placement = Placement(
            None if nodes is None else check.count("nodes", nodes),
            None if num_workers is None else check.count("num_workers", num_workers),
            {key: value for key, value in own.items() if value is not None},
        )
        self._options = WorkerOptions.checked(
            start_method, max_restarts, timeout, on_timeout, memory_limit, threads, preload
        )
        self._seed_globals = check.flag("seed_globals", seed_globals)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._agents: dict[int, RayAgent] = {}
        self._handles: dict[int, tuple[Any, int, dict[str, Any]]] = {}  # with what made them
        self._watchers: list[Callable[[], None]] = []
        self._payload: Any = None  # the worker, in Ray's store
        self._owned = True
        self._closed = False

    def start(self) -> Self:
        """Start the agents, unless they are started; do not wait until they are there.

        Connects to Ray first, where that has not been done: as `ray.init()` does.

        Raises
        ------
        TypeError
            The worker cannot be pickled.
        ValueError
            ``nodes=None``, and no node of the cluster has the CPUs.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed: make another one")
            if self._handles or not self._owned:
                return self
            if not ray.is_initialized():
                ray.init()
            pickled = dump(self.worker)
            buffers = [np.frombuffer(view, np.uint8) for view in pickled.buffers]
            self._payload = ray.put((pickled.data, buffers, pickled.modules))
            for workers, own in self._placement.plan():
                self._add(workers, own)
        return self

    def _add(self, workers: int, own: dict[str, Any]) -> None:
        """Start an agent."""
        number = next(self._numbers)
        make = ray.remote(AgentActor).options(
            max_restarts=-1, max_task_retries=0, max_concurrency=CALLS, **own
        )
        handle = make.remote(
            self._payload,
            workers,
            self.batch_size,
            self._options,
            seed_globals=self._seed_globals,
        )
        self._handles[number] = handle, workers, own
        self._agents[number] = RayAgent(handle, lambda lost: self._replace(number, lost))

    def _replace(self, number: int, lost: Lost) -> None:
        """Start another agent for one that Ray does not restart; called on any thread."""
        with self._lock:
            found = self._handles.pop(number, None)
            if found is None or self._closed:
                return
            del self._agents[number]
            if self._owned:
                log.warning("an agent of the fleet is gone, and is replaced: %s", lost.cause)
                _, workers, own = found
                self._add(workers, own)
        self._tell()

    def _tell(self) -> None:
        """Tell the dispatchers that the agents are others."""
        for notify in list(self._watchers):
            notify()

    # -- for the pool

    @property
    def waits_for(self) -> str:
        """What agents wait for that are not there yet."""
        wants = self._placement.resources or {"num_cpus": "as many as there are workers"}
        return f"Ray has not started one; each asks for {wants}"

    @property
    def workers(self) -> int:
        """Worker processes of all agents."""
        with self._lock:
            return sum(workers for _, workers, _ in self._handles.values())

    def attach(self, notify: Callable[[], None]) -> Mapping[int, RayAgent]:
        """Return the present agents, by number; `notify` is called when they change."""
        self.start()
        self._watchers.append(notify)
        return self._agents

    def detach(self, notify: Callable[[], None]) -> None:
        """Do not call `notify` any more."""
        with contextlib.suppress(ValueError):
            self._watchers.remove(notify)

    # -- the end

    def close(self) -> None:
        """End the agents and their workers. A fleet that was unpickled only forgets them."""
        with self._lock:
            closed, self._closed = self._closed, True
            handles, self._handles = self._handles, {}
            self._agents.clear()
            self._payload = None
        if closed or not self._owned or not ray.is_initialized():
            return
        asked = [handle.close.remote() for handle, _, _ in handles.values()]
        ray.wait(asked, num_returns=len(asked), timeout=2.0) if asked else None
        for handle, _, _ in handles.values():
            ray.kill(handle)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
