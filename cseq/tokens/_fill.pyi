from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

def cut(left: _Int64s, sizes: _Int64s, row: int, anew: bool) -> _Int64s: ...
def fill(
    tokens: list[NDArray[Any]],
    counts: _Int64s,
    numbers: _Int64s,
    after: _Int64s,
    masks: NDArray[np.bool_] | None,
    ids: NDArray[Any],
    labels: NDArray[Any] | None,
    positions: NDArray[Any] | None,
    documents: NDArray[Any] | None,
) -> int: ...
