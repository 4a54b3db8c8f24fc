"""The folder of the pages' recipes, and the batches that train their networks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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


def run(command, *, killed=False):
    """Run a script in the current folder with importable recipes, and only loopback as network.

    With `killed`, it must kill itself.
    """
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (RECIPES, ROOT, HERE))),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode != 0) is killed, f"{done.stdout}\n{done.stderr}"
    assert not killed or done.returncode == -signal.SIGKILL or "Signal 9 (SIGKILL)" in done.stderr
    return done.stdout


def results_of(ranks, command, *, killed=False):
    """Run a script of this folder's, after its launcher; return what each rank has written."""
    results = [Path(f"rank{rank}.json") for rank in range(ranks)]
    for path in results:
        path.unlink(missing_ok=True)
    run(command, killed=killed)
    return [] if killed else [json.loads(path.read_text(encoding="utf-8")) for path in results]


def on_two_ranks(module, arguments, launcher=TORCHRUN):
    """Run a recipe's `train` in a group of two; return each rank's training batches."""
    return results_of(2, [*launcher, HERE / "recipes.py", module, json.dumps(arguments)])


def loader_runs(module, runs, launcher=(), ranks=1):
    """Train with a recipe in other processes; return each rank's output; see loader_runs.py."""
    command = [*launcher, HERE / "loader_runs.py", module, Path.cwd(), json.dumps(runs)]
    return results_of(ranks, command, killed=any("killed" in each for each in runs))


def trained(driver, runs):
    """Run a script that trains for each of these options; return the batches that it prints."""
    lines, said = run(["-c", driver, json.dumps(runs)]).splitlines(), "trained: "
    return [json.loads(line.removeprefix(said)) for line in lines if line.startswith(said)]


def recorded(monkeypatch, recipe, stop_after=None, **options):
    """Call a recipe's `train` to its end or an interruption; return its training batches."""
    record = Record(stop_after)
    stops = contextlib.nullcontext() if stop_after is None else pytest.raises(Interrupted)
    with monkeypatch.context() as patch:
        if hasattr(recipe, "update"):
            # This is JAX's recipe.
            record_update(patch, recipe, record)
        else:
            record_torch(patch, record)
        with stops:
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
        self.readings = []

    def stats(self):
        self.readings.append(self.manager.stats())
        return self.readings[-1]

    def figures(self):
        return [now.since(before).as_dict() for before, now in pairwise(self.readings)]


def figures_of(logged):
    """Select cseq's figures from a framework's log."""
    return {name: value for name, value in logged.items() if name.startswith("cseq/")}


def main(module, arguments):
    """Run a recipe's `train` on this rank of a process group; write its training batches."""
    record = Record()
    with pytest.MonkeyPatch.context() as patch:
        record_torch(patch, record)
        if module == "with_ddp":
            import torch.distributed as dist

            dist.init_process_group("gloo")
        import_module(module).train(**json.loads(arguments))
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    Path(f"rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
