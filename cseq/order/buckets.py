"""An order of batches whose samples have similar lengths or the same label."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cseq.check import flag, integer
from cseq.order._readers import fingerprint
from cseq.order.classes import MOST_BUDGET, MOST_SAMPLES, Labels, Lengths, Recipes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from cseq.order.classes import Classes


class Buckets(Recipes):
    """Batches of samples with similar lengths and at most `budget` tokens, including padding.

    Samples are divided into buckets by length, and each batch comes from one bucket. Every sample
    appears once per epoch. Each epoch shuffles the samples in each bucket, and then the batches.
    The last batch of a bucket may be smaller.

    Parameters
    ----------
    lengths : array of int
        The sample lengths (at least 1) in tokens, frames or similar. May be a memory map.
    budget : int
        The maximum number of tokens in a batch, if all samples are padded to the upper bound of
        their bucket.
    ratio : float
        The ratio between the upper bounds of successive buckets. A smaller ratio, such as 1.05,
        reduces padding. A larger one, such as 1.25, mixes more samples.
    boundaries : sequence of int, optional
        The upper bounds of the buckets in ascending order, instead of `ratio`. Samples longer than
        the last bound form a separate bucket.
    most : int, optional
        The maximum number of samples in a batch.
    together : int
        The number of consecutive batches from the same or neighboring buckets. If it is a multiple
        of the number of ranks, all ranks have similar work in each step.
    too_long : 'error' or 'drop'
        How to handle samples longer than the budget. See `Packed`.
    longest_first : bool
        Whether the first `together` batches of every epoch include one from the longest bucket, so
        that out-of-memory errors occur early.

    Examples
    --------
    >>> order = cseq.Buckets([3, 5, 4, 9, 10, 3], budget=12, ratio=2, together=1)
    >>> order
    <Buckets: 3 buckets, 4 batches, at most 10.5 % padding, 1–2 samples a batch>
    >>> sorted(map(sorted, order.batches(seed=1)))
    [[0, 5], [1, 2], [3], [4]]
    """

    name = "buckets-v2"
    replaced: ClassVar[dict[str, str]] = {
        "buckets-v1": "any batch can now come anywhere in an epoch, even at the end"
    }
    is_batch = True

    def __init__(
        self,
        lengths: ArrayLike,
        budget: int,
        *,
        ratio: float = 1.1,
        boundaries: Sequence[int] | None = None,
        most: int | None = None,
        together: int = 8,
        too_long: str = "error",
        longest_first: bool = False,
    ) -> None:
        budget = integer("budget", budget, 1, MOST_BUDGET)
        checked = Lengths(lengths, budget, too_long)
        if boundaries is None:
            self.bounds = _growing(checked.shortest, checked.longest, ratio)
        else:
            self.bounds = _given(boundaries, checked.longest, budget)
        most = None if most is None else integer("most", most)
        sizes = np.minimum(budget // self.bounds, min(budget, most or budget))
        classes = checked.classes(self.bounds)
        self._cut(checked.samples, classes, sizes, together, longest_first=longest_first)
        padded = float(classes.sizes.astype(np.float64) @ self.bounds)
        self._padding = f", at most {100 * (1 - checked.total / padded):.3g} % padding"
        self.left_out = checked.left_out()
        self._facts = {
            "lengths": checked.fingerprint,
            "budget": budget,
            "bounds": fingerprint(self.bounds),
            "most": most,
            "too_long": too_long,
            "longest_first": flag("longest_first", longest_first),
        }

    @classmethod
    def of(cls, labels: ArrayLike, sizes: int | Mapping[Any, int], *, together: int = 8) -> Self:
        """Return an order in which all samples of a batch have the same label.

        Parameters
        ----------
        labels : array of int or of str
            The label of each sample.
        sizes : int or mapping
            The number of samples in a batch: a single number, or a mapping from labels to numbers.
        together : int
            The number of consecutive batches with the same label. See `Buckets`.

        Examples
        --------
        >>> order = cseq.Buckets.of(["wide", "tall", "wide", "wide"], {"wide": 2, "tall": 4})
        >>> order.batches(seed=1)
        [[0, 2], [3], [1]]
        """
        checked = Labels(labels)
        order = cls.__new__(cls)
        order.bounds = np.empty(0, np.int64)
        batch_sizes = np.array([_size(sizes, label) for label in checked.values.tolist()], np.int64)
        order._cut(len(checked.classes.table), checked.classes, batch_sizes, together)
        order._padding = ""
        order._facts = {"labels": checked.fingerprint, "sizes": fingerprint(batch_sizes)}
        return order

    def _cut(
        self,
        samples: int,
        classes: Classes,
        sizes: NDArray[np.int64],
        together: int,
        *,
        longest_first: bool = False,
    ) -> None:
        """Divide each class into batches of the given size, plus a smaller last one if needed."""
        full, rest = np.divmod(classes.sizes, sizes)
        numbers = np.arange(classes.count)
        copies = np.stack([full, rest > 0], 1).ravel()
        parts = np.stack(
            [numbers, sizes, np.zeros_like(sizes), numbers, rest, full * sizes], 1
        ).reshape(-1, 3)[copies > 0]
        copies = copies[copies > 0]
        first = np.arange(len(copies) + 1)
        # The number of batches from each recipe of the last non-empty class.
        ends = copies[parts[:, 0] == parts[-1, 0]]
        super().__init__(
            samples,
            classes,
            copies,
            first,
            parts,
            together=together,
            longest=int(copies.sum() - ends.sum()) if longest_first else None,
        )
        self._buckets = int((classes.sizes > 0).sum())

    def describe(self) -> str:
        said = (
            f"{self._buckets:,} buckets, {self.units:,} batches{self._padding}, "
            f"{self.fewest:,}–{self.room:,} samples a batch"
        )
        return f"{said}; {self.left_out}" if self.left_out else said


def _growing(shortest: int, longest: int, ratio: float) -> NDArray[np.int64]:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 1 <= ratio < math.inf:
        raise ValueError(f"ratio={ratio!r} must be a number that is at least 1, such as 1.1")
    bounds = [shortest]
    while bounds[-1] < longest:
        bounds.append(min(max(bounds[-1] + 1, int(bounds[-1] * ratio)), longest))
    return np.array(bounds)


def _given(boundaries: Sequence[int], longest: int, budget: int) -> NDArray[np.int64]:
    """Validate the bounds, drop unused ones, and add one for the longest sample if needed."""
    bounds: list[int] = []
    for k, bound in enumerate(boundaries):
        least = bounds[-1] + 1 if bounds else 1
        bounds.append(integer(f"boundaries[{k}]", bound, least))
        if bound >= longest:
            break
    if not bounds or bounds[-1] < longest:
        bounds.append(longest)
    if bounds[-1] > budget:
        raise ValueError(
            f"boundaries would pad samples of length {longest} to {bounds[-1]}, which exceeds "
            f"budget={budget}; pass a bound from {longest} to {budget}"
        )
    return np.array(bounds)


def _size(sizes: int | Mapping[Any, int], label: object) -> int:
    if not isinstance(sizes, Mapping):
        return integer("sizes", sizes, 1, MOST_SAMPLES)
    if label not in sizes:
        raise ValueError(f"sizes has no entry for label {label!r}; pass a size for each label")
    return integer(f"sizes[{label!r}]", sizes[label], 1, MOST_SAMPLES)
