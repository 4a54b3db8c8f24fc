"""The pools, which run the stages: one protocol, three implementations.

``inline``   the calling thread, batch by batch: this is test mode
``thread``   threads of this process
``process``  worker processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from cseq.place import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Consumer
    from cseq._lock import RunState
    from cseq.converter.output import Output
    from cseq.place import Place
    from cseq.sampler import Sampler
    from cseq.stats import Stats
    from cseq.supervisor import Supervisor

__all__ = ["Job", "Pool", "pool_of"]


class Job(NamedTuple):
    """The arguments of `MSequence`, checked; `MSequence.start` resolves them and makes a pool.

    Attributes
    ----------
    output : Output
        What `out_type` and `dtype` ask for; in a pool: as far as this machine has it.
    num_converters : int
        In a pool, 0 where there is no CUDA.
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
        """The most samples that a batch can have."""
        return min(self.sampler.batch_size, self.sampler.dset_size)

    def without_worker(self) -> Job:
        """Return the job of a closed pool: a pool is part of a cycle that would keep the worker."""
        return self._replace(worker=None)


class Pool(Progress, Protocol):
    """The methods of a pool that `MSequence` calls, from one thread at a time.

    Its progress is that of the epoch that was begun last. The constructor starts nothing: an
    exception of a signal handler may drop the pool before there is a `Run` to close it.
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
        """Return counts and times of this pool so far."""

    @property
    def run(self) -> RunState:
        """The generation of the present iterator, and the lock for the calls of this pool."""

    def begin(self, place: Place, epoch: int, consumed: int, generation: int) -> None:
        """Begin an epoch after `consumed` samples; nothing of an earlier one is delivered.

        In one step of C, `place` becomes that of this epoch, and the pool its progress. If the same
        epoch was begun at the same place, and the loop has had nothing of it yet, the batches that
        were made are kept. `generation`: that of the iterator that is to have the batches.
        """

    def notify_all(self) -> None:
        """Have a call that waits in another thread look at the run's generation."""

    @property
    def consumer(self) -> Consumer:
        """The trainer's end of the ring: returns the batches."""

    def close(self) -> None:
        """End all that was started; returns within a bounded time. Calling it twice is fine."""


def pool_of(kind: str) -> Callable[[Job], Pool]:
    """Return the class of pools of a kind: 'inline', 'thread' or 'process'."""
    if kind == "inline":
        from cseq.pools.inline import InlinePool

        return InlinePool
    if kind == "thread":
        from cseq.pools.thread import ThreadPool

        return ThreadPool
    from cseq.pools.process import ProcessPool

    return ProcessPool
