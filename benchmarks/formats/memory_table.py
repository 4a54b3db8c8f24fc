"""10. A table in memory: a dict of 113 columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from measuring import main, scaled
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

ROWS = scaled(100_000, 100)
COLUMNS = 113
BATCH = scaled(512, 16)


def make(folder):
    """Write the table."""
    table = np.random.default_rng(0).random((COLUMNS, ROWS), dtype="float32")
    table[0] = np.arange(ROWS)
    np.save(Path(folder, "table.npy"), table)


def table_of(folder):
    """Read the table, as any program might."""
    table = np.load(Path(folder, "table.npy"))
    return {f"column {number}": column for number, column in enumerate(table)}


class Table:
    def __init__(self, columns):
        self.columns = columns

    def __getitem__(self, indices):
        return {name: column[indices] for name, column in self.columns.items()}


def ours(kind, folder, options):
    """Pass the indexer itself, which contains the table."""
    return kind(Table(table_of(folder)), ROWS, batch_size=BATCH, **options)


class TableDataset(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return ROWS

    def __getitem__(self, rows):
        return {name: column[rows] for name, column in self.columns.items()}


def theirs(folder, options):
    """Use a sampler of whole batches, so that each column is indexed once per batch."""
    dataset = TableDataset(table_of(folder))
    sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
    options = {name: value for name, value in options.items() if name != "shuffle"}
    return DataLoader(dataset, batch_size=None, sampler=sampler, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch["column 0"])
