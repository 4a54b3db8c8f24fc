"""Another order with epochs of another size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq._draws import ResizedReader
from cseq.check import count
from cseq.order.base import MOST_SAMPLES, Order

if TYPE_CHECKING:
    from typing_extensions import Self

    from cseq._core import Reader

__all__ = ["Resized"]


class Resized(Order):
    """The epochs of another order, one after the other, cut into epochs of `epoch_size`.

    So a part of the data makes an epoch, and every sample comes before any comes again; or an epoch
    has the samples several times.

    Parameters
    ----------
    order : Order
    epoch_size : int
        Its units in an epoch.

    Examples
    --------
    >>> order = cseq.Resized(cseq.Sequential(5), 2)
    >>> [order.batches(2, seed=1, epoch=epoch) for epoch in range(3)]
    [[[0, 1]], [[2, 3]], [[4, 0]]]
    """

    name = "resized-v1"

    def __init__(self, order: Order, epoch_size: int) -> None:
        if not isinstance(order, Order):
            raise TypeError(f"order={order!r} is no cseq.Order; give one")
        size = count("epoch_size", epoch_size, 1, MOST_SAMPLES)
        self.order, self._size = order, size
        self.samples, self.room, self.is_batch = order.samples, order.room, order.is_batch
        self.is_seeded = order.is_seeded
        self.units = size if order.units else 0

    def over(self, samples: int) -> Self:
        """Return the order over so many samples."""
        order = self.order.over(samples)
        return self if order is self.order else type(self)(order, self._size)

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {"name": self.name, "units": self._size, "order": self.order.facts()}

    def resumed(self, facts: dict[str, Any], seed: int, epoch: int, consumed: int) -> Self:
        """Return the order that goes on where a state is."""
        inner = facts.get("order")
        if facts | {"order": None} != self.facts() | {"order": None} or not isinstance(inner, dict):
            return super().resumed(facts, seed, epoch, consumed)
        at = divmod(epoch * self._size + consumed, self.order.units)
        order = self.order.resumed(inner, seed, *at)
        return self if order is self.order else type(self)(order, self._size)

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        return ResizedReader(self.order.reader(seed), self._size)

    def describe(self) -> str:
        """Say what an epoch consists of."""
        return f"{self._size:,} units at a time of {self.order.describe()}"
