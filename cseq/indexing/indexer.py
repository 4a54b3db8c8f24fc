"""Stage 1: the user's worker turns indices into batches.

The user's *worker* is an *indexer*, or a class or other callable that creates one. The indexer's
``__getitem__`` turns an array of indices into a batch.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from cseq._work import BatchMaker
from cseq.encoding import failure
from cseq.indexing.dataset import (
    DatasetIndexer,
    LeavingIndexer,
    is_torchs,
    refuse_iterable,
    unasked,
)
from cseq.indexing.seeding import Seeds
from cseq.processes.launcher.base import end_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cseq._core import Ring
    from cseq._work import BatchWriter, Runner
    from cseq.converter.output import Output
    from cseq.indexing.context import BatchContext

__all__ = [
    "BatchTask",
    "FirstBatch",
    "Indexer",
    "Indexing",
    "advised",
    "build",
    "build_seeded",
    "check_worker",
    "dispose",
    "leaving",
    "length_of",
    "takes_samples",
]

log = logging.getLogger("cseq")

# Types with a __getitem__ that does not accept an array of indices.
PLAIN_CONTAINERS = (list, tuple, dict, str, bytes, bytearray, range, memoryview)
DATASET_HINT = (
    "__getitem__ of a worker gets an array of indices; to use a data set that accepts one index "
    "at a time, pass cseq.from_dataset(dataset)"
)
INDEXER_HINT = (
    "cseq passes one index at a time to a worker that derives from torch's Dataset; to get the "
    "indices of a whole batch, write a class that does not derive from Dataset"
)


B_co = TypeVar("B_co", covariant=True)


class Indexer(Protocol[B_co]):
    """Makes batches of type `B`. Any object whose ``__getitem__`` does this is an indexer."""

    def __getitem__(self, indices: NDArray[np.int64], /) -> B_co:
        """Return the batch for `indices`, a one-dimensional array that may be changed or kept."""


def is_indexer(worker: object) -> bool:
    """Return True for an indexer, and False for a class or function that creates one."""
    return not inspect.isclass(worker) and hasattr(type(worker), "__getitem__")


def check_worker(worker: object) -> None:
    """Raise TypeError if the worker cannot be called or indexed."""
    if isinstance(worker, PLAIN_CONTAINERS):
        raise TypeError(
            f"worker is a {type(worker).__name__}, which cannot be indexed with an array "
            "of indices; pass numpy.asarray(worker) or cseq.from_dataset(worker), or a class whose "
            "__getitem__ takes the array"
        )
    _refuse_table(worker, "worker is")
    refuse_iterable(worker, "worker is")
    if is_indexer(worker):
        return
    if not callable(worker):
        raise TypeError(
            f"worker={worker!r} can neither be called nor indexed; pass a class (or another "
            "callable without arguments) that makes an object with __getitem__(indices)"
        )
    _refuse_arguments(worker)


def _refuse_arguments(worker: Callable[[], object]) -> None:
    """Reject a callable with required arguments."""
    try:
        inspect.signature(worker).bind()
    except TypeError as error:
        raise TypeError(
            f"worker={worker!r} cannot be called without arguments ({error}); pass a class or "
            "object with __getitem__(indices) -> batch; if a class needs arguments, supply "
            "them with functools.partial(…)"
        ) from None
    except ValueError:
        pass


def takes_samples(worker: object) -> bool:
    """Return True for a data set whose samples cseq collates."""
    return isinstance(worker, DatasetIndexer) or is_torchs(worker)


def _refuse_table(worker: object, subject: str) -> None:
    """Reject pandas and polars tables."""
    kind = type(worker)
    library = kind.__module__.partition(".")[0]
    rows = {"pandas": ".iloc[indices]", "polars": "[indices]"}.get(library)
    if rows is not None and kind.__name__ in ("DataFrame", "Series"):
        raise TypeError(
            f"{subject} a {library} {kind.__name__}, which does not return arrays of rows when "
            f"indexed; pass its .to_numpy(), or a class whose __getitem__(indices) returns arrays "
            f"made from its {rows}"
        )


def length_of(worker: object) -> int | None:
    """Return the length of an indexer, or None if it has no length."""
    if is_indexer(worker) and hasattr(type(worker), "__len__"):
        return len(worker)  # type: ignore[arg-type]
    return None


def is_likely_dataset(indexer: object) -> bool:
    """Return True if the object may be a map-style data set."""
    kind = type(indexer)
    return hasattr(kind, "__len__") and not hasattr(kind, "__array__")


def advised(indexer: object, error: BaseException) -> BaseException:
    """Add a hint to an exception if the indexer may be a data set.

    `isinstance` is avoided, because it could run code in the user's exception class.
    """
    cls = type(error)
    if isinstance(indexer, DatasetIndexer):
        # A ValueError from a `raise` statement needs no hint.
        is_own = issubclass(cls, ValueError) and failure.is_stated(error)
        is_sign = issubclass(cls, (TypeError, ValueError, AttributeError)) and not is_own
        if indexer.is_unasked and is_sign:
            failure.annotate(error, f"cseq: {INDEXER_HINT}")
    # Using an array as a number raises TypeError, or ValueError in code like ``if index > 3:``.
    elif is_likely_dataset(indexer) and (
        issubclass(cls, TypeError)
        or (issubclass(cls, ValueError) and "ambiguous" in failure.str_of(error))
    ):
        failure.annotate(error, f"cseq: {DATASET_HINT}")
    return error


def build(worker: Any) -> Indexer[Any]:
    """Create the indexer of a runner.

    Raises
    ------
    TypeError
        If the created object has no ``__getitem__``.
    """
    indexer: Indexer[Any] = worker if is_indexer(worker) else worker()
    if is_torchs(indexer):
        refuse_iterable(indexer, f"worker {worker!r} made")
        return unasked(indexer)
    if is_indexer(worker):
        return indexer
    if not hasattr(type(indexer), "__getitem__"):
        raise TypeError(
            f"worker {worker!r} made a {type(indexer).__name__}, which has no __getitem__; "
            "an indexer needs __getitem__(indices) -> batch"
        )
    _refuse_table(indexer, f"worker {worker!r} made")
    return indexer


def build_seeded(worker: object, seeds: Seeds | None, *, copied: bool) -> Indexer[Any]:
    """Seed generators and create an indexer. Start over if it imports a module with a generator."""
    if seeds is None:
        return build(worker)
    seeds.seed_present()
    indexer = build(worker)
    if seeds.has_new():
        dispose(worker, indexer, copied=copied)
        seeds.seed_present()
        indexer = build(worker)
    return indexer


def leaving(indexer: Indexer[Any], batch_context: BatchContext, on_error: str) -> Indexer[Any]:
    """If requested and possible, make the indexer leave out samples that fail."""
    if on_error == "skip" and isinstance(indexer, DatasetIndexer):
        return LeavingIndexer(indexer, batch_context)
    return indexer


def dispose(worker: object, indexer: Indexer[Any] | None, *, copied: bool) -> None:
    """Call the indexer's ``close()``, if any, when its runner exits.

    The user's own object is closed only if it is a copy in a worker process. Exceptions are raised
    in worker processes, but only logged in the trainer.
    """
    close = getattr(indexer, "close", None)
    if close is None or not callable(close) or (indexer is worker and not copied):
        return
    try:
        close()
    except (Exception, SystemExit) as error:
        if copied or failure.ends_program(error):
            raise
        log.exception("close() of the indexer from worker %r raised an exception", worker)


class FirstBatch:
    """Wraps an indexer for the first batch and warns if labels are cast to floats."""

    def __init__(self, indexing: Indexing, output: Output, tell: Callable[[str], object]) -> None:
        self._indexing = weakref.proxy(indexing)
        assert indexing.indexer is not None
        self._indexer = indexing.indexer
        self._output = output
        self._tell = tell
        indexing.indexer = self

    def __getitem__(self, indices: NDArray[np.int64], /) -> object:
        """Return the batch, and remove this wrapper."""
        from cseq.converter.output import explain_cast

        self._indexing.indexer = self._indexer
        batch = self._indexer[indices]
        note = explain_cast(batch, self._output)
        if note is not None:
            self._tell(note)
        return batch


class Indexing(BatchMaker):
    """Makes and publishes batches. `work` and `make_here` are implemented in C."""

    end_copy: Callable[[BaseException | None], None] = staticmethod(end_copy)

    @staticmethod
    def forgotten(indexer: object) -> TypeError:
        """Return the error for an indexer that returned None."""
        name = type(indexer).__name__
        return TypeError(f"`__getitem__` of {name} returned None; is a `return` missing?")

    def fail(self, runner: Runner, error: BaseException) -> None:
        """Publish an exception for the current ticket."""
        if not runner.ring.published(runner.owner):
            error = advised(self.indexer, error)
        self.batch_writer.fail(runner, error)


class BatchTask(NamedTuple):
    """A worker's task: make batches.

    In a process that converts batches, `stage` is CONVERTER. Numeric arrays are cast to `cast` in
    the slot.
    """

    stage: int
    num_workers: int
    last: bool
    seed: int
    seed_globals: bool
    on_error: str
    cast: np.dtype[Any] | None
    output: Output

    def make(
        self, read: Callable[[], object], batch_context: BatchContext, *, copied: bool
    ) -> tuple[Any, Indexer[Any]]:
        """Return the user's worker and the indexer made from it."""
        if self.seed_globals:
            batch_context.seeds = Seeds(batch_context)
            batch_context.seeds.seed_present()
        worker = read()
        return worker, build_seeded(worker, batch_context.seeds, copied=copied)

    def work(
        self,
        indexer: Indexer[Any],
        ring: Ring,  # noqa: ARG002 - for items
        batch_context: BatchContext,
        writer: BatchWriter,
        tell: Callable[[str], object],
        convert: Callable[[Any], object] | None,
    ) -> Indexing:
        """Return the object that processes tickets."""
        batch_context.allocator = writer.room
        writer.cast_to(self.cast)
        indexer = leaving(indexer, batch_context, self.on_error)
        indexing = Indexing(writer, indexer, batch_context, convert, batch_context.seeds)
        FirstBatch(indexing, self.output, tell)
        return indexing
