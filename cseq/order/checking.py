"""Validation of custom orders."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cseq.order.base import Order


def check_order(order: Order, *, seed: int = 1, epoch: int = 1, most: int = 10_000) -> None:
    """Check that a custom order satisfies the `cseq.Order` contract.

    Parameters
    ----------
    order : Order
    seed, epoch : int
        The seed and the epoch to read. Epoch 0 is always read as well.
    most : int
        The number of units to read at each end of an epoch.

    Raises
    ------
    ValueError
        If the order violates the contract.

    Examples
    --------
    >>> cseq.testing.check_order(cseq.Shuffled(1000))
    """
    shown = type(order).__name__
    if not order.name or order.samples is None or min(order.samples, order.units, order.room) < 1:
        raise ValueError(
            f"{shown} has name={order.name!r}, samples={order.samples!r}, units={order.units!r}, "
            f"room={order.room!r}; set a name, and set the others to at least 1"
        )
    facts = order.facts()
    if json.loads(json.dumps(facts)) != facts:
        raise ValueError(f"{shown}.facts() returned {facts!r}; return values that JSON preserves")
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002 - checks the global one
    reader, units = order.reader(seed), order.units
    for first in {0, max(0, units - most)}:
        count = min(most, units - first)
        samples, sizes = reader.samples(epoch, first, count)
        if not 0 <= samples.min() <= samples.max() < order.samples:
            raise ValueError(
                f"{shown} returned samples from {samples.min()} to {samples.max()}; return only "
                f"samples in [0, {order.samples})"
            )
        ends = np.concatenate([[0], sizes.cumsum()])
        reader.samples(0, first, count)
        choose = random.Random(0)
        cuts = sorted({0, count, *(choose.randrange(count + 1) for _ in range(20))})
        pieces = list(itertools.pairwise(cuts))
        choose.shuffle(pieces)
        for start, stop in pieces:
            piece, lengths = reader.samples(epoch, first + start, stop - start)
            whole = samples[ends[start] : ends[stop]]
            if not (np.array_equal(piece, whole) and np.array_equal(lengths, sizes[start:stop])):
                raise ValueError(
                    f"units [{first + start}, {first + stop}) of {shown} are {piece.tolist()} "
                    f"when read alone, but {whole.tolist()} when read with other units; the result "
                    "of read() may depend only on its arguments"
                )
    if (random.getstate(), str(np.random.get_state())) != before:  # noqa: NPY002
        raise ValueError(f"{shown} draws from a global generator; create one from the seed instead")
