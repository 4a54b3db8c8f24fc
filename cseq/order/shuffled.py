"""Orders of single samples, shuffled or sequential."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from cseq._core import ALGORITHMS, FEISTEL_LEAST, FeistelReader, RangeReader, TableReader
from cseq.check import choice, integer
from cseq.order.base import MOST_SAMPLES, Order

if TYPE_CHECKING:
    from typing_extensions import Self

    from cseq._core import Reader

TABLE, COMPUTED = ALGORITHMS


class Samples(Order):
    """An order of single samples, each once per epoch."""

    _facts: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, samples: int | None = None) -> None:
        if samples is not None:
            self.samples = self.units = integer("samples", samples, 0, MOST_SAMPLES)
            if not self.units:
                raise ValueError("samples=0 is below 1; pass at least 1, or omit an empty source")

    def over(self, samples: int) -> Self:
        if self.samples is not None:
            return super().over(samples)
        order = copy.copy(self)
        order.samples = order.units = samples
        return order


class Sequential(Samples):
    """All samples in their natural order, in every epoch.

    Parameters
    ----------
    samples : int, optional
        The number of samples. Defaults to the size of the data.

    Examples
    --------
    >>> cseq.Sequential(5).batches(2, seed=0)
    [[0, 1], [2, 3], [4]]
    """

    name = "sequential"
    is_seeded = False

    def reader(self, seed: int) -> Reader:
        return RangeReader(self.units, seed)

    def describe(self) -> str:
        return f"{self.units:,} samples in their natural order"


class Shuffled(Samples):
    """Every sample once per epoch, in a different random order in each epoch.

    Parameters
    ----------
    samples : int, optional
        The number of samples. Defaults to the size of the data.
    algorithm : 'feistel-v1' or 'fisher-yates-v1'
        'feistel-v1' needs no memory, and reads from any position without delay. 'fisher-yates-v1',
        which ``shuffle=True`` uses, needs 4 bytes per sample, and is faster for up to about 10**5
        samples. See docs/inside/shuffle.md.

    Examples
    --------
    >>> cseq.Shuffled(10**12).batches(4, seed=1, stop=1)
    [[149840989911, 350607560006, 533570895227, 841202933828]]
    """

    def __init__(self, samples: int | None = None, *, algorithm: str = COMPUTED) -> None:
        super().__init__(samples)
        self.name: str = choice("algorithm", algorithm, ALGORITHMS)

    def reader(self, seed: int) -> Reader:
        if self.name == COMPUTED and self.units >= FEISTEL_LEAST:
            return FeistelReader(self.units, seed)
        return TableReader(self.units, seed)

    def describe(self) -> str:
        return f"{self.units:,} samples, shuffled ({self.name})"
