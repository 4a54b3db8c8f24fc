"""Cuts documents into full rows and remainders."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cseq.check import integers
from cseq.order._readers import MEMBERS, DocumentEnds, keyed
from cseq.order.base import spans
from cseq.order.classes import Classes
from cseq.order.tables import lengths_in, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from cseq.order.base import Ints
    from cseq.order.classes import ReadMembers
    from cseq.order.tables import New

    Pack = Callable[[Ints, Ints, int], tuple[Ints, Ints, Ints]]

# Number of documents to sort at a time.
TOGETHER = 2**20


class Pieces(Classes):
    """Cuts documents every `budget` tokens and groups the pieces by length.

    Remainders with the same number of quanta form a class. Full pieces are the last class. `table`
    lists the documents that have a remainder, sorted by class, and takes 4 bytes for each.

    Attributes
    ----------
    lengths : array
        The piece length of each class, in quanta.
    sizes, offsets : array
        The number of pieces in each class, and the start of the class in `table`.
    """

    def __init__(
        self, lengths: ArrayLike, budget: int, quantum: int, pack: Pack, cache: str | None
    ) -> None:
        self.budget, self.quantum, self.rooms = budget, quantum, budget // quantum
        lengths, self.fingerprint = lengths_in(cache, integers("lengths", lengths))
        name = f"packed-split-v1-{self.fingerprint:016x}-{budget}-{quantum}"
        arrays = tables(cache, name, partial(self._make, lengths, pack))
        self.ends = DocumentEnds(lengths, ends=arrays["ends"])
        self.whole = DocumentEnds(lengths, budget, ends=arrays["whole"])
        self.lengths, self.sizes, self.table = arrays["lengths"], arrays["sizes"], arrays["table"]
        # The number of remainder classes.
        self.rests = len(self.lengths) - (self.whole.total > 0)
        self.offsets = np.append(0, self.sizes[: self.rests].cumsum())
        self.count = len(self.lengths)
        self.recipes = arrays["copies"], arrays["first"], arrays["parts"].reshape(-1, 3)

    def _make(self, lengths: NDArray[Any], pack: Pack, new: New) -> None:
        """Count the pieces in each class, pack them, and sort the documents."""
        self.ends, self.whole = DocumentEnds(lengths), DocumentEnds(lengths, self.budget)
        if not self.ends.total:
            raise ValueError("all lengths are 0, so the documents are empty; leave this source out")
        counts = np.zeros(self.rooms + 1, np.int64)
        for _, quanta in self._quanta():
            counts += np.bincount(quanta, minlength=len(counts))
        counts[0] = 0
        present = np.flatnonzero(counts)
        classes = len(present) + (self.whole.total > 0)
        quanta_of = np.append(present, self.rooms)[:classes]
        sizes = np.append(counts[present], self.whole.total)[:classes]
        copies, first, parts = pack(quanta_of, sizes, self.rooms)
        small = {"lengths": quanta_of, "sizes": sizes, "copies": copies, "first": first}
        small |= {"ends": self.ends.ends, "whole": self.whole.ends, "parts": parts.ravel()}
        for key, values in small.items():
            new(key, len(values), np.int64)[:] = values
        self.table = new("table", int(counts.sum()), np.uint32)
        self._sort(counts)

    def _quanta(self) -> Iterator[tuple[int, NDArray[np.integer[Any]]]]:
        """Yield the start of each chunk of documents, and the remainder lengths in quanta."""
        step = max(TOGETHER, 4 * self.rooms)
        kind = np.uint16 if self.rooms < 2**16 else np.uint32
        for start in range(0, len(self.ends.lengths), step):
            rests = self.ends.lengths[start : start + step]
            if rests.dtype.itemsize < 4 or self.budget >= 2**31:
                rests = rests.astype(np.int64)
            rests = rests % rests.dtype.type(self.budget)
            if self.quantum > 1:
                rests = np.minimum(-(-rests.astype(np.int64) // self.quantum), self.rooms)
            yield start, rests.astype(kind)

    def _sort(self, counts: Ints) -> None:
        # The next table index for each class.
        following = counts.cumsum() - counts
        for start, quanta in self._quanta():
            order = quanta.argsort(kind="stable")
            counts_here = np.bincount(quanta, minlength=len(counts))
            empty, counts_here[0] = int(counts_here[0]), 0
            shift = following - (counts_here.cumsum() - counts_here)
            order = order[empty:]
            at = shift.take(quanta.take(order)) + np.arange(len(order))
            self.table[at] = order + start
            following += counts_here

    def _positions(self, classes: Ints, members: Ints) -> Ints:
        """Return the positions of pieces in the corpus."""
        is_rest = classes < self.rests
        documents = np.empty(len(classes), np.int64)
        documents[is_rest] = self.table.take(self.offsets.take(classes[is_rest]) + members[is_rest])
        documents[~is_rest], first = self.whole.find(members[~is_rest])
        starts = self.ends.starts(documents)
        lengths = self.ends.lengths.take(documents[is_rest]).astype(np.int64)
        starts[is_rest] += lengths - lengths % self.budget
        starts[~is_rest] += (members[~is_rest] - first) * self.budget
        return starts

    def members(self, seed: int, epoch: int) -> ReadMembers:
        def read(classes: Ints, ranks: Ints, counts: Ints) -> Ints:
            class_of = classes.repeat(counts)
            members = keyed(
                self.sizes.take(class_of), class_of, spans(ranks, counts), seed, epoch, MEMBERS
            )
            return self._positions(class_of, members)

        return read


def fewest_rows(lengths: Ints, counts: Ints, budget: int) -> int:
    """Return a lower bound on the number of rows in any packing of whole pieces.

    This is the Martello–Toth bound. A row has room for one piece longer than half the budget, for
    two pieces longer than a third, and so on. Pieces of at least k tokens, but at most half the
    budget, need more rows unless they fit next to longer pieces. The bound is the maximum over k.
    """
    tokens = lengths * counts
    # For each class, the number of pieces that are at least as long.
    above = np.append(counts[::-1].cumsum()[::-1], 0)
    many = np.arange(1, budget // int(lengths[0]) + 1)
    best = int((-(-above[lengths.searchsorted(budget // (many + 1), "right")] // many)).max())
    half = int(lengths.searchsorted(budget // 2, "right"))
    # For each class up to half the budget, the first class too long to share a row with it.
    beside = lengths.searchsorted(budget - lengths[:half], "right")
    small = tokens[:half][::-1].cumsum()[::-1]
    large = np.append(0, tokens.cumsum())
    room = (above[half] - above[beside]) * budget - (large[beside] - large[half])
    further = np.maximum(0, -(-(small - room) // budget))
    return max(best, int(above[half]), int((above[half] + further).max(initial=0)))
