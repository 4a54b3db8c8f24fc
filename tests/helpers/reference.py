"""fisher-yates-v1, feistel-v1 and generator-states-v1 in plain Python: docs/inside/shuffle.md."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WORD = 2**64 - 1
IV = int.from_bytes(b"cseq-v1\0", "big")
GOLDEN = 0x9E3779B97F4A7C15
SHUFFLE, INDEXER, BATCH, MAKING, FEISTEL = 1, 2, 4, 5, 6
LEAST = 65536  # samples that feistel-v1 has an order of its own for


def mix(v: int) -> int:
    v = (v + GOLDEN) & WORD
    v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 & WORD
    v = (v ^ v >> 27) * 0x94D049BB133111EB & WORD
    return v ^ v >> 31


def derive(seed: int, epoch: int, purpose: int, count: int) -> tuple[int, ...]:
    z = mix(mix(mix(IV ^ seed) ^ epoch) ^ purpose)
    return tuple(mix(z + k * GOLDEN & WORD) for k in range(count))


def rotate(v: int, bits: int) -> int:
    return (v << bits | v >> 64 - bits) & WORD


def words(state: Iterable[int]) -> Iterator[int]:
    a, b, c, d = state
    while True:
        yield (rotate(a + d & WORD, 23) + a) & WORD
        c, d, shifted = c ^ a, d ^ b, b << 17 & WORD
        b, a = b ^ c, a ^ d
        c, d = c ^ shifted, rotate(d, 45)


def bounded(stream: Iterator[int], limit: int) -> int:
    products = (word * limit for word in stream)
    return next(p for p in products if p & WORD >= 2**64 % limit) >> 64


def order(n: int, seed: int, epoch: int) -> Iterator[int]:
    stream = words(derive(seed, epoch, SHUFFLE, 4))
    moved: dict[int, int] = {}  # what is not at its own position
    for i in range(n):
        j = i + bounded(stream, n - i)
        here = moved.pop(i, i)
        yield here if i == j else moved.get(j, j)
        moved[j] = here


def feistel(n: int, seed: int, epoch: int, position: int) -> int:
    """Return the sample at a position of feistel-v1, for n of `LEAST` or more."""
    key = derive(seed, epoch, FEISTEL, 16)
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)

    def below(i: int, digit: int, limit: int) -> int:
        product = (digit ^ key[2 * i]) * (key[2 * i + 1] | 1)
        return (product & WORD ^ product >> 64) * limit >> 64

    value = position
    while True:
        row, column = divmod(value, b)
        for i in range(0, 8, 2):
            row = (row + below(i, column, a)) % a
            column = (column + below(i + 1, row, b)) % b
        value = row * b + column
        if value < n:
            return value


def twister(state: Iterable[int]) -> list[int]:
    return [
        half for word in itertools.islice(words(state), 312) for half in (word % 2**32, word >> 32)
    ]


def states(seed: int, epoch: int, start: int | None) -> tuple[list[int], list[int], int]:
    """Return the words of Python's and numpy's generator, and torch's seed; no start: MAKING."""
    if start is None:
        drawn = derive(seed, 0, MAKING, 9)
    else:
        drawn = derive(derive(seed, epoch, BATCH, 1)[0], start, BATCH, 9)
    return twister(drawn[:4]), twister(drawn[4:8]), drawn[8]


EPOCHS = ((0, 0), (0, 1), (1, 0), (2024, 7), (WORD, WORD))


def _states(seed: int, epoch: int, start: int | None) -> dict[str, Any]:
    record: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start}
    *keys, torch = states(seed, epoch, start)
    for name, key in zip(("random", "numpy.random"), keys, strict=True):
        digest = hashlib.sha256(struct.pack("<624I", *key)).hexdigest()
        record[name] = {"first": key[:3], "sha256": digest}
    return record | {"torch": torch}


def golden_states() -> dict[str, Any]:
    """Return all that is in the golden file of the generators' states."""
    places = [(seed, epoch, start) for seed, epoch in EPOCHS for start in (0, 32, WORD)]
    making = [(seed, 0, None) for seed in (0, 1, 2024, WORD)]
    return {"algorithm": "generator-states-v1", "states": [_states(*p) for p in places + making]}
