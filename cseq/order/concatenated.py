"""An order that concatenates documents and cuts them into rows of equal length."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.check import integer, integers
from cseq.order._readers import DOCUMENTS, DocumentEnds, Permutation
from cseq.order.base import by_epoch, spans
from cseq.order.tables import CachedOrder, cache_of, lengths_in, tables

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Floats, Ints, Read, Sums, Works
    from cseq.order.tables import New

# Number of documents per stored position.
BLOCK = 16
MOST_ROW = 2**24
# Number of documents to process at a time.
TOGETHER = 2**20


class Concatenated(CachedOrder):
    """Rows of `row` tokens cut from concatenated documents, as is common in pre-training.

    Each epoch concatenates the documents in a different order, cuts the result every `row` tokens,
    and shuffles the rows. Each token appears once per epoch, except any in an incomplete last row.

    A row consists of pieces of documents. A piece ends where its document or the row ends. Each
    index is the position of a piece's first token in the concatenation of all documents. In the
    indexer, `cseq.parts` returns the number of pieces in each row.

    Parameters
    ----------
    lengths : array of int
        The number of tokens in each document (at least 0). May be a memory map. The total,
        `samples`, must be below 2**48.
    row : int
        The number of tokens in a row, at most 2**24.
    cache : path, optional
        A local folder for tables, as in `Packed`, and for one file per epoch, which takes half a
        byte per document.

    Examples
    --------
    >>> order = cseq.Concatenated([5, 20, 0, 3], 12)
    >>> order
    <Concatenated: 2 rows of 12 tokens, at most 3 pieces a row; an epoch leaves out 4 tokens,
    different ones each time>
    >>> order.batches(seed=1)
    [[17, 25, 0], [5]]
    """

    name = "concatenated-v1"

    def __init__(
        self, lengths: ArrayLike, row: int, *, cache: str | os.PathLike[str] | None = None
    ) -> None:
        self.row = integer("row", row, 1, MOST_ROW)
        self._folder = cache_of(cache)
        lengths, self._lengths = lengths_in(self._folder, integers("lengths", lengths))
        self._made_with = lengths, {"row": self.row, "cache": self._folder}
        name = f"concatenated-v1-{self._lengths:016x}-{row}"
        arrays = tables(self._folder, name, partial(self._make, lengths))
        self._name, self._ends = name, DocumentEnds(lengths, ends=arrays["ends"])
        self.samples = self._ends.total
        self.units = self.samples // self.row
        if not self.units:
            raise ValueError(
                f"row={row} exceeds the {self.samples} tokens of all documents combined; pass a "
                "shorter row, or more documents"
            )
        self.room, self.tokens = int(arrays["room"][0]), float(self.row)
        if rest := self.samples % self.row:
            self.left_out = f"an epoch leaves out {rest:,} tokens, different ones each time"

    def _make(self, lengths: NDArray[Any], new: New) -> None:
        ends = DocumentEnds(lengths)
        new("ends", len(ends.ends), np.int64)[:] = ends.ends
        new("room", 1, np.int64)[:] = self._most_pieces(ends.lengths)

    def _most_pieces(self, lengths: NDArray[np.integer[Any]]) -> int:
        """Return the maximum number of pieces in a row, including up to two cut documents."""
        counts = np.zeros(self.row + 1, np.int64)
        step = max(TOGETHER, 4 * self.row)
        for start in range(0, len(lengths), step):
            chunk = np.minimum(lengths[start : start + step].astype(np.int64), self.row)
            counts += np.bincount(chunk, minlength=self.row + 1)
        counts[0] = 0
        lengths_of_row = np.arange(self.row + 1)
        tokens, room = np.append(0, (counts * lengths_of_row).cumsum()), max(0, self.row - 2)
        # All documents shorter than `longest` fit together in one row.
        longest = int(tokens.searchsorted(room, "right")) - 1
        whole = int(counts[:longest].sum()) + (room - int(tokens[longest])) // max(1, longest)
        # If `room` were 1, units would be treated as single samples.
        return max(2, min(whole + 2, self.row, int(counts.sum())))

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"lengths": self._lengths, "row": self.row}

    def describe(self) -> str:
        said = (
            f"{self.units:,} rows of {self.row:,} tokens, at most {self.room:,} "
            f"piece{'s' * (self.room > 1)} a row"
        )
        return f"{said}; {self.left_out}" if self.left_out else said

    def reader(self, seed: int) -> Reader:
        return self._opened(seed, works=False)[0]

    def measured(self, seed: int) -> tuple[Reader, Works]:
        reader, epoch_of = self._opened(seed, works=True)
        return reader, lambda epoch, units: epoch_of(epoch).works_of(units)

    def token_sums(self, seed: int) -> Sums:
        return lambda _, units: [self.row * len(units)]

    def _opened(self, seed: int, *, works: bool) -> tuple[Reader, Callable[[int], _Epoch]]:
        file = self._folder, f"{self._name}-{'works-' * works}{seed:x}"
        return by_epoch(self, seed, partial(_Epoch, self._ends, self.row, seed, file, works))


class _Epoch:
    """The documents in an epoch's order, and the end position of every 16th document."""

    def __init__(
        self,
        ends: DocumentEnds,
        row: int,
        seed: int,
        file: tuple[str | None, str],
        works: bool,  # noqa: FBT001 - bound by `partial`
        epoch: int,
    ) -> None:
        self.corpus, self.row = ends, row
        self.documents = Permutation(len(ends.lengths), seed, epoch, DOCUMENTS, 0)
        self.rows = Permutation(ends.total // row, seed, epoch, DOCUMENTS, 1)
        arrays = tables(*file, partial(self._make, works), epoch)
        self.ends, self.works = arrays["ends"], arrays.get("works")

    def _make(self, works: bool, new: New) -> None:  # noqa: FBT001 - bound by `partial`
        """Compute cumulative lengths in epoch order, and the work per row if `works` is set."""
        n, total = len(self.corpus.lengths), 0
        sums = new("ends", -(-n // BLOCK), np.int64)
        if works:
            self.works = new("works", self.corpus.total // self.row + 1, np.float64)
            self.works[:] = 0
        for start in range(0, n, TOGETHER):
            positions = np.arange(start, min(start + TOGETHER, n))
            lengths = self.corpus.lengths.take(self.documents.at(positions)).astype(np.int64)
            blocks = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK))
            sums[start // BLOCK : start // BLOCK + len(blocks)] = blocks
            if works:
                stops = lengths[lengths > 0].cumsum() + total
                self._add(np.append(total, stops[:-1]), stops)
                total += int(lengths.sum())
        sums.cumsum(out=sums)

    def _add(self, starts: Ints, stops: Ints) -> None:
        """Cut documents into rows and add up the work of each row."""
        assert self.works is not None
        if not len(stops):
            return
        first, last = starts // self.row, (stops - 1) // self.row
        heads = np.minimum(stops, (first + 1) * self.row) - starts
        squares = np.bincount(first - first[0], weights=heads.astype(np.float64) ** 2)
        self.works[first[0] : first[0] + len(squares)] += squares
        # At most one cut document ends in each row.
        cut = np.flatnonzero(first < last)
        first, last = first[cut], last[cut]
        self.works[last] += (stops[cut] - last * self.row).astype(np.float64) ** 2
        inside = last - first - 1
        if inside.any():
            self.works[spans(first + 1, inside)] = float(self.row) ** 2

    def read(self, units: Ints) -> Read:
        n = len(self.corpus.lengths)
        first = self.rows.at(units).astype(np.int64) * self.row
        blocks = self.ends.searchsorted(first, "right")
        counts = self.ends.searchsorted(first + (self.row - 1), "right") - blocks + 1
        numbers = spans(blocks, counts)
        positions = np.add.outer(numbers * BLOCK, np.arange(BLOCK)).ravel()
        exists = positions < n
        documents = self.documents.at(np.minimum(positions, n - 1)).astype(np.int64)
        lengths = self.corpus.lengths.take(documents).astype(np.int64) * exists
        stops = lengths.reshape(-1, BLOCK).cumsum(1)
        stops += (self.ends.take(numbers - 1) * (numbers > 0))[:, None]
        begins = stops.ravel() - lengths
        rows = np.repeat(np.arange(len(units)), counts * BLOCK)
        low = np.maximum(begins, first.take(rows))
        long = np.minimum(begins + lengths, first.take(rows) + self.row) - low
        kept = np.flatnonzero(long > 0)
        sizes = np.bincount(rows[kept], minlength=len(units))
        return self.corpus.starts(documents[kept]) + (low - begins)[kept], sizes

    def works_of(self, units: Ints) -> Floats:
        assert self.works is not None
        return self.works.take(self.rows.at(units))
