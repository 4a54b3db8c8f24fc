"""Argument checks."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "ELSEWHERE",
    "MOST_WORKERS",
    "OF_DATASET",
    "choice",
    "dimensions",
    "flag",
    "integer",
    "integers",
    "one_dimensional",
    "seconds",
    "unexpected",
]

T = TypeVar("T")

# Runner numbers, which also cover converters, must fit in 16 bits.
MOST_WORKERS = 2**15 - 1

# Tables store each value in 4 bytes.
MOST_VALUES = 2**32

# Hints for keywords from other libraries, mostly torch's DataLoader.
ELSEWHERE = {
    "batch_sampler": "pass batch_size, shuffle, drop_last and shard; to choose the samples, pass "
    "an array of their indices as dset_size",
    "collate_fn": "collate in the worker's __getitem__(indices), which receives the indices of a "
    "whole batch and returns the batch",
    "device": "use out_type='cuda', 'cuda:1' or 'cpu'",
    "dataset": "pass worker=, a class whose objects have __getitem__(indices) -> batch, and "
    "dset_size=, the number of samples",
    "generator": "pass seed=generator.initial_seed()",
    "in_order": "use ordered=",
    "multiprocessing_context": "use start_method='forkserver', 'spawn' or 'fork'",
    "persistent_workers": "omit it; workers always run from start() to finish()",
    "pin_memory": "omit it; with out_type='cuda', batches arrive on the device",
    "pin_memory_device": "omit it; with out_type='cuda:1', batches arrive on that device",
    "prefetch_factor": "use buffer=, the number of batches in progress or ready, over all workers",
    "sampler": "pass shuffle, shard and seed; to choose the samples, pass an array of their "
    "indices as dset_size",
    "thread_type": "the class sets it; to choose it, use MSequence",
    "worker_init_fn": "pass a class as worker=; its __init__ runs once in every worker",
    "workers": "use num_workers=",
}

# Hints if `worker` is a dataset: pass the collate function to `from_dataset` instead.
OF_DATASET = ELSEWHERE | {
    "collate": "pass cseq.from_dataset(dataset, collate=...) as `worker`",
    "collate_fn": "pass cseq.from_dataset(dataset, collate=...) as `worker`",
}


def unexpected(
    caller: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> TypeError:
    """Return the error for an unknown keyword, with a hint from `elsewhere`."""
    instead = elsewhere.get(name)
    if instead is None:
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        instead = f"did you mean {near[0]!r}?" if near else f"the arguments are {', '.join(known)}"
    return TypeError(f"{caller}() got an unexpected keyword argument {name!r}: {instead}")


def integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an int in [least, most]. Accept NumPy integers, but not bools."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not an integer; pass an integer of at least {least}"
        ) from None
    if number < least:
        raise ValueError(f"{name}={number} is below {least}; pass an integer of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} is above {most}; pass an integer of at most {most}")
    return number


def one_dimensional(name: str, given: Any, most: int = MOST_VALUES) -> NDArray[Any]:
    """Return an argument as a one-dimensional array with at least one value."""
    try:
        values = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is not an array: {error}") from error
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}; pass a list with one value per sample")
    if not len(values):
        raise ValueError(f"{name} is empty; pass at least one value, or omit an empty source")
    if len(values) > most:
        raise ValueError(f"{name} has {len(values)} values; pass at most {most}")
    return values


def integers(
    name: str,
    given: Any,
    remedy: str = "pass non-negative integers",
    most: int = MOST_VALUES,
) -> NDArray[np.integer[Any]]:
    """Return an argument as an integer array. Existing arrays are not copied."""
    values = one_dimensional(name, given, most)
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"{name} has values of type {values.dtype}, such as {values[0]!r}; {remedy}"
        )
    return values.view(np.ndarray)


def flag(name: str, value: object) -> bool:
    """Check that a value is a bool, and return it."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is neither True nor False")
    return bool(value)


def choice(name: str, value: T, options: Sequence[object]) -> T:
    """Check that a value is one of the options, and return it."""
    if value not in options:
        listed = ", ".join(map(repr, options))
        raise ValueError(f"{name}={value!r} is unknown; pass one of {listed}")
    return value


def seconds(name: str, value: object) -> float | None:
    """Check that a value is a positive number of seconds or None, and return it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"{name}={value!r} is not a number of seconds; pass a number above 0, or None"
        )
    if not value > 0 or math.isinf(value):
        raise ValueError(
            f"{name}={value!r} is not a positive, finite number of seconds; pass None for no limit"
        )
    return float(value)


def dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple. As in NumPy, an integer means one dimension."""
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
    dims = tuple(map(operator.index, sizes))
    if min(dims, default=0) < 0:
        raise ValueError(f"shape={shape!r} has a negative dimension; pass non-negative integers")
    return dims
