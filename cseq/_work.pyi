from collections.abc import Callable, Sequence
from typing import Any, Final, final

from typing_extensions import Self, disjoint_base

from cseq._core import ObjectTable, Runner

@disjoint_base
class BatchState:
    ticket: Any
    drawn: Any

@disjoint_base
class TicketWriter:
    def begin_ticket(self, runner: Runner) -> None: ...
    def try_publish(self, runner: Runner, batch: Any) -> bool: ...

@final
class ObjectWriter(TicketWriter):
    def __new__(cls, objects: ObjectTable) -> Self: ...

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
    def serve(self, runner: Runner) -> None: ...

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
