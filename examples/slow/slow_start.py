"""Each worker reads an index of all files before it can make a batch."""

import time

import numpy as np

import cseq


def read_index():
    time.sleep(2.5)
    return np.arange(1000)


class Files:
    def __init__(self):
        self.index = read_index()

    def __getitem__(self, indices):
        return self.index[indices]


def train(worker=Files, batches=250):
    with cseq.MPSequence(
        worker, 4 * batches, batch_size=4, out_type="null", num_workers=2
    ).start() as loader:
        for _ in loader:
            time.sleep(0.004)
    return loader


# The array is read once, before the start, and passed to all workers.
AFTER = {"worker": np.arange(1000)}


if __name__ == "__main__":
    print(train().advice())
