"""Train a small network on handwritten digits from a DataLoader.

The digits (1797 images of 8 x 8 pixels) come with scikit-learn, so nothing is downloaded. Worker
processes shift and scale them and add noise, with random numbers from Python, NumPy and torch. Only
the line that imports `DataLoader` refers to cseq. With torch's own loader, all losses are the same,
bit for bit.

    python examples/digits_dataloader.py [--epochs 8] [--workers 2] [--seed 7]
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

# To compare: from torch.utils.data import DataLoader
from cseq import DataLoader


class Digits(torch.utils.data.Dataset):
    """Digits that are changed at random when they are read."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = np.roll(self.images[index], random.randint(-1, 1), axis=2)
        image = image * np.random.uniform(0.8, 1.2)  # noqa: NPY002 - the one that loaders seed
        image = torch.from_numpy(image.astype("float32"))
        return image + 0.1 * torch.randn(image.shape), int(self.labels[index])


def train_epoch(batches: DataLoader) -> float:
    """Train on one epoch and return the mean loss."""
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the percentage of digits that the network reads correctly."""
    return 100 * float((network(torch.from_numpy(images)).argmax(1).numpy() == labels).mean())


parser = argparse.ArgumentParser(description="handwritten digits through a DataLoader")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()

# The workers' random numbers depend on this seed as well.
torch.manual_seed(args.seed)
# More threads do not make this small network faster.
torch.set_num_threads(1)
network = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)

data = load_digits()
images, labels = data.images[:, None].astype("float32") / 16, data.target
held_out, training = np.split(np.random.default_rng(args.seed).permutation(len(images)), [360])
digits = Digits(images[training], labels[training])
loader = DataLoader(digits, batch_size=32, shuffle=True, num_workers=args.workers)

for epoch in range(args.epochs):
    loss = train_epoch(loader)
    right = accuracy(images[held_out], labels[held_out])
    print(f"epoch {epoch + 1:2}: loss {loss:.3f} ({loss.hex()}), held-out accuracy {right:.1f} %")
