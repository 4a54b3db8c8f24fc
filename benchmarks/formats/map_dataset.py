"""11. A map-style `Dataset` that is there already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from measuring import main, scaled
from torch.utils.data import DataLoader, Dataset

import cseq

IMAGES = scaled(10_000, 100)
BATCH = scaled(64, 16)


def make(folder):
    """Write small images."""
    shape = (IMAGES, 3, 32, 32)
    images = np.random.default_rng(0).integers(256, size=shape, dtype="uint8")
    np.save(Path(folder, "images.npy"), images)


class ImageDataset(Dataset):
    def __init__(self, folder):
        self.images = np.load(Path(folder, "images.npy"), mmap_mode="r")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index].copy())
        return image.float().div_(255), index


def ours(kind, folder, options):
    """One call turns it into a worker."""
    return kind(cseq.from_dataset(ImageDataset(folder)), batch_size=BATCH, **options)


def theirs(folder, options):
    """One call as well."""
    return DataLoader(ImageDataset(folder), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1])
