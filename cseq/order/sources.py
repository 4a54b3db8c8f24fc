"""Orders whose units are units of others: checked, numbered, read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq.order._readers import AHEAD, ArrayReader, gather
from cseq.order.base import Order, kind, runs, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Floats, Ints, Read, Works

MOST_SOURCES = 2**16 - 1
# Units of each source that are worth a call of its reader.
FEW = 64
# Units, source by source: where each was among those asked for; which one it is in the endless
# sequence of its source's epochs, modulo 2**64 and in a row; and the source, the start and the stop
# of each part.
Drawn: TypeAlias = "tuple[Ints | slice, NDArray[np.uint64], list[tuple[int, int, int]]]"
Draws: TypeAlias = "Callable[[int, Ints], Drawn]"


class Composed(Order):
    """An order whose units are units of other orders, its sources.

    Samples are numbered source after source.
    """

    sources: dict[str, Order]

    def seed_of(self, seed: int, name: str) -> int:
        """Return the seed of a source."""
        return seed

    def draws(self, seed: int) -> Draws:
        """Return what says which units of which sources the units of an epoch are."""
        raise NotImplementedError

    def reader(self, seed: int) -> Reader:
        readers = [order.reader(self.seed_of(seed, name)) for name, order in self.sources.items()]
        return self._reader(seed, readers, self.draws(seed))

    def measured(self, seed: int) -> tuple[Reader, Works]:
        pairs = [order.measured(self.seed_of(seed, name)) for name, order in self.sources.items()]
        draws, sizes = self.draws(seed), [order.units for order in self.sources.values()]

        def works(epoch: int, units: Ints) -> Floats:
            order, numbers, parts = draws(epoch, units)
            mixed = np.empty(len(units))
            mixed[order] = np.concatenate(
                [
                    pairs[s][1](*epoch_units)
                    for s, start, stop in parts
                    for epoch_units in in_epochs(sizes[s], numbers[start:stop])
                ]
            )
            return mixed

        return self._reader(seed, [reader for reader, _ in pairs], draws), works

    def _reader(self, seed: int, readers: Sequence[Reader], draws: Draws) -> Reader:
        counts = [order.samples or 0 for order in self.sources.values()]
        firsts = [0, *itertools.accumulate(counts)]

        def read(epoch: int, units: Ints) -> Read:
            return read_from(readers, firsts, draws(epoch, units), self.room)

        return ArrayReader(self, seed, read, ahead=AHEAD + FEW * len(readers))


def check_sources(sources: Mapping[str, Order]) -> dict[str, Order]:
    """Check `sources`: orders by name, with units of one kind."""
    if not hasattr(sources, "keys") or not sources:
        raise TypeError(f"sources={sources!r}: give a dict of names and orders, one at least")
    orders = dict(sources)
    if len(orders) > MOST_SOURCES:
        raise ValueError(f"sources has {len(orders)} orders; give {MOST_SOURCES} at most")
    first = next(iter(orders.values()))
    for name, order in orders.items():
        if not isinstance(name, str):
            raise TypeError(f"sources has the name {name!r}; give strings: states have them")
        if not isinstance(order, Order):
            raise TypeError(f"sources[{name!r}]={order!r} is not a cseq.Order; give one")
        if order.samples is None:
            raise ValueError(f"sources[{name!r}]={order!r}: give it the number of its samples")
        if kind(order) != kind(first):
            raise ValueError(
                f"the units of sources[{name!r}] are {kind(order)}, but sources"
                f"[{next(iter(orders))!r}] has {kind(first)}; give orders with units of one kind"
            )
    return orders


def by_source(unit_sources: NDArray[np.uint16], draws: NDArray[np.uint64]) -> Drawn:
    """Sort units by source, where `unit_sources` has the source of each."""
    order = unit_sources.argsort(kind="stable")
    pairs = enumerate(itertools.pairwise([0, *np.bincount(unit_sources).cumsum().tolist()]))
    return order, draws.take(order), [(s, a, b) for s, (a, b) in pairs if a < b]


def read_from(readers: Sequence[Reader], firsts: Sequence[int], drawn: Drawn, room: int) -> Read:
    """Read units of several sources, of at most `room` samples."""
    order, draws, parts = drawn
    if len(readers) == 1:
        return read_passes(readers[0], draws)
    samples: list[NDArray[np.integer[Any]]] = []
    sizes: list[Ints] = []
    for s, start, stop in parts:
        part, size = read_passes(readers[s], draws[start:stop])
        samples.append(part + firsts[s])
        sizes.append(np.ones(stop - start, np.int64) if size is None else size)
    values = np.concatenate(samples)
    if room == 1:
        mixed = np.empty_like(values)
        mixed[order] = values
        return mixed, None
    lengths, begins = np.concatenate(sizes), np.empty((2, len(draws)), np.int64)
    begins[:, order] = lengths, lengths.cumsum() - lengths
    return values[spans(begins[1], begins[0])], begins[0]


def read_passes(reader: Reader, numbers: NDArray[np.uint64]) -> Read:
    """Read units of the endless sequence of a reader's epochs: numbers in a row, modulo 2**64."""
    parts = [gather(reader, epoch, units) for epoch, units in in_epochs(reader.units, numbers)]
    if len(parts) == 1:
        return parts[0]
    sizes = [size for _, size in parts if size is not None]
    return np.concatenate([part for part, _ in parts]), np.concatenate(sizes) if sizes else None


def in_epochs(size: int, numbers: NDArray[np.uint64]) -> Iterator[tuple[int, Ints]]:
    """Cut units of an endless sequence of epochs of some size: each epoch, and its units."""
    epochs, units = np.divmod(numbers, np.uint64(size))
    for start, stop in runs(epochs):
        yield int(epochs[start]), units[start:stop].view(np.int64)
