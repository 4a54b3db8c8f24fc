"""An LMDB database, with one transaction per batch."""

import lmdb
import numpy as np

import cseq

with lmdb.open("records.lmdb") as database, database.begin(write=True) as records:
    for number in range(100):
        records.put(b"%08d" % number, np.full(8, number, "float32").tobytes())


class Records:
    def __init__(self, path):
        self.database = lmdb.open(path, readonly=True, lock=False, readahead=False)

    def __getitem__(self, indices):
        with self.database.begin(buffers=True) as records:
            found = [records.get(b"%08d" % index) for index in indices]
            return np.stack([np.frombuffer(one, "float32") for one in found])

    def close(self):
        self.database.close()


def worker():
    return Records("records.lmdb")


with cseq.MPSequence(
    worker, 100, out_type="cpu", dtype=None, seed=1
).start() as batches:
    numbers = [int(row[0]) for batch in batches for row in batch]
print(sorted(numbers) == list(range(100)))
