"""What is most likely wrong with an epoch: log lines where torch is silent."""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["look_at"]

log = logging.getLogger("cseq")
warn = functools.cache(log.warning)  # once for each text


def look_at(dataset: Any, sampler: object, counts: list[int]) -> None:
    """Look at an epoch that is over.

    Parameters
    ----------
    dataset : object
    sampler : object
        What its keys come from.
    counts : list of int
        How many batches each worker made, of an IterableDataset; of another one, all.
    """
    size = getattr(sampler, "batch_size", None)
    drops = bool(getattr(sampler, "drop_last", False))
    name = type(dataset).__name__
    if drops and not any(counts) and not hasattr(sampler, "state_after"):  # an order has said so
        warn(
            f"an epoch of dataset={name} has no batch: with drop_last=True, there are fewer "
            f"samples than batch_size={size}; give a smaller batch_size, or drop_last=False"
        )
    if len(counts) > 1 and (whole := batches_of(dataset, size or 1, drops=drops)) > 1:
        if any(count != whole for count in counts):
            return
        warn(
            f"each of {len(counts)} workers has read all {len(dataset)} samples of dataset={name}, "
            f"so the loop got each of them {len(counts)} times; have its __iter__ take one part "
            "for each torch.utils.data.get_worker_info().id"
        )


def batches_of(dataset: Any, size: int, *, drops: bool) -> int:
    """Return how many batches the samples of a data set are; 0: it does not know its length."""
    try:
        samples = len(dataset)
    except Exception:  # noqa: BLE001 - of any type: many streams have a length that raises
        return 0
    return samples // size if drops else -(-samples // size)
