from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._core import Reader

_Integers: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.uint32]]

def integers_of(weights: NDArray[np.float64]) -> _Integers: ...

@final
class WeightedReader(Reader):
    def __new__(cls, integers: _Integers, size: int, seed: int, replacement: bool) -> Self: ...

def seed_of(seed: int, name: str) -> int: ...
def block_order(length: int, seed: int, block: int) -> NDArray[np.uint32]: ...

@final
class MixtureReader(Reader):
    def __new__(
        cls,
        sources: list[Reader],
        firsts: NDArray[np.int64],
        *,
        block: int,
        units: int,
        seed: int,
        since: int,
        blocks: NDArray[np.uint64],
        quotas: NDArray[np.uint32],
        taken: NDArray[np.uint64],
    ) -> Self: ...

@final
class ResizedReader(Reader):
    def __new__(cls, reader: Reader, units: int) -> Self: ...

@final
class BlocksReader(Reader):
    def __new__(cls, n: int, *, rows: int, window: int, lanes: int, seed: int) -> Self: ...
