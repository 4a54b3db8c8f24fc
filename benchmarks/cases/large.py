"""Large batches by fancy indexing: the data rate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Images, ImagesInPlace, Rate, Work

# The size of a uint8 batch in bytes.
BATCH_BYTES = 32 * 3 * 224 * 224

FRESH, PLACED = "cseq, fresh array", "cseq, cseq.empty"
LIMIT, LIMIT_PLACED = "bare loop, fresh array", "bare loop, np.take(out=)"
TORCH, GRAIN = "torch DataLoader", "Grain mp_prefetch"
SPDL, SPDL_QUEUE = "SPDL subprocess, segment pool", "SPDL subprocess"


def case(name: str, title: str, dtype: str, nbytes: int, batches: int, *, touch: bool) -> Case:
    """Declare a case for batches of one dtype."""
    fresh = Work(partial(Images, dtype), batches, Rate(nbytes), touch=touch)
    placed = replace(fresh, indexer=partial(ImagesInPlace, dtype))
    return Case(
        name,
        title,
        "GB/s",
        (
            Contender(FRESH, partial(loaders.cseq_processes, fresh), ours=True),
            Contender(PLACED, partial(loaders.cseq_processes, placed), ours=True),
            Contender(
                SPDL,
                partial(loaders.spdl_process, fresh.part(2), segment_bytes=nbytes),
                needs=("spdl-core",),
            ),
            Contender(
                SPDL_QUEUE, partial(loaders.spdl_process, fresh.part(5)), needs=("spdl-core",)
            ),
            Contender(GRAIN, partial(loaders.grain_processes, fresh.part(4)), needs=("grain",)),
            Contender(TORCH, partial(loaders.torch_dataloader, fresh.part(5)), needs=("torch",)),
            Contender(LIMIT, partial(loaders.bare, fresh)),
            Contender(LIMIT_PLACED, partial(loaders.bare, placed)),
        ),
        limit=LIMIT,
        goals=(
            Goal("fresh array: share of the bare loop", lambda f: f[FRESH] / f[LIMIT], None, 0.55),
            Goal(
                "cseq.empty: share of the bare loop with np.take(out=)",
                lambda f: f[PLACED] / f[LIMIT_PLACED],
                None,
                0.85,
            ),
        ),
        more_is_better=True,
    )


UINT8 = ("uint8", BATCH_BYTES, scaled(1000, 12))
FLOAT32 = ("float32", 4 * BATCH_BYTES, scaled(250, 12))

CASES = (
    case("large_uint8", "4.8 MB batches from processes", *UINT8, touch=False),
    case("large_uint8_touched", "4.8 MB batches from processes, touched", *UINT8, touch=True),
    case("large_float32", "19 MB batches from processes", *FLOAT32, touch=False),
    case("large_float32_touched", "19 MB batches from processes, touched", *FLOAT32, touch=True),
)
