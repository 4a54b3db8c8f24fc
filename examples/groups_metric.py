"""Train an embedding on batches that contain several samples of each of several classes.

A class has between 6 and 100 samples, as with products, persons or birds. `cseq.Groups` gives each
class the same weight. A small network learns to place the samples of a class close together, by
comparing all pairs of a batch. The test uses classes that it has never seen: it counts the samples
whose nearest neighbor has the same class. Training can stop anywhere and continue there.

    python examples/groups_metric.py [--epochs 4] [--workers 2] [--out build/metric]
    python examples/groups_metric.py --stop 50      # ends after 50 batches, as a killed job
    python examples/groups_metric.py                # continues with batch 51, to the same result
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cseq

CLASSES, HELD_OUT, FEATURES = 160, 40, 64
# The classes per batch, and the samples per class.
P, K = 16, 4


class Samples:
    """The indexer: features, with noise from the batch's own generator."""

    def __init__(self, path: Path) -> None:
        self.features = np.load(path, mmap_mode="r")

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        noise = cseq.rng().standard_normal((len(indices), FEATURES), dtype=np.float32)
        return self.features[indices] + 0.3 * noise


def write_samples(folder: Path) -> None:
    """Write samples of all classes. Eight hidden features tell the classes apart."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), rng.integers(6, 100, CLASSES))
    told = rng.standard_normal((CLASSES, 8))[labels] + 0.2 * rng.standard_normal((len(labels), 8))
    others = 2 * rng.standard_normal((len(labels), FEATURES - 8))
    turn, _ = np.linalg.qr(rng.standard_normal((FEATURES, FEATURES)))
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "features.npy", (np.hstack([told, others]) @ turn).astype(np.float32))
    np.save(folder / "labels.npy", labels)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    """Compare each sample with all others: its own class should be nearest."""
    laid = nn.functional.normalize(network(batch))
    alike = laid @ laid.T / 0.1
    alike.fill_diagonal_(-torch.inf)
    # In a batch, the classes come one after another.
    group = torch.arange(P).repeat_interleave(K)
    mates = (group[:, None] == group[None, :]).fill_diagonal_(fill_value=False)
    return -nn.functional.log_softmax(alike, 1)[mates].mean()


@torch.no_grad()
def nearest_alike() -> float:
    """Return the share of held-out samples whose nearest neighbour is of the same class."""
    chosen = np.flatnonzero(labels >= CLASSES - HELD_OUT)
    laid = nn.functional.normalize(network(torch.from_numpy(features[chosen])))
    alike = (laid @ laid.T).fill_diagonal_(-1)
    nearest = chosen[alike.argmax(1).numpy()]
    return float((labels[nearest] == labels[chosen]).mean())


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": manager.state_dict(), "sums": sums}
    state |= {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="an embedding from batches of classes")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/metric"))
args = parser.parse_args()

if not (args.out / "labels.npy").exists():
    write_samples(args.out)
features = np.load(args.out / "features.npy", mmap_mode="c")
labels = np.load(args.out / "labels.npy")
checkpoint = args.out / "checkpoint.pt"

training = np.flatnonzero(labels < CLASSES - HELD_OUT)
order = cseq.Groups(labels[training], classes=P, samples=K)
print(order.describe())
manager = cseq.MPSequence(
    functools.partial(Samples, args.out / "features.npy"),
    # The order's numbers are indices into these samples.
    training,
    args.workers,
    order=order,
    out_type="cpu",
    seed=7,
)

torch.manual_seed(7)
torch.set_num_threads(1)
network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
# The loss and the number of batches of this epoch.
sums = [0.0, 0]
if checkpoint.exists():
    saved = torch.load(checkpoint)
    manager.load_state_dict(saved["data"])
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    sums = saved["sums"]
    print(f"continues in epoch {manager.epoch + 1}")

taken = 0
with manager.start() as batches:
    for epoch in range(manager.epoch, args.epochs):
        for batch in batches:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums = [sums[0] + loss.item(), sums[1] + 1]
            taken += 1
            if taken == args.stop:
                break
        if taken == args.stop:
            save()
            print(f"stopped in epoch {epoch + 1}, after {taken} batches")
            break
        print(
            f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.4f}, {nearest_alike():.1%} nearest alike"
        )
        sums = [0.0, 0]
        save()
