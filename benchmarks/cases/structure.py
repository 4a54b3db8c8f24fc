"""A batch of many parts: one large array and 112 small ones, as detection models take them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Structured, Work, microseconds

OURS, LIMIT, TORCH = "cseq, 2 workers", "bare loop", "torch DataLoader"


def case(name: str, title: str, work: Work) -> Case:
    """Declare the case."""
    return Case(
        name,
        title,
        "µs/batch",
        (
            Contender(OURS, partial(loaders.cseq_processes, work), ours=True),
            Contender(
                "SPDL subprocess, segment pool",
                partial(loaders.spdl_process, work.part(4), segment_bytes=Structured.NBYTES),
                needs=("spdl-core",),
            ),
            Contender(
                "Grain mp_prefetch",
                partial(loaders.grain_processes, work.part(10)),
                needs=("grain",),
            ),
            Contender(TORCH, partial(loaders.torch_dataloader, work.part(20)), needs=("torch",)),
            Contender(LIMIT, partial(loaders.bare, work)),
        ),
        limit=LIMIT,
        goals=(Goal("times as fast as the DataLoader", lambda f: f[TORCH] / f[OURS], None, 20),),
    )


WORK = Work(Structured, scaled(1000, 12), microseconds)

CASES = (
    case("dict_113", "A dict of a 4.8 MB array and 112 small ones", WORK),
    case(
        "dict_113_touched",
        "A dict of a 4.8 MB array and 112 small ones, touched",
        replace(WORK, touch=True),
    ),
)
