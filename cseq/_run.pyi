from typing import final

from typing_extensions import Self

from cseq._lock import Lock

@final
class RunState:
    @property
    def generation(self) -> int: ...
    @property
    def lock(self) -> Lock: ...
    def __new__(cls) -> Self: ...
    def interrupt(self) -> int: ...
