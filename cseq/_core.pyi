from typing import Any, Final, SupportsIndex, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._memory import Memory

_Fields: TypeAlias = tuple[int, int, int, int]

FIELDS: Final[int]
ITEM: Final[int]
CALL: Final[int]
CALLED: Final[slice]
ASSIGNED: Final[slice]
KEY: Final[int]
KEYS: Final[int]
NO_KEY: Final[int]
IN_REQUEST: Final[int]
ALGORITHMS: Final[tuple[str, str]]
FEISTEL_LEAST: Final[int]

def derive(
    seed: SupportsIndex, epoch: SupportsIndex, purpose: int, count: int
) -> tuple[int, ...]: ...
def permutation(
    n: SupportsIndex,
    seed: SupportsIndex,
    epoch: SupportsIndex = 0,
    algorithm: str = "fisher-yates-v1",
) -> NDArray[np.uint32] | NDArray[np.int64]: ...
def ring_bytes(capacity: int, batch_size: int, runners: int) -> int: ...
def now_ns() -> int: ...

class Reader:
    units: int
    seed: int
    room: int
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
    def __new__(cls, n: SupportsIndex, seed: SupportsIndex) -> Self: ...

@final
class Turns:
    on: bool
    holder: int
    def __new__(cls, runners: int) -> Self: ...
    def learn(self, before: int, awake: int, taken: int) -> None: ...

@final
class Ring:
    capacity: int
    closed: int
    limit: int
    kept: list[Any]
    wake_at: int
    first_entry: int
    turns: Turns | None
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
    def published(self, owner: int) -> int: ...
    def meters(self) -> bytes: ...
    def set_spin(self, ns: int, crew: int = 0) -> None: ...
    def fit(self, limit: int, indexers: int) -> None: ...
    def indices(self, cell: int) -> NDArray[np.int64]: ...
    def depths(self) -> tuple[int, int, int]: ...
    def holder(self, cell: int) -> tuple[int, int]: ...
    def wake(self) -> None: ...
    def peek(self, cell: int, ticket: int) -> tuple[()] | tuple[int, int, int, _Fields] | None: ...
    def ticket(self, cell: int) -> tuple[int, int, int]: ...
    def start(self, cell: int) -> int: ...
    def token(self, cell: int) -> int: ...
    def left_in(self, cell: int) -> tuple[int, int, int, int, _Fields, _Fields]: ...
    def held(self, owner: int) -> list[int]: ...
    def repost(self, owner: int, status: int = 0) -> list[int]: ...
    def slots(self) -> set[int]: ...
    def notify_all(self) -> None: ...
    def close(self) -> None: ...
