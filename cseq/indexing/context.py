"""Functions for indexers: `rng`, `empty`, `parts`, `worker_info`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._core import derive
from cseq._work import BatchState, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from cseq.encoding._room import Room

__all__ = ["BatchContext", "Numbers", "WorkerInfo", "empty", "enter", "parts", "rng", "worker_info"]

# Values for the `purpose` argument of `derive` (see docs/inside/shuffle.md). The shuffle uses 1,
# and seeding.py uses 4 and 5.
PURPOSE_RNG = 2
PURPOSE_ITEM = 3


class Numbers(NamedTuple):
    """Identifies a batch that has no ticket in a local ring.

    `start` is the position of the first unit in the epoch. `units` is the result of `parts`.
    """

    seed: int
    epoch: int
    batch: int
    start: int
    units: NDArray[np.int64] | None = None


Ticket: TypeAlias = Runner | Numbers


@dataclass(frozen=True)
class WorkerInfo:
    """The current worker, and the batch that it is making.

    Attributes
    ----------
    number : int
        The worker number, starting with 0.
    num_workers : int
        The number of workers.
    epoch, batch : int or None
        The epoch and the batch number in it, or None while the indexer is being created or closed.
    """

    number: int
    num_workers: int
    epoch: int | None
    batch: int | None


class BatchContext(BatchState):
    """The runner state that `rng`, `empty`, `parts` and `worker_info` use.

    `seed` is used while the indexer is created. `allocator` creates arrays in the batch's slot.
    `seeds` is a `Seeds` object if global generators are seeded. `item` is the number of a stream's
    item or key. `left` is `Leaving.left`.
    """

    ticket: Ticket | None
    drawn: np.random.Generator | None

    def __init__(self, number: int, num_workers: int, seed: int = 0) -> None:
        self.number = number
        self.num_workers = num_workers
        self.seed = seed
        self.allocator: Room | None = None
        self.seeds: Any = None
        self.item = 0
        self.left: Sequence[tuple[int, Any, str]] = ()

    def rng(self) -> np.random.Generator:
        """Return the batch's generator. All calls for a batch return the same object."""
        if self.drawn is None:
            if self.ticket is None:
                raise RuntimeError(
                    "cseq.rng() works only while a batch is being made; call it in __getitem__ "
                    "rather than __init__, and pass rng='batch' to a DataLoader"
                )
            self.drawn = generator(self.ticket.seed, self.ticket.epoch, self.ticket.start)
        return self.drawn

    def set_ticket(self, ticket: Ticket) -> None:
        """Set the current ticket and reset `rng`, even if the same batch is made again."""
        self.ticket = ticket
        self.drawn = None

    def clear_ticket(self) -> None:
        """Clear the ticket before the indexer is closed."""
        self.ticket = self.allocator = self.drawn = None


class Here(threading.local):
    """The current thread's context, if any."""

    batch_context: BatchContext | None = None


here = Here()


def enter(batch_context: BatchContext | None) -> BatchContext | None:
    """Set or clear the context of this thread. Return the previous one."""
    outer = here.batch_context
    here.batch_context = batch_context
    return outer


def generator(seed: int, epoch: int, start: int) -> np.random.Generator:
    """Create the generator for a batch at a position in the epoch.

    The Philox key is derived from (seed, epoch), and the position is the upper half of the counter.
    The first call imports numpy.random.
    """
    low, high = derive(seed, epoch, PURPOSE_RNG, 2)
    random = np.random
    philox = random.Philox(key=low | high << 64, counter=start << 128)
    made: np.random.Generator = random.Generator(philox)
    return made


def rng() -> np.random.Generator:
    """Return the random generator of the current batch.

    The generator depends only on the seed, the epoch and the position of the batch. It does not
    depend on the number of workers, test mode, restarts or resumes. Each rank draws different
    numbers. All calls for a batch return the same generator.

    Raises
    ------
    RuntimeError
        If this is not called from the ``__getitem__`` of an indexer.

    Examples
    --------
    >>> class Noise:
    ...     def __getitem__(self, indices):
    ...         return cseq.rng().integers(100, size=len(indices))
    >>> manager = cseq.MPSequence(Noise, 4, batch_size=4, seed=1, out_type="null")
    >>> with manager.start() as one:
    ...     [batch] = one
    >>> with manager.start_test() as other:
    ...     manager.set_epoch(0)
    ...     print(np.array_equal(batch, next(iter(other))))
    True
    """
    batch_context = here.batch_context
    if batch_context is None:
        raise RuntimeError(
            "cseq.rng() was called outside of an indexer; call it in __getitem__, or use "
            "numpy.random.default_rng(seed)"
        )
    return batch_context.rng()


def parts() -> NDArray[np.int64]:
    """Return the number of indices in each unit of the current batch.

    Returns
    -------
    numpy.ndarray
        An int64 array with one element per unit of the order, such as a row of `Packed`. The sum is
        the number of indices, not counting samples that `from_dataset` left out because of
        ``on_error='skip'``.

    Raises
    ------
    RuntimeError
        If this is not called from the ``__getitem__`` of an indexer.

    Examples
    --------
    >>> class Rows:
    ...     def __getitem__(self, indices):
    ...         return [part.tolist() for part in np.split(indices, cseq.parts().cumsum()[:-1])]
    >>> manager = cseq.MPSequence(Rows, 3, batch_size=2, shuffle=False, out_type="null")
    >>> with manager.start_test() as batches:
    ...     print(*batches)
    [[0], [1]] [[2]]
    """
    batch_context = here.batch_context
    ticket = None if batch_context is None else batch_context.ticket
    if isinstance(ticket, Numbers):
        divided = ticket.units
    else:
        divided = None if ticket is None else ticket.parts()
    if divided is None:
        raise RuntimeError(
            "cseq.parts() works only while a sequence is making a batch; call it in __getitem__ of "
            "the indexer"
        )
    sizes: NDArray[np.int64] = divided.copy()
    ends = sizes.cumsum()
    assert batch_context is not None
    for position, _, _ in batch_context.left:
        sizes[np.searchsorted(ends, position, side="right")] -= 1
    return sizes


def empty(shape: int | Sequence[int], dtype: DTypeLike = float) -> NDArray[Any]:
    """Create an uninitialized array in the shared memory of the current batch.

    A batch that is built in this array (``np.take(…, out=)``, ``np.stack(…, out=)``) is not copied,
    unless the indexer keeps the array. Outside a worker process, this is `numpy.empty`.

    Parameters
    ----------
    shape : int or sequence of int
        The shape of the array.
    dtype : data type, optional
        The data type of the array, which must not contain Python objects.

    Returns
    -------
    numpy.ndarray
        A C-contiguous and writable array.

    Raises
    ------
    TypeError, ValueError
        In a worker process, if the shape or the type is invalid.
    MemoryError
        If there is not enough memory for the array.

    Examples
    --------
    >>> images = np.zeros((100, 3, 8, 8), "uint8")
    >>> class Images:
    ...     def __getitem__(self, indices):
    ...         batch = cseq.empty((len(indices), 3, 8, 8), "uint8")
    ...         return np.take(images, indices, axis=0, out=batch, mode="clip")
    >>> with cseq.MPSequence(Images, 100, batch_size=50, out_type="null").start() as batches:
    ...     print(*(batch.shape for batch in batches))
    (50, 3, 8, 8) (50, 3, 8, 8)
    """
    batch_context = here.batch_context
    if batch_context is None or batch_context.allocator is None:
        return np.empty(shape, dtype)
    return batch_context.allocator.empty(shape, dtype)


def worker_info() -> WorkerInfo | None:
    """Return the current worker and batch.

    Returns
    -------
    WorkerInfo or None
        The worker and the batch, or None if this is not called from an indexer.

    Examples
    --------
    >>> cseq.worker_info() is None
    True
    >>> class Number:
    ...     def __getitem__(self, indices):
    ...         return cseq.worker_info().batch
    >>> with cseq.MPSequence(Number, 6, batch_size=2, out_type="null").start() as batches:
    ...     print(*batches)
    0 1 2
    """
    batch_context = here.batch_context
    if batch_context is None:
        return None
    ticket = batch_context.ticket
    return WorkerInfo(
        number=batch_context.number,
        num_workers=batch_context.num_workers,
        epoch=None if ticket is None else ticket.epoch,
        batch=None if ticket is None else ticket.batch,
    )
