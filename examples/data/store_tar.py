"""Samples in tar shards of an object store, each fetched once per machine."""

import io
import tarfile
from pathlib import Path

import numpy as np

import cseq
from cseq import store

# A URL such as "s3://bucket/train/" works as well.
folder = Path("shards")
folder.mkdir()
for shard in range(3):
    with tarfile.open(folder / f"{shard:04}.tar", "w") as file:
        for number in range(20 * shard, 20 * shard + 20):
            image = io.BytesIO()
            np.save(image, np.full((4, 4), number, "uint8"))
            for name, data in ("npy", image.getvalue()), ("cls", b"%d" % number):
                member = tarfile.TarInfo(f"{number:06}.{name}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))

pictures = store.Tar(folder, cache="cache", limit="64 MB")


def decode(data):
    # For JPEG: np.asarray(PIL.Image.open(io.BytesIO(data)))
    return np.load(io.BytesIO(data))


class Decoded:
    def __getitem__(self, indices):
        samples = pictures[indices]
        images = np.stack([decode(sample["npy"]) for sample in samples])
        return images, np.array([int(sample["cls"]) for sample in samples])


order = pictures.order(window=2)
with cseq.MPSequence(
    Decoded, order=order, out_type="cpu", dtype=None, seed=1
).start() as batches:
    for images, labels in batches:
        print(images.shape, bool((images[:, 0, 0] == labels).all()))
