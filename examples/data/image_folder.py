"""An image folder with torchvision's augmentation."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import cseq

# Make two classes of pictures.
for number in range(40):
    path = Path("images", ["cat", "dog"][number % 2], f"{number}.jpg")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((64, 64, 3), number * 6, "uint8")).save(path)

augmentation = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(32, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)
worker = cseq.from_dataset(ImageFolder("images", transform=augmentation))
options = {"batch_size": 16, "out_type": "cpu", "seed": 1}
sums = []
for workers in (1, 3):
    manager = cseq.MPSequence(worker, num_workers=workers, **options)
    with manager.start() as batches:
        sums.append([float(images.sum()) for images, labels in batches])
        for images, labels in batches:
            print(workers, images.shape, images.dtype, labels.dtype)
print(sums[0] == sums[1])
