from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

def cut(left: _Int64s, sizes: _Int64s, row: int, by_row: bool) -> _Int64s: ...
def fill(
    arrays: list[NDArray[Any]],
    masks: list[NDArray[Any] | None],
    owners: _Int64s,
    starts: _Int64s,
    cuts: _Int64s,
    pad: int,
    ids: NDArray[Any],
    labels: NDArray[Any] | None,
    positions: NDArray[Any] | None,
    documents: NDArray[Any] | None,
) -> int: ...
