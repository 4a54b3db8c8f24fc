"""A loop that keeps its batches, which must be copied out of shared memory."""

import time

import numpy as np

import cseq


class Frames:
    def __getitem__(self, indices):
        return np.zeros((4, 512, 512), np.float32)


def train(keeps=300, batches=300):
    kept = []
    with cseq.MPSequence(
        Frames,
        4 * batches,
        batch_size=4,
        out_type="null",
        num_workers=2,
        memory_limit=2**28,
    ).start() as loader:
        for batch in loader:
            kept.append(batch)
            del kept[: len(kept) - keeps]
            time.sleep(0.002)
    return loader


AFTER = {"keeps": 10}


if __name__ == "__main__":
    print(train().advice())
