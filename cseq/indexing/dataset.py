"""`from_dataset`: turns a map-style data set into a worker that collates samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._memory import SMALL
from cseq.encoding import failure
from cseq.encoding.pickling import import_torch
from cseq.indexing import context
from cseq.indexing.leaving import Leaving, none_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, dtype

    from cseq.indexing.context import BatchContext

__all__ = [
    "IN_PLACE",
    "DatasetIndexer",
    "LeavingIndexer",
    "empty_tensor",
    "from_dataset",
    "is_plain",
    "is_torchs",
    "refuse_class",
    "refuse_iterable",
    "unasked",
]

Samples: TypeAlias = "Sequence[Any]"

# Minimum size (in bytes) of stacks built in the slot, and of arrays copied there when fetched.
IN_PLACE = SMALL
LARGE = 65536


def from_dataset(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> DatasetIndexer:
    """Create a worker from a map-style data set.

    The worker has a length, so `dset_size` is not needed. Each worker process receives a pickled
    copy of the data set. Worker threads share the data set without a lock.

    Parameters
    ----------
    dataset : object
        An object with ``__len__()`` and ``__getitem__(index)``, such as a torch ``Dataset`` or a
        Hugging Face ``datasets.Dataset``. If it also has ``__getitems__(indices)``, a method that
        returns a list of samples, that method is used instead. The length is read only once.
    collate : callable, optional
        A function that makes a batch from a list of samples. By default, samples are collated as in
        torch's ``default_collate``, but arrays and numbers become arrays, not tensors. Tensors,
        arrays and numbers are stacked. Dicts, lists, tuples and named tuples are collated value by
        value (a tuple becomes a list). Strings and bytes are returned as a list.

    Returns
    -------
    DatasetIndexer
        A worker for `MSequence`, with the length of the data set.

    Raises
    ------
    TypeError
        If `dataset` lacks one of the methods, or if `collate` is not callable.

    Examples
    --------
    >>> samples = [(np.full(2, number), number) for number in range(4)]
    >>> manager = cseq.MPSequence(cseq.from_dataset(samples), batch_size=2, shuffle=False,
    ...                           out_type="null")
    >>> with manager.start() as batches:
    ...     for arrays, numbers in batches:
    ...         print(arrays.tolist(), numbers)
    [[0, 0], [1, 1]] [0 1]
    [[2, 2], [3, 3]] [2 3]
    """
    kind = type(dataset)
    refuse_class(dataset)
    refuse_iterable(dataset, "dataset is")
    if not hasattr(kind, "__getitem__"):
        raise TypeError(
            f"dataset is a {kind.__name__}, which has no __getitem__; pass an object with "
            "__getitem__(index) and __len__()"
        )
    if not hasattr(kind, "__len__"):
        raise TypeError(
            f"dataset is a {kind.__name__}, which has no __len__(); add one that returns the "
            "number of samples"
        )
    if collate is not None and not callable(collate):
        raise TypeError(
            f"collate={collate!r} is not callable; pass a function that accepts a list of samples, "
            "or None"
        )
    return DatasetIndexer(dataset, collate)


def refuse_class(dataset: object) -> None:
    """Raise TypeError if the data set is a class without a length."""
    if isinstance(dataset, type) and not hasattr(type(dataset), "__len__"):
        name = dataset.__name__
        raise TypeError(f"dataset is the class {name}; pass an object, such as {name}()")


def is_torchs(candidate: object, kind: str = "Dataset") -> bool:
    """Return True for a torch data set, or its class."""
    torch = sys.modules.get("torch.utils.data")
    cls = candidate if isinstance(candidate, type) else type(candidate)
    return torch is not None and issubclass(cls, getattr(torch, kind))


def unasked(dataset: Any) -> DatasetIndexer:
    """Apply `from_dataset` to a torch data set that was passed as a worker."""
    made = from_dataset(dataset)
    made.is_unasked = True
    return made


def refuse_iterable(dataset: object, subject: str) -> None:
    """Reject torch's iterable-style data sets and their classes."""
    if is_torchs(dataset, "IterableDataset"):
        kind = dataset if isinstance(dataset, type) else type(dataset)
        raise TypeError(
            f"{subject} a {kind.__name__}, an IterableDataset, which cannot be indexed; use "
            "cseq.DataLoader instead, or pass an object with __getitem__ and __len__()"
        )


class DatasetIndexer:
    """The worker that `from_dataset` creates.

    `is_unasked` is True if a torch data set, which may expect index arrays, was passed as a worker.
    """

    is_unasked = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate = default_collate if collate is None else collate
        self._length = len(dataset)

    def __len__(self) -> int:
        """Return the length that the data set had when this worker was created."""
        return self._length

    def close(self) -> None:
        """Close the data set if it has a ``close`` method."""
        close = getattr(self.dataset, "close", None)
        if callable(close):
            close()

    def __repr__(self) -> str:
        return f"cseq.from_dataset({type(self.dataset).__name__} of {self._length} samples)"

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        """Return the batch for an array of indices."""
        is_plain = self.collate is default_collate
        return self.make_batch(indices, Leaving(self.dataset, skips=False, refuses_none=is_plain))

    def make_batch(self, indices: NDArray[np.int64], leaving: Leaving) -> Any:
        """Return the batch for an array of indices, fetching the samples with `leaving`."""
        numbers: list[int] = indices.tolist()
        fetched = leaving.fetch(numbers)
        if self.collate is default_collate and not hasattr(self.dataset, "__getitems__"):
            samples = _with_rows(fetched, len(numbers))
        else:
            samples = list(fetched)
        try:
            batch = self.collate(samples)
            if batch is None:
                raise TypeError(f"{self.collate!r} returned None; is a `return` missing?")
        except Exception as error:
            for index, sample in zip(numbers, samples, strict=False):
                if sample is None and not leaving.left:
                    failure.annotate(error, f"cseq: {none_text(index, self.dataset)}")
            failure.annotate(
                error,
                f"cseq: while collating {len(samples)} samples with indices "
                f"{failure.listed(numbers)}",
            )
            raise
        return batch


class LeavingIndexer(DatasetIndexer):
    """A `DatasetIndexer` that leaves out samples that fail."""

    def __init__(self, indexer: DatasetIndexer, batch_context: BatchContext) -> None:
        super().__init__(indexer.dataset, indexer.collate)
        is_plain = self.collate is default_collate
        self._leaving = Leaving(self.dataset, skips=True, refuses_none=is_plain)
        batch_context.left = self._leaving.left

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        """Return the batch, or a `Partial` if samples were left out."""
        return self._leaving.whole(self.make_batch(indices, self._leaving))


def default_collate(samples: Samples) -> Any:
    """Make a batch from samples that have the same structure; see `from_dataset`.

    Raises
    ------
    TypeError
        If the samples have a type that cannot be stacked.
    ValueError
        If the samples have different shapes, lengths or keys.
    """
    first = samples[0]
    if isinstance(first, (str, bytes)):
        return list(samples)
    if isinstance(first, _Row):
        return _stack_rows(samples)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        if first.layout != torch.strided:
            raise TypeError(
                f"samples contain a {first.layout} tensor, which cannot be collated; use "
                "from_dataset(dataset, collate=...) with a function that makes a batch from a list "
                "of samples"
            )
        return _stack_tensors(torch, samples)
    if isinstance(first, np.ndarray):
        return _stack_arrays(samples)
    if isinstance(first, (int, float, complex, np.generic)):
        return np.asarray(samples)
    if isinstance(first, Mapping):
        return _collate_mappings(samples)
    if isinstance(first, (tuple, list)):
        return _collate_sequences(samples)
    raise TypeError(
        f"samples contain a {type(first).__name__}, which cannot be collated; use "
        "from_dataset(dataset, collate=...) with a function that makes a batch from a list of "
        "samples"
    )


def _collate_mappings(samples: Samples) -> Any:
    first = samples[0]
    if any(sample.keys() != first.keys() for sample in samples):
        raise ValueError(
            f"samples differ in their keys (the first has {list(first)}); give all samples the "
            "same keys, or use from_dataset(dataset, collate=...)"
        )
    batch = {key: default_collate([sample[key] for sample in samples]) for key in first}
    return batch if type(first) is dict else _like(first, batch)


def _like(mapping: Any, batch: dict[Any, Any]) -> Any:
    """Convert the batch to the same type as the mapping, if possible."""
    try:
        return type(mapping)(batch)
    except TypeError:
        return batch


def _collate_sequences(samples: Samples) -> Any:
    first = samples[0]
    if any(len(sample) != len(first) for sample in samples):
        raise ValueError(
            f"samples differ in length, from {min(map(len, samples))} to {max(map(len, samples))}; "
            "make all samples the same length, or use from_dataset(dataset, collate=...)"
        )
    batch = [default_collate(parts) for parts in zip(*samples, strict=True)]
    return type(first)(*batch) if hasattr(first, "_fields") else batch


def _stack_arrays(arrays: Samples) -> NDArray[Any]:
    """Stack arrays, in the batch's slot if they are large."""
    first = arrays[0]
    _check_shapes(arrays)
    plain = first.dtype.hasobject is False and all(array.dtype == first.dtype for array in arrays)
    if not plain or first.nbytes * len(arrays) < IN_PLACE:
        return np.stack(arrays)
    return np.stack(arrays, out=context.empty((len(arrays), *first.shape), first.dtype))


def _stack_tensors(torch: Any, tensors: Sequence[Tensor]) -> object:
    first = tensors[0]
    _check_shapes(tensors)
    if first.nbytes * len(tensors) < IN_PLACE or not all(
        tensor.dtype == first.dtype and is_plain(tensor) for tensor in tensors
    ):
        return torch.stack(tuple(tensors))
    # Otherwise, `torch.stack` would return the samples' subclass, such as torchvision's Image.
    return torch.stack(
        [tensor.as_subclass(torch.Tensor) for tensor in tensors],
        out=empty_tensor((len(tensors), *first.shape), first.dtype),
    )


def is_plain(tensor: Tensor) -> bool:
    """Return True for an ordinary dense CPU tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is sys.modules["torch"].strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


def empty_tensor(shape: tuple[int, ...], dtype: dtype) -> Tensor:
    """Create a tensor in the slot."""
    nbytes = math.prod(shape) * dtype.itemsize
    flat: Tensor = import_torch().from_numpy(context.empty(nbytes, np.uint8))
    return flat.view(dtype).view(shape)


class _Stack:
    """An array in the batch that is filled row by row."""

    def __init__(self, first: Any, count: int) -> None:
        self._kind = type(first)
        self._shape, self._dtype = first.shape, first.dtype
        self._torch = torch = None if isinstance(first, np.ndarray) else sys.modules["torch"]
        empty = context.empty if torch is None else empty_tensor
        self.whole = empty((count, *first.shape), first.dtype)

    def put(self, array: Any, number: int) -> Any:
        """Copy an array into a row and return the row. If it does not fit, return it unchanged."""
        if type(array) is not self._kind or (array.shape, array.dtype) != (
            self._shape,
            self._dtype,
        ):
            return array
        torch = self._torch
        if torch is None:
            self.whole[number] = array
        elif is_plain(array):
            self.whole[number].copy_(array.as_subclass(torch.Tensor))
        else:
            return array
        return _Row(self, number)


class _Row(NamedTuple):
    """A row of a stack, standing in for an array in a sample."""

    stack: _Stack
    number: int


def _with_rows(fetched: Iterator[Any], count: int) -> list[Any]:
    """Fetch samples, and replace large arrays with rows."""
    samples: list[Any] = []
    stacks: dict[tuple[Any, ...], _Stack] = {}
    for sample in fetched:
        number = len(samples)
        samples.append(_rows(sample, (), number, stacks, count) if stacks or not number else sample)
        del sample
    return samples


def _rows(
    part: Any,
    path: tuple[Any, ...],
    number: int,
    stacks: dict[tuple[Any, ...], _Stack],
    count: int,
) -> Any:
    """Copy a sample's large arrays into stacks, which are created for the first sample."""
    kind = type(part)
    if kind is dict:
        return {key: _rows(sub, (*path, key), number, stacks, count) for key, sub in part.items()}
    if kind in (tuple, list):
        return kind([_rows(sub, (*path, k), number, stacks, count) for k, sub in enumerate(part)])
    if not number and _is_large(part):
        stacks[path] = _Stack(part, count)
    stack = stacks.get(path)
    return part if stack is None else stack.put(part, number)


def _is_large(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.nbytes >= LARGE and not part.dtype.hasobject
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(part, torch.Tensor)
    return is_tensor and is_plain(part) and part.nbytes >= LARGE


def _stack_rows(parts: Samples) -> Any:
    """Return the stack that these rows belong to, or stack the parts if some are not rows.

    If samples were left out, there are fewer parts than rows.
    """
    stack = parts[0].stack
    if all(isinstance(part, _Row) for part in parts):
        return stack.whole if len(parts) == len(stack.whole) else stack.whole[: len(parts)]
    arrays = [part.stack.whole[part.number] if isinstance(part, _Row) else part for part in parts]
    return default_collate(arrays)


def _check_shapes(arrays: Samples) -> None:
    shapes = {tuple(array.shape) for array in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"samples differ in shape: {sorted(shapes)[:4]}; pad or crop them in the data set or "
            "in from_dataset(dataset, collate=...)"
        )
