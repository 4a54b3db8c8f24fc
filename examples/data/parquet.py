"""A Parquet table that threads share."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cseq

columns = {"x": np.arange(1000, dtype="float32"), "y": np.arange(1000) * 2}
pq.write_table(pa.table(columns), "table.parquet")


class Table:
    def __init__(self, path):
        self.table = pq.read_table(path).combine_chunks()

    def __getitem__(self, indices):
        rows = self.table.take(indices)
        return {name: rows[name].to_numpy() for name in rows.column_names}


table = Table("table.parquet")
with cseq.MTSequence(
    table, 1000, batch_size=500, out_type="cpu", dtype=None
).start() as batches:
    for batch in batches:
        print(batch["y"].dtype, bool((batch["x"] * 2 == batch["y"]).all()))
