"""Worker options, and the size of a pool."""

from __future__ import annotations

from typing import NamedTuple

from cseq.check import choice, flag, integer, seconds
from cseq.processes.launcher import start_methods
from cseq.system import memory_limit_of

__all__ = ["MAX_RESTARTS", "Size", "WorkerOptions"]

# The default of `max_restarts`.
MAX_RESTARTS = 100


class WorkerOptions(NamedTuple):
    """Worker options for `MSequence` and `Streams`.

    Attributes
    ----------
    memory_limit : int or None
        The limit in bytes, or None for the default (a quarter of a rank's memory).
    """

    start_method: str | None = None
    max_restarts: int = MAX_RESTARTS
    timeout: float | None = None
    on_timeout: str = "raise"
    memory_limit: int | str | None = None
    threads: int | None = 1
    preload: bool = True

    def checked(self) -> WorkerOptions:
        """Validate and return the options."""
        limit, threads = self.memory_limit, self.threads
        return WorkerOptions(
            choice("start_method", self.start_method, (None, *start_methods())),
            integer("max_restarts", self.max_restarts, least=0),
            seconds("timeout", self.timeout),
            choice("on_timeout", self.on_timeout, ("raise", "restart")),
            None if limit is None else memory_limit_of(limit),
            None if threads is None else integer("threads", threads),
            flag("preload", self.preload),
        )


class Size(NamedTuple):
    """The number of workers, and the number of batches ahead of the loop."""

    num_workers: int
    buffer: int
