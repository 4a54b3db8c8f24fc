"""Fleets of Ray actors, and the pool of threads that ask them for batches.

::

    loop ◄── ring ◄── thread ──► place ═══ numbers ══► agent (a process of Ray's) ──► indexer
                                       ◄══ batch ════

A thread asks one agent for one batch over one connection: nothing has to be matched, and a death is
the end of the connection. Ray starts the agents, spreads them, and starts again those that died.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import check, compute
from cseq._memory import keep_freed
from cseq.arguments import MOST_BUFFER, Size
from cseq.encoding import failure
from cseq.encoding.pickling import dump, dumps
from cseq.errors import WorkerDied
from cseq.fleet.wire import PROOF_SECONDS, SMALL, Buffers, Connection, Listener
from cseq.indexing import context
from cseq.indexing.indexer import advised, build_seeded, check_worker, leaving
from cseq.indexing.seeding import Seeds
from cseq.pools.thread import ThreadPool
from cseq.threads import Threads, tell

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
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq._memory import Memory
    from cseq.arguments import Job
    from cseq.fleet.wire import Message
    from cseq.stats import Stats

__all__ = ["FleetPool", "RayFleet"]

AHEAD = 2  # batches that a sequence asks an agent for at a time: one in work, one that waits
TRIES = 3  # agents that may be lost with a batch
CALLS = 8  # of Ray's that an agent answers at a time
STARTING = 10  # times as long as another batch: what the first one of an agent may take
LOOK_SECONDS = 0.5  # how often a thread that waits for Ray looks whether the sequence is finished
PAUSES = 0.05, 2.0  # seconds between two tries to connect: the first and the longest one
SHORT = 10.0  # seconds without an agent, after which the log says why
CLOSE_SECONDS = 5.0
LOST = EOFError, OSError, exceptions.RayActorError  # what a call raises whose agent is gone
OVER = (  # what Ray raises of an agent that it does not start, or not again
    exceptions.ActorDiedError,
    exceptions.ActorUnschedulableError,
    exceptions.RayTaskError,
    exceptions.RuntimeEnvSetupError,
)
INSTALL = (
    "on node {}: install the module on all nodes, or have Ray bring it there, with "
    "runtime_env={{'pip': [...]}} or {{'py_modules': [...]}}"
)


# -- on the nodes


class Raised(NamedTuple):
    """What a batch is where an exception was raised instead."""

    packed: bytes
    is_setup: bool  # the indexer could not be made: the next batches will raise, too


def system() -> str:
    """Name what two processes must have in common to exchange batches."""
    python, numpy = ".".join(map(str, sys.version_info[:2])), np.__version__.partition(".")[0]
    return f"cseq {sys.modules['cseq'].__version__}, Python {python} and numpy {numpy}"


def unpickled(payload: list[Any]) -> Any:
    """Return the worker that was put into Ray's store."""
    data, buffers, _ = ray.get(payload[0])
    return pickle.loads(data, buffers=[memoryview(one) for one in buffers])[0]


def killed(pid: int) -> None:
    """End a process of this node."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)


class Agent:
    """A worker process: makes batches, one after another, on one thread."""

    def __init__(
        self, number: int, of: int, timeout: float | None, threads: int | None, *, seeds: bool
    ) -> None:
        keep_freed()
        self._timeout, self._threads = timeout, threads
        self._context = context.BatchContext(number, of)
        self._seeds = Seeds(self._context) if seeds else None
        self._indexer: Any = None
        self._made, self._works = 0, False
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._node: str = ray.util.get_node_ip_address()
        self._listener = Listener(self._node, self._serve)
        threading.Thread(target=self._run, name="cseq-agent", daemon=True).start()

    def about(self, payload: list[Any]) -> tuple[int, str, str, str, int, bytes]:
        """Say where it is, and take the worker, which Ray does not keep for a constructor."""
        self._payload, at = payload, self._listener
        node_id = ray.get_runtime_context().get_node_id()
        return os.getpid(), node_id, system(), self._node, at.port, at.key

    def signal(self, number: int) -> None:
        """Send this process a signal, for tests."""
        os.kill(os.getpid(), number)

    def ahead(self) -> int:
        """Count the batches that are to be made before another one, as `timeout` counts them."""
        return self._asked.qsize() + self._works + (0 if self._made else STARTING - 1)

    def make(self, *asked: Any) -> Message:
        """Make a batch, over Ray."""
        data, buffers = self._answer(lambda: None, *asked)
        return data, [np.frombuffer(buffer, np.uint8) for buffer in buffers]

    def _serve(self, connection: Connection) -> None:
        """Make the batches that a trainer asks for, over a connection."""
        while True:
            asked = pickle.loads(connection.receive()[0])
            if self._timeout is not None:
                connection.send(b"%d" % self.ahead(), [])
            connection.send(*self._answer(partial(connection.send, b"begun", []), *asked))

    def _answer(self, *asked: Any) -> Message:
        answer: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._asked.put((answer, *asked))
        return answer.get()

    def _run(self) -> None:
        context.enter(self._context)
        while True:
            answer, begin, *asked = self._asked.get()
            self._works = True
            try:
                begin()
                answer.put(self._message(*asked))
            except OSError:  # the trainer does not wait any more
                answer.put((b"", []))
            self._works = False
            del answer, begin

    def _message(self, *asked: Any) -> Message:
        """Return a batch, or what was raised in its place."""
        buffers: list[memoryview] = []
        try:
            batch = self._batch(*asked)
            if batch is None:
                name = type(self._indexer).__name__
                raise TypeError(f"`__getitem__` of {name} returned None: is a `return` missing?")
            data = dumps(batch, buffers)
            del batch  # what refers to its arrays from here on is the indexer's
            self._made += 1
            return data, [one if is_alone(one) else memoryview(bytes(one)) for one in buffers]
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            if isinstance(error, ModuleNotFoundError):
                failure.annotate(error, INSTALL.format(self._node))
            if not self._made:
                advised(self._indexer, error)
            return dumps(Raised(failure.pack(error), self._indexer is None)), []

    def _batch(self, numbers: context.Numbers, indices: NDArray[np.int64], on_error: str) -> Any:
        """Make a batch: once more, if it has drawn from a generator that it imported just now."""
        if self._indexer is None:
            limit_threads(self._threads)
            self._indexer = build_seeded(unpickled(self._payload), self._seeds, copied=True)
        self._context.left = ()
        indexer = leaving(self._indexer, self._context, on_error)
        while True:
            self._context.set(numbers)
            if self._seeds is not None:
                self._seeds.seed_present()
            batch = indexer[indices.copy()]
            if self._seeds is None or not self._seeds.has_drawn():
                return batch


def limit_threads(threads: int | None) -> None:
    """Limit the threads of libraries; None: leave that to Ray, which allows one for each CPU."""
    if threads is not None:
        own = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        if compute.OPENMP not in own:
            os.environ.pop(compute.OPENMP, None)  # Ray's
        compute.limit(threads)


def is_alone(buffer: memoryview) -> bool:
    """Whether a buffer is a large, whole array that nothing else refers to: it is not copied.

    What an indexer keeps, it may fill with the next batch while this one is being sent.
    """
    whole = isinstance(buffer.obj, np.ndarray) and buffer.obj.flags.owndata
    return bool(whole) and buffer.nbytes > SMALL and sys.getrefcount(buffer.obj) == ALONE


ALONE = sys.getrefcount(memoryview(np.empty(1)).obj)  # type: ignore[arg-type]


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
        The actors.

    Raises
    ------
    TypeError
        The worker cannot be pickled, or another argument is wrong.
    ValueError
        An argument is wrong; or no node has the CPUs, and `nodes` or `num_workers` is None.
    """

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
        nodes = None if nodes is None else check.count("nodes", nodes)
        num_workers = None if num_workers is None else check.count("num_workers", num_workers)
        self.timeout = check.seconds("timeout", timeout)
        threads = None if threads is None else check.count("threads", threads)
        seeds = check.flag("seed_globals", seed_globals)
        self.options: dict[str, Any] = {"num_cpus": num_cpus, **options}
        ours: dict[str, Any] = {"scheduling_strategy": "SPREAD", "max_restarts": -1}
        make = ray.remote(Agent).options(**ours | self.options, max_concurrency=CALLS).remote
        data, views, modules = dump(worker, elsewhere=True)
        if not ray.is_initialized():
            ray.init()
        total = self._count(nodes, num_workers)
        buffers = [np.frombuffer(view, np.uint8) for view in views]
        self._payload = [ray.put((data, buffers, modules))]
        self._worker, self._is_copy, self.is_over = worker, False, False
        self.handles: list[Any] = [
            make(number, total, self.timeout, threads, seeds=seeds) for number in range(total)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what refers to the actors."""
        return {**self.__dict__, "_worker": None, "_is_copy": True}

    @property
    def worker(self) -> Any:
        """What makes an indexer; in a copy, a copy of it."""
        if self._worker is None:
            self._worker = unpickled(self._payload)
        return self._worker

    def _count(self, nodes: int | None, num_workers: int | None) -> int:
        """Say how many actors there are to be."""
        cpus = self.options["num_cpus"] or 1
        rooms = [int(n["Resources"].get("CPU", 0) // cpus) for n in ray.nodes() if n["Alive"]]
        rooms = [room for room in rooms if room]
        if not rooms and not (nodes and num_workers):
            raise ValueError(
                f"num_cpus={cpus:g}, and no node of the cluster has as many now: give nodes= and "
                "num_workers= to have Ray wait for some"
            )
        if nodes is None and num_workers is None:
            return sum(rooms)
        return (nodes or len(rooms)) * (num_workers or max(rooms))

    def ask(self, handle: Any) -> Any:
        """Ask an actor for a sign of life."""
        return handle.about.remote(self._payload)

    def close(self) -> None:
        """End the actors. A fleet that was unpickled only forgets them."""
        handles, self.handles, self._payload, self.is_over = self.handles, [], [], True
        for handle in handles if ray.is_initialized() and not self._is_copy else ():
            ray.kill(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Place:
    """Room for one batch at an agent, with a connection; with RAY_USE_TLS, for a call of Ray's."""

    def __init__(self, handle: Any, fleet: RayFleet, look: Callable[[], None]) -> None:
        self.handle, self._fleet, self._look = handle, fleet, look
        self._by_ray = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
        self._connection: Connection | None = None
        self.name, self.has_begun = "an agent", False  # the batch, as far as is known

    def open(self) -> None:
        """Connect to the agent, once Ray has started it."""
        *self._process, has, host, port, key = self._result(self._fleet.ask(self.handle))
        self.name = f"the agent with pid {self._process[0]} on node {host}"
        if has != system():
            raise ImportError(
                f"{self.name} has {has}, and the trainer {system()}: install the same on all "
                "nodes, or give runtime_env="
            )
        if not self._by_ray:
            raw = socket.create_connection((host, port), PROOF_SECONDS)
            self._connection = Connection(raw, key, is_agent=False)

    def make(self, asked: tuple[Any, ...], take: Callable[[int], Memory]) -> Message:
        """Have the agent make a batch; raise one of `LOST` if that is lost."""
        there, limit = self._connection, self._fleet.timeout
        self.has_begun = there is None
        if there is None:
            if limit is not None:
                limit *= 1 + self._result(self.handle.ahead.remote(), limit)
            data, buffers = self._result(self.handle.make.remote(*asked), limit)
            own = [memoryview(take(one.nbytes)) for one in buffers]  # Ray's cannot be written to
            for mine, buffer in zip(own, buffers, strict=True):
                mine[:] = buffer
            return data, own
        there.wait_for(limit)
        there.send(pickle.dumps(asked), [])
        if limit is not None:
            there.wait_for(limit * (1 + int(there.receive()[0])))
        there.receive()
        self.has_begun = True
        return there.receive(take)

    def _result(self, call: Any, limit: float | None = None) -> Any:
        """Wait for a call of Ray's."""
        end = math.inf if limit is None else time.monotonic() + limit
        while not ray.wait([call], timeout=LOOK_SECONDS)[0]:
            self._look()
            if time.monotonic() > end:
                raise TimeoutError(f"no answer within {limit:g} s")
        return ray.get(call)

    def restart(self) -> None:
        """Have Ray start the agent again, also one that is stopped, which older Rays ask to end."""
        pid, node_id = self._process
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ray.remote(killed).options(num_cpus=0, scheduling_strategy=there).remote(pid)
        ray.kill(self.handle, no_restart=False)

    def close(self) -> None:
        """End the connection; a call that waits for an answer raises."""
        if self._connection is not None:
            self._connection.close()


class Remote:
    """The indexer of all threads: an agent makes the batch, and another one if that is lost.

    `fail` has an exception raised in the loop that no other agent can make good.
    """

    def __init__(self, fleet: RayFleet, job: Job, fail: Callable[[BaseException], None]) -> None:
        self._fleet, self._fail, self._take = fleet, fail, Buffers().take
        self._on_error, rank = job.on_error, job.sampler
        first = rank.rank * len(fleet.handles) // rank.world_size  # each rank begins elsewhere
        handles = fleet.handles[first:] + fleet.handles[:first]
        self._places = [Place(one, fleet, self._look) for one in handles * AHEAD]
        self._free: queue.SimpleQueue[Place | None] = queue.SimpleQueue()  # None: it is closed
        self._closed = threading.Event()
        self._due, self._why = time.monotonic() + SHORT, ""  # when to say that no agent is there
        self._threads: list[Threads] = []

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        at: Any = context.here.batch_context
        now = at.ticket
        numbers = context.Numbers(now.seed, now.epoch, now.batch, now.start, now.parts())
        lost: list[str] = []
        while len(lost) < TRIES:
            place = self._free.get()
            if place is None or self._closed.is_set():
                self._free.put(None)  # for the next thread
                raise InterruptedError("the sequence was finished")
            try:
                data, buffers = place.make((numbers, indices, self._on_error), self._take)
            except LOST as error:
                place.close()
                if isinstance(error, TimeoutError):
                    place.restart()
                if place.has_begun:  # else it is another batch that ends agents
                    lost.append(f"{place.name}: {failure.line_of(error)}")
                self.connect([place])
                continue
            self._free.put(place)
            made = pickle.loads(data, buffers=buffers)
            if type(made) is not Raised:
                return made
            raised = failure.ordinary(failure.unpack(made.packed))
            failure.annotate(raised, f"raised by {place.name}")
            if made.is_setup:
                self._fail(raised)
            raise raised
        where = failure.where(now.epoch, now.batch, indices.tolist(), failure.MOST)
        died = WorkerDied(
            f"{where} was lost with {TRIES} agents: {'; '.join(lost)}",
            epoch=now.epoch,
            batch=now.batch,
            indices=indices.tolist(),
        )
        if self._on_error != "skip":
            self._fail(died)
        raise died

    def connect(self, places: list[Place] | None = None) -> None:
        """Connect these places, or all, each on a thread of its own."""
        threads = Threads()
        for place in self._places if places is None else places:
            threads.add("cseq-fleet", partial(self._connect, place))
        self._threads.append(threads)
        threads.start()

    def _connect(self, place: Place) -> None:
        """Connect a place when its agent is there."""
        pause, longest = PAUSES
        while not self._closed.wait(pause):
            pause = min(2 * pause, longest)
            try:
                place.open()
            except OVER as error:
                line = failure.line_of(error)
                self._fail(RuntimeError(f"an agent has ended, or did not start: {line}"))
                return
            except LOST as error:
                self._why = f"; {place.name}: {failure.line_of(error)}"
            except BaseException as error:  # noqa: BLE001 - it is raised in the loop
                self._fail(error)
                return
            else:
                self._due = math.inf
                self._free.put(place)
                break
        if self._closed.is_set():
            place.close()

    def _look(self) -> None:
        """End what waits for a finished sequence; say once why no agent is there."""
        if self._closed.is_set():
            raise EOFError("the sequence was finished")
        if time.monotonic() > self._due:
            self._due = math.inf
            wanted, there = self._fleet.options, ray.available_resources()
            text = "no agent is there yet: each asks for %s, and there is %s%s"
            tell(logging.WARNING, text, wanted, there, self._why)

    def close(self) -> None:
        """End all connections, and what waits for one."""
        self._closed.set()
        self._free.put(None)
        for place in self._places:
            place.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for threads in self._threads:
            threads.join(deadline)


class FleetPool(ThreadPool):
    """Threads, each of which asks an agent for a batch, and hands it over."""

    _own: RayFleet | None = None  # where none was given

    def __init__(self, job: Job) -> None:
        fleet, options = job.fleet, job.options
        if fleet is not None and fleet.is_over:
            raise RuntimeError("this fleet is over: it was closed")
        if fleet is None:
            own: dict[str, Any] = {"timeout": options.timeout, "threads": options.threads}
            own["seed_globals"] = job.seed_globals
            fleet = self._own = RayFleet(job.worker, 1, job.num_workers, **own)
        threads, buffer = AHEAD * len(fleet.handles), job.start.buffer
        if job.auto[1]:
            buffer = min(max(buffer, 2 * threads), MOST_BUFFER)
        self._remote = Remote(fleet, job, lambda error: self._group.fail(error))  # noqa: PLW0108
        super().__init__(
            job._replace(
                worker=self._remote,
                num_workers=threads,
                buffer=max(job.buffer, buffer),
                start=Size(threads, buffer),
                options=options._replace(timeout=None),  # that of an agent
            )
        )

    def open(self) -> None:
        """Connect, and start the threads."""
        self._remote.connect()
        super().open()

    def stats(self) -> Stats:
        """Return counts and times."""
        return replace(super().stats(), agents=self.num_workers // AHEAD)

    def close(self) -> None:
        """End the threads, and the agents of a fleet that was not given."""
        self._remote.close()
        super().close()
        if self._own is not None:
            self._own.close()
