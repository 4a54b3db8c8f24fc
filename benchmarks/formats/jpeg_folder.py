"""1. JPEG files in an `ImageFolder`, with torchvision's augmentation to 224 × 224."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from measuring import main, scaled
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import cseq

IMAGES = scaled(2000, 20)
CLASSES = scaled(10, 20)
SIZE = scaled(224, 16)
BATCH = scaled(32, 4)


def make(folder):
    """Write images that are as smooth as photographs."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        small = Image.fromarray(rng.integers(256, size=(24, 24, 3), dtype="uint8"))
        path = Path(folder, f"{number % CLASSES:02}", f"{number:04}.jpg")
        path.parent.mkdir(exist_ok=True)
        small.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)


AUGMENTATION = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)


def ours(kind, folder, options):
    """Use the data set unchanged. The seed determines what its transforms draw."""
    dataset = ImageFolder(folder, transform=AUGMENTATION)
    return kind(cseq.from_dataset(dataset), batch_size=BATCH, **options)


def theirs(folder, options):
    """The same data set."""
    return DataLoader(ImageFolder(folder, transform=AUGMENTATION), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1], same=False)
