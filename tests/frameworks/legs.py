"""Runs that are killed and resume from a checkpoint, compared with the uninterrupted one.

Each run is a forked process, or one for each rank, so imports happen once.
"""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path

import numpy as np
import torch


class Augmented(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        x = torch.tensor([index, np.random.rand(), torch.rand(()).item()])  # noqa: NPY002
        return {"x": x, "labels": index % 3, "input_ids": [0] * (index % 7 + 1)}


class Collator:
    """Masks at random, and counts the samples made by all processes."""

    def __init__(self):
        self.made = multiprocessing.get_context("fork").Value("l", 0)

    def __call__(self, samples):
        with self.made:
            self.made.value += len(samples)
        x = torch.stack([sample["x"] for sample in samples])
        labels = torch.tensor([sample["labels"] for sample in samples])
        return {"x": x * torch.bernoulli(torch.full(x.shape, 0.85)), "labels": labels}


class Net(torch.nn.Module):
    """Records its calls and its losses; rank 0 kills itself at the training batch `kill_at`."""

    def __init__(self, dropout=0.0, kill_at=None):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 3)
        self.dropout = torch.nn.Dropout(dropout)
        self.kill_at = kill_at
        self.seen = {True: [], False: []}

    def forward(self, x, labels):
        seen = self.seen[self.training]
        if self.training and len(seen) == self.kill_at and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.dropout(self.layer(x))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        seen.append((x.tolist(), loss.item()))
        return {"loss": loss, "logits": logits}


def on_ranks(ranks, function, *args):
    """Call a function in a forked process for each rank; return None if one of them was killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        result = Path(f"rank{rank}.pickle")
        result.unlink(missing_ok=True)
        if pid := os.fork():
            pids.append(pid)
            continue
        status = 1
        try:
            if ranks > 1:
                os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "NODE_RANK": "0"}
                os.environ |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            result.write_bytes(pickle.dumps(function(*args)))
            status = 0
        except Exception:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(status)
    codes = []
    # The first process is the one that kills itself.
    for pid in pids:
        if any(codes):
            os.kill(pid, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if codes[0] not in (0, -signal.SIGKILL):
        raise RuntimeError(f"rank 0 has ended with {codes[0]}")
    if any(codes):
        return None
    return [pickle.loads(Path(f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]


def count(*batches):
    """Return the number of samples."""
    return sum(len(x) for x, _ in batches)


def wrong_with(whole, rest, taken, spare=0):
    """Return each rank's differences between a run and the rest of one after a checkpoint.

    `taken` batches came before. For each rank, both have what a network has seen, the number of
    samples made, and the number it should have, except for the `spare` ones.
    """
    wrong = []
    for rank, ((theirs, *_), (ours, made, had)) in enumerate(zip(whole, rest, strict=True)):
        if ours[True] != theirs[True][taken:]:
            same = sum(a == b for a, b in zip(ours[True], theirs[True][taken:], strict=False))
            wrong.append(f"rank {rank}: {same} of {len(ours[True])} batches, from {taken}")
        if ours[False] != theirs[False][len(theirs[False]) - len(ours[False]) :]:
            wrong.append(f"rank {rank}: validation")
        if not had <= made <= had + spare:
            wrong.append(f"rank {rank}: {made} samples were made for {had}")
    return wrong


def main(leg):
    """Run ``SCRIPT RANKS FIRST COUNT``: print the faults of COUNT legs as JSON.

    `leg` takes a generator and the number of ranks, and returns its setting and its faults.
    """
    ranks, first, count = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    found = {}
    for seed in range(first, first + count):
        folder = Path(f"leg{seed}")
        folder.mkdir()
        os.chdir(folder)
        setting, wrong = leg(random.Random(seed), ranks)
        os.chdir("..")
        shutil.rmtree(folder)
        print(f"{seed}: {setting}: {wrong or 'exact'}", file=sys.stderr, flush=True)
        if wrong:
            found[f"{seed}: {setting}"] = wrong
    print(json.dumps(found))
