"""What runs on the nodes of a Ray cluster: agents, and the roster of a fleet.

And what starts agents there, in the process of a fleet's maker, or in the roster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cseq.encoding import failure
from cseq.encoding.pickling import Pickled
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.link import Listener
from cseq.fleet.server import TicketServer
from cseq.threads import Threads, tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from cseq.arguments import WorkerOptions

__all__ = [
    "About",
    "Agents",
    "Member",
    "Placement",
    "Roster",
    "Spec",
    "aside",
    "outcome_of",
    "system",
]

log = logging.getLogger("cseq")

CALLS = 4  # of an agent at a time: signs of life, the end, and `watch`
DRAIN_SECONDS = 10.0  # for what an agent has in work that is to leave
QUIET_SECONDS = 0.5  # without work, after which it ends: trainers know by then that it leaves
CLOSE_SECONDS = 2.0
SCALE_SECONDS = 10.0  # between two looks at how busy the agents of an elastic fleet are
BUSY, IDLE = 0.95, 0.5  # shares of the time: above, one agent more; below for long, one fewer
LOOKS = 6  # that is so long
READERS = 100_000  # processes that may wait for news of a roster

Plan = tuple[int, dict[str, Any]]  # of an agent: its workers, and its arguments of `ray.remote`


class About(NamedTuple):
    """What an agent says of itself."""

    node: str  # its address
    port: int  # of its listener
    key: bytes
    pid: int
    system: str  # what has to be the same in the trainer
    workers: int
    batches: int  # that it has made
    busy: float  # seconds in which it had parcels


class Member(NamedTuple):
    """An agent of a fleet."""

    handle: Any
    workers: int
    payload: Any  # an ObjectRef of a `Spec.payload`

    def about(self) -> Any:
        """Ask it for a sign of life, and give it what it needs if it was just started.

        Not as an argument of its constructor: what that raises is text to its callers.
        """
        return self.handle.about.remote([self.payload])


class Placement(NamedTuple):
    """Where agents are to be, and what each gets.

    Attributes
    ----------
    nodes : int or None
        Agents, at the start. None: one on each node that has CPUs.
    num_workers : int or None
        Worker processes of each agent; without a number of nodes and `is_total`: of all together.
    resources : dict
        Arguments of `ray.remote`.
    most : int
        Up to so many agents, and never fewer than `nodes`; 0: their number is not changed.
    """

    nodes: int | None
    num_workers: int | None
    resources: dict[str, Any]
    is_total: bool = False
    most: int = 0

    def plan(self) -> list[Plan]:
        """Return what each agent gets.

        Raises
        ------
        ValueError
            No node of the cluster has the CPUs.
        """
        if self.nodes is not None:
            workers = self.num_workers or max(1, int(self.resources.get("num_cpus") or 1))
            spread = {"scheduling_strategy": "SPREAD"} if self.nodes > 1 else {}
            return [(workers, {"num_cpus": workers, **spread, **self.resources})] * self.nodes
        cpus = {
            node["NodeID"]: int(node["Resources"].get("CPU", 0))
            for node in ray.nodes()
            if node["Alive"]
        }
        if self.is_total:
            shares = dealt(self.num_workers or 1, cpus)
            wanted = {node: (workers, shares[node][1]) for node, (workers, _) in shares.items()}
        else:
            each = {
                node: self.num_workers or int(self.resources.get("num_cpus") or there)
                for node, there in cpus.items()
            }
            wanted = {node: (n, float(n)) for node, n in each.items() if 0 < n <= cpus[node]}
        if not wanted:
            asked = "any" if self.is_total else self.num_workers or "any"
            raise ValueError(
                f"an agent is to be on every node that has {asked} CPUs, and the cluster has no "
                "such node now: give nodes= to a RayFleet"
            )
        return [
            (
                workers,
                {
                    "num_cpus": share,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
                    **self.resources,
                },
            )
            for node, (workers, share) in wanted.items()
        ]


def dealt(workers: int, cpus: dict[str, int]) -> dict[str, tuple[int, float]]:
    """Deal workers to nodes in proportion to their CPUs; return also how many CPUs to ask for.

    These are as many as there are workers, unless fewer are free.
    """
    total = sum(cpus.values())
    if not total:
        return {}
    shares = {node: workers * count // total for node, count in cpus.items()}
    rest = sorted(cpus, key=lambda node: shares[node] - workers * cpus[node] / total)
    for node in rest[: workers - sum(shares.values())]:
        shares[node] += 1
    free = min(float(workers), ray.available_resources().get("CPU", 0.0))
    if total < workers:
        log.warning("%d worker processes share %d CPUs: the cluster has no more", workers, total)
    found = {}
    for node, count in shares.items():
        if count:
            share = count * free / workers
            found[node] = count, float(int(share)) if share >= 1 else int(share * 1000) / 1000
    return found


class Spec(NamedTuple):
    """What makes the agents of a fleet.

    Attributes
    ----------
    payload : tuple
        The fields of a `Pickled` worker, its buffers as arrays.
    absent : object
        What a copy of the fleet has in place of the worker.
    batch_size, options, seed_globals
        See `TicketServer`.
    """

    payload: tuple[bytes, list[Any], tuple[str, ...]]
    absent: Any
    batch_size: int
    options: WorkerOptions
    seed_globals: bool
    placement: Placement


# What Ray raises of an agent that it cannot start.
NOT_STARTED = exceptions.ActorUnschedulableError, exceptions.RuntimeEnvSetupError


def outcome_of(future: Future[Any]) -> Any:
    """Return what has become of a call of an agent: its result, `Lost` or `Failed`."""
    error = future.exception()
    if error is None:
        return future.result()
    # An agent packs what its server raises. These are of Ray, whose node is gone, or they are
    # InterruptedError: the agent is being closed.
    of_system = OSError, exceptions.RaySystemError
    if isinstance(error, exceptions.RayTaskError) and not isinstance(error.cause, of_system):
        return Failed(failure.pack(error.cause or error))
    if isinstance(error, NOT_STARTED) or getattr(error, "actor_init_failed", False):
        return Failed(
            failure.pack(RuntimeError(f"an agent did not start: {failure.line_of(error)}"))
        )
    return Lost(failure.line_of(error), isinstance(error, exceptions.ActorDiedError))


def system() -> str:
    """Name what two processes must have in common to exchange batches."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"cseq {sys.modules['cseq'].__version__} on Python {python}, {sys.byteorder}-endian"


class AgentActor:
    """A ticket server in a process of Ray's.

    Parameters
    ----------
    num_workers, batch_size, options, seed_globals
        See `TicketServer`.
    """

    def __init__(
        self, num_workers: int, batch_size: int, options: WorkerOptions, *, seed_globals: bool
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the trainer's to handle
        _forget_threads()
        self._arguments = num_workers, batch_size, options
        self._seed_globals = seed_globals
        self._node: str = ray.util.get_node_ip_address()
        self._worker: Pickled | None = None
        self._server: TicketServer | None = None
        self._listener: Listener | None = None
        self._batches = 0
        self._idle = threading.Condition()
        self._running = 0  # parcels in work
        self._busy = self._began = 0.0  # seconds with parcels, and since when there are some
        self._closing = threading.Event()

    def about(self, payload: list[Any]) -> About:
        """Give a sign of life; start the server, if it is not started."""
        with self._idle:
            listener = self._listener
            if listener is None:
                data, buffers, modules = ray.get(payload[0])
                self._worker = Pickled(data, [memoryview(buffer) for buffer in buffers], modules)
                listener = self._listen()
                try:
                    self._server = self._serve()
                except BaseException:
                    listener.close()
                    raise
                self._listener = listener
            busy = self._busy + (time.monotonic() - self._began if self._running else 0.0)
        return About(
            self._node,
            listener.port,
            listener.key,
            os.getpid(),
            system(),
            self._arguments[0],
            self._batches,
            busy,
        )

    def _listen(self) -> Listener:
        """Listen where the trainers of other nodes reach this one."""
        try:
            return Listener(self._node, self._make)
        except OSError as error:
            raise RuntimeError(
                f"an agent cannot listen at {self._node}, which Ray says is the address of its "
                f"node: {failure.line_of(error)}"
            ) from error

    def _serve(self) -> TicketServer:
        """Start a server."""
        server = TicketServer(self._worker, *self._arguments, seed_globals=self._seed_globals)
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        return server

    def _present(self) -> TicketServer:
        """Return the server: another one, if this one's workers have ended it."""
        before = None
        with self._idle:
            if self._server is None or self._server.failure:
                if self._closing.is_set():
                    raise InterruptedError("the agent is ending")
                before, self._server = self._server, None
                self._server = self._serve()
            server = self._server
        if before is not None:
            before.close()
        return server

    def _make(self, request: NDArray[np.int64]) -> list[NDArray[np.uint8]] | Failed:
        """Make the batches of a parcel, on a thread of the listener."""
        with self._idle:
            self._began = self._began if self._running else time.monotonic()
            self._running += 1
        made = 0
        try:
            answer = self._present().make(request)
            made = int(request[0])
            return answer
        except InterruptedError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the training loop
            if isinstance(error, ModuleNotFoundError):
                failure.annotate(
                    error,
                    f"on node {self._node}: install the module on all nodes, "
                    "or have Ray bring it there, with runtime_env={'pip': [...]} or "
                    "{'py_modules': [...]}",
                )
            return Failed(failure.pack(error))
        finally:
            with self._idle:
                self._batches += made
                self._running -= 1
                self._busy += 0.0 if self._running else time.monotonic() - self._began
                self._idle.notify_all()

    def watch(self) -> None:
        """Return when the agent is to end: a call that fails earlier says that it is gone."""
        self._closing.wait()

    def signal(self, number: int) -> None:
        """Send this process a signal, for tests."""
        os.kill(os.getpid(), number)

    def close(self, seconds: float = 0.0) -> None:
        """End the workers; what is in work, or on its way, gets so long before."""
        self._closing.set()
        deadline = time.monotonic() + seconds
        with self._idle:
            while (left := deadline - time.monotonic()) > 0:
                self._idle.wait_for(lambda: not self._running, left)
                if not self._idle.wait_for(lambda: self._running, min(left, QUIET_SECONDS)):
                    break
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            self._server.close()


def _forget_threads() -> None:
    """Drop the OMP_NUM_THREADS that Ray sets to the CPUs of an actor: the workers share them."""
    context = ray.get_runtime_context()
    mine = (context.runtime_env.get("env_vars") or {}).get("OMP_NUM_THREADS")
    cpus = max(1, int(context.get_assigned_resources().get("CPU", 0)))
    if mine is None and os.environ.get("OMP_NUM_THREADS") == str(cpus):
        del os.environ["OMP_NUM_THREADS"]


class Agents:
    """Starts the agents of a fleet, others for those that are gone, and ends them.

    Ray restarts none: it would tell their callers of a death only after more than a second.

    Parameters
    ----------
    spec : Spec
    changed : callable
        Called after each change, on any thread.
    """

    def __init__(self, spec: Spec, changed: Callable[[], None]) -> None:
        self._spec, self._changed = spec, changed
        self._lock = threading.Lock()
        # Larger ones than those of a roster that was restarted as this one.
        self._numbers = itertools.count(time.time_ns())
        self._plans: dict[int, Plan] = {}
        self._closed = False
        self.present: dict[int, Member] = {}
        self._payload: Any = None
        plans = spec.placement.plan()
        self._payload = ray.put(spec.payload)
        for plan in plans:
            self._add(plan)
        self._busy: dict[int, tuple[float, float]] = {}  # when, and how many seconds until then
        self._quiet = 0  # looks in a row at which they were idle
        self._over = threading.Event()
        self._scaling = Threads()
        if spec.placement.most:
            self._scaling.add("cseq-fleet", partial(_scale_on, weakref.ref(self), self._over))
            self._scaling.start()

    def _add(self, plan: Plan) -> None:
        """Start an agent."""
        workers, own = plan
        make = ray.remote(AgentActor).options(
            max_restarts=0, max_task_retries=0, max_concurrency=CALLS, **own
        )
        spec = self._spec
        handle = make.remote(workers, spec.batch_size, spec.options, seed_globals=spec.seed_globals)
        member = Member(handle, workers, self._payload)
        member.about()
        number = next(self._numbers)
        self._plans[number] = plan
        self.present = {**self.present, number: member}
        self._watch(number, handle)

    def _watch(self, number: int, handle: Any) -> None:
        """Have an agent replaced when it is gone."""
        here = weakref.ref(self)

        def ended(future: Future[Any]) -> None:
            agents, outcome = here(), outcome_of(future)
            if agents is not None and isinstance(outcome, Lost):
                aside(partial(agents.replace, number, outcome.cause))

        handle.watch.remote().future().add_done_callback(ended)

    def _without(self, number: int) -> Plan:
        """Take an agent out."""
        self.present = {k: member for k, member in self.present.items() if k != number}
        return self._plans.pop(number)

    def replace(self, number: int, cause: str) -> None:
        """Start another agent for one that is gone, or cannot be reached."""
        with self._lock:
            if self._closed or number not in self.present:
                return
            tell(logging.WARNING, "an agent of the fleet is gone, and is replaced: %s", cause)
            ray.kill(self.present[number].handle)
            self._add(self._without(number))
        self._changed()

    def scale(self) -> None:
        """Start an agent if all are busy, end one if they are idle for long."""
        present, least, most = self.present, self._spec.placement.nodes, self._spec.placement.most
        asked = {member.about(): number for number, member in present.items()}
        found, now = {}, time.monotonic()
        for answer in ray.wait([*asked], num_returns=len(asked), timeout=CLOSE_SECONDS)[0]:
            with contextlib.suppress(exceptions.RayError):  # it is being replaced
                found[asked[answer]] = now, ray.get(answer).busy
        before, self._busy = self._busy, found
        if not present or not found.keys() == before.keys() == present.keys():
            return  # one is new, or does not answer
        shares = [(found[k][1] - busy) / (now - when) for k, (when, busy) in before.items()]
        share = sum(shares) / len(shares)
        self._quiet = self._quiet + 1 if share < IDLE else 0
        if share > BUSY and len(present) < most:
            self.resize(len(present) + 1)
        elif self._quiet >= LOOKS and len(present) > (least or 1):
            self._quiet = 0
            self.resize(len(present) - 1)

    def resize(self, nodes: int) -> None:
        """Start agents, or end the newest ones when they have made what they have."""
        with self._lock:
            if self._closed:
                return
            present = self.present
            workers, own = next(iter(self._plans.values()))
            plan = workers, {**own, "scheduling_strategy": "SPREAD"}
            for _ in range(nodes - len(present)):
                self._add(plan)
            leaving = sorted(present)[nodes:]
            for number in leaving:
                self._without(number)
        self._changed()
        for number in leaving:
            _end_later(present[number].handle)

    def __del__(self) -> None:
        """Have agents end that were not closed: Ray awaits `watch` of an actor without a handle."""
        if ray.is_initialized():
            for member in self.present.values():
                member.handle.close.remote()

    def close(self) -> None:
        """End all agents."""
        with self._lock:
            self._closed = True
            handles = [member.handle for member in self.present.values()]
            self.present = {}
            self._payload = None
        self._over.set()
        asked = [handle.close.remote() for handle in handles]
        ray.wait(asked, num_returns=len(asked), timeout=CLOSE_SECONDS) if asked else None
        for handle in handles:
            ray.kill(handle)
        self._scaling.join(time.monotonic() + 2 * CLOSE_SECONDS)


def _scale_on(here: weakref.ref[Agents], over: threading.Event) -> None:
    """Look at an elastic fleet again and again, until it is closed or dropped."""
    while not over.wait(SCALE_SECONDS):
        agents = here()
        if agents is None or not ray.is_initialized():
            return
        agents.scale()
        del agents


def _end_later(handle: Any) -> None:
    """End an agent when it has made what it has."""
    closed = handle.close.remote(DRAIN_SECONDS).future()
    closed.add_done_callback(lambda _: aside(partial(ray.kill, handle)))


def aside(work: Callable[[], None], seconds: float = 0.0) -> None:
    """Do something on a thread of its own, later: on Ray's, which calls back, calls may hang."""

    def done() -> None:
        time.sleep(seconds)
        if ray.is_initialized():  # else all agents have ended with the connection
            work()

    threads = Threads()
    threads.add("cseq-fleet", done)
    threads.start()


class Roster:
    """An actor that tells the copies of a fleet which agents there are.

    Parameters
    ----------
    spec : Spec, optional
        Of a fleet with a name, whose agents this actor starts. None: they are the maker's.
    """

    def __init__(self, spec: Spec | None = None) -> None:
        self._version = 0  # none was shown yet
        self._present: dict[int, Member] = {}
        self._news = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._agents = None if spec is None else Agents(spec, self._changed)
        self._spec = None if spec is None else spec._replace(payload=(b"", [], ()))

    def _changed(self) -> None:
        """Note that the agents of a fleet with a name are others; on any thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._show(), self._loop)

    async def _show(self) -> None:
        """Show which agents a fleet with a name has now."""
        assert self._agents is not None
        await self._take(self._agents.present)

    async def _take(self, present: dict[int, Member]) -> int:
        """Have these agents; return their version."""
        async with self._news:
            self._version, self._present = self._version + 1, present
            self._news.notify_all()
            return self._version

    async def show(self, present: dict[int, Member]) -> None:
        """Take the present agents, from the maker, and return when it shows others.

        A call that fails says that this process has ended.
        """
        version = await self._take(present)
        async with self._news:
            await self._news.wait_for(lambda: self._version != version)

    async def present(self, seen: int) -> tuple[int, dict[int, Member]]:
        """Return a version and the agents, when there is another version than the one seen."""
        if self._agents is not None and self._loop is None:
            self._loop = asyncio.get_running_loop()
            await self._show()  # what has changed before
        async with self._news:
            await self._news.wait_for(lambda: self._version not in (0, seen))
            return self._version, self._present

    async def resize(self, nodes: int) -> None:
        """Resize a fleet with a name."""
        assert self._agents is not None
        self._agents.resize(nodes)
        await self._show()

    async def about(self) -> tuple[Placement, int, Any]:
        """Return placement and size of batches of a fleet with a name, and what has its length."""
        assert self._spec is not None
        return self._spec.placement, self._spec.batch_size, self._spec.absent

    async def close(self) -> None:
        """End the agents of a fleet with a name."""
        if self._agents is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._agents.close)
