"""Collates tensors and arrays where the batch is going to lie.

In a worker, torch's default_collate stacks tensors into a new file of shared memory for each. Here
it stacks them into the batch's slot, which is there already. Its map of functions by type is
changed for that, so a collate function that calls default_collate gains by it as well. One that
calls `torch.stack` or `torch.cat` gains by `collating`.
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

__all__ = ["collating", "stack_in_slots", "stack_in_threads"]

WATCHED = 1 << 20  # bytes from which a copy takes longer than to watch a collate function's calls
EVERY = 32  # batches: of so many, one is watched if nothing is gained


def stack_in_slots() -> None:
    """Have default_collate stack into the slot; the user's own types stay."""
    entries = names.collate_map
    if entries.get(torch.Tensor) is names.tensor_entry:
        entries[torch.Tensor] = collate_tensors
    if entries.get(np.ndarray) is names.array_entry:
        entries[np.ndarray] = collate_arrays


def stack_in_threads() -> None:
    """Have default_collate stack arrays into memory that is used again, in threads of a loader."""
    if names.collate_map.get(np.ndarray) is names.array_entry:
        names.collate_map[np.ndarray] = _collate_in_threads


def _collate_in_threads(batch: Sequence[Array], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack arrays, where a thread makes a batch; do as torch elsewhere."""
    is_ours = context.here.batch_context is not None
    collate = collate_arrays if is_ours else names.array_entry
    return collate(batch, collate_fn_map=collate_fn_map)


def collate_tensors(batch: list[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack tensors, as torch's own function for them does: that raises what is to be raised."""
    first = batch[0]
    plain = type(first) is torch.Tensor and is_plain(first)
    if plain and first.nbytes * len(batch) >= IN_PLACE:
        return torch.stack(batch, 0, out=empty_tensor((len(batch), *first.shape), first.dtype))
    if plain or first.is_quantized:  # torch's own function takes no quantised ones in a worker
        stacked = torch.stack(batch, 0)
        if stacked.dtype == first.dtype and not stacked.requires_grad:
            return stacked
    return names.tensor_entry(batch, collate_fn_map=collate_fn_map)


def collate_arrays(batch: Sequence[Array], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack arrays to a tensor, as torch's own function for them does, array by array."""
    first = batch[0]
    dtype, shape = first.dtype, first.shape
    if dtype.kind not in "biufc" or not all(
        type(each) in (np.ndarray, np.memmap)
        and each.dtype == dtype
        and each.shape == shape
        and dtype.isnative
        for each in batch
    ):
        return names.array_entry(batch, collate_fn_map=collate_fn_map)
    dims = (len(batch), *shape)
    is_large = first.nbytes * len(batch) >= IN_PLACE
    out = context.empty(dims, dtype) if is_large else np.empty(dims, dtype)
    np.stack(batch, out=out)
    return torch.from_numpy(out)


def collating(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a collate function whose large `torch.stack` and `torch.cat` are made in the slot."""
    return function if function in (default_collate, default_convert) else _Collating(function)


class _Collating:
    """A collate function of the user's.

    torch's allocator cannot be replaced as numpy's can, so its calls of torch are watched, which
    takes some microseconds for each: while a tensor of the batch is in the slot for that, and once
    in a while.
    """

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function
        self._batches = 0
        self._gains = False

    def __call__(self, samples: object) -> object:
        """Return the batch."""
        self._batches += 1
        if not self._gains and self._batches % EVERY != 1:
            return self._function(samples)
        watch = _Watch()
        with watch:
            batch = self._function(samples)
        self._gains = any(tensor() is not None for tensor in watch.made)
        return batch


class _Watch(TorchFunctionMode):
    """Has `stack` and `cat` of large tensors, along their first dimension, write into the slot."""

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
    """Return the shape of these tensors together, if they are large and alike; else None."""
    if type(tensors) not in (list, tuple) or not tensors:
        return None
    if not all(type(tensor) is torch.Tensor and is_plain(tensor) for tensor in tensors):
        return None
    parts: Sequence[torch.Tensor] = tensors
    first = parts[0]
    joined = 0 if stacked else 1  # dimensions that may differ
    shape = first.shape[joined:]
    for tensor in parts:
        if (
            tensor.dtype != first.dtype
            or tensor.dim() != first.dim()
            or tensor.dim() < joined
            or tensor.shape[joined:] != shape
            or not tensor.is_contiguous()
        ):
            return None
    if sum(tensor.nbytes for tensor in parts) < WATCHED:
        return None
    return (len(parts) if stacked else sum(map(len, parts)), *shape)
