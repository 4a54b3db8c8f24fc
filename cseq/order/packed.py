"""An order that packs samples into rows whose total length is close to a budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cseq.check import choice, integer
from cseq.order.classes import MOST_BUDGET, Lengths, Recipes
from cseq.order.pieces import Pieces, fewest_rows
from cseq.order.tables import CachedOrder, cache_of

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from cseq._core import Reader
    from cseq.order.base import Ints, Sums, Works

MOST_ROOMS = 2**27
# `describe` reports the maximum fill if rows must outnumber the ideal by more than this factor.
SHOWN = 1.001
# Counting pieces takes 8 bytes per quantum of a row.
MOST_COUNTED = 2**24

# A linked list of (class, number of samples).
Contents: TypeAlias = "tuple[int, int, Contents] | None"


class Packed(Recipes, CachedOrder):
    """Rows of whole samples with at most `budget` tokens. Nearly every row is full.

    Every sample appears once per epoch. Samples are cut only with ``too_long='split'``. Each epoch
    exchanges samples of equal length between rows, and then shuffles the rows. A batch consists of
    `batch_size` rows. In the indexer, `cseq.parts` returns the number of samples in each row.

    Parameters
    ----------
    lengths : array of int
        The sample lengths (at least 1) in tokens. May be a memory map.
    budget : int
        The maximum number of tokens in a row.
    quantum : int
        Lengths are rounded up to a multiple of this value. With a larger quantum, more samples are
        exchanged, but rows are less full.
    too_long : 'error', 'drop' or 'split'
        How to handle samples longer than the budget. A warning is issued if more than 1 % of all
        tokens or samples are dropped. With 'split', samples are documents, which may be empty (see
        Notes).
    cache : path, optional
        A local folder for the tables of ``too_long='split'``, which all processes and later runs
        share. Tables take 4 bytes per document and can be deleted at any time. Ignored on Windows.

    Notes
    -----
    With ``too_long='split'``, each document is cut into pieces of `budget` tokens and a remainder,
    and rows consist of pieces. Each index is the position of a piece's first token in the
    concatenation of all documents. `samples` is the total number of tokens, which must be below
    2**48. If pieces cannot fill at least 99.9 % of the rows' space, `describe` reports the maximum.

    Examples
    --------
    >>> order = cseq.Packed([3, 5, 4, 9, 10, 3], budget=12)
    >>> order
    <Packed: 3 rows, filled to 94.44 %, 1–3 samples a row>
    >>> sorted(map(sorted, order.batches(seed=1)))
    [[0, 1, 2], [3, 5], [4]]

    The second document, at positions 5 to 24, is cut at 17. Its remainder and the last document
    form a row:

    >>> order = cseq.Packed([5, 20, 0, 3], budget=12, too_long="split")
    >>> sorted(map(sorted, order.batches(seed=1)))
    [[0], [5], [17, 25]]
    """

    name = "packed-v1"

    def __init__(
        self,
        lengths: ArrayLike,
        budget: int,
        *,
        quantum: int = 1,
        too_long: str = "error",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        budget = integer("budget", budget, 1, MOST_BUDGET)
        quantum = integer("quantum", quantum, 1, budget)
        choice("too_long", too_long, ("error", "drop", "split"))
        rooms, most = budget // quantum, MOST_COUNTED if too_long == "split" else MOST_ROOMS
        if rooms > most:
            raise ValueError(
                f"budget={budget} is too large for quantum={quantum}: a row would have {rooms} "
                f"quanta; pass a quantum of at least {-(-budget // most)}"
            )
        if cache is not None and too_long != "split":
            raise ValueError(f"cache={cache!r} is valid only with too_long='split'; omit it")
        self._bound, total = "", 0.0
        if too_long == "split":
            self.name = "packed-split-v1"
            self._folder = cache_of(cache)
            pieces = Pieces(lengths, budget, quantum, best_fit, self._folder)
            options = {"quantum": quantum, "too_long": too_long, "cache": self._folder}
            self._made_with = pieces.ends.lengths, {"budget": budget, **options}
            super().__init__(pieces.ends.total, pieces, *pieces.recipes)
            lengths_of = pieces.lengths
            total, said = pieces.ends.total, pieces.fingerprint
            least = fewest_rows(pieces.lengths, pieces.sizes, rooms)
            if least > SHOWN * total / budget + 1:
                share = 100 * total / (least * budget)
                self._bound = f" ({share:.4g} % at most, because pieces stay whole)"
        else:
            checked = Lengths(lengths, budget, too_long)
            lengths_of = np.unique(np.minimum(-(-checked.distinct() // quantum), rooms))
            bounds = lengths_of * quantum
            bounds[-1] = max(bounds[-1], checked.longest)
            classes = checked.classes(bounds)
            super().__init__(checked.samples, classes, *best_fit(lengths_of, classes.sizes, rooms))
            self.left_out = checked.left_out()
            total, said = checked.total, checked.fingerprint
        whole = np.minimum(lengths_of * quantum, budget)
        lengths_in, counts = whole.take(self.parts[:, 0]), self.parts[:, 1]
        self._works = np.add.reduceat(lengths_in.astype(np.float64) ** 2 * counts, self.first[:-1])
        self._tokens = None
        if quantum == 1:
            self._tokens = np.add.reduceat(lengths_in * counts, self.first[:-1])
        # If `room` were 1, units would be treated as single samples.
        self.room = max(2, self.room)
        self.tokens = total / self.units
        self._used = self.tokens / budget
        sizes = {"budget": budget, "quantum": quantum, "too_long": too_long}
        self._facts = {"lengths": said} | sizes

    def describe(self) -> str:
        parts = "samples" if self.name == "packed-v1" else "pieces"
        said = (
            f"{self.units:,} rows, filled to {100 * self._used:.4g} %{self._bound}, "
            f"{self.fewest:,}–{self.sizes.max():,} {parts} a row"
        )
        return f"{said}; {self.left_out}" if self.left_out else said

    def measured(self, seed: int) -> tuple[Reader, Works]:
        reader, epoch_of = self.opened(seed)
        return reader, lambda epoch, units: self._works.take(epoch_of(epoch).recipes_of(units)[1])

    def token_sums(self, seed: int) -> Sums | None:
        tokens, (_, epoch_of) = self._tokens, self.opened(seed)
        if tokens is None:
            return None
        return lambda epoch, units: [int(tokens.take(epoch_of(epoch).recipes_of(units)[1]).sum())]


def best_fit(lengths: Ints, counts: Ints, budget: int) -> tuple[Ints, Ints, Ints]:
    """Pack samples into rows with the best-fit decreasing algorithm.

    `lengths` (ascending, up to `budget`) and `counts` describe the classes of samples. Return
    `copies`, `first` and `parts` for `Recipes`.
    """
    # `rooms` lists the amounts of free space in ascending order. `kinds` maps them to rows.
    rooms: list[int] = []
    kinds: dict[int, deque[tuple[int, Contents]]] = {}

    def add(room: int, rows: int, contents: Contents) -> None:
        if room not in kinds:
            insort(rooms, room)
            kinds[room] = deque()
        kinds[room].append((rows, contents))

    for c in reversed(range(len(lengths))):
        length, left = int(lengths[c]), int(counts[c])
        while left:
            k = bisect_left(rooms, length)
            if k == len(rooms):
                many = budget // length
                for rows, size in ((left // many, many), (1, left % many)):
                    if rows and size:
                        add(budget - size * length, rows, (c, size, None))
                break
            room = rooms[k]
            available, contents_before = kinds[room].popleft()
            many = min(room // length, left)
            rows = min(available, left // many)
            if rows < available:
                kinds[room].appendleft((available - rows, contents_before))
            elif not kinds[room]:
                del kinds[room], rooms[k]
            add(room - many * length, rows, (c, many, contents_before))
            left -= rows * many
    copies, first, ranks = [], [0], [0] * len(lengths)
    parts: list[tuple[int, int, int]] = []
    for rows, kind_contents in (kind for room in rooms for kind in kinds[room]):
        unit, contents = [], kind_contents
        while contents is not None:
            c, many, contents = contents
            unit.append((c, many, ranks[c]))
            ranks[c] += rows * many
        copies.append(rows)
        parts += reversed(unit)
        first.append(len(parts))
    return np.array(copies, np.int64), np.array(first, np.int64), np.array(parts, np.int64)
