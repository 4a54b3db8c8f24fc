"""Fleets of Ray actors, and the crew of threads that ask them for batches.

::

    loop ◄── ring ◄── thread ═══ numbers ══► agent (a process of Ray's) ──► indexer
                             ◄══ batch ════

A thread asks one agent for one batch over one connection: nothing has to be matched, and a death is
the end of the connection. Ray starts the agents, spreads them, and starts again those that died.
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
from cseq.threads import tell

try:
    import ray
    from ray import exceptions
except ImportError as error:
    raise ImportError(
        "RaySequence and RayFleet need Ray, which is not installed here or has no build for this "
        "Python: pip install 'cseq-loader[ray]'"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq._work import Runner
    from cseq.arguments import Job
    from cseq.engine.tickets.base import Tickets
    from cseq.fleet.wire import Message

    # A worker in Ray's store, in a list: Ray would fetch it for a call otherwise.
    Payload: TypeAlias = ray.ObjectRef[tuple[bytes, list[Any]]]

__all__ = ["FleetCrew", "RayFleet"]

TRIES = 3  # agents that may be lost with a batch
CALLS = 8  # of Ray's that an agent answers at a time
STARTING = 10  # times as long as another batch: what the first one of an agent may take
ASKED = 8  # agents at a time, in the place of one that is not there
AGAIN, PAUSE = 0.1, 0.05  # seconds: how long an agent is waited for before another one, and between
AWAY = 2.0  # seconds until a thread that another thread's agent serves looks for its own
SHORT = 10.0  # seconds without an agent, after which the log says why
OPEN = EOFError, OSError, exceptions.ActorUnavailableError  # of an agent that is not there yet
LOST = *OPEN, pickle.UnpicklingError, exceptions.RayActorError  # of one that is gone
INSTALL = (
    "on node {}: install the module on all nodes, or have Ray bring it there, with "
    "runtime_env={{'pip': [...]}} or {{'py_modules': [...]}}"
)


# -- on the nodes


class Raised(NamedTuple):
    """What a batch is where an exception was raised instead."""

    packed: bytes
    is_setup: bool  # the indexer could not be made: the next batches will raise, too


def versions() -> str:
    """Name what two processes must have in common to exchange batches."""
    python, numpy = ".".join(map(str, sys.version_info[:2])), np.__version__.partition(".")[0]
    return f"cseq {sys.modules['cseq'].__version__}, Python {python} and numpy {numpy}"


def unpickled(payload: list[Payload]) -> Any:
    """Return the worker that was put into Ray's store."""
    data, buffers = ray.get(payload[0])
    return pickle.loads(data, buffers=[memoryview(buffer) for buffer in buffers])[0]


class Agent:
    """A worker process: makes batches, one after another, on one thread, which sends them.

    A batch that takes longer than `timeout` ends the process, with its threads' stacks in the log.
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
        """Say where it is, and take the worker, which Ray does not keep for a constructor."""
        if trainer != versions():
            raise ImportError(
                f"the agent on node {self._node} has {versions()}, and the training process "
                f"{trainer}: install the same on all nodes, or give runtime_env="
            )
        self._payload = payload
        return os.getpid(), self._node

    def meet(self, address: tuple[Any, ...], key: bytes) -> None:
        """Connect to a trainer, and serve it; after this call, at whose end Ray resets OPENMP."""
        threading.Thread(target=self._serve, args=(address, key), daemon=True).start()

    def make_batch(self, *asked: Any) -> Message:
        """Make a batch, over Ray."""

        def make() -> Message:
            data, buffers = self._message(*asked)
            return data, [np.array(buffer) for buffer in buffers]  # the indexer may keep these

        return self._thread.submit(make).result()

    def _serve(self, address: tuple[Any, ...], key: bytes) -> None:
        """Make the batches that a trainer asks for."""

        def make() -> None:
            there.send(*self._message(*asked))

        there = Connection(socket.create_connection(address, PROOF_SECONDS), key, is_agent=True)
        with contextlib.closing(there), contextlib.suppress(*OPEN):
            while True:
                asked = pickle.loads(there.receive()[0])
                self._thread.submit(make).result()

    def _message(self, *asked: Any) -> Message:
        """Return a batch, or what was raised in its place."""
        buffers: list[memoryview] = []
        if self._timeout is not None:
            limit = self._timeout * (1 if self._has_made else STARTING)
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
        try:
            batch = self._batch(*asked)
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
        """Make a batch: once more, if it has imported a generator's module just now."""
        if self._indexer is None:
            own = ray.get_runtime_context().runtime_env.get("env_vars") or {}
            if self._threads is not None and system.OPENMP not in own:
                os.environ.pop(system.OPENMP, None)  # Ray's: one for each CPU
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
    """Worker processes on the nodes of a Ray cluster: actors, which make batches.

    Give it to `RaySequence` in the place of `worker`. Several sequences, with other seeds and batch
    sizes, and several ranks can use one fleet at a time: pickled (as an argument of a Ray task, or
    of a `TorchTrainer`), it refers to the same actors. These are started here, and not waited for;
    where that has not been done, ``ray.init()`` connects to Ray first.

    Parameters
    ----------
    worker : object
        As in `MSequence`; made once in each actor. Its arrays are in each node's memory once, and
        cannot be written to.
    nodes, num_workers : int, optional
        There are so many nodes times so many worker processes, which Ray spreads. None: the nodes
        that have the CPUs when the fleet starts; as many as their CPUs allow.
    num_cpus : float
        Of each worker process.
    timeout : float, optional
        Seconds that a batch may take, ten times as many for an actor's first one. Ray then starts
        the actor again, and another one makes the batch.
    threads : int or None
        That libraries compute with in each worker process. None: as Ray says, one for each CPU.
    seed_globals : bool
        As in `MSequence`.
    **options
        Others of `ray.remote` for each actor, such as `num_gpus`, `resources`, `runtime_env`;
        `scheduling_strategy` is 'SPREAD' where none is given, and `max_restarts` -1.

    Attributes
    ----------
    handles : list
        The actors; none once it is closed.

    Raises
    ------
    TypeError
        The worker cannot be pickled, or another argument is wrong.
    ValueError
        An argument is wrong; or no node has the CPUs, and `nodes` or `num_workers` is None.
    """

    is_own = False  # of the one sequence that has made it, and ends it

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
        """Pickle what refers to the actors."""
        return {**self.__dict__, "_worker": None, "_is_copy": True}

    @property
    def worker(self) -> Any:
        """What makes an indexer; in a copy, a copy of it."""
        if self._worker is None:
            self._worker = unpickled(self._payload)
        return self._worker

    def ask(self, handle: ray.Handle) -> ray.ObjectRef[tuple[int, str]]:
        """Ask an actor for a sign of life."""
        return handle.about.remote(self._payload, versions())

    def close(self) -> None:
        """End the actors. A fleet that was unpickled only forgets them."""
        handles, self.handles, self._payload = self.handles, [], []
        for handle in handles if ray.is_initialized() and not self._is_copy else ():
            ray.kill(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_actors(nodes: int | None, num_workers: int | None, num_cpus: float) -> int:
    """Say how many actors there are to be."""
    found = (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    rooms = [int(cpus // (num_cpus or 1)) for cpus in found if cpus >= (num_cpus or 1)]
    if not rooms and None in (nodes, num_workers):
        raise ValueError(
            f"num_cpus={num_cpus:g}, and no node of the cluster has as many now: give nodes= and "
            "num_workers= to have Ray wait for some"
        )
    if nodes is None and num_workers is None:
        return sum(rooms)
    return (nodes or len(rooms)) * (num_workers or max(rooms))


class Caller:
    """The indexer of a thread: has an agent make its batches, its own one if that is there."""

    def __init__(self, pool: FleetCrew, number: int) -> None:
        self._pool, self._number = pool, number
        self._own = self._at = number % len(pool.handles)  # its agent, and the present one
        self._there: Connection | None = None  # with RAY_USE_TLS, there is none
        self._until = 0.0  # when to look for another agent
        self._name = "an agent"

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        at: Any = context.here.batch_context
        now: Runner = at.ticket
        pool = self._pool
        numbers = context.Numbers(now.seed, now.epoch, now.batch, now.start, now.parts())
        lost: list[str] = []
        while len(lost) < TRIES:
            self._open(is_lost=bool(lost))
            try:
                data, buffers = self._make(numbers, indices, pool.on_error)
            except LOST as error:
                self.close()
                pool.calls.pop(self._at, None)  # what it has answered is of before
                if isinstance(error, TimeoutError):
                    ray.kill(pool.handles[self._at], no_restart=False)
                lost.append(f"{self._name}: {failure.line_of(error)}")
                continue
            made: object = pickle.loads(data, buffers=buffers)
            if not isinstance(made, Raised):
                return made
            raised = failure.ordinary(failure.unpack(made.packed))
            failure.annotate(raised, f"raised by {self._name}")
            raise pool.failed(raised) if made.is_setup else raised
        where = failure.location_of(now.epoch, now.batch, indices.tolist(), failure.MOST)
        died = WorkerDied(
            f"{where} was lost with {TRIES} agents: {'; '.join(lost)}",
            epoch=now.epoch,
            batch=now.batch,
            indices=indices.tolist(),
        )
        raise died if pool.on_error == "skip" else pool.failed(died)

    def _open(self, *, is_lost: bool) -> None:
        """Be connected to this thread's agent; while that is not there, to another that answers."""
        if time.monotonic() < self._until:
            return
        pool, due = self._pool, time.monotonic() + SHORT
        patience = PAUSE if self._until else AGAIN  # another one's agent serves it meanwhile
        several = len(pool.handles)
        others = [(self._own + k) % several for k in range(1, several)]
        turns = [[self._own], *(others[k : k + ASKED] for k in range(0, len(others), ASKED))]
        for those in itertools.cycle(turns[1:] + turns[:1] if is_lost else turns):
            try:
                self._connect(those, patience)
            except OPEN as error:
                if self._until:  # it stays where it is
                    self._until = time.monotonic() + AWAY
                else:
                    pool.closed.wait(PAUSE)
                if time.monotonic() > due and not self._number:  # the others see the same
                    due = math.inf
                    why = f"{self._name}: {failure.line_of(error)}"
                    tell(logging.WARNING, "no agent is there yet; %s", why)
            except exceptions.RayError as error:  # Ray does not start it, or not again
                raise pool.failed(error) from None
            if pool.closed.is_set():
                self.close()
                raise InterruptedError("the sequence was finished")
            if self._until:
                return

    def _connect(self, those: list[int], seconds: float) -> None:
        """Connect to the first of these agents that answers."""
        pool = self._pool
        calls: dict[ray.ObjectRef[tuple[int, str]], int] = {}
        for k in those:
            call = pool.calls.get(k) or pool.calls.setdefault(k, pool.fleet.ask(pool.handles[k]))
            calls[call] = k
        while calls:
            answered = ray.wait(list(calls), timeout=seconds)[0]
            if not answered:
                raise TimeoutError("Ray has not started it")
            call, k = answered[0], calls.pop(answered[0])
            pool.calls.pop(k, None)
            with contextlib.suppress(*OPEN if calls else ()):
                ray.get(call)
                break
        self.close()
        pid, node = ray.get(call)
        self._at, self._name = k, f"the agent with pid {pid} on node {node}"
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            host, key = ray.util.get_node_ip_address(), secrets.token_bytes(32)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as server:
                server.settimeout(PROOF_SECONDS)
                pool.handles[k].meet.remote(server.getsockname(), key)
                self._there = Connection(server.accept()[0], key, is_agent=False)
        self._until = math.inf if k == self._own else time.monotonic() + AWAY

    def _make(self, *asked: Any) -> Message:
        """Have the agent make a batch; raise one of `LOST` if that is lost."""
        there, handle, limit = self._there, self._pool.handles[self._at], self._pool.fleet.timeout
        if there is None:
            data, buffers = ray.get(handle.make_batch.remote(*asked))
            own = [memoryview(self._pool.take_memory(one.nbytes)) for one in buffers]
            for mine, buffer in zip(own, buffers, strict=True):
                mine[:] = buffer  # which cannot be written to
            return data, own
        there.send(pickle.dumps(asked), [])
        while not there.wait(limit):
            if not ray.wait([self._pool.fleet.ask(handle)], timeout=limit)[0]:
                raise TimeoutError(f"no sign of life within {limit} s")
        return there.receive(self._pool.take_memory)

    def close(self) -> None:
        """End the connection; a call that waits for an answer raises."""
        self._until = 0.0
        if self._there is not None:
            self._there.close()


def of_fleet(job: Job) -> Job:
    """Return a job with a fleet, one that is its own if none was given, and a thread an agent."""
    fleet, options = job.fleet, job.options
    if fleet is None:
        own: dict[str, Any] = {"timeout": options.timeout, "threads": options.threads}
        fleet = RayFleet(job.worker, 1, job.num_workers, seed_globals=job.seed_globals, **own)
        fleet.is_own = True
    if not fleet.handles:
        raise RuntimeError("this fleet is over: it was closed")
    threads, buffer = len(fleet.handles), job.start.buffer
    if job.auto[1]:
        buffer = min(max(buffer, 2 * threads), MOST_BUFFER)
    return job._replace(
        worker=fleet,
        num_workers=threads,
        buffer=max(job.buffer, buffer),
        start=Size(threads, buffer),
        options=options._replace(timeout=None),  # that of an agent
    )


class FleetCrew(ThreadCrew):
    """Threads, each of which asks an agent for a batch, and hands it over."""

    of = "RaySequence"

    def __init__(self, tickets: Tickets, fleet: RayFleet) -> None:
        self.fleet, sampler = fleet, tickets.sampler
        assert sampler is not None
        first = sampler.rank * len(fleet.handles) // sampler.world_size
        self.handles = fleet.handles[first:] + fleet.handles[:first]  # of each rank
        self.calls: dict[
            int, ray.ObjectRef[tuple[int, str]]
        ] = {}  # of `ask`, until the answer is used or the agent lost
        self.on_error, self.take_memory, self.closed = (
            tickets.errors,
            Buffers().take_memory,
            threading.Event(),
        )
        self._callers: list[Caller] = []
        super().__init__(tickets)

    def prepare(self, worker: Any, name: str = "worker") -> None:  # noqa: ARG002 - the fleet
        """Set what makes the indexers."""
        super().prepare(self._caller, name)

    def _caller(self) -> Caller:
        """Make the indexer of a thread; one after another."""
        self._callers.append(Caller(self, len(self._callers)))
        return self._callers[-1]

    def failed(self, error: BaseException) -> BaseException:
        """Have an error raised in the loop that no other agent can make good."""
        self._group.fail(error)
        return error

    def close(self, *, hurried: bool) -> None:
        """End the threads, and the agents of a fleet that was not given."""
        self.closed.set()
        for caller in self._callers:
            caller.close()
        super().close(hurried=hurried)
        if self.fleet.is_own:
            self.fleet.close()
