"""The cost of an idle loader, while the loop does something else."""

from __future__ import annotations

import os
import time
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import loaders
from harness import usage
from harness.case import Case, Contender, Goal, scaled
from work import Floats, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

SECONDS = scaled(100, 10) / 100
OURS, THREADS = "cseq, processes", "cseq, threads"


def percent_of_a_core(_: Work, loader: Iterable[Any]) -> float:
    """Take one batch, wait until all are ready, then measure the CPU time."""
    batches = iter(loader)
    next(batches)
    time.sleep(SECONDS / 2)
    members = [process.pid for process in usage.tree(os.getpid())]
    before = sum(map(usage.clock, members))
    time.sleep(SECONDS)
    after = sum(map(usage.clock, members))
    del batches
    return (after - before) / SECONDS * 100 if members else nan


WORK = Work(partial(Floats, 32_000), 1000, percent_of_a_core)

CASES = (
    Case(
        "idle",
        "A loop that does not ask for batches",
        "% of a core",
        (
            Contender(OURS, partial(loaders.cseq_processes, WORK), ours=True),
            Contender(THREADS, partial(loaders.cseq_threads, WORK), ours=True),
            Contender("SPDL subprocess", partial(loaders.spdl_process, WORK), needs=("spdl-core",)),
            Contender("Grain mp_prefetch", partial(loaders.grain_processes, WORK), ("grain",)),
            Contender("torch DataLoader", partial(loaders.torch_dataloader, WORK), ("torch",)),
        ),
        goals=(
            Goal("processes: % of a core", lambda f: f[OURS], at_most=1),
            Goal("threads: % of a core", lambda f: f[THREADS], at_most=1),
        ),
    ),
)
