"""Functions for use inside an indexer: `rng`, `empty`, `parts`, `worker_info`.

A runner enters its `BatchContext` before it calls the indexer and leaves it afterwards. Contexts
are thread-local, so a manager used inside another manager's indexer keeps its own context.
"""

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

# Purpose numbers for deriving words from a seed (docs/inside/shuffle.md): for `rng`, and for the
# generators that adapters seed for each item. The shuffle uses 1, and seeding.py uses 4 and 5.
PURPOSE_RNG = 2
PURPOSE_ITEM = 3


class Numbers(NamedTuple):
    """Identifies an adapter's or a fleet's batch, which has no ticket in a local ring.

    `start` is the position of the batch's first sample in the epoch order. For a batch from a
    sequence, `units` is the result of `parts`.
    """

    seed: int
    epoch: int
    batch: int
    start: int
    units: NDArray[np.int64] | None = None


Ticket: TypeAlias = Runner | Numbers


@dataclass(frozen=True)
class WorkerInfo:
    """The current worker and the batch that it is making.

    Attributes
    ----------
    number : int
        The worker number, starting at 0.
    num_workers : int
    epoch, batch : int or None
        The epoch and the batch number in that epoch, or None while the indexer is being created or
        closed.
    """

    number: int
    num_workers: int
    epoch: int | None
    batch: int | None


class BatchContext(BatchState):
    """One runner's state, which `rng`, `empty` and `worker_info` use.

    `BatchState`, implemented in C, holds the current ticket and its generator. `seed` is used while
    an indexer is created; after that, each ticket carries a seed. `allocator` creates arrays in the
    batch's slot. `seeds` is a `Seeds` object if the global generators are seeded. `item` is the
    number of a stream's item or key in the epoch. `left` is `Leaving.left`.
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
        """Return the batch's generator, which is the same object throughout the batch."""
        if self.drawn is None:
            if self.ticket is None:
                raise RuntimeError(
                    "cseq.rng() belongs to a batch: call it in __getitem__, not in __init__; in "
                    "the data set of a DataLoader, with rng='batch'"
                )
            self.drawn = generator(self.ticket.seed, self.ticket.epoch, self.ticket.start)
        return self.drawn

    def set_ticket(self, ticket: Ticket) -> None:
        """Set the current ticket and reset `rng`, even if the batch is the same."""
        self.ticket = ticket
        self.drawn = None

    def clear_ticket(self) -> None:
        """Clear the ticket before the indexer is closed."""
        self.ticket = self.allocator = self.drawn = None


class Here(threading.local):
    """Holds the context that a thread has entered, if any."""

    batch_context: BatchContext | None = None


here = Here()


def enter(batch_context: BatchContext | None) -> BatchContext | None:
    """Set this thread's context, or clear it with None. Return the previous context."""
    outer = here.batch_context
    here.batch_context = batch_context
    return outer


def generator(seed: int, epoch: int, start: int) -> np.random.Generator:
    """Create the generator for the batch that starts at this position in the epoch.

    The generator is Philox, keyed by (seed, epoch), with the position in the upper half of its
    counter. Each position belongs to one batch on one rank, even after a resume with a different
    number of ranks. The first call makes numpy import its random module.
    """
    low, high = derive(seed, epoch, PURPOSE_RNG, 2)
    random = np.random
    philox = random.Philox(key=low | high << 64, counter=start << 128)
    made: np.random.Generator = random.Generator(philox)
    return made


def rng() -> np.random.Generator:
    """Return the current batch's random generator.

    The generator depends only on the seed, the epoch and the batch's position in the epoch. Draws
    are the same for any number of workers, in test mode, after a worker's death and after a resume.
    Draws differ between ranks. Within one batch, every call returns the same generator.

    Raises
    ------
    RuntimeError
        Called outside an indexer's ``__getitem__``.

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
            "cseq.rng() was called outside of an indexer: it belongs to the batch that is being "
            "made; elsewhere, use numpy.random.default_rng(seed)"
        )
    return batch_context.rng()


def parts() -> NDArray[np.int64]:
    """Return the number of indices in each unit of the current batch.

    Returns
    -------
    numpy.ndarray
        Shape (units in the batch,), int64. A unit is what the order counts, such as a row in
        `Packed`. The sum is the number of indices or, in a `from_dataset` collate function, the
        number of samples that ``on_error='skip'`` has kept.

    Raises
    ------
    RuntimeError
        Called outside an indexer's ``__getitem__``.

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
            "cseq.parts() belongs to the batch of a sequence: call it in __getitem__ of its indexer"
        )
    sizes: NDArray[np.int64] = divided.copy()
    ends = sizes.cumsum()
    assert batch_context is not None
    for position, _, _ in batch_context.left:
        sizes[np.searchsorted(ends, position, side="right")] -= 1
    return sizes


def empty(shape: int | Sequence[int], dtype: DTypeLike = float) -> NDArray[Any]:
    """Create an uninitialised array in the current batch's shared memory.

    A batch built in this array (``np.take(…, out=)``, ``np.stack(…, out=)``) is not copied on the
    way to the training loop. If the indexer keeps the array, the batch is copied. Outside a worker
    process, this function is equivalent to `numpy.empty`. In a worker thread, large arrays created
    by either function reuse memory that earlier arrays have freed.

    Parameters
    ----------
    shape : int or sequence of int
    dtype : data type, optional
        The type must not contain Python objects.

    Returns
    -------
    numpy.ndarray
        A C-contiguous and writable array.

    Raises
    ------
    TypeError, ValueError
        In a worker process, the shape is negative or not integral, or the type contains objects.
    MemoryError
        There is not enough memory for the array.

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
        None outside an indexer.

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
