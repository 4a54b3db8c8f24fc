from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, final

from typing_extensions import Self

from cseq._core import Ring, _Fields
from cseq._lock import RunState
from cseq.encoding._codec import Decoder
from cseq.engine._streams import Request
from cseq.order._source import Source
from cseq.order.place import Place

MOST_SKIPPED: Final[int]

@final
class ItemFailure:
    error: BaseException
    worker: int
    def __new__(cls, error: BaseException, worker: int = -1) -> Self: ...

class _Pool(Protocol):
    @property
    def make_next(self) -> Callable[[], object] | None: ...
    @property
    def on_cancel(self) -> Callable[[int], object] | None: ...
    def await_next(self) -> None: ...
    def decode(
        self, ring_number: int, cell: int, status: int, slot: int, capacity: int, record: _Fields, /
    ) -> tuple[Any, BaseException | None]: ...
    def describe(self, ring_number: int, cell: int, error: BaseException, /) -> tuple[Any, Any]: ...
    def list_left(self, ring_number: int, cell: int, left: Any, /) -> list[Any]: ...
    def look(self) -> None: ...

@final
class Feed:
    source: Source | None
    ticket: int
    taken: int
    done: int
    position: int
    cancelled_count: int
    run: RunState
    generation: int
    place: Place | None
    ended: bool
    latest: int
    skipped: deque[Any]
    skips: int
    pool_number: int
    def __new__(
        cls,
        run: RunState,
        rings: list[Ring],
        decoder: Decoder,
        pool: _Pool,
        *,
        errors: str = "raise",
        interrupted: str = "",
    ) -> Self: ...
    def tickets(self, ring_number: int) -> list[tuple[int, int]]: ...
    def refill(self) -> int: ...
    def free_cancelled(self) -> int: ...
    def post_call(
        self,
        worker: int,
        request: Request | None,
        name: str,
        assignment: Request | None = None,
        epoch: int = 0,
    ) -> tuple[int, int]: ...
    def begin_epoch(
        self, source: Source, *, ordered: bool = True, place: Place | None = None
    ) -> None: ...
    def run_clock(self) -> None: ...
    def end(self) -> None: ...
    def advance(self) -> bool | None: ...
    def notices(self) -> int: ...
    def awaited(self) -> list[tuple[int, int]]: ...
    def wait(self, seen: int, awaited: list[tuple[int, int]] | None = None) -> None: ...
    def check(self, generation: int) -> int: ...
    def glance(self) -> object: ...
    def commit_reply(self, worker: int, cell: int, ticket: int, ends: bool = False) -> None: ...

@final
class FeedIterator:
    generation: int
    def __new__(cls, feed: Feed, generation: int, keeper: object = None) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
