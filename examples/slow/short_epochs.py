"""Epochs of twelve batches: each begins with an empty buffer."""

import time

import cseq


class Images:
    def __getitem__(self, indices):
        time.sleep(0.03)
        return indices


def train(per_epoch=12, batches=480):
    with cseq.MTSequence(
        Images, per_epoch, batch_size=1, out_type="null", num_workers=6
    ).start() as loader:
        for _ in range(batches // per_epoch):
            for _ in loader:
                time.sleep(0.006)
    return loader


AFTER = {"per_epoch": 480}


if __name__ == "__main__":
    print(train().advice())
