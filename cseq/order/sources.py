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
# Units sorted by source: the original position of each unit, its source, and its number in its
# source (over all epochs, modulo 2**64).
Drawn: TypeAlias = "tuple[Ints | slice, NDArray[np.uint16], NDArray[np.uint64]]"
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
                if self.room > 1:
                    sizes.append(np.ones(len(part), np.int64) if lengths is None else lengths)
            return ordered(drawn[0], np.concatenate(samples), sizes)

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
    return order, unit_sources.take(order), draws.take(order)


def passes(drawn: Drawn, sources: Mapping[str, Order]) -> Iterator[tuple[int, int, Ints]]:
    """Split units by source and by the source's epoch. Yield (source, epoch, units)."""
    _, unit_sources, draws = drawn
    sizes = np.array([order.units for order in sources.values()], np.uint64)
    epochs, units = np.divmod(draws, sizes.take(unit_sources))
    for start, stop in runs(unit_sources, epochs):
        yield int(unit_sources[start]), int(epochs[start]), units[start:stop].view(np.int64)


def ordered(order: Ints | slice, values: Ints, sizes: list[Ints]) -> Read:
    """Restore the original order of units. `sizes` is empty if each has one sample."""
    if isinstance(order, slice):
        return values, np.concatenate(sizes) if sizes else None
    if not sizes:
        mixed = np.empty_like(values)
        mixed[order] = values
        return mixed, None
    counts = np.concatenate(sizes)
    lengths, begins = np.empty((2, len(order)), np.int64)
    lengths[order], begins[order] = counts, counts.cumsum() - counts
    return values[spans(begins, lengths)], lengths
