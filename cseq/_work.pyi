from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._core import Ring, _Fields
from cseq.encoding._room import Room
from cseq.indexing.indexer import Indexer

NO_MORE: Final[object]

class BatchState:
    ticket: object
    drawn: np.random.Generator | None

@final
class Runner:
    seed: int
    epoch: int
    batch: int
    start: int
    slot: int
    capacity: int
    record: _Fields
    ring: Ring
    stage: int
    owner: int
    cell: int
    park: int
    def __new__(cls, ring: Ring, stage: int, owner: int, *, last: bool) -> Self: ...
    def __iter__(self) -> Iterator[bool]: ...
    def __next__(self) -> bool: ...
    def claim(self) -> bool | None: ...
    def indices(self) -> NDArray[np.int64]: ...
    def parts(self) -> NDArray[np.int64]: ...
    def publish(
        self, status: int = 0, record: tuple[int, ...] = (), capacity: int = 0, slot: int = -1
    ) -> None: ...

class BatchWriter:
    @property
    def room(self) -> Room | None: ...
    def begin_ticket(self) -> None: ...
    def cast_to(self, dtype: np.dtype[Any] | None) -> None: ...
    def write(self, runner: Runner, batch: object) -> tuple[int, ...]: ...
    def publish(self, runner: Runner, record: tuple[int, ...]) -> None: ...
    def fail(self, runner: Runner, error: BaseException, status: int = 1) -> None: ...
    def end_items(self, runner: Runner) -> None: ...

class Work:
    batch_writer: BatchWriter
    def __new__(cls, batch_writer: BatchWriter, *_: object, **__: object) -> Self: ...
    def work(self, runner: Runner) -> int: ...

def has_imported(missing: dict[str, Any]) -> bool: ...

class BatchMaker(Work):
    indexer: Indexer[object] | None
    def __new__(
        cls,
        batch_writer: BatchWriter,
        indexer: Indexer[object] | None,
        batch_state: BatchState,
        convert: Callable[[Any], object] | None = None,
        seeds: object = None,
    ) -> Self: ...
    def make_here(self, runner: Runner, here: object) -> None: ...
