"""The time from nothing to the first batch, excluding imports in the trainer's process."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cseq
import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Echo, Floats, Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORK = Work(partial(Floats, 32_000), 1000, microseconds)
OURS, LIMIT = "cseq, forkserver", "python -c 'import numpy'"
# Batches of 4 MiB.
HELD = scaled(64, 2)
DROP_IN = "cseq.DataLoader"
CLASSES = {DROP_IN: "cseq", "torch DataLoader": "torch.utils.data"}


def first_batch(make: Callable[[], Any]) -> Iterator[Callable[[], float]]:
    """Time how long it takes to make a loader and get a batch from it."""
    kept = []

    def run() -> float:
        start = time.perf_counter()
        loader = make()
        batches = iter(loader)
        next(batches)
        seconds = time.perf_counter() - start
        kept.extend((loader, batches))
        return seconds * 1e3

    yield run
    end(*kept)


def end(loader: Any, batches: Any) -> None:
    """Close a loader that has its own way of closing."""
    del batches
    for name in ("finish", "close"):
        if hasattr(loader, name):
            getattr(loader, name)()


def ours(start_method: str, work: Work = WORK) -> Iterator[Callable[[], float]]:
    """Start cseq with processes."""
    # This imports the class.
    kind = cseq.MPSequence
    yield from first_batch(
        lambda: loaders.cseq_manager(kind, work, start_method=start_method).start()
    )


def ours_threads() -> Iterator[Callable[[], float]]:
    """Start cseq with threads."""
    # This imports the class.
    kind = cseq.MTSequence
    yield from first_batch(lambda: loaders.cseq_manager(kind, WORK).start())


def with_torch(start_method: str) -> Iterator[Callable[[], float]]:
    """Start a DataLoader that is already imported."""
    import torch.utils.data  # noqa: F401

    yield from first_batch(lambda: loaders.torch_loader(WORK, start_method))


def with_spdl(start_method: str) -> Iterator[Callable[[], float]]:
    """Start SPDL's worker process."""
    import spdl.pipeline  # noqa: F401

    yield from first_batch(lambda: loaders.spdl_subprocess(WORK, start_method=start_method))


def with_grain() -> Iterator[Callable[[], float]]:
    """Start Grain."""
    import grain  # noqa: F401

    yield from first_batch(lambda: loaders.GrainEpochs(WORK))


def beside(_module: Any, indexer: Callable[[], Any]) -> Any:
    """Make an indexer in a process that has imported a module."""
    return indexer()


def nth_with_torch(number: int) -> Iterator[Callable[[], float]]:
    """Start one more manager next to `number - 1` others. All workers import torch."""
    import torch

    work = replace(WORK, indexer=partial(beside, torch, WORK.indexer))
    make = partial(loaders.cseq_manager, cseq.MPSequence, work, start_method="forkserver")
    before = []
    for _ in range(number - 1):
        manager = make().start()
        next(iter(manager))
        before.append(manager)
    yield from first_batch(lambda: make().start())
    for manager in before:
        manager.finish()


class Planes:
    """Samples of 1 MiB."""

    def __init__(self, batches: int) -> None:
        self.samples = 4 * batches

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((1 << 18,), index, dtype=torch.float32)


def while_held(name: str, batches: int) -> Iterator[Callable[[], float]]:
    """Fork a DataLoader's four workers while `batches` batches of another loader are held."""
    make = partial(
        importlib.import_module(CLASSES[name]).DataLoader,
        batch_size=4,
        num_workers=4,
        multiprocessing_context="fork",
    )
    # Even without batches, cseq imports its engine for the first loader.
    held = list(make(Planes(batches)))
    yield from first_batch(lambda: make(Planes(16)))
    del held


def import_numpy() -> Iterator[Callable[[], float]]:
    """Measure a new interpreter that imports numpy."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
        return (time.perf_counter() - start) * 1e3

    yield run


BY_SIZE = {
    f"cseq, {name} samples": Work(Echo, samples // 32, microseconds)
    for name, samples in {"10^4": 10**4, "10^6": 10**6, "10^9": 10**9}.items()
}

CASES = (
    Case(
        "start_by_size",
        "Start to first batch, by the number of samples",
        "ms",
        tuple(
            Contender(name, partial(ours, "forkserver", work), ours=True)
            for name, work in BY_SIZE.items()
        ),
        goals=(
            Goal("slowest over fastest", lambda f: max(f.values()) / min(f.values()), at_most=1.2),
        ),
        fresh=True,
    ),
    Case(
        "start_three",
        "Start to first batch of three managers with torch, one after another (forkserver)",
        "ms",
        tuple(
            Contender(
                f"cseq, manager {number}", partial(nth_with_torch, number), ("torch",), ours=True
            )
            for number in (1, 2, 3)
        ),
        fresh=True,
    ),
    Case(
        "start_holding",
        "Start to first batch of four forked workers while batches of 4 MiB are held",
        "ms",
        tuple(
            Contender(
                f"{name}, {4 * batches} MiB held",
                partial(while_held, name, batches),
                ("torch",),
                ours=name == DROP_IN,
            )
            for name in CLASSES
            for batches in (0, HELD)
        ),
        goals=(
            Goal(
                "with batches over without",
                lambda f: f[f"{DROP_IN}, {4 * HELD} MiB held"] / f[f"{DROP_IN}, 0 MiB held"],
                at_most=2,
            ),
        ),
        fresh=True,
    ),
    Case(
        "start",
        "Start to first batch, 2 workers",
        "ms",
        (
            Contender(OURS, partial(ours, "forkserver"), ours=True),
            Contender("cseq, spawn", partial(ours, "spawn"), ours=True),
            Contender("cseq, fork", partial(ours, "fork"), ours=True),
            Contender("cseq, threads", ours_threads, ours=True),
            *(
                Contender(f"SPDL subprocess, {method}", partial(with_spdl, method), ("spdl-core",))
                for method in ("forkserver", "spawn")
            ),
            Contender("Grain mp_prefetch", with_grain, needs=("grain",)),
            *(
                Contender(f"torch DataLoader, {method}", partial(with_torch, method), ("torch",))
                for method in ("spawn", "fork")
            ),
            Contender(LIMIT, import_numpy),
        ),
        limit=LIMIT,
        goals=(Goal("times the import of numpy", lambda f: f[OURS] / f[LIMIT], at_most=2),),
        fresh=True,
    ),
)
