"""weighted-v1, mixture-v1 and blocks-v1 in plain Python: docs/inside/orders.md.

``python tests/helpers/reference_draws.py weighted > tests/golden/orders_weighted.json`` writes the
file there, and ``mixture`` and ``blocks`` in place of ``weighted`` the other ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from reference import EPOCHS, GOLDEN, IV, LEAST, WORD, bounded, mix, words

BLOCKS, WINDOW, MIXTURE, SOURCE, WEIGHTS = 7, 8, 11, 12, 13
Unit = list[int]
Source = tuple[int, Callable[[int, int], list[Unit]]]  # samples; units of (seed, pass)


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


# ── weighted-v1 ───────────────────────────────────────────────────────────────────────────────


def integers(weights: list[float]) -> list[int]:
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max(below for _, below in ratios)  # all are multiples of 1 / unit, a power of two
    exact = [above * (unit // below) for above, below in ratios]
    k = 63 - sum(exact).bit_length()
    while True:  # down to the largest k with a total below 2**62
        whole = [max(halves_to_even(weight, k), weight > 0) for weight in exact]
        if sum(whole) < 2**62:
            return whole
        k -= 1


def halves_to_even(number: int, k: int) -> int:
    return number << k if k >= 0 else round(Fraction(number, 1 << -k))


def weighted(
    weights: list[float], size: int, seed: int, epoch: int, *, replacement: bool = False
) -> list[int]:
    sums = list(itertools.accumulate(integers(weights)))
    total = sums[-1]
    if replacement:
        numbers = [word * total >> 64 for word in derive(stream(seed, epoch, WEIGHTS, 1), size)]
    else:
        z = stream(seed, epoch, WEIGHTS)
        place, offset = perm(size, z), derive(z, 17)[16] * total >> 64
        numbers = [(place(p) * total + offset) // size for p in range(size)]
    return [first_above(sums, number) for number in numbers]


def first_above(sums: list[int], number: int) -> int:
    low, high = 0, len(sums)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sums[middle] > number else (middle + 1, high)
    return low


# ── mixture-v1 ────────────────────────────────────────────────────────────────────────────────


def quotas(weights: list[Any], block: int) -> list[int]:
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * block / total for weight in weights]
    whole = [max(1, math.floor(part)) if part else 0 for part in exact]
    rests = [math.floor(part) - part for part in exact]
    by_rest = sorted(range(len(exact)), key=rests.__getitem__)  # the first of equal ones first
    for s in by_rest:
        whole[s] += sum(whole) < block
    while sum(whole) > block:
        whole[whole.index(max(whole))] -= 1
    return whole


def source_seed(seed: int, name: str) -> int:
    z = 0
    for byte in name.encode():
        z = mix(z ^ byte)
    return derive(stream(seed, 0, SOURCE, z), 1)[0]


def mixture(
    sources: dict[str, Source],
    phases: list[tuple[int, list[Any]]],
    block: int,
    seed: int,
    upto: int,
    *,
    since: int = 0,
    taken: dict[str, int] | None = None,
) -> tuple[list[Unit], dict[str, int]]:
    """Return the units from `since` up to a place of all epochs, and what was drawn by then."""
    names, drawn = list(sources), dict.fromkeys(sources, 0) | (taken or {})
    firsts = [0, *itertools.accumulate(samples for samples, _ in sources.values())]
    result: list[Unit] = []
    for number in range(-(-(upto - since) // block)):
        start = since + number * block
        weights = [each for unit, each in phases if unit <= start][-1]
        owners = [s for s, quota in enumerate(quotas(weights, block)) for _ in range(quota)]
        for s in shuffled(owners, stream(seed, 0, MIXTURE, number))[: upto - start]:
            _, units = sources[names[s]]
            begun = units(source_seed(seed, names[s]), 0)
            number_of_pass, unit = divmod(drawn[names[s]], len(begun))
            samples = units(source_seed(seed, names[s]), number_of_pass)[unit]
            result.append([firsts[s] + sample for sample in samples])
            drawn[names[s]] += 1
    return result, drawn


def plain(n: int) -> Source:
    """Return `Shuffled(n)`, for few samples: feistel-v1 is fisher-yates-v1 there, purpose 1."""
    return n, cache(
        lambda seed, epoch: [[k] for k in shuffled([*range(n)], stream(seed, epoch, 1))]
    )


# ── blocks-v1 ─────────────────────────────────────────────────────────────────────────────────


def blocks(
    n: int, rows: int, window: int, lanes: int, seed: int, epoch: int
) -> tuple[list[int], int]:
    """Return an epoch, and up to which position the lanes take turns."""
    count, each = -(-n // rows), window // lanes
    place = perm(count, stream(seed, epoch, BLOCKS, 0))
    order = [place(q) for q in range(count)]
    paths: list[list[int]] = []
    for lane in range(lanes):
        own, path = order[lane::lanes], []
        for k in range(0, len(own), each):
            samples = [
                i for b in own[k : k + each] for i in range(b * rows, min(n, (b + 1) * rows))
            ]
            path += shuffled(samples, stream(seed, epoch, WINDOW, lane << 40 | k // each))
        paths.append(path)
    least = min(map(len, paths))
    turns = [path[k] for k in range(least) for path in paths]
    return turns + [i for path in paths for i in path[least:]], least * lanes


def parts(order: list[int], body: int, lanes: int, ranks: int, size: int) -> list[list[list[int]]]:
    """Return each rank's part of each whole global batch."""
    together, cut = size * ranks, []
    for start in range(0, len(order) // together * together, together):
        batch = range(start, start + together)
        if lanes % ranks == 0 and together % lanes == 0 and start + together <= body:
            own = [
                [p for p in batch if p % lanes * ranks // lanes == rank] for rank in range(ranks)
            ]
        else:
            own = [[*batch[rank * size :][:size]] for rank in range(ranks)]
        cut.append([[order[p] for p in part] for part in own])
    return cut


# ── the golden files ──────────────────────────────────────────────────────────────────────────

WEIGHT = {
    "equal": lambda i: 0.1,
    "falling": lambda i: 1 / (i + 1),
    "some": lambda i: i % 7 / 3,
    "steep": lambda i: (1e300, 0.0, 1.0, 5e-324)[i % 4],
    "tiny": lambda i: 5e-324 * (i % 3),
}


def described(
    arguments: dict[str, Any], seed: int, epoch: int, values: list[int]
) -> dict[str, Any]:
    digest = hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()
    where = {"seed": seed, "epoch": epoch}
    return {**arguments, **where, "first": values[:10], "last": values[-1], "sha256": digest}


def golden_weighted() -> list[dict[str, Any]]:
    """Return all that is in the golden file."""
    made = []
    sizes = (
        (1, 1),
        (3, 10),
        (10, 3),
        (1000, 1000),
        (1000, 5000),
        (100, LEAST),
        (LEAST + 1, 70_000),
    )
    for k, ((n, size), kind) in enumerate(itertools.product(sizes, WEIGHT)):
        weights = [WEIGHT[kind](i + (kind != "equal")) for i in range(n)]
        seed, epoch = EPOCHS[k % len(EPOCHS)]
        for replacement in (False, True):
            arguments = {"weights": [kind, n], "size": size, "replacement": replacement}
            if any(weights) and (n < LEAST or kind == "falling"):
                drawn = weighted(weights, size, seed, epoch, replacement=replacement)
                made.append(described(arguments, seed, epoch, drawn))
    return made


MIXED = (
    ({"web": 300, "code": 70, "math": 9}, [[0, [0.7, 0.25, 0.05]]], 64),
    ({"math": 9, "code": 70}, [[0, [1e-9, 1]]], 10),
    ({"a": 5}, [[0, [3]]], 7),
    ({"é": 11, "": 12, "none": 3}, [[0, [1, 1, 0]], [95, [1, 1, 1]], [100, [0, 2, 1]]], 32),
    ({f"source {s}": s + 1 for s in range(100)}, [[0, [s + 1 for s in range(100)]]], 1024),
)


def golden_mixture() -> list[dict[str, Any]]:
    """Return all that is in the golden file: the first units of all epochs."""
    made = []
    for k, (sizes, phases, block) in enumerate(MIXED):
        seed, _ = EPOCHS[k]
        sources = {name: plain(n) for name, n in sizes.items()}
        units, _ = mixture(sources, [(u, w) for u, w in phases], block, seed, 3000)
        arguments = {"sources": sizes, "weights": phases, "block": block}
        made.append(described(arguments, seed, 0, [sample for (sample,) in units]))
    return made


def golden_blocks() -> list[dict[str, Any]]:
    """Return all that is in the golden file."""
    shapes = (
        (1, 1, 1, 1),
        (10, 3, 2, 1),
        (10, 3, 2, 2),
        (100, 7, 8, 4),
        (1000, 1, 64, 8),
        (1000, 16, 512, 8),
        (1000, 16, 8, 8),
        (997, 10, 12, 3),
        (5, 100, 4, 4),
        (20_000, 64, 32, 8),
        (131_075, 2, 100, 4),
    )
    made = []
    for k, (n, rows, window, lanes) in enumerate(shapes):
        seed, epoch = EPOCHS[k % len(EPOCHS)]
        arguments = {"n": n, "rows": rows, "window": window, "lanes": lanes}
        order, _ = blocks(n, rows, window, lanes, seed, epoch)
        made.append(described(arguments, seed, epoch, order))
    return made


if __name__ == "__main__":
    goldens = {"weighted": golden_weighted, "mixture": golden_mixture, "blocks": golden_blocks}
    records = ",\n".join(f"    {json.dumps(record)}" for record in goldens[sys.argv[1]]())
    sys.stdout.write(f'{{\n  "algorithm": "{sys.argv[1]}-v1",\n  "orders": [\n{records}\n  ]\n}}\n')
