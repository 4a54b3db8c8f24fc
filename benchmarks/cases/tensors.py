"""Tensors from float32 arrays: the cost of the conversion."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Floats, Images, Rate, Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NULL, CPU, CALL = "cseq, out_type='null'", "cseq, out_type='cpu'", "torch.from_numpy"

SMALL_BATCHES = scaled(50_000, 40)
SMALL = Work(partial(Floats, SMALL_BATCHES * 32), SMALL_BATCHES, microseconds)
LARGE = Work(partial(Images, "float32"), scaled(250, 12), Rate(4 * 32 * 3 * 224 * 224))


def from_numpy() -> Iterator[Callable[[], float]]:
    """Time torch.from_numpy alone, on a new array each time."""
    import torch

    arrays = [np.zeros(32, np.float32) for _ in range(1000)]
    repetitions = scaled(300, 1)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repetitions):
            for array in arrays:
                torch.from_numpy(array)
        return (time.perf_counter() - start) / repetitions / len(arrays) * 1e6

    yield run


def contenders(work: Work) -> tuple[Contender, Contender]:
    """The same batches as arrays and as tensors."""
    return (
        Contender(NULL, partial(loaders.cseq_processes, work), ours=True),
        Contender(
            CPU,
            partial(loaders.cseq_processes, work, out_type="cpu"),
            needs=("torch",),
            ours=True,
        ),
    )


CASES = (
    Case(
        "tensors_small",
        "Small float32 batches as arrays and as tensors",
        "µs/batch",
        (*contenders(SMALL), Contender(CALL, from_numpy, needs=("torch",))),
        goals=(
            Goal("calls of from_numpy more", lambda f: (f[CPU] - f[NULL]) / f[CALL], at_most=2),
        ),
    ),
    Case(
        "tensors_large",
        "19 MB float32 batches as arrays and as tensors",
        "GB/s",
        contenders(LARGE),
        goals=(Goal("share of the rate of arrays", lambda f: f[CPU] / f[NULL], at_least=0.95),),
        more_is_better=True,
    ),
)
