from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from typing_extensions import Self

from cseq._core import Ring
from cseq.memory._slots import SlotTable
from cseq.order._source import Source

@final
class Request:
    slot: int
    value: object
    def __new__(cls, slots: SlotTable | None = None, value: object = None) -> Self: ...
    def locate(self, capacity: int, record: Sequence[int]) -> None: ...

class StreamSource(Source):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        *_: object,
        depth: int,
        first: int = 0,
        **__: object,
    ) -> Self: ...

@final
class ItemSource(StreamSource): ...

@final
class KeySource(StreamSource):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        keys: Iterator[object],
        pickle: Callable[[Any, int], Request],
        *,
        depth: int,
        prefetch: int,
        in_order: bool,
        free: bool,
        first: int = 0,
        samples: Callable[[Any], int] | None = None,
    ) -> Self: ...
