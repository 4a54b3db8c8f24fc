"""Train with a recipe of how-to/dataloader-frameworks.md, and write the events as JSON.

``loader_runs.py MODULE FOLDER RUNS`` calls ``MODULE.train(**options)`` for each of RUNS, a list of
dicts:

``options`` Of `train`. ``loader`` : 'torch', 'torchdata' or 'cseq' Whose class the recipe's loaders
are of; the recipe's own, if it is left out. ``arguments`` Of those loaders, instead of the
recipe's. ``plain`` Whether to leave out `SaveState`. ``installed`` Whether to call
`cseq.adapters.torch.install` for this run. ``rng`` `cseq.adapters.torch.defaults.rng` for this run.
``where`` The name of a folder in FOLDER that it runs in; the same one for a run and its resume.
``killed`` The batch of the training at which the process kills itself.

Each rank writes ``rank0.json``, ``rank1.json`` into FOLDER: a list of dicts, see `main`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from torch.utils import data

import cseq
import cseq.runs
from cseq.adapters.torch import defaults, installed, names
from cseq.adapters.torch.iterator import LoaderIterator

import samples

# Names that a run may change in a recipe.
CHANGED = {"DataLoader", "SaveState"}
# Seconds in which worker processes must end.
GRACE = 10.0


def batches_of_nets(training, held_out, losses, run):
    """Record the calls and the losses of `samples.Net`, in training and otherwise."""
    forward = samples.Net.forward

    def recording(self, x, labels):
        if self.training and len(training) == run.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        (training if self.training else held_out).append([x.tolist(), labels.tolist()])
        result = forward(self, x, labels)
        losses.append(result["loss"].item())
        return result

    samples.Net.forward = recording


def iterators_of_torch(counts):
    """Count torch's own iterators with workers."""
    init = names.Workers.__init__

    def counted(self, loader):
        counts["torch"] += 1
        init(self, loader)

    names.Workers.__init__ = counted


def batches_of_workers(counts):
    """Count the batches from cseq's workers, and how often a framework ends persistent ones."""
    take = LoaderIterator.__next__
    shut = LoaderIterator._shutdown_workers

    def counted(self):
        batch = take(self)
        assert os.getpid() not in [process.pid for process in self._workers]
        counts["cseq"] += self._num_workers > 0
        return batch

    def ended(self):
        counts["ended"] += self._persistent_workers
        shut(self)

    LoaderIterator.__next__ = counted
    LoaderIterator._shutdown_workers = ended


class Lines(logging.Handler):
    """Collects cseq's log records from warnings up."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def children():
    """Return the live child processes."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def left_behind(before):
    """Return the new processes that stay when others have ended."""
    gc.collect()
    cseq.runs.await_closings(GRACE)
    deadline = time.monotonic() + GRACE
    while len(children()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = children()
    for name in before:
        if name in left:
            left.remove(name)
    return left


def loader_class(kind, arguments):
    """Return the replacement of a recipe's loader class."""
    chosen = {"torch": data.DataLoader, "cseq": cseq.DataLoader}.get(kind)
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        chosen = StatefulDataLoader

    def make(*args, **kwargs):
        kwargs |= arguments
        if kind != "cseq":
            kwargs.pop("rng", None)
        return chosen(*args, **kwargs)

    return make


def main(module, folder, runs):
    """Train, and write the events."""
    if "composer" in module:
        import vision  # noqa: F401 - Composer needs a torchvision
    recipe = importlib.import_module(module)
    rng = defaults.rng
    training = []
    held_out = []
    losses = []
    present = {}
    counts = {"torch": 0, "cseq": 0, "ended": 0}
    log = Lines()
    logging.getLogger("cseq").addHandler(log)
    batches_of_nets(training, held_out, losses, present)
    iterators_of_torch(counts)
    batches_of_workers(counts)
    results = []
    for run in json.loads(runs):
        before = children()
        where = Path(folder, run.get("where", "run"))
        where.mkdir(exist_ok=True)
        os.chdir(where)
        present.clear()
        present.update(run)
        defaults.rng = run.get("rng", rng)
        own = {name: vars(recipe)[name] for name in CHANGED & vars(recipe).keys()}
        if "loader" in run or "arguments" in run:
            recipe.DataLoader = loader_class(run.get("loader", "cseq"), run.get("arguments", {}))
        if run.get("plain"):
            recipe.SaveState = recipe.lightning.Callback
        with installed() if run.get("installed") else contextlib.nullcontext():
            recipe.train(**run.get("options", {}))
        vars(recipe).update(own)
        results.append(
            {
                "training": training.copy(),
                "held_out": held_out.copy(),
                "losses": losses.copy(),
                "by_torch": counts["torch"],
                # Batches from workers; what follows counts iterators with persistent workers.
                "by_cseq": counts["cseq"],
                "ended": counts["ended"],
                "log": log.lines.copy(),
                "left": left_behind(before),
            }
        )
        training.clear()
        held_out.clear()
        losses.clear()
        log.lines.clear()
        counts.update(dict.fromkeys(counts, 0))
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
