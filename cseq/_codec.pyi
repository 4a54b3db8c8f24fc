from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from cseq._memory import Mapping, Memory, SlotAllocator
from cseq._plan import Plan, Reader
from cseq._slots import Slots
from cseq._work import Runner, TicketWriter

@disjoint_base
class SlotEncoder(TicketWriter):
    memory: Memory
    used: int
    capacity: int
    loaned: bool
    watched: bool
    placement: SlotAllocator | None
    target: Mapping | None
    mapped: dict[int, Mapping]
    older: list[Memory]
    slots: Slots | None
    slot: int
    kept: list[Any]
    cast: np.dtype[Any] | None
    dump: Callable[[list[Any], Any, np.dtype[Any] | None], tuple[bytes, list[NDArray[Any]]]]
    plans: Final[list[Plan]]
    def __new__(cls, *args: Any) -> Self: ...
    def take(self) -> int: ...
    def publish(self, runner: Runner, status: int, record: tuple[int, ...]) -> None: ...
    def remember(self, plan: Plan) -> None: ...
    def match(
        self, batch: Any, cast: np.dtype[Any] | None
    ) -> tuple[Plan, list[NDArray[Any]], list[Any] | None] | None: ...
    def encode(
        self,
        plan: Plan,
        arrays: list[NDArray[Any]],
        pickled: bytes | None = None,
    ) -> tuple[int, int, int, int]: ...

@final
class ObjectTable:
    def __new__(cls, cells: int) -> Self: ...
    def __getitem__(self, cell: int, /) -> Any: ...
    def __setitem__(self, cell: int, value: Any, /) -> None: ...

@final
class ObjectWriter(TicketWriter):
    def __new__(cls, objects: ObjectTable) -> Self: ...

@final
class Decoder:
    def __new__(
        cls,
        *,
        objects: ObjectTable | None = None,
        slots: Slots | None = None,
        known: tuple[list[Mapping | None], Reader, Callable[[int, int, int], Memory | None]]
        | None = None,
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
    ) -> Self: ...
