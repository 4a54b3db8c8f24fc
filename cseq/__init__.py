"""Feeds batches to training loops in order, each sample once, by a seed.

Each batch has a ticket in a cell of a ring. The cell's state shows the batch's progress::

    main process      stage 1 worker          stage 2 worker          main process

    sampler ─► POSTED ─► INDEXING ─► INDEXED ─► CONVERTING ─► READY ─► loop ─► FREE
    indices of          user's                 CPU → CUDA             in ticket
    (seed, epoch)       indexer[…]             device                 order

Without a CUDA device, READY follows INDEXING, and tensors are created when a batch is decoded.
Processes exchange data through shared-memory slots; threads share the objects. Start with
docs/inside/architecture.md and the starred modules. Each module imports only modules below it::

    cseq/
    ├── testing.py      helpers for testing training scripts: kill workers, wait for workers
    ├── __main__.py     the cseq command: runs a script with cseq's DataLoader instead of torch's
    ├── observe/        tools for users: reports; cseq run --watch, bench, doctor, top
    ├── adapters/       interfaces to other libraries: loaders, frameworks, metrics systems
    ├── tokens/         training rows from tokenized documents: file readers, rows, batches
    ├── kinds.py        MPSequence, MTSequence, RaySequence: for processes, threads, a Ray fleet
    ├── sequence.py     ★ MSequence: its arguments, epochs and states
    ├── stream.py       a stream of items from each worker process
    ├── manager.py      ★ a manager's lifecycle: start, use in a `with`, finish
    ├── runs.py         ★ one run of a manager or loader; all runs in the process
    ├── tracing.py      a trace of every batch, recorded and written as JSON
    ├── report/         a page about a run: SVG figures, HTML, the doctor's findings
    ├── fleet/          batches from other machines: each thread requests batches from one actor
    ├── engine/         ★ a pool: a crew (processes, threads or the loop's thread) and its tickets;
    │                   _feed posts tickets and retrieves batches and items
    ├── arguments.py    the arguments of MSequence: types and checks
    ├── options.py      worker options for MSequence and Streams
    ├── store/          shards and decoded samples, shared by all processes on a machine
    ├── order/          ★ the sample order and each rank's part; the loop's position
    ├── indexing/       ★ inside a worker: user code turns indices into a batch
    ├── converter/      batch → tensors: on the CPU during decoding, on CUDA in stage 2
    ├── processes/      worker processes: starting, replacing and stopping them
    ├── encoding/       ★ batches, exceptions and the user's worker, encoded for another process
    ├── measure/        a run's counts and timings; why the loop waits
    ├── memory/         ★ the shared memory that holds batches
    ├── stage.py        ★ the loop that every runner executes: claim, work, publish
    ├── check.py        argument checks
    ├── files.py        atomic text files, and file locks
    ├── threads.py      threads that tolerate signal handlers; logging in another thread
    ├── system.py       the machine or container: cores, library threads, memory
    ├── _work.pyx       ★ runners and their work: making and publishing batches
    ├── _lock.pyx       locks and latches that survive signal handlers
    ├── _core.pyx       ★ the ring (include/cseq_ring.h), the shuffle, readers of shuffled orders
    ├── _memory.pyx     ★ the memory behind arrays
    └── errors.py       all exceptions, shown as a tree
"""

from __future__ import annotations

import os
import sys
import typing

# An unrelated project on the package index is also named cseq. It installs cli.py in this folder.
if os.path.exists(f"{__path__[0]}/cli.py"):
    raise ImportError(
        f"{__path__[0]} contains files of another project, which is named cseq on the package "
        "index; run `pip uninstall cseq cseq-loader`, then install cseq-loader",
        name="cseq",
    )
try:
    from cseq._core import permutation
except ModuleNotFoundError as error:
    if error.name != "cseq._core":
        raise
    raise ImportError(
        f"cseq's compiled core is not built for this Python ({sys.version.split()[0]}) in "
        f"{__path__[0]}; run `pip install .` or `make build` in the source folder or, if cseq is "
        "installed elsewhere, start Python in another folder",
        name=error.name,
    ) from None
from cseq.errors import CseqError, RemoteTraceback, WorkerDied, WorkerError, WorkerTimeout
from cseq.indexing.context import WorkerInfo, empty, parts, rng, worker_info

if typing.TYPE_CHECKING:
    from cseq.adapters.torch import DataLoader as DataLoader
    from cseq.adapters.torch import StatefulDataLoader as StatefulDataLoader
    from cseq.fleet.ray import RayFleet as RayFleet
    from cseq.indexing.dataset import from_dataset
    from cseq.indexing.indexer import Indexer
    from cseq.indexing.packing import packed as packed
    from cseq.kinds import MPSequence, MTSequence, RaySequence
    from cseq.measure.stats import Stats
    from cseq.observe.progress import progress as progress
    from cseq.order.balanced import Balanced
    from cseq.order.base import Order
    from cseq.order.blocks import Blocks
    from cseq.order.buckets import Buckets
    from cseq.order.concatenated import Concatenated
    from cseq.order.groups import Groups
    from cseq.order.mixture import Mixture, Resized
    from cseq.order.packed import Packed
    from cseq.order.shuffled import Sequential, Shuffled
    from cseq.order.weighted import Weighted
    from cseq.sequence import MSequence
    from cseq.store.cache import cached
    from cseq.tracing import trace

__version__ = "0.2.0.dev0"

__all__ = [
    "Balanced",
    "Blocks",
    "Buckets",
    "Concatenated",
    "CseqError",
    "Groups",
    "Indexer",
    "MPSequence",
    "MSequence",
    "MTSequence",
    "Mixture",
    "Order",
    "Packed",
    "RaySequence",
    "RemoteTraceback",
    "Resized",
    "Sequential",
    "Shuffled",
    "Stats",
    "Weighted",
    "WorkerDied",
    "WorkerError",
    "WorkerInfo",
    "WorkerTimeout",
    "cached",
    "empty",
    "from_dataset",
    "parts",
    "permutation",
    "rng",
    "trace",
    "worker_info",
]


_ELSEWHERE = {
    "Balanced": "cseq.order.balanced",
    "Blocks": "cseq.order.blocks",
    "Buckets": "cseq.order.buckets",
    "Concatenated": "cseq.order.concatenated",
    "Groups": "cseq.order.groups",
    "Indexer": "cseq.indexing.indexer",
    "MPSequence": "cseq.kinds",
    "MSequence": "cseq.sequence",
    "MTSequence": "cseq.kinds",
    "Mixture": "cseq.order.mixture",
    "Order": "cseq.order.base",
    "Packed": "cseq.order.packed",
    "RayFleet": "cseq.fleet.ray",
    "RaySequence": "cseq.kinds",
    "Resized": "cseq.order.mixture",
    "Sequential": "cseq.order.shuffled",
    "Shuffled": "cseq.order.shuffled",
    "Stats": "cseq.measure.stats",
    "Weighted": "cseq.order.weighted",
    "from_dataset": "cseq.indexing.dataset",
    "cached": "cseq.store.cache",
    "packed": "cseq.indexing.packing",
    "progress": "cseq.observe.progress",
    "trace": "cseq.tracing",
}

# Type checkers use only the imports above.
if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import public names on first use, because most programs need only a few of them."""
        if name in _ELSEWHERE:
            from importlib import import_module

            return getattr(import_module(_ELSEWHERE[name]), name)
        if name not in ("DataLoader", "StatefulDataLoader"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cseq.adapters import torch

        try:
            return getattr(torch, name)
        except ImportError as error:
            # `from cseq import DataLoader` would hide an AttributeError's message.
            if error.name != "torch" or sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise
            raise AttributeError(str(error), name=name) from error

    def __dir__() -> list[str]:
        """Return the public names. Some are included only if torch or Ray is installed."""
        from importlib.util import find_spec

        loaders = ("DataLoader", "StatefulDataLoader") if find_spec("torch") else ()
        missing = () if find_spec("ray") else ("RayFleet",)
        return sorted({*__all__, *_ELSEWHERE, *loaders, "__version__"}.difference(missing))
