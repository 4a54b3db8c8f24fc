"""buckets-v1, packed-v1 and groups-v1 in plain Python: docs/inside/orders.md.

``python tests/helpers/reference_recipes.py buckets > tests/golden/orders_buckets.json`` writes the
file there, and ``packed`` and ``groups`` in place of ``buckets`` the other ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import sys
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from reference import GOLDEN, IV, LEAST, WORD, bounded, mix, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

UNITS, MEMBERS, GROUPS = 9, 10, 14
Part = tuple[
    int, int, int
]  # class, samples of it in a unit, rank of the first one in the first unit


def derive(seed: int, epoch: int, purpose: int, key: int, count: int) -> list[int]:
    z = mix(mix(mix(mix(IV ^ seed) ^ epoch) ^ purpose) ^ key)
    return [mix(z + k * GOLDEN & WORD) for k in range(count)]


def perm(n: int, seed: int, epoch: int, purpose: int, key: int) -> Callable[[int], int]:
    """Return position → element: fisher-yates-v1 of few elements, else feistel-v1."""
    drawn = derive(seed, epoch, purpose, key, 16)
    if n < LEAST:
        stream, elements = words(drawn[:4]), list(range(n))
        for i in range(n):
            j = i + bounded(stream, n - i)
            elements[i], elements[j] = elements[j], elements[i]
        return elements.__getitem__
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)

    def below(i: int, digit: int, limit: int) -> int:
        product = (digit ^ drawn[2 * i]) * (drawn[2 * i + 1] | 1)
        return (product & WORD ^ product >> 64) * limit >> 64

    def network(value: int) -> int:
        while True:
            row, column = divmod(value, b)
            for i in range(0, 8, 2):
                row = (row + below(i, column, a)) % a
                column = (column + below(i + 1, row, b)) % b
            value = row * b + column
            if value < n:
                return value

    return network


def fingerprint(values: Sequence[int]) -> int:
    z = mix(IV ^ len(values))
    for value in values:
        z = mix(z ^ value & WORD)
    return z


class Recipe(NamedTuple):
    copies: int
    parts: list[Part]


class Units(NamedTuple):
    """An order by recipes."""

    classes: list[list[int]]
    recipes: list[Recipe]
    together: int
    longest: int | None = None

    @property
    def total(self) -> int:
        return sum(recipe.copies for recipe in self.recipes)

    def numbers(self, seed: int, epoch: int) -> list[int]:
        """Return the units of an epoch, each by its number in the list of recipes."""
        size = self.together
        count, rest = divmod(self.total, size)
        groups = [perm(count, seed, epoch, UNITS, 0)(k) for k in range(count)]
        at = derive(seed, epoch, UNITS, 1, 1)[0] * (count + 1) >> 64
        if self.longest is not None and count:
            at = count if self.longest < rest else 0
            wanted = (self.longest - (0 if at else rest)) // size
            groups = [(group - groups[0] + wanted) % count for group in groups]
        firsts = [group * size + (rest if group >= at else 0) for group in groups]
        tail = range(at * size, at * size + rest)
        return [first + k for first in firsts for k in range(size)] + list(tail)

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """Return the samples of all units of an epoch."""
        orders = [perm(len(c), seed, epoch, MEMBERS, k) for k, c in enumerate(self.classes)]
        units = [
            [
                self.classes[c][orders[c](base + copy * many + k)]
                for c, many, base in recipe.parts
                for k in range(many)
            ]
            for recipe in self.recipes
            for copy in range(recipe.copies)
        ]
        return [units[x] for x in self.numbers(seed, epoch)]


def classes(of: Sequence[int], count: int) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in range(count + 1)]  # the last one: class -1
    for sample, number in enumerate(of):
        made[number].append(sample)
    return made[:count]


def cut(members: list[list[int]], sizes: Sequence[int]) -> list[Recipe]:
    """Cut each class into batches, and a short one of the rest."""
    made = []
    for c, (those, size) in enumerate(zip(members, sizes, strict=True)):
        full, rest = divmod(len(those), size)
        made += [Recipe(full, [(c, size, 0)])] * (full > 0)
        made += [Recipe(1, [(c, rest, full * size)])] * (rest > 0)
    return made


def buckets(
    lengths: Sequence[int],
    budget: int,
    *,
    ratio: float = 1.1,
    boundaries: Sequence[int] | None = None,
    most: int | None = None,
    together: int = 8,
    longest_first: bool = False,
) -> Units:
    """Return `cseq.Buckets`; what is too long is left out."""
    kept = [length for length in lengths if length <= budget]
    if boundaries is None:
        bounds = [min(kept)]
        while bounds[-1] < max(kept):
            bounds.append(min(max(bounds[-1] + 1, int(bounds[-1] * ratio)), max(kept)))
    else:
        bounds = [bound for bound in boundaries if bound < max(kept)]
        bounds.append(next((bound for bound in boundaries if bound >= max(kept)), max(kept)))
    of = [bisect_left(bounds, length) if length <= budget else -1 for length in lengths]
    sizes = [min(budget // bound, most or budget) for bound in bounds]
    made = classes(of, len(bounds))
    recipes = cut(made, sizes)
    before = [r.copies for r in recipes if r.parts[0][0] < len(bounds) - 1]
    return Units(made, recipes, together, sum(before) if longest_first else None)


def packed(lengths: Sequence[int], budget: int, *, quantum: int = 1) -> Units:
    """Return `cseq.Packed`; what is too long is left out."""
    rooms = budget // quantum
    rounded = [min(-(-length // quantum), rooms) if length <= budget else 0 for length in lengths]
    names = sorted({*rounded} - {0})
    made = classes([names.index(each) if each else -1 for each in rounded], len(names))
    open_: dict[
        int, list[list[Any]]
    ] = {}  # by room: [rows, their parts], in the order they were made

    def add(room: int, rows: int, contents: list[tuple[int, int]]) -> None:
        if rows and contents[-1][1]:
            open_.setdefault(room, []).append([rows, contents])

    for c in reversed(range(len(names))):
        length, left = names[c], len(made[c])
        while left:
            room = min((room for room in open_ if room >= length), default=None)
            if room is None:
                many = rooms // length
                add(rooms - many * length, left // many, [(c, many)])
                add(rooms - left % many * length, 1, [(c, left % many)])
                break
            kind = open_[room][0]
            many = min(room // length, left)
            rows = min(kind[0], left // many)
            kind[0] -= rows
            if not kind[0]:
                open_[room].pop(0)
                if not open_[room]:
                    del open_[room]
            add(room - many * length, rows, [*kind[1], (c, many)])
            left -= rows * many
    ranks, recipes = [0] * len(names), []
    for room in sorted(open_):
        for rows, contents in open_[room]:
            recipes.append(Recipe(rows, [(c, many, ranks[c]) for c, many in contents]))
            for c, many in contents:
                ranks[c] += rows * many
    return Units(made, recipes, 1)


def groups(
    labels: Sequence[Any], chosen: int, each: int, epoch_size: int, seed: int, epoch: int
) -> Iterator[list[int]]:
    """Return the batches of an epoch of `cseq.Groups`."""
    names = sorted(set(labels))
    made = classes([names.index(label) for label in labels], len(names))
    of_round = len(made) // chosen
    for t in range(epoch_size):
        turn, group = divmod((epoch * epoch_size + t) % 2**63, of_round)
        order = perm(len(made), seed, 0, GROUPS, turn)
        batch = []
        for place in range(group * chosen, group * chosen + chosen):
            c = order(place)
            n = len(made[c])
            passed, piece = divmod(turn, max(1, n // each))
            ranks = perm(n, seed, 0, GROUPS, ((c + 1) * 2**32 + passed) % 2**64)
            batch += [made[c][ranks((piece * each + k) % n)] for k in range(each)]
        yield batch


# ── the golden files ──────────────────────────────────────────────────────────────────────────

EPOCHS = ((0, 0), (0, 1), (1, 0), (2024, 7), (WORD, WORD))


def lengths(n: int, shortest: int, spread: int) -> list[int]:
    """Return lengths that anybody can compute: few long ones."""
    return [shortest + mix(k) % spread * (mix(k) % 97) // 97 for k in range(n)]


def record(
    arguments: dict[str, Any], seed: int, epoch: int, units: list[list[int]]
) -> dict[str, Any]:
    """Return the first and the last units of an epoch, and the hash of sizes and samples of all."""
    flat = [*map(len, units), *itertools.chain.from_iterable(units)]
    digest = hashlib.sha256(struct.pack(f"<{len(flat)}Q", *flat)).hexdigest()
    shown = {"units": len(units), "first": units[0][:12], "last": units[-1][:12], "sha256": digest}
    return arguments | {"seed": seed, "epoch": epoch} | shown


BUCKETS: tuple[dict[str, Any], ...] = (
    {"lengths": (1, 5, 1), "budget": 9},
    {"lengths": (60, 3, 40), "budget": 120, "together": 3},
    {"lengths": (60, 3, 40), "budget": 120, "together": 3, "longest_first": True},
    {"lengths": (60, 3, 40), "budget": 90, "boundaries": [10, 20, 30], "most": 6, "together": 1},
    {"lengths": (3000, 16, 2000), "budget": 4096, "ratio": 1.25},
    {"lengths": (3000, 16, 2000), "budget": 1024, "ratio": 1.05, "together": 64},
    {"lengths": (90000, 1, 3), "budget": 600},
)
PACKED: tuple[dict[str, Any], ...] = (
    {"lengths": (1, 5, 1), "budget": 9},
    {"lengths": (60, 3, 40), "budget": 50},
    {"lengths": (60, 3, 40), "budget": 51, "quantum": 8},
    {"lengths": (3000, 16, 2000), "budget": 2048},
    {"lengths": (3000, 16, 2000), "budget": 1000, "quantum": 3},
    {"lengths": (90000, 1, 3), "budget": 600},
)
GROUPED: tuple[dict[str, Any], ...] = (
    {"labels": (20, 2), "classes": 1, "samples": 20, "epoch_size": 3},
    {"labels": (200, 7), "classes": 3, "samples": 4, "epoch_size": 17},
    {"labels": (200, 50), "classes": 8, "samples": 6, "epoch_size": 5},
    {"labels": (150000, 2), "classes": 2, "samples": 40, "epoch_size": 3},
)


def labels(n: int, count: int) -> list[int]:
    """Return labels that anybody can compute: uneven classes."""
    return [min(mix(k) % count, mix(n + k) % count) for k in range(n)]


def golden(arguments: dict[str, Any], make: Callable[..., Units]) -> list[dict[str, Any]]:
    """Return the records of some lengths."""
    given = dict(arguments)
    order = make(lengths(*given.pop("lengths")), **given)
    few = EPOCHS if order.total < 1000 else EPOCHS[-2:]
    return [record(arguments, *where, order.epoch(*where)) for where in few]


def golden_groups(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of some labels."""
    n, (chosen, each, size) = arguments["labels"], list(arguments.values())[1:]
    given = (labels(*n), chosen, each, size)
    few = EPOCHS if n[0] < 1000 else EPOCHS[-2:]
    return [record(arguments, *where, list(groups(*given, *where))) for where in few]


def write(name: str) -> None:
    """Write one record a line."""
    if name == "groups":
        made = [golden_groups(arguments) for arguments in GROUPED]
    else:
        all_arguments, make = (BUCKETS, buckets) if name == "buckets" else (PACKED, packed)
        made = [golden(arguments, make) for arguments in all_arguments]
    records = ",\n".join(f"    {json.dumps(each)}" for each in itertools.chain.from_iterable(made))
    sys.stdout.write(f'{{\n  "algorithm": "{name}-v1",\n  "orders": [\n{records}\n  ]\n}}\n')


if __name__ == "__main__":
    write(sys.argv[1])
