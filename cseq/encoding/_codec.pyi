from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from typing_extensions import Self

from cseq._core import _Fields
from cseq._memory import Mapping, Memory, _Array
from cseq._work import BatchWriter, Runner
from cseq.encoding._plan import Plan
from cseq.encoding._room import Room
from cseq.encoding.transport import Convert, LeafFor, SlotReader
from cseq.memory._slots import SlotTable

@final
class Encoder:
    room: Room
    cast: np.dtype[Any] | None
    plans: list[Plan]
    def __new__(cls, room: Room) -> Self: ...
    def remember(self, plan: Plan) -> None: ...
    def encode(self, batch: object) -> _Fields: ...
    def encode_parts(
        self, plan: Plan, arrays: list[_Array], pickled: bytes | None = None
    ) -> _Fields: ...

@final
class TicketWriter(BatchWriter):
    room: Room
    encoder: Encoder
    def __new__(cls, fd: int, width: int, slots: SlotTable | None = None) -> Self: ...
    def fetch(self, runner: Runner) -> object: ...

@final
class ObjectTable:
    def __new__(cls, cells: int) -> Self: ...
    def __getitem__(self, entry: int, /) -> object: ...
    def __setitem__(self, entry: int, value: object, /) -> None: ...

@final
class Objects(BatchWriter):
    objects: ObjectTable
    below: SlotReader | None
    first: int
    def __new__(
        cls,
        cells: int,
        below: SlotReader | None = None,
        *,
        objects: ObjectTable | None = None,
        first: int = 0,
    ) -> Self: ...
    def decoder(
        self,
        *,
        convert: Convert | None = None,
        leaf_for: LeafFor | None = None,
    ) -> Decoder: ...
    def fetch(self, runner: Runner) -> object: ...
    def decode(self, entry: int, slot: int, capacity: int, record: Sequence[int]) -> object: ...
    def error(
        self, entry: int, slot: int, capacity: int, record: Sequence[int]
    ) -> BaseException: ...

@final
class Decoder:
    def __new__(
        cls,
        *,
        objects: ObjectTable | None = None,
        slots: SlotTable | None = None,
        mapped: list[Mapping | None] | None = None,
        lend: Callable[[int, int], Memory | None] | None = None,
        convert: Convert | None = None,
        leaf_for: LeafFor | None = None,
    ) -> Self: ...

def decode(
    memory: Memory,
    record: Sequence[int],
    lend: Callable[[int, int], Memory | None] | None = None,
    slot: int = -1,
    capacity: int = 0,
) -> object: ...
