"""Feed training loops: in order, each sample once, the same for the same seed.

A batch travels as a ticket in a cell of a ring. The cell's state tells how far it has come::

    main process      worker of stage 1       worker of stage 2       main process

    sampler ─► POSTED ─► INDEXING ─► INDEXED ─► CONVERTING ─► READY ─► loop ─► FREE
    indices of          user's                 CPU → CUDA             in the order
    (seed, epoch)       indexer[…]             device                 of tickets

Without a CUDA device, READY follows INDEXING, and the end that decodes a batch makes its tensors.
The data lie beside the ring in slots of shared memory; between threads, they stay where they are.

To learn how cseq works, read docs/inside/architecture.md, which follows one batch step by step, and
the modules with a star on the way. Imports point down this list of modules::

    cseq/
    ├── testing.py      for tests of training scripts: kill workers, wait for them
    ├── __main__.py     cseq, the command: run a script with cseq's DataLoader in torch's place
    ├── observe/        for people who look: reports; cseq run --watch, bench, doctor, top
    ├── adapters/       other libraries' interfaces: loaders, frameworks, metrics systems
    ├── tokens/         documents of tokens in, training rows out: readers of files, rows, batches
    ├── kinds.py        MPSequence, MTSequence, RaySequence: of processes, threads, a Ray fleet
    ├── sequence.py     ★ MSequence: its arguments, epochs and states
    ├── stream.py       a stream of items from each worker process
    ├── manager.py      ★ a manager's lifecycle: started, used in a `with`, finished
    ├── runs.py         ★ one start of a manager or loader, up to its end; all runs of the process
    ├── tracing.py      a trace of every batch: recorded, written as JSON
    ├── report/         a page about a run: figures as SVG, HTML, the doctor's findings
    ├── fleet/          batches from other machines: a crew of threads, each of which asks an actor
    ├── engine/         ★ a pool is a crew (processes, threads, the loop's own thread) × tickets;
    │                   _feed posts these, and takes out batches and items
    ├── arguments.py    the arguments of MSequence: types and checks
    ├── options.py      options of workers, for MSequence and Streams
    ├── store/          shards of a store and decoded samples, kept for all of a machine
    ├── order/          ★ which samples, in which order, for which rank; the loop's place
    ├── indexing/       ★ in a worker: the user's code makes a batch of indices
    ├── converter/      batch → tensors: on the CPU where it is decoded, on CUDA in stage 2
    ├── processes/      worker processes: started, replaced when they die, ended
    ├── encoding/       ★ how a batch, an exception, the user's worker travel to another process
    ├── measure/        counts and times of a run; why its loop waits
    ├── memory/         ★ the shared memory that batches lie in
    ├── stage.py        ★ the loop of every runner: claim, work, publish
    ├── check.py        checks of arguments
    ├── files.py        files that are written whole or not at all
    ├── threads.py      threads that a signal handler cannot break; logs on another thread
    ├── system.py       the machine or container: cores, threads of libraries, memory
    ├── _work.pyx       ★ runners, and their work: batches made and published
    ├── _lock.pyx       locks and latches that outlive signal handlers
    ├── _core.pyx       ★ the ring (include/cseq_ring.h), the shuffle, readers of its orders
    ├── _memory.pyx     ★ memory that arrays lie on
    └── errors.py       every error, drawn as a tree
"""

from __future__ import annotations

import os
import sys
import typing

# Another project, named cseq on the package index, installs this file into the same folder.
if os.path.exists(f"{__path__[0]}/cli.py"):
    raise ImportError(
        f"{__path__[0]} has files of another project, named cseq on the package index: run "
        "`pip uninstall cseq cseq-loader`, then install cseq-loader",
        name="cseq",
    )
try:
    from cseq._core import permutation
except ModuleNotFoundError as error:
    if error.name != "cseq._core":
        raise
    raise ImportError(
        f"cseq's compiled core is not built for this Python ({sys.version.split()[0]}) in "
        f"{__path__[0]}: run `pip install .` or `make build` in the folder of the sources, or, if "
        "cseq is installed elsewhere, start Python in another folder",
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

# Type checkers see the names above alone.
if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a name at its first use; few programs need all, and some lack torch or Ray."""
        if name in _ELSEWHERE:
            from importlib import import_module

            return getattr(import_module(_ELSEWHERE[name]), name)
        if name not in ("DataLoader", "StatefulDataLoader"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cseq.adapters import torch

        try:
            return getattr(torch, name)
        except ImportError as error:
            # `from cseq import DataLoader` would hide the message of an AttributeError.
            if error.name != "torch" or sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise
            raise AttributeError(str(error), name=name) from error

    def __dir__() -> list[str]:
        """List the public names, and those that need torch or Ray if it is installed."""
        from importlib.util import find_spec

        loaders = ("DataLoader", "StatefulDataLoader") if find_spec("torch") else ()
        missing = () if find_spec("ray") else ("RayFleet",)
        return sorted({*__all__, *_ELSEWHERE, *loaders, "__version__"}.difference(missing))
