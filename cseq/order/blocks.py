"""Samples shuffled within windows of blocks, for data that is stored in chunks."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._core import AHEAD, BLOCKS, WINDOW, ArrayReader, Permutation, shuffle
from cseq.check import count
from cseq.order.shuffled import Samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints

__all__ = ["Blocks"]

MOST_ROWS = 2**32  # of a window
FEW = 64  # samples of each lane that are worth the way to its window


class Blocks(Samples):
    """Every sample once per epoch, shuffled so that few blocks of neighbours are in use at a time.

    A block has `rows` neighbouring samples; the last one may be shorter. The blocks are shuffled,
    and so are the samples of each `window` of blocks. An indexer that keeps the chunks of a window
    reads each chunk once per epoch.

    Parameters
    ----------
    rows : int
        Samples in a block: one chunk of the data, or several.
    window : int
        How many blocks are mixed. 512 are nearly as good as a full shuffle. Each sample of a window
        takes 4 bytes.
    lanes : int
        How many windows are in use at a time, each of ``window / lanes`` blocks. It must divide
        `window`. If the number of ranks divides it, and it divides the global batch, each rank
        reads its own lanes, and so its own blocks.
    samples : int, optional
        The number of samples. None: as many as the data has.

    Examples
    --------
    >>> order = cseq.Blocks(rows=4, window=2, samples=12)
    >>> sorted(sum(order.batches(8, seed=1, stop=1), []))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    name = "blocks-v1"

    def __init__(
        self, rows: int, window: int, lanes: int = 1, *, samples: int | None = None
    ) -> None:
        super().__init__(samples)
        self.rows = count("rows", rows, 1, MOST_ROWS)
        self.window = count("window", window, 1, MOST_ROWS // self.rows)
        self.lanes = count("lanes", lanes, 1, self.window)
        if self.window % self.lanes:
            raise ValueError(
                f"lanes={lanes} does not divide window={window}; give a window of "
                f"{-(-self.window // self.lanes) * self.lanes} blocks, or another number of lanes"
            )

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        sizes = {"rows": self.rows, "window": self.window, "lanes": self.lanes}
        return super().facts() | sizes

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        begin = lru_cache(1)(partial(BlockLanes, self, seed))

        def share(epoch: int, first: int, together: int, start: int, size: int) -> Ints:
            ranks, rank = together // size, (start - first) // size
            if self.lanes % ranks or together % self.lanes or first + together > begin(epoch).body:
                return np.arange(start, start + size, dtype=np.int64)
            units = np.arange(first, first + together, dtype=np.int64)
            ours: Ints = units[units % self.lanes * ranks // self.lanes == rank]
            return ours

        return ArrayReader(
            self,
            seed,
            lambda epoch, units: (begin(epoch).read(units), None),
            share,
            AHEAD + FEW * self.lanes,
        )

    def describe(self) -> str:
        """Describe an epoch."""
        blocks = -(-self.units // self.rows)
        return (
            f"{self.units:,} samples in {blocks:,} blocks, shuffled in windows of {self.window} "
            f"blocks of {self.rows}, {self.lanes} lanes"
        )


class BlockLanes:
    """The lanes of an epoch: the blocks at every so many places, in windows that are shuffled.

    They take turns at the positions below `body`; what longer ones have beyond that follows.
    """

    def __init__(self, order: Blocks, seed: int, epoch: int) -> None:
        self.order, self.where = order, (seed, epoch)
        n, rows, lanes = order.units, order.rows, order.lanes
        self.blocks = -(-n // rows)
        self.each = order.window // lanes  # blocks of a window
        self.places = Permutation(self.blocks, seed, epoch, BLOCKS, 0)
        self.short_by = self.blocks * rows - n
        place, self.short_lane = divmod(self.places.find(self.blocks - 1), lanes)
        self.sizes = (self.blocks + lanes - 1 - np.arange(lanes, dtype=np.int64)) // lanes * rows
        self.sizes[self.short_lane] -= self.short_by
        self.least = int(self.sizes.min())
        self.body = self.least * lanes
        self.beyond = (self.sizes - self.least).cumsum()
        # After this place, the elements of the short block's lane are in a later window.
        self.short_end = (place // self.each + 1) * self.each * rows - self.short_by
        self.windows: dict[int, tuple[int, NDArray[Any]]] = {}  # of each lane, the last one

    def read(self, units: Ints) -> Ints:
        """Return the samples at some positions."""
        elements = units // self.order.lanes
        lanes = units - elements * self.order.lanes  # in half the time of numpy.divmod
        tail = units >= self.body
        if tail.any():
            rest = units[tail] - self.body
            lanes[tail] = lane = np.searchsorted(self.beyond, rest, "right")
            elements[tail] = rest - self.beyond[lane] + self.sizes[lane]
        if self.short_by:
            elements[(lanes == self.short_lane) & (elements >= self.short_end)] += self.short_by
        windows = elements // (self.each * self.order.rows)
        elements -= windows * (self.each * self.order.rows)
        by_window = None  # as they are
        if self.order.lanes > 1:
            few = lanes.astype(np.uint16) if self.order.lanes <= 2**16 else lanes  # sorted faster
            by_window = few.argsort(kind="stable")  # the windows of a lane are in order
            lanes, windows, elements = (x.take(by_window) for x in (lanes, windows, elements))
        changes = (lanes[1:] != lanes[:-1]) | (windows[1:] != windows[:-1])
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(units)]
        samples = np.empty(len(units), np.int64)
        for start, stop in itertools.pairwise(cuts):
            table = self.window(int(lanes[start]), int(windows[start]))
            samples[start:stop] = table.take(elements[start:stop])
        if by_window is not None:
            samples[by_window] = samples.copy()
        return samples

    def window(self, lane: int, number: int) -> NDArray[Any]:
        """Return the samples of a lane's window, shuffled."""
        kept, table = self.windows.get(lane, (-1, None))
        if kept == number and table is not None:
            return table
        n, rows, lanes = self.order.units, self.order.rows, self.order.lanes
        first = lane + lanes * number * self.each
        end = min(first + lanes * self.each, self.blocks)
        places = np.arange(first, end, lanes, dtype=np.int64)
        blocks = self.places.at(places).astype(np.int64)
        table = (blocks[:, None] * rows + np.arange(rows)).ravel()
        if lane == self.short_lane:
            table = table[table < n]
        if n <= 2**32:
            table = table.astype(np.uint32)
        table = table.take(shuffle(len(table), *self.where, WINDOW, lane << 40 | number))
        self.windows[lane] = number, table
        return table
