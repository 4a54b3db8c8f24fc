"""Collates tensors and arrays into a batch's slot.

In a worker, torch's default_collate allocates a new shared-memory file for each stacked tensor.
This module patches its type-to-function map to stack into the slot. `collating` does the
same for custom functions that call `torch.stack` or `torch.cat`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate, default_convert

from cseq.adapters.torch import names
from cseq.indexing import context
from cseq.indexing.dataset import IN_PLACE, empty_tensor, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cseq.converter import Array

__all__ = ["collating", "stack_in_slots"]

# Above WATCHED bytes, copying costs more than intercepting torch's functions. Unless the last
# interception saved a copy, only one batch in EVERY is intercepted.
WATCHED, EVERY = 1 << 20, 32


def stack_in_slots(*, tensors: bool = True) -> None:
    """Make default_collate stack into the slot, except for types with a user-defined function."""
    entries = names.collate_map
    if tensors and entries.get(torch.Tensor) is names.tensor_entry:
        entries[torch.Tensor] = collate_tensors
    if entries.get(np.ndarray) is names.array_entry:
        entries[np.ndarray] = collate_arrays


def collate_tensors(batch: list[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack ordinary tensors; otherwise, call torch's collate function."""
    first = batch[0]
    plain = is_plain(first) and _becomes_tensor(first)
    if plain and first.nbytes * len(batch) >= IN_PLACE:
        return torch.stack(batch, 0, out=empty_tensor((len(batch), *first.shape), first.dtype))
    # torch's default collate function rejects quantized tensors in workers.
    if plain or first.is_quantized:
        stacked = torch.stack(batch, 0)
        if stacked.dtype == first.dtype and not stacked.requires_grad:
            return stacked
    return names.tensor_entry(batch, collate_fn_map=collate_fn_map)


def collate_arrays(batch: Sequence[Array], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack arrays that share a dtype and shape; otherwise, call torch's collate function."""
    first = batch[0]
    dtype, shape = first.dtype, first.shape
    is_ours = context.here.batch_context is not None and dtype.kind in "biufc" and dtype.isnative
    if not is_ours or not all(
        type(array) in (np.ndarray, np.memmap) and array.dtype == dtype and array.shape == shape
        for array in batch
    ):
        return names.array_entry(batch, collate_fn_map=collate_fn_map)
    dims = (len(batch), *shape)
    is_large = first.nbytes * len(batch) >= IN_PLACE
    out = context.empty(dims, dtype) if is_large else np.empty(dims, dtype)
    np.stack(batch, out=out)
    return torch.from_numpy(out)


def _becomes_tensor(tensor: torch.Tensor) -> bool:
    """Return True if stacking tensors of this type results in a plain `torch.Tensor`.

    The result has the type that `new` returns. Among others, torchvision's images are stacked to a
    plain tensor.
    """
    return type(tensor) is torch.Tensor or type(tensor.new()) is torch.Tensor


def collating(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wrap a collate function so that `torch.stack` and `torch.cat` write to the slot."""
    return function if function in (default_collate, default_convert) else _Collating(function)


class _Collating:
    """A wrapper that intercepts a collate function's calls to torch.

    torch's allocator cannot be replaced. Interception costs a few microseconds per call, so while
    no tensors end up in the slot, only one batch in `EVERY` is intercepted.
    """

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function
        self._batches = 0
        self._gains = False

    def __call__(self, samples: object) -> object:
        self._batches += 1
        if not self._gains and self._batches % EVERY != 1:
            return self._function(samples)
        watch = _Watch()
        with watch:
            batch = self._function(samples)
        self._gains = any(tensor() is not None for tensor in watch.made)
        return batch


class _Watch(TorchFunctionMode):
    """Makes large `stack` and `cat` calls along dimension 0 write to the slot."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(
        self, function: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is not torch.stack and function is not torch.cat:
            return function(*args, **kwargs)
        options = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        tensors: Any = options.get("tensors")
        shape = None
        if options.keys() <= {"tensors", "dim"} and options.get("dim", 0) == 0:
            shape = _shape_of(tensors, stacked=function is torch.stack)
        if shape is None:
            return function(*args, **kwargs)
        out = empty_tensor(shape, tensors[0].dtype)
        self.made.append(weakref.ref(out))
        return function(tensors, 0, out=out)


def _shape_of(tensors: Any, *, stacked: bool) -> tuple[int, ...] | None:
    """Return the result's shape, or None if the tensors are incompatible or too small."""
    if type(tensors) not in (list, tuple) or not tensors:
        return None
    if not all(isinstance(tensor, torch.Tensor) and is_plain(tensor) for tensor in tensors):
        return None
    if not all(map(_becomes_tensor, {type(tensor): tensor for tensor in tensors}.values())):
        return None
    parts: Sequence[torch.Tensor] = tensors
    first = parts[0]
    # Concatenated tensors may differ in their first dimension.
    joined = 0 if stacked else 1
    alike = first.dim() >= joined and all(
        (tensor.dtype, tensor.dim()) == (first.dtype, first.dim())
        and tensor.shape[joined:] == first.shape[joined:]
        and tensor.is_contiguous()
        for tensor in parts
    )
    if not alike or sum(tensor.nbytes for tensor in parts) < WATCHED:
        return None
    return (len(parts) if stacked else sum(map(len, parts)), *first.shape[joined:])
