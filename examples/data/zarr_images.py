"""A Zarr array, in threads."""

import numpy as np
import zarr

import cseq

group = zarr.open_group("images.zarr", mode="w")
images = np.arange(100, dtype="uint8")[:, None, None] * np.ones((1, 8, 8), "uint8")
group.create_array("images", data=images, chunks=(25, 8, 8))
group.create_array("labels", data=np.arange(100))


class Images:
    def __init__(self):
        group = zarr.open_group("images.zarr", mode="r")
        self.images, self.labels = group["images"], group["labels"][:]

    def __getitem__(self, indices):
        return self.images.oindex[indices], self.labels[indices]


with cseq.MTSequence(
    Images, 100, out_type="cpu", dtype=None, seed=1
).start() as batches:
    for images, labels in batches:
        print(images.shape, bool((images[:, 0, 0] == labels).all()))
