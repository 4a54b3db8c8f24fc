from collections.abc import Callable
from typing import Any, final

from typing_extensions import Self, disjoint_base

from cseq._core import Runner
from cseq._objects import ObjectTable

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
class BatchMaker:
    indexer: Any
    @property
    def batch_writer(self) -> Any: ...
    def __new__(
        cls,
        indexer: Any,
        batch_state: BatchState,
        batch_writer: Any,
        convert: Callable[[Any], Any] | None = None,
        seeds: Any = None,
    ) -> Self: ...
    def work(self, runner: Runner) -> None: ...
    def serve(self, runner: Runner) -> None: ...
