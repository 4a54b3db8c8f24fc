"""Stage 1, indices → batch, by the user's worker.

A *worker* is what the user hands in: a class or another callable without arguments that makes an
indexer, or something that already has ``__getitem__``. An *indexer* is what takes an array of
indices and returns a batch.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cseq._core import Seat
    from cseq.context import Desk
    from cseq.edge import Inlet

__all__ = ["Indexer", "Indexing", "build", "check_worker", "dispose"]

log = logging.getLogger("cseq")

# They have __getitem__, but do not take an array of indices.
PLAIN_CONTAINERS = (list, tuple, dict, str, bytes, bytearray, range, memoryview)


B_co = TypeVar("B_co", covariant=True)


class Indexer(Protocol[B_co]):
    """What makes batches of the type `B`: any object with this method."""

    def __getitem__(self, indices: NDArray[np.int64], /) -> B_co:
        """Return the batch of these indices (one-dimensional, the indexer's own to change)."""


def is_indexer(worker: object) -> bool:
    """Tell an object that indexes itself from a class or factory that makes one."""
    return not inspect.isclass(worker) and hasattr(type(worker), "__getitem__")


def check_worker(worker: object) -> None:
    """Refuse what can be neither called nor indexed by an array."""
    if isinstance(worker, PLAIN_CONTAINERS):
        raise TypeError(
            f"worker is a {type(worker).__name__}, which cannot be indexed by an array of "
            "indices; give numpy.asarray(...) of it, or a class whose __getitem__ takes the array"
        )
    if not is_indexer(worker) and not callable(worker):
        raise TypeError(
            f"worker={worker!r} can neither be called nor indexed; give a class (or another "
            "callable without arguments) that makes an object with __getitem__(indices)"
        )


def build(worker: Any) -> Indexer[Any]:
    """Make the indexer of one runner.

    Raises
    ------
    TypeError
        What the worker made has no ``__getitem__``.
    """
    if is_indexer(worker):
        indexer: Indexer[Any] = worker
        return indexer
    indexer = worker()
    if not hasattr(type(indexer), "__getitem__"):
        raise TypeError(
            f"worker {worker!r} made a {type(indexer).__name__}, which has no __getitem__; "
            "an indexer needs __getitem__(indices) -> batch"
        )
    return indexer


def dispose(worker: object, indexer: Indexer[Any] | None, *, copied: bool) -> None:
    """Call the indexer's ``close()`` when its runner ends, if it has one and it is ours to close.

    An object that the user handed in whole stays open, unless this process has its own copy.
    What `close` raises ends a worker process, which the trainer hears of; in the trainer itself it
    goes to the log, since the other indexers are to be closed as well.
    """
    close = getattr(indexer, "close", None)
    if close is None or not callable(close) or (indexer is worker and not copied):
        return
    try:
        close()
    except Exception:
        if copied:
            raise
        log.exception("close() of an indexer raised; it was made by %r", worker)


class Indexing:
    """The first stage's work: the batch of a ticket's indices, put on the next edge."""

    def __init__(
        self,
        indexer: Indexer[Any],
        desk: Desk,
        inlet: Inlet,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._indexer = indexer
        self._desk = desk
        self._inlet = inlet
        self._convert = convert

    def __call__(self, seat: Seat) -> None:
        """Make the batch of the ticket in hand; whatever the indexer raises goes the same way."""
        inlet, desk = self._inlet, self._desk
        try:
            if desk.drawn is not None or desk.ticket is not seat:
                desk.sit(seat)
            inlet.begin(seat)
            batch = self._indexer[seat.indices()]
            if self._convert is not None:
                batch = self._convert(batch)
            if inlet.give(seat, batch):
                return
            record = inlet.write(seat, batch)
            del batch  # publish looks whether the indexer kept what lies in the slot
            inlet.publish(seat, record)
        except BaseException as error:  # noqa: BLE001 - SystemExit, too, is the user's to see
            inlet.fail(seat, error)
