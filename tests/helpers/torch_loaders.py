"""Loaders of torch and of cseq, side by side."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from killing import kill  # noqa: E402
from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Plain,
    Sharded,
    drawn,
    same,
    seed_all,
)

import cseq.testing  # noqa: E402

QUICK = QUICKEST.start_method
FORK: Any = {"num_workers": 2, "multiprocessing_context": QUICK}

forked = pytest.mark.skipif(QUICK != "fork", reason="what a forked worker inherits")


def loader(dataset, **options):
    """Make a cseq loader with two workers."""
    return cseq.DataLoader(dataset, **(FORK | options))


def run(kind, dataset, epochs, options):
    """Iterate from the same seeds; return the batches, and the trainer's next draw."""
    seed_all()
    made = kind(dataset, **options)
    batches = [list(made) for _ in range(epochs)]
    return batches, drawn()


def check(dataset, epochs=2, **options):
    """Compare cseq's batches with torch's; return them."""
    options = FORK | options
    if not options["num_workers"]:
        del options["multiprocessing_context"]
    ours = run(cseq.DataLoader, dataset, epochs, options)
    assert same(ours, run(data.DataLoader, dataset, epochs, options))
    return ours[0]


# ── Ctrl-C ─────────────────────────────────────────────────────────────────────────────────


class Failing(Sharded):
    """The second sample of each worker is missing."""

    def __iter__(self):
        info = data.get_worker_info()
        return Failures(self.sizes[0 if info is None else info.id])


class Failures:
    """An iterator that continues after an error."""

    def __init__(self, size):
        self.size, self.at = size, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at > self.size:
            raise StopIteration
        if self.at == 2:
            raise LookupError("two is missing")
        return self.at


class Told(Plain):
    """Returns its worker's number; one index ends the worker."""

    def __init__(self, length, deadly=-1):
        super().__init__(length)
        self.deadly = deadly

    def __getitem__(self, index):
        if index == self.deadly:
            kill(os.getpid())
        info = data.get_worker_info()
        assert info is not None
        return info.id
