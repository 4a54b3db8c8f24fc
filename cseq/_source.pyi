from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from cseq._core import Order, Ring
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
    def __new__(
        cls,
        order: Order,
        epoch: int,
        cut: Sequence[int],
        fill: Callable[[int, NDArray[Any]], tuple[int, int]],
        room: int,
    ) -> Self: ...

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
    ) -> Self: ...
    def open(self) -> None: ...
