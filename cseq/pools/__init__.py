"""What runs the stages: one protocol, three pools.

``inline``   the caller itself, batch by batch: this is test mode
``thread``   threads of this process
``process``  worker processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from cseq.place import Progress
from cseq.threads import imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Consumer
    from cseq.converter.output import Output
    from cseq.sampler import Sampler
    from cseq.stats import Stats
    from cseq.supervisor import Supervisor

__all__ = ["Job", "Pool", "pool_of"]

# Where the class of each kind is. Names made anew each time would stay: some Pythons keep them all.
POOLS = {
    "inline": ("cseq.pools.inline", "InlinePool"),
    "thread": ("cseq.pools.thread", "ThreadPool"),
    "process": ("cseq.pools.process", "ProcessPool"),
}


class Job(NamedTuple):
    """What a pool is made from: the arguments of `MSequence`, checked.

    Attributes
    ----------
    output : Output
        What `out_type` and `dtype` ask for; resolved, in a pool's job: what this machine can give.
    num_converters : int
        0, in a pool's job, where there is no CUDA.
    compat : bool or None
        CUDA conversion in threads; None: as the system requires.
    memory_limit : int
        Bytes of shared memory that delivered batches may hold before copies are delivered.
    """

    worker: Any
    sampler: Sampler
    output: Output
    num_workers: int
    num_converters: int
    buffer: int
    ordered: bool
    compat: bool | None
    start_method: str | None
    on_error: str
    max_restarts: int
    timeout: float | None
    on_timeout: str
    memory_limit: int
    threads: int | None
    preload: tuple[str, ...] | Literal[False] | None
    seed_globals: bool

    @property
    def room(self) -> int:
        """Most samples that a batch can have."""
        return min(self.sampler.batch_size, self.sampler.dset_size)

    def without_worker(self) -> Job:
        """Return what a closed pool keeps: pools are parts of cycles, the worker is the user's."""
        return self._replace(worker=None)


class Pool(Progress, Protocol):
    """What `MSequence` calls of a pool; one thread at a time.

    Its progress is that of the epoch that was begun last. Making a pool starts nothing: an
    interrupt may drop it before there is a `Run` to close it.
    """

    @property
    def supervisor(self) -> Supervisor | None:
        """The worker processes, if there are any."""

    def open(self) -> None:
        """Start the runners. If this raises, or a signal handler does, `close` ends them."""

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that were left out for an error: epoch, batch, what was raised."""

    def stats(self) -> Stats:
        """Count what this pool has done so far."""

    def begin(self, epoch: int, consumed: int) -> None:
        """Begin an epoch behind `consumed` samples; nothing of an earlier one is delivered.

        What was already made for an epoch of which the loop has had nothing yet is kept if that
        very place is begun again.
        """

    def interrupt(self) -> None:
        """Make a `next` that waits in another thread raise InterruptedError; `begin` ends this."""

    @property
    def consumer(self) -> Consumer | None:
        """The trainer's end of the ring, if there is one."""

    def next(self) -> Any:
        """Return the next batch, or raise StopIteration at the end of the epoch."""

    def close(self) -> None:
        """End everything that was started; returns within a bounded time. Twice is fine."""


def pool_of(kind: str) -> Callable[[Job], Pool]:
    """Return the class of pools of a kind: 'inline', 'thread' or 'process'."""
    module, name = POOLS[kind]
    pool: Callable[[Job], Pool] = getattr(imported(module), name)
    return pool
