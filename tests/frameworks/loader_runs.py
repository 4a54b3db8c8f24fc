"""Train with a recipe of how-to/dataloader-frameworks.md, and write the events as JSON.

``loader_runs.py MODULE FOLDER RUNS`` calls ``MODULE.train(**options)`` for each of RUNS, a list of
dicts, in which all keys may be missing:

``options``    of `train`
``loader``     'torch' or 'cseq': whose class the recipe's loaders are of
``arguments``  of those loaders, instead of the recipe's
``plain``      whether to leave out `SaveState`
``installed``  whether to call `cseq.adapters.torch.install` for this run
``rng``        `cseq.adapters.torch.defaults.rng` for this run
``where``      the name of a folder in FOLDER that it runs in; a run and its resume have the same
``killed``     the batch of the training at which the process kills itself

Each rank writes ``rank0.json``, ``rank1.json`` into FOLDER: a list of dicts, see `seen`.
"""

import contextlib
import copy
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
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


# What the current run has seen: the network's calls and losses, torch's own iterators with workers,
# the batches from cseq's workers, how often a framework ended persistent ones, and the log.
seen = {}


def watch(run):
    """Record the events of the current run, whose description is in `run`."""
    forward, init = samples.Net.forward, names.Workers.__init__
    take, shut = LoaderIterator.__next__, LoaderIterator._shutdown_workers

    def called(self, x, labels):
        if self.training and len(seen["training"]) == run.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        seen["training" if self.training else "held_out"].append([x.tolist(), labels.tolist()])
        result = forward(self, x, labels)
        seen["losses"].append(result["loss"].item())
        return result

    def begun(self, loader):
        seen["by_torch"] += 1
        init(self, loader)

    def taken(self):
        batch = take(self)
        assert os.getpid() not in [process.pid for process in self._workers]
        seen["by_cseq"] += self._num_workers > 0
        return batch

    def ended(self):
        seen["ended"] += self._persistent_workers
        shut(self)

    samples.Net.forward, names.Workers.__init__ = called, begun
    LoaderIterator.__next__, LoaderIterator._shutdown_workers = taken, ended
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen["log"].append(record.getMessage())
    logging.getLogger("cseq").addHandler(handler)


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
    return [*(Counter(children()) - Counter(before)).elements()]


def loader_class(kind, arguments):
    """Return the replacement of a recipe's loader class."""
    chosen = {"torch": data.DataLoader, "cseq": cseq.DataLoader}[kind]

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
    present, results = {}, []
    watch(present)
    for run in json.loads(runs):
        before = children()
        where = Path(folder, run.get("where", "run"))
        where.mkdir(exist_ok=True)
        os.chdir(where)
        present.clear()
        present.update(run)
        seen.update({name: [] for name in ("training", "held_out", "losses", "log")})
        seen.update(by_torch=0, by_cseq=0, ended=0)
        defaults.rng = run.get("rng", rng)
        own = {name: vars(recipe)[name] for name in CHANGED & vars(recipe).keys()}
        if "loader" in run or "arguments" in run:
            recipe.DataLoader = loader_class(run.get("loader", "cseq"), run.get("arguments", {}))
        if run.get("plain"):
            recipe.SaveState = recipe.lightning.Callback
        with installed() if run.get("installed") else contextlib.nullcontext():
            recipe.train(**run.get("options", {}))
        vars(recipe).update(own)
        results.append({**copy.deepcopy(seen), "left": left_behind(before)})
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
