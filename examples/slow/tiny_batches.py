"""Batches that take a microsecond, in a loop that does nothing with them."""

import numpy as np

import cseq


def train(batch_size=1, batches=2_000_000):
    numbers = np.arange(batch_size * batches)
    with cseq.MPSequence(
        numbers, len(numbers), batch_size=batch_size, out_type="null", num_workers=1
    ).start() as loader:
        for _ in loader:
            pass
    return loader


AFTER = {"batch_size": 64, "batches": 200_000}


if __name__ == "__main__":
    print(train().advice())
