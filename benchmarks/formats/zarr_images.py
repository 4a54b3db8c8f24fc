"""4. A Zarr store (version 3), in chunks of 64 images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import zarr
from measuring import main, scaled
from torch.utils.data import DataLoader, Dataset

IMAGES = scaled(4096, 128)
SIZE = scaled(32, 8)
BATCH = scaled(64, 16)


def make(folder):
    """Write images and their numbers."""
    shape = (IMAGES, 3, SIZE, SIZE)
    group = zarr.open_group(Path(folder, "images.zarr"), mode="w")
    images = np.random.default_rng(0).integers(256, size=shape, dtype="uint8")
    group.create_array("images", data=images, chunks=(64, *shape[1:]))
    group.create_array("labels", data=np.arange(IMAGES))


class Images:
    def __init__(self, folder):
        group = zarr.open_group(Path(folder, "images.zarr"), mode="r")
        self.images, self.labels = group["images"], group["labels"][:]

    def __getitem__(self, indices):
        return self.images.oindex[indices], self.labels[indices]


def ours(kind, folder, options):
    """Use one orthogonal selection per batch."""
    return kind(partial(Images, folder), IMAGES, batch_size=BATCH, **options)


class ImageDataset(Dataset):
    def __init__(self, folder):
        group = zarr.open_group(Path(folder, "images.zarr"), mode="r")
        self.images, self.labels = group["images"], group["labels"][:]

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def theirs(folder, options):
    """Do not fork: the thread of Zarr's event loop does not survive a fork."""
    return DataLoader(ImageDataset(folder), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1], forks=False)
