"""The shards of a WebDataset, read by index."""

import io
import tarfile
from pathlib import Path

import numpy as np

import cseq

for shard in range(3):
    with tarfile.open(f"shard-{shard:06}.tar", "w") as file:
        for number in range(shard, 60, 3):
            array = io.BytesIO()
            np.save(array, np.full((4, 4), number, "uint8"))
            members = {"npy": array.getvalue(), "cls": b"%d" % (number % 10)}
            for kind, data in members.items():
                member = tarfile.TarInfo(f"{number:06}.{kind}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))

samples = {}
for path in map(str, sorted(Path().glob("*.tar"))):
    with tarfile.open(path) as file:
        for member in file:
            key, _, kind = member.name.partition(".")
            place = slice(member.offset_data, member.offset_data + member.size)
            samples.setdefault((path, key), {})[kind] = place
samples = [(path, places) for (path, key), places in samples.items()]


class Samples:
    def __init__(self):
        self.files = {path: np.memmap(path, mode="r") for path, places in samples}

    def read(self, index, kind):
        path, places = samples[index]
        return self.files[path][places[kind]].tobytes()

    def __getitem__(self, indices):
        images = [np.load(io.BytesIO(self.read(index, "npy"))) for index in indices]
        labels = [int(self.read(index, "cls")) for index in indices]
        return np.stack(images), np.array(labels)


with cseq.MPSequence(
    Samples, len(samples), out_type="cpu", dtype=None, seed=1
).start() as batches:
    for images, labels in batches:
        print(images.shape, bool((images[:, 0, 0] % 10 == labels).all()))
