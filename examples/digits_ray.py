"""Train a small network on handwritten digits. The nodes of a Ray cluster make the batches.

    python examples/digits_ray.py [--epochs 4] [--workers 2]    on the cluster, or one started here
    python examples/digits_ray.py --here                        in this process: test mode

Both print exactly the same losses, because the indexer's random numbers depend on the batch, not on
where it is made. RAY_ADDRESS names the cluster; without it, Ray starts one on this machine.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import cseq


class Digits:
    """The indexer: every worker process on every node makes one."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images, self.labels = digits.images.astype("float32") / 16, digits.target

    def __getitem__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        noise = cseq.rng().standard_normal((len(indices), 1, 8, 8), dtype="float32")
        return self.images[indices, None] + 0.1 * noise, self.labels[indices]


def train_epoch(batches: cseq.MSequence) -> float:
    """Train on one epoch and return the mean loss."""
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


parser = argparse.ArgumentParser(description="handwritten digits through cseq.RaySequence")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--here", action="store_true", help="make the batches in this process")
args = parser.parse_args()

torch.manual_seed(7)
# More threads do not make this small network faster.
torch.set_num_threads(1)
network = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)

# With dtype=None, labels stay integers.
options = {"out_type": "cpu", "dtype": None, "seed": 7}
batches = cseq.RaySequence(Digits, 1797, num_workers=args.workers, **options)
with batches.start_test() if args.here else batches.start():
    for epoch in range(args.epochs):
        print(f"epoch {epoch + 1}: loss {train_epoch(batches)!r}", flush=True)
