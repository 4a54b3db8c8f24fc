from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

@final
class TensorMaker:
    def __new__(
        cls,
        from_numpy: Callable[[NDArray[Any]], Any],
        from_dlpack: Callable[[object], Any],
        dtype: np.dtype[Any],
    ) -> Self: ...
    def __call__(self, value: object) -> Any: ...
    def copy(self, array: NDArray[Any]) -> object: ...
