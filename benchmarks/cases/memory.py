"""What the order of an epoch costs in memory."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import loaders
from harness import usage
from harness.case import Case, Contender, Goal, scaled
from work import Echo, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH = scaled(100_000, 1000)
OURS = "cseq, 10^8 samples"


def bytes_a_sample(work: Work, loader: Iterable[Any]) -> float:
    """Growth of all processes' memory, from before an epoch to 99 % of it."""
    before = usage.memory_bytes(os.getpid())
    after = before
    for number, _batch in enumerate(loader):
        if number == work.batches * 99 // 100:
            after = usage.memory_bytes(os.getpid())
    return (after - before) / work.samples


def of_size(samples: int) -> Work:
    """Return a work of so many samples without data."""
    return Work(Echo, samples // BATCH, bytes_a_sample, batch_size=BATCH)


CASES = (
    Case(
        "index_memory",
        "Memory for the order of an epoch, all processes together",
        "bytes/sample",
        (
            Contender(
                OURS,
                partial(loaders.cseq_processes, of_size(scaled(10**8, 10**6))),
                ours=True,
            ),
            Contender(
                "torch DataLoader, 10^7 samples",
                partial(loaders.torch_dataloader, of_size(scaled(10**7, 10**6))),
                needs=("torch",),
            ),
        ),
        goals=(Goal("bytes a sample", lambda f: f[OURS], at_most=4.2),),
        fresh=True,
    ),
)
