"""The permutations that orders are made of, in plain Python: docs/inside/orders.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reference import GOLDEN, IV, LEAST, WORD, bounded, mix, words

if TYPE_CHECKING:
    from collections.abc import Callable


def stream(seed: int, epoch: int, purpose: int, key: int | None = None) -> int:
    z = mix(mix(mix(IV ^ seed) ^ epoch) ^ purpose)
    return z if key is None else mix(z ^ key)


def derive(z: int, count: int) -> list[int]:
    return [mix(z + k * GOLDEN & WORD) for k in range(count)]


def shuffled(elements: list[Any], z: int) -> list[Any]:
    drawn, elements = words(derive(z, 4)), elements.copy()
    for i in range(len(elements)):
        j = i + bounded(drawn, len(elements) - i)
        elements[i], elements[j] = elements[j], elements[i]
    return elements


def perm(n: int, z: int) -> Callable[[int], int]:
    if n < LEAST:
        return shuffled(list(range(n)), z).__getitem__
    key, a = derive(z, 16), math.isqrt(n - 1) + 1
    b = -(-n // a)

    def below(i: int, digit: int, limit: int) -> int:
        product = (digit ^ key[2 * i]) * (key[2 * i + 1] | 1)
        return (product & WORD ^ product >> 64) * limit >> 64

    def network(value: int) -> int:
        row, column = divmod(value, b)
        for i in range(0, 8, 2):
            row = (row + below(i, column, a)) % a
            column = (column + below(i + 1, row, b)) % b
        value = row * b + column
        return value if value < n else network(value)

    return network


def blocks(n: int, rows: int, window: int, lanes: int, seed: int, epoch: int) -> list[int]:
    """Return an epoch of blocks-v2."""
    whole, count = n // rows, -(-n // (rows * window))
    order = perm(whole, stream(seed, epoch, 7, 0))
    layout = [order(q) * rows + k for q in range(whole) for k in range(rows)]
    layout += range(whole * rows, n)
    dealt = lanes if whole // lanes >= count else 1
    size, larger = divmod(whole // dealt, count)
    starts = [rows * dealt * (j * size + min(j, larger)) for j in range(count)] + [n]
    first, turn = (
        word * below >> 64
        for word, below in zip(derive(stream(seed, epoch, 7, 1), 2), (count, lanes), strict=True)
    )
    samples: list[int] = []
    for j in [*range(first, count), *range(first)]:
        at, there = starts[j], range(len(samples), len(samples) + starts[j + 1] - starts[j])
        samples += layout[at : at + len(there)]
        for lane in range(lanes):
            ours = [p for p in there if (p + turn) % lanes == lane]
            part = shuffled(layout[at : at + len(ours)], stream(seed, epoch, 8, at))
            at += len(ours)
            for p, sample in zip(ours, part, strict=True):
                samples[p] = sample
    return samples


def batches(
    classes: list[list[int]],
    sizes: list[int],
    together: int,
    seed: int,
    epoch: int,
    *,
    longest_first: bool = False,
) -> list[list[int]]:
    """Return an epoch of buckets-v2: of samples by class, and the size of a batch of each."""
    units, longest = [], 0
    for c, (samples, size) in enumerate(zip(classes, sizes, strict=True)):
        order = perm(len(samples), stream(seed, epoch, 10, c))
        mixed = [samples[order(k)] for k in range(len(samples))]
        longest = len(units) if samples else longest
        units += [mixed[k : k + size] for k in range(0, len(samples), size)]
    groups, short = divmod(len(units), together)
    place, turn = derive(stream(seed, epoch, 9, 1), 2)
    at, turn = place * len(units) >> 64, turn * together >> 64
    if longest_first and groups:
        at = (longest + 1 + (place * (len(units) - short) >> 64)) % len(units)
    last = [(at + k) % len(units) for k in range(short)]
    others = [x for x in range(len(units)) if x not in last]
    numbers = list(map(perm(groups, stream(seed, epoch, 9, 0)), range(groups)))
    if longest_first and groups:
        shift = others.index(longest) // together - numbers[0]
        numbers = [(number + shift) % groups for number in numbers]
    where = [g * together + (k + turn) % together for g in numbers for k in range(together)]
    return [units[others[k]] for k in where] + [units[x] for x in last]
