"""The folder of the pages' recipes, and the batches that train their networks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "frameworks"

SAMPLES, BATCH, EPOCHS = 103, 8, 3
LENGTH = -(-SAMPLES // BATCH)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CSEQ_RUN = ("-m", "cseq", "run")


class Interrupted(Exception):
    """Ends a training at a step, like an accident."""


class Record(list[list[int]]):
    """The samples of each training batch; interrupts after some."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after

    def add(self, x):
        """Record a batch, whose first column has the samples' numbers."""
        if len(self) == self.stop_after:
            raise Interrupted
        self.append([int(number) for number in x[:, 0]])


def stream(*epochs, rank=0, world_size=1, **options):
    """Return the samples of each batch of these epochs, from cseq's test mode."""
    import data

    shard = (rank, world_size) if world_size > 1 else None
    found = []
    with data.batches(shard=shard, out_type="null", **options).start_test() as batches:
        for epoch in epochs:
            batches.set_epoch(epoch)
            found += [x[:, 0].astype(np.int64).tolist() for x, _ in batches]
    return found


def record_torch(monkeypatch, record, held_out=None):
    """Record the calls of `net.Net`, in training and otherwise."""
    import net

    forward = net.Net.forward

    def recording(self, x):
        if self.training:
            record.add(x)
        elif held_out is not None:
            held_out.add(x)
        return forward(self, x)

    monkeypatch.setattr(net.Net, "forward", recording)


def run(command, folder, recipes, *, killed=False):
    """Run a script in a folder with importable recipes, and only loopback as network.

    With `killed`, it must kill itself.
    """
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(recipes), str(ROOT), str(Path(__file__).parent)]),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode != 0) is killed, f"{done.stdout}\n{done.stderr}"
    assert not killed or done.returncode == -signal.SIGKILL or "Signal 9 (SIGKILL)" in done.stderr
    return done.stdout


def on_two_ranks(module, arguments, folder, recipes, launcher=TORCHRUN):
    """Run a recipe's `train` in a group of two; return each rank's training batches."""
    script = str(Path(__file__).with_name("two_ranks.py"))
    results = [folder / f"rank{rank}.json" for rank in range(2)]
    for path in results:
        path.unlink(missing_ok=True)
    run([*launcher, script, module, json.dumps(arguments)], folder, recipes)
    return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def loader_runs(module, runs, folder, recipes, launcher=(), ranks=1):
    """Train with a recipe of `cseq.DataLoader` in separate processes; see loader_runs.py.

    Return the output of each rank.
    """
    script = str(Path(__file__).with_name("loader_runs.py"))
    results = [folder / f"rank{rank}.json" for rank in range(ranks)]
    for path in results:
        path.unlink(missing_ok=True)
    killed = any("killed" in each for each in runs)
    command = [*launcher, script, module, str(folder), json.dumps(runs)]
    run(command, folder, recipes, killed=killed)
    if killed:
        return []
    return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def recorded(monkeypatch, recipe, stop_after=None, **options):
    """Call a recipe's `train` to its end or an interruption; return its training batches."""
    record = Record(stop_after)
    with monkeypatch.context() as patch:
        if hasattr(recipe, "update"):
            # This is JAX's recipe.
            record_update(patch, recipe, record)
        else:
            record_torch(patch, record)
        if stop_after is None:
            recipe.train(**options)
        else:
            with pytest.raises(Interrupted):
                recipe.train(**options)
    return record


def record_update(monkeypatch, recipe, record):
    """Record the calls of a recipe's `update`."""
    update = recipe.update

    def recording(net, optimizer, x, y):
        record.add(x)
        update(net, optimizer, x, y)

    monkeypatch.setattr(recipe, "update", recording)


class Read:
    """A manager for a monitor; keeps the monitor's readings, and returns what it must log."""

    def __init__(self, manager=None):
        self.manager = manager
        self.readings: list[Any] = []

    def stats(self):
        self.readings.append(self.manager.stats())
        return self.readings[-1]

    def figures(self):
        return [now.since(before).as_dict() for before, now in pairwise(self.readings)]


def figures_of(logged):
    """Select cseq's figures from a framework's log."""
    return {name: value for name, value in logged.items() if name.startswith("cseq/")}
