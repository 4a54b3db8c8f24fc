from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
from typing_extensions import Self

ALIGNMENT: Final[int]
LONG: Final[int]
MAX_DEPTH: Final[int]

@final
class Plan:
    structure: bytes
    nodes: tuple[object, ...]
    sources: list[np.dtype[Any]] | None
    def __new__(
        cls,
        structure: bytes,
        nodes: Sequence[object],
        sources: list[np.dtype[Any]] | None = None,
    ) -> Self: ...
    def converters(
        self,
        leaf_for: Callable[[np.dtype[Any] | None], Callable[[Any], object] | None],
        convert: Callable[[Any], object],
    ) -> list[Callable[[Any], object] | None]: ...
