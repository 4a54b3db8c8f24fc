from typing import Any, Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from cseq._core import Reader
from cseq._memory import Memory
from cseq.order.base import Order

CHUNK: int

def fingerprint(array: ArrayLike) -> int: ...

@final
class ChosenReader(Reader):
    def __new__(cls, reader: Reader, indices: NDArray[np.integer[Any]]) -> Self: ...

@final
class CallReader(Reader):
    def __new__(cls, order: Order, seed: int) -> Self: ...

EMPTY: int
LOADING: int
READY: int

@final
class ChunkTable:
    slots: Final[int]
    reads: Final[int]
    def __new__(cls, memory: Memory, slots: int, identity: int) -> Self: ...
    def find(self, chunk: int) -> tuple[int, int, int]: ...
    def victim(self) -> int: ...
    def set(self, slot: int, chunk: int, state: int) -> None: ...
    def gather(
        self,
        slot: int,
        word: int,
        at: int,
        nbytes: int,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        out: NDArray[Any],
    ) -> bool: ...
