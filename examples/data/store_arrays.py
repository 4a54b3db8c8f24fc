"""Arrays in shards of an object store, each fetched once per machine."""

from pathlib import Path

import numpy as np

import cseq
from cseq import store

# A URL such as "s3://bucket/train/" works as well.
folder = Path("shards")
folder.mkdir()
for shard in range(6):
    numbers = np.arange(50) + 50 * shard
    np.save(folder / f"{shard:04}.npy", np.repeat(numbers, 16).reshape(50, 4, 4))

arrays = store.Npy(folder, cache="cache", limit="64 MB")
with cseq.MPSequence(
    arrays, order=arrays.order(window=2), out_type="cpu", dtype=None, seed=1
).start() as batches:
    for epoch in range(2):
        seen = [int(row[0, 0]) for batch in batches for row in batch]
        print(epoch, len(seen), sorted(seen) == list(range(300)))
print(arrays.stats().fetched, "shards were fetched")
