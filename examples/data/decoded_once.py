"""Image files that each machine decodes once and augments in each epoch."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import cseq


class Decoded:
    """The part that never changes: read, decode, resize to a short side of 64."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")
        scale = 64 / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)))
        return torch.from_numpy(np.array(image)), index % 2


class Augmented(torch.utils.data.Dataset):
    """The part that differs: crop and flip at random."""

    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        image, label = self.pictures[index]
        top, left, flip = torch.randint(0, 32, (3,)).tolist()
        image = image[top : top + 32, left : left + 32].permute(2, 0, 1) / 255
        return image.flip(2) if flip % 2 else image, label


if __name__ == "__main__":
    files = [Path(f"{number}.jpg") for number in range(40)]
    for number, file in enumerate(files):
        Image.fromarray(np.full((80, 100, 3), number * 6, "uint8")).save(file)
    pictures = cseq.cached(Decoded(files), "10 MB")
    options = {"batch_size": 10, "shuffle": True, "num_workers": 2, "rng": "batch"}
    loader = cseq.DataLoader(Augmented(pictures), **options)
    for epoch in range(3):
        print(epoch, sum(len(images) for images, labels in loader))
    print(pictures.stats().kept, "pictures are kept")
