"""Parquet files in an object store, each row group decoded once per machine."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cseq
from cseq import store

# A URL such as "s3://bucket/train/" works as well.
folder = Path("files")
folder.mkdir()
for part in range(3):
    x = np.arange(400 * part, 400 * part + 400)
    table = pa.table({"x": x.astype("float32"), "y": x * 2, "more": x})
    pq.write_table(table, folder / f"{part}.parquet", row_group_size=100)

rows = store.Parquet(folder, columns=["x", "y"], cache="cache", limit="64 MB")
with cseq.MPSequence(
    rows, order=rows.order(window=4), batch_size=500, out_type="cpu", dtype=None
).start() as batches:
    for batch in batches:
        x, y = batch["x"], batch["y"]
        print(y.dtype, len(x), bool((x * 2 == y).all()))
