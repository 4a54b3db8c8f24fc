"""Eight workers and a buffer of two batches: six workers wait for a free place."""

import time

import cseq


class Remote:
    def __getitem__(self, indices):
        # Ask a server.
        time.sleep(0.02)
        return indices


def train(buffer=2, batches=400):
    with cseq.MTSequence(
        Remote, 4 * batches, batch_size=4, out_type="null", num_workers=8, buffer=buffer
    ).start() as loader:
        for _ in loader:
            time.sleep(0.004)
    return loader


AFTER = {"buffer": 16}


if __name__ == "__main__":
    print(train().advice())
