"""Global batches of an order, as its ranks get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
from cseq.order import checkpoint
from cseq.order.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = tuple[list[int], list[int]]  # samples, and the sizes of the units


class Rows(cseq.Order):
    """Rows of one to three samples: `cuts` begins with the first sample of each row."""

    name = "rows-of-tests"
    room = 3

    def __init__(self, samples: int, *, is_batch: bool = False) -> None:
        self.samples, self.is_batch = samples, is_batch
        sizes = [1 + k % 3 for k in range(samples)]
        while sum(sizes) > samples:
            sizes.pop()
        sizes += [1] * (samples - sum(sizes))
        self.sizes, self.units = np.array(sizes), len(sizes)

    def read(self, seed: int, epoch: int, start: int, count: int) -> tuple[Any, Any]:
        """Return the rows in an order that is drawn from the seed."""
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(self.units)
        firsts = np.cumsum(self.sizes) - self.sizes
        chosen = order[start : start + count]
        rows = [np.arange(firsts[k], firsts[k] + self.sizes[k]) for k in chosen]
        return np.concatenate(rows), self.sizes[chosen]


def sampler(order: cseq.Order, size: int, rank: int = 0, ranks: int = 1, seed: int = 1) -> Sampler:
    """Make what cuts an order into batches."""
    assert order.samples is not None
    shard = {"rank": rank, "world_size": ranks, "pad": False}
    return Sampler(order.samples, order, batch_size=size, seed=seed, drop_last=False, **shard)


def batches(cut: Sampler, epoch: int = 0, consumed: int = 0) -> Iterator[Batch]:
    """Read the batches of an epoch, from a place on."""
    source = cut.source(epoch, consumed)
    for k in range(len(source)):
        samples, sizes = source.samples(k)
        yield samples.tolist(), sizes.tolist()


def united(
    order: cseq.Order, size: int, ranks: int, epoch: int = 0, consumed: int = 0
) -> Iterator[list[Batch]]:
    """Read the parts of all ranks: those of a global batch together."""
    cuts = [batches(sampler(order, size, k, ranks), epoch, consumed) for k in range(ranks)]
    while parts := [part for part in (next(cut, None) for cut in cuts) if part is not None]:
        yield parts


def units(order: cseq.Order, seed: int, epoch: int) -> list[list[int]]:
    """Read the units of an epoch, by one call."""
    samples, sizes = order.reader(seed).samples(epoch, 0, order.units)
    return [part.tolist() for part in np.split(samples, sizes.cumsum()[:-1])]


def cut(batch: Batch) -> list[list[int]]:
    """Return the units of a batch."""
    return [part.tolist() for part in np.split(np.array(batch[0]), np.cumsum(batch[1])[:-1])]


def check(order: cseq.Order, *, contiguous: bool = True, epoch: int = 2) -> None:
    """Check that any ranks get what one call reads, and that an epoch goes on after any unit.

    Units can be read in any order, batches may have another size, and the place may be a state's.
    """
    whole = units(order, 1, epoch)
    assert len(whole) == order.units
    for ranks in (1, 2, 3, 4, 7, 8):
        size = 1 if order.is_batch else 3
        there = 0
        for parts in united(order, size, ranks, epoch):
            got = [unit for part in parts for unit in cut(part)]
            expected = whole[there : there + len(got)]
            there += len(got)
            assert got == expected if contiguous else sorted(got) == sorted(expected)
        assert there == order.units
    reader = order.reader(1)
    for unit in np.random.Generator(np.random.PCG64(0)).permutation(order.units)[:300]:
        assert reader.samples(epoch, unit, 1)[0].tolist() == whole[unit]
        reader.samples(epoch + 1, unit, 1)
    for consumed in range(order.units):
        first = next(batches(sampler(order, 1 if order.is_batch else 2), epoch, consumed))
        assert cut(first) == whole[consumed : consumed + len(first[1])]
    cut_here = sampler(order, 1)
    state = checkpoint.make(cut_here, 1, epoch, 1)
    again, *place = checkpoint.load(state, sampler(order, 1), any_seed=False)
    assert ([epoch, 1], order.facts()) == (place, again.order.facts())
    assert units(order, 1, epoch + 1) != whole
    assert units(order, 2, epoch) != whole
    assert len(units(order, 2**64 - 1, 2**64 - 1)) == order.units
