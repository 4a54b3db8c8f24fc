"""Six workers that compute on two cores: each waits for the others."""

import time

import numpy as np

import cseq


class Augmented:
    def __init__(self):
        self.image = np.ones((600, 600), np.float32)

    def __getitem__(self, indices):
        for _ in range(30):
            self.image = np.sqrt(self.image + 0.5)
        return indices


def train(num_workers=6, batches=800):
    with cseq.MPSequence(
        Augmented, 4 * batches, batch_size=4, out_type="null", num_workers=num_workers
    ).start() as loader:
        for _ in loader:
            time.sleep(0.001)
    return loader


AFTER = {"num_workers": 2}


if __name__ == "__main__":
    print(train().advice())
