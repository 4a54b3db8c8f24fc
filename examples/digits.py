"""Train a small network on handwritten digits that worker processes read from an HDF5 file.

The digits (1797 images of 8 x 8 pixels) come with scikit-learn, so nothing is downloaded. The
script writes them to an HDF5 file once and trains on four fifths of them with `cseq.MPSequence`. It
shows how well the network reads the others, how long training waited for data, and that the workers
delivered exactly the batches that the loop gets without workers (`start_test`). A report says why
training waited for data and what would help.

    python examples/digits.py [--epochs 12] [--workers 2] [--seed 7] [--out build/digits]

The script needs no `if __name__ == '__main__':`, because worker processes never run it. They
receive the class `Digits` and import only what that class uses, which does not include torch.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import cseq

try:
    from tqdm import tqdm
except ImportError:
    # Without tqdm, there is no bar, only the line that every epoch prints.
    tqdm = None


class Digits:
    """The indexer: each worker makes one, so each worker opens the file for itself."""

    def __init__(self, path: Path, noise: float = 0.0) -> None:
        self.file = h5py.File(path, "r")
        self.noise = noise

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        # h5py requires increasing row numbers.
        rows, back = np.unique(indices, return_inverse=True)
        images = self.file["images"][rows][back].astype("float32") / 16
        # cseq.rng() depends on the batch, not on the worker that makes it.
        if self.noise:
            images += self.noise * cseq.rng().standard_normal(images.shape, dtype="float32")
        return {"images": images[:, None], "labels": self.file["labels"][rows][back]}

    def close(self) -> None:
        """Close the file when the worker ends."""
        self.file.close()


def write_digits(path: Path) -> None:
    """Write all digits to `path`, first under another name, so that no partial file is used."""
    digits = load_digits()
    with h5py.File(path.with_suffix(".part"), "w") as file:
        file["images"] = digits.images.astype("uint8")
        file["labels"] = digits.target.astype("int64")
    path.with_suffix(".part").replace(path)


def train_epoch(batches: cseq.MSequence, title: str) -> tuple[float, float, float, str]:
    """Train on one epoch. Return its mean loss, the seconds it took and waited, and its hash.

    The seconds come from `stats`, which count from the first batch and thus exclude the start.
    """
    losses, digest, before = [], hashlib.sha256(), batches.stats()
    bar = tqdm(batches, desc=title, unit="batch", leave=False, disable=None) if tqdm else batches
    for batch in bar:
        digest.update(content(batch))
        loss = nn.functional.cross_entropy(network(batch["images"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    epoch = batches.stats().since(before)
    return float(np.mean(losses)), epoch.elapsed, epoch.loop_waited, digest.hexdigest()


def test_mode_hash(batches: cseq.MSequence, epoch: int) -> str:
    """Hash an epoch that this process makes without workers."""
    digest = hashlib.sha256()
    # You can choose any epoch: its order does not depend on earlier ones.
    with batches.start_test():
        batches.set_epoch(epoch)
        for batch in batches:
            digest.update(content(batch))
    return digest.hexdigest()


def content(batch: dict[str, torch.Tensor]) -> bytes:
    """Return all bytes of a batch."""
    return b"".join(batch[name].numpy().tobytes() for name in ("images", "labels"))


@torch.no_grad()
def accuracy(batches: cseq.MSequence) -> float:
    """Return the percentage of digits that the network reads correctly."""
    correct = sum((network(b["images"]).argmax(1) == b["labels"]).sum().item() for b in batches)
    return correct / batches.dset_size


def draw(history: list[tuple[float, float, float]], path: Path) -> None:
    """Draw the loss, accuracy and waiting time of all epochs, one small chart for each."""
    # This draws to a file and needs no screen.
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = "training loss", "accuracy on held-out digits (%)", "time waited for data (%)"
    for axis, title, values in zip(axes, titles, zip(*history, strict=True), strict=True):
        axis.plot(range(1, len(values) + 1), values, marker="o", markersize=4)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(top=100)
    axes[2].set_ylim(0, 100)
    figure.savefig(path, dpi=120)


parser = argparse.ArgumentParser(description="handwritten digits through cseq.MPSequence")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int, default=7)
parser.add_argument("--out", type=Path, default=Path("build/digits"))
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
data, picture = args.out / "digits.h5", args.out / "digits.png"
report = args.out / "loader.html"
if not data.exists():
    write_digits(data)

torch.manual_seed(args.seed)
# More threads do not make this small network faster.
torch.set_num_threads(1)
network = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)

# The size may be a list of indices, so a split is two lists.
# With dtype=None, labels stay integers.
held_out, training = np.split(cseq.permutation(1797, seed=args.seed), [360])
options = {"out_type": "cpu", "dtype": None, "seed": args.seed}
train = cseq.MPSequence(
    functools.partial(Digits, data, noise=0.1), training, num_workers=args.workers, **options
)
test = cseq.MPSequence(
    functools.partial(Digits, data), held_out, num_workers=1, shuffle=False, **options
)

history, times = [], []
with train.start(), test.start():
    for epoch in range(args.epochs):
        loss, spent, waited, digest = train_epoch(train, f"epoch {epoch + 1}")
        history.append((loss, 100 * accuracy(test), 100 * waited / spent))
        times.append((spent, waited))
        print(
            f"epoch {epoch + 1:2}: loss {loss:.3f}, held-out accuracy {history[-1][1]:.1f} %, "
            f"{train.dset_size / spent:.0f} samples/s, waited {waited / spent:.1%} of the time"
        )

draw(history, picture)
train.report(report)
seconds, waits = np.sum(times, axis=0)
print(f"all epochs: {args.epochs * train.dset_size / seconds:.0f} samples per second")
print(f"waited for data: {waits / seconds:.1%} of the time")
print(f"before the first batch: {train.stats().start_waited:.1f} s, to start the workers")
repeated = test_mode_hash(train, args.epochs - 1)
print(f"hash of all batches of the last epoch\n  start()      {digest}\n  start_test() {repeated}")
print(f"picture of the run: {picture}")
print(f"why training waited for data: {report}")
if repeated != digest:
    sys.exit("the workers delivered different batches than test mode; please report this")
