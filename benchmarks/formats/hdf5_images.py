"""3. An HDF5 file, in chunks of 16 images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import h5py
import numpy as np
from measuring import main, scaled
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
        self.images, self.labels = self.file["images"], self.file["labels"][:]

    def __getitem__(self, indices):
        images = np.empty((len(indices), *self.images.shape[1:]), self.images.dtype)
        for row in np.argsort(indices):
            images[row] = self.images[indices[row]]
        return images, self.labels[indices]

    def close(self):
        self.file.close()


def ours(kind, folder, options):
    """Read row by row in file order, because h5py is slow at lists of rows in chunks."""
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


def theirs(folder, options):
    """Each worker opens the file at its first sample."""
    return DataLoader(ImageDataset(folder), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1])
