from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, SupportsIndex, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self, disjoint_base

from cseq._memory import Memory, Slots
from cseq.order.base import Order

FIELDS: Final[int]
ALGORITHMS: Final[tuple[str, str]]
FEISTEL_LEAST: Final[int]
PARK_NS: Final[int]

def derive(
    seed: SupportsIndex, epoch: SupportsIndex, purpose: int, count: int
) -> tuple[int, ...]: ...
def permutation(
    n: SupportsIndex,
    seed: SupportsIndex,
    epoch: SupportsIndex = 0,
    algorithm: str = "fisher-yates-v1",
) -> NDArray[np.uint32] | NDArray[np.int64]: ...

@disjoint_base
class Reader:
    units: Final[int]
    seed: Final[int]
    room: Final[int]
    def samples(
        self, epoch: SupportsIndex, start: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

@final
class RangeReader(Reader):
    def __new__(cls, n: SupportsIndex, seed: int = 0) -> Self: ...

@final
class FeistelReader(Reader):
    def __new__(cls, n: SupportsIndex, seed: SupportsIndex) -> Self: ...

@final
class TableReader(Reader):
    def __new__(cls, n: SupportsIndex, seed: SupportsIndex, *, wide: bool = False) -> Self: ...

def ring_bytes(capacity: int, batch_size: int, runners: int) -> int: ...

@final
class Ring:
    memory: Final[Memory]
    runners: Final[int]
    outstanding: Final[int]
    limit: Final[int]
    kept: Final[list[Any]]  # of a queue; else None
    wake_at: int
    spin: tuple[int, int]
    wake_ns: Final[tuple[int, int]]
    gil_spin: int
    apart: int
    def __new__(
        cls,
        memory: Memory,
        capacity: int = 0,
        batch_size: int = 1,
        runners: int = 1,
        calls: int = 0,
        at: int = 0,
        limit: int = 0,
        *,
        threads: bool = False,
    ) -> Self: ...
    @property
    def capacity(self) -> int: ...
    @property
    def closed(self) -> int: ...
    def fit(self, limit: int, indexers: int, converters: int = 0) -> None: ...
    def indices(self, cell: int) -> NDArray[np.int64]: ...
    def depths(self) -> tuple[int, int, int]: ...
    def published(self, owner: int) -> int: ...
    def meters(self) -> bytes: ...
    def holder(self, cell: int) -> tuple[int, int]: ...
    def post(
        self,
        cell: int,
        ticket: int,
        epoch: int,
        batch: int,
        count: int,
        start: int = 0,
        seed: int = 0,
    ) -> None: ...
    def wake(self) -> None: ...
    def peek(
        self, cell: int, ticket: int
    ) -> tuple[int, int, int, tuple[int, int, int, int, int, int]] | tuple[()] | None: ...
    def retire(self, cell: int) -> None: ...
    def notices(self) -> int: ...
    def wait(self, seen: int, cell: int = -1, ns: int = ...) -> None: ...
    def expect(self, cell: int, last: int, seen: int) -> bool: ...
    def ticket(self, cell: int) -> tuple[int, int, int]: ...
    def start(self, cell: int) -> int: ...
    def token(self, cell: int) -> int: ...
    def stamps(self, cell: int) -> tuple[tuple[int, int], tuple[int, int]]: ...
    def left_in(self, cell: int) -> tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]: ...
    def held(self, owner: int) -> list[int]: ...
    def repost(self, owner: int, status: int = 0) -> list[int]: ...
    def slots(self) -> set[int]: ...
    def notify_all(self) -> None: ...
    def close(self) -> None: ...

def now_ns() -> int: ...

MARKS: int
COUNT: int
TAKEN: np.dtype[Any]
MARK: np.dtype[Any]

def begin_log(size: int) -> None: ...
def end_log() -> tuple[NDArray[Any], int]: ...
def attach_marks(fd: int, own: Ring | None = None) -> None: ...
def trace_here(number: int) -> None: ...
def trace_workers(ring: Ring, number: int) -> None: ...
def in_forked_child() -> None: ...

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
def check_depth() -> int: ...
def is_deep(depth: int = 0) -> bool: ...

@final
class Lock:
    @property
    def is_mine(self) -> bool: ...
    def acquire(self, timeout: float = -1.0) -> bool: ...
    def release(self) -> None: ...
    def hold(self, timeout: float = -1.0) -> Hold: ...
    def refuse_mine(self) -> int: ...
    def put_off(self, call: Callable[[], object]) -> None: ...

@final
class Hold:
    @property
    def has(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

@final
class Latch:
    def set(self) -> None: ...
    def wait(self, timeout: float = -1.0) -> bool: ...

@final
class RunState:
    @property
    def generation(self) -> int: ...
    @property
    def lock(self) -> Lock: ...
    def __new__(cls) -> Self: ...
    def interrupt(self) -> int: ...

def await_hangup(socket: int) -> None: ...
def exit_on_hangup(socket: int, grace_ns: int = 0) -> None: ...

_Ints: TypeAlias = NDArray[np.int64]
_Read: TypeAlias = tuple[NDArray[np.integer[Any]], _Ints | None]

CHUNK: Final[int]
AHEAD: Final[int]
BLOCKS: Final[int]
WINDOW: Final[int]
UNITS: Final[int]
MEMBERS: Final[int]
MIXTURE: Final[int]
SOURCE: Final[int]
WEIGHTS: Final[int]
GROUPS: Final[int]

def fingerprint(array: ArrayLike) -> int: ...
def shuffle(
    n: int, seed: int, epoch: int, purpose: int, key: int
) -> NDArray[np.uint32] | NDArray[np.int64]: ...
def seed_of(seed: int, name: str) -> int: ...
def drawn(
    places: _Ints, below: int, seed: int, epoch: int, purpose: int, key: int = ...
) -> NDArray[np.uint64]: ...

@final
class Permutation:
    table: Final[NDArray[np.uint32] | None]
    def __new__(cls, n: int, seed: int, epoch: int, purpose: int, key: int = ...) -> Self: ...
    def at(self, places: _Ints) -> NDArray[np.uint32] | _Ints: ...
    def find(self, element: int) -> int: ...

_Share: TypeAlias = Callable[[int, int, int, int, int], _Ints]

@final
class ArrayReader(Reader):
    call: Final[Callable[[int, _Ints], _Read]]
    share: Final[_Share | None]
    ahead: Final[int]
    def __new__(
        cls,
        order: Order | Reader,
        seed: int,
        read: Callable[[int, _Ints], _Read],
        share: _Share | None = None,
        ahead: int = ...,
    ) -> Self: ...

def gather(reader: Reader, epoch: int, units: _Ints) -> tuple[_Ints, _Ints | None]: ...

ITEM: Final[int]
BEGIN: Final[int]
CALL: Final[int]
CALLED: Final[slice]
ASSIGNED: Final[slice]
KEY: Final[int]
KEYS: Final[int]
NO_KEY: Final[int]
IN_REQUEST: Final[int]

@disjoint_base
class Source:
    epoch: Final[int]
    consumed: Final[int]
    keyed: Final[bool]

@final
class OrderSource(Source):
    reader: Final[Reader]
    def __new__(
        cls,
        reader: Reader,
        epoch: int,
        cut: Sequence[int],
        later: Sequence[int] | None = None,
        more: int = 0,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def samples(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

@final
class Request:
    slot: Final[int]
    def __new__(cls, slots: Slots) -> Self: ...
    def locate(self, capacity: int, record: Sequence[int]) -> None: ...

@disjoint_base
class StreamSource(Source): ...

@final
class ItemSource(StreamSource):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        *,
        depth: int,
        first: int = 0,
    ) -> Self: ...
    def open(self) -> None: ...

@final
class KeySource(StreamSource):
    def __new__(
        cls,
        rings: list[Ring],
        epoch: int,
        assignments: list[Request],
        keys: Iterator[Any],
        pickle: Callable[[Any, int], Request],
        *,
        depth: int,
        first: int,
        prefetch: int,
        in_order: bool,
        free: bool,
        samples: Callable[[Any], int] | None = None,
    ) -> Self: ...
    def open(self) -> None: ...
