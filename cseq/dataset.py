"""`from_dataset`: a map-style data set as a worker, samples collated to batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq import context
from cseq._core import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["DatasetIndexer", "from_dataset"]

Samples: TypeAlias = "Sequence[Any]"

IN_PLACE = SMALL  # bytes from which a stacked array is made where the batch is going to lie


def from_dataset(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> DatasetIndexer:
    """Make a worker of a map-style data set, which returns one sample for one index.

    ``cseq.MPSequence(cseq.from_dataset(dataset), batch_size=32)`` needs no `dset_size`: the worker
    knows its length. Worker processes get a copy of the data set each, by pickle; threads share
    it, without a lock.

    Parameters
    ----------
    dataset : object
        With ``__len__()`` and ``__getitem__(index)``, where `index` is an int: torch's ``Dataset``,
        Hugging Face's ``datasets.Dataset``, or anything like them. ``__getitems__(indices)``, which
        takes a list of int and returns the list of their samples, is used if there is one. The
        length is asked for here, once.
    collate : callable, optional
        Makes a batch of the list of its samples, in the worker. None: as torch's
        ``default_collate``, but what is no tensor becomes an array. Tensors are stacked, and so
        are arrays and numbers; dicts, lists, tuples and named tuples are collated value by value
        (a tuple becomes a list); strings and bytes stay a list.

    Raises
    ------
    TypeError
        `dataset` lacks one of the methods, or `collate` cannot be called.
    """
    kind = type(dataset)
    if isinstance(dataset, type):
        raise TypeError(f"dataset is the class {dataset.__name__}; give an object of it")
    if not hasattr(kind, "__getitem__") or _is_iterable_style(dataset):
        raise TypeError(
            f"dataset is a {kind.__name__}, which gives no sample for an index; give an object "
            "with __getitem__(index) and __len__()"
        )
    if not hasattr(kind, "__len__"):
        raise TypeError(
            f"dataset is a {kind.__name__}, which has no __len__(); add one that returns the "
            "number of samples"
        )
    if collate is not None and not callable(collate):
        raise TypeError(
            f"collate={collate!r} cannot be called; give a function of a list of samples, or None"
        )
    return DatasetIndexer(dataset, collate)


def _is_iterable_style(dataset: object) -> bool:
    """Return whether it is torch's iterable style, whose ``__getitem__`` only raises."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(dataset, torch.IterableDataset)


class DatasetIndexer:
    """The worker that `from_dataset` makes: ``__getitem__`` takes an array of indices.

    Attributes
    ----------
    dataset : object
    collate : callable
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate = default_collate if collate is None else collate
        self._length = len(dataset)

    def __len__(self) -> int:
        """Samples in the data set when this was made."""
        return self._length

    def __repr__(self) -> str:
        return f"cseq.from_dataset({type(self.dataset).__name__} of {self._length} samples)"

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        """Return the batch of these indices."""
        numbers: list[int] = indices.tolist()
        samples = self._samples(numbers)
        try:
            return self.collate(samples)
        except Exception as error:
            _note(error, f"cseq: collating {len(samples)} samples, of indices {numbers[:16]}")
            raise

    def _samples(self, numbers: list[int]) -> list[Any]:
        """Fetch samples, together where the data set can."""
        dataset = self.dataset
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(numbers))
        samples = []
        for number in numbers:
            try:
                samples.append(dataset[number])
            except Exception as error:
                _note(error, f"cseq: sample {number} of {type(dataset).__name__}")
                raise
        return samples


def _note(error: BaseException, note: str) -> None:
    """Add a note to an exception that names the sample (from Python 3.11 on)."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def default_collate(samples: Samples) -> Any:
    """Make a batch of samples that are all of one structure; see `from_dataset`.

    Raises
    ------
    TypeError
        Samples are of a type that cannot be stacked.
    ValueError
        Samples differ in shape, length or keys.
    """
    first = samples[0]
    if isinstance(first, (str, bytes)):
        return list(samples)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
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
        f"samples contain a {type(first).__name__}, which cannot be collated; give "
        "from_dataset(dataset, collate=...) a function that makes a batch of a list of samples"
    )


def _collate_mappings(samples: Samples) -> Any:
    """Collate the values of each key."""
    first = samples[0]
    if any(sample.keys() != first.keys() for sample in samples):
        raise ValueError(
            f"samples differ in their keys, the first has {list(first)}; give all of them the same "
            "keys, or from_dataset a collate function"
        )
    batch = {key: default_collate([sample[key] for sample in samples]) for key in first}
    return batch if type(first) is dict else _like(first, batch)


def _like(mapping: Any, batch: dict[Any, Any]) -> Any:
    """Make a mapping of the type of a sample, or a dict if its type cannot be made of one."""
    try:
        return type(mapping)(batch)
    except TypeError:
        return batch


def _collate_sequences(samples: Samples) -> Any:
    """Collate element by element."""
    first = samples[0]
    if any(len(sample) != len(first) for sample in samples):
        raise ValueError(
            f"samples differ in length, from {min(map(len, samples))} to {max(map(len, samples))}; "
            "give all of them the same, or from_dataset a collate function"
        )
    batch = [default_collate(parts) for parts in zip(*samples, strict=True)]
    return type(first)(*batch) if hasattr(first, "_fields") else batch


def _stack_arrays(arrays: Samples) -> NDArray[Any]:
    """Stack arrays; in the batch's slot if they are large."""
    first = arrays[0]
    _check_shapes(arrays)
    plain = first.dtype.hasobject is False and all(each.dtype == first.dtype for each in arrays)
    if not plain or first.nbytes * len(arrays) < IN_PLACE:
        return np.stack(arrays)
    out = context.empty((len(arrays), *first.shape), first.dtype)
    return np.stack(arrays, out=out)


def _stack_tensors(torch: Any, tensors: Samples) -> Any:
    """Stack tensors; in the batch's slot if they are large."""
    first = tensors[0]
    _check_shapes(tensors)
    nbytes = first.element_size() * first.numel() * len(tensors)
    if nbytes < IN_PLACE or not all(
        each.dtype == first.dtype
        and each.device.type == "cpu"
        and each.layout == torch.strided
        and not each.requires_grad
        and not each.is_quantized
        for each in tensors
    ):
        return torch.stack(tuple(tensors))
    room = torch.from_numpy(context.empty(nbytes, np.uint8))
    out = room.view(first.dtype).view(len(tensors), *first.shape)
    # As plain tensors: a subclass (torchvision's Image) would make the batch one of its own kind.
    return torch.stack([each.as_subclass(torch.Tensor) for each in tensors], out=out)


def _check_shapes(arrays: Samples) -> None:
    """Refuse arrays or tensors of several shapes."""
    shapes = {tuple(each.shape) for each in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"samples differ in shape: {sorted(shapes)[:4]}; pad or crop them, or give "
            "from_dataset(dataset, collate=...) a function that does"
        )
