"""Two workers that read from a slow disk, and a loop that needs five."""

import time

import cseq


class Images:
    def __getitem__(self, indices):
        # Read a file.
        time.sleep(0.02)
        return indices


def train(num_workers=2, batches=400):
    with cseq.MPSequence(
        Images, 4 * batches, batch_size=4, out_type="null", num_workers=num_workers
    ).start() as loader:
        for _ in loader:
            # Make a training step.
            time.sleep(0.005)
    return loader


AFTER = {"num_workers": 5}


if __name__ == "__main__":
    print(train().advice())
