from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from cseq._core import PARK_NS as PARK_NS
from cseq._core import Ring
from cseq._memory import Mapping, Memory, Plan, SlotAllocator, SlotTable

@disjoint_base
class BatchState:
    ticket: Any
    drawn: Any

@final
class Runner:
    ring: Final[Ring]
    stage: Final[int]
    owner: Final[int]
    cell: Final[int]
    park: int
    def __new__(cls, ring: Ring, stage: int, owner: int, *, last: bool) -> Self: ...
    def claim(self) -> bool | None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def record(self) -> tuple[int, int, int, int, int, int]: ...
    def free_slot(self, slots: SlotTable) -> None: ...
    def indices(self) -> NDArray[np.int64]: ...
    def parts(self) -> NDArray[np.int64]: ...
    def publish(
        self, status: int = 0, record: tuple[int, ...] = (), capacity: int = 0, slot: int = -1
    ) -> None: ...

@disjoint_base
class TicketWriter:
    def begin_ticket(self) -> None: ...

@disjoint_base
class Generator:
    def save(self) -> Any: ...
    def restore(self, state: Any) -> int: ...
    def seed_with(self, words: Sequence[int]) -> None: ...

@disjoint_base
class Twister(Generator): ...

@final
class PythonGenerator(Twister):
    def __new__(cls, owner: Any, key: int = 0, position: int = 0) -> Self: ...
    def is_fresh(self) -> bool: ...

@final
class NumpyGenerator(Twister):
    def __new__(
        cls,
        owner: Any,
        current: Callable[[], Any],
        bit_generator: Any,
        key: int = 0,
        position: int = 0,
        has_gauss: int = 0,
        gauss: int = 0,
    ) -> Self: ...
    def is_fresh(self) -> bool: ...

@final
class TorchGenerator(Generator):
    def __new__(cls, generator: Any) -> Self: ...
    def is_fresh(self) -> bool: ...

@disjoint_base
class BatchSeeds:
    present: Final[list[Any]]
    missing: Final[dict[str, Callable[[], Any]]]
    def __new__(cls, batch_context: Any, *_: Any) -> Self: ...
    def seed(self, key: int, place: int) -> None: ...
    def seed_present(self) -> None: ...
    def lend(self) -> None: ...
    def restore(self) -> None: ...

NO_MORE: Final[Any]

@disjoint_base
class Work:
    @property
    def batch_writer(self) -> Any: ...
    def __new__(cls, batch_writer: Any, *_: Any) -> Self: ...
    def work(self, runner: Runner) -> int: ...

@disjoint_base
class BatchMaker(Work):
    indexer: Any
    def __new__(
        cls,
        batch_writer: Any,
        indexer: Any,
        batch_state: BatchState,
        convert: Callable[[Any], Any] | None = None,
        seeds: BatchSeeds | None = None,
    ) -> Self: ...
    def make_here(self, runner: Runner, here: Any) -> None: ...

@disjoint_base
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
    plans: Final[list[Plan]]
    def __new__(cls, *args: Any) -> Self: ...
    def take(self) -> int: ...
    def deliver(self, runner: Runner, status: int, record: tuple[int, ...]) -> None: ...
    def place(self, nbytes: int) -> int: ...
    def remember(self, plan: Plan) -> None: ...
    def encode(self, batch: Any, cast: np.dtype[Any] | None) -> tuple[int, int, int, int]: ...
    def encode_parts(
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

@disjoint_base
class ObjectWriter(TicketWriter):
    objects: Final[ObjectTable]
    def __new__(cls, cells: int, *_: Any) -> Self: ...

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
