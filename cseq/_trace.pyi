from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._memory import Memory

MARKS: int
MARKS_BYTES: int
SPAN: int
COUNT: int
TAKEN: np.dtype[Any]
MARK: np.dtype[Any]

def begin_log(least: int) -> None: ...
def end_log() -> tuple[NDArray[Any], int]: ...
def forget() -> None: ...
def in_forked_child() -> None: ...

@final
class Marks:
    memory: Memory
    on: bool
    def __new__(cls, memory: Memory, at: int = 0) -> Self: ...
    @property
    def begun(self) -> int: ...
    def attach(self) -> None: ...
    def read(self, first: int = 0) -> NDArray[Any]: ...

@final
class Span:
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def enter_nothing() -> None: ...
def exit_nothing(kind: object, error: object, trace: object) -> None: ...

class NoSpan:
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def span(name: str, /) -> Span | NoSpan: ...
def count(name: str, n: float = 1.0) -> None: ...
