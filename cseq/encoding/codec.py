"""Writes batches of any structure to slots, and reads them back.

Arrays, CPU tensors and long bytes objects are written and read in C with a `Plan`, if they are in
tuples, lists, named tuples or dicts with string keys. Everything else is pickled, with array and
tensor data kept outside the pickle.

    slot    ┌────────────────────────┬─────────────────────┬───────────┬────────┬─────────┐
            │ arrays, 64-byte aligned│ buffers of pickles  │ structure │ layout │ objects │
            └────────────────────────┴─────────────────────┴───────────┴────────┴─────────┘
                                                           ▲ offset    └── lengths ───────┘  Record

The *structure* is a pickle of the containers, types and memory orders, parsed only when it changes.
The *layout* is the offset, size in bytes and shape of each array, as integers. The *objects* are
the other leaves: a pickle and a table of its buffers. Each batch is self-contained.

If a batch does not match a recent `Plan` of the writer, `survey` creates a new one.

Batches keep their types and bits, and are writable when read back. Arrays and tensors without gaps
keep the order of their axes (C, Fortran, channels_last, …). Others are written row by row. An array
or container of arrays that occurs twice comes back as two, but objects keep their identity. A
tensor loses its graph. If it required gradients, it becomes a leaf that requires them.

The trainer copies `bytes` and leaves of up to 64 KiB (`COPIED`), including leaves in objects.
Larger leaves stay in the slot.
"""

from __future__ import annotations

import operator
import pickle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy import ndarray

from cseq._memory import axes_of
from cseq.encoding._codec import decode
from cseq.encoding._plan import MAX_DEPTH, Plan
from cseq.encoding.survey import OBJECT, TooDeepError, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cseq.encoding._codec import Encoder
    from cseq.encoding.pickling import Pickled

Array: TypeAlias = ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]
# The offset of the structure in the slot, and the lengths of the structure, layout and objects.
# These four words are stored in a cell.
Record: TypeAlias = tuple[int, int, int, int]

__all__ = ["Record", "decode", "encode_pickled", "map_leaves", "recast"]


def map_leaves(function: Callable[[Any], object], batch: object, depth: int = MAX_DEPTH) -> object:
    """Apply a function to all leaves in tuples, lists, dicts, named tuples and dataclasses.

    Return the batch itself if no leaf has changed. Raises ValueError if a batch contains itself.
    """
    cls: type = type(batch)
    kind = opened(cls)
    container: Any = batch
    children: Collection[object] = container
    if kind is None or (kind == "named" and getattr(batch, "__dict__", None)):
        return function(batch)
    if kind == "mapping":
        mapping: dict[object, object] = container
        children = mapping.values()
    elif type(kind) is tuple:
        state = {name: getattr(batch, name) for name in kind if hasattr(batch, name)}
        state |= getattr(batch, "__dict__", {})
        children = state.values()
    if not depth:
        raise TooDeepError
    mapped = [map_leaves(function, child, depth - 1) for child in children]
    if all(map(operator.is_, mapped, children)):
        return batch
    if type(kind) is tuple:
        # Do not call `__init__` or `__post_init__` again.
        made: object = object.__new__(cls)
        for name, child in zip(state, mapped, strict=True):
            object.__setattr__(made, name, child)
        return made
    if kind == "mapping":
        copy = mapping.copy()
        copy.update(zip(mapping, mapped, strict=True))
        return copy
    return mapped if cls is list else tuple.__new__(cls, mapped)


def recast(array: Array, dtype: Dtype, make: Callable[..., Array] = np.empty) -> Array:
    """Return a copy of an array, cast to `dtype`, with the strides that it would have in a slot."""
    axes = axes_of(array)
    made: Array = make(tuple(array.shape[axis] for axis in axes), dtype)
    made = made.transpose(sorted(range(array.ndim), key=axes.__getitem__))
    np.copyto(made, array, casting="unsafe")
    return made


ONE_OBJECT = Plan(pickle.dumps((OBJECT,), protocol=5), (OBJECT,))


def encode_pickled(pickled: Pickled, encoder: Encoder) -> Record:
    """Write a pickled object to a slot, for `decode` to read."""
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in pickled.buffers]
    return encoder.encode_parts(ONE_OBJECT, buffers, pickled.data)
