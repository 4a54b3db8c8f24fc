"""Warnings about likely mistakes that torch does not report."""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["look_at"]

log = logging.getLogger("cseq")
# Log each message once.
warn = functools.cache(log.warning)


def look_at(dataset: Any, sampler: object, counts: list[int]) -> None:
    """Check a finished epoch for likely mistakes.

    For an IterableDataset, `counts` lists how many batches each worker made. For other data sets,
    it contains only the total.
    """
    size = getattr(sampler, "batch_size", None)
    drops = bool(getattr(sampler, "drop_last", False))
    name = type(dataset).__name__
    # For cseq orders, a different warning covers this.
    if drops and not any(counts) and not hasattr(sampler, "state_after"):
        warn(
            f"dataset={name} has fewer samples than batch_size={size}, so with drop_last=True an "
            "epoch has no batches; pass a smaller batch_size, or drop_last=False"
        )
    try:
        samples = len(dataset)
    except Exception:  # noqa: BLE001 - a stream's `__len__` may raise anything
        return
    whole = samples // (size or 1) if drops else -(-samples // (size or 1))
    if len(counts) > 1 and whole > 1 and {*counts} == {whole}:
        warn(
            f"each of {len(counts)} workers read all {samples} samples of dataset={name}, so the "
            f"loop received each sample {len(counts)} times; its __iter__ should yield only the "
            "part for worker torch.utils.data.get_worker_info().id"
        )
