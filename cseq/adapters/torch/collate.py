"""Collates tensors and arrays where the batch is going to lie.

In a worker, torch's default_collate stacks tensors into a new file of shared memory for each. Here
it stacks them into the batch's slot, which is there already. Its map of functions by type is
changed for that, so a collate function that calls default_collate gains by it as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cseq import context
from cseq.adapters.torch import names

__all__ = ["stack_in_slots"]

IN_PLACE = 16384  # bytes from which it is worth while: a smaller batch is copied in one go


def stack_in_slots() -> None:
    """Have default_collate stack into the slot from now on; types of the user's own stay."""
    entries = names.collate_map
    if entries.get(torch.Tensor) is names.tensor_entry:
        entries[torch.Tensor] = collate_tensors
    if entries.get(np.ndarray) is names.array_entry:
        entries[np.ndarray] = collate_arrays


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack tensors, as torch's own function for them does: that raises what is to be raised."""
    first = batch[0]
    if type(first) is torch.Tensor and first.layout is torch.strided and first.device.type == "cpu":
        nbytes = first.element_size() * first.numel() * len(batch)
        if nbytes >= IN_PLACE and not first.is_quantized:
            room = torch.from_numpy(context.empty(nbytes, np.uint8))
            out = room.view(first.dtype).view(len(batch), *first.shape)
            return torch.stack(batch, 0, out=out)
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
