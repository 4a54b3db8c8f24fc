"""A fleet in this process: agents with a ticket server each, in the place of other machines."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cseq.arguments import WorkerOptions
from cseq.encoding import failure
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.server import TicketServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from cseq.fleet.agent import Land

PLAIN = WorkerOptions.checked(None, 100, None, "raise", None, 1, None)


def landed(answer: list[Any], land: Land) -> list[Any]:
    """Copy an answer as a connection does, which receives large parts in what `land` returns."""
    for place, part in enumerate(answer[1:], 1):
        answer[place] = land(part.nbytes)
        answer[place][...] = part
    return answer


class LocalAgent:
    """A ticket server, and threads that call it."""

    def __init__(self, name: str, server: TicketServer) -> None:
        self.name, self.server = name, server
        self._threads = ThreadPoolExecutor(4)
        self._running = threading.Event()
        self._running.set()
        self.is_lost = False
        self.is_lost_in_work = False  # whenever it gets a parcel
        self.parcels = self.answers = self.pongs = 0  # sent to it, and from it; signs of life

    def send(self, request: Any, done: Callable[[Any], None], land: Land) -> None:
        """Have a thread call the server."""
        self.parcels += 1
        self._submit(self._call, land, request, done)

    def _submit(self, call: Callable[..., None], *given: Any) -> None:
        """Have a thread do it; the last argument gets the answer. One that was closed is lost."""
        try:
            self._threads.submit(call, *given)
        except RuntimeError:
            given[-1](Lost("it was closed"))

    def _call(self, land: Land, request: Any, done: Callable[[Any], None]) -> None:
        try:
            outcome: Any = landed(self.server.make(request), land)
        except InterruptedError as error:
            outcome = Lost(str(error), final=True)
        except Exception as error:  # noqa: BLE001 - it is raised in the loop
            outcome = Failed(failure.pack(error))
        self._running.wait()
        self.answers += 1
        done(Lost("it was lost") if self.is_lost or self.is_lost_in_work else outcome)

    def ping(self, done: Callable[[Any], None]) -> None:
        """Answer, unless it is stopped or lost."""
        self._submit(self._answer, done)

    def _answer(self, done: Callable[[Any], None]) -> None:
        self._running.wait()
        done(Lost("it is lost") if self.is_lost else None)
        self.pongs += 1

    def stop(self) -> None:
        """Answer nothing until `go`."""
        self._running.clear()

    def go(self) -> None:
        """Answer again."""
        self._running.set()

    def close(self) -> None:
        """End the workers."""
        self.go()
        self.server.close()
        self._threads.shutdown()


class LocalFleet:
    """Agents that come and go; what `MSequence` takes in the place of a worker."""

    waits_for = "a test"
    over = ""

    def __init__(
        self,
        worker: Any,
        nodes: int = 2,
        num_workers: int = 1,
        batch_size: int = 64,
        *,
        seed_globals: bool = True,
        **options: Any,
    ) -> None:
        self.worker, self.batch_size = worker, batch_size
        self._num_workers = num_workers
        self._options = PLAIN._replace(**options)
        self._seed_globals = seed_globals
        self._numbers = itertools.count(1)
        self.agents: dict[int, LocalAgent] = {}
        self.exported: dict[str, float] = {}  # of the sequence that was the last one
        self._watchers: list[Callable[[], None]] = []
        for _ in range(nodes):
            self.add()

    @property
    def workers(self) -> int:
        """Worker processes of all agents."""
        return self._num_workers * len(self.agents)

    def add(self) -> LocalAgent:
        """Start an agent."""
        server = TicketServer(
            self.worker,
            self._num_workers,
            self.batch_size,
            self._options,
            seed_globals=self._seed_globals,
        )
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        number = next(self._numbers)
        agent = self.agents[number] = LocalAgent(f"agent {number}", server)
        self._tell()
        return agent

    def remove(self, number: int) -> None:
        """End an agent without a warning."""
        self.agents.pop(number).close()
        self._tell()

    def _tell(self) -> None:
        for notify in list(self._watchers):
            notify()

    def meter(self) -> Callable[[dict[str, float], int], None]:
        """Keep the counts that come last."""
        exported = self.exported  # a pool that is finished refers to what this returns

        def keep(counts: dict[str, float], agents: int) -> None:
            exported.update(counts, agents=agents)

        return keep

    def attach(self, notify: Callable[[], None]) -> dict[int, LocalAgent]:
        """Return the agents."""
        self._watchers.append(notify)
        return self.agents

    def detach(self, notify: Callable[[], None]) -> None:
        """Do not call `notify` any more, if it was attached."""
        if notify in self._watchers:
            self._watchers.remove(notify)

    def close(self) -> None:
        """End all agents."""
        for agent in self.agents.values():
            agent.close()
        self.agents.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OwnFleet(LocalFleet):
    """A fleet of one sequence: it starts and ends with it."""

    def __init__(self, worker: Any, nodes: int, **options: Any) -> None:
        super().__init__(worker, 0, **options)
        self._nodes = nodes

    def attach(self, notify: Callable[[], None]) -> dict[int, LocalAgent]:
        """Start the agents."""
        for _ in range(self._nodes):
            self.add()
        return super().attach(notify)

    def detach(self, notify: Callable[[], None]) -> None:
        """End the agents."""
        super().detach(notify)
        self.close()


class LateFleet(LocalFleet):
    """A fleet without a worker, until a loader gives it one; its agents start with the first epoch.

    They may be stopped from their first moment on.
    """

    def __init__(self, nodes: int = 2, *, is_stopped: bool = False, **options: Any) -> None:
        super().__init__(None, 0, **options)
        self._nodes, self._is_stopped = nodes, is_stopped

    def attach(self, notify: Callable[[], None]) -> dict[int, LocalAgent]:
        """Start the agents."""
        while len(self.agents) < self._nodes:
            agent = self.add()
            if self._is_stopped:
                agent.stop()
        self._nodes = 0
        return super().attach(notify)
