from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._memory import Mapping, Memory
from cseq._objects import ObjectTable
from cseq._plan import Reader
from cseq._run import RunState
from cseq._slots import Slots

FIELDS: Final[int]
MOST_SKIPPED: Final[int]
ALGORITHM: Final[str]
PARK_NS: Final[int]
INPUT: Final[int]
MIDDLE: Final[int]
OUTPUT: Final[int]

def derive(
    seed: SupportsIndex, epoch: SupportsIndex, purpose: int, count: int
) -> tuple[int, ...]: ...
def permutation(
    n: SupportsIndex, seed: SupportsIndex, epoch: SupportsIndex = 0
) -> NDArray[np.uint32] | NDArray[np.int64]: ...

@final
class Order:
    cut: Any
    @property
    def shuffle(self) -> bool: ...
    @property
    def indices(self) -> NDArray[np.integer[Any]] | None: ...
    def __new__(
        cls,
        n: SupportsIndex,
        *,
        shuffle: bool,
        seed: SupportsIndex,
        indices: NDArray[np.integer[Any]] | None = None,
        wide: bool = False,
    ) -> Self: ...
    def begin(self, epoch: SupportsIndex, cut: Any = None) -> None: ...
    def read_into(self, start: int, count: int, out: NDArray[np.int64]) -> None: ...
    def read(self, start: int, count: int) -> NDArray[np.int64]: ...

def wait_any(rings: list[Ring], cells: list[int], seen: int) -> None: ...
def ring_bytes(capacity: int, batch_size: int, runners: int) -> int: ...

@final
class Ring:
    memory: Final[Memory]
    arena: Slots | None
    waited_ns: Final[int]
    taken_batches: Final[int]
    taken_samples: Final[int]
    taken_bytes: Final[int]
    abandoned_count: Final[int]
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
    ) -> Self: ...
    @property
    def capacity(self) -> int: ...
    @property
    def outstanding_count(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def indices(self, cell: int) -> NDArray[np.int64]: ...
    def depths(self) -> tuple[int, int, int]: ...
    def idle_ns(self) -> list[int]: ...
    def batches(self) -> list[int]: ...
    def holder(self, cell: int) -> tuple[int, int]: ...
    def vacant(self) -> int: ...
    def post(
        self,
        cell: int,
        ticket: int,
        epoch: int,
        batch: int,
        count: int,
        start: int = 0,
        slot: int = 0,
        capacity: int = 0,
    ) -> None: ...
    def wake(self) -> None: ...
    def take(
        self, ordered: bool = True, cell: int = -1
    ) -> tuple[int, int, int, int, tuple[int, int, int, int, int, int]] | None: ...
    def notices(self) -> int: ...
    def wait(self, seen: int, ordered: bool = True, ns: int = ..., cell: int = -1) -> None: ...
    def awaited(self, ordered: bool = True) -> list[int]: ...
    def ticket(self, cell: int) -> tuple[int, int, int]: ...
    def start(self, cell: int) -> int: ...
    def token(self, cell: int) -> int: ...
    def left_in(self, cell: int) -> tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]: ...
    def abandon(self) -> None: ...
    def sweep(self) -> list[tuple[int, int]]: ...
    def held(self, owner: int) -> list[int]: ...
    def repost(self, owner: int) -> list[int]: ...
    def reclaim(self, owner: int, others: list[Ring] | None = None) -> list[int]: ...
    def notify_all(self) -> None: ...
    def close(self) -> None: ...

@final
class Runner:
    ring: Final[Ring]
    stage: Final[int]
    owner: Final[int]
    cell: Final[int]
    park: int
    def __new__(
        cls, ring: Ring, stage: int, owner: int, *, last: bool, worker: int = 0
    ) -> Self: ...
    def claim(self) -> bool | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def record(self) -> tuple[int, int, int, int, int, int]: ...
    def attach(self) -> None: ...
    def detach(self) -> None: ...
    def indices(self) -> NDArray[np.int64]: ...
    def publish(
        self, status: int = 0, record: tuple[int, ...] = (), capacity: int = 0, slot: int = -1
    ) -> None: ...

@final
class Consumer:
    run: Final[RunState]
    generation: int
    ring: Final[Ring]
    prompt: bool
    skipped: Final[deque[Any]]
    skips: Final[int]
    ticket: Final[int]
    posted: Final[int]
    place: Any
    ended: bool
    taken: Final[int]
    done: Final[int]
    batches: Final[int]
    def __new__(
        cls,
        run: RunState,
        ring: Ring,
        order: Order,
        fill: Callable[[int, NDArray[np.int64]], tuple[int, int]],
        read: Callable[[], tuple[int, Any, BaseException | None]],
        describe: Callable[[int, BaseException], tuple[BaseException, Any]],
        *,
        ordered: bool = True,
        skip_errors: bool = False,
        objects: ObjectTable | None = None,
        slots: Slots | None = None,
        extend: Callable[[], None] | None = None,
        discard: Callable[[int], None] | None = None,
        small: tuple[list[Mapping | None], Reader, int, Callable[[int, int, int], Memory]]
        | None = None,
        wait: Callable[[], Any] | None = None,
        convert: Callable[[Any], Any] | None = None,
        leaf_for: Callable[[Any], Any] | None = None,
    ) -> Self: ...
    def begin(
        self, epoch: int, cut: Sequence[int], place: Any = None, progress: Any = None
    ) -> None: ...
    def end(self) -> None: ...
    @property
    def over(self) -> bool: ...
    def refill(self) -> None: ...
    def peek(
        self,
    ) -> tuple[int, int, int, int, tuple[int, int, int, int, int, int]] | None: ...

@final
class BatchIterator:
    generation: Final[int]
    def __new__(cls, consumer: Consumer, generation: int, manager: object = None) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...

def now_ns() -> int: ...
def await_hangup(socket: int) -> None: ...
def exit_on_hangup(socket: int, grace_ns: int = 0) -> None: ...
