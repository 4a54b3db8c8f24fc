from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from cseq._core import Reader
from cseq.order.base import Order

CHUNK: int

def fingerprint(array: ArrayLike) -> int: ...

@final
class ChosenReader(Reader):
    def __new__(cls, reader: Reader, indices: NDArray[np.integer[Any]]) -> Self: ...

@final
class CallReader(Reader):
    def __new__(cls, order: Order, seed: int) -> Self: ...
