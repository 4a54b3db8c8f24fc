"""6. An LMDB database: one record of 1 KiB a sample."""

from __future__ import annotations

from functools import partial

import lmdb
import numpy as np
import torch
from measuring import main, scaled
from torch.utils.data import DataLoader, Dataset

RECORDS = scaled(20_000, 100)
BATCH = scaled(128, 16)


def make(folder):
    """Write records of 255 floats, the first of which is the record's number."""
    with lmdb.open(folder, map_size=2**30) as database, database.begin(write=True) as records:
        rng = np.random.default_rng(0)
        for number in range(RECORDS):
            record = rng.random(255, dtype="float32")
            record[0] = number
            records.put(b"%08d" % number, record.tobytes())


class Records:
    def __init__(self, folder):
        self.database = lmdb.open(folder, readonly=True, lock=False, readahead=False)

    def __getitem__(self, indices):
        with self.database.begin(buffers=True) as records:
            found = [np.frombuffer(records.get(b"%08d" % index), "float32") for index in indices]
            return np.stack(found)

    def close(self):
        self.database.close()


def ours(kind, folder, options):
    """Use one transaction per batch."""
    worker = partial(Records, folder)
    # A process may open a database only once.
    if kind.__name__ == "MTSequence":
        worker = Records(folder)
    return kind(worker, RECORDS, batch_size=BATCH, **options)


class RecordDataset(Dataset):
    def __init__(self, folder):
        self.folder = folder
        self.database = None

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        if self.database is None:
            self.database = lmdb.open(self.folder, readonly=True, lock=False, readahead=False)
        with self.database.begin() as records:
            return torch.frombuffer(bytearray(records.get(b"%08d" % index)), dtype=torch.float32)


def theirs(folder, options):
    """Use one transaction per sample. Each worker opens the database at its first sample."""
    return DataLoader(RecordDataset(folder), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[:, 0])
