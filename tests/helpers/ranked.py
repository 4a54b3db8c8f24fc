"""The global batches of an order, and each rank's part."""

import numpy as np

import cseq
from cseq.order.sampler import Sampler


class Rows(cseq.Order):
    """Rows of one to three samples: `cuts` begins with the first sample of each row."""

    name = "rows-of-tests"
    room = 3

    def __init__(self, samples, *, is_batch=False):
        self.samples, self.is_batch = samples, is_batch
        sizes = [1 + k % 3 for k in range(samples)]
        while sum(sizes) > samples:
            sizes.pop()
        sizes += [1] * (samples - sum(sizes))
        self.sizes, self.units = np.array(sizes), len(sizes)

    def read(self, seed, epoch, start, count):
        """Return the rows, in an order drawn from the seed."""
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(self.units)
        firsts = np.cumsum(self.sizes) - self.sizes
        chosen = order[start : start + count]
        rows = [np.arange(firsts[k], firsts[k] + self.sizes[k]) for k in chosen]
        return np.concatenate(rows), self.sizes[chosen]


def sampler(order, size, rank=0, ranks=1, seed=1):
    """Make the sampler that cuts an order into batches."""
    assert order.samples is not None
    shard = {"rank": rank, "world_size": ranks, "pad": False}
    return Sampler(order.samples, order, batch_size=size, seed=seed, drop_last=False, **shard)


def batches(cut, epoch=0, consumed=0):
    """Read the batches of an epoch from a given position."""
    source = cut.source(epoch, consumed)
    for k in range(len(source)):
        samples, sizes = source.samples(k)
        yield samples.tolist(), sizes.tolist()


def united(order, size, ranks, epoch=0, consumed=0):
    """Read the parts of all ranks, and join those that make a global batch."""
    cuts = [batches(sampler(order, size, k, ranks), epoch, consumed) for k in range(ranks)]
    while parts := [part for part in (next(cut, None) for cut in cuts) if part is not None]:
        yield parts


def units(order, seed, epoch):
    """Read the units of an epoch in one call."""
    samples, sizes = order.reader(seed).samples(epoch, 0, order.units)
    return [part.tolist() for part in np.split(samples, sizes.cumsum()[:-1])]
