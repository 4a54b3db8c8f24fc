from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from typing_extensions import Self

from cseq._core import _Fields
from cseq._memory import Mapping, Memory, SlotAllocator, _Array
from cseq._work import Runner, TicketWriter
from cseq.encoding._plan import Plan
from cseq.memory._slots import SlotTable

class Encoder(TicketWriter):
    memory: Memory
    used: int
    capacity: int
    loaned: bool
    watched: bool
    placement: SlotAllocator | None
    target: Mapping | None
    mapped: dict[int, Mapping]
    older: list[Memory]
    slots: SlotTable | None
    slot: int
    kept: list[Any]
    cast: np.dtype[Any] | None
    plans: list[Plan]
    def __new__(cls, *args: Any) -> Self: ...
    def place(self, nbytes: int) -> int: ...
    def remember(self, plan: Plan) -> None: ...
    def encode(self, batch: object) -> _Fields: ...
    def encode_parts(
        self, plan: Plan, arrays: list[_Array], pickled: bytes | None = None
    ) -> _Fields: ...
    def take(self) -> int: ...
    def deliver(self, runner: Runner, status: int, record: Sequence[int]) -> None: ...

@final
class ObjectTable:
    def __new__(cls, cells: int) -> Self: ...
    def __getitem__(self, cell: int, /) -> Any: ...
    def __setitem__(self, cell: int, value: object, /) -> None: ...

class ObjectWriter(TicketWriter):
    objects: ObjectTable
    below: Any
    first: int
    def __new__(
        cls,
        cells: int,
        below: object = None,
        *,
        objects: ObjectTable | None = None,
        first: int = 0,
    ) -> Self: ...

@final
class Decoder:
    def __new__(
        cls,
        *,
        objects: ObjectTable | None = None,
        slots: SlotTable | None = None,
        mapped: list[Mapping | None] | None = None,
        lend: Callable[[int, int], Memory | None] | None = None,
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
    ) -> Self: ...

def decode(
    memory: Memory,
    record: Sequence[int],
    lend: Callable[[int, int], Memory | None] | None = None,
    slot: int = -1,
    capacity: int = 0,
) -> Any: ...
