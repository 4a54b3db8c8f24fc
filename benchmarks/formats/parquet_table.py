"""5. A Parquet file of 113 columns, in row groups of 20 000."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measuring import main, scaled
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

ROWS = scaled(100_000, 100)
COLUMNS = 113
BATCH = scaled(512, 16)


def make(folder):
    """Write the table."""
    columns = np.random.default_rng(0).random((COLUMNS, ROWS), dtype="float32")
    columns[0] = np.arange(ROWS)
    table = pa.table({f"column {number}": column for number, column in enumerate(columns)})
    pq.write_table(table, Path(folder, "table.parquet"), row_group_size=20_000)


class Table:
    def __init__(self, folder):
        self.table = pq.read_table(Path(folder, "table.parquet")).combine_chunks()

    def __getitem__(self, indices):
        rows = self.table.take(indices)
        return {name: rows[name].to_numpy() for name in rows.column_names}


def ours(kind, folder, options):
    """Each worker reads the table. Threads with one indexer share it."""
    return kind(partial(Table, folder), ROWS, batch_size=BATCH, **options)


class TableDataset(Dataset):
    def __init__(self, folder):
        self.table = pq.read_table(Path(folder, "table.parquet")).combine_chunks()

    def __len__(self):
        return ROWS

    def __getitem__(self, indices):
        rows = self.table.take(indices)
        return {name: torch.tensor(rows[name].to_numpy()) for name in rows.column_names}


def theirs(folder, options):
    """Use a sampler of whole batches. The trainer reads the table and passes it to the workers."""
    dataset = TableDataset(folder)
    sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
    options = {name: value for name, value in options.items() if name != "shuffle"}
    return DataLoader(dataset, batch_size=None, sampler=sampler, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch["column 0"])
