"""Collates tensors and arrays where the batch is going to lie.

In a worker, torch's default_collate stacks tensors into a new file of shared memory for each. Here
it stacks them into the batch's slot, which is there already. Its map of functions by type is
changed for that, so a collate function that calls default_collate gains by it as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cseq.adapters.torch import names
from cseq.indexing import context
from cseq.indexing.dataset import IN_PLACE, empty_tensor, is_plain

__all__ = ["stack_in_slots", "stack_in_threads"]


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


def _collate_in_threads(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack arrays, where a thread makes a batch; do as torch elsewhere."""
    is_ours = context.here.batch_context is not None
    collate = collate_arrays if is_ours else names.array_entry
    return collate(batch, collate_fn_map=collate_fn_map)


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
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


def collate_arrays(batch: Any, *, collate_fn_map: Any = None) -> Any:
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
