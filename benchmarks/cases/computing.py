"""Slow workers: how well their work overlaps.

The order is not shuffled, so the same batches are slow for all contenders.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Sleepy, Work, milliseconds, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

OURS, THREADS, LIMIT = "cseq, processes", "cseq, threads", "8 bare threads"
OURS_32, OURS_128 = "cseq, buffer=32", "cseq, buffer=128"
BEST_32, BEST_128 = "best possible, 32 in hand", "best possible, 128 in hand"
UNORDERED = "cseq, buffer=32, ordered=False"


def bare_threads(work: Work) -> Iterator[Callable[[], float]]:
    """Measure perfect overlap: threads take whatever is next, and the loop accepts any order."""
    rows = list(shuffled(work, 0))
    indexer = work.indexer()

    def run() -> float:
        left = iter(rows)
        return work.measure(Overlapped(work, lambda: [indexer[row] for row in left]))

    yield run


class Overlapped:
    """An epoch that several threads share."""

    def __init__(self, work: Work, target: Callable[[], object]) -> None:
        self.work = work
        self.target = target

    def __iter__(self) -> Iterator[int]:
        threads = [threading.Thread(target=self.target) for _ in range(self.work.num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return iter(range(self.work.batches))


def computed(work: Work) -> Iterator[Callable[[], float]]:
    """Compute the best possible time in order, with `work.buffer` batches in hand."""
    seconds = work.indexer().seconds
    # When each worker is free again.
    free = [0.0] * work.num_workers
    # When the loop takes each batch.
    taken: list[float] = []
    for number, needed in enumerate(seconds):
        room = taken[number - work.buffer] if number >= work.buffer else 0.0
        done = max(heapq.heappop(free), room) + needed
        heapq.heappush(free, done)
        taken.append(max(done, taken[-1] if taken else 0.0))
    yield lambda: taken[-1] / len(taken) * 1e3


def peers(work: Work) -> tuple[Contender, ...]:
    """The contenders other than cseq."""
    return (
        Contender("SPDL threads", partial(loaders.spdl_threads, work), needs=("spdl-core",)),
        Contender("Grain mp_prefetch", partial(loaders.grain_processes, work), needs=("grain",)),
        Contender("torch DataLoader", partial(loaders.torch_dataloader, work), needs=("torch",)),
        Contender(LIMIT, partial(bare_threads, work)),
    )


def share(name: str) -> Callable[[Mapping[str, float]], float]:
    """Return a function for the share of perfect overlap that a contender reaches."""
    return lambda figures: figures[LIMIT] / figures[name]


BATCHES = scaled(1200, 24)
EVEN = Work(
    partial(Sleepy, BATCHES, 0.0),
    BATCHES,
    milliseconds,
    num_workers=8,
    buffer=16,
    shuffle=False,
)
UNEVEN = replace(EVEN, indexer=partial(Sleepy, BATCHES, 0.05), buffer=32)
WIDE = replace(UNEVEN, buffer=128)

CASES = (
    Case(
        "computing",
        "8 workers, 5 ms a batch",
        "ms/batch",
        (
            Contender(OURS, partial(loaders.cseq_processes, EVEN), ours=True),
            Contender(THREADS, partial(loaders.cseq_threads, EVEN), ours=True),
            *peers(EVEN),
        ),
        limit=LIMIT,
        goals=(
            Goal("processes: share of perfect overlap", share(OURS), at_least=0.98),
            Goal("threads: share of perfect overlap", share(THREADS), at_least=0.98),
        ),
    ),
    Case(
        "computing_uneven",
        "8 workers, 5 ms a batch, but 100 ms for one in 20",
        "ms/batch",
        (
            Contender(OURS_32, partial(loaders.cseq_processes, UNEVEN), ours=True),
            Contender(BEST_32, partial(computed, UNEVEN)),
            Contender(OURS_128, partial(loaders.cseq_processes, WIDE), ours=True),
            Contender(BEST_128, partial(computed, WIDE)),
            Contender(UNORDERED, partial(loaders.cseq_processes, UNEVEN, ordered=False), ours=True),
            *peers(UNEVEN),
        ),
        limit=LIMIT,
        goals=(
            Goal("in order, buffer=32: share of perfect overlap", share(OURS_32), at_least=0.9),
            Goal(
                "in order, buffer=32: share of the best possible",
                lambda f: f[BEST_32] / f[OURS_32],
                at_least=0.95,
            ),
            Goal("in order, buffer=128: share of perfect overlap", share(OURS_128), at_least=0.9),
        ),
    ),
)
