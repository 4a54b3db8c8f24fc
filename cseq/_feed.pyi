from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, final

from typing_extensions import Self

from cseq._codec import Decoder
from cseq._core import Ring
from cseq._line import Line
from cseq._lock import RunState
from cseq._source import Source

MOST_SKIPPED: Final[int]

@final
class ItemFailure:
    error: Final[BaseException]
    worker: Final[int]
    def __new__(cls, error: BaseException, worker: int = -1) -> Self: ...

@final
class Feed(Line):
    run: Final[RunState]
    generation: int
    place: Any
    number: int
    watch: Callable[[], None] | None
    ended: Final[bool]
    failed: Final[str]
    skipped: Final[deque[Any]]
    skips: Final[int]
    def __new__(
        cls,
        run: RunState,
        rings: list[Ring],
        decoder: Decoder,
        wait: Callable[[], None],
        decode: Callable[
            [int, int, int, int, int, tuple[int, ...]], tuple[Any, BaseException | None]
        ],
        describe: Callable[[int, int, Any], tuple[Any, Any]],
        *,
        errors: Literal["raise", "skip", "return"] = "raise",
        make: Callable[[], None] | None = None,
        discard: Callable[[int], None] | None = None,
        interrupted: str = "",
    ) -> Self: ...
    def begin(self, source: Source, *, ordered: bool = True, place: Any = None) -> None: ...
    def run_clock(self) -> None: ...
    def end(self) -> None: ...
    @property
    def taken(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def position(self) -> int: ...
    def advance(self) -> bool | None: ...
    def notices(self) -> int: ...
    def awaited(self) -> list[tuple[int, int]]: ...
    def wait(self, seen: int, awaited: list[tuple[int, int]] | None = None) -> None: ...
    def check(self, generation: int) -> int: ...
    def next(self, worker: int) -> Any: ...
    def glance(self) -> Any: ...
    def peek(self) -> tuple[int, Any]: ...
    def commit_item(self, number: int) -> None: ...
    def dismiss(self, number: int, cell: int, ticket: int, failed: str = "") -> None: ...

@final
class FeedIterator:
    generation: Final[int]
    def __new__(cls, feed: Feed, generation: int, owner: object = None) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
