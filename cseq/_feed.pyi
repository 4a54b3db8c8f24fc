from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, final

from typing_extensions import Self

from cseq._core import ObjectTable, Ring
from cseq._lock import RunState
from cseq._memory import Mapping, Memory
from cseq._plan import Reader
from cseq._slots import Slots
from cseq._source import Request, Source

MOST_SKIPPED: Final[int]

@final
class ItemFailure:
    error: Final[BaseException]
    worker: Final[int]
    def __new__(cls, error: BaseException, worker: int = -1) -> Self: ...

@final
class Decoder:
    def __new__(
        cls,
        *,
        objects: ObjectTable | None = None,
        slots: Slots | None = None,
        small: tuple[list[Mapping | None], Reader, int, Callable[[int, int, int], Memory]]
        | None = None,
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
    ) -> Self: ...

@final
class Feed:
    run: Final[RunState]
    generation: int
    source: Final[Source | None]
    ticket: Final[int]
    place: Any
    ended: Final[bool]
    failed: Final[str]
    skipped: Final[deque[Any]]
    skips: Final[int]
    abandoned_count: Final[int]
    def __new__(
        cls,
        run: RunState,
        rings: list[Ring],
        decoder: Decoder,
        wait: Callable[[], None],
        decode: Callable[
            [int, int, int, int, int, tuple[int, ...]], tuple[Any, BaseException | None]
        ],
        describe: Callable[[int, int, BaseException], tuple[BaseException, Any]],
        *,
        errors: Literal["raise", "skip", "return"] = "raise",
        make: Callable[[], None] | None = None,
        discard: Callable[[int], None] | None = None,
        interrupted: str = "",
    ) -> Self: ...
    def begin(self, source: Source, *, ordered: bool = True, place: Any = None) -> None: ...
    def end(self) -> None: ...
    @property
    def taken(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def position(self) -> int: ...
    def refill(self) -> int: ...
    def sweep(self) -> int: ...
    def advance(self) -> bool | None: ...
    def notices(self) -> int: ...
    def awaited(self) -> list[tuple[int, int]]: ...
    def wait(self, seen: int, awaited: list[tuple[int, int]] | None = None) -> None: ...
    def check(self, generation: int) -> int: ...
    def next(self, worker: int) -> Any: ...
    def glance(self) -> Any: ...
    def peek(self) -> tuple[int, Any]: ...
    def commit_item(self, number: int) -> None: ...
    def tickets(self, number: int) -> list[tuple[int, int]]: ...
    def post_call(
        self,
        number: int,
        request: Request,
        name: str,
        assignment: Request | None = None,
        epoch: int = 0,
    ) -> tuple[int, int]: ...
    def dismiss(self, number: int, cell: int, ticket: int, failed: str = "") -> None: ...

@final
class FeedIterator:
    generation: Final[int]
    def __new__(cls, feed: Feed, generation: int, owner: object = None) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
