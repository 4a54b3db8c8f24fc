"""Classes of interchangeable samples, and recipes that build units from them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq.check import choice, integer, integers, one_dimensional
from cseq.order._readers import CHUNK, MEMBERS, UNITS, Permutation, drawn, fingerprint
from cseq.order.base import Order, by_epoch, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Read

# Tables store each sample in 4 bytes.
MOST_SAMPLES = 2**32
MOST_BUDGET = 2**62
# Takes (classes, ranks, counts). Reads `counts[k]` samples of `classes[k]` from rank `ranks[k]`.
ReadMembers: TypeAlias = "Callable[[Ints, Ints, Ints], NDArray[np.integer[Any]]]"
# `distinct` uses a lookup table if longest - shortest exceeds the sample count by at most this.
DENSE = 2**16
# Maximum fraction of samples or tokens that may be left out without a warning.
LITTLE = 0.01


class Classes:
    """A table of samples sorted by class, with 4 bytes per sample.

    `of` contains the class of each sample, or `count` for a sample that is left out. `offsets`
    contains the start of each class and the end of the last one.
    """

    def __init__(self, of: NDArray[np.uint32], count: int) -> None:
        self.count = count
        self.offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(of, minlength=count)[:count], out=self.offsets[1:])
        self.sizes = np.diff(self.offsets)
        # A radix sort, 16 bits at a time, takes linear time.
        order = of.astype(np.uint16).argsort(kind="stable")
        if count >= 2**16:
            order = order[(of >> np.uint32(16)).astype(np.uint16)[order].argsort(kind="stable")]
        self.table = order[: self.offsets[count]].astype(np.uint32)
        for array in (self.table, self.offsets, self.sizes):
            array.flags.writeable = False

    def members(self, seed: int, epoch: int) -> ReadMembers:
        return Members(self, seed, epoch).samples_of


class Members:
    """The samples of each class, shuffled with a permutation keyed by class number."""

    def __init__(self, classes: Classes, seed: int, epoch: int) -> None:
        self.classes, self.seed, self.epoch = classes, seed, epoch
        self.made = np.zeros(classes.count, np.bool_)
        # Small classes are shuffled with a lookup table, large ones with `computed`.
        self.samples = np.empty(len(classes.table), np.uint32)
        self.computed: dict[int, Permutation] = {}

    def samples_of(self, classes: Ints, ranks: Ints, counts: Ints) -> NDArray[np.uint32]:
        """Read `counts[k]` samples from class `classes[k]`, starting at `ranks[k]`."""
        table, offsets = self.classes.table, self.classes.offsets
        for c in set(classes[~self.made[classes]].tolist()):
            order = Permutation(int(self.classes.sizes[c]), self.seed, self.epoch, MEMBERS, c)
            if order.table is None:
                self.computed[c] = order
            else:
                part = slice(offsets[c], offsets[c + 1])
                self.samples[part] = table[part].take(order.table)
            self.made[c] = True
        entries = spans(offsets.take(classes) + ranks, counts)
        samples = self.samples.take(entries)
        for c in self.computed.keys() & set(classes.tolist()) if self.computed else ():
            ours = (offsets[c] <= entries) & (entries < offsets[c + 1])
            samples[ours] = table[offsets[c] + self.computed[c].at(entries[ours] - offsets[c])]
        return samples


class Lengths:
    """Validated sample lengths, read in chunks.

    `shortest`, `longest` and `total` do not include samples dropped by `too_long`.
    """

    def __init__(self, lengths: ArrayLike, budget: int, too_long: str) -> None:
        remedy = "pass positive integers, such as numpy.ceil(lengths).astype(int)"
        self.values = integers("lengths", lengths, remedy)
        self.samples, self.budget = len(self.values), budget
        drop = choice("too_long", too_long, ("error", "drop")) == "drop"
        self.shortest, self.longest, self.dropped = budget, 0, 0
        # Token counts of the kept samples (`total`) and the dropped ones (`lost`).
        self.total = self.lost = 0.0
        for start, chunk in _chunks(self.values):
            low, high, kept = int(chunk.min()), int(chunk.max()), chunk
            if low < 1:
                raise ValueError(
                    f"lengths[{start + int(chunk.argmin())}]={low} is below 1; leave this sample "
                    "out, or give it a length of 1"
                )
            if high > budget:
                if not drop:
                    raise ValueError(
                        f"lengths[{start + int(chunk.argmax())}]={high} exceeds budget={budget}; "
                        "truncate this sample, pass a larger budget, or pass too_long='drop' to "
                        "leave such samples out"
                    )
                kept = chunk[chunk <= budget]
                self.dropped += len(chunk) - len(kept)
                self.lost += float(chunk[chunk > budget].sum(dtype=np.float64))
                high = int(kept.max(initial=0))
            self.shortest, self.longest = min(self.shortest, low), max(self.longest, high)
            self.total += float(kept.sum(dtype=np.float64))
        if self.dropped == self.samples:
            raise ValueError(
                f"all {self.samples} lengths exceed budget={budget}; pass a larger budget"
            )
        self.fingerprint = fingerprint(self.values)

    def left_out(self) -> str:
        """Describe the dropped samples, and issue a warning if there are many."""
        if not self.dropped:
            return ""
        samples, tokens = self.dropped / self.samples, self.lost / (self.lost + self.total)
        said = (
            f"{self.dropped:,} of {self.samples:,} samples ({100 * tokens:.4g} % of all tokens) "
            "are left out because they are too long"
        )
        if max(samples, tokens) > LITTLE:
            warnings.warn(
                f"with too_long='drop' and budget={self.budget}, {said}; truncate them, or pass a "
                "larger budget",
                stacklevel=3,
            )
        return said

    def distinct(self) -> Ints:
        if self.longest - self.shortest > self.samples + DENSE:
            return np.unique(self.values[self.values <= self.longest]).astype(np.int64)
        seen = np.zeros(self.longest - self.shortest + 1, np.bool_)
        for _, chunk in _chunks(self.values):
            seen[chunk[chunk <= self.longest].astype(np.int64) - self.shortest] = True
        return np.flatnonzero(seen) + self.shortest

    def classes(self, bounds: Ints) -> Classes:
        """Classify samples by the first bound that is at least their length."""
        classes = np.empty(self.samples, np.uint32)
        for start, chunk in _chunks(self.values):
            inside = chunk <= self.longest
            numbers = bounds.searchsorted(np.where(inside, chunk, 0).astype(np.int64))
            classes[start : start + CHUNK] = np.where(inside, numbers, len(bounds))
        return Classes(classes, len(bounds))


class Labels:
    """Validated labels: `numbers` are indices into `values`, the sorted distinct labels."""

    def __init__(self, labels: ArrayLike) -> None:
        given = one_dimensional("labels", labels)
        if given.dtype.kind not in "iubUS" or (given.dtype == np.uint64 and given.max() >= 2**63):
            raise TypeError(
                f"labels has values of type {given.dtype}, such as {given[0]!r}; pass integers "
                "below 2**63, or strings"
            )
        self.values, inverse = np.unique(given, return_inverse=True)
        self.numbers = inverse.astype(np.uint32)
        self.classes = Classes(self.numbers, len(self.values))
        self.fingerprint = fingerprint(self.numbers)


class Recipes(Order):
    """Units made from recipes, which specify the number of samples to take from each class.

    Every epoch has the same units in a different order, with different samples.

    Parameters
    ----------
    samples, classes :
        The number of samples, and their classes.
    copies, first : numpy.ndarray
        The number of units per recipe, and the index of each recipe's first part, followed by the
        total number of parts.
    parts : numpy.ndarray
        For each part: its class, samples per unit, and the rank of the first unit's first sample.
    together : int
        The number of consecutive units (in recipe order) to keep together.
    longest : int, optional
        A unit whose group comes first in every epoch.
    """

    def __init__(
        self,
        samples: int,
        classes: Classes,
        copies: Ints,
        first: Ints,
        parts: Ints,
        *,
        together: int = 1,
        longest: int | None = None,
    ) -> None:
        self.samples = samples
        self.classes = classes
        self.starts = np.append(0, np.cumsum(copies))
        self.first, self.parts = first, parts
        self.together = integer("together", together, 1, MOST_SAMPLES)
        self.longest = longest
        self.sizes = sizes = np.add.reduceat(parts[:, 1], first[:-1])
        self.units, self.fewest, self.room = int(copies.sum()), int(sizes.min()), int(sizes.max())
        for array in (self.starts, first, parts):
            array.flags.writeable = False

    def facts(self) -> dict[str, Any]:
        ours = {"name": self.name, "samples": self.samples, "together": self.together}
        return ours | (self._facts or {})

    def reader(self, seed: int) -> Reader:
        return self.opened(seed)[0]

    def opened(self, seed: int) -> tuple[Reader, Callable[[int], Epoch]]:
        return by_epoch(self, seed, partial(Epoch, self, seed))


class Epoch:
    """The order of the units in an epoch.

    Groups of `together` units are shuffled. The remaining units, which start at unit `at`, come
    last. The units in each group are rotated by `turn`.
    """

    def __init__(self, order: Recipes, seed: int, epoch: int) -> None:
        self.recipes = order
        self.groups, self.rest = divmod(order.units, order.together)
        self.order = Permutation(self.groups, seed, epoch, UNITS, 0)
        self.members = order.classes.members(seed, epoch)
        longest = order.longest if self.groups else None
        among = order.units if longest is None else order.units - self.rest
        self.at, self.turn = (
            int(drawn(np.array([k]), below, seed, epoch, UNITS, 1)[0])
            for k, below in enumerate((among, order.together))
        )
        self.shift = 0
        if longest is not None:
            # Keep the longest unit out of the short group, and move its own group to the front.
            self.at = (longest + 1 + self.at) % order.units
            before = self.rest if longest >= self.at else self.before
            wanted = (longest - before) // order.together
            self.shift = wanted - int(self.order.at(np.zeros(1, np.int64))[0])

    @property
    def before(self) -> int:
        """The number of units in the short group that wrap around to unit 0."""
        return max(0, self.at + self.rest - self.recipes.units)

    def recipes_of(self, units: Ints) -> tuple[Ints, Ints]:
        """Return each unit's index in recipe order, and its recipe."""
        units_of_all, together = self.recipes.units, self.recipes.together
        numbers = (units - self.groups * together + self.at) % units_of_all
        grouped = units < self.groups * together
        if self.groups:
            group_numbers, inside = np.divmod(units[grouped], together)
            group = (self.order.at(group_numbers).astype(np.int64) + self.shift) % self.groups
            others = group * together + (inside + self.turn) % together + self.before
            numbers[grouped] = others + (others >= self.at) * (self.rest - self.before)
        return numbers, self.recipes.starts.searchsorted(numbers, "right") - 1

    def read(self, units: Ints) -> Read:
        order = self.recipes
        numbers, recipes = self.recipes_of(units)
        copies, parts = numbers - order.starts.take(recipes), recipes
        # Skip this step if every recipe has a single part.
        if len(order.parts) > len(order.sizes):
            first = order.first.take(recipes)
            counts = order.first.take(recipes + 1) - first
            copies, parts = copies.repeat(counts), spans(first, counts)
        classes, many, base = order.parts.take(parts, 0).T
        return self.members(classes, base + copies * many, many), order.sizes.take(recipes)


def _chunks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for start in range(0, len(values), CHUNK):
        yield start, values[start : start + CHUNK]
