"""Samples shuffled within windows of blocks, for data that is stored in chunks."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cseq.check import integer
from cseq.order._readers import (
    AHEAD,
    BLOCKS,
    WINDOW,
    ArrayReader,
    Permutation,
    drawn,
    fingerprint,
    shuffle,
)
from cseq.order.base import spans
from cseq.order.classes import integers
from cseq.order.shuffled import Samples

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints

__all__ = ["Blocks"]

MOST_ROWS = 2**32  # of a window
FEW = 64  # samples of each lane that are worth the way to its window


class Blocks(Samples):
    """Every sample once per epoch, shuffled so that few blocks of neighbours are in use at a time.

    A block has `rows` neighbouring samples; the last one may be shorter. The blocks are shuffled
    and divided into windows of nearly equal size, and the samples of each window are shuffled. An
    indexer that keeps the chunks of a window reads each chunk once per epoch.

    Parameters
    ----------
    rows : int or array of int
        Samples in a block: one chunk of the data, or several. An array has the samples of each
        block, such as the row groups of Parquet files or the members of tar shards.
    window : int
        The most blocks that are mixed. 512 are nearly as good as a full shuffle. Each sample of a
        window takes 4 bytes.
    lanes : int
        Parts of a window, shuffled separately, that take turns. It must divide `window`. If the
        number of ranks divides it, and it divides the global batch, each rank reads its own lanes.
        These are whole blocks, except those that are too few to give one to each lane. Blocks of
        unequal sizes have one lane.
    samples : int, optional
        The number of samples. None: as many as the data has, or as the blocks of an array have.

    Examples
    --------
    >>> order = cseq.Blocks(rows=4, window=2, samples=16)
    >>> order.batches(8, seed=1)
    [[0, 15, 1, 3, 12, 14, 2, 13], [11, 7, 5, 6, 9, 8, 10, 4]]
    >>> cseq.Blocks(rows=[5, 1, 2, 4], window=2)
    <Blocks: 12 samples in 4 blocks of 1 to 5, shuffled in windows: 2 of some 2 blocks>
    """

    name = "blocks-v2"
    replaced: ClassVar[dict[str, str]] = {
        "blocks-v1": "an epoch's last window has as many blocks as the others now"
    }

    def __init__(
        self,
        rows: int | ArrayLike,
        window: int,
        lanes: int = 1,
        *,
        samples: int | None = None,
    ) -> None:
        self.sizes: Ints | None = None
        if np.ndim(rows):
            self.sizes = _sizes(rows)
            total = int(self.sizes.sum())
            if samples not in (None, total):
                raise ValueError(f"samples={samples}, but rows has {total}; leave samples out")
            if lanes != 1:
                raise ValueError(f"lanes={lanes}: blocks of unequal sizes have one lane")
            self.name, self.replaced = "unequal-blocks-v1", {}  # type: ignore[misc]
            samples, rows = total, max(1, int(self.sizes.max()))
        super().__init__(samples)
        self.rows = integer("rows", rows, 1, MOST_ROWS)
        self.window = integer("window", window, 1, MOST_ROWS // self.rows)
        self.lanes = integer("lanes", lanes, 1, self.window)
        if self.window % self.lanes:
            raise ValueError(
                f"lanes={lanes} does not divide window={window}; give a window of "
                f"{-(-self.window // self.lanes) * self.lanes} blocks, or another number of lanes"
            )

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        if self.sizes is not None:
            return super().facts() | {"rows": fingerprint(self.sizes), "window": self.window}
        sizes = {"rows": self.rows, "window": self.window, "lanes": self.lanes}
        return super().facts() | sizes

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        if self.sizes is not None:
            unequal_of = lru_cache(1)(partial(UnequalWindows, self.sizes, self.window, seed))
            return ArrayReader(
                self, seed, lambda epoch, units: (unequal_of(epoch).read(units), None)
            )
        windows_of = lru_cache(1)(partial(Windows, self, seed))

        def share(epoch: int, first: int, together: int, start: int, size: int) -> Ints:
            ranks, rank = together // size, (start - first) // size
            if self.lanes % ranks or together % self.lanes or first + together > self.units:
                return np.arange(start, start + size, dtype=np.int64)
            units = np.arange(first, first + together, dtype=np.int64)
            lanes = (units + windows_of(epoch).turn) % self.lanes
            ours: Ints = units[lanes * ranks // self.lanes == rank]
            return ours

        return ArrayReader(
            self,
            seed,
            lambda epoch, units: (windows_of(epoch).read(units), None),
            share,
            AHEAD + FEW * self.lanes,
        )

    def describe(self) -> str:
        """Describe an epoch."""
        blocks, sizes = -(-self.units // self.rows), f"{self.rows:,}"
        if self.sizes is not None:
            blocks, sizes = len(self.sizes), f"{self.sizes.min():,} to {self.rows:,}"
        windows = max(1, -(-blocks // self.window))
        lanes = f", {self.lanes:,} lanes" if self.lanes > 1 else ""
        return (
            f"{self.units:,} samples in {blocks:,} blocks of {sizes}, shuffled in windows: "
            f"{windows:,} of some {round(blocks / windows):,} blocks{lanes}"
        )


class Windows:
    """The windows of an epoch: ranges of a layout of all samples, block after block.

    In the layout, the blocks are shuffled, and the short one comes last. Its first `larger` windows
    have `step` samples more than `size`; the last window has what is left, too. The epoch begins
    with a window that is drawn, and goes round. Its positions belong to the lanes in turn.
    """

    def __init__(self, order: Blocks, seed: int, epoch: int) -> None:
        self.order, self.key = order, (seed, epoch)
        n, rows, lanes = order.units, order.rows, order.lanes
        self.whole = n // rows
        self.count = -(-n // (rows * order.window))
        rounds, self.step = self.whole // lanes, rows * lanes
        if rounds < self.count:
            rounds, self.step = self.whole, rows
        self.larger = rounds % self.count
        self.size = rounds // self.count * self.step
        self.blocks = Permutation(max(1, self.whole), seed, epoch, BLOCKS, 0)
        window, turn = (
            int(drawn(np.array([k]), below, seed, epoch, BLOCKS, 1)[0])
            for k, below in enumerate((self.count, lanes))
        )
        self.epoch_start, self.turn = self.window_start(window), turn
        self.kept: dict[int, tuple[int, NDArray[Any]]] = {}

    def window_start(self, window: int) -> int:
        """Return where a window begins in the layout."""
        return window * self.size + min(window, self.larger) * self.step

    def read(self, units: Ints) -> Ints:
        """Return the samples at some positions."""
        n, lanes = self.order.units, self.order.lanes
        positions = units + self.epoch_start
        positions[positions >= n] -= n
        head = self.window_start(self.larger)
        windows = (positions - head) // max(1, self.size) + self.larger
        low = positions < head
        windows[low] = positions[low] // (self.size + self.step)
        np.minimum(windows, self.count - 1, out=windows)
        positions -= windows * self.size + np.minimum(windows, self.larger) * self.step
        chosen = np.zeros_like(units)
        by_lane = None  # as they are
        if lanes > 1:
            positions //= lanes
            chosen = (units + self.turn) % lanes
            few = chosen.astype(np.uint16) if lanes <= 2**16 else chosen  # sorted faster
            by_lane = few.argsort(kind="stable")  # the windows of a lane are in order
            chosen, windows, positions = (x.take(by_lane) for x in (chosen, windows, positions))
        changes = (chosen[1:] != chosen[:-1]) | (windows[1:] != windows[:-1])
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(units)]
        samples = np.empty(len(units), np.int64)
        for start, stop in itertools.pairwise(cuts):
            table = self.part(int(chosen[start]), int(windows[start]))
            samples[start:stop] = table.take(positions[start:stop])
        if by_lane is not None:
            samples[by_lane] = samples.copy()
        return samples

    def part(self, lane: int, window: int) -> NDArray[Any]:
        """Return the samples of a lane's part of a window, shuffled."""
        kept, table = self.kept.get(lane, (-1, None))
        if kept == window and table is not None:
            return table
        n, rows, lanes = self.order.units, self.order.rows, self.order.lanes
        start = self.window_start(window)
        size, more = divmod(
            (n if window == self.count - 1 else self.window_start(window + 1)) - start, lanes
        )
        first = ((start - self.epoch_start) % n + self.turn) % lanes  # it has one of the `more`
        begin, end = (
            start + k * size + min(max(0, k - first), more) + min(k, max(0, first + more - lanes))
            for k in (lane, lane + 1)
        )
        blocks = np.arange(begin // rows, -(-end // rows))
        skipped = begin - int(blocks[0]) * rows
        whole = blocks[blocks < self.whole]
        blocks[: len(whole)] = self.blocks.at(whole)
        table = (blocks[:, None] * rows + np.arange(rows)).ravel()[skipped : skipped + end - begin]
        if n <= 2**32:
            table = table.astype(np.uint32)
        table = table.take(shuffle(len(table), *self.key, WINDOW, begin))
        self.kept[lane] = window, table
        return table


class UnequalWindows:
    """The windows of an epoch of blocks of unequal sizes: some blocks of a layout each.

    In the layout, the blocks are shuffled. The first windows have one block more than the others,
    if they do not all have as many. The epoch begins with a window that is drawn, and goes round.
    """

    def __init__(self, sizes: Ints, window: int, seed: int, epoch: int) -> None:
        self.key = seed, epoch
        blocks, count = len(sizes), -(-len(sizes) // window)
        self.order = Permutation(blocks, seed, epoch, BLOCKS, 0).at(np.arange(blocks))
        self.sizes, self.firsts = sizes[self.order], (sizes.cumsum() - sizes)[self.order]
        # The number of the first block of each window in the layout, and of its first sample.
        numbers = np.arange(count + 1)
        self.cuts = numbers * (blocks // count) + np.minimum(numbers, blocks % count)
        self.starts = np.append(0, self.sizes.cumsum())[self.cuts]
        first = int(drawn(np.zeros(1, np.int64), count, seed, epoch, BLOCKS, 1)[0])
        self.epoch_start = int(self.starts[first])
        self.kept: tuple[int, NDArray[Any]] = -1, np.empty(0, np.uint32)

    def read(self, units: Ints) -> Ints:
        """Return the samples at some positions."""
        positions = (units + self.epoch_start) % self.starts[-1]
        windows = self.starts.searchsorted(positions, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(units)]
        parts = []
        for start, stop in itertools.pairwise(cuts):
            window = int(windows[start])
            parts.append(self.part(window)[positions[start:stop] - self.starts[window]])
        return np.concatenate(parts).astype(np.int64)

    def part(self, window: int) -> NDArray[Any]:
        """Return the samples of a window, shuffled."""
        if self.kept[0] != window:
            ours = slice(*self.cuts[window : window + 2].tolist())
            table = spans(self.firsts[ours], self.sizes[ours])
            if self.starts[-1] <= 2**32:
                table = table.astype(np.uint32)
            begin = int(self.starts[window])
            self.kept = window, table.take(shuffle(len(table), *self.key, WINDOW, begin))
        return self.kept[1]


def _sizes(rows: ArrayLike) -> Ints:
    """Check the sizes of blocks."""
    given = integers("rows", rows)
    if given.min() < 0 or not given.any():
        raise ValueError(
            f"rows[{given.argmin()}]={given.min()}: give at least 0 samples a block, and one block "
            "that has some"
        )
    return given.astype(np.int64)
