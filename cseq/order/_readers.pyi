from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from cseq._core import Reader

_Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Read: TypeAlias = Callable[[int, _Int64s], tuple[Any, Any]]
_Share: TypeAlias = Callable[[int, int, int, int, int], _Int64s]

AHEAD: Final[int]
CHUNK: Final[int]
BLOCKS: Final[int]
WINDOW: Final[int]
UNITS: Final[int]
MEMBERS: Final[int]
MIXTURE: Final[int]
SOURCE: Final[int]
WEIGHTS: Final[int]
GROUPS: Final[int]
DOCUMENTS: Final[int]
BALANCE: Final[int]

class _Units(Protocol):
    @property
    def units(self) -> int: ...
    @property
    def room(self) -> int: ...

def fingerprint(array: ArrayLike) -> int: ...
def digest(array: ArrayLike) -> int: ...
def shuffle(
    n: int, seed: int, epoch: int, purpose: int, key: int
) -> NDArray[np.uint32] | _Int64s: ...
def seed_of(seed: int, name: str) -> int: ...
def drawn(
    positions: _Int64s, below: int, seed: int, epoch: int, purpose: int, key: int = ...
) -> NDArray[np.uint64]: ...
def keyed(
    sizes: _Int64s, keys: _Int64s, positions: _Int64s, seed: int, epoch: int, purpose: int
) -> _Int64s: ...
def deal(
    works: NDArray[np.float64], batches: _Int64s | None, ranks: int, count: int, size: int
) -> tuple[_Int64s, _Int64s]: ...
def split(counts: NDArray[Any], nodes: _Int64s, factors: NDArray[np.uint64]) -> bool: ...
def laid(values: ArrayLike, level: int = 1) -> NDArray[Any]: ...
def gather(reader: Reader, epoch: int, units: _Int64s) -> tuple[_Int64s, _Int64s | None]: ...

@final
class Permutation:
    table: NDArray[Any] | None
    def __new__(cls, n: int, seed: int, epoch: int, purpose: int, key: int = ...) -> Self: ...
    def at(self, positions: _Int64s) -> _Int64s: ...

@final
class DocumentLengths:
    def __new__(cls, values: NDArray[np.integer[Any]], ends: _Int64s, unit: int) -> Self: ...
    def starts(self, documents: _Int64s) -> _Int64s: ...
    def find(self, positions: _Int64s) -> tuple[_Int64s, _Int64s]: ...

@final
class Tree:
    levels: list[NDArray[np.uint64]]
    def __new__(cls, masses: NDArray[np.uint64], samples: int) -> Self: ...
    def samples_at(self, numbers: ArrayLike, seed: int, epoch: int) -> _Int64s: ...

@final
class ArrayReader(Reader):
    call: _Read
    share: _Share | None
    ahead: int
    def __new__(
        cls, order: _Units, seed: int, read: _Read, share: _Share | None = None, ahead: int = ...
    ) -> Self: ...
