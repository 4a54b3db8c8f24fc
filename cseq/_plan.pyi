from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
from typing_extensions import Self

from cseq._memory import Memory

ALIGNMENT: Final[int]
LONG: Final[int]

@final
class Plan:
    structure: Final[bytes]
    token: Final[Any]
    leaves: Final[list[tuple[np.dtype[Any], int, int]]]
    sources: Final[list[np.dtype[Any]] | None]
    cast: Final[np.dtype[Any] | None]
    casts: Final[list[bool]]
    def __new__(
        cls,
        structure: bytes,
        token: Any,
        leaves: list[tuple[np.dtype[Any], int, int]],
        cast: np.dtype[Any] | None = None,
        sources: list[np.dtype[Any]] | None = None,
    ) -> Self: ...
    def converters(
        self,
        leaf_for: Callable[[np.dtype[Any] | None], Any],
        convert: Callable[[Any], Any] | None,
    ) -> list[Any]: ...

@final
class Reader:
    load: Final[Callable[[Memory, int, int, Memory | None], list[Any]]]
    plans: Final[dict[bytes, Plan]]
    def __new__(
        cls,
        parse: Callable[[bytes], Plan],
        load: Callable[[Memory, int, int, Memory | None], list[Any]],
    ) -> Self: ...
    def decode(
        self,
        memory: Memory,
        record: Sequence[int],
        lend: Callable[[int, int, int], Memory | None] | None = None,
        slot: int = -1,
        capacity: int = 0,
    ) -> Any: ...

def is_plain(value: object) -> bool: ...
