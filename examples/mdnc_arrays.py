"""MDNC's second documented example: the same batches in test mode, as the indexer made them.

Prints `[0]` to `[511]`. Test mode starts no process or thread: the indexer runs in this process,
where a debugger can stop in it. `'numpy'` leaves out the conversion to tensors.
"""

import cseq


class Indices:
    """An indexer without data: a batch is its indices."""

    def __getitem__(self, indices):
        return indices


manager = cseq.MPSequence(Indices, dset_size=512, batch_size=1, out_type="cuda", shuffle=False)

with manager.start_test("numpy") as batches:
    for batch in batches:
        print(batch)
