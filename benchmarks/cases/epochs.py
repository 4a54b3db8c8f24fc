"""Epochs: the pause between two epochs, and the time to the first batch."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
import loaders
from cseq.order.sampler import Sampler
from harness.case import Case, Contender, Goal, scaled
from work import Echo, Floats, Images, Sleepy, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# -- the pause between two epochs


def pause(work: Work, loader: Iterable[Any]) -> float:
    """Return the median time from an epoch's last batch to the next one's first, in batch times."""
    pauses, times = [], []
    last = 0.0
    for _epoch in range(work.epochs):
        arrivals = [time.perf_counter() for _batch in loader]
        if last:
            pauses.append(arrivals[0] - last)
        last = arrivals[-1]
        times.append((last - arrivals[0]) / (len(arrivals) - 1))
    return float(np.median(pauses) / np.median(times))


def boundary(name: str, title: str, work: Work, *, goal: bool = True) -> Case:
    """Declare a case that measures the pause."""
    ours, threads = "cseq, processes", "cseq, threads"
    fewer = replace(work, epochs=max(2, work.epochs // 4))
    return Case(
        name,
        title,
        "batch times",
        (
            Contender(ours, partial(loaders.cseq_processes, work), ours=True),
            Contender(threads, partial(loaders.cseq_threads, work), ours=True),
            Contender(
                "SPDL subprocess", partial(loaders.spdl_process, fewer), needs=("spdl-core",)
            ),
            Contender(
                "torch DataLoader",
                partial(loaders.torch_dataloader, fewer),
                needs=("torch",),
            ),
        ),
        goals=(
            Goal("processes: batch times", lambda f: f[ours], at_most=2),
            Goal("threads: batch times", lambda f: f[threads], at_most=2),
        )
        if goal
        else (),
    )


# -- the time to the first batch


def first_batch(loader: Iterable[Any], repetitions: int) -> float:
    """Return the median time from `iter` to a started loader's first batch, in microseconds."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        batches = iter(loader)
        next(batches)
        times.append(time.perf_counter() - start)
        del batches
    return float(np.median(times) * 1e6)


def firsts(_: Work, loader: Iterable[Any]) -> float:
    """Measure the first batch of several epochs."""
    return first_batch(loader, scaled(20, 2))


def of_size(samples: int) -> Work:
    """Return a `Work` of `samples` samples whose batches cost nothing."""
    return Work(Echo, samples // 32, firsts)


SIZES = {"10^4": 10**4, "10^6": 10**6, "10^9": 10**9}
BY_SIZE = {f"cseq, {name} samples": of_size(size) for name, size in SIZES.items()}

FIRST_BATCH = Case(
    "first_batch",
    "From iter() to the first batch, by the number of samples",
    "µs",
    (
        *(
            Contender(name, partial(loaders.cseq_processes, work), ours=True)
            for name, work in BY_SIZE.items()
        ),
        *(
            Contender(
                f"torch DataLoader, {name} samples",
                partial(loaders.torch_dataloader, of_size(SIZES[name])),
                needs=("torch",),
            )
            for name in ("10^4", "10^6")
        ),
    ),
    goals=(
        Goal(
            "slowest over fastest of cseq's",
            lambda f: max(f[name] for name in BY_SIZE) / min(f[name] for name in BY_SIZE),
            at_most=1.2,
        ),
    ),
)

# -- resuming at 99 % of an epoch

SAMPLES = scaled(10**8, 10**6)
PLACE = SAMPLES // 100 * 99
RESUME, START, SHUFFLE = "cseq, at 99 %", "cseq, at 0 %", "the shuffle alone, to 99 %"


def resume(place: int) -> Iterator[Callable[[], float]]:
    """Load a state, then get the first batch."""
    work = of_size(SAMPLES)
    with loaders.cseq_manager(cseq.MPSequence, work).start() as manager:
        state = manager.state_dict() | {"consumed": place}

        def run() -> float:
            manager.load_state_dict(state)
            return first_batch(manager, 1) / 1e3

        yield run


def shuffle() -> Iterator[Callable[[], float]]:
    """Find the indices of one batch in the middle, without a loader."""

    def run() -> float:
        start = time.perf_counter()
        order = cseq.Shuffled(algorithm="fisher-yates-v1")
        sampler = Sampler(SAMPLES, order, batch_size=32, seed=1, drop_last=False)
        sampler.source(0, PLACE).samples(0)
        return (time.perf_counter() - start) * 1e3

    yield run


RESUMING = Case(
    "resume",
    "Going on at 99 % of 10^8 samples",
    "ms",
    (
        Contender(RESUME, partial(resume, PLACE), ours=True),
        Contender(START, partial(resume, 0), ours=True),
        Contender(SHUFFLE, shuffle),
    ),
    limit=SHUFFLE,
    goals=(
        Goal(
            "times the shuffle and an epoch's start",
            lambda f: f[RESUME] / (f[SHUFFLE] + f[START]),
            at_most=1.2,
        ),
    ),
    # In a second round, the order would already exist.
    fresh=True,
)

EPOCHS = scaled(20, 3)

CASES = (
    boundary(
        "epoch_boundary",
        "The pause between two epochs of 4.8 MB batches",
        Work(partial(Images, "uint8"), 60, pause, epochs=EPOCHS),
    ),
    boundary(
        "epoch_boundary_slow",
        "The pause between two epochs of batches that take 5 ms in a worker",
        Work(partial(Sleepy, 20, 0.0), 20, pause, epochs=EPOCHS),
    ),
    boundary(
        "epoch_boundary_small",
        "The pause between two epochs of small batches",
        Work(partial(Floats, 32_000), 1000, pause, epochs=EPOCHS),
        goal=False,
    ),
    FIRST_BATCH,
    RESUMING,
)
