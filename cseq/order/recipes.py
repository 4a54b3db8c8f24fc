"""Units that are made by recipes: so many samples of these classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._recipes import RecipesReader
from cseq.check import count
from cseq.order.base import Order
from cseq.order.classes import MOST_SAMPLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.classes import Classes

__all__ = ["Recipes"]


class Recipes(Order):
    """An order whose units are copies of recipes: the same in every epoch, of other samples.

    Parameters
    ----------
    samples : int
        Those of no class are left out.
    classes : Classes
    copies : numpy.ndarray of int64
        Units of each recipe.
    first : numpy.ndarray of int64
        The first part of each recipe, and the number of parts.
    parts : numpy.ndarray of int64
        Of shape (parts, 3): a class, samples of it in a unit, and the rank of the first one in the
        recipe's first unit.
    together : int
        Consecutive units, in the order of the recipes, that come together.
    longest : int, optional
        The unit whose group comes first.
    """

    _facts: dict[str, Any]  # beside those of all recipes

    def __init__(
        self,
        samples: int,
        classes: Classes,
        copies: NDArray[np.int64],
        first: NDArray[np.int64],
        parts: NDArray[np.int64],
        *,
        together: int = 1,
        longest: int | None = None,
    ) -> None:
        self.samples = samples
        self.classes = classes
        self.starts = np.append(0, np.cumsum(copies))
        self.first, self.parts = first, parts
        self.together = count("together", together, 1, MOST_SAMPLES)
        self.longest = longest
        sizes = np.add.reduceat(parts[:, 1], first[:-1])
        self.units, self.fewest, self.room = int(copies.sum()), int(sizes.min()), int(sizes.max())
        for array in (self.starts, first, parts):
            array.flags.writeable = False

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        ours = {"name": self.name, "samples": self.samples, "together": self.together}
        return ours | self._facts

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        return RecipesReader(self, seed)
