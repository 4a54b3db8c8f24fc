from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from cseq._core import Reader

class Source:
    epoch: int
    consumed: int
    keyed: bool
    def finish(self) -> int: ...

@final
class OrderSource(Source):
    reader: Reader
    def __new__(
        cls, reader: Reader, epoch: int, cut: dict[str, int], later: dict[str, int], more: int
    ) -> Self: ...
    def __len__(self) -> int: ...
    def samples(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
