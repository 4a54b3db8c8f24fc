"""The loop pauses for an evaluation. The workers then run out of buffer space."""

import time

import cseq


class Images:
    def __getitem__(self, indices):
        time.sleep(0.02)
        return indices


def train(buffer=10, batches=440):
    with cseq.MTSequence(
        Images, batches, batch_size=1, out_type="null", num_workers=2, buffer=buffer
    ).start() as loader:
        for step, _ in enumerate(loader):
            time.sleep(0.5 if step % 55 == 5 else 0.006)
    return loader


AFTER = {"buffer": 64}


if __name__ == "__main__":
    print(train().advice())
