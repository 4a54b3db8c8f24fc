"""Images in Parquet, read by row group. A thread decodes each group about once per epoch for all.

Parquet decodes whole row groups, so a shuffled batch would decode one for nearly every image.
`cseq.Blocks` shuffles row groups, and images within windows of row groups. `functools.lru_cache`
keeps the row groups of two windows for all threads. Training can stop anywhere and continue there.

The images are synthetic: stripes in ten directions, as PNG-like bytes in a column.

    python examples/blocks_parquet.py [--epochs 3] [--workers 2] [--out build/parquet]
    python examples/blocks_parquet.py --stop 40     # ends after 40 batches, as a killed job
    python examples/blocks_parquet.py               # continues with batch 41, to the same result
"""

from __future__ import annotations

import argparse
import functools
import threading
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import cseq

# The size of an image, the images per row group, and the row groups per window.
SIZE, ROWS, WINDOW = 16, 50, 8


class RowGroups:
    """Decodes row groups and caches some: two windows, plus what `buffer` reaches ahead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Each thread needs its own file objects.
        self.files = threading.local()
        self.decoded = functools.lru_cache(3 * WINDOW)(self.decode)
        self.reads = 0

    def decode(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        self.reads += 1
        if not hasattr(self.files, "file"):
            self.files.file = pq.ParquetFile(self.path)
        table = self.files.file.read_row_group(number, use_threads=False)
        images = [
            np.frombuffer(zlib.decompress(value.as_py()), np.uint8).reshape(SIZE, SIZE)
            for value in table["image"]
        ]
        return np.stack(images), table["label"].to_numpy()

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = {
            "image": np.empty((len(indices), SIZE, SIZE), np.uint8),
            "label": np.empty(len(indices), np.int64),
        }
        numbers, rows = np.divmod(indices, ROWS)
        for number in np.unique(numbers):
            ours = numbers == number
            for array, decoded in zip(batch.values(), self.decoded(int(number)), strict=True):
                array[ours] = decoded[rows[ours]]
        return batch


def write_images(path: Path, count: int) -> None:
    """Write images and their labels."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    labels = rng.integers(10, size=count)
    images = []
    for label in labels:
        angle = np.pi * label / 10
        wave = np.sin(x * np.cos(angle) + y * np.sin(angle) + rng.uniform(0, 6))
        image = 128 + 50 * wave + rng.normal(0, 40, (SIZE, SIZE))
        images.append(zlib.compress(image.clip(0, 255).astype(np.uint8).tobytes()))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": labels}), path, row_group_size=ROWS)


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": manager.state_dict(), "sums": sums}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="images in Parquet, read by row groups")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--images", type=int, default=3000)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/parquet"))
args = parser.parse_args()

path, checkpoint = args.out / "images.parquet", args.out / "checkpoint.pt"
if not path.exists():
    write_images(path, args.images)
images = pq.read_metadata(path).num_rows

groups = RowGroups(path)
order = cseq.Blocks(ROWS, WINDOW)
print(order.over(images).describe())
manager = cseq.MTSequence(
    groups, images, args.workers, order=order, batch_size=32, out_type="cpu", dtype=None, seed=7
)

torch.manual_seed(7)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
# The loss and the number of batches of this epoch.
sums = [0.0, 0]
if checkpoint.exists():
    saved = torch.load(checkpoint)
    manager.load_state_dict(saved["data"])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sums = saved["sums"]
    print(f"continues in epoch {manager.epoch + 1}")

taken = 0
with manager.start() as batches:
    for epoch in range(manager.epoch, args.epochs):
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["image"][:, None] / 255), batch["label"])
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
        save()
    else:
        most = args.epochs * -(-images // ROWS) * args.workers
        print(f"each thread read row groups at most once per epoch: {groups.reads <= most}")
