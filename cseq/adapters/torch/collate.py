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

__all__ = ["collating", "stack_in_slots"]

# Bytes from which a copy takes longer than to watch a collate function's calls; and of how many
# batches one is watched if nothing is gained.
WATCHED, EVERY = 1 << 20, 32


def stack_in_slots(*, tensors: bool = True) -> None:
    """Have default_collate stack into the batch's memory; the user's own types stay."""
    entries = names.collate_map
    if tensors and entries.get(torch.Tensor) is names.tensor_entry:
        entries[torch.Tensor] = collate_tensors
    if entries.get(np.ndarray) is names.array_entry:
        entries[np.ndarray] = collate_arrays


def collate_tensors(batch: list[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack tensors, as torch's own function for them does, which raises all exceptions."""
    first = batch[0]
    plain = type(first) is torch.Tensor and is_plain(first)
    if plain and first.nbytes * len(batch) >= IN_PLACE:
        return torch.stack(batch, 0, out=empty_tensor((len(batch), *first.shape), first.dtype))
    # torch's own function takes no quantised ones in a worker.
    if plain or first.is_quantized:
        stacked = torch.stack(batch, 0)
        if stacked.dtype == first.dtype and not stacked.requires_grad:
            return stacked
    return names.tensor_entry(batch, collate_fn_map=collate_fn_map)


def collate_arrays(batch: Sequence[Array], *, collate_fn_map: object = None) -> torch.Tensor:
    """Stack the arrays of a batch that a worker makes; do as torch with all others."""
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


def collating(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a collate function whose large `torch.stack` and `torch.cat` are made in the slot."""
    return function if function in (default_collate, default_convert) else _Collating(function)


class _Collating:
    """A collate function of the user's.

    torch's allocator cannot be replaced as numpy's can, so the function's calls of torch are
    watched, at some microseconds per call: always while that puts tensors of the batch into the
    slot, otherwise now and then.
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
    """Return the shape of these tensors together, if they are large and alike, or None."""
    if type(tensors) not in (list, tuple) or not tensors:
        return None
    if not all(type(tensor) is torch.Tensor and is_plain(tensor) for tensor in tensors):
        return None
    parts: Sequence[torch.Tensor] = tensors
    first = parts[0]
    # Tensors that are joined may differ in their first dimension.
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
