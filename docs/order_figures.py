"""Figures of orders: which samples lie in which batch, asked of the orders themselves.

Each is SVG in the page itself. A line is a batch, a square is a sample, and its colour says where
it comes from; where lengths matter, a sample is as wide as it is long, and a frame is padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from figures import figure

import cseq
from cseq.report.figures import Drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SEED = 5
# The widths of a figure and of the names of its lines, and the height of a line.
WIDTH, LEFT, LINE = 640, 76, 17
# The classes c0 to c5 of cseq.css.
COLORS = 6


def lines(found: Iterable[list[tuple[float, str]]], scale: float, caption: str) -> str:
    """Draw a line for each batch: pieces of a width and a class, one after the other."""
    found = list(found)
    drawing = Drawing(WIDTH, LINE * len(found) + 2, caption)
    for number, pieces in enumerate(found):
        y, x = LINE * number, float(LEFT)
        drawing.text(LEFT - 12, y + 12, f"batch {number}", "small faint end")
        for width, kind in pieces:
            drawing.rect(x, y + 1, max(2, width * scale - 1.5), 13, kind)
            x += width * scale
    return figure(drawing.inline(), caption, "wide")


def squares(
    order: cseq.Order, size: int, rows: int, kind: Callable[[int], int], caption: str
) -> str:
    """Draw the first batches of an order, a square for each sample."""
    batches = order.batches(size, seed=SEED, stop=rows)
    return lines(
        ([(1, f"c{kind(sample) % COLORS}") for sample in batch] for batch in batches),
        16,
        caption,
    )


def lengths_of(samples: int) -> np.ndarray:
    """Return lengths like the lengths of sentences: many short ones, few long ones."""
    drawn = np.random.default_rng(1).lognormal(2.6, 0.7, samples)
    return np.clip(drawn.astype(int), 2, 60)


def padded(order: cseq.Order, size: int, rows: int, lengths: np.ndarray, caption: str) -> str:
    """Draw batches whose samples are padded to the longest one of the batch."""

    def pieces(batch: list[int]) -> Iterable[tuple[float, str]]:
        longest = int(lengths[batch].max())
        for sample in batch:
            length = int(lengths[sample])
            yield length, f"c{min(4, length // 12)}"
            if length < longest:
                yield longest - length, "padding"

    batches = order.batches(size, seed=SEED, stop=rows)
    widest = max(len(batch) * int(lengths[batch].max()) for batch in batches)
    return lines(map(list, map(pieces, batches)), (WIDTH - LEFT - 4) / widest, caption)


def rows_of(order: cseq.Order, budget: int, rows: int, lengths: np.ndarray, caption: str) -> str:
    """Draw rows that are filled with samples one after the other."""

    def pieces(row: list[int]) -> Iterable[tuple[float, str]]:
        for sample in row:
            yield int(lengths[sample]), f"c{min(4, int(lengths[sample]) // 12)}"
        left = budget - int(lengths[row].sum())
        if left:
            yield left, "padding"

    batches = order.batches(1, seed=SEED, stop=rows)
    return lines(map(list, map(pieces, batches)), (WIDTH - LEFT - 4) / budget, caption)


def of_order(name: str) -> str:
    """Draw one of the figures of the page on orders."""
    return FIGURES[name]()


FIGURES: dict[str, Callable[[], str]] = {
    "sequential": lambda: squares(
        cseq.Sequential(192), 24, 6, lambda k: k // 32,
        "Sequential: 192 samples; the colour is the part of the data that a sample comes from.",
    ),
    "shuffled": lambda: squares(
        cseq.Shuffled(192), 24, 6, lambda k: k // 32,
        "Shuffled: the same samples, from everywhere in each batch.",
    ),
    "blocks": lambda: squares(
        cseq.Blocks(24, window=2, samples=144), 24, 6, lambda k: k // 24,
        "Blocks of 24 samples, shuffled in windows of two: each colour is a block. It is read "
        "once, and is over soon.",
    ),
    "weighted": lambda: squares(
        cseq.Weighted.balanced(LABELS), 24, 6, LABELS.__getitem__,
        "Weighted, balanced: the data has 160 green, 24 violet and 8 orange samples; the batches "
        "have as many of each.",
    ),
    "mixture": lambda: squares(
        cseq.Mixture(
            {"web": cseq.Shuffled(600), "code": cseq.Shuffled(200), "books": cseq.Shuffled(100)},
            {"web": 0.6, "code": 0.3, "books": 0.1},
            block=40,
        ), 24, 6, lambda k: (k >= 600) + (k >= 800),
        "Mixture: 60 % web (green), 30 % code (violet), 10 % books (orange), exact in each block.",
    ),
    "groups": lambda: squares(
        cseq.Groups([k % 6 for k in range(240)], classes=4, samples=6), 1, 6, lambda k: k % 6,
        "Groups: four of six classes in a batch, six samples of each.",
    ),
    "unsorted": lambda: padded(
        cseq.Shuffled(400), 8, 6, LENGTHS,
        "Shuffled sentences, eight in a batch, each padded to the longest one of its batch: the "
        "frames are padding.",
    ),
    "buckets": lambda: padded(
        cseq.Buckets(LENGTHS, budget=300, ratio=1.2, together=1), 1, 6, LENGTHS,
        "Buckets: sentences of about the same length come together, as many as a budget of 300 "
        "tokens has room for.",
    ),
    "packed": lambda: rows_of(
        cseq.Packed(LENGTHS, budget=128), 128, 6, LENGTHS,
        "Packed: rows of at most 128 tokens, filled with whole sentences.",
    ),
}  # fmt: skip

LABELS = [0] * 160 + [1] * 24 + [2] * 8
LENGTHS = lengths_of(400)
