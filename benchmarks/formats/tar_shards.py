"""7. Shards: JPEG images in tar files, read at random by their offsets."""

from __future__ import annotations

import io
import os
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import main, scaled
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import cseq

SHARDS = 4
IMAGES = scaled(2000, 20)
SIZE = scaled(128, 16)
BATCH = scaled(32, 4)


def make(folder):
    """Write the shards. A member's name is its label."""
    rng = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(Path(folder, f"{shard:04}.tar"), "w") as file:
            for number in range(shard, IMAGES, SHARDS):
                data = io.BytesIO()
                small = Image.fromarray(rng.integers(256, size=(12, 12, 3), dtype="uint8"))
                small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
                member = tarfile.TarInfo(f"{number:06}.jpg")
                member.size = len(data.getvalue())
                data.seek(0)
                file.addfile(member, data)


def scan(folder):
    """List (shard, offset, length, label) of all members. The trainer does this once."""
    found = []
    for path in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(path) as file:
            found += [(path, one.offset_data, one.size, int(one.name[:6])) for one in file]
    return found


class Shards:
    def __init__(self, members):
        self.members = members
        self.files = {path: os.open(path, os.O_RDONLY) for path, *_ in members}

    def __getitem__(self, indices):
        images = cseq.empty((len(indices), SIZE, SIZE, 3), np.uint8)
        labels = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            path, offset, length, labels[row] = self.members[index]
            data = os.pread(self.files[path], length, offset)
            images[row] = Image.open(io.BytesIO(data))
        return images, labels

    def close(self):
        for file in self.files.values():
            os.close(file)


def ours(kind, folder, options):
    """Decode images into shared memory."""
    members = scan(folder)
    return kind(partial(Shards, members), len(members), batch_size=BATCH, **options)


class ShardDataset(Dataset):
    def __init__(self, members):
        self.members = members
        self.files = {}

    def __len__(self):
        return len(self.members)

    def __getitem__(self, index):
        path, offset, length, label = self.members[index]
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        image = Image.open(io.BytesIO(os.pread(self.files[path], length, offset)))
        return torch.from_numpy(np.array(image)), label


def theirs(folder, options):
    """Each worker opens a shard at the first sample in it."""
    return DataLoader(ShardDataset(scan(folder)), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1])
