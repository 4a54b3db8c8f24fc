"""Computes how many units of a mixture come from each source."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from cseq.order._readers import split
from cseq.order.base import WORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Shares:
    """Computes the number of units from each source before any block, with constant weights.

    Sources with less than one unit per block are the leaves of a Huffman tree. At each node, the
    left child gets its rounded share of the units, and the right child the rest. The tree and the
    other sources form a list. For every k, the first k entries together get their rounded share of
    all units. See docs/inside/orders.md for the error bounds.

    Attributes
    ----------
    whole, total : list of int, int
        The integer weights and their sum.
    """

    def __init__(self, weights: Sequence[float], block: int) -> None:
        ratios = [weight.as_integer_ratio() for weight in weights]
        scale = math.lcm(*(below for _, below in ratios))
        self.block = block
        self.whole = [above * (scale // below) for above, below in ratios]
        self.total = sum(self.whole)
        self._top = len(self.whole)
        # Four indices per node: the node its fraction refers to, the node itself, and its children.
        nodes: list[tuple[int, int, int, int]] = []
        parts: list[tuple[int, int]] = []
        sources = [(weight, s) for s, weight in enumerate(self.whole) if weight]
        row = [pair for pair in sources if pair[0] * block < self.total]
        heapq.heapify(row)
        while len(row) > 1:
            (left, a), (right, b) = heapq.heappop(row), heapq.heappop(row)
            heapq.heappush(row, (left + right, self._top))
            nodes.append((self._top, self._top, a, b))
            parts.append((left, left + right))
            self._top += 1
        row += [pair for pair in sources if pair[0] * block >= self.total]
        top = self._top + len(row) - 2
        sums = [*itertools.accumulate(weight for weight, _ in row)]
        before = row[0][1]
        for upto, (_, s) in zip(sums, row[1:], strict=False):
            nodes.append((top, self._top, before, s))
            parts.append((upto, self.total))
            before, self._top = self._top, self._top + 1
        self._top = before
        self._nodes = np.array(nodes[::-1], np.int64).reshape(-1, 4)
        self._parts = [(part // (g := math.gcd(part, of)), of // g) for part, of in parts[::-1]]
        # Per node: its fraction times 2**64 (rounded up), and the largest count it is exact for.
        factors = [
            (-(-(part << 64) // of), (1 << 63) // of if (part << 64) % of else WORD)
            for part, of in self._parts
        ]
        self._factors = np.array(factors, np.uint64).reshape(-1, 2)

    def before(self, block: int) -> NDArray[np.uint64]:
        """Return the number of units from each source before a block, modulo 2**64."""
        units, sources = block * self.block, len(self.whole)
        counts = np.zeros(sources + len(self._nodes), np.uint64)
        if units <= WORD:
            counts[self._top] = units
            if split(counts, self._nodes, self._factors):
                return counts[:sources]
        exact = {self._top: units}
        for (base, node, left, right), (part, of) in zip(
            self._nodes.tolist(), self._parts, strict=True
        ):
            exact[left] = (2 * exact[base] * part + of) // (2 * of)
            exact[right] = exact[node] - exact[left]
        return np.array([exact.get(s, 0) & WORD for s in range(sources)], np.uint64)
