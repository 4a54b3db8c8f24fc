"""The base class for orders: sequences of samples in epochs.

An order is a pure function of (seed, epoch, position). Positions count *units*: single samples
(`Shuffled`), rows of samples (`Packed`) or whole batches (`Buckets`). Every epoch contains units
0 … ``units - 1``. Orders have no state, so they need no special handling in resumed runs.
"""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from cseq.check import integer
from cseq.order._readers import ArrayReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq._core import Reader

MOST_SAMPLES = 2**48
MOST_SEED = WORD = 2**64 - 1
AGAIN = (
    "use the same arguments and data as when the state was saved, or call "
    "load_state_dict(state, strict=False) to continue at the same position anyway"
)
Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
# Both take an epoch and units. `Works` returns the work per unit, `Sums` the tokens per source.
Works: TypeAlias = "Callable[[int, Ints], Floats]"
Sums: TypeAlias = "Callable[[int, Ints], list[int]]"
# The samples, and the size of each unit (or None if all sizes are 1).
Read: TypeAlias = "tuple[NDArray[np.integer[Any]], Ints | None]"


class Order:
    """The base class for built-in and custom orders.

    Subclasses set the attributes and define `read`. Its result must depend only on its arguments.
    Orders must not change while they are in use. `cseq.testing.check_order` validates a subclass.

    Attributes
    ----------
    name : str
        The name and version of the order's definition. Change it if the definition changes.
    samples : int or None
        The number of samples. Every index must be below it. None means the size of the data.
    units : int
        The number of units in every epoch (at least 1), or 0 while `samples` is None.
    room : int
        The maximum number of samples in a unit.
    is_batch : bool
        Whether each unit is a whole batch.
    is_seeded : bool
        Whether the order depends on the seed.
    left_out : str
        A description of the samples that are left out, if any.
    tokens : float or None
        The mean number of tokens per unit, or None if unknown.
    replaced : dict of str to str
        For error messages: maps the names of earlier definitions to what has changed since then.

    Examples
    --------
    >>> class Backwards(cseq.Order):
    ...     name = "backwards-v1"
    ...     def __init__(self, samples):
    ...         self.samples = self.units = samples
    ...     def read(self, seed, epoch, start, count):
    ...         return self.units - 1 - np.arange(start, start + count), None
    >>> Backwards(10).batches(4, seed=1)
    [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    """

    name: str = ""
    samples: int | None = None
    units: int = 0
    room: int = 1
    is_batch: bool = False
    is_seeded: bool = True
    left_out: str = ""
    tokens: float | None = None
    replaced: ClassVar[dict[str, str]] = {}
    # All metadata except the name and the number of samples.
    _facts: dict[str, Any] | None = None

    def read(self, seed: int, epoch: int, start: int, count: int) -> tuple[Ints, Ints | None]:
        """Return the samples in units [start, start + count) of an epoch, and the unit sizes.

        The sizes have shape (count,), or are None if every unit is a single sample.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read(seed, epoch, start, count)")

    def facts(self) -> dict[str, Any]:
        """Return everything that determines the order, apart from the seed, as JSON values.

        Arrays are represented by their fingerprints.
        """
        more = {"units": self.units} if self._facts is None else self._facts
        return {"name": self.name, "samples": self.samples} | more

    def describe(self) -> str:
        """Return a one-sentence description of an epoch."""
        return f"{self.units:,} units of at most {self.room:,} samples"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe()}>"

    def over(self, samples: int) -> Self:
        """Return this order for a data set with the given number of samples.

        Raises
        ------
        ValueError
            If the order has a different number of samples.
        """
        if self.samples != samples:
            raise ValueError(
                f"order={self!r} covers {self.samples} samples, but the data has {samples}; create "
                "an order for this data, or pass dset_size"
            )
        return self

    def resumed(self, facts: dict[str, Any], seed: int, epoch: int, consumed: int) -> Self:
        """Return an order that continues a saved run from a position in an epoch.

        `facts` is the result of the saved order's `facts()`.

        Raises
        ------
        ValueError
            If the facts describe a different order or an earlier definition.
        """
        ours = self.facts()
        before = str(facts.get("name"))
        if before in self.replaced:
            raise ValueError(
                f"the saved order has name={before!r}, but the current order has "
                f"name={self.name!r}: {self.replaced[before]}; finish the run with the version of "
                "cseq that saved the state, or start a new epoch without the state"
            )
        for key in [*ours, *facts]:
            if ours.get(key) != facts.get(key):
                raise ValueError(
                    f"the saved order has {key}={facts.get(key)!r}, but the current order has "
                    f"{key}={ours.get(key)!r}; {AGAIN}"
                )
        return self

    def reader(self, seed: int) -> Reader:
        """Return a reader for a seed. Only one thread at a time may use it."""
        # Do not read ahead: call a custom order's `read` only when a batch is needed.
        return ArrayReader(self, seed, partial(call_read, self, seed), ahead=0)

    def measured(self, seed: int) -> tuple[Reader, Works]:
        """Return a reader and a function that computes the work per unit. See `Balanced`.

        Raises
        ------
        TypeError
            If the order cannot compute the amount of work for a unit.
        """
        raise TypeError(
            f"order={self!r} cannot compute how much work each unit takes; pass a Packed or "
            "Concatenated order, or a Mixture or Resized that wraps only such orders"
        )

    def token_sums(self, seed: int) -> Sums | None:
        """Return a function that counts tokens per source without reading units, or None."""
        return None

    def batches(
        self,
        batch_size: int = 1,
        *,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> list[list[int]]:
        """Return batches [start, stop) of an epoch for a single rank, as lists of indices.

        Parameters
        ----------
        batch_size : int
            The number of units in a batch. It must be 1 if each unit is a batch.
        seed, epoch : int
            Integers in [0, 2**64).
        start, stop : int
            The range of batches, by default up to the end of the epoch.
        """
        size = integer("batch_size", batch_size)
        if self.is_batch and size > 1:
            raise ValueError(
                f"batch_size={batch_size} was passed, but each unit of {self!r} is a whole batch; "
                "omit batch_size"
            )
        reader = self.reader(integer("seed", seed, 0, MOST_SEED))
        batches = -(-self.units // size)
        last = batches if stop is None else min(integer("stop", stop, 0), batches)
        return [
            reader.samples(epoch, k * size, min(size, self.units - k * size))[0].tolist()
            for k in range(integer("start", start, 0), last)
        ]


def by_epoch(
    order: Order, seed: int, draw: Callable[[int], Any], **options: Any
) -> tuple[Reader, Callable[[int], Any]]:
    """Return a reader that calls `draw` once per epoch, and a caching version of `draw`."""
    epoch_of = lru_cache(1)(draw)
    reader = ArrayReader(order, seed, lambda epoch, units: epoch_of(epoch).read(units), **options)
    return reader, epoch_of


def runs(*keys: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of equal keys."""
    changes = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        changes |= key[1:] != key[:-1]
    # There is usually just one run, and this shortcut takes half as long as the general case.
    if not changes.any():
        return iter([(0, len(keys[0]))])
    return itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(keys[0])])


def kind(order: Order) -> str:
    """Describe the order's units, for use in messages."""
    return "batches" if order.is_batch else "rows of samples" if order.room > 1 else "samples"


def call_read(order: Order, seed: int, epoch: int, units: Ints) -> Read:
    """Read units from a custom order in contiguous ranges, and validate the results."""
    samples: list[Ints] = []
    sizes: list[Ints] = []
    for part in np.split(units, np.flatnonzero(np.diff(units) != 1) + 1):
        count = len(part)
        given, lengths = order.read(seed, epoch, int(part[0]), count)
        indices = np.ascontiguousarray(given, dtype=np.int64)
        if lengths is None and (order.room > 1 or len(indices) != count):
            raise ValueError(
                f"read() of {order!r} returned {len(indices)} indices for {count} units, but no "
                "sizes; return the size of each unit"
            )
        unit_sizes = np.ones(count, np.int64) if lengths is None else np.asarray(lengths, np.int64)
        fits = (
            unit_sizes.shape == (count,) and 1 <= unit_sizes.min() <= unit_sizes.max() <= order.room
        )
        if not fits or indices.shape != (unit_sizes.sum(),):
            raise ValueError(
                f"read() of {order!r} returned sizes {unit_sizes} and indices of shape "
                f"{indices.shape} for {count} units; return one size in [1, {order.room}] for each "
                "unit, and as many indices as the sizes add up to"
            )
        samples.append(indices)
        sizes.append(unit_sizes)
    return np.concatenate(samples), np.concatenate(sizes) if order.room > 1 else None


def spans(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenated ranges with the given starts and lengths."""
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
