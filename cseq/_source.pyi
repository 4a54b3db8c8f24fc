from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from cseq._core import Reader, Ring
from cseq._slots import Slots

ITEM: Final[int]
BEGIN: Final[int]
CALL: Final[int]
CALLED: Final[slice]
ASSIGNED: Final[slice]
KEY: Final[int]
KEYS: Final[int]
NO_KEY: Final[int]
IN_REQUEST: Final[int]

@disjoint_base
class Source:
    epoch: Final[int]
    consumed: Final[int]
    keyed: Final[bool]

@final
class OrderSource(Source):
    reader: Final[Reader]
    def __new__(
        cls,
        reader: Reader,
        epoch: int,
        cut: Sequence[int],
        later: Sequence[int] | None = None,
        more: int = 0,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def samples(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

@final
class Request:
    slot: Final[int]
    def __new__(cls, slots: Slots) -> Self: ...
    def locate(self, capacity: int, record: Sequence[int]) -> None: ...

@disjoint_base
class StreamSource(Source): ...

@final
class ItemSource(StreamSource):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        *,
        depth: int,
        first: int = 0,
    ) -> Self: ...
    def open(self) -> None: ...

@final
class KeySource(StreamSource):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        keys: Iterator[Any],
        pickle: Callable[[Any, int], Request],
        *,
        depth: int,
        first: int,
        prefetch: int,
        in_order: bool,
        free: bool,
        samples: Callable[[Any], int] | None = None,
    ) -> Self: ...
    def open(self) -> None: ...
