"""One worker that computes, and cores that are idle."""

import time

import numpy as np

import cseq


class Augmented:
    def __init__(self):
        self.image = np.ones((600, 600), np.float32)

    def __getitem__(self, indices):
        for _ in range(50):
            self.image = np.sqrt(self.image + 0.5)
        return indices


def train(num_workers=1, batches=400):
    with cseq.MPSequence(
        Augmented, 4 * batches, batch_size=4, out_type="null", num_workers=num_workers
    ).start() as loader:
        for _ in loader:
            # A step on a GPU uses no core.
            time.sleep(0.004)
    return loader


AFTER = {"num_workers": 2}


if __name__ == "__main__":
    print(train().advice())
