from typing import Any, Final, final

from typing_extensions import Self, disjoint_base

from cseq._codec import Decoder
from cseq._core import Ring
from cseq._source import Request, Source

PARK_NS: int

@final
class History:
    def __new__(cls, runners: int) -> Self: ...
    def read(self) -> bytes: ...

@disjoint_base
class Line:
    history: Final[History]
    source: Final[Source | None]
    ticket: Final[int]
    abandoned_count: Final[int]
    def __new__(
        cls, run: Any, rings: list[Ring], decoder: Decoder, *_: Any, discard: Any = None, **__: Any
    ) -> Self: ...
    def refill(self) -> int: ...
    def sweep(self) -> int: ...
    def tickets(self, number: int) -> list[tuple[int, int]]: ...
    def post_call(
        self,
        number: int,
        request: Request,
        name: str,
        assignment: Request | None = None,
        epoch: int = 0,
    ) -> tuple[int, int]: ...

def wait_any(rings: list[Ring], cells: list[int], seen: int, spun: bool = False) -> None: ...
