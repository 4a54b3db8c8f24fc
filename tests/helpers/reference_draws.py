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
