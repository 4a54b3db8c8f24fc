"""An order that shuffles samples within windows of blocks, for chunked data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cseq.check import integer, integers
from cseq.order._readers import AHEAD, BLOCKS, WINDOW, Permutation, drawn, fingerprint, shuffle
from cseq.order.base import by_epoch, runs, spans
from cseq.order.shuffled import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Read

# The maximum number of samples in a window.
MOST_ROWS = 2**32
# Number of samples to read ahead per lane.
FEW = 64


class Blocks(Samples):
    """Every sample once per epoch, shuffled so that only a few blocks are in use at a time.

    A block is `rows` consecutive samples. Each epoch shuffles the blocks, divides them into windows
    of nearly equal size, and shuffles the samples in each window. An indexer that caches the chunks
    of a window reads each chunk once per epoch.

    Parameters
    ----------
    rows : int or array of int
        The number of samples in a block. Blocks should contain whole chunks of the data. For blocks
        of different sizes, such as Parquet row groups or tar shards, pass an array of sizes.
    window : int
        The maximum number of blocks in a window. A window of 512 blocks is nearly as good as a full
        shuffle. Each sample in a window takes 4 bytes of memory.
    lanes : int
        The number of lanes that each window is divided into. Each lane is shuffled separately, and
        samples come from the lanes in turn. `window` must be a multiple of `lanes`. Each rank reads
        only its own lanes if `lanes` is a multiple of the number of ranks, and the global batch is
        a multiple of `lanes`. Blocks of different sizes support only one lane.
    samples : int, optional
        The number of samples. Defaults to the size of the data, or the sum of an array of `rows`.

    Examples
    --------
    >>> order = cseq.Blocks(rows=4, window=2, samples=16)
    >>> order.batches(8, seed=1)
    [[0, 15, 1, 3, 12, 14, 2, 13], [11, 7, 5, 6, 9, 8, 10, 4]]
    >>> cseq.Blocks(rows=[5, 1, 2, 4], window=2)
    <Blocks: 12 samples in 4 blocks of 1 to 5, shuffled in 2 windows of about 2 blocks>
    """

    name = "blocks-v2"
    replaced: ClassVar[dict[str, str]] = {
        "blocks-v1": "the last window in an epoch now has as many blocks as the others"
    }

    def __init__(
        self, rows: int | ArrayLike, window: int, lanes: int = 1, *, samples: int | None = None
    ) -> None:
        self.sizes: Ints | None = None
        if np.ndim(rows):
            self.sizes = sizes = integers("rows", rows).astype(np.int64)
            if sizes.min() < 0 or not sizes.any():
                raise ValueError(
                    f"the smallest block is rows[{sizes.argmin()}]={sizes.min()}; pass sizes of at "
                    "least 0, with at least one above 0"
                )
            total = int(sizes.sum())
            if samples not in (None, total):
                raise ValueError(f"samples={samples}, but rows sum to {total}; omit samples")
            if lanes != 1:
                raise ValueError(f"lanes={lanes} needs blocks of equal size; omit lanes")
            self.name, self.replaced = "unequal-blocks-v1", {}  # type: ignore[misc]
            samples, rows = total, max(1, int(sizes.max()))
        super().__init__(samples)
        self.rows = integer("rows", rows, 1, MOST_ROWS)
        self.window = integer("window", window, 1, MOST_ROWS // self.rows)
        self.lanes = integer("lanes", lanes, 1, self.window)
        if self.window % self.lanes:
            raise ValueError(
                f"lanes={lanes} does not divide window={window}; change lanes, or pass a window of "
                f"{-(-self.window // self.lanes) * self.lanes} blocks"
            )
        if self.sizes is not None:
            self._facts = {"rows": fingerprint(self.sizes), "window": self.window}
        else:
            self._facts = {"rows": self.rows, "window": self.window, "lanes": self.lanes}

    def reader(self, seed: int) -> Reader:
        def share(epoch: int, first: int, together: int, start: int, size: int) -> Ints:
            ranks, rank = together // size, (start - first) // size
            if self.lanes % ranks or together % self.lanes or first + together > self.units:
                return np.arange(start, start + size, dtype=np.int64)
            units = np.arange(first, first + together, dtype=np.int64)
            lanes = (units + windows_of(epoch).turn) % self.lanes
            ours: Ints = units[lanes * ranks // self.lanes == rank]
            return ours

        draw: Callable[[int], Windows] = partial(EqualWindows, self, seed)
        if self.sizes is not None:
            draw = partial(UnequalWindows, self.sizes, self.window, seed)
        share_of = share if self.lanes > 1 else None
        ahead = AHEAD + FEW * self.lanes
        reader, windows_of = by_epoch(self, seed, draw, share=share_of, ahead=ahead)
        return reader

    def describe(self) -> str:
        blocks, sizes = -(-self.units // self.rows), f"{self.rows:,}"
        if self.sizes is not None:
            blocks, sizes = len(self.sizes), f"{self.sizes.min():,} to {self.rows:,}"
        windows = max(1, -(-blocks // self.window))
        lanes = f", {self.lanes:,} lanes" if self.lanes > 1 else ""
        return (
            f"{self.units:,} samples in {blocks:,} blocks of {sizes}, shuffled in {windows:,} "
            f"window{'s' * (windows > 1)} of about {round(blocks / windows):,} blocks{lanes}"
        )


class Windows:
    """The windows of an epoch: ranges of a layout that lists the blocks in random order.

    An epoch starts at a random window and wraps around. Positions alternate between lanes, and each
    lane's part of a window is shuffled separately.
    """

    def __init__(self, samples: int, count: int, lanes: int, seed: int, epoch: int) -> None:
        self.samples, self.count, self.lanes, self.key = samples, count, lanes, (seed, epoch)
        window, self.turn = (
            int(drawn(np.array([k]), below, seed, epoch, BLOCKS, 1)[0])
            for k, below in enumerate((count, lanes))
        )
        self.epoch_start = int(self.start_of(window))
        # Maps each lane to the window it read last, and its part of that window.
        self.kept: dict[int, tuple[int, NDArray[Any]]] = {}

    def start_of(self, windows: Ints | int) -> Ints:
        raise NotImplementedError

    def window_of(self, positions: Ints) -> Ints:
        raise NotImplementedError

    def layout(self, window: int, start: int, stop: int) -> Ints:
        """Return the samples at layout positions [start, stop) of one window."""
        raise NotImplementedError

    def read(self, units: Ints) -> Read:
        positions = units + self.epoch_start
        positions[positions >= self.samples] -= self.samples
        windows = self.window_of(positions)
        positions -= self.start_of(windows)
        samples = np.empty(len(units), np.int64)
        if self.lanes == 1:
            for start, stop in runs(windows):
                table = self.part(0, int(windows[start]))
                samples[start:stop] = table.take(positions[start:stop])
            return samples, None
        positions //= self.lanes
        chosen = (units + self.turn) % self.lanes
        # Narrow integers sort faster.
        by_lane = (chosen.astype(np.uint16) if self.lanes <= 2**16 else chosen).argsort(
            kind="stable"
        )
        chosen, windows, positions = (x.take(by_lane) for x in (chosen, windows, positions))
        for start, stop in runs(chosen, windows):
            table = self.part(int(chosen[start]), int(windows[start]))
            samples[start:stop] = table.take(positions[start:stop])
        samples[by_lane] = samples.copy()
        return samples, None

    def part(self, lane: int, window: int) -> NDArray[Any]:
        kept, table = self.kept.get(lane, (-1, None))
        if kept == window and table is not None:
            return table
        n, lanes, start = self.samples, self.lanes, int(self.start_of(window))
        end = n if window == self.count - 1 else int(self.start_of(window + 1))
        size, more = divmod(end - start, lanes)
        # The first of `more` consecutive lanes that have an extra sample.
        first = ((start - self.epoch_start) % n + self.turn) % lanes
        begin, end = (
            start + k * size + min(max(0, k - first), more) + min(k, max(0, first + more - lanes))
            for k in (lane, lane + 1)
        )
        table = self.layout(window, begin, end)
        if n <= 2**32:
            table = table.astype(np.uint32)
        table = table.take(shuffle(len(table), *self.key, WINDOW, begin))
        self.kept[lane] = window, table
        return table


class EqualWindows(Windows):
    """Windows of equally sized blocks. The last block, if shorter, comes last in the layout.

    The first `larger` windows contain `size` + `step` samples, the others `size`. The last window
    also contains the remaining samples.
    """

    def __init__(self, order: Blocks, seed: int, epoch: int) -> None:
        self.rows, self.whole = order.rows, order.units // order.rows
        count = -(-order.units // (order.rows * order.window))
        rounds, self.step = self.whole // order.lanes, order.rows * order.lanes
        if rounds < count:
            rounds, self.step = self.whole, order.rows
        self.larger = rounds % count
        self.size = rounds // count * self.step
        self.blocks = Permutation(max(1, self.whole), seed, epoch, BLOCKS, 0)
        super().__init__(order.units, count, order.lanes, seed, epoch)

    def start_of(self, windows: Ints | int) -> Ints:
        return windows * self.size + np.minimum(windows, self.larger) * self.step

    def window_of(self, positions: Ints) -> Ints:
        head = self.start_of(self.larger)
        windows: Ints = (positions - head) // max(1, self.size) + self.larger
        low = positions < head
        windows[low] = positions[low] // (self.size + self.step)
        np.minimum(windows, self.count - 1, out=windows)
        return windows

    def layout(self, window: int, start: int, stop: int) -> Ints:
        blocks = np.arange(start // self.rows, -(-stop // self.rows))
        skipped = start - int(blocks[0]) * self.rows
        whole = blocks[blocks < self.whole]
        blocks[: len(whole)] = self.blocks.at(whole)
        samples = (blocks[:, None] * self.rows + np.arange(self.rows)).ravel()
        return samples[skipped : skipped + stop - start]


class UnequalWindows(Windows):
    """Windows of blocks with different sizes.

    The first windows may contain one more block than the others. `cuts` contains each window's
    first block, and `starts` its first layout position.
    """

    def __init__(self, sizes: Ints, window: int, seed: int, epoch: int) -> None:
        blocks, count = len(sizes), -(-len(sizes) // window)
        self.order = Permutation(blocks, seed, epoch, BLOCKS, 0).at(np.arange(blocks))
        self.sizes, self.firsts = sizes[self.order], (sizes.cumsum() - sizes)[self.order]
        numbers = np.arange(count + 1)
        self.cuts = numbers * (blocks // count) + np.minimum(numbers, blocks % count)
        self.starts = np.append(0, self.sizes.cumsum())[self.cuts]
        super().__init__(int(self.starts[-1]), count, 1, seed, epoch)

    def start_of(self, windows: Ints | int) -> Ints:
        return self.starts.take(windows)

    def window_of(self, positions: Ints) -> Ints:
        windows: Ints = self.starts.searchsorted(positions, "right") - 1
        return windows

    def layout(self, window: int, start: int, stop: int) -> Ints:
        ours = slice(*self.cuts[window : window + 2].tolist())
        return spans(self.firsts[ours], self.sizes[ours])
