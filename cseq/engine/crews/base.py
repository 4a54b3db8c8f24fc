"""Base class for crews, and the name of the file that holds a crew's rings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from cseq._memory import HAS_GIL
from cseq.measure.stats import Stats
from cseq.system import share

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.converter.host import Converter
    from cseq.encoding.transport import BatchReader, Convert, LeafFor
    from cseq.engine._streams import Request
    from cseq.engine.tickets.base import Tickets, Working
    from cseq.measure.lanes import Lanes
    from cseq.processes.supervisor import Supervisor

__all__ = ["RUN", "Crew", "file_name"]

RUN = "cseq-run"


def file_name(tickets: Tickets, *, threads: bool = False) -> str:
    """Return the name of the file that holds the rings. ``cseq top`` reads it from `/proc`."""
    facts: dict[str, object] = {
        "pid": os.getpid(),
        "rings": tickets.rings,
        "workers": tickets.num_workers,
        "converters": tickets.num_converters,
        "threads": int(threads),
        "gil": int(HAS_GIL),
        "cores": share(),
        "rank": os.environ.get("RANK", "0")[:9],
        "world_size": os.environ.get("WORLD_SIZE", "1")[:9],
    }
    sampler = tickets.sampler
    if sampler is not None:
        names = ["dset_size", "batch_size", "length", "seed"]
        names += ["rank", "world_size"] if sampler.world_size > 1 else []
        facts.update({name: getattr(sampler, name) for name in names})
    return " ".join([RUN, *(f"{name}={value}" for name, value in facts.items())])


class Staff(Protocol):
    """Supervised workers: a `Supervisor` or a `ThreadGroup`."""

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:
        """Raise WorkerTimeout or restart the worker if a ticket takes too long."""

    def is_ready(self, runner_number: int) -> bool:
        """Return True if a worker has created its indexer or producer."""


class Crew:
    """A pool's runners, and the rings that they share with the training loop.

    The constructor starts nothing, because a signal handler may raise before a `Run` can close the
    crew. The pool calls `resize` (for batches), `prepare` and `launch` in that order. `close` may
    be called at any time.

    Each worker runs `engine.worker.serve`. The crew replaces dead workers and counts them in
    `Tickets.deaths`. It supports all `WorkerOptions` that `arguments.refuse` accepts.

    Attributes
    ----------
    rings, make_next, on_cancel
        See `Feed`. `make_next` is None unless the training thread makes the batches.
    convert, leaf_for
        See `Decoder`. Both are None if workers or converters publish batches in their final form.
    reader : BatchReader
        Decodes batches in the trainer.
    lanes : Lanes
        The kind of runners and the number of workers, for traces.
    staff : Staff, optional
        The supervised workers.
    supervisor : Supervisor, optional
        The same object as `staff` if the workers are processes.
    of : str
        The name of the public class, for reports.
    is_inline : bool
        Whether the training thread makes batches on demand.
    timed : int
        The highest runner number to which the ticket timeout applies.
    """

    rings: list[Ring]
    reader: BatchReader
    lanes: Lanes
    convert: Convert | None = None
    leaf_for: LeafFor | None = None
    make_next: Callable[[], None] | None = None
    on_cancel: Callable[[int], None] | None = None
    staff: Staff | None = None
    supervisor: Supervisor | None = None
    of: str
    is_inline = False
    timed = 0

    def __init__(self, tickets: Tickets) -> None:
        self.tickets = tickets

    def _converter(self) -> Converter | None:
        output = self.tickets.output
        if output is None or output.kind == "null":
            return None
        from cseq.converter.host import Converter

        return Converter(output)

    def prepare(self, worker: object, name: str = "worker") -> None:
        """Set the user's worker object and its name in messages."""

    def launch(self) -> None:
        """Start the workers that are not running yet."""

    def begin_epoch(self) -> None:
        """Start an epoch."""

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""

    def room_for(self, num_workers: int, present: int) -> int:  # noqa: ARG002
        """Return how many of `num_workers` fit in memory if `present` are already running."""
        return num_workers

    def check(self) -> None:
        """Raise an error that has occurred in a worker or another thread."""

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:
        """Raise WorkerTimeout or restart the worker if a ticket takes too long."""
        if self.staff is not None:
            self.staff.check_time(working, timeout, restart=restart)

    def is_ready(self, runner_number: int) -> bool:
        """Return True if a worker has created its indexer or producer."""
        return self.staff is None or self.staff.is_ready(runner_number)

    def died_of(self, ring_number: int, cell: int) -> BaseException | None:  # noqa: ARG002
        """Return the error to raise if a ticket has killed its workers."""
        return None

    def write(self, value: object, name: str) -> Request:
        """Write a value for a worker. Raises TypeError if it cannot be sent."""
        raise NotImplementedError

    def requested_key(self, ring_number: int, cell: int) -> object:
        """Return the key of a cell's ticket. Thread-safe."""
        raise NotImplementedError

    def stats(self, **counted: Any) -> Stats:
        """Return statistics, including the values in `counted`."""
        return Stats.read(self.rings, **counted)

    def close(self, *, hurried: bool) -> None:
        """Stop all runners within a limited time. Can be called twice."""
        raise NotImplementedError
