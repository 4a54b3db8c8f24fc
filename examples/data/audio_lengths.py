"""How much padding `cseq.Buckets` saves."""

import numpy as np

import cseq

lengths = np.random.default_rng(0).lognormal(4.6, 0.8, 10_000)
lengths = np.clip(lengths, 20, 800).astype(int)


def padding(batches):
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    return f"{1 - lengths.sum() / padded:.1%} padding in {len(batches)} batches"


print("shuffled:", padding(cseq.Shuffled(10_000).batches(32, seed=1)))
buckets = cseq.Buckets(lengths, budget=6000)
print("Buckets: ", padding(buckets.batches(seed=1)))
