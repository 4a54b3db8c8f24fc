"""Batches that take a microsecond, in a loop that does nothing with them."""

import cseq
import numpy as np


def train(batch_size=1, samples=400_000):
    numbers = np.arange(samples)
    with cseq.MPSequence(
        numbers, samples, batch_size=batch_size, out_type="null", num_workers=1
    ).start() as loader:
        for _ in loader:
            pass
    return loader


AFTER = {"batch_size": 64}
