"""Train a small network on handwritten digits from torchdata's `DataLoader2`.

The digits (1797 images of 8 x 8 pixels) come with scikit-learn, so nothing is downloaded. Datapipes
shuffle them, divide them among worker processes, add noise, and batch them. cseq's
`MultiProcessingReadingService` runs the workers. Only the line that imports it refers to cseq.

    python examples/digits_dataloader2.py [--epochs 8] [--workers 2] [--seed 7]

The script needs no `if __name__ == '__main__':`, because worker processes never run it.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from cseq.adapters.torchdata import MultiProcessingReadingService

# isort: split
# This comes after cseq, which imports torchdata without its deprecation warning.
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe


def with_noise(digit: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Augment a digit. torchdata's loader seeds NumPy's generator in every worker."""
    image, label = digit
    noise = 0.1 * np.random.standard_normal(image.shape)  # noqa: NPY002 - the one that is seeded
    return image + noise.astype("float32"), label


def stack(digits: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch."""
    images, labels = zip(*digits, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def pipe_of(images: np.ndarray, labels: np.ndarray) -> IterDataPipe:
    """Shuffle, divide among workers, augment and batch."""
    digits = list(zip(images, labels.tolist(), strict=True))
    pipe = IterableWrapper(digits, deepcopy=False).shuffle(buffer_size=len(digits))
    return pipe.sharding_filter().map(with_noise).batch(32).map(stack)


def train_epoch(loader: DataLoader2) -> tuple[float, int]:
    """Train on one epoch. Return the mean loss and the number of digits."""
    losses, seen = [], 0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen += len(labels)
    return float(np.mean(losses)), seen


@torch.no_grad()
def accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the percentage of digits that the network reads correctly."""
    return 100 * float((network(torch.from_numpy(images)).argmax(1).numpy() == labels).mean())


parser = argparse.ArgumentParser(description="handwritten digits through DataLoader2")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()

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

service = MultiProcessingReadingService(num_workers=args.workers)
with DataLoader2(pipe_of(images[training], labels[training]), reading_service=service) as loader:
    loader.seed(args.seed)
    for epoch in range(args.epochs):
        loss, seen = train_epoch(loader)
        right = accuracy(images[held_out], labels[held_out])
        print(f"epoch {epoch + 1:2}: loss {loss:.3f}, held-out accuracy {right:.1f} %, {seen} seen")
