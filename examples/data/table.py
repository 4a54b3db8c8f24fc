"""A table in memory that threads share."""

import numpy as np

import cseq

# A data frame works as well.
frame = {"age": np.arange(1000), "income": np.arange(1000) * 10.0}


class Table:
    def __init__(self, frame):
        self.columns = {name: np.asarray(frame[name]) for name in frame}

    def __getitem__(self, indices):
        return {name: column[indices] for name, column in self.columns.items()}


table = Table(frame)
with cseq.MTSequence(
    table, 1000, batch_size=256, out_type="cpu", dtype=None
).start() as batches:
    for batch in batches:
        print(batch["age"].dtype, batch["income"].dtype, len(batch["age"]))
