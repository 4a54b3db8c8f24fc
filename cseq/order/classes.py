"""Samples by class: they can stand in for each other. Recipes of units of them."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq.check import choice, integer
from cseq.order._readers import CHUNK, MEMBERS, UNITS, ArrayReader, Permutation, drawn, fingerprint
from cseq.order.base import Order, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Floats, Ints, Read, Sums, Works

__all__ = ["MOST_BUDGET", "MOST_SAMPLES", "Classes", "Labels", "Lengths", "Members", "Recipes"]

MOST_SAMPLES = 2**32  # a sample takes 4 bytes of the table
MOST_BUDGET = 2**62
ReadMembers: TypeAlias = "Callable[[Ints, Ints, Ints], NDArray[np.integer[Any]]]"
Drawn: TypeAlias = "tuple[Permutation, int, int, int, ReadMembers]"
DENSE = 2**16  # a table may be longer by this than the values are many
LITTLE = 0.01  # of the samples or tokens may be left out without a warning


class Classes:
    """A table of samples, class after class: 4 bytes each.

    `of` has the class of each sample, and `count` for one that is left out; `offsets` says where
    each class begins in the table, and where the last one ends.
    """

    def __init__(self, of: NDArray[np.uint32], count: int) -> None:
        self.count = count
        self.offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(of, minlength=count)[:count], out=self.offsets[1:])
        self.sizes = np.diff(self.offsets)
        order = of.astype(np.uint16).argsort(kind="stable")  # in linear time, half by half
        if count >= 2**16:
            order = order[(of >> np.uint32(16)).astype(np.uint16)[order].argsort(kind="stable")]
        self.table = order[: self.offsets[count]].astype(np.uint32)
        for array in (self.table, self.offsets, self.sizes):
            array.flags.writeable = False

    def members(self, seed: int, epoch: int) -> ReadMembers:
        """Return what reads members of classes in an epoch's order: see `Members.read`."""
        return Members(self, seed, epoch, MEMBERS).read


class Members:
    """The samples of classes, each class in an order of its own: the key is the class."""

    def __init__(self, classes: Classes, seed: int, epoch: int, purpose: int) -> None:
        self.classes, self.words = classes, (seed, epoch, purpose)
        self.made = np.zeros(classes.count, np.bool_)
        self.samples = np.empty(len(classes.table), np.uint32)  # of the classes that are made
        self.computed: dict[int, Permutation] = {}  # of large classes

    def read(self, classes: Ints, ranks: Ints, counts: Ints) -> NDArray[np.uint32]:
        """Return some samples of each of these classes, beginning at a rank."""
        table, offsets = self.classes.table, self.classes.offsets
        for c in set(classes[~self.made[classes]].tolist()):
            order = Permutation(int(self.classes.sizes[c]), *self.words, c)
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
    """The lengths of samples, checked. They are read in pieces, and not written to.

    What exceeds `budget` is dropped if `too_long` is 'drop', and refused if it is 'error';
    `shortest`, `longest` and `total` are the others'.
    """

    def __init__(self, lengths: ArrayLike, budget: int, too_long: str) -> None:
        self.values = one_dimensional("lengths", lengths)
        self.count, self.budget = len(self.values), budget
        drop = choice("too_long", too_long, ("error", "drop")) == "drop"
        if self.values.dtype.kind not in "iu":
            raise TypeError(
                f"lengths has values of type {self.values.dtype}, such as {self.values[0]!r}; give "
                "integers of at least 1, such as numpy.ceil(lengths).astype(int)"
            )
        self.shortest, self.longest, self.total, self.dropped = budget, 0, 0.0, 0
        self.lost = 0.0  # tokens
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
                        "cut this sample, give a larger budget, or leave such samples out with "
                        "too_long='drop'"
                    )
                kept = chunk[chunk <= budget]
                self.dropped += len(chunk) - len(kept)
                self.lost += float(chunk[chunk > budget].sum(dtype=np.float64))
                high = int(kept.max(initial=0))
            self.shortest, self.longest = min(self.shortest, low), max(self.longest, high)
            self.total += float(kept.sum(dtype=np.float64))
        if self.dropped == self.count:
            raise ValueError(f"all {self.count} lengths exceed budget={budget}; give a larger one")
        self.fingerprint = fingerprint(self.values)

    def left_out(self) -> str:
        """Say what is dropped, for `describe`; warn of more than a little."""
        if not self.dropped:
            return ""
        samples, tokens = self.dropped / self.count, self.lost / (self.lost + self.total)
        said = (
            f"{self.dropped:,} of {self.count:,} samples, with {100 * tokens:.4g} % of all tokens, "
            "are left out as too long"
        )
        if max(samples, tokens) > LITTLE:
            warnings.warn(
                f"too_long='drop', budget={self.budget}: {said}; cut them, or give a larger budget",
                stacklevel=3,
            )
        return said

    def distinct(self) -> Ints:
        """Return each length once, ascending, without those that are left out."""
        if self.longest - self.shortest > self.count + DENSE:  # a table of them would be large
            return np.unique(self.values[self.values <= self.longest]).astype(np.int64)
        seen = np.zeros(self.longest - self.shortest + 1, np.bool_)
        for _, chunk in _chunks(self.values):
            seen[chunk[chunk <= self.longest].astype(np.int64) - self.shortest] = True
        return np.flatnonzero(seen) + self.shortest

    def classes(self, bounds: Ints) -> Classes:
        """Sort the samples by class, that of the first bound that is not below their length."""
        classes = np.empty(self.count, np.uint32)
        for start, chunk in _chunks(self.values):
            inside = chunk <= self.longest
            numbers = bounds.searchsorted(np.where(inside, chunk, 0).astype(np.int64))
            classes[start : start + CHUNK] = np.where(inside, numbers, len(bounds))
        return Classes(classes, len(bounds))


class Labels:
    """The labels of samples, checked, and as `numbers`: their places in `values`, ascending."""

    def __init__(self, labels: ArrayLike) -> None:
        given = one_dimensional("labels", labels)
        if given.dtype.kind not in "iubUS" or (given.dtype == np.uint64 and given.max() >= 2**63):
            raise TypeError(
                f"labels has values of type {given.dtype}, such as {given[0]!r}; give integers "
                "below 2**63, or strings"
            )
        self.values, inverse = np.unique(given, return_inverse=True)
        self.numbers = inverse.astype(np.uint32)
        self.classes = Classes(self.numbers, len(self.values))
        self.fingerprint = fingerprint(self.numbers)


class Recipes(Order):
    """An order whose units are copies of recipes: the same in every epoch, of other samples.

    Parameters
    ----------
    samples, classes :
        Samples of no class are left out.
    copies, first : numpy.ndarray
        Units of each recipe; the first part of each, and the number of parts.
    parts : numpy.ndarray
        Of each part a class, samples of it in a unit, and the rank of the first one in the recipe's
        first unit.
    together : int
        Consecutive units, in the order of the recipes, that come together.
    longest : int, optional
        The unit whose group comes first.
    """

    _facts: dict[str, Any]  # what this kind of recipes has beside them
    _works: Floats | None = None  # of a unit of each recipe
    _tokens: Ints | None = None

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
        """Return what the order depends on."""
        ours = {"name": self.name, "samples": self.samples, "together": self.together}
        return ours | self._facts

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        return self._reads(seed)[0]

    def measured(self, seed: int) -> tuple[Reader, Works]:
        """Return a reader, and what returns the work of units."""
        return super().measured(seed) if self._works is None else self._reads(seed)

    def token_sums(self, seed: int) -> Sums | None:
        """Return what adds up the tokens of units: those of their recipes."""
        tokens, draw_epoch = self._tokens, lru_cache(1)(partial(self._draw_epoch, seed))
        if tokens is None:
            return None
        return lambda epoch, units: [int(tokens[self._recipes(draw_epoch(epoch), units)[1]].sum())]

    def _reads(self, seed: int) -> tuple[Reader, Works]:
        draw_epoch = lru_cache(1)(partial(self._draw_epoch, seed))

        def works(epoch: int, units: Ints) -> Floats:
            assert self._works is not None
            return self._works.take(self._recipes(draw_epoch(epoch), units)[1])

        reader = ArrayReader(self, seed, lambda epoch, units: self._read(draw_epoch(epoch), units))
        return reader, works

    def _draw_epoch(self, seed: int, epoch: int) -> Drawn:
        """Draw an epoch: the order of its groups, the short one, the turn in each, and members."""
        groups, rest = divmod(self.units, self.together)
        order = Permutation(groups, seed, epoch, UNITS, 0)
        members = self.classes.members(seed, epoch)
        longest = self.longest if groups else None
        among = self.units if longest is None else self.units - rest
        at, turn = (
            int(drawn(np.array([k]), below, seed, epoch, UNITS, 1)[0])
            for k, below in enumerate((among, self.together))
        )
        if longest is None:
            return order, at, turn, 0, members
        at = (longest + 1 + at) % self.units  # the longest is not in the short group
        before = max(0, at + rest - self.units) if longest < at else rest
        wanted = (longest - before) // self.together
        return order, at, turn, wanted - int(order.at(np.zeros(1, np.int64))[0]), members

    def _recipes(self, epoch: Drawn, units: Ints) -> tuple[Ints, Ints]:
        """Return the numbers of units among all copies, and the recipe of each."""
        order, at, turn, shift, _ = epoch
        groups, rest = divmod(self.units, self.together)
        numbers = (units - groups * self.together + at) % self.units  # of those in the short group
        grouped = units < groups * self.together
        if groups:
            before = max(0, at + rest - self.units)  # units of the short group that come first
            group_numbers, inside = np.divmod(units[grouped], self.together)
            group = (order.at(group_numbers).astype(np.int64) + shift) % groups
            grouped_numbers = group * self.together + (inside + turn) % self.together + before
            numbers[grouped] = grouped_numbers + (grouped_numbers >= at) * (rest - before)
        return numbers, self.starts.searchsorted(numbers, "right") - 1

    def _read(self, epoch: Drawn, units: Ints) -> Read:
        """Return the samples of units, and their sizes."""
        numbers, recipes = self._recipes(epoch, units)
        copies, parts = numbers - self.starts.take(recipes), recipes
        if len(self.parts) > len(self.sizes):  # some recipes have several parts
            first = self.first.take(recipes)
            counts = self.first.take(recipes + 1) - first
            copies, parts = copies.repeat(counts), spans(first, counts)
        classes, many, base = self.parts.take(parts, 0).T
        samples = epoch[-1](classes, base + copies * many, many)
        return samples, self.sizes.take(recipes)


def one_dimensional(name: str, given: ArrayLike) -> NDArray[Any]:
    """Return an argument as an array, with one value at least."""
    try:
        values = np.asarray(given)
    except (TypeError, ValueError) as error:  # of lists of unequal length, for one
        raise TypeError(f"{name} is not an array: {error}") from error
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}; give a list of one value per sample")
    if not len(values):
        raise ValueError(f"{name} is empty; give at least one value, or leave an empty source out")
    if len(values) > MOST_SAMPLES:
        raise ValueError(f"{name} has {len(values)} values; give at most {MOST_SAMPLES}")
    return values


def integers(name: str, given: ArrayLike) -> NDArray[np.integer[Any]]:
    """Return an argument as an array of integers, which is not copied if it is one."""
    values = one_dimensional(name, given)
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"{name} has values of type {values.dtype}, such as {values[0]!r}; give integers of at "
            "least 0"
        )
    return values.view(np.ndarray)


def _chunks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Go through an array, which may be a memory map, in pieces."""
    for start in range(0, len(values), CHUNK):
        yield start, values[start : start + CHUNK]
