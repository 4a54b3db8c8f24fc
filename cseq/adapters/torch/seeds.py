"""The generators that a data set draws from: Python's, numpy's, torch's, cseq's.

rng="worker" is torch's way: a worker is seeded once, from the seed of the loader and its own
number. rng="batch" seeds before each batch, from the seed of the loader and the batch's number, so
that what is drawn depends neither on the number of workers nor on what they made before.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy.random  # here, and not in every worker that is forked
import torch

from cseq.adapters.torch import names
from cseq.seeding import Seeds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.context import BatchContext

__all__ = ["BatchSeeds", "seed_worker"]


def seed_worker(base_seed: int, number: int) -> int:
    """Seed a worker's generators as torch does; return the worker's seed."""
    seed = base_seed + number
    random.seed(seed)
    with _without_stacks():
        torch.manual_seed(seed)
    numpy.random.seed(names.numpy_seed(base_seed, number))  # noqa: NPY002 - the global one is meant
    return seed


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """Have torch keep no stacks.

    It keeps one with the seed of each device that is not in use yet, with all its source lines,
    which every worker would have to read.
    """
    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit


class Place(NamedTuple):
    """The present batch, for `cseq.rng` and the seeds."""

    epoch: int
    batch: int
    start: int  # the same as `batch`: the loader knows nothing of samples


class BatchSeeds:
    """Seeds the generators for one batch after another.

    Parameters
    ----------
    batch_context : BatchContext
        Of this worker; or one for batches that the trainer makes, to be entered meanwhile.
    """

    def __init__(self, batch_context: BatchContext) -> None:
        self._batch_context = batch_context
        self._seeds: Seeds | None = None

    def begin(self, base_seed: int) -> None:
        """Begin an epoch, whose batches are seeded from this seed; nothing is seeded yet."""
        self._batch_context.seed = base_seed
        self._seeds = Seeds(self._batch_context)

    def seed(self, batch: int) -> int:
        """Seed for a batch; return torch's seed."""
        assert self._seeds is not None
        self._batch_context.set(Place(0, batch, batch))
        self._seeds.seed_present()
        return torch.default_generator.initial_seed()

    def borrow(self, batch: int) -> None:
        """Save the trainer's generators, and seed for a batch."""
        assert self._seeds is not None
        self._batch_context.set(Place(0, batch, batch))
        self._seeds.lend()
        self._seeds.seed_present()

    def restore(self) -> None:
        """Restore the trainer's generators; twice is fine."""
        assert self._seeds is not None
        self._seeds.restore()
