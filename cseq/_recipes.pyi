from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._core import Reader
from cseq.order.groups import Groups
from cseq.order.recipes import Recipes

_Numbers: TypeAlias = NDArray[np.int64]

def sort_classes(
    classes: NDArray[np.uint32], count: int
) -> tuple[NDArray[np.uint32], _Numbers]: ...
def best_fit(
    lengths: _Numbers, counts: _Numbers, budget: int
) -> tuple[_Numbers, _Numbers, _Numbers]: ...

@final
class RecipesReader(Reader):
    def __new__(cls, order: Recipes, seed: int) -> Self: ...

@final
class GroupsReader(Reader):
    def __new__(cls, order: Groups, seed: int) -> Self: ...
