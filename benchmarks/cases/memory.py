"""The memory of an epoch's order, and of its copies in workers."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import loaders
from harness import usage
from harness.case import Case, Contender, Goal, scaled
from work import Echo, Rarely, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = scaled(100_000, 1000)
LITTLE = 20 * BATCH
OURS = "cseq, 10^8 samples"


def bytes_late_in_the_epoch(work: Work, loader: Iterable[Any]) -> float:
    """Return the memory of all processes at 80 % of an epoch, before all batches are requested."""
    found = 0.0
    for number, _batch in enumerate(loader):
        if number == work.batches * 8 // 10:
            found = usage.memory_bytes(os.getpid())
    return found


def megabytes_late_in_the_epoch(work: Work, loader: Iterable[Any]) -> float:
    """Return the same in MB."""
    return bytes_late_in_the_epoch(work, loader) / 1e6


RARELY = Work(Rarely, 4000, megabytes_late_in_the_epoch, shuffle=False)


def grown(
    loader: Callable[[Work], Iterator[Callable[[], float]]], samples: int
) -> Iterator[Callable[[], float]]:
    """Measure the bytes per sample that a large epoch takes in addition to a small one."""

    def weighed(samples: int) -> float:
        work = Work(Echo, samples // BATCH, bytes_late_in_the_epoch, batch_size=BATCH)
        rounds = loader(work)
        found = next(rounds)()
        next(rounds, None)
        return found

    def run() -> float:
        # The small epoch runs first, because the second one inherits what the first leaves behind.
        little = weighed(LITTLE)
        return (weighed(samples) - little) / (samples - LITTLE)

    yield run


CASES = (
    Case(
        "index_memory",
        "Memory for the order of an epoch, all processes together",
        "bytes/sample",
        (
            Contender(
                OURS,
                partial(grown, loaders.cseq_processes, scaled(10**8, 10**6)),
                ours=True,
            ),
            Contender(
                "torch DataLoader, 10^7 samples",
                partial(grown, loaders.torch_dataloader, scaled(10**7, 10**6)),
                needs=("torch",),
            ),
        ),
        goals=(Goal("bytes a sample", lambda f: f[OURS], at_most=4.2),),
        fresh=True,
    ),
    Case(
        "rare_memory",
        f"Memory of all processes, after one batch took {Rarely.SIZE} MB for a moment",
        "MB",
        (
            Contender("cseq", partial(loaders.cseq_processes, RARELY), ours=True),
            Contender(
                "torch DataLoader", partial(loaders.torch_dataloader, RARELY), needs=("torch",)
            ),
        ),
        goals=(Goal("what stays of it", lambda f: f["cseq"] / Rarely.SIZE, at_most=0.5),),
        fresh=True,
    ),
)
