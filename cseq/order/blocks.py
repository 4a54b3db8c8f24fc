"""Samples shuffled within windows of blocks, for data that is stored in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq._draws import BlocksReader
from cseq.check import count
from cseq.order.shuffled import Samples

if TYPE_CHECKING:
    from cseq._core import Reader

__all__ = ["Blocks"]

MOST_ROWS = 2**32  # of a window


class Blocks(Samples):
    """Every sample once, shuffled such that few blocks of neighbours are in use at a time.

    The samples are cut into blocks, of which the last may be shorter. The blocks are shuffled, and
    so are the samples of each `window` of blocks. An indexer that keeps the chunks of a window
    reads each chunk once in an epoch.

    Parameters
    ----------
    rows : int
        Samples of a block: those of a chunk of the data, or of several.
    window : int
        Blocks whose samples are mixed; 512 are nearly as good as a full shuffle. It takes 4 bytes
        for each of their samples.
    lanes : int
        Windows that are in use at a time, of ``window / lanes`` blocks each; it divides `window`.
        Of several ranks, each reads lanes of its own, and so blocks of its own, if the number of
        ranks divides `lanes` and `lanes` divides the global batch.
    samples : int, optional
        How many there are. None: as many as the data has.

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
        sizes = {"rows": self.rows, "window": self.window, "lanes": self.lanes}
        return BlocksReader(self.units, **sizes, seed=seed)

    def describe(self) -> str:
        """Say what an epoch consists of."""
        blocks = -(-self.units // self.rows)
        return (
            f"{self.units:,} samples in {blocks:,} blocks, shuffled in windows of {self.window} "
            f"blocks of {self.rows}, {self.lanes} lanes"
        )
