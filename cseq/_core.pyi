# What the package has of the core for its users; all else is private, and has no types.

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

def permutation(
    n: SupportsIndex,
    seed: SupportsIndex,
    epoch: SupportsIndex = 0,
    algorithm: str = "fisher-yates-v1",
) -> NDArray[np.uint32] | NDArray[np.int64]: ...
def __getattr__(name: str) -> Any: ...
