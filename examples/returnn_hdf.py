"""Let RETURNN train a small network from an HDF file, with and without worker processes.

The script writes the file and a RETURNN configuration, trains with it as a user of RETURNN does
(`python -m returnn plain.config`), makes the one change that puts `cseq.adapters.returnn` between
RETURNN and its `HDFDataset`, and trains again. The losses are exactly the same, because the
sequences and their order are the same.

    python examples/returnn_hdf.py [--epochs 3] [--workers 2] [--out build/returnn]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from returnn.datasets.hdf import SimpleHDFWriter

SEQUENCES, CLASSES, FEATURES = 300, 5, 8

CONFIG = """#!returnn.py
import returnn.frontend as rf
from returnn.tensor import Dim, batch_dim

task = "train"
backend = "torch"
device = "cpu"
log_verbosity = 3

time, features, classes = Dim(None, name="time"), Dim({features}), Dim({classes})
extern_data = {{
    "data": {{"dims": [batch_dim, time, features], "dtype": "float32"}},
    "classes": {{"dims": [batch_dim, time], "sparse_dim": classes, "dtype": "int32"}},
}}

train = {{"class": "HDFDataset", "files": ["train.hdf"], "seq_ordering": "random"}}
dev = {{"class": "HDFDataset", "files": ["dev.hdf"]}}


class Network(rf.Module):
    def __init__(self):
        self.hidden = rf.Linear(features, Dim(32))
        self.output = rf.Linear(self.hidden.out_dim, classes)

    def __call__(self, frames):
        return self.output(rf.relu(self.hidden(frames)))


def get_model(**_):
    return Network()


def train_step(*, model, extern_data, **_):
    logits, targets = model(extern_data["data"]), extern_data["classes"]
    loss = rf.cross_entropy(
        estimated=logits, target=targets, axis=classes, estimated_type="logits"
    )
    loss.mark_as_loss("ce")
    wrong = rf.reduce_argmax(logits, axis=classes) != targets
    wrong.mark_as_loss("fer", as_error=True)


batch_size = 400
max_seqs = 20
torch_dataloader_opts = {{"num_workers": 0}}  # no process between RETURNN and the dataset
cache_size = "0"  # else a thread fills HDFDataset's cache, and no two trainings are alike
optimizer = {{"class": "adam"}}
learning_rate = 0.01
num_epochs = {epochs}
learning_rate_file = "{name}.scores"
model = "{name}.model/epoch"
"""

CHANGE = """
from cseq.adapters.returnn import MultiProcDataset

train = {{
    "class": MultiProcDataset, "dataset": train, "num_workers": {workers}, "buffer_size": 20
}}
"""


def write_sequences(path: Path, count: int, seed: int) -> None:
    """Write sequences of frames. Each frame is close to the mean of its class."""
    means = np.random.default_rng(1).standard_normal((CLASSES, FEATURES))
    rng = np.random.default_rng(seed)
    path.unlink(missing_ok=True)
    extra = {"classes": (CLASSES, 1, "int32")}
    with SimpleHDFWriter(str(path), FEATURES, extra_type=extra) as file:
        for number in range(count):
            classes = rng.integers(CLASSES, size=(1, rng.integers(5, 40)), dtype=np.int32)
            frames = means[classes] + rng.standard_normal((*classes.shape, FEATURES))
            tag = [f"{path.stem}-{number}"]
            lengths = [classes.size]
            file.insert_batch(frames.astype(np.float32), lengths, tag, {"classes": classes})


def train(name: str, config: str) -> dict[int, dict[str, float]]:
    """Let RETURNN train with a configuration. Return the losses that it records, by epoch."""
    scores = args.out / f"{name}.scores"
    # If RETURNN finds these files, it continues from them instead of starting.
    for old in (scores, *(args.out / f"{name}.model").glob("*")):
        old.unlink(missing_ok=True)
    (args.out / f"{name}.config").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "returnn", f"{name}.config"]
    done = subprocess.run(command, cwd=args.out, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    [dataset] = re.findall(rf"(\w+), sequences: {SEQUENCES},", done.stdout)
    print(f"{name}.config: {dataset}")
    return losses_in(scores.read_text(encoding="utf-8"))


def losses_in(scores: str) -> dict[int, dict[str, float]]:
    """Read the losses from RETURNN's records, which are a Python expression."""
    epochs = eval(scores, {"EpochData": lambda **noted: noted["error"]})
    return {
        epoch: {key: value for key, value in error.items() if "_loss_" in key}
        for epoch, error in epochs.items()
    }


parser = argparse.ArgumentParser(description="RETURNN's HDFDataset in worker processes")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--out", type=Path, default=Path("build/returnn"))
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
write_sequences(args.out / "train.hdf", SEQUENCES, seed=2)
write_sequences(args.out / "dev.hdf", SEQUENCES // 5, seed=3)

settings = {"classes": CLASSES, "features": FEATURES, "epochs": args.epochs}
plain = train("plain", CONFIG.format(name="plain", **settings))
change = CHANGE.format(workers=args.workers)
workers = train("workers", CONFIG.format(name="workers", **settings) + change)

for epoch, losses in plain.items():
    for name, loss in losses.items():
        print(f"epoch {epoch}: {name} {loss!r} and {workers[epoch][name]!r}")
if plain != workers:
    sys.exit("the losses differ; please report this")
print("the losses are exactly the same")
