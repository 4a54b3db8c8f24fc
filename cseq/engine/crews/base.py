"""What all crews have in common, and the name of the file of their rings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cseq._memory import HAS_GIL
from cseq.measure.stats import Stats
from cseq.system import share

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.converter.host import Converter
    from cseq.encoding.transport import BatchReader
    from cseq.engine._streams import Request
    from cseq.engine.tickets.base import Tickets, Working
    from cseq.measure.lanes import Lanes
    from cseq.processes.supervisor import Supervisor

__all__ = ["RUN", "Crew", "file_name"]

RUN = "cseq-run"  # how files of rings are called


def file_name(tickets: Tickets, *, threads: bool = False) -> str:
    """Return what `/proc` calls the file of a pool's rings: with what `top` shows of the run."""
    told: dict[str, object] = {
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
        shown = ["dset_size", "batch_size", "length", "seed"]
        shown += ["rank", "world_size"] if sampler.world_size > 1 else []
        told.update({name: getattr(sampler, name) for name in shown})
    return " ".join([RUN, *(f"{name}={value}" for name, value in told.items())])


class Crew:
    """The runners of a pool, and the rings that they share with the loop.

    The constructor starts nothing: an exception of a signal handler may drop the crew before there
    is a `Run` to close it.

    Parameters
    ----------
    tickets : Tickets
        What is asked for.

    Attributes
    ----------
    rings : list of Ring
        See `Feed`.
    reader : BatchReader
        Where finished batches come out.
    lanes : Lanes
        The runners, for traces: their kind, and how many owners of the rings are workers.
    convert, leaf_for : callable or None
        See `Decoder`.
    make_next, on_cancel : callable or None
        See `Feed`.
    supervisor : Supervisor or None
        The worker processes, if there are any.
    of : str
        The class that has it, as a report names it.
    is_inline : bool
        The loop's own thread makes each batch, when it is asked for.
    timed : int
        Owners up to this number may take no longer for a ticket than its timeout.
    """

    rings: list[Ring]
    reader: BatchReader
    lanes: Lanes
    convert: Callable[[Any], Any] | None = None
    leaf_for: Callable[[Any], Any] | None = None
    make_next: Callable[[], None] | None = None
    on_cancel: Callable[[int], None] | None = None
    supervisor: Supervisor | None = None
    of: str
    is_inline = False
    timed = 0

    def __init__(self, tickets: Tickets) -> None:
        self.tickets = tickets

    def _converter(self) -> Converter | None:
        """Return what converts batches on this side of the rings, if they are converted there."""
        output = self.tickets.output
        if output is None or output.kind == "null":
            return None
        from cseq.converter.host import Converter

        return Converter(output)

    def prepare(self, worker: Any, name: str = "worker") -> None:
        """Set the user's object; `name`: what messages call it."""

    def launch(self) -> None:
        """Start the workers, once; `prepare` was called."""

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def resize(self, num_workers: int) -> None:
        """Go on with another number of workers."""

    def room_for(self, num_workers: int, present: int) -> int:  # noqa: ARG002
        """Return how many workers, of these at most, there is memory for beside those present."""
        return num_workers

    def check(self) -> None:
        """Raise errors of workers and of other threads."""

    def check_time(self, working: Working, timeout: float, *, restart: bool) -> None:
        """Raise WorkerTimeout for what takes longer, or restart its worker."""

    def is_ready(self, runner_number: int) -> bool:  # noqa: ARG002
        """Whether a worker has made its indexer, or producer."""
        return True

    def died_of(self, number: int, cell: int) -> BaseException | None:  # noqa: ARG002
        """Return the exception in place of a ticket that has killed its workers."""
        return None

    def write(self, value: Any, name: str) -> Request:
        """Write something for a worker; TypeError if that cannot be sent."""
        raise NotImplementedError

    def requested_key(self, number: int, cell: int) -> Any:
        """Return the key that the ticket in a cell refers to; on any thread."""
        raise NotImplementedError

    def stats(self, **counted: Any) -> Stats:
        """Return counts and times, with those that are counted elsewhere."""
        return Stats.read_rings(self.rings, **counted)

    def close(self, *, hurried: bool) -> None:
        """End all that was started; returns within a bounded time. Calling it twice is fine."""
        raise NotImplementedError
