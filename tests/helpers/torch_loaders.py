"""Loaders of torch and of cseq, side by side."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from killing import kill  # noqa: E402
from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Plain, drawn, same, seed_all  # noqa: E402

import cseq.testing  # noqa: E402

QUICK = QUICKEST.start_method
FORK: Any = {"num_workers": 2, "multiprocessing_context": QUICK}
THREADS: Any = {"num_workers": 2, "worker_method": "thread"}

forked = pytest.mark.skipif(QUICK != "fork", reason="what a forked worker inherits")
# torch warns of this on machines with few processors.
few_processors = pytest.mark.filterwarnings("ignore:This DataLoader will create")
quick_processes = [pytest.mark.needs("quick processes"), few_processors]


def loader(dataset, **options):
    """Make a cseq loader with two workers."""
    given = THREADS if options.get("worker_method") == "thread" else FORK
    return cseq.DataLoader(dataset, **(given | options))


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


BROKEN = (2, 3, 7)


class Broken(Plain):
    """Some of its samples raise."""

    def __init__(self, length=10, broken=BROKEN):
        super().__init__(length)
        self.broken = broken

    def __getitem__(self, index):
        if index in self.broken:
            raise LookupError(f"no sample {index}")
        return index


class BrokenItems(data.IterableDataset[Any]):
    """The same for a stream, whose iterator continues after an error."""

    def __init__(self, length=10, broken=BROKEN):
        self.samples = Broken(length, broken)

    def __iter__(self):
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.samples.__getitem__, range(first, len(self.samples), step))


class Deadly(Plain):
    """One of its samples ends the worker."""

    def __init__(self, length, deadly=-1):
        super().__init__(length)
        self.deadly = deadly

    def __getitem__(self, index):
        if index == self.deadly:
            kill(os.getpid())
        return index


class Told(Deadly):
    """Its samples are the numbers of the workers that made them."""

    def __getitem__(self, index):
        super().__getitem__(index)
        info = data.get_worker_info()
        assert info is not None
        return info.id
