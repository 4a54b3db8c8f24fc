"""The data set of the recipes: two numbers and a class per sample."""

import numpy as np

import cseq


class Samples:
    """103 made-up samples: two numbers (the first is the index) and a class."""

    def __getitem__(self, indices):
        x = np.stack([indices, indices % 5], axis=1).astype("float32")
        return x, indices % 3


def batches(worker=Samples, **options):
    options = {"out_type": "cpu", "dtype": None, "seed": 7, **options}
    return cseq.MPSequence(worker, 103, num_workers=2, batch_size=8, **options)
