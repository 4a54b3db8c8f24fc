"""Fleets of Ray actors and the threads that call them.

::

    loop ◄── ring ◄── thread ═══ numbers ══► agent (a Ray process) ──► indexer
                             ◄══ batch ════

Each thread is connected to one agent and requests one batch at a time. Ray starts and restarts the
agents.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import math
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq import check, system
from cseq._memory import keep_freed
from cseq.arguments import MOST_BUFFER
from cseq.encoding import failure
from cseq.encoding.pickling import dump, dumps
from cseq.engine.crews.threads import ThreadCrew
from cseq.errors import WorkerDied
from cseq.fleet.wire import PROOF_SECONDS, Buffers, Connection
from cseq.indexing import context
from cseq.indexing.indexer import Indexing, advised, build_seeded, check_worker, leaving
from cseq.indexing.seeding import Seeds
from cseq.options import Size
from cseq.threads import log_later

try:
    import ray
    from ray import exceptions
except ImportError as error:
    raise ImportError(
        "RaySequence and RayFleet need Ray, which is not installed or has no build for this "
        "Python; run pip install 'cseq-loader[ray]'"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq._work import Runner
    from cseq.arguments import Job
    from cseq.engine.tickets.base import Tickets
    from cseq.fleet.wire import Message

    # The reference is passed in a list; otherwise, Ray would fetch the object for every call.
    Payload: TypeAlias = ray.ObjectRef[tuple[bytes, list[Any]]]

__all__ = ["FleetCrew", "RayFleet"]

# A batch fails once `TRIES` agents have been lost. An agent runs up to `CALLS` Ray calls at a time.
# A thread contacts up to `ASKED` agents at once. The first batch may take `STARTING` * `timeout`.
TRIES, CALLS, ASKED, STARTING = 3, 8, 8, 10
# Seconds to wait for an agent before trying others (`AGAIN`) and between attempts (`PAUSE`).
AGAIN, PAUSE = 0.1, 0.05
# Seconds until a thread retries its own agent (`AWAY`) or logs that none is ready (`SHORT`).
AWAY, SHORT = 2.0, 10.0
# Exceptions that mean that an agent is not ready yet (`OPEN`) or has been lost (`LOST`).
OPEN = EOFError, OSError, exceptions.ActorUnavailableError
LOST = *OPEN, pickle.UnpicklingError, exceptions.RayActorError
INSTALL = (
    "on node {}: install the module on all nodes, or let Ray install it with "
    "runtime_env={{'pip': [...]}} or {{'py_modules': [...]}}"
)


# -- on the nodes


class Raised(NamedTuple):
    """A packed exception. `is_setup` is True if it was raised before the indexer was created."""

    packed: bytes
    is_setup: bool


def versions() -> str:
    """Return the versions that must match between the trainer and the agent."""
    python, numpy = ".".join(map(str, sys.version_info[:2])), np.__version__.partition(".")[0]
    return f"cseq {sys.modules['cseq'].__version__}, Python {python} and numpy {numpy}"


def unpickled(payload: list[Payload]) -> Any:
    """Fetch the worker from Ray and unpickle it."""
    data, buffers = ray.get(payload[0])
    return pickle.loads(data, buffers=[memoryview(buffer) for buffer in buffers])[0]


class Agent:
    """A worker process with one thread that makes batches.

    If a batch takes longer than `timeout`, the process logs its stacks and exits.
    """

    def __init__(
        self, number: int, of: int, timeout: float | None, threads: int | None, *, seeds: bool
    ) -> None:
        keep_freed()
        self._timeout, self._threads = timeout, threads
        self._context = context.BatchContext(number, of)
        self._seeds = Seeds(self._context) if seeds else None
        self._indexer: Any = None
        self._has_made = False
        self._node = ray.util.get_node_ip_address()
        self._thread = ThreadPoolExecutor(1, "cseq-agent", context.enter, (self._context,))

    def about(self, payload: list[Payload], trainer: str) -> tuple[int, str]:
        """Return the PID and node. Set the worker here, because Ray drops constructor arguments."""
        if trainer != versions():
            raise ImportError(
                f"the agent on node {self._node} has {versions()}, but the training process has "
                f"{trainer}: install the same versions on all nodes, or pass runtime_env="
            )
        self._payload = payload
        return os.getpid(), self._node

    def meet(self, address: tuple[Any, ...], key: bytes) -> None:
        """Serve a trainer in a new thread, because Ray resets `system.OPENMP` after this call."""
        threading.Thread(target=self._serve, args=(address, key), daemon=True).start()

    def make_batch(self, *request: Any) -> Message:
        """Make a batch and return it through Ray."""

        def make() -> Message:
            data, buffers = self._message(*request)
            # Copy the buffers, because the indexer may keep them.
            return data, [np.array(buffer) for buffer in buffers]

        return self._thread.submit(make).result()

    def _serve(self, address: tuple[Any, ...], key: bytes) -> None:
        def make() -> None:
            trainer.send(*self._message(*request))

        trainer = Connection(socket.create_connection(address, PROOF_SECONDS), key, is_agent=True)
        with contextlib.closing(trainer), contextlib.suppress(*OPEN):
            while True:
                request = pickle.loads(trainer.receive()[0])
                self._thread.submit(make).result()

    def _message(self, *request: Any) -> Message:
        buffers: list[memoryview] = []
        if self._timeout is not None:
            limit = self._timeout * (1 if self._has_made else STARTING)
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
        try:
            batch = self._batch(*request)
            if batch is None:
                raise Indexing.forgotten(self._indexer)
            data = dumps(batch, buffers)
            self._has_made = True
            return data, buffers
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            if isinstance(error, ModuleNotFoundError):
                failure.annotate(error, INSTALL.format(self._node))
            if not self._has_made:
                advised(self._indexer, error)
            return dumps(Raised(failure.pack(error), self._indexer is None)), []
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _batch(self, numbers: context.Numbers, indices: NDArray[np.int64], on_error: str) -> Any:
        """Make a batch. If doing so imports a module with a random generator, remake the batch."""
        if self._indexer is None:
            own = ray.get_runtime_context().runtime_env.get("env_vars") or {}
            if self._threads is not None and system.OPENMP not in own:
                os.environ.pop(system.OPENMP, None)
            system.limit_threads(self._threads)
            self._indexer = build_seeded(unpickled(self._payload), self._seeds, copied=True)
        self._context.left = ()
        indexer = leaving(self._indexer, self._context, on_error)
        while True:
            self._context.set_ticket(numbers)
            if self._seeds is not None:
                self._seeds.seed_present()
            batch = indexer[indices.copy()]
            if self._seeds is None or not self._seeds.has_new():
                return batch


# -- in a trainer


class RayFleet:
    """Worker processes on a Ray cluster: Ray actors that make batches.

    Pass a fleet to `RaySequence` instead of `worker`. Several ranks and sequences can share a
    fleet. A fleet that is pickled for a Ray task or a `TorchTrainer` refers to the same
    actors. The constructor calls ``ray.init()`` if necessary, and does not wait for the actors.

    Parameters
    ----------
    worker : object
        As in `MSequence`, but built once per actor. Arrays are stored once per node, and are
        read-only.
    nodes, num_workers : int, optional
        The fleet has `nodes` times `num_workers` processes. If both are omitted, it has as many as
        the nodes can run when it is created. If one is omitted, it defaults to the number of nodes
        with enough CPUs, or to the number of workers that the largest node can run, respectively.
    num_cpus : float
        The number of CPUs per worker process.
    timeout : float, optional
        The time limit for a batch in seconds. The first batch of an actor may take ten times as
        long. If a batch takes longer, Ray restarts the actor, and another actor makes the batch.
    threads : int or None
        The number of library threads per worker process, or None for Ray's setting (one per CPU).
    seed_globals : bool
        As in `MSequence`.
    **options
        Options of `ray.remote` for each actor, such as `num_gpus` and `runtime_env`. By default,
        `scheduling_strategy` is 'SPREAD' and `max_restarts` is -1.

    Attributes
    ----------
    handles : list
        The actors. After the fleet is closed, the list is empty.

    Raises
    ------
    TypeError
        If the worker cannot be pickled, or if another argument has the wrong type.
    ValueError
        If an argument is invalid, or if a default is needed and no node has enough CPUs.
    """

    is_own = False

    def __init__(
        self,
        worker: Any,
        nodes: int | None = None,
        num_workers: int | None = None,
        *,
        num_cpus: float = 1,
        timeout: float | None = None,
        threads: int | None = 1,
        seed_globals: bool = True,
        **options: Any,
    ) -> None:
        check_worker(worker)
        nodes = None if nodes is None else check.integer("nodes", nodes)
        num_workers = None if num_workers is None else check.integer("num_workers", num_workers)
        threads = None if threads is None else check.integer("threads", threads)
        self.timeout = check.seconds("timeout", timeout)
        seeds = check.flag("seed_globals", seed_globals)
        ours: dict[str, object] = {
            "scheduling_strategy": "SPREAD",
            "max_restarts": -1,
            "num_cpus": num_cpus,
        }
        make = ray.remote(Agent).options(**ours | options, max_concurrency=CALLS).remote
        data, views, _ = dump(worker)
        if not ray.is_initialized():
            ray.init()
        total = count_actors(nodes, num_workers, num_cpus)
        self._payload = [ray.put((data, [np.frombuffer(view, np.uint8) for view in views]))]
        self._worker, self._is_copy = worker, False
        self.handles = [make(k, total, self.timeout, threads, seeds=seeds) for k in range(total)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_worker": None, "_is_copy": True}

    @property
    def worker(self) -> Any:
        """The user's worker. In an unpickled fleet, it is fetched on first use."""
        if self._worker is None:
            self._worker = unpickled(self._payload)
        return self._worker

    def ask(self, handle: ray.Handle) -> ray.ObjectRef[tuple[int, str]]:
        """Call `Agent.about` to set an actor's worker and get its PID and node."""
        return handle.about.remote(self._payload, versions())

    def close(self) -> None:
        """Kill the actors, unless this fleet was unpickled."""
        handles, self.handles, self._payload = self.handles, [], []
        for handle in handles if ray.is_initialized() and not self._is_copy else ():
            ray.kill(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_actors(nodes: int | None, num_workers: int | None, num_cpus: float) -> int:
    """Return the number of actors to start."""
    cpu_counts = (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    rooms = [int(cpus // (num_cpus or 1)) for cpus in cpu_counts if cpus >= (num_cpus or 1)]
    if not rooms and None in (nodes, num_workers):
        raise ValueError(
            f"num_cpus={num_cpus:g}, but no node in the cluster currently has that many CPUs; "
            "pass nodes= and num_workers= to make Ray wait for such nodes"
        )
    if nodes is None and num_workers is None:
        return sum(rooms)
    return (nodes or len(rooms)) * (num_workers or max(rooms))


class Caller:
    """A thread's indexer, which requests batches from an agent."""

    def __init__(self, crew: FleetCrew, worker: int) -> None:
        self._crew, self._worker = crew, worker
        # With RAY_USE_TLS, `_connection` stays None, and batches are returned through Ray.
        self._own_agent = self._agent = worker % len(crew.handles)
        self._connection: Connection | None = None
        self._until = 0.0
        self._name = "an agent"

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        batch_context: Any = context.here.batch_context
        now: Runner = batch_context.ticket
        crew = self._crew
        numbers = context.Numbers(now.seed, now.epoch, now.batch, now.start, now.parts())
        lost: list[str] = []
        while len(lost) < TRIES:
            self._open(is_lost=bool(lost))
            try:
                data, buffers = self._make(numbers, indices, crew.on_error)
            except LOST as error:
                self.close()
                crew.calls.pop(self._agent, None)
                if isinstance(error, TimeoutError):
                    ray.kill(crew.handles[self._agent], no_restart=False)
                lost.append(f"{self._name}: {failure.line_of(error)}")
                continue
            made: object = pickle.loads(data, buffers=buffers)
            if not isinstance(made, Raised):
                return made
            raised = failure.ordinary(failure.unpack(made.packed))
            failure.annotate(raised, f"raised by {self._name}")
            raise crew.failed(raised) if made.is_setup else raised
        location = failure.location_of(now.epoch, now.batch, indices.tolist(), failure.MOST)
        died = WorkerDied(
            f"{location} was lost on {TRIES} agents: {'; '.join(lost)}",
            epoch=now.epoch,
            batch=now.batch,
            indices=indices.tolist(),
        )
        raise died if crew.on_error == "skip" else crew.failed(died)

    def _open(self, *, is_lost: bool) -> None:
        """Connect to this thread's agent, or to another one if that agent is not ready."""
        if time.monotonic() < self._until:
            return
        crew, due = self._crew, time.monotonic() + SHORT
        patience = PAUSE if self._until else AGAIN
        several = len(crew.handles)
        rest = [(self._own_agent + k) % several for k in range(1, several)]
        turns = [[self._own_agent], *(rest[k : k + ASKED] for k in range(0, len(rest), ASKED))]
        for agents in itertools.cycle(turns[1:] + turns[:1] if is_lost else turns):
            try:
                self._connect(agents, patience)
            except OPEN as error:
                if self._until:
                    self._until = time.monotonic() + AWAY
                else:
                    crew.closed.wait(PAUSE)
                # Only worker 0 logs a warning, because all threads would log the same message.
                if time.monotonic() > due and not self._worker:
                    due = math.inf
                    why = f"{self._name}: {failure.line_of(error)}"
                    log_later(logging.WARNING, "no agent is ready yet; %s", why)
            except exceptions.RayError as error:
                raise crew.failed(error) from None
            if crew.closed.is_set():
                self.close()
                raise InterruptedError("the sequence is already finished")
            if self._until:
                return

    def _connect(self, agents: list[int], seconds: float) -> None:
        crew = self._crew
        calls: dict[ray.ObjectRef[tuple[int, str]], int] = {}
        for k in agents:
            call = crew.calls.get(k) or crew.calls.setdefault(k, crew.fleet.ask(crew.handles[k]))
            calls[call] = k
        while calls:
            answered = ray.wait(list(calls), timeout=seconds)[0]
            if not answered:
                raise TimeoutError("Ray has not started the agent yet")
            call, k = answered[0], calls.pop(answered[0])
            crew.calls.pop(k, None)
            with contextlib.suppress(*OPEN if calls else ()):
                ray.get(call)
                break
        self.close()
        pid, node = ray.get(call)
        self._agent, self._name = k, f"the agent with pid {pid} on node {node}"
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            host, key = ray.util.get_node_ip_address(), secrets.token_bytes(32)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as server:
                server.settimeout(PROOF_SECONDS)
                crew.handles[k].meet.remote(server.getsockname(), key)
                self._connection = Connection(server.accept()[0], key, is_agent=False)
        self._until = math.inf if k == self._own_agent else time.monotonic() + AWAY

    def _make(self, *request: Any) -> Message:
        """Request a batch. Raise one of `LOST` if the agent is lost."""
        crew, agent = self._crew, self._connection
        handle, limit = crew.handles[self._agent], crew.fleet.timeout
        if agent is None:
            data, buffers = ray.get(handle.make_batch.remote(*request))
            own = [memoryview(crew.take_memory(buffer.nbytes)) for buffer in buffers]
            for mine, buffer in zip(own, buffers, strict=True):
                mine[:] = buffer
            return data, own
        agent.send(pickle.dumps(request), [])
        while not agent.wait(limit):
            if not ray.wait([crew.fleet.ask(handle)], timeout=limit)[0]:
                raise TimeoutError(f"no response within {limit} s")
        return agent.receive(crew.take_memory)

    def close(self) -> None:
        """Close the connection. Pending calls raise an exception."""
        self._until = 0.0
        if self._connection is not None:
            self._connection.close()


def of_fleet(job: Job) -> Job:
    """Return a copy of a job with one thread per agent. Create a fleet if none was passed."""
    fleet, options = job.fleet, job.options
    if fleet is None:
        own: dict[str, Any] = {"timeout": options.timeout, "threads": options.threads}
        fleet = RayFleet(job.worker, 1, job.num_workers, seed_globals=job.seed_globals, **own)
        fleet.is_own = True
    if not fleet.handles:
        raise RuntimeError("this fleet is closed; create a new one")
    threads, buffer = len(fleet.handles), job.start.buffer
    if job.auto[1]:
        buffer = min(max(buffer, 2 * threads), MOST_BUFFER)
    return job._replace(
        worker=fleet,
        num_workers=threads,
        buffer=max(job.buffer, buffer),
        start=Size(threads, buffer),
        options=options._replace(timeout=None),
    )


class FleetCrew(ThreadCrew):
    """Threads that request batches from agents."""

    of = "RaySequence"

    def __init__(self, tickets: Tickets, fleet: RayFleet) -> None:
        self.fleet, sampler = fleet, tickets.sampler
        assert sampler is not None
        first = sampler.rank * len(fleet.handles) // sampler.world_size
        self.handles = fleet.handles[first:] + fleet.handles[:first]
        self.calls: dict[int, ray.ObjectRef[tuple[int, str]]] = {}
        self.on_error, self.take_memory = tickets.errors, Buffers().take_memory
        self.closed = threading.Event()
        self._callers: list[Caller] = []
        super().__init__(tickets)

    def prepare(self, worker: Any, name: str = "worker") -> None:  # noqa: ARG002
        """Use `_caller` instead of the worker to create indexers."""
        super().prepare(self._caller, name)

    def _caller(self) -> Caller:
        """Create the indexer of a thread. Only one thread at a time calls this."""
        self._callers.append(Caller(self, len(self._callers)))
        return self._callers[-1]

    def failed(self, error: BaseException) -> BaseException:
        """Make the loop raise an error that would occur on any agent, and return the error."""
        self._group.fail(error)
        return error

    def close(self, *, hurried: bool) -> None:
        """Stop the threads. If the fleet was created for this crew, close it too."""
        self.closed.set()
        for caller in self._callers:
            caller.close()
        super().close(hurried=hurried)
        if self.fleet.is_own:
            self.fleet.close()
