"""Groups the units of an order into batches and divides the batches among ranks.

Global batch ``t`` covers positions ``[t * G, (t + 1) * G)``, where ``G = batch_size * world_size``,
and every rank gets a contiguous part of each global batch. With ``batch_size=3`` and
``world_size=2``, 20 units are divided like this::

    position  0  1  2  3  4  5 │ 6  7  8  9 10 11 │12 13 14 15 16 17 │18 19
    rank      0  0  0  1  1  1 │ 0  0  0  1  1  1 │ 0  0  0  1  1  1 │ 0  1
              global batch 0   │ global batch 1   │ global batch 2   │ tail

`drop_last` omits the tail. Otherwise, its ``m`` units are divided into `world_size` contiguous
parts of ``ceil(m / world_size)`` units, padded with units from the start of the epoch (at most
``world_size - 1``). All ranks have the same number of batches, and their batches have the same
sizes. Without `pad`, parts may differ by one unit, and some ranks may have one batch fewer.
"""

from __future__ import annotations

import functools
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cseq.check import integer, integers
from cseq.order._readers import AHEAD, ArrayReader, fingerprint, gather
from cseq.order._source import OrderSource
from cseq.order.base import MOST_SAMPLES, MOST_SEED, kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Order, Read

# Log each message once.
warn = functools.cache(logging.getLogger("cseq").warning)

# Number of units to count tokens for at a time.
COUNTED = 2**20


class Data(Protocol):
    """Data that can count the tokens from each of its sources."""

    fingerprints: dict[str, int]

    def token_sums(self, order: Order, seed: int) -> Callable[[int, Ints], dict[str, int]]:
        """Return a function that counts the tokens from each source in the given units."""


class Cut(NamedTuple):
    """One rank's batches for the rest of an epoch.

    `_source.pyx` has a struct with the same fields.

    Attributes
    ----------
    first : int
        The index of batch 0 in the whole epoch.
    batches, full : int
        The number of batches, and the number of full batches, which come first.
    start, stride : int
        The position of batch 0, and the distance in units from one batch to the next.
    size : int
        The number of units in a full batch.
    part_start, part : int
        The position and size of the batch after the full batches, if any.
    consumed : int
        The number of units that all ranks consumed before batch 0.
    """

    first: int
    batches: int
    full: int
    start: int
    stride: int
    size: int
    part_start: int
    part: int
    consumed: int


@dataclass(eq=False, repr=False)
class Sampler:
    """Divides an epoch's units into batches for one rank.

    Parameters
    ----------
    dset_size : int or sequence of int
        The number of samples, or the sample indices (not copied). The attribute `dset_size` is
        always the number of samples.
    batch_size : int
        The number of units in a batch on each rank.
    pad : bool
        If False, no units are repeated, and the last batch may differ in size between ranks.
    repeat : int
        The number of epochs that each `OrderSource` covers.
    data : Data, optional
        Counts the tokens from each source, to be stored in states.

    Attributes
    ----------
    indices : numpy.ndarray or None
        The sample indices, if they were passed.
    length : int
        The number of batches per epoch on this rank.
    """

    dset_size: int
    order: Order
    _: KW_ONLY
    batch_size: int
    seed: int
    drop_last: bool
    rank: int = 0
    world_size: int = 1
    pad: bool = True
    repeat: int = 1
    data: Data | None = None

    def __post_init__(self) -> None:
        self.dset_size, self.indices = _samples(self.dset_size)
        self.order = self.order.over(self.dset_size)
        self.batch_size = integer("batch_size", self.batch_size)
        if hasattr(self.seed, "initial_seed"):
            raise TypeError(
                f"seed={self.seed!r} is a generator; pass an integer, such as its initial_seed()"
            )
        self.seed = integer("seed", self.seed, 0, MOST_SEED)
        self.world_size = integer("world_size", self.world_size)
        self.rank = integer("rank", self.rank, 0, self.world_size - 1)
        # Number of units in a global batch.
        self._stride = self.batch_size * self.world_size
        self._reader = self._make_reader()
        self.length = self.cut_at(0).batches
        if not self.length and self.drop_last and self.order.units:
            warn(
                "an epoch has no batches: drop_last=True leaves out all %d %s, because a global "
                "batch has %d; pass a smaller batch_size, or drop_last=False",
                self.order.units,
                kind(self.order),
                self._stride,
            )

    def changed(self, **fields: Any) -> Sampler:
        samples: Any = self.dset_size if self.indices is None else self.indices
        return replace(self, dset_size=samples, **fields)

    def _make_reader(self) -> Reader:
        reader, indices = self.order.reader(self.seed), self.indices
        if indices is None:
            return reader

        def read(epoch: int, units: Ints) -> Read:
            samples, sizes = gather(reader, epoch, units)
            return indices[samples], sizes

        if isinstance(reader, ArrayReader):
            return ArrayReader(reader, self.seed, read, reader.share, reader.ahead)
        return ArrayReader(reader, self.seed, read, None, AHEAD)

    @cached_property
    def facts(self) -> str:
        return json.dumps(self.order.facts())

    @cached_property
    def fingerprint(self) -> int | None:
        """A hash of the sample indices, or None if no indices were passed."""
        return None if self.indices is None else fingerprint(self.indices)

    @property
    def words(self) -> int:
        """The maximum number of words in a ticket."""
        room = self.order.room
        return min(self.batch_size, self.order.units) * (room + 1 if room > 1 else 1)

    def source(self, epoch: int, consumed: int = 0, *, own: bool = False) -> OrderSource:
        """Return the batches of an epoch, and of the following epochs if `repeat` exceeds 1.

        The units after `consumed` are divided from scratch, so `batch_size` and `world_size` may
        have changed. If `own` is set, the source gets its own reader.
        """
        reader = self._make_reader() if own else self._reader
        number = integer("epoch", epoch, 0, MOST_SEED)
        cut, later = self.cut_at(consumed)._asdict(), self.cut_at(0)._asdict()
        return OrderSource(reader, number, cut, later, self.repeat - 1)

    def cut_at(self, consumed: int) -> Cut:
        units = self.order.units
        consumed = integer("consumed", consumed, 0, units)
        full, tail = divmod(units - consumed, self._stride)
        part, part_start = self._share(tail)
        return Cut(
            first=consumed // self._stride,
            batches=full + (part > 0),
            full=full,
            start=consumed + self.rank * self.batch_size,
            stride=self._stride,
            size=self.batch_size,
            part_start=units - tail + part_start,
            part=part,
            consumed=consumed,
        )

    @cached_property
    def _sums(self) -> Callable[[int, Ints], dict[str, int]]:
        assert self.data is not None
        return self.data.token_sums(self.order, self.seed)

    def tokens(self, epoch: int, start: int, stop: int) -> dict[str, int]:
        """Count the tokens from each source in units [start, stop) of an epoch."""
        counts: Counter[str] = Counter()
        for first in range(start, stop, COUNTED):
            counts.update(self._sums(epoch, np.arange(first, min(first + COUNTED, stop))))
        return counts

    def _share(self, tail: int) -> tuple[int, int]:
        """Return the size and the offset of this rank's part of the tail."""
        if self.drop_last:
            return 0, 0
        if self.pad:
            part = -(-tail // self.world_size)
            return part, self.rank * part
        size, more = divmod(tail, self.world_size)
        return size + (self.rank < more), self.rank * size + min(self.rank, more)

    def end(self, consumed: int = 0) -> int:
        """Return how many units all ranks have consumed by the end of an epoch.

        With `drop_last`, this depends on `consumed`, the position at which the epoch started.
        """
        left_out = (self.order.units - consumed) % self._stride if self.drop_last else 0
        return self.order.units - left_out

    @property
    def units(self) -> int:
        """The number of units per epoch on this rank."""
        full, tail = divmod(self.order.units, self._stride)
        return full * self.batch_size + self._share(tail)[0]


def _samples(dset_size: object) -> tuple[int, NDArray[np.integer[Any]] | None]:
    """Return the number of samples, and the indices if they were passed."""
    if isinstance(dset_size, Iterator):
        raise TypeError(
            f"dset_size is a {type(dset_size).__name__}, which has no length; pass the number of "
            "samples, or numpy.fromiter(dset_size, int) if it yields their indices"
        )
    if isinstance(dset_size, (bool, np.bool_, str, bytes)) or not hasattr(dset_size, "__len__"):
        return integer("dset_size", dset_size, 1, MOST_SAMPLES), None
    if not _holds_numbers(dset_size):
        raise TypeError(
            f"dset_size is a {type(dset_size).__name__}; pass its length, or a one-dimensional "
            "array of sample indices"
        )
    indices = integers("dset_size", dset_size, most=MOST_SAMPLES)
    if indices.dtype == np.uint64 and indices.max() >= 2**63:
        raise ValueError(f"dset_size contains the index {indices.max()}; pass indices below 2**63")
    indices.flags.writeable = False
    return len(indices), indices


def _holds_numbers(indices: object) -> bool:
    """Return True for an array of numbers rather than a data set.

    Given a data set, numpy would read every sample, and never stop if no index raises IndexError.
    """
    if isinstance(indices, (list, tuple)):
        return (
            not indices
            or not hasattr(type(indices[0]), "__getitem__")
            or _holds_numbers(indices[0])
        )
    return isinstance(indices, (range, array, memoryview)) or hasattr(indices, "__array__")


class RankSampler:
    """The type of `MSequence.sampler`, for frameworks that call its methods."""

    __slots__ = ("_count", "set_epoch")

    def __init__(self, count: Callable[[], int], set_epoch: Callable[[int], None]) -> None:
        self._count = count
        self.set_epoch = set_epoch

    def __len__(self) -> int:
        """Return the number of units (samples, rows or batches) per epoch on this rank."""
        return self._count()
