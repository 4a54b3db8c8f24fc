"""Orders of which another one takes its units: checked, numbered, read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq.order.base import Order, kind, read_passes, spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Read

MOST_SOURCES = 2**16 - 1
# Units, source by source: where each was among those asked for; which one it is in the endless
# sequence of its source's epochs, modulo 2**64 and in a row; and the source, the start and the stop
# of each part.
Drawn: TypeAlias = "tuple[Ints, NDArray[np.uint64], list[tuple[int, int, int]]]"


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


def firsts_of(sources: Mapping[str, Order]) -> list[int]:
    """Return the number of each source's first sample: they are numbered source after source."""
    return [0, *itertools.accumulate(order.samples or 0 for order in sources.values())][:-1]


def by_source(unit_sources: NDArray[np.uint16], draws: NDArray[np.uint64]) -> Drawn:
    """Sort units by source, where `unit_sources` has the source of each; see `Drawn`."""
    order = unit_sources.argsort(kind="stable")
    pairs = enumerate(itertools.pairwise([0, *np.bincount(unit_sources).cumsum().tolist()]))
    return order, draws.take(order), [(s, a, b) for s, (a, b) in pairs if a < b]


def read_from(readers: Sequence[Reader], firsts: Sequence[int], drawn: Drawn, room: int) -> Read:
    """Read units of several sources, of at most `room` samples."""
    order, draws, parts = drawn
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
    lengths, begins = np.concatenate(sizes), np.empty((2, len(order)), np.int64)
    begins[:, order] = lengths, lengths.cumsum() - lengths
    return values[spans(begins[1], begins[0])], begins[0]
