"""The base class for crews, and the file name for a crew's rings."""

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
    """Return the name of a pool's ring file in `/proc`, which encodes the values for `top`."""
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

    The constructor creates `rings`, `reader` and `lanes`, but starts nothing, because a signal
    handler may raise before a `Run` exists that can close the crew. The pool then calls `resize`
    (only for batches, with the initial number of workers), `prepare` and `launch`, in that order.
    It calls `begin_epoch` for each epoch, `check` and `check_time` whenever the loop waits, and
    `resize` between batches. It may call `close` at any time after construction.

    Each worker runs `engine.worker.serve` with the task that `Tickets.task` returns. The crew must
    support the `WorkerOptions` of its tickets unless `arguments.refuse` rejects them. Crews handle
    worker deaths themselves: they replace the worker and count the death in `Tickets.deaths`.

    Attributes
    ----------
    rings, make_next, on_cancel
        See `Feed`. `make_next` is None unless the training thread makes the batches.
    convert, leaf_for
        See `Decoder`. Both are None if workers or converters deliver final batches.
    reader : BatchReader
        Decodes finished batches on the trainer side with `decoder`, `decode` and `error`.
    lanes : Lanes
        The runner kind and the number of workers, for traces.
    staff : Staff, optional
        The supervised workers.
    supervisor : Supervisor, optional
        The same object as `staff` if the workers are processes.
    of : str
        The public class that uses this crew, for reports.
    is_inline : bool
        Whether the training thread makes each batch on demand.
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
        """Return a converter if batches are converted on this side of the rings, else None."""
        output = self.tickets.output
        if output is None or output.kind == "null":
            return None
        from cseq.converter.host import Converter

        return Converter(output)

    def prepare(self, worker: object, name: str = "worker") -> None:
        """Set the user's worker object, called `name` in messages."""

    def launch(self) -> None:
        """Start the workers that are not running yet; call this after `prepare`."""

    def begin_epoch(self) -> None:
        """Start an epoch."""

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""

    def room_for(self, num_workers: int, present: int) -> int:  # noqa: ARG002
        """Return how many of `num_workers` workers fit in memory with `present` already running."""
        return num_workers

    def check(self) -> None:
        """Raise any error from workers or other threads."""

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:
        """Raise WorkerTimeout or restart the worker if a ticket takes too long."""
        if self.staff is not None:
            self.staff.check_time(working, timeout, restart=restart)

    def is_ready(self, runner_number: int) -> bool:
        """Return True if a worker has created its indexer or producer."""
        return self.staff is None or self.staff.is_ready(runner_number)

    def died_of(self, ring_number: int, cell: int) -> BaseException | None:  # noqa: ARG002
        """Return the error for a ticket that killed its workers, or None."""
        return None

    def write(self, value: object, name: str) -> Request:
        """Write a value for a worker; raise TypeError if the value cannot be sent."""
        raise NotImplementedError

    def requested_key(self, ring_number: int, cell: int) -> object:
        """Return the key requested by the ticket in a cell. Thread-safe."""
        raise NotImplementedError

    def stats(self, **counted: Any) -> Stats:
        """Return the pool's statistics, including the values passed in `counted`."""
        return Stats.read(self.rings, **counted)

    def close(self, *, hurried: bool) -> None:
        """Stop everything the crew started, within a bounded time. May be called twice."""
        raise NotImplementedError
