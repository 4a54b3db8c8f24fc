"""The step takes longer than the batch: there is nothing to gain here."""

import time

import cseq


class Images:
    def __getitem__(self, indices):
        time.sleep(0.005)
        return indices


def train(num_workers=4, batches=250):
    with cseq.MPSequence(
        Images, 4 * batches, batch_size=4, out_type="null", num_workers=num_workers
    ).start() as loader:
        for _ in loader:
            time.sleep(0.015)
    return loader


# One worker is enough, and leaves three cores free.
AFTER = {"num_workers": 1}


if __name__ == "__main__":
    print(train().advice())
