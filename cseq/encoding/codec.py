"""Write batches of any shape to slots and read them back.

There are two tiers. Arrays, CPU tensors and long bytes in tuples, lists, string-keyed dicts and
named tuples are written and read in C using a `Plan`. Everything else is pickled: numbers, strings,
and objects of any class, including dataclasses. The data of arrays and tensors in these objects is
stored in the slot, not in the pickle.

    slot    ┌────────────────────────┬─────────────────────┬───────────┬────────┬─────────┐
            │ arrays, 64-byte aligned│ buffers of pickles  │ structure │ layout │ objects │
            └────────────────────────┴─────────────────────┴───────────┴────────┴─────────┘
                                                           ▲ offset    └── lengths ───────┘  Record

The *structure* is a pickle of the containers, types and memory orders. It is written and parsed
only when it changes. The *layout* contains integers: the offset, size in bytes and shape of each
array. The *objects* are the other leaves, stored as one pickle and a table of its buffers. The slot
contains all parts of a batch, so each batch can be read on its own.

Both sides represent a structure as a `Plan`. If a batch matches none of the writer's recent plans,
`survey` makes a new plan. Everything else is C code.

The guarantee: a batch is read with the same types and bits as it was written, and is writable.
Arrays and tensors without gaps keep their axis order (C, Fortran, channels_last, …). Others
(expanded, reversed, with gaps) are written row by row. An array that occurs twice in a plan arrives
as two arrays, and the same holds for containers of arrays. Objects keep their identity. A tensor
arrives without its graph, and as a leaf that requires gradients if the original required them.

The trainer copies leaves of up to 64 KiB (`COPIED`), including those in objects, and all `bytes`.
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
# A batch's location in its slot: the structure's offset, and the lengths of the structure, layout
# and objects. A cell stores these four words; their sum is the end of the batch.
Record: TypeAlias = tuple[int, int, int, int]

__all__ = ["Record", "decode", "encode_pickled", "map_leaves", "recast"]


def map_leaves(function: Callable[[Any], object], batch: object, depth: int = MAX_DEPTH) -> object:
    """Apply a function to every leaf, but not to tuples, lists, dicts, named tuples or dataclasses.

    Returns
    -------
    object
        The same containers with the results, or the same object if no leaf changed.

    Raises
    ------
    ValueError
        The batch contains itself.
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
        # The class is not called, because `__post_init__` has already run.
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
    """Copy and cast an array, using the strides that it would have in a slot.

    `make` creates an array with a given shape and type.
    """
    axes = axes_of(array)
    made: Array = make(tuple(array.shape[axis] for axis in axes), dtype)
    made = made.transpose(sorted(range(array.ndim), key=axes.__getitem__))
    np.copyto(made, array, casting="unsafe")
    return made


ONE_OBJECT = Plan(pickle.dumps((OBJECT,), protocol=5), (OBJECT,))


def encode_pickled(pickled: Pickled, encoder: Encoder) -> Record:
    """Write a pickled object to a slot; `decode` returns the object."""
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in pickled.buffers]
    return encoder.encode_parts(ONE_OBJECT, buffers, pickled.data)
