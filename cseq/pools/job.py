"""What a pool is to do: the arguments of `MSequence`, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from cseq.converter.output import Output
    from cseq.order.sampler import Sampler

__all__ = ["Job"]


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
