"""An HDF5 file, read row by row."""

import h5py
import numpy as np

import cseq

with h5py.File("images.h5", "w") as file:
    file.create_dataset(
        "images", data=np.arange(6400).reshape(100, 8, 8) % 255, chunks=(16, 8, 8)
    )
    file["labels"] = np.arange(100) % 10


class Images:
    def __init__(self):
        self.file = h5py.File("images.h5", "r")
        self.images, self.labels = self.file["images"], self.file["labels"][:]

    def __getitem__(self, indices):
        images = np.empty((len(indices), *self.images.shape[1:]), self.images.dtype)
        for row in np.argsort(indices):
            images[row] = self.images[indices[row]]
        return {"images": images, "labels": self.labels[indices]}

    def close(self):
        self.file.close()


with cseq.MPSequence(
    Images, 100, out_type="cpu", dtype=None, seed=1
).start() as batches:
    for batch in batches:
        print(batch["images"].shape, batch["labels"].dtype)
