"""The pool of streams from threads: what they hand over is the object itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import ASSIGNED, now_ns
from cseq._feed import Request
from cseq._work import ObjectTable, Runner
from cseq.encoding.transport import Objects
from cseq.indexing import context, indexer
from cseq.indexing.producer import Making
from cseq.measure.lanes import Lanes
from cseq.pools.base import file_name
from cseq.pools.stream import CALLS, StreamPool
from cseq.pools.thread import CLOSE_SECONDS, MADE, ThreadGroup, open_rings
from cseq.stage import INDEXER, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.encoding.transport import BatchReader

__all__ = ["Crew", "ThreadStreamPool"]


class Serving(Making):
    """The work on a ticket in a thread: what the ticket refers to is there as an object."""

    def _read(self, runner: Runner, which: slice) -> Any:
        assignment, key, _ = self._ring.kept[runner.cell]
        return (assignment if which == ASSIGNED else key).value


class Crew(ThreadGroup):
    """The threads of a pool, in place of a `Supervisor`."""

    instead = "a thread cannot be replaced: what it makes comes late"

    def __init__(self, rings: list[Ring], objects: ObjectTable) -> None:
        super().__init__(rings[0])
        self._rings, self._objects = rings, objects
        self._producer: Callable[[int, int], Any] | None = None
        self._is_launched = False

    def prepare(self, producer: Callable[[int, int], Any], **_: Any) -> None:
        """Set what makes a worker's producer, in its thread."""
        self._producer = producer

    def launch(self) -> None:
        """Start the threads, once."""
        if not self._is_launched:
            self._is_launched = True
            for number in range(len(self._rings)):
                self.add(f"cseq-w{number}", partial(self._serve, number), number + 1)
            self.start()

    def begin(self) -> None:
        """Begin an epoch: no thread dies, so nothing is counted by the epoch."""

    def close(self, *, hurried: bool) -> None:
        """End the threads."""
        for ring in self._rings:
            ring.close()
        self.join(CLOSE_SECONDS, hurried=hurried)
        self._producer = None

    def _serve(self, number: int) -> None:
        ring, make, count = self._rings[number], self._producer, len(self._rings)
        if make is None:  # it was closed before this thread ran
            return
        batch_context = context.BatchContext(number, count)
        context.enter(batch_context)
        self.begun[number + 1] = now_ns()
        producer = make(number, count)
        self.begun[number + 1] = MADE
        writer = Objects(ring.capacity, objects=self._objects, first=ring.first)
        serving = Serving(writer, producer, ring, batch_context, allocator=None)
        try:
            run(Runner(ring, INDEXER, 1, last=True), serving.work)
        finally:
            batch_context.clear()
            indexer.dispose(make, producer, copied=False)


class ThreadStreamPool(StreamPool):
    """The pool of streams from threads of this process."""

    crew: Crew

    def _open(
        self, num_workers: int, cells: int, room: int
    ) -> tuple[list[Ring], BatchReader, Lanes]:
        name = file_name(num_workers, rings=num_workers, threads=True)
        rings, self._file = open_rings(num_workers, name, cells, room, 1, CALLS)
        objects, lanes = ObjectTable(num_workers * cells), Lanes(num_workers, "thread")
        self.crew = Crew(rings, objects)
        self._crews = (self.crew,)
        return rings, Objects(cells, objects=objects), lanes

    def _write(self, value: Any, name: str) -> Request:  # noqa: ARG002 - for what is pickled
        return Request(None, value)

    def _written(self, number: int, cell: int) -> Any:
        _, key, _ = self.rings[number].kept[cell] or (None, None, None)
        return key and key.value

    def close(self) -> None:
        """Close the queues and wait for the threads."""
        self.crew.close(hurried=self.is_hurried)
        if self._file is not None:
            self._file.close()
