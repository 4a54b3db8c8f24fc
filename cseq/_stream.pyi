from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from typing_extensions import Self

from cseq._core import Ring
from cseq._lock import RunState
from cseq._memory import Mapping
from cseq._plan import Reader
from cseq._slots import Slots

ITEM: Final[int]
BEGIN: Final[int]
CALL: Final[int]
CALLED: Final[slice]
ASSIGNED: Final[slice]
ENDED: Final[int]
KEY: Final[int]
KEYS: Final[int]
NO_KEY: Final[int]
IN_REQUEST: Final[int]

@final
class Request:
    slot: Final[int]
    def __new__(cls, slots: Slots) -> Self: ...
    def locate(self, capacity: int, record: Sequence[int]) -> None: ...

@final
class StreamConsumer:
    ring: Final[Ring]
    number: Final[int]
    keyed: Final[bool]
    names: Final[list[str]]
    over: Final[bool]
    failed: Final[str]
    items: Final[int]
    nbytes: Final[int]
    def __new__(
        cls,
        ring: Ring,
        slots: Slots,
        read: Callable[
            [StreamConsumer],
            tuple[Any, str, bool, int] | None,
        ],
        *,
        number: int,
        prefetch: int,
        depth: int,
        small: tuple[list[Mapping | None], Reader, int] | None = None,
    ) -> Self: ...
    @property
    def delivered(self) -> int: ...
    def taken_slots(self) -> set[int]: ...
    def wake(self) -> None: ...
    def end(self) -> None: ...
    def begin(
        self, epoch: int, assignment: Request, name: str, keyed: bool = False
    ) -> tuple[int, int] | None: ...
    def call(self, call: Request, name: str) -> tuple[int, int]: ...
    def oldest(self) -> tuple[int, int] | None: ...
    def newest(self) -> tuple[int, int] | None: ...
    def peek(
        self, cell: int, ticket: int
    ) -> tuple[int, int, int, int, int, tuple[int, int, int, int]] | None: ...
    def holds(self, cell: int, ticket: int) -> bool: ...
    def take_reply(self, cell: int, token: int, failed: str) -> None: ...

@final
class ItemFailure:
    error: Final[BaseException]
    worker: Final[int]
    def __new__(cls, error: BaseException, worker: int = -1) -> Self: ...

@final
class ItemReader:
    run: Final[RunState]
    generation: Final[int]
    taken: Final[int]
    def __new__(
        cls,
        run: RunState,
        consumers: list[StreamConsumer],
        write: Callable[[Any, int], Request],
        wait: Callable[[list[StreamConsumer]], None],
        over: Callable[[], None],
        *,
        depth: int,
        raises: bool = True,
    ) -> Self: ...
    def end(self) -> None: ...
    def begin(
        self,
        keys: Iterator[Any] | None = None,
        *,
        ordered: bool = True,
        free: bool = False,
        first: int = 0,
    ) -> None: ...
    def open(self, generation: int) -> None: ...
    def next(self, worker: int) -> Any: ...
    def glance(self) -> Any: ...
    def peek(self) -> tuple[int, Any]: ...
    def commit(self, number: int) -> None: ...

@final
class ItemIterator:
    reader: Final[ItemReader]
    generation: Final[int]
    def __new__(cls, reader: ItemReader, *keep: Any) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
