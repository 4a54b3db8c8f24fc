"""An order for metric learning: batches of a few samples from several classes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cseq.check import flag, integer
from cseq.order._readers import GROUPS, ArrayReader, Permutation
from cseq.order.base import MOST_SAMPLES, Order
from cseq.order.classes import Labels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Read

# The maximum number of samples in a batch.
MOST_ROOM = 2**31
# Number of shuffled classes that each reader caches.
KEPT = 1024


class Groups(Order):
    """Batches that contain `samples` samples from each of `classes` distinct classes.

    Batches are drawn in rounds, which continue across epochs. Each round uses every class once, but
    leaves out a few random classes if the total number of classes is not a multiple of `classes`.
    If no classes are left out, all samples of a class appear before any is repeated, except for a
    few samples if the class size is not a multiple of `samples`.

    Parameters
    ----------
    labels : array of int or of str
        Each sample's class.
    classes, samples : int
        The number of classes in a batch, and the number of adjacent samples from each class.
    epoch_size : int, optional
        The number of batches in an epoch. Defaults to enough for as many samples as the data has.
    repeat_small : bool
        Whether to repeat samples if a class has fewer than `samples`, instead of raising an error.

    Examples
    --------
    >>> order = cseq.Groups([0, 1, 2, 0, 1, 2, 0, 1, 0], classes=3, samples=2)
    >>> order
    <Groups: 2 batches of 3 of 3 classes, 2 samples of each; a sample appears about 1–2× per epoch>
    >>> order.batches(seed=1)
    [[0, 3, 5, 2, 4, 7], [5, 2, 4, 1, 6, 8]]
    """

    name = "groups-v1"
    is_batch = True

    def __init__(
        self,
        labels: ArrayLike,
        classes: int,
        samples: int,
        *,
        epoch_size: int | None = None,
        repeat_small: bool = False,
    ) -> None:
        checked = Labels(labels)
        self.classes = checked.classes
        self.chosen = integer("classes", classes)
        if self.chosen > self.classes.count:
            raise ValueError(
                f"classes={self.chosen} is more than the {self.classes.count} classes in labels; "
                "pass a smaller number"
            )
        self.per_class = integer("samples", samples, 1, MOST_ROOM // self.chosen)
        smallest = int(self.classes.sizes.argmin())
        repeat_small = flag("repeat_small", repeat_small)
        if self.classes.sizes[smallest] < self.per_class and not repeat_small:
            raise ValueError(
                f"labels has only {self.classes.sizes[smallest]} samples of class "
                f"{checked.values[smallest].item()!r}, fewer than samples={self.per_class}; reduce "
                "samples, leave the class out, or pass repeat_small=True to repeat its samples"
            )
        self.samples = len(self.classes.table)
        self.room = self.chosen * self.per_class
        self.units = (
            -(-self.samples // self.room)
            if epoch_size is None
            else integer("epoch_size", epoch_size, 1, MOST_SAMPLES)
        )
        self._facts = {
            "classes": self.chosen,
            "each": self.per_class,
            "epoch_size": self.units,
            "labels": checked.fingerprint,
            "repeat_small": repeat_small,
        }

    def describe(self) -> str:
        sizes, rest = self.classes.sizes, self.classes.count % self.chosen
        often = self.units * self.room / self.classes.count
        least, most = (f"{often / size:.3g}" for size in (sizes.max(), sizes.min()))
        left_out = f"; each round leaves out {rest:,} class{'es' * (rest > 1)}" if rest else ""
        return (
            f"{self.units:,} batches of {self.chosen:,} of {self.classes.count:,} classes, "
            f"{self.per_class:,} samples of each; a sample appears about "
            f"{least if least == most else f'{least}–{most}'}× per epoch{left_out}"
        )

    def reader(self, seed: int) -> Reader:
        table, offsets = self.classes.table, self.classes.offsets.tolist()
        sizes = self.classes.sizes.tolist()
        batches_per_round, per_class = self.classes.count // self.chosen, self.per_class

        @lru_cache(1)
        def classes_of(turn: int) -> Permutation:
            return Permutation(self.classes.count, seed, 0, GROUPS, turn)

        @lru_cache(KEPT)
        def members_of(c: int, number: int) -> NDArray[np.uint32]:
            order = Permutation(sizes[c], seed, 0, GROUPS, ((c + 1 << 32) + number) % 2**64)
            members = table[offsets[c] : offsets[c + 1]][order.at(np.arange(sizes[c]))]
            return np.resize(members, max(per_class, sizes[c]))

        def read(epoch: int, units: Ints) -> Read:
            first, parts = epoch * self.units % 2**63, []
            for unit in units.tolist():
                turn, batch = divmod((first + unit) % 2**63, batches_per_round)
                at = np.arange(batch * self.chosen, (batch + 1) * self.chosen, dtype=np.int64)
                for c in classes_of(turn).at(at).tolist():
                    number, piece = divmod(turn, sizes[c] // per_class or 1)
                    parts.append(members_of(c, number)[piece * per_class : (piece + 1) * per_class])
            return np.concatenate(parts), np.full(len(units), self.room)

        return ArrayReader(self, seed, read)
