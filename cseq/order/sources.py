"""The base class for orders that are composed of other orders."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cseq.order._readers import AHEAD, ArrayReader, gather
from cseq.order.base import Order, kind, runs, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Floats, Ints, Read, Works

MOST_SOURCES = 2**16 - 1
# Number of units to read ahead per source.
FEW = 64
# Units sorted by source: the original position of each unit, its number in its source (over all
# epochs, modulo 2**64), and the range of each source's units as (source, start, stop).
Drawn: TypeAlias = "tuple[Ints | slice, NDArray[np.uint64], list[tuple[int, int, int]]]"
Draws: TypeAlias = "Callable[[int, Ints], Drawn]"


class Composed(Order):
    """An order whose units come from other orders, its sources.

    Samples are numbered consecutively over all sources.
    """

    sources: dict[str, Order]

    def seeded(self, seed: int) -> list[tuple[Order, int]]:
        return [(order, seed) for order in self.sources.values()]

    def draws(self, seed: int) -> Draws:
        """Return a function that maps units of an epoch to units of the sources."""
        raise NotImplementedError

    def reader(self, seed: int) -> Reader:
        readers = [order.reader(own) for order, own in self.seeded(seed)]
        return self._reader(seed, readers, self.draws(seed))

    def measured(self, seed: int) -> tuple[Reader, Works]:
        pairs = [order.measured(own) for order, own in self.seeded(seed)]
        readers, draws = [reader for reader, _ in pairs], self.draws(seed)

        def works(epoch: int, units: Ints) -> Floats:
            drawn, mixed = draws(epoch, units), np.empty(len(units))
            parts = passes(drawn, self.sources)
            mixed[drawn[0]] = np.concatenate([pairs[s][1](e, part) for s, e, part in parts])
            return mixed

        return self._reader(seed, readers, draws), works

    def _reader(self, seed: int, readers: Sequence[Reader], draws: Draws) -> Reader:
        counts = [order.samples or 0 for order in self.sources.values()]
        firsts = [0, *itertools.accumulate(counts)]

        def read(epoch: int, units: Ints) -> Read:
            drawn = draws(epoch, units)
            samples, sizes = [], []
            for s, number, part in passes(drawn, self.sources):
                values, lengths = gather(readers[s], number, part)
                samples.append(values + firsts[s])
                sizes.append(np.ones(len(part), np.int64) if lengths is None else lengths)
            return ordered(drawn[0], np.concatenate(samples), np.concatenate(sizes), self.room)

        return ArrayReader(self, seed, read, ahead=AHEAD + FEW * len(readers))


def check_sources(sources: Mapping[str, Order]) -> dict[str, Order]:
    """Check that the sources have the same type of units, and return them as a dict."""
    if not hasattr(sources, "keys") or not sources:
        raise TypeError(f"sources={sources!r} is not a dict of orders; pass at least one order")
    orders = dict(sources)
    if len(orders) > MOST_SOURCES:
        raise ValueError(f"sources has {len(orders)} orders; pass at most {MOST_SOURCES}")
    first = next(iter(orders.values()))
    for name, order in orders.items():
        if not isinstance(name, str):
            raise TypeError(f"the source name {name!r} is not a string; pass strings as names")
        if not isinstance(order, Order):
            raise TypeError(f"sources[{name!r}]={order!r} is not a cseq.Order; pass one")
        if order.samples is None:
            raise ValueError(f"sources[{name!r}]={order!r} has no size; pass samples to the order")
        if kind(order) != kind(first):
            raise ValueError(
                f"the units of sources[{name!r}] are {kind(order)}, but the units of "
                f"sources[{next(iter(orders))!r}] are {kind(first)}; pass orders with units of the "
                "same type"
            )
    return orders


def by_source(unit_sources: NDArray[np.uint16], draws: NDArray[np.uint64]) -> Drawn:
    """Sort units by source."""
    order = unit_sources.argsort(kind="stable")
    pairs = enumerate(itertools.pairwise([0, *np.bincount(unit_sources).cumsum().tolist()]))
    return order, draws.take(order), [(s, a, b) for s, (a, b) in pairs if a < b]


def passes(drawn: Drawn, sources: Mapping[str, Order]) -> Iterator[tuple[int, int, Ints]]:
    """Split units by source and by the source's epoch. Yield (source, epoch, units)."""
    sizes = [order.units for order in sources.values()]
    for s, start, stop in drawn[2]:
        epochs, units = np.divmod(drawn[1][start:stop], np.uint64(sizes[s]))
        for first, last in runs(epochs):
            yield s, int(epochs[first]), units[first:last].view(np.int64)


def ordered(order: Ints | slice, values: Ints, sizes: Ints, room: int) -> Read:
    """Restore the original order of units of at most `room` samples each."""
    if isinstance(order, slice):
        return values, None if room == 1 else sizes
    if room == 1:
        mixed = np.empty_like(values)
        mixed[order] = values
        return mixed, None
    lengths, begins = np.empty((2, len(order)), np.int64)
    lengths[order], begins[order] = sizes, sizes.cumsum() - sizes
    return values[spans(begins, lengths)], lengths
