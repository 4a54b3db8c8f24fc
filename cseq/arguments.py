"""The arguments of MSequence: their types, and the longer ones of their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from cseq.check import count
from cseq.indexing import indexer
from cseq.indexing.dataset import DatasetIndexer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import TypedDict

    from cseq.indexing.indexer import Indexer

    class Options(TypedDict, total=False):
        """The keywords of `MSequence` behind `seed`, for the type checker."""

        dtype: Any
        drop_last: bool
        ordered: bool
        start_method: StartMethod | None
        shard: tuple[int, int] | Literal["auto"] | None
        on_error: OnError
        max_restarts: int
        timeout: float | None
        on_timeout: OnTimeout
        memory_limit: int | str | None
        pad: bool
        threads: int | None
        preload: Sequence[str] | Literal[False] | None
        seed_globals: bool

    class Keywords(Options, total=False):
        """All keywords of `MSequence` but `num_workers`, `out_type` and `thread_type`."""

        num_converters: int | None
        batch_size: int
        buffer: int
        shuffle: bool
        seed: int | None

    # `MSequence` has an overload for each of the two: pyright resolves no type variable in a union.
    Worker: TypeAlias = Callable[[], Indexer[Any]] | Indexer[Any]
    ThreadType: TypeAlias = Literal["proc", "thread"]
    StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]
    OnError: TypeAlias = Literal["raise", "skip"]
    OnTimeout: TypeAlias = Literal["raise", "restart"]
    TestMode: TypeAlias = Literal["default", "cpu", "numpy"]

    class Device(Protocol):
        """A torch.device."""

        type: str
        index: int

    # Any string, since the number of a device is often computed: 'cuda', 'cuda:1', 'cpu', 'null'.
    OutType: TypeAlias = str | Device | Callable[[NDArray[Any]], object] | None

__all__ = ["batch_size_of", "converters_of", "dtype_of", "samples_of"]

MOST_BATCH = 2**32 - 1  # a ticket counts its samples in 32 bits


def batch_size_of(batch_size: Any) -> int:
    """Check `batch_size`."""
    if batch_size is None:
        raise TypeError(
            "batch_size=None is not an integer: the indexer always gets an array of indices; "
            "give 1 for samples one by one"
        )
    return count("batch_size", batch_size, most=MOST_BATCH)


def converters_of(workers: int, converters: int | None) -> int:
    """Check `num_converters`, or choose it; without workers there are none."""
    if converters is None:
        return max(workers // 4, min(workers, 4))
    number = count("num_converters", converters)
    if not workers:
        return 0
    if number > workers:
        raise ValueError(
            f"num_converters={number} exceeds num_workers={workers}; give at most as many, or None"
        )
    return number


def dtype_of(worker: Any, dtype: Any) -> Any:
    """Resolve 'auto': a data set's samples keep their types, as with a DataLoader."""
    if not isinstance(dtype, str) or dtype != "auto":
        return dtype
    return None if isinstance(worker, DatasetIndexer) else "float32"


def samples_of(worker: Any) -> int:
    """Return the number of samples where `dset_size` is left out."""
    length = indexer.length_of(worker)
    if length is None:
        raise TypeError(
            f"dset_size is missing, and worker={worker!r} has no length; give the number of "
            "samples or an array of their indices, or make the worker with "
            "cseq.from_dataset(dataset)"
        )
    return length
