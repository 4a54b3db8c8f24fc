"""Balanced classes in a DataLoader: rare classes appear as often as others, on all ranks.

One sample in a hundred belongs to the rare class. Like torch's ``WeightedRandomSampler``,
`cseq.Weighted.balanced` draws about equally often from each class. Its position is in the loader's
state. A rank gets its part of each batch with ``BatchSampler(order, seed=…, shard=…)``.
Training can stop anywhere and continue there.

    python examples/balanced_classes.py [--epochs 3] [--workers 2] [--out build/balanced]
    python examples/balanced_classes.py --stop 40   # ends after 40 batches, as a killed job
    python examples/balanced_classes.py             # continues with batch 41, to the same result
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import cseq

SAMPLES, WIDTH = 4000, 20


class Points(Dataset):
    """Points of two overlapping classes. Few points belong to the second class."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.labels = (rng.random(SAMPLES) < 0.01).astype(np.int64)
        noise = rng.normal(size=(SAMPLES, WIDTH))
        self.points = (noise + 0.6 * self.labels[:, None]).astype("float32")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.points[index], self.labels[index]


@torch.no_grad()
def found(data: Points) -> str:
    """Return how many points of each class the model finds."""
    told = model(torch.from_numpy(data.points)).argmax(1).numpy()
    shares = [(told[data.labels == label] == label).mean() for label in (0, 1)]
    return f"finds {shares[0]:.0%} of the common class, {shares[1]:.0%} of the rare one"


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": loader.state_dict(), "sums": sums, "epoch": epoch}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="balanced classes in a DataLoader")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/balanced"))
args = parser.parse_args()

torch.manual_seed(7)
torch.set_num_threads(1)
train, held_out = Points(0), Points(1)
order = cseq.Weighted.balanced(train.labels)
print(order.describe())
loader = cseq.DataLoader(train, batch_size=50, sampler=order, num_workers=args.workers)
model = nn.Linear(WIDTH, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
# The loss and the number of batches of this epoch.
sums = [0.0, 0]
first = 0
args.out.mkdir(parents=True, exist_ok=True)
checkpoint = args.out / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint)
    loader.load_state_dict(saved["data"])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sums, first = saved["sums"], saved["epoch"]
    print(f"continues in epoch {first + 1}")

taken = 0
for epoch in range(first, args.epochs):
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
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
    print(f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.4f}")
    sums = [0.0, 0]
else:
    print(found(held_out))
