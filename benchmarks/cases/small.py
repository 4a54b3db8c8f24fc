"""Small batches of 32 floats: the overhead of a loader per batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Floats, FloatsBesideTorch, Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = scaled(100_000, 40)
WORK = Work(partial(Floats, BATCHES * 32), BATCHES, microseconds)

LIMIT = "bare loop"
# With torch imported, three global generators are seeded for each batch.
IMPORTED = ", torch imported"
TWO, ONE, TEST = "cseq, 2 workers", "cseq, 1 worker", "cseq, start_test()"
UNSEEDED = ", seed_globals=False"
TORCH, SPDL, GRAIN = "torch DataLoader", "SPDL subprocess, 1 worker", "Grain mp_prefetch"
QUEUE = "queue.Queue"


def imported(work: Work) -> Work:
    """Return the same work with an indexer that imports torch."""
    return replace(work, indexer=partial(FloatsBesideTorch, work.samples))


def ours(
    name: str, loader: Callable[..., Any], work: Work, **options: Any
) -> tuple[Contender, ...]:
    """Return a cseq loader twice: with torch imported, as most users have it, and bare."""
    return (
        Contender(
            name + IMPORTED, partial(loader, imported(work), **options), needs=("torch",), ours=True
        ),
        Contender(name, partial(loader, work, **options), ours=True),
    )


def processes(name: str, title: str, work: Work, goals: tuple[Goal, ...] = ()) -> Case:
    """Declare the case in which processes make small batches."""
    return Case(
        name,
        title,
        "µs/batch",
        (
            *ours(TWO, loaders.cseq_processes, work),
            *ours(ONE, loaders.cseq_processes, work, num_workers=1),
            Contender(SPDL, partial(loaders.spdl_process, work.part(20)), needs=("spdl-core",)),
            Contender(GRAIN, partial(loaders.grain_processes, work.part(50)), needs=("grain",)),
            Contender(TORCH, partial(loaders.torch_dataloader, work.part(100)), needs=("torch",)),
            Contender(LIMIT, partial(loaders.bare, work)),
        ),
        limit=LIMIT,
        goals=goals,
    )


CASES = (
    processes(
        "small_processes",
        "Small batches from processes",
        WORK,
        (
            Goal("2 workers: part of the DataLoader's time", lambda f: f[TWO] / f[TORCH], 1 / 150),
            Goal("1 worker: part of SPDL's time", lambda f: f[ONE] / f[SPDL], 1 / 25),
            Goal("1 worker, torch imported: µs more", lambda f: f[ONE + IMPORTED] - f[ONE], 9),
        ),
    ),
    processes(
        "small_processes_touched",
        "Small batches from processes, touched",
        replace(WORK, touch=True),
    ),
    Case(
        "small_threads",
        "Small batches from threads",
        "µs/batch",
        (
            Contender(TWO, partial(loaders.cseq_threads, WORK), ours=True),
            Contender(ONE, partial(loaders.cseq_threads, WORK, num_workers=1), ours=True),
            Contender(QUEUE, partial(loaders.plain_queue, WORK.part(5))),
            Contender(
                "SPDL threads", partial(loaders.spdl_threads, WORK.part(100)), needs=("spdl-core",)
            ),
            Contender(LIMIT, partial(loaders.bare, WORK)),
        ),
        limit=LIMIT,
        goals=(Goal("part of the plain queue's time", lambda f: f[TWO] / f[QUEUE], 1 / 2),),
    ),
    Case(
        "large_buffer",
        "Small batches from processes, much ahead",
        "µs/batch",
        tuple(
            Contender(
                f"cseq, buffer={buffer}",
                partial(loaders.cseq_processes, WORK, buffer=buffer, memory_limit="2 GiB"),
                ours=True,
            )
            for buffer in (10, 4096, 16384)
        ),
    ),
    Case(
        "test_mode",
        "Small batches in test mode",
        "µs/batch",
        (
            *ours(TEST, loaders.cseq_test_mode, WORK),
            Contender(
                TEST + UNSEEDED,
                partial(loaders.cseq_test_mode, WORK, seed_globals=False),
                ours=True,
            ),
            Contender(LIMIT, partial(loaders.bare, WORK)),
        ),
        limit=LIMIT,
        goals=(Goal("times the bare loop", lambda f: f[TEST + UNSEEDED] / f[LIMIT], 3),),
    ),
)
