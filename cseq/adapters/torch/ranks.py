"""Coordinates loaders across ranks."""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cseq.order.base import Order

__all__ = ["agreed", "divider", "divisions", "number_of", "rank_of"]

log = logging.getLogger("cseq")

# Seconds that a rank waits before it logs a warning.
PATIENCE = 10.0
# The rank and world-size attributes of accelerate's samplers and of DistributedSampler.
NAMES = ("process_index", "num_processes"), ("rank", "num_replicas")
# Maximum nesting depth of samplers.
MOST = 4

# How many orders have been numbered, keyed by name and number of samples.
_made: Counter[tuple[str, int | None]] = Counter()


def number_of(order: Order) -> int:
    """Assign a number to an order. Ranks that create the same orders assign the same numbers."""
    _made[order.name, order.samples] += 1
    return _made[order.name, order.samples]


def group() -> Any:
    """Return `torch.distributed`, or None if there is no process group with several ranks."""
    distributed = torch.distributed
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed if is_there and distributed.get_world_size() > 1 else None


def agreed(seed: int, order: Order, *numbers: int) -> int:
    """Return rank 0's seed for an order, sent through the process group's store.

    Unlike a collective, this sends no tensors, and rank 0 does not wait for other ranks. `numbers`
    identify the request on all ranks. Raises RuntimeError if the group has no store, or if rank 0
    does not set a seed within the timeout.
    """
    distributed = group()
    if distributed is None or not order.is_seeded:
        return seed
    facts, rank = json.dumps(order.facts(), sort_keys=True, default=str), distributed.get_rank()
    key = f"cseq/seed/{zlib.crc32(facts.encode()):08x}/{numbers}"
    remedy = (
        "pass the same seed on all ranks, to a DataLoader as "
        "generator=torch.Generator().manual_seed(seed) and to a BatchSampler as seed="
    )
    store = getattr(distributed.distributed_c10d, "_get_default_store", lambda: None)()
    if store is None:
        raise RuntimeError(
            f"rank {rank} needs rank 0's seed for order={order!r}, but the process group has no "
            f"store through which to send it; {remedy}"
        )
    if rank == 0:
        store.set(key, str(seed))
        return seed
    began, nap, has_warned = time.monotonic(), 0.001, False
    while not store.check([key]):
        waited = time.monotonic() - began
        text = (
            f"rank {rank} needs rank 0's seed for order={order!r}, and has waited {waited:.0f} s "
            "for rank 0 to start its epoch"
        )
        if waited > store.timeout.total_seconds():
            raise RuntimeError(f"{text}; {remedy}")
        if waited > PATIENCE and not has_warned:
            has_warned = True
            log.warning("%s; if rank 0 does not start one, %s", text, remedy)
        time.sleep(nap)
        nap = min(1.0, 2 * nap)
    return int(store.get(key))


def divider(sampler: Any) -> Any:
    """Return accelerate's active batch sampler if it is or wraps `sampler`."""
    state: Any = sys.modules.get("accelerate.state")
    loader = None if state is None else getattr(state.GradientState(), "active_dataloader", None)
    outer = getattr(loader, "batch_sampler", None)
    return outer if sampler in (outer, getattr(outer, "batch_sampler", None)) else None


def divisions(sampler: Any) -> list[tuple[int, int]]:
    """Return (rank, world size) for each sampler that divides data among ranks, outermost first."""
    parts: list[tuple[int, int]] = []
    for _ in range(MOST):
        # A wrapper may forward attributes, so look in `__dict__`. cseq's BatchSampler has `_shard`.
        own = getattr(sampler, "__dict__", {})
        shard: Any = own.get("_shard")
        if getattr(shard, "source", ""):
            parts.append(shard[:2])
        for rank, ranks in NAMES:
            if type(own.get(rank)) is int and type(own.get(ranks)) is int:
                parts.append((own[rank], own[ranks]))
        sampler = own.get("batch_sampler", own.get("sampler"))
    if len(several := [of for _, of in parts if of > 1]) > 1:
        warn_twice(*several)
    return parts


@functools.cache
def warn_twice(*ranks: int) -> None:
    """Warn once that batches are divided among ranks more than once."""
    log.warning(
        "the batches are divided among ranks twice, by %s, so an epoch misses samples; if a "
        "framework divides them (as accelerate's prepare does), omit DistributedSampler, or "
        "BatchSampler's shard=",
        " and by ".join(map(str, ranks)),
    )


def rank_of(parts: list[tuple[int, int]]) -> tuple[int, int]:
    """Return this rank and the world size, counting only ranks that read different batches.

    `parts` is the result of `divisions`. If it is empty, ranks are assumed to read different data,
    unless they seem to share a model.
    """
    rank, ranks = 0, 1
    for one, of in parts:
        rank, ranks = rank * of + one, ranks * of
    if parts or (distributed := group()) is None:
        return rank, ranks
    from cseq.order.shard import model_parallel

    return (0, 1) if model_parallel() else (distributed.get_rank(), distributed.get_world_size())
