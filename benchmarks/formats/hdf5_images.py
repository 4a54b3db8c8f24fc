"""3. An HDF5 file, in chunks of 16 images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import h5py
import numpy as np
from measuring import THEIRS, main, scaled
from torch.utils.data import DataLoader, Dataset

IMAGES = scaled(4096, 64)
SIZE = scaled(64, 8)
BATCH = scaled(64, 16)


def make(folder):
    """Write images and their numbers."""
    shape = (IMAGES, 3, SIZE, SIZE)
    with h5py.File(Path(folder, "images.h5"), "w") as file:
        images = np.random.default_rng(0).integers(256, size=shape, dtype="uint8")
        file.create_dataset("images", data=images, chunks=(16, *shape[1:]))
        file["labels"] = np.arange(IMAGES)


class Images:
    def __init__(self, folder):
        self.file = h5py.File(Path(folder, "images.h5"))

    def __getitem__(self, indices):
        rows, back = np.unique(indices, return_inverse=True)
        return self.file["images"][rows][back], self.file["labels"][rows][back]

    def close(self):
        self.file.close()


def ours(kind, folder, options):
    """One read a batch, in increasing order, as HDF5 wants it."""
    return kind(partial(Images, folder), IMAGES, batch_size=BATCH, **options)


class ImageDataset(Dataset):
    def __init__(self, folder):
        self.path = Path(folder, "images.h5")
        self.file = None

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["images"][index], self.file["labels"][index]


def theirs(folder):
    """The file is opened by each worker, at its first sample."""
    return DataLoader(ImageDataset(folder), BATCH, **THEIRS)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1])
