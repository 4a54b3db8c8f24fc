"""Fleets of Ray actors: an agent on each of some nodes, with worker processes.

Ray starts the agents, says which there are and which are gone; parcels and answers go over
connections of their own (`link`). Ray restarts no agent: the fleet starts another for one that is
gone, and what is lost is made anew by the ledger of the trainer that asked for it. This module
and `actors` are the only ones that import ray.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import check
from cseq.arguments import MAX_RESTARTS, MOST_BATCH, WorkerOptions
from cseq.encoding import failure
from cseq.encoding.pickling import dump
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.link import Link
from cseq.indexing.dataset import DatasetIndexer
from cseq.indexing.indexer import check_worker, length_of

try:
    import ray
    from ray import exceptions
    from ray.util.metrics import Counter, Gauge
except ImportError as error:
    raise ImportError(
        "RaySequence and RayFleet need Ray, which is not installed here or has no build for this "
        "Python: pip install 'cseq-loader[ray]'"
    ) from error

from cseq.fleet.actors import (
    READERS,
    About,
    Agents,
    Member,
    Placement,
    Roster,
    Spec,
    aside,
    outcome_of,
    system,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq.arguments import Job
    from cseq.fleet.agent import Land, Outcome

__all__ = ["AgentState", "RayFleet", "fleet_for"]

LARGEST = 4096  # samples of a batch that a fleet makes, unless it is made for larger ones
NAMESPACE = "cseq"
ANSWER_SECONDS = 2.0  # in which an agent says what it has made
AGAIN_SECONDS = 0.1  # after which a roster that does not answer is asked again
NOTHING = np.zeros(1, np.int64)  # a request of no ticket: it is answered at once
ROSTER_SECONDS = 30.0  # in which a fleet that has a name is started, or ended


class AgentState(NamedTuple):
    """One of `RayFleet.agents`.

    Attributes
    ----------
    node : str
        Its address; empty while the agent does not answer.
    pid : int
    state : str
        'ready'; 'silent': it does not answer, and may be starting; 'lost': it is being replaced.
    workers : int
        Worker processes.
    batches : int
        That it has made, for all its trainers.
    """

    node: str
    pid: int
    state: str
    workers: int
    batches: int


class RayAgent:
    """An agent, as a trainer sees it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._end: weakref.finalize[..., Any] | None = None  # ends the connection with this object
        self.name = "an agent that is not there yet"

    def send(self, request: NDArray[np.int64], done: Callable[[Outcome], None], land: Land) -> None:
        """Send a parcel; `done` is called once, with what becomes of it."""
        member = self._member

        def finish(outcome: Outcome) -> None:
            explain(member, outcome, done) if isinstance(outcome, Lost) else done(outcome)

        assert self._link is not None  # it has answered a ping
        self._link.send(request, finish, land)

    def ping(self, done: Callable[[Lost | Failed | None], None]) -> None:
        """Ask for a sign of life; `done` is called with None once it comes.

        Ray is asked first, which knows whether it has ended; then it is, over the connection.
        """

        def finish(future: Future[Any]) -> None:
            found = outcome_of(future)
            if not isinstance(found, About):
                done(found)
                return
            self.name = f"the agent with pid {found.pid} on node {found.node}"
            if found.system != system():
                done(self._another_system(found))
            else:
                self._connected(found).send(
                    NOTHING, lambda what: done(None if isinstance(what, list) else what)
                )

        self._member.about().future().add_done_callback(finish)

    def _connected(self, about: About) -> Link:
        """Return the connection: a new one, if there is none."""
        with self._lock:
            if self._link is None or self._link.lost is not None:
                if self._end is not None:
                    self._end.detach()
                self._link = link = Link(about.node, about.port, about.key)
                # Garbage is collected on any thread.
                self._end = weakref.finalize(self, _thread.start_new_thread, link.close, ())
                self._end.atexit = False
                link.open()
            return self._link

    def _another_system(self, about: About) -> Failed:
        """Refuse an agent whose batches could not be read here."""
        return Failed(
            failure.pack(
                RuntimeError(
                    f"{self.name} has {about.system}, and the trainer {system()}: "
                    "install the same on all nodes, or give runtime_env="
                )
            )
        )


class Absent:
    """What a copy of a fleet has in place of its worker."""

    def __getitem__(self, _: object) -> Any:
        raise RuntimeError(
            "this process has a copy of a fleet, and not its worker: batches can be made by the "
            "fleet (start) or where it was made (start_test, remake)"
        )


class AbsentSamples(Absent):
    """The same, of a worker that has a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def absent(worker: Any) -> Any:
    """Return what says of a worker what a sequence asks: its length, and of which kind it is."""
    length = length_of(worker)
    if length is None:
        return Absent()
    samples = AbsentSamples(length)
    return DatasetIndexer(samples, None) if isinstance(worker, DatasetIndexer) else samples


class RayFleet:
    """Agents on the nodes of a Ray cluster, each with worker processes that make batches.

    Give it to `RaySequence` in the place of `worker`. Several sequences, with other seeds and batch
    sizes, and several ranks can use one fleet at a time: pickled (as an argument of a Ray task, or
    of a `TorchTrainer`), it refers to the same agents, which end with the fleet that made them.

    Parameters
    ----------
    worker : object, optional
        As in `MSequence`. Made once in each worker process. None: the fleet is for one
        `DataLoader`, which gives it what makes its batches.
    nodes : int or (int, int), optional
        Agents. None: one on every node that has CPUs when the fleet starts. (least, most): it
        starts with the least; one is added when all were busy for the last ten seconds, and one
        ended when they were idle for half of the last minute.
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
        In the process that has made the fleet, until it is closed; elsewhere what has its length.
        None: a `DataLoader` may set it.
    placement : Placement
        Where its agents are, and what each has.
    over : str
        Why there will be no agents any more; empty: there may be.
    """

    def __init__(
        self,
        worker: Any = None,
        nodes: int | tuple[int, int] | None = None,
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
        if worker is not None:
            check_worker(worker)
        self.worker = worker
        self.batch_size = check.count("batch_size", batch_size, most=MOST_BATCH // 2)
        own = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": resources,
            "memory": memory,
            "label_selector": label_selector,
            "runtime_env": runtime_env,
        }
        least, most = nodes if isinstance(nodes, tuple) else (nodes, 0)
        if most:
            most = check.count("nodes[1]", most, least=check.count("nodes[0]", least))
        self.placement = Placement(
            None if least is None else check.count("nodes", least),
            None if num_workers is None else check.count("num_workers", num_workers),
            {key: value for key, value in own.items() if value is not None},
            most=most,
        )
        self._options = WorkerOptions.checked(
            start_method, max_restarts, timeout, on_timeout, memory_limit, threads, preload
        )
        self._seed_globals = check.flag("seed_globals", seed_globals)
        self._refer(name, None)

    def _refer(self, name: str | None, roster: Any) -> None:
        """Begin without agents; a roster tells of those of another fleet."""
        self._name, self._roster = name, roster
        self._lock = threading.RLock()
        self._made: Agents | None = None  # those that this object has started
        self._end: weakref.finalize[..., Any] | None = None  # ends these
        self._seen = 0  # the roster's version
        self._asks = False  # the roster was asked for a newer one
        self._members: dict[int, Member] = {}
        self._agents: dict[int, RayAgent] = {}
        self._watchers: list[Callable[[], None]] = []
        self.over = ""

    @classmethod
    def find(cls, name: str) -> Self:
        """Find the fleet that was started with a name, by this or another job.

        Raises
        ------
        ValueError
            There is none.
        """
        connect()
        try:
            roster = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise ValueError(f"name={name!r}: no such fleet runs in this cluster") from None
        found = cls._copy(roster, *ray.get(roster.about.remote()))
        found._name = name  # its `close` ends the fleet
        return found

    @classmethod
    def _copy(cls, roster: Any, placement: Placement, batch_size: int, worker: Any) -> Self:
        """Make a fleet that refers to the agents of another one."""
        made = cls.__new__(cls)
        made.worker, made.placement, made.batch_size = worker, placement, batch_size
        made._refer(None, roster)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference to the agents; they are started here if they are not yet."""
        self.start()
        with self._lock:
            if self._roster is None:
                self._roster = roster_actor().remote()
                self._show()
            if self._made is not None:
                _pickled.add(self)
        about = self.placement, self.batch_size, absent(self.worker)
        return type(self)._copy, (self._roster, *about)

    def start(self) -> Self:
        """Start the agents, unless they are started; do not wait until they are there.

        Connects to Ray first, where that has not been done: as `ray.init()` does.

        Raises
        ------
        RuntimeError
            There is no worker, or the fleet was closed.
        TypeError
            The worker cannot be pickled.
        ValueError
            ``nodes=None``, and no node of the cluster has the CPUs.
        """
        with self._lock:
            if self.over:
                raise RuntimeError(f"this fleet is over: {self.over}")
            if self._made is not None or self._roster is not None:
                return self
            if self.worker is None:
                raise RuntimeError(
                    "this fleet has no worker: make it with one, or give it to a cseq.DataLoader, "
                    "whose first iter() starts it"
                )
            connect()
            pickled = dump(self.worker, elsewhere=True)
            buffers = [np.frombuffer(view, np.uint8) for view in pickled.buffers]
            payload = pickled.data, buffers, pickled.modules
            spec = Spec(
                payload,
                absent(self.worker),
                self.batch_size,
                self._options,
                self._seed_globals,
                self.placement,
            )
            if self._name is None:
                here = weakref.ref(self)

                def changed() -> None:
                    fleet = here()
                    if fleet is not None:
                        fleet._changed()

                self._made = Agents(spec, changed)
                self._end = weakref.finalize(self, drop, self._made)
                self._end.atexit = False  # they end with the connection
                self._changed()
                return self
            try:
                self._roster = roster_actor(self._name).remote(spec)
                ray.get(self._roster.about.remote(), timeout=ROSTER_SECONDS)
            except ValueError as error:
                self._roster = None
                raise ValueError(
                    f"name={self._name!r}: a fleet of this name runs: use RayFleet.find"
                ) from error
        return self

    # -- who the agents are

    def _changed(self) -> None:
        """Take over who the agents are that this object has started, and tell the copies."""
        with self._lock:
            if self._made is None:
                return
            self._take(self._made.present)
            if self._roster is not None:
                self._show()
        self._tell()

    def _show(self) -> None:
        """Tell the roster which agents there are, and again when Ray has restarted it."""
        here = weakref.ref(self)

        def ended(future: Future[Any]) -> None:
            fleet = here()
            if fleet is not None and future.exception() is not None and not is_final(future):
                aside(fleet._changed, AGAIN_SECONDS)

        assert self._made is not None
        self._roster.show.remote(self._made.present).future().add_done_callback(ended)

    def _take(self, members: Mapping[int, Member]) -> None:
        """Have these agents, and no others."""
        self._members = dict(members)
        for number in self._agents.keys() - members.keys():
            del self._agents[number]
        for number in members.keys() - self._agents.keys():
            self._agents[number] = RayAgent(members[number])

    def _ask(self) -> None:
        """Ask the roster which agents there are, once it knows others."""
        here = weakref.ref(self)

        def arrived(future: Future[Any]) -> None:
            fleet = here()
            if fleet is not None:
                fleet._heard(future)

        self._asks, roster = True, self._roster
        if roster is None:  # it was closed
            return
        roster.present.remote(self._seen).future().add_done_callback(arrived)

    def _heard(self, future: Future[Any]) -> None:
        """Take over what the roster knows; without it, there will be no agents."""
        with self._lock:
            if self.over:
                return
            if future.exception() is None:
                self._seen, members = future.result()
                self._take(members)
            elif is_final(future):
                self.over = "what has made it has ended, and its agents with it"
                self._take({})
            else:
                self._seen = -1  # it was restarted
            self._asks = bool(self._watchers) and not self.over
            if self._asks:
                aside(self._ask, AGAIN_SECONDS) if self._seen < 0 else self._ask()
        self._tell()

    def _tell(self) -> None:
        """Tell the dispatchers that the agents are others."""
        for notify in list(self._watchers):
            notify()

    def _settled(self) -> dict[int, Member]:
        """Return the present agents, as the roster of a copy has them."""
        roster = self.start()._roster
        if self._made is not None:
            return self._members
        # Not with the lock: `_heard`, on the thread that brings the answer, takes it.
        return dict(ray.get(roster.present.remote(-1), timeout=ROSTER_SECONDS)[1])

    @property
    def agents(self) -> list[AgentState]:
        """The agents, in the order in which they were started."""
        members = [member for _, member in sorted(self._settled().items())]
        asked = [member.about() for member in members]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        found = []
        for member, answer in zip(members, asked, strict=True):
            state, about = "silent", About("", 0, b"", 0, "", member.workers, 0, 0.0)
            if answer in answered:
                try:
                    state, about = "ready", ray.get(answer)
                except exceptions.RayError:
                    state = "lost"
            found.append(AgentState(about.node, about.pid, state, member.workers, about.batches))
        return found

    def resize(self, nodes: int) -> None:
        """Have another number of agents, also in the middle of an epoch.

        Those that go make what they have. An elastic fleet goes on from there.
        """
        nodes = check.count("nodes", nodes)
        self.start()
        if self._made is not None:
            self._made.resize(nodes)
        elif self._name is not None:
            ray.get(self._roster.resize.remote(nodes), timeout=ROSTER_SECONDS)
        else:
            raise RuntimeError("this fleet is a copy: resize the one that was started")

    def signal(self, agent: int, number: int | None) -> int:
        """End an agent for `cseq.testing.kill_agent`; return the process id that it has had."""
        member = [member for _, member in sorted(self._settled().items())][agent]
        pid: int = ray.get(member.about()).pid
        if number is None:
            ray.kill(member.handle)
        else:
            member.handle.signal.remote(number)
        return pid

    # -- for the pool

    @property
    def waits_for(self) -> str:
        """What agents wait for that are not there yet."""
        wants = self.placement.resources or {"num_cpus": "as many as there are workers"}
        with contextlib.suppress(Exception):  # the connection may be gone
            there = {
                name: total
                for name, total in ray.cluster_resources().items()
                if name in ("CPU", "GPU", "memory", *(wants.get("resources") or ()))
            }
            free = ray.available_resources()
            free = {name: free.get(name, 0) for name in there}
            return f"each asks for {wants}; the cluster has {there}, of which are free {free}"
        return f"each asks for {wants}"

    @property
    def workers(self) -> int:
        """Worker processes of all agents."""
        return sum(member.workers for member in list(self._members.values()))

    def meter(self) -> Callable[[dict[str, float], int], None]:
        """Return what adds the counts of a sequence to Ray's metrics."""
        before: dict[str, float] = {}

        def export(counts: dict[str, float], agents: int) -> None:
            for name, value in counts.items():
                if value > before.get(name, 0):
                    counter(name).inc(value - before.get(name, 0))
                    before[name] = value
            gauge().set(agents)

        return export

    def attach(self, notify: Callable[[], None]) -> Mapping[int, RayAgent]:
        """Return the present agents, by number; `notify` is called when they change."""
        self.start()
        with self._lock:
            self._watchers.append(notify)
            if self._made is None and not self._asks:
                self._seen = -1
                self._ask()
        return self._agents

    def detach(self, notify: Callable[[], None]) -> None:
        """Do not call `notify` any more."""
        with contextlib.suppress(ValueError):
            self._watchers.remove(notify)

    # -- the end

    def close(self) -> None:
        """End the agents and their workers. A fleet that was unpickled only forgets them."""
        with self._lock:
            over, self.over = self.over, self.over or "it was closed"
            made, self._made, roster, self._roster = self._made, None, self._roster, None
            is_mine = made is not None or self._name is not None
            self._take({})
            self.worker = None
        _pickled.discard(self)
        self._tell()
        if over or not is_mine or not ray.is_initialized():
            return
        if made is not None:
            made.close()
        if self._end is not None:
            self._end.detach()
        if roster is not None:
            ray.wait([roster.close.remote()], timeout=ROSTER_SECONDS)
            ray.kill(roster)

    def __enter__(self) -> Self:
        """Start it; a fleet without a worker is started by its loader."""
        return self if self.worker is None and not self.over else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


_pickled: set[RayFleet] = set()  # copies may be in use: these stay until they are closed


def drop(agents: Agents) -> None:
    """End the agents of a fleet that was not closed: garbage is collected on any thread."""
    _thread.start_new_thread(aside, (agents.close,))


def explain(member: Member, lost: Lost, done: Callable[[Outcome], None]) -> None:
    """Call `done` with the reason why a connection is lost: Ray's, if the agent is gone."""

    def finish(future: Future[Any]) -> None:
        found = outcome_of(future)
        done(found if isinstance(found, Lost) else lost)

    if ray.is_initialized():
        member.about().future().add_done_callback(finish)
    else:
        done(lost)


@cache
def counter(name: str) -> Counter:
    """Return the metric of all sequences of this process that counts something."""
    return Counter(f"cseq_{name}_total", f"cseq.Stats: {name.replace('_', ' ')}")


@cache
def gauge() -> Gauge:
    """Return the metric that says how many agents a sequence of this process has."""
    return Gauge("cseq_agents", "Agents that can be sent something")


def is_final(future: Future[Any]) -> bool:
    """Whether the call of an actor has failed because that is gone, and is not restarted."""
    return isinstance(future.exception(), exceptions.ActorDiedError)


def connect() -> None:
    """Connect to Ray, where that has not been done: as `ray.init()` does.

    Raises
    ------
    RuntimeError
        Ray is to encrypt what it sends.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        raise RuntimeError(
            "RAY_USE_TLS is set, and the batches of a fleet are not encrypted on their way: "
            "run it without, in a network that is trusted (a VPN, or one of its own)"
        )
    if not ray.is_initialized():
        ray.init()


def roster_actor(name: str | None = None) -> Any:
    """Return what starts a roster; one with a name outlives this job."""
    lasting = {"name": name, "namespace": NAMESPACE, "lifetime": "detached"} if name else {}
    return ray.remote(Roster).options(
        num_cpus=0, max_restarts=-1, max_concurrency=READERS, **lasting
    )


def fleet_for(job: Job) -> RayFleet:
    """Make the fleet of a sequence that is given none: its workers are spread over all nodes."""
    fleet = RayFleet(
        job.worker,
        batch_size=job.sampler.words,
        seed_globals=job.seed_globals,
        **job.options._asdict(),
    )
    fleet.placement = Placement(None, job.num_workers, {}, is_total=True)
    return fleet
