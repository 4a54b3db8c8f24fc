"""MDNC's first documented example: 512 indices come back as tensors, in order.

Prints `tensor([0.])` to `tensor([511.])`; with CUDA, `tensor([0.], device='cuda:0')` and so on.
"""

import cseq


class Indices:
    """An indexer without data: a batch is its indices."""

    def __getitem__(self, indices):
        return indices


manager = cseq.MPSequence(Indices, dset_size=512, batch_size=1, out_type="cuda", shuffle=False)

with manager.start() as batches:
    for batch in batches:
        print(batch)
