"""The shuffle alone, including the allocation of its result."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import cseq
from harness.case import Case, Contender, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMPY, TORCH = "numpy", "torch.randperm"
# The goals for the speed-up, by the exponent of n.
OVER_TORCH = {5: 2.5, 6: 2.0, 7: 3.0, 8: 3.0}


def timed(shuffle: Callable[[int], Any], n: int) -> float:
    """Return the nanoseconds per element. Small permutations are repeated to take long enough."""
    repetitions = max(1, scaled(2 * 10**7, 1) // n)
    start = time.perf_counter_ns()
    for seed in range(repetitions):
        shuffle(seed)
    return (time.perf_counter_ns() - start) / repetitions / n


def ours(n: int) -> Iterator[Callable[[], float]]:
    """cseq.permutation."""
    yield partial(timed, partial(cseq.permutation, n), n)


def with_numpy(n: int) -> Iterator[Callable[[], float]]:
    """Generator.permutation."""
    import numpy as np

    yield partial(timed, lambda seed: np.random.default_rng(seed).permutation(n), n)


def with_torch(n: int) -> Iterator[Callable[[], float]]:
    """torch.randperm, which runs on one thread in any case."""
    import torch

    def shuffle(seed: int) -> Any:
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed))

    yield partial(timed, shuffle, n)


def case(exponent: int) -> Case:
    """Declare the case for 10 ** exponent elements."""
    n = scaled(10**exponent, 1000)
    return Case(
        f"permutation_1e{exponent}",
        f"Permutation of 10^{exponent}",
        "ns/element",
        (
            Contender("cseq.permutation", partial(ours, n), ours=True),
            Contender(NUMPY, partial(with_numpy, n)),
            Contender(TORCH, partial(with_torch, n), needs=("torch",)),
        ),
        goals=(
            Goal("times as fast as numpy", lambda f: f[NUMPY] / f["cseq.permutation"], None, 4),
            Goal(
                "times as fast as torch",
                lambda f: f[TORCH] / f["cseq.permutation"],
                None,
                OVER_TORCH[exponent],
            ),
        ),
    )


CASES = tuple(case(exponent) for exponent in (5, 6, 7, 8))
