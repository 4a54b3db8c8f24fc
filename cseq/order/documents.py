"""Documents laid end to end: where each begins, and which one has a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.order._readers import CHUNK, DocumentLengths
from cseq.order.base import MOST_SAMPLES
from cseq.order.classes import integers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from cseq.order.base import Ints

__all__ = ["DocumentEnds"]

BLOCK = 64  # documents between two sums that are kept


class DocumentEnds:
    """Positions of documents that lie end to end: 8 bytes for 64 documents.

    Position 0 is the first token of the first document. Lengths are read where they are asked for.

    Parameters
    ----------
    lengths : array of int
        Tokens of each document, at least 0. May be a memory map; it must not change.
    unit : int
        Count whole units of as many tokens in each document, instead of tokens.
    ends : array of int64, optional
        The attribute `ends` of an equal one: the lengths are neither checked nor summed up.

    Attributes
    ----------
    total : int
        Tokens of all documents, below 2**48.
    ends : array of int64
        Where every 64th document ends, and the last one.

    Raises
    ------
    TypeError, ValueError
        `lengths` is no array of integers of at least 0, or its sum is not below 2**48.

    Examples
    --------
    >>> ends = DocumentEnds([3, 0, 5])
    >>> ends.starts(np.array([0, 1, 2])).tolist()
    [0, 3, 3]
    >>> [found.tolist() for found in ends.find(np.array([2, 3, 7]))]
    [[0, 2, 2], [0, 3, 3]]
    """

    def __init__(self, lengths: ArrayLike, unit: int = 1, ends: Ints | None = None) -> None:
        self.lengths, self.unit = integers("lengths", lengths), unit
        self.ends = self._sums() if ends is None else ends
        self.total = int(self.ends[-1])
        self._summed = DocumentLengths(self.lengths, self.ends, unit)

    def _sums(self) -> Ints:
        """Check the lengths, piece by piece, and add them up."""
        sums = np.zeros(-(-len(self.lengths) // BLOCK), np.int64)
        for start in range(0, len(self.lengths), CHUNK):
            chunk = self.lengths[start : start + CHUNK]
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= MOST_SAMPLES:
                at = start + int(chunk.argmin() if low < 0 else chunk.argmax())
                raise ValueError(
                    f"lengths[{at}]={self.lengths[at]} is not in [0, {MOST_SAMPLES}); correct it: "
                    "an empty document has 0"
                )
            units = chunk.astype(np.int64) if self.unit == 1 else self._units(chunk)
            blocks = np.add.reduceat(units, np.arange(0, len(units), BLOCK))
            sums[start // BLOCK : start // BLOCK + len(blocks)] = blocks
        if sums.sum(dtype=np.float64) >= MOST_SAMPLES:
            raise ValueError(
                f"lengths has {sums.sum(dtype=np.float64):.4g} tokens in all, not below "
                f"{MOST_SAMPLES}; divide the documents into several sources"
            )
        return sums.cumsum()

    def _units(self, lengths: NDArray[np.integer[Any]]) -> Ints:
        return (lengths // self.unit).astype(np.int64)

    def starts(self, documents: Ints) -> Ints:
        """Return the position of the first token of each of some documents."""
        return self._summed.starts(documents)

    def find(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the document of each of some positions, and where this document begins.

        Positions are in [0, `total`). Empty documents have none.
        """
        return self._summed.find(positions)
