from collections.abc import Callable
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from cseq._core import Reader
from cseq.order.base import Order

_Ints: TypeAlias = NDArray[np.int64]
_Read: TypeAlias = tuple[NDArray[np.integer[Any]], _Ints | None]

CHUNK: Final[int]
AHEAD: Final[int]
BLOCKS: Final[int]
WINDOW: Final[int]
UNITS: Final[int]
MEMBERS: Final[int]
MIXTURE: Final[int]
SOURCE: Final[int]
WEIGHTS: Final[int]
GROUPS: Final[int]

def fingerprint(array: ArrayLike) -> int: ...
def shuffle(
    n: int, seed: int, epoch: int, purpose: int, key: int
) -> NDArray[np.uint32] | NDArray[np.int64]: ...
def seed_of(seed: int, name: str) -> int: ...
def drawn(
    places: _Ints, below: int, seed: int, epoch: int, purpose: int, key: int = ...
) -> NDArray[np.uint64]: ...

@final
class Permutation:
    table: Final[NDArray[np.uint32] | None]
    def __new__(cls, n: int, seed: int, epoch: int, purpose: int, key: int = ...) -> Self: ...
    def at(self, places: _Ints) -> NDArray[np.uint32] | _Ints: ...
    def find(self, element: int) -> int: ...

@final
class CallReader(Reader):
    def __new__(cls, order: Order, seed: int) -> Self: ...

_Share: TypeAlias = Callable[[int, int, int, int, int], _Ints]

@final
class ArrayReader(Reader):
    call: Final[Callable[[int, _Ints], _Read]]
    share: Final[_Share | None]
    def __new__(
        cls,
        order: Order | Reader,
        seed: int,
        read: Callable[[int, _Ints], _Read],
        share: _Share | None = None,
        ahead: int = ...,
    ) -> Self: ...

def gather(reader: Reader, epoch: int, units: _Ints) -> tuple[_Ints, _Ints | None]: ...
